"""Row groups in numba, encoding: planes to symbols, contexts, counts and words. Data-driven by `stream_layout`.

All functions work on a run of whole row groups of one tensor (64 rows each, the last may be shorter) and loop inside
compiled code, so that Python's overhead is paid once a run. Tables of a tensor's parameters are plain integer arrays
(built in `tensor_coder`):

- ``meta``: see `cell_contexts`;
- ``sides`` (n_sides, 4): values per block (0: one a row), context kind, base, the side plane that OTHER_PLANE looks at;
- ``halves`` (n_halves, 5): side plane of the high byte, side plane of the low byte or -1, raw bits of the low part
  (0, 7 or 8), the sign bit where it is not stored, delta_of or -1;
- ``byte_fields`` (n, 3): side plane, values per block, first column;
- ``raws`` (n, 4): values per block, bits, first column, bits in a windowed group;
- ``levels`` (2, 256): level of each sub-scale and sub-min.

Plane arrays, row-major: ``half_values`` uint16 (n_halves, rows, blocks), ``byte_values`` uint8 (rows, columns of all byte
fields), ``symbols`` uint8 (rows, cells * cell symbols), ``raw_values`` uint32 (rows, columns of all raw planes).
"""

from __future__ import annotations

import numpy as np
from numba import njit, uint32

from lazyweights.codecs.lane_encode import encode_cells, encode_side, finish_lanes, left_over, side_contexts, start_lanes
from lazyweights.codecs.rans import encode_rans
from lazyweights.codecs.split_codes import LAST_CONTEXT, pack_low, split_high
from lazyweights.container.bit_kernels import pack_bits
from lazyweights.container.cell_contexts import cell_contexts
from lazyweights.container.forced_codes import forced_bits, take_forced, take_window


@njit(cache=True, nogil=True)
def _split_sides(
    first: int,
    n_rows: int,
    half_values: np.ndarray,
    byte_values: np.ndarray,
    meta: np.ndarray,
    sides: np.ndarray,
    halves: np.ndarray,
    byte_fields: np.ndarray,
    side_at: np.ndarray,
    side_symbols: np.ndarray,
    low_bits: np.ndarray,
) -> None:
    """Fill the side symbols of one row group and the low parts of its halves, uint16 (n_halves, n) in lane order."""
    n_blocks = meta[0]
    side_symbols[:] = 0
    for f in range(halves.shape[0]):
        hi_at = side_at[halves[f, 0]]
        lo_at = side_at[halves[f, 1]] if halves[f, 1] >= 0 else -1
        delta = max(halves[f, 4], 0)
        keep = np.int32(0x7FFF if halves[f, 4] >= 0 else 0)
        k = np.uint64(0)
        for phase in range(2):
            lanes = np.uint64((n_rows + 1 - phase) // 2)
            for block in range(np.uint64(n_blocks)):
                step = np.uint64(phase * n_blocks * 32) + block * np.uint64(32)
                hi = np.uint64(hi_at) + step
                for lane in range(lanes):
                    row = np.uint64(first + phase) + np.uint64(2) * lane
                    stored = np.int32(half_values[f, row, block])
                    v = (stored - (np.int32(half_values[delta, row, block]) & keep)) & np.int32(0x7FFF)
                    low = (v & np.int32(127)) | ((stored >> np.int32(8)) & np.int32(128))
                    side_symbols[hi + lane] = v >> np.int32(7)
                    low_bits[f, k + lane] = low
                if lo_at >= 0:
                    lo = np.uint64(lo_at) + step
                    for lane in range(lanes):
                        side_symbols[lo + lane] = low_bits[f, k + lane]
                k += lanes
    for f in range(byte_fields.shape[0]):
        at = side_at[byte_fields[f, 0]]
        n_columns = columns_of(byte_fields[f, 1], n_blocks)
        for phase in range(2):
            lanes = np.uint64((n_rows + 1 - phase) // 2)
            for column in range(np.uint64(n_columns)):
                to = np.uint64(at + phase * n_columns * 32) + column * np.uint64(32)
                source = column + np.uint64(byte_fields[f, 2])
                for lane in range(lanes):
                    side_symbols[to + lane] = byte_values[np.uint64(first + phase) + np.uint64(2) * lane, source]


@njit(inline="always")
def columns_of(per_block: int, n_blocks: int) -> int:
    """Columns of a side plane with this many values a block; 0 stands for one value a row."""
    return per_block * n_blocks if per_block else 1


@njit(cache=True, nogil=True)
def _take(symbols: np.ndarray, raw_values: np.ndarray, meta: np.ndarray, positions: np.ndarray) -> bool:
    """Take forced codes out of a group or window its codes; return False (nothing changed) where that is not possible."""
    if meta[4] == 4:
        return take_window(symbols, raw_values, meta[6])
    return take_forced(symbols, meta, positions)


@njit(cache=True, nogil=True)
def side_offsets_of(meta: np.ndarray, sides: np.ndarray) -> np.ndarray:
    at = np.zeros(sides.shape[0] + 1, np.int64)
    for s in range(sides.shape[0]):
        at[s + 1] = at[s] + 64 * columns_of(sides[s, 0], meta[0])
    return at


@njit(cache=True, nogil=True)
def _count_codes(codes: np.ndarray, counts: np.ndarray) -> None:
    """Add codes, uint8, flat, a multiple of four, to their counts, int64 (256,)."""
    four = np.zeros((4, 256), np.uint32)  # neighbours often are equal: one addition would wait for the other
    for i in range(np.uint64(0), np.uint64(codes.size), np.uint64(4)):
        for k in range(np.uint64(4)):
            four[k, np.uint64(codes[i + k])] += uint32(1)
    for value in range(256):
        for k in range(4):
            counts[value] += four[k, value]


@njit(cache=True, nogil=True)
def count_groups(
    n_rows: int,
    half_values: np.ndarray,
    byte_values: np.ndarray,
    symbols: np.ndarray,
    raw_values: np.ndarray,
    meta: np.ndarray,
    sides: np.ndarray,
    halves: np.ndarray,
    byte_fields: np.ndarray,
    levels: np.ndarray,
    side_counts: np.ndarray,
    cell_counts: np.ndarray,
    forced_counts: np.ndarray,
    code_counts: np.ndarray,
) -> None:
    """Add the symbols of a run of row groups to the counts of their contexts.

    `side_counts` uint32 (n_sides, 32, 256); `cell_counts` uint32 (512, 256); `forced_counts` int64 (2,): blocks with
    forced codes, and how many of these are negative; `code_counts` int64 (256,): of whole codes, where they are split.
    `symbols` and `raw_values` are changed: forced codes are taken out.
    """
    n_blocks = meta[0]
    n_cells = meta[1]
    split = meta[12]
    high = np.empty((64 if split else 0, 16 * n_cells), np.uint8)
    side_at = side_offsets_of(meta, sides)
    side_symbols = np.zeros(side_at[-1], np.uint8)
    low_bits = np.zeros((max(halves.shape[0], 1), 64 * n_blocks), np.uint16)
    positions = np.zeros(64 * n_blocks, np.uint32)
    contexts = np.zeros((2, n_cells, 32), np.int32)
    widest = 1
    for s in range(sides.shape[0]):
        widest = max(widest, sides[s, 0])
    side_context = np.zeros((2, widest * n_blocks, 32), np.uint8)
    for first in range(0, n_rows, 64):
        rows = min(64, n_rows - first)
        _split_sides(
            first, rows, half_values, byte_values, meta, sides, halves, byte_fields, side_at, side_symbols, low_bits
        )
        for s in range(sides.shape[0]):
            columns = columns_of(sides[s, 0], n_blocks)
            plane = side_symbols[side_at[s] : side_at[s + 1]].reshape((2, columns, 32))
            o = sides[s, 3]
            other = side_symbols[side_at[o] : side_at[o + 1]].reshape((2, -1, 32))
            if sides[s, 1]:
                side_contexts(plane, sides[s, 1], sides[s, 2], other, side_context)
            for phase in range(2):
                lanes = np.uint64((rows + 1 - phase) // 2)
                for column in range(columns):
                    for lane in range(lanes):
                        context = np.uint64(side_context[phase, column, lane]) if sides[s, 1] else np.uint64(0)
                        side_counts[s, context, np.uint64(plane[phase, column, lane])] += uint32(1)
        group = symbols[first : first + rows]
        if split:
            _count_codes(group.reshape(group.size), code_counts)
        cell_symbols = meta[2]
        base = 0
        ends = False
        if meta[4]:
            if _take(group, raw_values[first : first + rows], meta, positions):
                cell_symbols = meta[3]
                ends = split > 0
                forced_counts[0] += rows * n_blocks
                if meta[4] == 3 and not ends:
                    for i in range(rows * n_blocks):
                        forced_counts[1] += positions[i] & 1
            else:
                base = 256
        cell_contexts(side_symbols, side_at, meta, levels, base, 1, 0, contexts)
        stride = meta[2]
        if split:
            split_high(group, split, high[:rows])
            group = high[:rows]
            stride = 16
            cell_symbols = 15 if ends else 16
        # Two rows at a time: one addition need not wait for the other.
        width = np.uint64(cell_symbols)
        for row in range(0, rows, 2):
            even, odd = row, min(row + 1, rows - 1)
            one = uint32(row + 1 < rows)
            for cell in range(n_cells):
                even_context = np.uint64(contexts[0, cell, row >> 1])
                odd_context = np.uint64(contexts[1, cell, row >> 1])
                at = np.uint64(cell * stride)
                for i in range(width):
                    cell_counts[even_context, np.uint64(group[even, at + i])] += uint32(1)
                    cell_counts[odd_context, np.uint64(group[odd, at + i])] += one
                if ends:
                    cell_counts[LAST_CONTEXT, np.uint64(group[even, at + width])] += uint32(1)
                    cell_counts[LAST_CONTEXT, np.uint64(group[odd, at + width])] += one


@njit(cache=True, nogil=True)
def _put_words(packed: np.ndarray, n_words: int, out: np.ndarray) -> None:
    """Copy packed bytes into 32-bit words, the first byte lowest."""
    for i in range(n_words):
        out[i] = (
            uint32(packed[4 * i])
            | (uint32(packed[4 * i + 1]) << uint32(8))
            | (uint32(packed[4 * i + 2]) << uint32(16))
            | (uint32(packed[4 * i + 3]) << uint32(24))
        )


def words_for(n_rows: int, row_bytes: int, n_symbols: int, n_sides: int) -> int:
    """Words that `encode_groups` needs for its output, where a row has `n_symbols` symbols in side planes and cells.

    Groups that do not become smaller are dropped, so there must be room for the packed rows and for one group of the longest
    codewords more.
    """
    return (n_rows * row_bytes + 3) // 4 + 64 * (11 * n_symbols // 32 + 2 * (n_sides + 1) + 4)


@njit(cache=True, nogil=True)
def encode_groups(
    n_rows: int,
    half_values: np.ndarray,
    byte_values: np.ndarray,
    symbols: np.ndarray,
    raw_values: np.ndarray,
    meta: np.ndarray,
    sides: np.ndarray,
    halves: np.ndarray,
    byte_fields: np.ndarray,
    raws: np.ndarray,
    levels: np.ndarray,
    entries: np.ndarray,
    side_tables: np.ndarray,
    cell_tables: np.ndarray,
    freqs: np.ndarray,
    row_bytes: int,
    out: np.ndarray,
    sizes: np.ndarray,
    unforced: np.ndarray,
) -> int:
    """Encode a run of row groups.

    Parameters
    ----------
    entries : uint16, of `lane_encode.encode_entries`
    side_tables : uint8 (n_sides, 32), table of each side context
    cell_tables : uint8 (512,), table of each cell context
    freqs : uint32 (n_tables, 256) of `rans.freq_entries` where the cells are coded by rANS, else (0, 256)
    row_bytes : packed bytes of a row
    out : uint32, output words of all groups one after the other; `words_for` says how many there must be
    sizes : int64 (n_groups,), output, words of each group; -1 where they are no fewer bytes than the packed rows, or where a
        symbol has no codeword
    unforced : bool (n_groups,), output, whether the group's codes are not forced

    Returns
    -------
    int : words written.
    """
    n_blocks = meta[0]
    n_cells = meta[1]
    side_at = side_offsets_of(meta, sides)
    side_symbols = np.zeros(side_at[-1], np.uint8)
    low_bits = np.zeros((max(halves.shape[0], 1), 64 * n_blocks), np.uint16)
    positions = np.zeros(64 * n_blocks, np.uint32)
    contexts = np.zeros((2, n_cells, 32), np.int32)
    tables = np.zeros((2, n_cells if freqs.shape[0] > 0 else 0, 32), np.uint8)
    widest = 1
    for s in range(sides.shape[0]):
        widest = max(widest, sides[s, 0])
    raw_bits_per_row = 0
    for f in range(halves.shape[0]):
        raw_bits_per_row += n_blocks * halves[f, 2]
    raw_bits_per_row += n_blocks * forced_bits(meta[4], meta[12])
    for r in range(raws.shape[0]):
        raw_bits_per_row += n_blocks * raws[r, 0] * raws[r, 1]
    raw = np.zeros(64 * raw_bits_per_row // 8 + 16, np.uint8)
    side_offsets = side_tables.astype(np.int32) << np.int32(8)
    cell_offsets = cell_tables.astype(np.int32) << np.int32(8)
    side_context = np.zeros(64 * widest * n_blocks, np.uint8)
    state = np.zeros((4, 32), np.uint32)
    pos = np.zeros(1, np.int64)
    flat_contexts = contexts.reshape(contexts.size)
    flat_tables = tables.reshape(tables.size)
    by_rans = freqs.shape[0] > 0
    states = np.zeros(32, np.uint32)
    rans_words = np.zeros(64 * n_cells * meta[2] + 64 if by_rans else 1, np.uint16)
    packed_positions = np.zeros(64 * n_blocks * 10 // 8 + 16, np.uint8)
    split = meta[12]
    high = np.empty((64 if split else 0, 16 * n_cells), np.uint8)
    out_bytes = out.view(np.uint8)
    out_at = 0
    for first in range(0, n_rows, 64):
        g = first // 64
        rows = min(64, n_rows - first)
        _split_sides(
            first, rows, half_values, byte_values, meta, sides, halves, byte_fields, side_at, side_symbols, low_bits
        )
        group = symbols[first : first + rows]
        cell_symbols = meta[2]
        base = 0
        forced = 0
        if meta[4]:
            if _take(group, raw_values[first : first + rows], meta, positions):
                cell_symbols = meta[3]
                forced = meta[4]
            else:
                base = 256
        unforced[g] = base > 0
        # Raw bits.
        raw[:] = 0
        n_raw = np.int64(0)  # a plain 0 is a type of its own to numba, which compiles `pack_bits` for it and for int64
        for f in range(halves.shape[0]):
            n_raw = pack_bits(low_bits[f, : rows * n_blocks], halves[f, 2], raw, n_raw)
        for r in range(raws.shape[0]):
            columns = raws[r, 0] * n_blocks
            bits = raws[r, 3] if forced == 4 else raws[r, 1]
            for row in range(rows):
                n_raw = pack_bits(raw_values[first + row, raws[r, 2] : raws[r, 2] + columns], bits, raw, n_raw)
        # Positions of forced codes stand in front, so that a decoder has them before the codes; or among the raw bits,
        # where there are too few others to fill the left-over bits.
        front = 0
        n_bits = forced_bits(forced, split)
        if n_raw >= 2048:
            front = (rows * n_blocks * n_bits + 31) // 32
        else:
            n_raw = pack_bits(positions[: rows * n_blocks], n_bits, raw, n_raw)
        low_words = rows * n_cells * split
        if out_at + front + low_words + 8 > out.size:
            sizes[g] = -1
            continue
        if front:
            packed_positions[: 4 * front + 8] = 0
            pack_bits(positions[: rows * n_blocks], n_bits, packed_positions, np.int64(0))
            _put_words(packed_positions, front, out[out_at:])
        cell_stride = meta[2]
        last = -1
        if split:
            pack_low(group, split, out_bytes, 4 * (out_at + front))
            front += low_words
            split_high(group, split, high[:rows])
            group = high[:rows]
            cell_stride = 16
            cell_symbols = 16
            if forced:
                cell_symbols = 15
                last = np.int64(cell_offsets[LAST_CONTEXT])
        # The stream.
        words = out[out_at + front :]
        start_lanes(rows if sides.shape[0] > 0 or not by_rans else 0, state, pos)
        status = 0
        for s in range(sides.shape[0]):
            columns = columns_of(sides[s, 0], n_blocks)
            plane = side_symbols[side_at[s] : side_at[s + 1]]
            o = sides[s, 3]
            other = side_symbols[side_at[o] : side_at[o + 1]].reshape((2, -1, 32))
            found = side_context[: 64 * columns].reshape((2, columns, 32))
            side_contexts(plane.reshape((2, columns, 32)), sides[s, 1], sides[s, 2], other, found)
            status = max(status, encode_side(plane, found, side_offsets[s], entries, rows, words, state, pos))
        cell_contexts(side_symbols, side_at, meta, levels, base, 1, 0, contexts)
        width = n_cells * cell_stride
        strides = (width, cell_stride, 1, 2 * width)
        n_lanes = (rows + 1) // 2
        n_states = n_lanes if by_rans else 0
        if not by_rans:
            found_cells = encode_cells(
                group.ravel(), strides, contexts, cell_offsets, entries, cell_symbols, last, rows, words, state, pos
            )
            status = max(status, found_cells)
        if status != 0:
            sizes[g] = -1
            continue
        n_left = left_over(state)
        n_tail = min(n_left + 16 * n_states, n_raw)
        n_body = n_raw - n_tail
        finish_lanes(words, state, raw, n_body, min(n_tail, n_left))
        n_words = pos[0]
        if by_rans:
            for i in range(np.uint64(flat_contexts.size)):
                flat_tables[i] = cell_tables[np.uint64(flat_contexts[i])]
            bit = n_body + n_left
            for lane in range(n_lanes):
                x = uint32(1)
                for _ in range(16):
                    x = x << uint32(1)
                    if bit < n_raw:
                        x |= uint32((raw[bit >> 3] >> (7 - (bit & 7))) & 1)
                    bit += 1
                states[lane] = x
            n_halves = encode_rans(group.ravel(), strides, tables, freqs, cell_symbols, rows, states, rans_words)
            if n_halves < 0 or n_words + n_lanes + (n_halves + 1) // 2 > words.size:
                sizes[g] = -1
                continue
            for lane in range(n_lanes):
                words[n_words + lane] = states[lane]
            n_words += n_lanes
            start = rans_words.size - n_halves
            for i in range(0, n_halves, 2):
                word = uint32(rans_words[start + i])
                if i + 1 < n_halves:
                    word |= uint32(rans_words[start + i + 1]) << uint32(16)
                words[n_words] = word
                n_words += 1
        body_words = (n_body + 31) // 32
        if n_words + body_words > words.size:
            sizes[g] = -1
            continue
        if n_body & 7:
            raw[n_body >> 3] &= (0xFF00 >> (n_body & 7)) & 255
        body_bytes = (n_body + 7) // 8
        raw[body_bytes : body_words * 4] = 0
        _put_words(raw, body_words, words[n_words:])
        sizes[g] = front + n_words + body_words
        if 4 * sizes[g] >= rows * row_bytes:  # it is stored raw: so `out` never fills up
            sizes[g] = -1
            continue
        out_at += sizes[g]
    return out_at
