"""Row groups in numba, decoding: words to plane arrays or straight to packed blocks.

The parameter tables are those of `group_encode`. Two full row groups are decoded at a time where the machine has vector
kernels: their streams are independent, which hides the latency of table look-ups.
"""

from __future__ import annotations

import numpy as np
from numba import njit, uint32

from lazyweights.codecs.byte_access import store_u16, store_u32
from lazyweights.codecs.lane_kernels import (
    decode_cells_pair,
    decode_cells_phase,
    decode_side_phase,
    decode_side_streams,
    left_over_bits,
)
from lazyweights.codecs.rans import decode_rans_phase
from lazyweights.codecs.split_codes import LAST_CONTEXT, join_split
from lazyweights.codecs.vector_emit import AVAILABLE as VECTOR
from lazyweights.codecs.vector_fields import cell_offsets_of_phase, join_words
from lazyweights.codecs.vector_kernels import FORCED_NIBBLES, PLAIN_CELLS, SPLIT_1, SPLIT_4
from lazyweights.container.bit_kernels import unpack_bits, unpack_many
from lazyweights.container.cell_contexts import cell_contexts
from lazyweights.container.forced_codes import forced_bits, put_forced, put_forced_phase, put_window
from lazyweights.container.group_encode import columns_of, side_offsets_of

GROUP_OK, GROUP_DAMAGED, GROUP_LEFT_OUT = 0, 2, 3
"""Status of a row group; GROUP_LEFT_OUT: not decoded, because it would have been decoded with a damaged one."""

FORCED_GROUP, PLAIN_GROUP, SKIPPED_GROUP = 0, 1, 2
"""Kinds of row groups for `decode_groups`."""


@njit(cache=True, nogil=True)
def scatter_symbols(
    packed: np.ndarray, phase: int, n_lanes: int, symbols: np.ndarray, cell_stride: int, offset: int, n_cell: int
) -> None:
    """Write the decoder's packed symbols uint32 (cells, quads, 32) of one phase into rows of bytes.

    Symbol i of a cell goes to ``symbols[row, offset + cell * cell_stride + i]``; `n_cell` symbols are written.
    """
    n_quads = packed.shape[1]
    for cell in range(packed.shape[0]):
        at = offset + cell * cell_stride
        for quad in range(n_quads):
            left = min(n_cell - 4 * quad, 4)
            column = at + 4 * quad
            for lane in range(n_lanes):
                v = packed[cell, quad, lane]
                row = 2 * lane + phase
                for i in range(left):
                    symbols[row, column + i] = (v >> uint32(8 * i)) & uint32(255)


@njit(cache=True, nogil=True)
def _raw_bits_per_row(meta: np.ndarray, halves: np.ndarray, raws: np.ndarray, forced: int) -> int:
    """Raw bits of one row of a row group, without the positions of forced codes."""
    n_blocks = meta[0]
    n = 0
    for f in range(halves.shape[0]):
        n += n_blocks * halves[f, 2]
    for r in range(raws.shape[0]):
        n += n_blocks * raws[r, 0] * (raws[r, 3] if forced == 4 else raws[r, 1])
    return n


@njit(cache=True, nogil=True)
def _assemble_half(hi: np.ndarray, low: np.ndarray, other: np.ndarray, parameters: np.ndarray, out: np.ndarray) -> None:
    """Assemble the halves of one row phase: 32 lanes to a block.

    hi : uint8, side symbols; low : uint8 side symbols or uint16 raw bits; other : uint16, the field that is added
    parameters : a row of `halves`; out : uint16, output
    """
    sign = uint32(parameters[3] << 15)
    keep_sign = uint32(0 if parameters[2] == 7 else 0x8000)
    add = uint32(0x7FFF if parameters[4] >= 0 else 0)
    for i in range(np.uint64(out.size)):
        r = uint32(low[i])
        v = (uint32(hi[i]) << uint32(7)) | (r & uint32(127))
        v = (v + (uint32(other[i]) & add)) & uint32(0x7FFF)
        out[i] = v | ((r << uint32(8)) & keep_sign) | sign


@njit(cache=True, nogil=True)
def _put_halves(
    n_rows: int, first: int, n_blocks: int, lane_values: np.ndarray, half_values: np.ndarray, symbols: np.ndarray,
    stride: int, direct: bool,
) -> None:
    """Write assembled halves, uint16 (fields, 2 * blocks * 32), where they belong: into blocks or into `half_values`."""
    n_fields = lane_values.shape[0]
    row_bytes = symbols.shape[1]
    flat = symbols.reshape(symbols.size)
    for phase in range(2):
        # Row by row, so that the lines of a row are written one after the other.
        for lane in range((n_rows + 1 - phase) // 2):
            row = first + phase + 2 * lane
            at = np.uint64(phase * n_blocks * 32 + lane)
            place = row * row_bytes
            if not direct:
                for f in range(n_fields):
                    for block in range(np.uint64(n_blocks)):
                        half_values[f, np.uint64(row), block] = lane_values[f, at + np.uint64(32) * block]
            elif n_fields == 2:
                for block in range(np.uint64(n_blocks)):
                    k = at + np.uint64(32) * block
                    store_u32(flat, place, uint32(lane_values[0, k]) | (uint32(lane_values[1, k]) << uint32(16)))
                    place += stride
            elif n_fields == 1:
                for block in range(np.uint64(n_blocks)):
                    store_u16(flat, place, lane_values[0, at + np.uint64(32) * block])
                    place += stride


@njit(cache=True, nogil=True)
def _unpack_low(raw: np.ndarray, at: int, n_bits: int, n_rows: int, n_blocks: int, low: np.ndarray) -> int:
    """Read raw low parts (in lane order) into `low`, uint16 (2 * blocks * 32,), 32 lanes to a block; return the next bit."""
    if n_rows == 64:
        return unpack_many(raw, at, n_bits, low)
    for phase in range(2):
        lanes = (n_rows + 1 - phase) // 2
        for block in range(n_blocks):
            k = (phase * n_blocks + block) * 32
            at = unpack_bits(raw, at, n_bits, low[k : k + lanes])
    return at


@njit(cache=True, nogil=True)
def _offsets_of_cells(
    side: np.ndarray,
    side_at: np.ndarray,
    meta: np.ndarray,
    levels: np.ndarray,
    base: int,
    n_streams: int,
    cell_offsets: np.ndarray,
    contexts: np.ndarray,
    offsets: np.ndarray,
) -> None:
    """Fill the table offset of every cell, int32 (2 phases, n_streams, cells, 32); `contexts` is scratch."""
    n_cells = meta[1]
    for stream in range(n_streams):
        if VECTOR and (meta[5] == 1 or meta[5] == 2):
            flat = offsets.reshape(offsets.size)
            scratch = contexts.reshape(contexts.size)
            for phase in range(2):
                plane = phase * n_streams + stream
                cell_offsets_of_phase(
                    side, side_at, meta, levels, base, n_streams, plane, cell_offsets, scratch, flat,
                    plane * n_cells * 32,
                )
            continue
        cell_contexts(side, side_at, meta, levels, base, n_streams, stream, contexts)
        for phase in range(2):
            for cell in range(n_cells):
                for lane in range(32):
                    offsets[phase, stream, cell, lane] = cell_offsets[contexts[phase, cell, lane]]


@njit(cache=True, nogil=True)
def _finish_groups(
    g: int,
    n_members: int,
    n_rows: int,
    words: np.ndarray,
    starts: np.ndarray,
    sizes: np.ndarray,
    ends: np.ndarray,
    forced: int,
    forced_done: bool,
    positions: np.ndarray,
    buf: np.ndarray,
    held: np.ndarray,
    states: np.ndarray,
    meta: np.ndarray,
    sides: np.ndarray,
    halves: np.ndarray,
    byte_fields: np.ndarray,
    raws: np.ndarray,
    side: np.ndarray,
    side_at: np.ndarray,
    n_streams: int,
    raw: np.ndarray,
    low: np.ndarray,
    lane_values: np.ndarray,
    half_values: np.ndarray,
    byte_values: np.ndarray,
    symbols: np.ndarray,
    symbol_layout: tuple,
    raw_out: tuple,
    status: np.ndarray,
) -> None:
    """Do what is left of `n_members` groups when their symbols are decoded: raw bits, side fields, forced codes.

    `ends`: where in `words` the decoder stands in each stream; `raw_out`: `raw_values` and `words_out`.
    """
    raw_values, words_out = raw_out
    n_blocks = meta[0]
    stride, offset, direct = symbol_layout
    raw_row_bits = _raw_bits_per_row(meta, halves, raws, forced)
    n_raw = n_rows * raw_row_bits
    joins_words = words_out.size > 0
    columns, raw_row_bytes = words_out.shape[1] // 2, raw_row_bits // 8
    packed = words.view(np.uint8)
    n_position_bits = forced_bits(forced, meta[12])
    positions_behind = n_position_bits > 0 and n_raw < 2048
    if positions_behind:
        n_raw += n_rows * n_blocks * n_position_bits
    for which in range(n_members):
        first = 64 * (g + which)
        n_words = ends[which] - starts[g + which]
        n_left = np.int64(0)
        for lane in range(32):
            n_left += held[which, lane]
        n_body = n_raw - min(n_left + 16 * states.size, n_raw)
        body_words = (n_body + 31) // 32
        if n_words + body_words != sizes[g + which]:
            status[g + which] = 2
            continue
        # Raw bits: the body behind the stream, the end in the left-over bits.
        raw_words = raw[: 4 * (raw.size // 4)].view(np.uint32)
        n_direct = n_body // (8 * raw_row_bytes) if joins_words else 0  # rows whose raw bits are read where they are
        for i in range(n_direct * raw_row_bytes // 4, body_words):
            raw_words[i] = words[ends[which] + i]
        for i in range((n_body + 7) // 8, (n_body + n_left + 16 * states.size + 7) // 8 + 8):
            raw[i] = 0
        end = n_body + left_over_bits(buf[which], held[which], raw, n_body)
        ends_well = True
        for lane in range(states.size):
            ends_well &= states[lane] >> uint32(16) == uint32(1)
            tail = uint32(states[lane] & uint32(0xFFFF)) << uint32(8 - (end & 7))
            k = end >> 3
            raw[k] |= (tail >> uint32(16)) & uint32(255)
            raw[k + 1] |= (tail >> uint32(8)) & uint32(255)
            raw[k + 2] |= tail & uint32(255)
            end += 16
        if not ends_well:
            status[g + which] = 2
            continue
        at = np.int64(0)
        phase_size = 32 * n_blocks
        for f in range(halves.shape[0]):
            if halves[f, 2]:
                at = _unpack_low(raw, at, halves[f, 2], n_rows, n_blocks, low)
            other = lane_values[halves[f, 4]] if halves[f, 4] >= 0 else low  # not itself: equal arrays are not vectorised
            for phase in range(2):
                plane = (phase * n_streams + which) * phase_size
                hi_at = n_streams * side_at[halves[f, 0]] + plane
                part = slice(phase * phase_size, (phase + 1) * phase_size)
                hi = side[hi_at : hi_at + phase_size]
                if halves[f, 1] >= 0:
                    lo_at = n_streams * side_at[halves[f, 1]] + plane
                    _assemble_half(hi, side[lo_at : lo_at + phase_size], other[part], halves[f], lane_values[f, part])
                else:
                    _assemble_half(hi, low[part], other[part], halves[f], lane_values[f, part])
        _put_halves(n_rows, first, n_blocks, lane_values, half_values, symbols, stride, direct)
        for f in range(byte_fields.shape[0]):
            n_columns = columns_of(byte_fields[f, 1], n_blocks)
            for row in range(n_rows):
                plane = (row & 1) * n_streams + which
                base = n_streams * side_at[byte_fields[f, 0]] + plane * n_columns * 32 + (row >> 1)
                if direct:
                    for column in range(n_columns):
                        symbols[first + row, column * stride] = side[base + column * 32]
                else:
                    for column in range(n_columns):
                        byte_values[first + row, byte_fields[f, 2] + column] = side[base + column * 32]
        if VECTOR and joins_words:
            flat, out = symbols.reshape(symbols.size), words_out.reshape(words_out.size)
            window = meta[6] if forced == 4 else 0
            for row in range(n_rows):
                source, byte = (packed, 4 * ends[which]) if row < n_direct else (raw, 0)
                join_words(
                    flat, (first + row) * symbols.shape[1], source, byte + row * raw_row_bytes, raw_row_bits // columns, window,
                    out, (first + row) * 2 * columns, columns,
                )
            status[g + which] = 0
            continue
        for r in range(raws.shape[0]):
            columns = raws[r, 0] * n_blocks
            bits = raws[r, 3] if forced == 4 else raws[r, 1]
            for row in range(n_rows):
                at = unpack_many(raw, at, bits, raw_values[first + row, raws[r, 2] : raws[r, 2] + columns])
        if positions_behind:
            at = unpack_many(raw, at, n_position_bits, positions[which, : n_rows * n_blocks])
        if forced and forced != 4 and not forced_done:
            flat = symbols.reshape(symbols.size)
            at = first * symbols.shape[1] + offset
            put_forced(flat, at, symbols.shape[1], n_rows, forced, n_blocks, meta[2], stride, meta[12], positions[which])
        if forced == 4:
            put_window(symbols[first : first + n_rows], raw_values[first : first + n_rows], meta[6])
        status[g + which] = 0


@njit(cache=True, nogil=True)
def decode_groups(
    n_rows: int,
    words: np.ndarray,
    starts: np.ndarray,
    sizes: np.ndarray,
    kinds: np.ndarray,
    meta: np.ndarray,
    sides: np.ndarray,
    halves: np.ndarray,
    byte_fields: np.ndarray,
    raws: np.ndarray,
    levels: np.ndarray,
    flat_tables: np.ndarray,
    side_offsets: np.ndarray,
    cell_offsets: np.ndarray,
    rans_tables: np.ndarray,
    half_values: np.ndarray,
    byte_values: np.ndarray,
    symbols: np.ndarray,
    symbol_layout: tuple,
    raw_values: np.ndarray,
    words_out: np.ndarray,
    status: np.ndarray,
) -> None:
    """Decode a run of row groups.

    Parameters
    ----------
    n_rows : rows of all groups: 64 each, the last may have fewer
    words : uint32, holds all groups; at least 64 words lie behind the last of them
    starts, sizes : int64 (n_groups,), first word and words of each group
    kinds : uint8 (n_groups,), FORCED_GROUP, PLAIN_GROUP or SKIPPED_GROUP (left as it is)
    flat_tables : uint16 of `canonical.decode_tables`
    side_offsets : int32 (n_sides, 32), table offset of each side context
    cell_offsets : int32 (512,), table offset of each cell context (in `rans_tables` where that is not empty)
    rans_tables : uint32 of `rans.rans_tables` where the cells are coded by rANS, else empty
    half_values, byte_values, raw_values : output, the plane arrays of `group_encode`; the first two are not written to
        where `symbols` are packed blocks
    symbols : uint8 (rows, bytes), output; symbol i of cell c of a row goes to column ``offset + c * stride + i``
    symbol_layout : (stride, offset, direct); direct: `symbols` are the packed blocks, side fields are written there too
    words_out : uint8 (rows, bytes), output: the rows of 16-bit floats, instead of `raw_values`; empty where they are joined
        later. Only where the machine has vector kernels and a row is a multiple of 32 floats
    status : uint8 (n_groups,), output: GROUP_OK, GROUP_DAMAGED or GROUP_LEFT_OUT
    """
    n_blocks = meta[0]
    n_cells = meta[1]
    low_bits = meta[12]
    stride, offset, _ = symbol_layout
    side_at = side_offsets_of(meta, sides)
    side = np.zeros(max(4 * side_at[-1], 1), np.uint8)
    contexts = np.empty((2, n_cells, 32), np.int32)
    all_offsets = np.empty(8 * n_cells * 32, np.int32)
    packed = np.empty(n_cells * ((meta[2] + 3) // 4) * 32, np.uint32)
    low = np.zeros(64 * n_blocks, np.uint16)
    lane_values = np.zeros((halves.shape[0], 64 * n_blocks), np.uint16)
    raw = np.zeros(8 * (_raw_bits_per_row(meta, halves, raws, 0) + 10 * n_blocks) + 64 * 8 + 64, np.uint8)
    all_buf = np.zeros((4, 32), np.uint64)
    all_held = np.zeros((4, 32), np.int32)
    all_pos = np.zeros(4, np.int64)
    bases = np.zeros(6, np.int64)
    strides = np.zeros(2, np.int64)
    row_bytes = symbols.shape[1]
    flat_symbols = symbols.reshape(symbols.size)
    limit = words.size
    positions = np.empty((4, 2 * n_cells * 32), np.int32)
    flat_positions = positions.reshape(positions.size)
    n_groups = kinds.size
    by_rans = rans_tables.size > 0
    states = np.zeros(32, np.uint32)
    half_words, packed_words = words.view(np.uint16), words.view(np.uint8)
    can_join = meta[2] % 16 == 0 and not by_rans
    g = np.int64(0)  # a plain 0 is a type of its own to numba, which compiles `_finish_groups` for it and for int64
    while g < n_groups:
        status[g] = 0
        if kinds[g] == 2:
            g += 1
            continue
        first = 64 * g
        rows = min(64, n_rows - first)
        # Full groups are decoded two or four streams at a time; where there are fewer, the last one several times.
        joined = can_join and rows == 64
        n_members = 1
        while joined and n_members < 4 and g + n_members < n_groups and kinds[g + n_members] == kinds[g]:
            if first + 64 * (n_members + 1) > n_rows:
                break
            n_members += 1
        n_streams = 1 if not joined else 2 if n_members < 3 else 4
        behind = g + n_members
        buf, held, pos = all_buf[:n_streams], all_held[:n_streams], all_pos[:n_streams]
        offsets = all_offsets[: 2 * n_streams * n_cells * 32].reshape((2, n_streams, n_cells, 32))
        forced = meta[4] if kinds[g] == 0 else 0
        base = 0 if kinds[g] == 0 else 256
        cell_symbols = meta[3] if kinds[g] == 0 else meta[2]
        last_table = np.int64(-1)
        if low_bits:
            cell_symbols = np.int64(16)
            if forced:
                cell_symbols = np.int64(15)
                last_table = np.int64(cell_offsets[LAST_CONTEXT])
        buf[:] = 0
        held[:] = 0
        n_bits = forced_bits(forced, low_bits)
        front = 0
        if rows * _raw_bits_per_row(meta, halves, raws, forced) >= 2048:
            front = (rows * n_blocks * n_bits + 31) // 32
        low_words = rows * n_cells * low_bits
        if front + low_words > sizes[g:behind].min():
            for k in range(g, behind):
                status[k] = 2 if front + low_words > sizes[k] else 3
            g = behind
            continue
        if front:
            for k in range(n_members):
                unpack_many(packed_words, 32 * starts[g + k], n_bits, positions[k, : rows * n_blocks])
        for k in range(n_streams):
            pos[k] = starts[g + min(k, n_members - 1)] + front + low_words
        forced_at_once = joined and front > 0 and 1 <= forced <= 3
        nibbles = forced_at_once and forced == 2 and meta[2] == 16
        kind = FORCED_NIBBLES if nibbles else PLAIN_CELLS
        if low_bits:
            kind = SPLIT_1 if low_bits == 1 else SPLIT_4
        for s in range(sides.shape[0]):
            columns = columns_of(sides[s, 0], n_blocks)
            plane = side[n_streams * side_at[s] : n_streams * side_at[s + 1]].reshape((2, n_streams, columns, 32))
            o = sides[s, 3]
            other = side[n_streams * side_at[o] : n_streams * side_at[o + 1]].reshape((2, n_streams, -1, 32))
            for phase in range(2):
                n_lanes = (rows + 1 - phase) // 2
                if joined:
                    decode_side_streams(
                        words, limit, flat_tables, side_offsets[s], sides[s, 1], sides[s, 2], other[phase], plane[phase],
                        buf, held, pos,
                    )
                elif n_lanes:
                    decode_side_phase(
                        words, limit, flat_tables, side_offsets[s], sides[s, 1], sides[s, 2], other[phase, 0], n_lanes,
                        plane[phase, 0], buf[0], held[0], pos[:1],
                    )
        _offsets_of_cells(side, side_at, meta, levels, base, n_streams, cell_offsets, contexts, offsets)
        if by_rans:
            for lane in range((rows + 1) // 2):
                states[lane] = words[min(pos[0] + lane, limit - 1)]
            pos[0] = 2 * min(pos[0] + (rows + 1) // 2, limit)
        for phase in range(2):
            n_lanes = (rows + 1 - phase) // 2
            if n_lanes == 0:
                continue
            if joined:
                strides[0] = 2 * row_bytes
                strides[1] = stride
                # Two streams keep the instructions of the cells busy; four would only take more of the first cache.
                for two in range(0, n_streams, 2):
                    for k in range(2):
                        member = min(two + k, n_members - 1)
                        bases[k] = (first + 64 * member + phase) * row_bytes + offset
                        bases[2 + k] = member * positions.shape[1] + phase * n_cells * 32
                        bases[4 + k] = starts[g + member] + front + phase * n_cells * 32 * low_bits
                    decode_cells_pair(
                        words, limit, flat_tables, offsets[phase, two : two + 2], cell_symbols, last_table, flat_symbols, bases,
                        strides, kind, flat_positions, buf[two : two + 2], held[two : two + 2], pos[two : two + 2],
                    )
                    if forced_at_once and not nibbles:  # while the rows are in the first caches
                        for k in range(min(2, n_members - two)):
                            put_forced_phase(
                                flat_symbols, bases[k], 2 * row_bytes, 32, forced, n_blocks, meta[2], stride, low_bits,
                                flat_positions, bases[2 + k],
                            )
            else:
                quads = (cell_symbols + 3) // 4
                view = packed[: n_cells * quads * 32].reshape((n_cells, quads, 32))
                if by_rans:
                    decode_rans_phase(
                        half_words, 2 * limit, rans_tables, offsets[phase, 0], cell_symbols, n_lanes, view, states, pos[:1]
                    )
                else:
                    decode_cells_phase(
                        words, limit, flat_tables, offsets[phase, 0], cell_symbols, last_table, n_lanes, view, buf[0], held[0],
                        pos[:1],
                    )
                n_scattered = 16 if low_bits else cell_symbols
                scatter_symbols(view, phase, n_lanes, symbols[first : first + rows], stride, offset, n_scattered)
                if low_bits:
                    low_at = 4 * (starts[g] + front + phase * ((rows + 1) // 2) * n_cells * low_bits)
                    join_split(
                        flat_symbols, (first + phase) * row_bytes + offset, 2 * row_bytes, n_lanes, n_cells, stride, low_bits,
                        packed_words, low_at,
                    )
        if by_rans:
            pos[0] = (pos[0] + 1) // 2
        _finish_groups(
            g, n_members, rows, words, starts, sizes, pos, forced, forced_at_once, positions, buf, held,
            states[: (rows + 1) // 2 if by_rans else 0], meta, sides, halves, byte_fields, raws, side, side_at, n_streams, raw,
            low, lane_values, half_values, byte_values, symbols, symbol_layout, (raw_values, words_out), status,
        )
        g = behind
