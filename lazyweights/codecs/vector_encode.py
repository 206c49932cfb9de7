"""The lane encoder for CPUs with AVX-512: 32 lanes in two registers, entries read by gathers, words written by scatters.

It writes each word where the decoder will take it. Which lanes take a word before a step follows from the bits that they
have consumed so far, which the encoder knows too; so at each step it gives the lanes that take a word the next places of the
stream, and writes the words there when their bits are known. After a refill a lane holds 32 to 63 bits, so it has at most two
words whose place is known and whose bits are not yet. What one step of 16 lanes does:

    need     = held < 32                           compare to a mask
    second   = pos + expand(0 .. 15, need)         vpexpandd
    pos     += popcount(need)
    entry    = gather(entries + offset + symbol)   of two symbols
    full     = open bits + length >= 32
    scatter(words, first, full)                    vpscatterdd
    first    = full ? second : first

It is bit-equal to the scalar kernels in `lane_encode`, which run instead where the CPU lacks AVX-512 VBMI2, and where a phase
has fewer than 32 rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from lazyweights.codecs.vector_emit import I8, I16, I32, VEC, VEC8, Emitter, N, splat

_IOTA = ir.Constant(VEC, list(range(N)))


class _Lanes:
    """Emits the steps of 32 lanes: `bits`, `held`, `first` and `second` (see `lane_encode`) of two groups, and `pos`."""

    def __init__(self, e: Emitter, entries: Any, words: Any, state: Any, pos: Any) -> None:
        b = e.b
        self._e = e
        self._entries = entries
        self._words = b.bitcast(words, I8.as_pointer())
        self._state = state
        self._pos = pos
        self._groups = [
            [cgutils.alloca_once_value(b, e.load(state, e.index(32 * row + N * g))) for row in range(4)] for g in range(2)
        ]
        self._pos_v = cgutils.alloca_once_value(b, b.trunc(b.load(pos), I32))
        self._seen = cgutils.alloca_once_value(b, splat(0))

    def step(self, offsets: list[list[Any]], symbols: list[list[Any]]) -> None:
        """Take words, then append one or two symbols a lane: `symbols[k][g]` with the tables at `offsets[k][g]`."""
        e = self._e
        b = e.b
        for g in range(2):
            bits, held, first, second = e.get(self._groups[g])
            need = b.icmp_unsigned("<", held, splat(32))
            pos = b.load(self._pos_v)
            places = e.call("llvm.x86.avx512.mask.expand.v16i32", VEC, _IOTA, splat(0), need)
            second = b.select(need, b.add(places, e.broadcast(pos)), second)
            held = b.select(need, b.add(held, splat(32)), held)
            count = e.call("llvm.ctpop.i16", I16, b.bitcast(need, I16))
            b.store(b.add(pos, b.zext(count, I32)), self._pos_v)
            e.set(self._groups[g], [bits, held, first, second])
        for g in range(2):
            bits, held, first, second = e.get(self._groups[g])
            seen = b.load(self._seen)
            added = length = None
            for tables, symbol in zip(offsets, symbols, strict=True):
                # Entries are 16 bits wide: the other half of what is gathered belongs to the next one.
                entry = e.gather(self._entries, b.add(tables[g], symbol[g]), 2)
                seen = b.or_(seen, entry)
                codeword = b.and_(b.shl(entry, splat(16)), splat(0xFFE00000))
                codeword_length = b.and_(entry, splat(15))
                if added is None:
                    added, length = codeword, codeword_length
                else:
                    added = b.or_(added, b.lshr(codeword, length))
                    length = b.add(length, codeword_length)
            b.store(seen, self._seen)
            n_open = b.and_(b.sub(splat(0), held), splat(31))
            word = b.or_(bits, b.lshr(added, n_open))
            rest = e.call("llvm.fshr.v16i32", VEC, added, splat(0), n_open)
            full = b.icmp_unsigned(">", b.add(n_open, length), splat(31))
            self._scatter(word, first, full)
            bits = b.select(full, rest, word)
            first = b.select(full, second, first)
            e.set(self._groups[g], [bits, b.sub(held, length), first, second])

    def _scatter(self, values: Any, places: Any, mask: Any) -> None:
        void = ir.VoidType()
        name = "llvm.x86.avx512.mask.scatter.dpi.512"
        self._e.call(name, void, self._words, mask, places, values, ir.Constant(I32, 4))

    def finish(self) -> Any:
        """Store the state; return (int64) whether a symbol without codeword was met."""
        e = self._e
        b = e.b
        for g in range(2):
            for row in range(4):
                e.store(b.load(self._groups[g][row]), self._state, e.index(32 * row + N * g))
        b.store(b.zext(b.load(self._pos_v), ir.IntType(64)), self._pos)
        missing = b.icmp_unsigned("!=", b.and_(b.load(self._seen), splat(16)), splat(0))
        return b.zext(b.bitcast(missing, I16), ir.IntType(64))


@intrinsic
def _cells(typingctx, symbols, at, lane_stride, cell_stride, cell_length, last_table, contexts, context_at, n_cells, offsets, entries, words, state, pos):  # type: ignore[no-untyped-def]  # noqa: E501
    """Encode `n_cells` cells of 32 lanes, whose symbols are read four at a time."""
    signature = types.int64(
        symbols, at, lane_stride, cell_stride, cell_length, last_table, contexts, context_at, n_cells, offsets, entries, words,
        state, pos,
    )

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        e = Emitter(context, builder, signature, args)
        b = builder
        at, lane_stride, cell_stride, cell_length, last, context_at, n_cells = (args[i] for i in (1, 2, 3, 4, 5, 7, 8))
        symbols_p, contexts_p, offsets_p, entries_p = (e.data(i) for i in (0, 6, 9, 10))
        lanes = _Lanes(e, entries_p, e.data(11), e.data(12), e.data(13))
        rows = b.mul(_IOTA, e.broadcast(b.trunc(lane_stride, I32)))
        half = b.mul(lane_stride, e.index(N))
        quads = b.lshr(cell_length, e.index(2))
        last_table = [e.broadcast(b.trunc(last, I32))] * 2

        def quad(place: Any, tables: list[Any], n: int, ends: bool = False) -> None:
            """Append `n` symbols; `ends`: the last of them has a table of its own."""
            packed = [e.gather(b.gep(symbols_p, [b.add(place, half) if g else place]), rows, 1) for g in range(2)]
            split = [[b.and_(b.lshr(packed[g], splat(8 * k)), splat(255)) for g in range(2)] for k in range(n)]
            of_symbols = [tables] * n
            if ends:
                of_symbols[-1] = last_table
            for k in range(0, n, 2):
                lanes.step(of_symbols[k : k + 2], split[k : k + 2])

        # A loop for each number of symbols behind the last whole quad; 4: three and one with a table of its own.
        left = b.and_(cell_length, e.index(3))
        left = b.select(b.icmp_signed("<", last, e.index(0)), left, e.index(4))
        for n in range(5):
            with b.if_then(b.icmp_signed("==", left, e.index(n))), cgutils.for_range(b, n_cells) as cell:
                first = b.add(at, b.mul(cell.index, cell_stride))
                of_cell = b.add(context_at, b.mul(cell.index, e.index(32)))
                tables = [
                    e.gather(offsets_p, e.load(contexts_p, b.add(of_cell, e.index(N * g))), 4) for g in range(2)
                ]
                with cgutils.for_range(b, quads) as q:
                    quad(b.add(first, b.mul(q.index, e.index(4))), tables, 4)
                if n:
                    quad(b.add(first, b.mul(quads, e.index(4))), tables, n, n == 4)
        return lanes.finish()

    return signature, codegen


@intrinsic
def _side(typingctx, symbols, contexts, at, n_columns, offsets, entries, words, state, pos):  # type: ignore[no-untyped-def]
    """Encode `n_columns` columns of a side plane, 32 symbols each, one after the other."""
    signature = types.int64(symbols, contexts, at, n_columns, offsets, entries, words, state, pos)

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        e = Emitter(context, builder, signature, args)
        b = builder
        symbols_p, contexts_p, offsets_p, entries_p = (e.data(i) for i in (0, 1, 4, 5))
        lanes = _Lanes(e, entries_p, e.data(6), e.data(7), e.data(8))
        with cgutils.for_range(b, args[3]) as column:
            place = b.add(args[2], b.mul(column.index, e.index(32)))
            tables = []
            symbols = []
            for g in range(2):
                here = b.add(place, e.index(N * g))
                tables.append(e.gather(offsets_p, b.zext(e.load(contexts_p, here, VEC8), VEC), 4))
                symbols.append(b.zext(e.load(symbols_p, here, VEC8), VEC))
            lanes.step([tables], [symbols])
        return lanes.finish()

    return signature, codegen


@njit(cache=True, nogil=True)
def encode_cells_phase(symbols, at, lane_stride, cell_stride, cell_length, last_table, contexts, phase, offsets, entries, words, state, pos):  # type: ignore[no-untyped-def]  # noqa: E501
    """Vector twin of `lane_encode._encode_cells_scalar` for a phase in which all 32 lanes have a row.

    Cells are read in whole quads: `cell_stride` is at least `cell_length`, rounded up to a multiple of 4, and that much of
    `symbols` is there for the last cell too. Offsets of rows are below 2**31.
    """
    n_cells = contexts.shape[1]
    return _cells(
        symbols, np.int64(at), np.int64(lane_stride), np.int64(cell_stride), np.int64(cell_length), np.int64(last_table),
        contexts, np.int64(phase * n_cells * 32), np.int64(n_cells), offsets, entries, words, state, pos,
    )


@njit(cache=True, nogil=True)
def encode_side_phase(symbols, contexts, phase, offsets, entries, words, state, pos):  # type: ignore[no-untyped-def]
    """Vector twin of `lane_encode._encode_side_scalar` for a phase in which all 32 lanes have a row."""
    n_columns = contexts.shape[1]
    return _side(
        symbols, contexts, np.int64(phase * n_columns * 32), np.int64(n_columns), offsets, entries, words, state, pos
    )
