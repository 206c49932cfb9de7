"""The rANS encoder for CPUs with AVX-512: 32 lanes in two registers, frequencies read by gathers, no division of integers.

It is bit-equal to `rans._encode_phase_scalar`. What one step of 16 lanes does, from the last symbol to the first:

    entry   = gather(freqs + 256 table + symbol)     freq | cum_freq << 16
    need    = x >> 20 >= freq                        to a mask
    at     -= popcount(need)
    scratch[at ...] = compress(x & 0xFFFF, need)     vpcompressw; lower lanes stand first
    x       = x >> 16  where need
    q       = trunc(float(x) * (c / float(freq)))    the quotient or one less
    r       = x - q freq
    x       = (q << 12) + r + cum_freq, and 4096 - freq more where r >= freq

A quotient is below 2**20. Four roundings to 24 bits and ``c = 1 - 2**-21`` put the product below the true quotient by less than
0.8, so truncating it gives the quotient or one less, and the last line is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from lazyweights.codecs.vector_emit import I16, I32, I64, MASK, VEC, VEC8, Emitter, N, splat

_VEC16 = ir.VectorType(I16, N)
_FLOATS = ir.VectorType(ir.FloatType(), N)
_NEARLY_ONE = ir.Constant(_FLOATS, [1 - 2.0**-21] * N)


class _Lanes:
    """Emits the steps of 32 lanes: their states and the place of the last word written."""

    def __init__(self, e: Emitter, freqs: Any, states: Any, scratch: Any, at: Any) -> None:
        self._e = e
        self._freqs = freqs
        self._states_p = states
        self._scratch = scratch
        self._at = cgutils.alloca_once_value(e.b, at)
        self._states = [cgutils.alloca_once_value(e.b, e.load(states, e.index(N * g))) for g in range(2)]
        self._fewest = cgutils.alloca_once_value(e.b, splat(4096))

    def step(self, tables: list[Any], symbols: list[Any]) -> None:
        """Encode one symbol of each lane; `tables` are numbers of entries."""
        e = self._e
        b = e.b
        for g in (1, 0):
            entry = e.gather(self._freqs, b.add(tables[g], symbols[g]), 4)
            freq = b.and_(entry, splat(0xFFFF))
            b.store(e.call("llvm.umin.v16i32", VEC, b.load(self._fewest), freq), self._fewest)
            divisor = b.uitofp(e.call("llvm.umax.v16i32", VEC, freq, splat(1)), _FLOATS)
            x = b.load(self._states[g])
            need = b.icmp_unsigned(">=", b.lshr(x, splat(20)), freq)
            count = e.call("llvm.ctpop.i16", I16, b.bitcast(need, I16))
            at = b.sub(b.load(self._at), b.zext(count, I64))
            b.store(at, self._at)
            zero = ir.Constant(_VEC16, [0] * N)
            words = e.call("llvm.x86.avx512.mask.compress.v16i16", _VEC16, b.trunc(x, _VEC16), zero, need)
            first = b.sub(b.shl(ir.Constant(I32, 1), b.zext(count, I32)), ir.Constant(I32, 1))
            where = b.bitcast(b.gep(self._scratch, [at]), _VEC16.as_pointer())
            mask = b.bitcast(b.trunc(first, I16), MASK)
            e.call("llvm.masked.store.v16i16.p0v16i16", ir.VoidType(), words, where, ir.Constant(I32, 2), mask)
            x = b.select(need, b.lshr(x, splat(16)), x)
            quotient = b.fptoui(b.fmul(b.uitofp(x, _FLOATS), b.fdiv(_NEARLY_ONE, divisor)), VEC)
            rest = b.sub(x, b.mul(quotient, freq))
            more = b.select(b.icmp_unsigned(">=", rest, freq), b.sub(splat(4096), freq), splat(0))
            x = b.add(b.add(b.shl(quotient, splat(12)), rest), b.add(b.lshr(entry, splat(16)), more))
            b.store(x, self._states[g])

    def finish(self) -> Any:
        """Store the states; return (int64) the place of the last word, or -1 where a symbol had no frequency."""
        e = self._e
        b = e.b
        for g in range(2):
            e.store(b.load(self._states[g]), self._states_p, e.index(N * g))
        missing = b.bitcast(b.icmp_unsigned("==", b.load(self._fewest), splat(0)), I16)
        return b.select(b.icmp_unsigned("==", missing, ir.Constant(I16, 0)), b.load(self._at), e.index(-1))


def _backwards(e: Emitter, n: Any) -> Any:
    """A loop over n - 1 .. 0; gives a function from the loop to its number."""
    return cgutils.for_range(e.b, n), lambda loop: e.b.sub(e.b.sub(n, e.index(1)), loop.index)


def _load_tables(e: Emitter, tables: Any, at: Any) -> list[Any]:
    """Return where the tables of 32 lanes start, in entries."""
    return [e.b.shl(e.b.zext(e.load(tables, e.b.add(at, e.index(N * g)), VEC8), VEC), splat(8)) for g in range(2)]


def _rows_codegen(table_of_symbol: bool) -> Callable[..., Any]:
    """Return what emits the encoder of cells whose symbols stand side by side in a row: read four at a time.

    `table_of_symbol`: each symbol has a table, and there is one cell; else each cell has one.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emitter(context, builder, signature, args)
        b = builder
        base, lane_stride, cell_stride, cell_length, table_at, n_cells, at = (args[i] for i in (1, 2, 3, 4, 6, 7, 11))
        symbols_p, tables_p = e.data(0), e.data(5)
        lanes = _Lanes(e, e.data(8), e.data(9), e.data(10), at)
        rows = b.mul(ir.Constant(VEC, list(range(N))), e.broadcast(b.trunc(lane_stride, I32)))
        half = b.mul(lane_stride, e.index(N))

        def four(place: Any) -> list[Any]:
            return [e.gather(b.gep(symbols_p, [b.add(place, half) if g else place]), rows, 1) for g in range(2)]

        def tables_of(cell_tables: list[Any], position: Any) -> list[Any]:
            if not table_of_symbol:
                return cell_tables
            return _load_tables(e, tables_p, b.add(table_at, b.mul(position, e.index(32))))

        quads = b.lshr(cell_length, e.index(2))
        n_whole = b.shl(quads, e.index(2))
        cells, cell_of = _backwards(e, n_cells)
        with cells as cell_loop:
            cell = cell_of(cell_loop)
            first = b.add(base, b.mul(cell, cell_stride))
            mine = [] if table_of_symbol else _load_tables(e, tables_p, b.add(table_at, b.mul(cell, e.index(32))))
            singles, single_of = _backwards(e, b.sub(cell_length, n_whole))
            with singles as loop:  # the symbols behind the last quad: each is the last of the four that are read
                position = b.add(n_whole, single_of(loop))
                packed = four(b.sub(b.add(first, position), e.index(3)))
                lanes.step(tables_of(mine, position), [b.lshr(p, splat(24)) for p in packed])
            all_quads, quad_of = _backwards(e, quads)
            with all_quads as loop:
                position = b.shl(quad_of(loop), e.index(2))
                packed = four(b.add(first, position))
                for k in (3, 2, 1, 0):
                    symbols = [b.and_(b.lshr(p, splat(8 * k)), splat(255)) for p in packed]
                    lanes.step(tables_of(mine, b.add(position, e.index(k))), symbols)
        return lanes.finish()

    return codegen


@intrinsic
def _cells(typingctx, symbols, base, lane_stride, cell_stride, cell_length, tables, table_at, n_cells, freqs, states, scratch, at):  # type: ignore[no-untyped-def]  # noqa: E501
    """Encode cells of at least four symbols, with a table each."""
    signature = types.int64(
        symbols, base, lane_stride, cell_stride, cell_length, tables, table_at, n_cells, freqs, states, scratch, at
    )
    return signature, _rows_codegen(False)


@intrinsic
def _row(typingctx, symbols, base, lane_stride, cell_stride, cell_length, tables, table_at, n_cells, freqs, states, scratch, at):  # type: ignore[no-untyped-def]
    """Encode one cell of at least four symbols, which have a table each."""
    signature = types.int64(
        symbols, base, lane_stride, cell_stride, cell_length, tables, table_at, n_cells, freqs, states, scratch, at
    )
    return signature, _rows_codegen(True)


@intrinsic
def _columns(typingctx, symbols, base, cell_stride, tables, table_at, n_cells, freqs, states, scratch, at):  # type: ignore[no-untyped-def]
    """Encode cells of one symbol, those of 32 lanes side by side."""
    signature = types.int64(symbols, base, cell_stride, tables, table_at, n_cells, freqs, states, scratch, at)

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        e = Emitter(context, builder, signature, args)
        b = builder
        base, cell_stride, table_at, n_cells, at = (args[i] for i in (1, 2, 4, 5, 9))
        symbols_p, tables_p = e.data(0), e.data(3)
        lanes = _Lanes(e, e.data(6), e.data(7), e.data(8), at)
        cells, cell_of = _backwards(e, n_cells)
        with cells as loop:
            cell = cell_of(loop)
            place = b.add(base, b.mul(cell, cell_stride))
            symbols = [b.zext(e.load(symbols_p, b.add(place, e.index(N * g)), VEC8), VEC) for g in range(2)]
            lanes.step(_load_tables(e, tables_p, b.add(table_at, b.mul(cell, e.index(32)))), symbols)
        return lanes.finish()

    return signature, codegen


@njit(cache=True, nogil=True)
def encode_rans_full(symbols, base, strides, tables, phase, freqs, cell_length, states, scratch, at):  # type: ignore[no-untyped-def]
    """Vector twin of `rans._encode_phase_scalar` for a phase in which all 32 lanes have a row.

    `strides` are such that `can_encode` holds, and `scratch` has room for a word a symbol before `at`.
    """
    _, cell_stride, _, lane_stride = strides
    n_cells = tables.shape[1]
    table_at = np.int64(phase * n_cells * 32)
    if lane_stride == 1:
        return _columns(
            symbols,
            np.int64(base),
            np.int64(cell_stride),
            tables,
            table_at,
            np.int64(n_cells),
            freqs,
            states,
            scratch,
            np.int64(at),
        )
    if cell_length > 1:
        return _cells(
            symbols,
            np.int64(base),
            np.int64(lane_stride),
            np.int64(cell_stride),
            np.int64(cell_length),
            tables,
            table_at,
            np.int64(n_cells),
            freqs,
            states,
            scratch,
            np.int64(at),
        )
    return _row(
        symbols,
        np.int64(base),
        np.int64(lane_stride),
        np.int64(0),
        np.int64(n_cells),
        tables,
        table_at,
        np.int64(1),
        freqs,
        states,
        scratch,
        np.int64(at),
    )


@njit(cache=True, nogil=True)
def can_encode(strides: tuple, cell_length: int, n_cells: int) -> bool:
    """Return whether `encode_rans_full` knows how symbols with these strides (phase, cell, position, lane) stand."""
    _, cell_stride, position_stride, lane_stride = strides
    if lane_stride == 1:
        return cell_length == 1
    in_row = position_stride == 1 and 16 * lane_stride < 1 << 31
    return in_row and (cell_length >= 4 or (cell_length == 1 and cell_stride == 1 and n_cells >= 4))
