"""rANS rows for CPUs with AVX-512: 32 lanes in two registers, tables chosen for each symbol of a row.

The kernel is bit-equal to `rans.decode_rows_scalar`. All lanes decode the same column at a time, and the columns of one class
share sixteen tables, one for each level of a row; so a table number is one permutation of the sixteen that stand side by side.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from lazyweights.codecs.vector_emit import I16, I64, VEC, Emitter, N, splat

__all__ = ["decode_rows_full"]


def _rows_intrinsic(n_streams: int) -> Any:
    """Return the intrinsic that decodes rows of `n_streams` streams at a time, 32 lanes each."""
    n_vectors = 2 * n_streams
    words16 = ir.VectorType(I16, N)

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        e = Emitter(context, builder, signature, args)
        b = builder
        last, n_symbols, cell_symbols, n_coded = args[2], args[7], args[8], args[9]
        words_p, pos_p, tables_p, offsets_p, columns_p, levels_p = (e.data(i) for i in (0, 1, 3, 4, 5, 6))
        out_p, bases_p, strides_p, states_p = (e.data(i) for i in (10, 11, 12, 13))
        state_v = [cgutils.alloca_once_value(b, e.load(states_p, e.index(N * v))) for v in range(n_vectors)]
        pos_v = [cgutils.alloca_once_value(b, b.load(b.gep(pos_p, [e.index(s)]))) for s in range(n_streams)]
        base_v = [b.load(b.gep(bases_p, [e.index(s)])) for s in range(n_streams)]
        lane_stride, cell_stride = (b.load(b.gep(strides_p, [e.index(i)])) for i in range(2))
        stream_levels = b.mul(b.udiv(n_symbols, cell_symbols), e.index(32))

        def step(v: int, offsets: Any, level: Any, present: Any) -> Any:
            """Decode one symbol of 16 lanes; return the entries."""
            x = b.load(state_v[v])
            table = e.call("llvm.x86.avx512.permvar.si.512", VEC, offsets, level)
            entry = e.gather(tables_p, b.add(b.and_(x, splat(4095)), table), 4)
            freq = b.add(b.and_(b.lshr(entry, splat(8)), splat(4095)), splat(1))
            moved = b.add(b.mul(freq, b.lshr(x, splat(12))), b.lshr(entry, splat(20)))
            if present is not None:
                moved = b.select(present, moved, x)
            need = b.icmp_unsigned("<", moved, splat(65536))
            p = b.load(pos_v[v // 2])
            zero = ir.Constant(words16, [0] * N)
            word = e.call("llvm.masked.expandload.v16i16", words16, b.gep(words_p, [p]), need, zero)
            count = e.call("llvm.ctpop.i16", I16, b.bitcast(need, I16))
            p = b.add(p, b.zext(count, I64))
            b.store(b.select(b.icmp_signed("<", p, last), p, last), pos_v[v // 2])
            b.store(b.select(need, b.or_(b.shl(moved, splat(16)), b.zext(word, VEC)), moved), state_v[v])
            return entry

        with cgutils.for_range(b, b.lshr(n_symbols, e.index(4))) as chunk:
            first = b.mul(chunk.index, e.index(16))
            quads: list[list[Any]] = [[] for _ in range(n_vectors)]
            for quad in range(4):
                cell = b.udiv(b.add(first, e.index(4 * quad)), cell_symbols)
                at = b.mul(cell, e.index(32))
                levels = []
                for v in range(n_vectors):
                    place = b.add(b.add(at, e.index(N * (v % 2))), b.mul(stream_levels, e.index(v // 2)))
                    levels.append(e.load(levels_p, place))
                entries: list[list[Any]] = [[] for _ in range(n_vectors)]
                for k in range(4 * quad, 4 * quad + 4):
                    column = b.add(first, e.index(k))
                    of_class = b.zext(b.load(b.gep(columns_p, [column])), I64)
                    offsets = e.load(offsets_p, b.mul(of_class, e.index(16)))
                    present = e.broadcast(b.icmp_signed("<", column, n_coded)) if k == 15 else None
                    for v in range(n_vectors):
                        entries[v].append(step(v, offsets, levels[v], present))
                for v in range(n_vectors):
                    low = e.select_bits(0xFF, entries[v][0], b.shl(entries[v][1], splat(8)))
                    high = e.select_bits(0xFF, entries[v][2], b.shl(entries[v][3], splat(8)))
                    quads[v].append(e.select_bits(0xFFFF, low, b.shl(high, splat(16))))
            cell = b.udiv(first, cell_symbols)
            target_of_chunk = b.add(b.mul(cell, cell_stride), b.urem(first, cell_symbols))
            for v in range(n_vectors):
                target = b.add(base_v[v // 2], target_of_chunk)
                if v % 2:
                    target = b.add(target, b.mul(lane_stride, e.index(N)))
                e.store_rows(e.transpose_quads(quads[v]), out_p, target, lane_stride)
        for v in range(n_vectors):
            e.store(b.load(state_v[v]), states_p, e.index(N * v))
        for s in range(n_streams):
            b.store(b.load(pos_v[s]), b.gep(pos_p, [e.index(s)]))
        return context.get_dummy_value()

    @intrinsic
    def rows(typingctx, words, pos, last, tables, offsets, columns, levels, n_symbols, cell_symbols, n_coded, out, bases, strides, states):  # type: ignore[no-untyped-def]  # noqa: E501
        signature = types.void(
            words, pos, last, tables, offsets, columns, levels, n_symbols, cell_symbols, n_coded, out, bases, strides, states
        )
        return signature, codegen

    return rows


_rows_1, _rows_2 = (_rows_intrinsic(n) for n in (1, 2))


@njit(cache=True, nogil=True)
def decode_rows_full(words, limit, tables, offsets, columns, levels, cell_symbols, n_coded, out, bases, strides, states, pos):  # type: ignore[no-untyped-def]
    """Decode one phase of the symbols of one or two full row groups; arguments as for `rans.decode_rows_scalar`.

    `levels` int32 (streams, cells, 32), `states` uint32 (streams, 32), `pos` and `bases` int64 (streams,).
    """
    last = np.int64(limit - 16)
    n, length, coded = np.int64(columns.size), np.int64(cell_symbols), np.int64(n_coded)
    if pos.size == 1:
        _rows_1(words, pos, last, tables, offsets, columns, levels, n, length, coded, out, bases, strides, states)
    else:
        _rows_2(words, pos, last, tables, offsets, columns, levels, n, length, coded, out, bases, strides, states)
