"""Row groups in numba, decoding: words to plane arrays or straight to packed blocks.

The parameter tables are those of `group_encode`. Two full row groups are decoded at a time where the machine has vector
kernels: their streams are independent, which hides the latency of table look-ups.
"""

from __future__ import annotations

import numpy as np
from numba import njit, uint32

from lazyweights.codecs.lane_kernels import (
    decode_cells_pair,
    decode_cells_phase,
    decode_side_pair,
    decode_side_phase,
    left_over_bits,
)
from lazyweights.codecs.rans import decode_rans_phase
from lazyweights.container.bit_kernels import unpack_bits
from lazyweights.container.cell_contexts import cell_contexts
from lazyweights.container.forced_codes import forced_bits, put_forced, put_window
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
def _put_half(
    f: int,
    n_rows: int,
    first: int,
    n_blocks: int,
    side: np.ndarray,
    hi_at: int,
    lo_at: int,
    phase_step: int,
    low: np.ndarray,
    halves: np.ndarray,
    lane_values: np.ndarray,
    half_values: np.ndarray,
    symbols: np.ndarray,
    stride: int,
    direct: bool,
) -> None:
    """Assemble half field f of a group from its side symbols and low bits; write it where it belongs.

    `side` holds side symbols: phase p, block b, lane l of the high plane at ``hi_at + p * phase_step + 32 * b + l``.
    `low`: raw low parts in lane order. `lane_values` uint16 (n_halves, 64 * blocks): all halves, 32 lanes to a block.
    """
    raw_bits = halves[f, 2]
    sign = uint32(halves[f, 3] << 15)
    delta = halves[f, 4]
    keep_sign = uint32(0 if raw_bits == 7 else 0x8000)
    add = uint32(0x7FFF if delta >= 0 else 0)
    flat = lane_values.reshape(lane_values.size)
    mine = f * lane_values.shape[1]
    others = max(delta, 0) * lane_values.shape[1]
    k = 0
    for phase in range(2):
        lanes = np.uint64((n_rows + 1 - phase) // 2)
        for block in range(n_blocks):
            step = phase * phase_step + block * 32
            hi = np.uint64(hi_at + step)
            at = np.uint64(mine + (phase * n_blocks + block) * 32)
            other = np.uint64(others + (phase * n_blocks + block) * 32)
            if lo_at >= 0:
                lo = np.uint64(lo_at + step)
                for lane in range(lanes):
                    flat[at + lane] = side[lo + lane]
            else:
                lo = np.uint64(k)
                for lane in range(lanes):
                    flat[at + lane] = low[lo + lane]
            k += np.int64(lanes)
            for lane in range(lanes):
                r = uint32(flat[at + lane])
                v = (uint32(side[hi + lane]) << uint32(7)) | (r & uint32(127))
                v = (v + (uint32(flat[other + lane]) & add)) & uint32(0x7FFF)
                flat[at + lane] = v | ((r << uint32(8)) & keep_sign) | sign
            if direct:
                column = np.uint64(block * stride + 2 * f)
                for lane in range(lanes):
                    row = np.uint64(first + phase) + np.uint64(2) * lane
                    symbols[row, column] = flat[at + lane] & 255
                    symbols[row, column + np.uint64(1)] = flat[at + lane] >> 8
            else:
                column = np.uint64(block)
                for lane in range(lanes):
                    half_values[f, np.uint64(first + phase) + np.uint64(2) * lane, column] = flat[at + lane]


@njit(cache=True, nogil=True)
def _finish_group(
    n_rows: int,
    first: int,
    size: int,
    stream: np.ndarray,
    n_words: int,
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
    which: int,
    raw: np.ndarray,
    low: np.ndarray,
    lane_values: np.ndarray,
    half_values: np.ndarray,
    byte_values: np.ndarray,
    symbols: np.ndarray,
    symbol_layout: tuple,
    raw_values: np.ndarray,
) -> int:
    """Do what is left of a group when its symbols are decoded: raw bits, side fields, forced codes. Return a status."""
    n_blocks = meta[0]
    stride, offset, direct = symbol_layout
    n_raw = n_rows * _raw_bits_per_row(meta, halves, raws, forced)
    positions_behind = forced_bits(forced) > 0 and n_raw < 2048
    if positions_behind:
        n_raw += n_rows * n_blocks * forced_bits(forced)
    n_left = np.int64(0)
    for lane in range(32):
        n_left += held[lane]
    n_body = n_raw - min(n_left + 16 * states.size, n_raw)
    body_words = (n_body + 31) // 32
    if n_words + body_words != size:
        return 2
    # Raw bits: the body behind the stream, the end in the left-over bits.
    raw_words = raw[: 4 * (raw.size // 4)].view(np.uint32)
    for i in range(body_words):
        raw_words[i] = stream[n_words + i]
    for i in range((n_body + 7) // 8, (n_body + n_left + 16 * states.size + 7) // 8 + 8):
        raw[i] = 0
    end = n_body + left_over_bits(buf, held, raw, n_body)
    for lane in range(states.size):
        if states[lane] >> uint32(16) != uint32(1):
            return 2
        tail = uint32(states[lane] & uint32(0xFFFF)) << uint32(8 - (end & 7))
        k = end >> 3
        raw[k] |= (tail >> uint32(16)) & uint32(255)
        raw[k + 1] |= (tail >> uint32(8)) & uint32(255)
        raw[k + 2] |= tail & uint32(255)
        end += 16
    at = 0
    for f in range(halves.shape[0]):
        if halves[f, 2]:
            at = unpack_bits(raw, at, halves[f, 2], low[: n_rows * n_blocks])
        hi_at = n_streams * side_at[halves[f, 0]] + which * n_blocks * 32
        lo_at = n_streams * side_at[halves[f, 1]] + which * n_blocks * 32 if halves[f, 1] >= 0 else -1
        _put_half(
            f, n_rows, first, n_blocks, side, hi_at, lo_at, n_streams * n_blocks * 32, low, halves, lane_values,
            half_values, symbols, stride, direct,
        )
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
    for r in range(raws.shape[0]):
        columns = raws[r, 0] * n_blocks
        bits = raws[r, 3] if forced == 4 else raws[r, 1]
        for row in range(n_rows):
            at = unpack_bits(raw, at, bits, raw_values[first + row, raws[r, 2] : raws[r, 2] + columns])
    if positions_behind:
        at = unpack_bits(raw, at, forced_bits(forced), positions[: n_rows * n_blocks])
    if forced and forced != 4 and not forced_done:
        put_forced(symbols[first : first + n_rows, offset:], forced, n_blocks, meta[2], stride, positions)
    if forced == 4:
        put_window(symbols[first : first + n_rows], raw_values[first : first + n_rows], meta[6])
    return 0


@njit(cache=True, nogil=True)
def _unpack_positions(
    words: np.ndarray, n_words: int, n_values: int, n_bits: int, scratch: np.ndarray, positions: np.ndarray
) -> None:
    """Read the positions of forced codes in front of a stream into `positions`, int32, in lane order."""
    view = scratch[: 4 * (scratch.size // 4)].view(np.uint32)
    for i in range(n_words):
        view[i] = words[i]
    unpack_bits(scratch, 0, n_bits, positions[:n_values])


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
    status : uint8 (n_groups,), output: GROUP_OK, GROUP_DAMAGED or GROUP_LEFT_OUT
    """
    n_blocks = meta[0]
    n_cells = meta[1]
    stride, offset, _ = symbol_layout
    side_at = side_offsets_of(meta, sides)
    side = np.zeros(max(2 * side_at[-1], 1), np.uint8)
    contexts = np.zeros((2, 2, n_cells, 32), np.int32)
    offsets = np.zeros((2, n_cells, 32), np.int32)
    packed = np.empty(n_cells * ((meta[2] + 3) // 4) * 32, np.uint32)
    low = np.zeros(64 * n_blocks, np.uint16)
    lane_values = np.zeros((max(halves.shape[0], 1), 64 * n_blocks), np.uint16)
    raw = np.zeros(8 * (_raw_bits_per_row(meta, halves, raws, 0) + 10 * n_blocks) + 64 * 8 + 64, np.uint8)
    buf = np.zeros((2, 32), np.uint64)
    held = np.zeros((2, 32), np.int32)
    pos = np.zeros(2, np.int64)
    bases = np.zeros(2, np.int64)
    strides = np.zeros(2, np.int64)
    row_bytes = symbols.shape[1]
    flat_symbols = symbols.reshape(symbols.size)
    limit = words.size
    positions = np.zeros((2, 2 * n_cells * 32), np.int32)
    phase_positions = np.zeros((2, n_cells, 32), np.int32)
    n_groups = kinds.size
    by_rans = rans_tables.size > 0
    states = np.zeros(32, np.uint32)
    half_words = words.view(np.uint16)
    can_pair = meta[2] % 16 == 0 and not by_rans
    g = 0
    while g < n_groups:
        status[g] = 0
        if kinds[g] == 2:
            g += 1
            continue
        first = 64 * g
        rows = min(64, n_rows - first)
        # A full group without a partner is decoded as both members of a pair.
        partner = g
        if can_pair and g + 1 < n_groups and n_rows - first >= 128 and kinds[g + 1] == kinds[g]:
            partner = g + 1
        pair = can_pair and rows == 64
        n_streams = 2 if pair else 1
        forced = meta[4] if kinds[g] == 0 else 0
        base = 0 if kinds[g] == 0 else 256
        cell_symbols = meta[3] if kinds[g] == 0 else meta[2]
        buf[:] = 0
        held[:] = 0
        n_bits = forced_bits(forced)
        front = 0
        if rows * _raw_bits_per_row(meta, halves, raws, forced) >= 2048:
            front = (rows * n_blocks * n_bits + 31) // 32
        if front > min(sizes[g], sizes[partner]):
            for k in range(g, partner + 1):
                status[k] = 2 if front > sizes[k] else 3
            g = partner + 1
            continue
        if front:
            for k in range(partner - g + 1):
                _unpack_positions(words[starts[g + k] :], front, rows * n_blocks, n_bits, raw, positions[k])
        nibbles = pair and front > 0 and forced == 2 and meta[2] == 16
        pos[0] = starts[g] + front
        pos[1] = starts[partner] + front
        for s in range(sides.shape[0]):
            columns = columns_of(sides[s, 0], n_blocks)
            plane = side[n_streams * side_at[s] : n_streams * side_at[s + 1]].reshape((2, n_streams, columns, 32))
            o = sides[s, 3]
            other = side[n_streams * side_at[o] : n_streams * side_at[o + 1]].reshape((2, n_streams, -1, 32))
            for phase in range(2):
                n_lanes = (rows + 1 - phase) // 2
                if pair:
                    decode_side_pair(
                        words, limit, flat_tables, side_offsets[s], sides[s, 1], sides[s, 2], other[phase], plane[phase],
                        buf, held, pos,
                    )
                elif n_lanes:
                    decode_side_phase(
                        words, limit, flat_tables, side_offsets[s], sides[s, 1], sides[s, 2], other[phase, 0], n_lanes,
                        plane[phase, 0], buf[0], held[0], pos[:1],
                    )
        for k in range(n_streams):
            cell_contexts(side, side_at, meta, levels, base, n_streams, k, contexts[k])
        if by_rans:
            for lane in range((rows + 1) // 2):
                states[lane] = words[min(pos[0] + lane, limit - 1)]
            pos[0] = 2 * min(pos[0] + (rows + 1) // 2, limit)
        for phase in range(2):
            n_lanes = (rows + 1 - phase) // 2
            if n_lanes == 0:
                continue
            for k in range(n_streams):
                for cell in range(n_cells):
                    for lane in range(32):
                        offsets[k, cell, lane] = cell_offsets[contexts[k, phase, cell, lane]]
            if pair:
                bases[0] = (first + phase) * row_bytes + offset
                bases[1] = (64 * partner + phase) * row_bytes + offset
                strides[0] = 2 * row_bytes
                strides[1] = stride
                if nibbles:
                    for k in range(2):
                        source = positions[k if partner > g else 0]
                        for i in range(n_cells * 32):
                            phase_positions[k, i >> 5, i & 31] = source[phase * n_cells * 32 + i]
                decode_cells_pair(
                    words, limit, flat_tables, offsets, cell_symbols, flat_symbols, bases, strides, nibbles,
                    phase_positions, buf, held, pos,
                )
            else:
                quads = (cell_symbols + 3) // 4
                view = packed[: n_cells * quads * 32].reshape((n_cells, quads, 32))
                if by_rans:
                    decode_rans_phase(
                        half_words, 2 * limit, rans_tables, offsets[0], cell_symbols, n_lanes, view, states, pos[:1]
                    )
                else:
                    decode_cells_phase(
                        words, limit, flat_tables, offsets[0], cell_symbols, n_lanes, view, buf[0], held[0], pos[:1]
                    )
                scatter_symbols(view, phase, n_lanes, symbols[first : first + rows], stride, offset, cell_symbols)
        if by_rans:
            pos[0] = (pos[0] + 1) // 2
        for k in range(partner - g + 1):
            status[g + k] = _finish_group(
                rows, first + 64 * k, sizes[g + k], words[starts[g + k] :], pos[k] - starts[g + k], forced, nibbles,
                positions[k], buf[k], held[k], states[: (rows + 1) // 2 if by_rans else 0], meta, sides, halves,
                byte_fields, raws, side, side_at, n_streams, k, raw, low, lane_values, half_values, byte_values, symbols,
                symbol_layout, raw_values,
            )
        g = partner + 1
