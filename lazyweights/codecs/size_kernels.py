"""What contexts take under tables: the product of counts and code lengths, exact, in one thread.

A library's matrix product would do, but it starts threads of its own, which stand in each other's way when the machine is
busy. Contexts are multiplied eight at a time with 32 tables at a time, so that all sums stay in registers. Most contexts are
small enough for float32, in which integers below 2**24 are exact whatever the order of summation; the others take float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_ROWS, _LANES = 8, 16
_I64 = ir.IntType(64)
_VEC = ir.VectorType(ir.FloatType(), _LANES)


@intrinsic
def _multiply(typingctx: Any, rows: Any, costs: Any, n_symbols: Any, n_tables: Any, out: Any) -> Any:
    """Set `out` (8, n_tables) to ``rows @ costs``: float32 (8, n_symbols) and (n_symbols, n_tables), multiples of 32 tables."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        b = builder
        rows_p, costs_p, out_p = (
            context.make_array(signature.args[i])(context, builder, args[i]).data for i in (0, 1, 4)
        )
        n_symbols, n_tables = args[2], args[3]

        def vector(pointer: Any, at: Any) -> Any:
            return b.bitcast(b.gep(pointer, [at]), _VEC.as_pointer())

        def broadcast(scalar: Any) -> Any:
            undefined = ir.Constant(_VEC, ir.Undefined)
            first = b.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0))
            zeros = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [0] * _LANES)
            return b.shuffle_vector(first, undefined, zeros)

        def index(value: int) -> Any:
            return ir.Constant(_I64, value)

        zero = ir.Constant(_VEC, [0.0] * _LANES)
        with cgutils.for_range(b, b.lshr(n_tables, index(5))) as part:
            first = b.mul(part.index, index(32))
            sums = [[cgutils.alloca_once(b, _VEC) for _ in range(2)] for _ in range(_ROWS)]
            for row in range(_ROWS):
                for half in range(2):
                    b.store(zero, sums[row][half])
            with cgutils.for_range(b, n_symbols) as symbol:
                cost = []
                for half in range(2):
                    place = b.add(b.add(b.mul(symbol.index, n_tables), first), index(_LANES * half))
                    value = b.load(vector(costs_p, place))
                    value.align = 4
                    cost.append(value)
                for row in range(_ROWS):
                    place = b.add(symbol.index, b.mul(n_symbols, index(row)))
                    amount = broadcast(b.load(b.gep(rows_p, [place])))
                    for half in range(2):
                        product = b.fmul(amount, cost[half], flags=("contract",))
                        b.store(b.fadd(b.load(sums[row][half]), product, flags=("contract",)), sums[row][half])
            for row in range(_ROWS):
                for half in range(2):
                    place = b.add(b.add(b.mul(n_tables, index(row)), first), index(_LANES * half))
                    b.store(b.load(sums[row][half]), vector(out_p, place)).align = 4
        return context.get_dummy_value()

    return types.void(rows, costs, n_symbols, n_tables, out), codegen


@njit(cache=True, nogil=True)
def _fill(counts: np.ndarray, costs: np.ndarray, out: np.ndarray, best: np.ndarray, totals_of: np.ndarray) -> None:
    """Fill `out`, float64 (n_contexts, n_tables), or if it is empty `best`, int64 (n_contexts,), and its sums of counts."""
    n_contexts, n_symbols = counts.shape
    n_tables = costs.shape[0]
    padded = (n_tables + 31) // 32 * 32
    narrow_costs = np.zeros((n_symbols, padded), np.float32)
    highest = 0.0
    for t in range(n_tables):
        for s in range(n_symbols):
            narrow_costs[s, t] = costs[t, s]
            highest = max(highest, costs[t, s])
    rows = np.zeros((8, n_symbols), np.float32)
    products = np.zeros((8, padded), np.float32)
    totals = np.zeros(8, np.uint64)
    sums = np.zeros(n_tables, np.float64)
    for first in range(0, n_contexts, 8):
        n_rows = min(8, n_contexts - first)
        for i in range(n_rows):
            total = np.uint64(0)
            for s in range(np.uint64(n_symbols)):
                rows[i, s] = counts[first + i, s]
                total += np.uint64(counts[first + i, s])
            totals[i] = total
        _multiply(rows, narrow_costs, np.int64(n_symbols), np.int64(padded), products)
        for i in range(n_rows):
            if np.float64(totals[i]) * highest < 16777216.0:
                for t in range(np.uint64(n_tables)):
                    sums[t] = products[i, t]
            else:
                for t in range(n_tables):
                    total_cost = 0.0
                    for s in range(n_symbols):
                        total_cost += np.float64(counts[first + i, s]) * costs[t, s]
                    sums[t] = total_cost
            if out.size:
                for t in range(np.uint64(n_tables)):  # `out[first + i] = sums` takes four times as long to compile
                    out[first + i, t] = sums[t]
            else:
                smallest = 0
                for t in range(1, n_tables):
                    smallest = t if sums[t] < sums[smallest] else smallest
                best[first + i] = smallest
                for s in range(np.uint64(n_symbols)):
                    totals_of[smallest, s] += np.int64(counts[first + i, s])


def all_sizes(counts: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Return ``counts @ costs.T``, exact.

    Parameters
    ----------
    counts : ndarray of uint32, shape (n_contexts, n_symbols)
    costs : ndarray of float64, shape (n_tables, n_symbols)
        Integers, not negative. All sums must be below 2**53.

    Returns
    -------
    ndarray of float64, shape (n_contexts, n_tables)
    """
    out = np.empty((len(counts), len(costs)))
    _fill(counts, costs, out, np.empty(0, np.int64), np.empty((0, 0), np.int64))
    return out


def smallest_sizes(counts: np.ndarray, costs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first smallest column in each row of `all_sizes`, int64 (n_contexts,), and the counts that each column gets.

    The latter are the sums of the rows of `counts` by that column, int64 (n_tables, n_symbols).
    """
    best = np.empty(len(counts), np.int64)
    totals = np.zeros(costs.shape, np.int64)
    _fill(counts, costs, np.empty((0, 0)), best, totals)
    return best, totals
