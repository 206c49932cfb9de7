"""The lane decoder for CPUs with AVX-512: 32 lanes in two registers, tables read by gathers.

The kernels are bit-equal to the scalar ones in `lane_kernels` and to the reference in `lanes`; where the CPU lacks the
instructions (`AVAILABLE` is False) the scalar kernels run instead. `vector_emit` says how a step works.

An expand load reads only the words that lanes need, at most 16 from `pos`; `pos` is clamped to `limit - 16`, so that nothing
past `limit` is read. A caller makes `limit` at least 32 words larger than the stream and then compares `pos` with the
stream's length: a damaged stream that runs on is found there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from lazyweights.codecs.vector_emit import AVAILABLE, I8, I16, I32, I64, VEC, VEC8, Emitter, N, splat

__all__ = [
    "AVAILABLE",
    "decode_cells_pair",
    "decode_cells_phase",
    "decode_rans_full",
    "decode_side_phase",
    "decode_side_streams",
]


AHEAD_WORDS = 1024
"""How far ahead of the lanes words are asked for: the processor itself does not look past the end of a page."""


@intrinsic
def _cells(typingctx, words, pos, last, tables, offsets, n_cells, cell_length, null, n_lanes, out, buf, held):  # type: ignore[no-untyped-def]
    """Decode `n_cells` cells for the first `n_lanes` of 32 lanes; return the new pos."""
    signature = types.int64(words, pos, last, tables, offsets, n_cells, cell_length, null, n_lanes, out, buf, held)

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        e = Emitter(context, builder, signature, args)
        b = builder
        _, pos, last, _, _, n_cells, cell_length, null, n_lanes, _, _, _ = args
        words_p, tables_p, offsets_p, out_p = (e.data(i) for i in (0, 3, 4, 9))
        buf_p, held_p = e.data(10), e.data(11)
        lanes = e.load_state(buf_p, held_p, 2)
        active = e.first_lanes(n_lanes, 2)
        pos_v = cgutils.alloca_once_value(b, pos)
        out_v = cgutils.alloca_once_value(b, e.index(0))
        quads = b.lshr(b.add(cell_length, e.index(3)), e.index(2))
        null_table = b.lshr(e.broadcast(b.trunc(null, I32)), splat(11))
        with cgutils.for_range(b, n_cells) as cell:
            at = b.mul(cell.index, e.index(32))
            tables_of = [b.lshr(e.load(offsets_p, b.add(at, e.index(N * v))), splat(11)) for v in range(2)]
            with cgutils.for_range(b, quads) as quad:
                left = b.sub(cell_length, b.mul(quad.index, e.index(4)))
                present = [e.broadcast(b.icmp_signed(">", left, e.index(k))) for k in range(4)]
                entries: list[list[Any]] = [[], []]
                for place in (0, 2):
                    # A quad with one or two symbols takes no third refill: skip it as the encoder does.
                    for v in range(2):
                        allowed = b.and_(active[v], present[2]) if place else active[v]
                        state, p = e.refill(e.get(lanes[v]), words_p, b.load(pos_v), last, allowed)
                        b.store(p, pos_v)
                        window = e.window(state)
                        for k in (place, place + 1):
                            table = b.select(present[k], tables_of[v], null_table) if k else tables_of[v]
                            entry = e.decode(window, tables_p, table)
                            entries[v].append(entry)
                            state[2] = b.sub(state[2], entry)
                            window = e.skip(window, entry)
                        e.set(lanes[v], state)
                o = b.load(out_v)
                for v in range(2):
                    e.store(e.pack_symbols(entries[v]), out_p, b.add(o, e.index(N * v)))
                b.store(b.add(o, e.index(32)), out_v)
        e.store_state(lanes, buf_p, held_p, active)
        return b.load(pos_v)

    return signature, codegen


def _side_intrinsic(n_streams: int) -> Any:
    """Return the intrinsic that decodes side planes of `n_streams` streams at a time."""
    n_vectors = 2 * n_streams

    @intrinsic
    def side(typingctx, words, pos, last, tables, offsets, kind, base, other, n_columns, n_lanes, out, buf, held):  # type: ignore[no-untyped-def]
        """Decode one phase of a side plane for the 32 lanes of each stream; `other` and `out` are (streams, columns, 32)."""
        signature = types.void(words, pos, last, tables, offsets, kind, base, other, n_columns, n_lanes, out, buf, held)

        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            e = Emitter(context, builder, signature, args)
            b = builder
            last, kind, base, n_columns = args[2], args[5], args[6], args[8]
            words_p, pos_p, tables_p, offsets_p, other_p, out_p = (e.data(i) for i in (0, 1, 3, 4, 7, 10))
            buf_p, held_p = e.data(11), e.data(12)
            active = e.first_lanes(args[9], 2) if n_streams == 1 else [None] * n_vectors
            lanes = e.load_state(buf_p, held_p, n_vectors)
            pos_v = [cgutils.alloca_once_value(b, b.load(b.gep(pos_p, [e.index(s)]))) for s in range(n_streams)]
            means = [cgutils.alloca_once_value(b, splat(0)) for _ in range(n_vectors)]
            stream_size = b.mul(n_columns, e.index(32))
            base_vector = e.broadcast(b.trunc(base, I32))
            table_numbers = [b.lshr(e.load(offsets_p, e.index(N * i)), splat(11)) for i in range(2)]
            first_table = b.shuffle_vector(table_numbers[0], table_numbers[0], ir.Constant(VEC, [0] * N))

            def columns(table_of: Any) -> None:
                with cgutils.for_range(b, n_columns) as column:
                    at = b.mul(column.index, e.index(32))
                    first = e.broadcast(b.icmp_signed("==", column.index, e.index(0)))
                    for v in range(n_vectors):
                        state, p = e.refill(e.get(lanes[v]), words_p, b.load(pos_v[v // 2]), last, active[v])
                        b.store(p, pos_v[v // 2])
                        place = b.add(at, e.index(N * (v % 2)))
                        if v > 1:
                            place = b.add(place, b.mul(stream_size, e.index(v // 2)))
                        entry = e.decode(e.window(state), tables_p, table_of(v, place, first))
                        state[2] = b.sub(state[2], entry)
                        e.set(lanes[v], state)
                        symbols = b.and_(b.lshr(entry, splat(8)), splat(255))
                        e.store(b.trunc(symbols, VEC8), out_p, place)
                        if table_of is by_mean:
                            mean = b.load(means[v])
                            scaled = b.shl(symbols, splat(4))
                            moved = b.add(mean, b.ashr(b.sub(scaled, mean), splat(2)))
                            b.store(b.select(first, scaled, moved), means[v])

            def by_mean(v: int, place: Any, first: Any) -> Any:
                mean = b.ashr(b.add(b.load(means[v]), splat(8)), splat(4))
                context_ = b.add(e.clamp(b.sub(mean, base_vector), 0, 30), splat(1))
                return e.look_up_32(table_numbers, b.select(first, splat(0), context_))

            def by_other(v: int, place: Any, first: Any) -> Any:
                return e.look_up_32(table_numbers, b.lshr(b.zext(e.load(other_p, place, VEC8), VEC), splat(3)))

            def by_nothing(v: int, place: Any, first: Any) -> Any:
                return first_table

            for number, table_of in enumerate((by_nothing, by_mean, by_other)):
                with b.if_then(b.icmp_signed("==", kind, e.index(number))):
                    columns(table_of)
            e.store_state(lanes, buf_p, held_p, active if n_streams == 1 else None)
            for s in range(n_streams):
                b.store(b.load(pos_v[s]), b.gep(pos_p, [e.index(s)]))
            return context.get_dummy_value()

        return signature, codegen

    return side


_side_1, _side_2, _side_4 = (_side_intrinsic(n) for n in (1, 2, 4))


def _put_forced_nibbles(e: Emitter, quads: list[Any], positions: Any) -> list[Any]:
    """Undo the swaps of forced codes (`container.forced_codes`) in the 32 nibbles that 16 lanes hold in four vectors."""
    b = e.b
    quads = list(quads)

    def place(index: Any) -> tuple[Any, Any, Any]:
        """Shift of a nibble in its vector, and the two bits of the vector's number as masks."""
        shift = b.shl(b.and_(index, splat(3)), splat(3))
        shift = b.or_(shift, b.and_(b.lshr(index, splat(2)), splat(4)))
        odd, high = (b.icmp_unsigned("!=", b.and_(index, splat(bit)), splat(0)) for bit in (4, 8))
        return shift, odd, high

    def get(shift: Any, odd: Any, high: Any) -> Any:
        value = b.select(high, b.select(odd, quads[3], quads[2]), b.select(odd, quads[1], quads[0]))
        return b.and_(b.lshr(value, shift), splat(15))

    def put(shift: Any, odd: Any, high: Any, value: int) -> None:
        bits = b.shl(splat(15), shift)
        if value == 0:
            bits = b.xor(bits, splat(0xFFFFFFFF))
        for k in range(4):
            here = b.and_(odd if k & 1 else b.not_(odd), high if k & 2 else b.not_(high))
            changed = b.or_(quads[k], bits) if value else b.and_(quads[k], bits)
            quads[k] = b.select(here, changed, quads[k])

    # Codes 15 and 31 are the nibbles of byte 15: 0 and 15 before the swaps are undone, the last swap first.
    quads[3] = b.or_(b.and_(quads[3], splat(0x00FFFFFF)), splat(0xF0000000))
    where = place(positions)
    value = get(*where)
    quads[3] = b.or_(b.and_(quads[3], splat(0x0FFFFFFF)), b.shl(value, splat(28)))
    put(*where, 15)
    where = place(b.lshr(positions, splat(5)))
    value = get(*where)
    quads[3] = b.or_(b.and_(quads[3], splat(0xF0FFFFFF)), b.shl(value, splat(24)))
    put(*where, 0)
    return quads


HALF = ir.VectorType(I32, 8)


def _halves(first: int, second: int) -> ir.Constant:
    """Return eight numbers: four times `first`, for the codes 0 .. 15 of a cell, and four times `second`, for the others."""
    return ir.Constant(HALF, [first] * 4 + [second] * 4)


def _low_bits_of(e: Emitter, words: Any, at: Any, low_bits: int) -> Callable[[int], Any]:
    """Return a function that returns the low bits of one of 16 lanes: in bytes i and i + 16 of 32 those of codes i and i + 16.

    Those of code i stand lowest in both, above them those of code i + 16. `at` is the element (of 32 bits) of `words` where
    the low bits of the first lane start.
    """
    b = e.b
    if low_bits == 4:

        def load(lane: int) -> Any:
            part = e.load(words, b.add(at, e.index(4 * lane)), ir.VectorType(I32, 4))
            return b.shuffle_vector(part, part, ir.Constant(HALF, [0, 1, 2, 3, 0, 1, 2, 3]))

        return load
    bits = e.load(words, at)
    bytes32 = ir.VectorType(I8, 32)
    # Byte i of a lane takes the eight bits from bit 2 i of its word on.
    starts = ir.Constant(bytes32, [2 * i for i in range(16)] * 2)

    def spread(lane: int) -> Any:
        word = b.bitcast(b.shuffle_vector(bits, bits, ir.Constant(HALF, [lane] * 8)), bytes32)
        return b.bitcast(e.call("llvm.x86.avx512.pmultishift.qb.256", bytes32, starts, word), HALF)

    return spread


def _store_split(
    e: Emitter, rows: list[Any], low_of: Callable[[int], Any], low_bits: int, out: Any, at: Any, lane_stride: Any
) -> None:
    """Store the 32 codes of each of 16 lanes; `rows`: their symbols as `Emitter.transpose_quads` returns them."""
    b = e.b
    for lane in range(N):
        order = ir.Constant(HALF, [4 * (lane // 4) + i for i in range(4)] * 2)
        symbols = b.shuffle_vector(rows[lane % 4], rows[lane % 4], order)
        high = e.call("llvm.fshl.v8i32", HALF, symbols, symbols, _halves(low_bits, 32 - 4 + low_bits))
        low = b.lshr(low_of(lane), _halves(0, low_bits))
        codes = e.select_bits(0x01010101 * ((1 << low_bits) - 1), low, high)
        if low_bits == 1:
            codes = b.and_(codes, _halves(0x1F1F1F1F, 0x1F1F1F1F))
        e.store(codes, out, at)
        at = b.add(at, lane_stride)


PLAIN_CELLS, FORCED_NIBBLES, SPLIT_1, SPLIT_4 = 0, 1, 2, 3
"""What becomes of the symbols of a cell: bytes as they are; of forced nibbles, put back; codes, with 1 or 4 low bits."""


def _cells_intrinsic(kind: int) -> Any:
    """Return the intrinsic that decodes cells of two streams at a time, 32 lanes each, and stores them as rows.

    Streams are independent chains of dependent instructions: two of them hide the latency of the gathers. There is one
    intrinsic for each kind of cells, since a choice in the loop would leave less to be kept in registers.
    """
    n_streams = 2
    n_vectors = 2 * n_streams

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        e = Emitter(context, builder, signature, args)
        b = builder
        last, n_cells, cell_length, last_table = args[2], args[5], args[6], args[7]
        words_p, pos_p, tables_p, offsets_p, out_p, bases_p, strides_p = (e.data(i) for i in (0, 1, 3, 4, 8, 9, 10))
        positions_p = e.data(11)
        buf_p, held_p = e.data(12), e.data(13)
        lanes = e.load_state(buf_p, held_p, n_vectors)

        def of_streams(pointer: Any, first: int) -> list[Any]:
            return [b.load(b.gep(pointer, [e.index(first + s)])) for s in range(n_streams)]

        pos_v = [cgutils.alloca_once_value(b, p) for p in of_streams(pos_p, 0)]
        base_v = [cgutils.alloca_once_value(b, base) for base in of_streams(bases_p, 0)]
        positions_at, low_at = of_streams(bases_p, n_streams), of_streams(bases_p, 2 * n_streams)
        lane_stride, cell_stride = (b.load(b.gep(strides_p, [e.index(i)])) for i in range(2))
        chunks = b.lshr(b.add(cell_length, e.index(15)), e.index(4))
        table_of_rest = b.lshr(e.broadcast(b.trunc(last_table, I32)), splat(11))
        stream_offsets = b.mul(n_cells, e.index(32))

        def store(v: int, quads: list[Any], place: Any, target: Any) -> None:
            """Store what 16 symbols of 16 lanes become; `place`: of the first lane in the 32 lanes of all cells of a stream."""
            if kind == FORCED_NIBBLES:
                quads = _put_forced_nibbles(e, quads, e.load(positions_p, b.add(place, positions_at[v // 2])))
            rows = e.transpose_quads(quads)
            if kind in (PLAIN_CELLS, FORCED_NIBBLES):
                e.store_rows(rows, out_p, target, lane_stride)
                return
            low_bits = 1 if kind == SPLIT_1 else 4
            low_of = _low_bits_of(e, words_p, b.add(low_at[v // 2], b.mul(place, e.index(low_bits))), low_bits)
            _store_split(e, rows, low_of, low_bits, out_p, target, lane_stride)

        with cgutils.for_range(b, n_cells) as cell:
            at = b.mul(cell.index, e.index(32))
            places = [b.add(at, e.index(N * (v % 2))) for v in range(n_vectors)]
            of_tables = [b.add(place, b.mul(stream_offsets, e.index(v // 2))) for v, place in enumerate(places)]
            tables_of = [b.lshr(e.load(offsets_p, place), splat(11)) for place in of_tables]
            with cgutils.for_range(b, chunks) as chunk:
                left = b.sub(cell_length, b.mul(chunk.index, e.index(16)))
                present = {k: e.broadcast(b.icmp_signed(">", left, e.index(k))) for k in (14, 15)}
                quads: list[list[Any]] = [[] for _ in range(n_vectors)]
                pairs: list[list[Any]] = [[] for _ in range(n_vectors)]
                entries: list[list[Any]] = [[] for _ in range(n_vectors)]
                for position in range(0, 16, 2):
                    windows = []
                    for v in range(n_vectors):
                        allowed = present[14] if position == 14 else None
                        state, p = e.refill(e.get(lanes[v]), words_p, b.load(pos_v[v // 2]), last, allowed)
                        b.store(p, pos_v[v // 2])
                        e.set(lanes[v], state)
                        windows.append(e.window(state))
                        if position % 4 == 0 and v % 2 == 0:
                            e.prefetch(words_p, b.add(p, e.index(AHEAD_WORDS)))
                    for k in (position, position + 1):
                        for v in range(n_vectors):
                            table = b.select(present[k], tables_of[v], table_of_rest) if k >= 14 else tables_of[v]
                            entry = e.decode(windows[v], tables_p, table)
                            windows[v] = e.skip(windows[v], entry)
                            b.store(b.sub(b.load(lanes[v][2]), entry), lanes[v][2])
                            entries[v].append(entry)
                            if k % 2:
                                pairs[v].append(e.pack_pair(*entries[v]))
                                entries[v] = []
                            if k % 4 == 3:
                                quads[v].append(e.join_pairs(*pairs[v]))
                                pairs[v] = []
                for v in range(n_vectors):
                    target = b.add(b.load(base_v[v // 2]), b.mul(chunk.index, e.index(16)))
                    target = b.add(target, b.mul(cell.index, cell_stride))
                    if v % 2:
                        target = b.add(target, b.mul(lane_stride, e.index(N)))
                    store(v, quads[v], places[v], target)
        e.store_state(lanes, buf_p, held_p)
        for s in range(n_streams):
            b.store(b.load(pos_v[s]), b.gep(pos_p, [e.index(s)]))
        return context.get_dummy_value()

    @intrinsic
    def cells(typingctx, words, pos, last, tables, offsets, n_cells, cell_length, last_table, out, bases, strides, positions, buf, held):  # type: ignore[no-untyped-def]  # noqa: E501
        signature = types.void(
            words, pos, last, tables, offsets, n_cells, cell_length, last_table, out, bases, strides, positions, buf, held
        )
        return signature, codegen

    return cells


_cells_plain, _cells_nibbles, _cells_split_1, _cells_split_4 = (
    _cells_intrinsic(kind) for kind in (PLAIN_CELLS, FORCED_NIBBLES, SPLIT_1, SPLIT_4)
)


@njit(inline="always")
def _table_of_rest(tables: np.ndarray, last_table: int) -> int:
    """Offset of the table with which what is behind the last symbol of a cell is decoded: one of empty codewords, if any."""
    return np.int64(tables.size - 16 - 2048) if last_table < 0 else np.int64(last_table)


@njit(cache=True, nogil=True)
def decode_cells_phase(words, limit, tables, offsets, cell_length, last_table, n_lanes, out, buf, held, pos):  # type: ignore[no-untyped-def]
    """Vector twin of `lane_kernels._decode_cells_scalar`; same arguments."""
    pos[0] = _cells(
        words, np.int64(pos[0]), np.int64(limit - 16), tables, offsets, np.int64(offsets.shape[0]), np.int64(cell_length),
        _table_of_rest(tables, last_table), np.int64(n_lanes), out, buf, held,
    )


@njit(cache=True, nogil=True)
def decode_side_phase(words, limit, tables, offsets, kind, base, other, n_lanes, out, buf, held, pos):  # type: ignore[no-untyped-def]
    """Vector twin of `lane_kernels._decode_side_scalar`; same arguments."""
    _side_1(
        words, pos, np.int64(limit - 16), tables, offsets, np.int64(kind), np.int64(base), other, np.int64(out.shape[0]),
        np.int64(n_lanes), out, buf, held,
    )


@njit(cache=True, nogil=True)
def decode_cells_pair(words, limit, tables, offsets, cell_length, last_table, out, bases, strides, kind, positions, buf, held, pos):  # type: ignore[no-untyped-def]  # noqa: E501
    """Decode one phase of a plane of two full row groups and store the symbols as rows of bytes.

    Parameters
    ----------
    words : uint32, all streams; `limit` as in the module
    tables : uint16 of `canonical.decode_tables`
    offsets : int32 (2, cells, 32), table offset of each cell
    cell_length : symbols of a cell: 14, 15 or 16 modulo 16
    last_table : offset of the table of one symbol more at the end of each cell, whose length is then 15; -1: there is none
    out : uint8, flat
    bases : int64 (6,), for each stream where in `out` the first cell of lane 0 goes; then for each where its `positions`
        start; then for each where in `words` the low bits of its split codes do
    strides : int64 (2,), bytes from lane to lane and from cell to cell; a cell is written in whole 16-byte pieces
    kind : PLAIN_CELLS; FORCED_NIBBLES: put back forced nibbles (cells of 15 symbols of two codes each); SPLIT_1 or SPLIT_4:
        join 16 symbols and the low bits of 32 codes of 5 or 8 bits (`codecs.split_codes`)
    positions : int32, flat, the positions of forced nibbles: 32 lanes of each cell
    buf : uint64 (2, 32), held : int32 (2, 32), pos : int64 (2,), decoder states; `pos` counts in `words`
    """
    last, n_cells, length = np.int64(limit - 16), np.int64(offsets.shape[1]), np.int64(cell_length)
    rest = _table_of_rest(tables, last_table)
    if kind == PLAIN_CELLS:
        _cells_plain(
            words, pos, last, tables, offsets, n_cells, length, rest, out, bases, strides, positions, buf, held
        )
    elif kind == FORCED_NIBBLES:
        _cells_nibbles(
            words, pos, last, tables, offsets, n_cells, length, rest, out, bases, strides, positions, buf, held
        )
    elif kind == SPLIT_1:
        _cells_split_1(
            words, pos, last, tables, offsets, n_cells, length, rest, out, bases, strides, positions, buf, held
        )
    else:
        _cells_split_4(
            words, pos, last, tables, offsets, n_cells, length, rest, out, bases, strides, positions, buf, held
        )


@njit(cache=True, nogil=True)
def decode_side_streams(words, limit, tables, offsets, kind, base, other, out, buf, held, pos):  # type: ignore[no-untyped-def]
    """Decode one phase of a side plane of 2 or 4 full row groups; `other` and `out` are uint8 (streams, columns, 32)."""
    last = np.int64(limit - 16)
    columns = np.int64(out.shape[1])
    kind, base, n_lanes = np.int64(kind), np.int64(base), np.int64(32)
    if buf.size == 128:
        _side_4(words, pos, last, tables, offsets, kind, base, other, columns, n_lanes, out, buf, held)
    else:
        _side_2(words, pos, last, tables, offsets, kind, base, other, columns, n_lanes, out, buf, held)


@intrinsic
def _rans_cells(typingctx, words, pos, last, tables, offsets, n_cells, cell_length, out, states):  # type: ignore[no-untyped-def]
    """Decode `n_cells` cells of a rANS stream for 32 lanes."""
    signature = types.void(words, pos, last, tables, offsets, n_cells, cell_length, out, states)

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        e = Emitter(context, builder, signature, args)
        b = builder
        last, n_cells, cell_length = args[2], args[5], args[6]
        words_p, pos_p, tables_p, offsets_p, out_p, states_p = (e.data(i) for i in (0, 1, 3, 4, 7, 8))
        state_v = [cgutils.alloca_once_value(b, e.load(states_p, e.index(N * g))) for g in range(2)]
        pos_v = cgutils.alloca_once_value(b, b.load(pos_p))
        out_v = cgutils.alloca_once_value(b, e.index(0))
        packed_v = [cgutils.alloca_once_value(b, splat(0)) for _ in range(2)]
        words16 = ir.VectorType(I16, N)
        with cgutils.for_range(b, n_cells) as cell:
            at = b.mul(cell.index, e.index(32))
            tables_of = [e.load(offsets_p, b.add(at, e.index(N * g))) for g in range(2)]
            with cgutils.for_range(b, cell_length) as position:
                place = b.trunc(b.and_(position.index, e.index(3)), I32)
                shift = e.broadcast(b.shl(place, ir.Constant(I32, 3)))
                fresh = e.broadcast(b.icmp_signed("==", place, ir.Constant(I32, 0)))
                for g in range(2):
                    x = b.load(state_v[g])
                    entry = e.gather(tables_p, b.add(b.and_(x, splat(4095)), tables_of[g]), 4)
                    freq = b.add(b.and_(b.lshr(entry, splat(8)), splat(4095)), splat(1))
                    x = b.add(b.mul(freq, b.lshr(x, splat(12))), b.lshr(entry, splat(20)))
                    need = b.icmp_unsigned("<", x, splat(65536))
                    p = b.load(pos_v)
                    zero = ir.Constant(words16, [0] * N)
                    word = e.call("llvm.masked.expandload.v16i16", words16, b.gep(words_p, [p]), need, zero)
                    count = e.call("llvm.ctpop.i16", I16, b.bitcast(need, I16))
                    p = b.add(p, b.zext(count, I64))
                    b.store(b.select(b.icmp_signed("<", p, last), p, last), pos_v)
                    b.store(b.select(need, b.or_(b.shl(x, splat(16)), b.zext(word, VEC)), x), state_v[g])
                    packed = b.select(fresh, splat(0), b.load(packed_v[g]))
                    packed = b.or_(packed, b.shl(b.and_(entry, splat(255)), shift))
                    b.store(packed, packed_v[g])
                    quad = b.add(b.load(out_v), b.mul(b.lshr(position.index, e.index(2)), e.index(32)))
                    e.store(packed, out_p, b.add(quad, e.index(N * g)))
            quads = b.lshr(b.add(cell_length, e.index(3)), e.index(2))
            b.store(b.add(b.load(out_v), b.mul(quads, e.index(32))), out_v)
        for g in range(2):
            e.store(b.load(state_v[g]), states_p, e.index(N * g))
        b.store(b.load(pos_v), pos_p)
        return context.get_dummy_value()

    return signature, codegen


@njit(cache=True, nogil=True)
def decode_rans_full(words, limit, tables, offsets, cell_length, out, states, pos):  # type: ignore[no-untyped-def]
    """Vector twin of `rans.decode_rans_scalar` for a phase in which all 32 lanes have a row."""
    _rans_cells(
        words, pos, np.int64(limit - 16), tables, offsets, np.int64(offsets.shape[0]), np.int64(cell_length), out, states
    )
