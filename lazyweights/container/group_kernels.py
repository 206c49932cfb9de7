"""Row groups in numba: planes to symbols, contexts, counts and words, and back. Data-driven by `stream_layout`.

All functions work on a run of whole row groups of one tensor (64 rows each, the last may be shorter) and loop inside
compiled code, so that Python's overhead is paid once a run. Tables of a tensor's parameters are plain integer arrays
(built in `tensor_coder`):

- ``meta``: see the META constants;
- ``sides`` (n_sides, 4): values per block, context kind, base, the side plane that OTHER_PLANE looks at;
- ``halves`` (n_halves, 5): side plane of the high byte, side plane of the low byte or -1, raw bits of the low part
  (0, 7 or 8), the sign bit where it is not stored, delta_of or -1;
- ``byte_fields`` (n, 3): side plane, values per block, first column;
- ``raws`` (n, 3): values per block, bits, first column;
- ``levels`` (2, 256): level of each sub-scale and sub-min.

Plane arrays, row-major: ``half_values`` uint16 (n_halves, rows, blocks), ``byte_values`` uint8 (rows, columns of all byte
fields), ``symbols`` uint8 (rows, cells * cell symbols), ``raw_values`` uint32 (rows, columns of all raw planes).
"""

from __future__ import annotations

import numpy as np
from numba import njit, uint32

from lazyweights.codecs.lane_kernels import (
    decode_cells_phase,
    decode_side_phase,
    encode_cells,
    flush_lanes,
    left_over_bits,
    side_contexts,
)
from lazyweights.container.bit_kernels import pack_bits, unpack_bits

# Indices into `meta`.
BLOCKS, CELLS, CELL_SYMBOLS, FORCED_CELL_SYMBOLS, FORCED, MODE, ZERO_BASE = 0, 1, 2, 3, 4, 5, 6
SCALE_SIDE, SUB_SIDE, MIN_SIDE, SUB_MIN_SIDE, LEVEL_STEPS, N_META = 7, 8, 9, 10, 11, 12

GROUP_OK, GROUP_RAW, GROUP_DAMAGED = 0, 1, 2


@njit(cache=True, nogil=True)
def _forced_bits(forced: int) -> int:
    if forced == 1:
        return 5
    if forced == 2:
        return 10
    if forced == 3:
        return 6
    return 0


@njit(cache=True, nogil=True)
def _take_forced(symbols: np.ndarray, meta: np.ndarray, positions: np.ndarray) -> bool:
    """Move the forced codes of each block to its end, in place; return False (nothing changed) where one is missing.

    `symbols` uint8 (rows, blocks * cell symbols); `positions` uint32 (rows * blocks,), what goes into the raw bits.
    """
    forced = meta[4]
    n_rows = symbols.shape[0]
    n_blocks = meta[0]
    width = meta[2]
    for row in range(n_rows):
        for block in range(n_blocks):
            cell = symbols[row, block * width : (block + 1) * width]
            lowest = False
            highest = False
            if forced == 3:
                for i in range(width):
                    v = cell[i]
                    lowest |= v == 127 or v == 129
                highest = True
            elif forced == 2 and width == 16:
                for i in range(width):
                    v = cell[i]
                    lowest |= (v & 15) == 0 or (v >> 4) == 0
                    highest |= (v & 15) == 15 or (v >> 4) == 15
            else:
                for i in range(width):
                    v = cell[i]
                    lowest |= v == 0
                    highest |= v == 31
                highest |= forced == 1
            if not (lowest and highest):
                return False
    k = 0
    for row in range(n_rows):
        for block in range(n_blocks):
            cell = symbols[row, block * width : (block + 1) * width]
            first = 0
            second = 0
            if forced == 3:
                while cell[first] != 127 and cell[first] != 129:
                    first += 1
                negative = cell[first] >> 7
                cell[first] = cell[31]
                cell[31] = 0
                positions[k] = first << 1 | negative
            elif forced == 1:
                while cell[first] != 0:
                    first += 1
                cell[first] = cell[31]
                cell[31] = 0
                positions[k] = first
            elif width == 32:
                while cell[first] != 0:
                    first += 1
                cell[first] = cell[30]
                cell[30] = 0
                while cell[second] != 31:
                    second += 1
                cell[second] = cell[31]
                cell[31] = 31
                positions[k] = first << 5 | second
            else:
                while _nibble(cell, first) != 0:
                    first += 1
                _set_nibble(cell, first, _nibble(cell, 15))
                _set_nibble(cell, 15, 0)
                while _nibble(cell, second) != 15:
                    second += 1
                _set_nibble(cell, second, _nibble(cell, 31))
                _set_nibble(cell, 31, 15)
                positions[k] = first << 5 | second
            k += 1
    return True


@njit(inline="always")
def _nibble(cell: np.ndarray, i: int) -> int:
    return (cell[i & 15] >> ((i >> 4) << 2)) & 15


@njit(inline="always")
def _set_nibble(cell: np.ndarray, i: int, value: int) -> None:
    shift = (i >> 4) << 2
    cell[i & 15] = (cell[i & 15] & ~(15 << shift) & 255) | (value << shift)


@njit(cache=True, nogil=True)
def put_forced(symbols: np.ndarray, forced: int, n_blocks: int, width: int, stride: int, positions: np.ndarray) -> None:
    """Undo `_take_forced`: block b of a row starts at column ``b * stride`` of `symbols`."""
    n_rows = symbols.shape[0]
    k = 0
    for row in range(n_rows):
        for block in range(n_blocks):
            at = block * stride
            position = np.int64(positions[k])
            if forced == 3:
                first = position >> 1
                symbols[row, at + 31] = symbols[row, at + first]
                symbols[row, at + first] = 129 if position & 1 else 127
            elif forced == 1:
                symbols[row, at + 31] = symbols[row, at + position]
                symbols[row, at + position] = 0
            elif width == 32:
                second = position & 31
                first = position >> 5
                symbols[row, at + 30] = 0
                symbols[row, at + 31] = symbols[row, at + second]
                symbols[row, at + second] = 31
                symbols[row, at + 30] = symbols[row, at + first]
                symbols[row, at + first] = 0
            else:
                second = position & 31
                first = position >> 5
                cell = symbols[row, at : at + 16]
                cell[15] = 0xF0
                _set_nibble(cell, 31, _nibble(cell, second))
                _set_nibble(cell, second, 15)
                _set_nibble(cell, 15, _nibble(cell, first))
                _set_nibble(cell, first, 0)
            k += 1


@njit(cache=True, nogil=True)
def cell_contexts(
    side_symbols: np.ndarray,
    side_at: np.ndarray,
    meta: np.ndarray,
    levels: np.ndarray,
    base: int,
    contexts: np.ndarray,
) -> None:
    """Fill the context of each cell from the side symbols of the row group.

    Parameters
    ----------
    side_symbols : uint8, flat: plane s is (2, columns, 32) from element ``side_at[s]`` on
    meta, levels : see the module
    base : 0, or 256 where the group's codes are not forced
    contexts : int32 (2, cells, 32), output
    """
    n_blocks = meta[0]
    n_cells = meta[1]
    mode = meta[5]
    per_block = n_cells // n_blocks if n_blocks else 1
    if mode == 0:
        for phase in range(2):
            for cell in range(n_cells):
                contexts[phase, cell, :] = base + (cell % per_block) % 256
        return
    scale = side_symbols[side_at[meta[7]] : side_at[meta[7] + 1]]
    level = np.empty((n_cells, 32), np.int32)
    mean16 = np.empty(32, np.int32)
    for phase in range(2):
        scale_columns = scale.size // 64
        per_scale = n_cells // scale_columns
        mean16[:] = 0
        for cell in range(n_cells):
            at = (phase * scale_columns + cell // per_scale) * 32
            if meta[11]:
                for lane in range(32):
                    level[cell, lane] = np.int32(scale[at + lane]) * np.int32(meta[11])
            elif meta[8] >= 0:
                sub_at = side_at[meta[8]] + (phase * n_cells + cell) * 32
                for lane in range(32):
                    level[cell, lane] = np.int32(scale[at + lane]) + levels[0, side_symbols[sub_at + lane]]
            else:
                for lane in range(32):
                    level[cell, lane] = np.int32(scale[at + lane])
            for lane in range(32):
                mean16[lane] += level[cell, lane]
        for lane in range(32):
            mean16[lane] = np.int32(np.int64(mean16[lane]) * 16 // n_cells)
        for cell in range(n_cells):
            for lane in range(32):
                relative = ((level[cell, lane] * 16 - mean16[lane] + 8) >> 4) + 8
                contexts[phase, cell, lane] = base + min(max(relative, 0), 15)
            if mode == 2:
                min_at = side_at[meta[9]] + (phase * scale_columns + cell // per_scale) * 32
                if meta[10] >= 0:
                    sub_at = side_at[meta[8]] + (phase * n_cells + cell) * 32
                    sub_min_at = side_at[meta[10]] + (phase * n_cells + cell) * 32
                    for lane in range(32):
                        zero = np.int32(np.int8(side_symbols[min_at + lane]))
                        zero += levels[1, side_symbols[sub_min_at + lane]] - levels[0, side_symbols[sub_at + lane]]
                        contexts[phase, cell, lane] += 16 * min(max(zero - np.int32(meta[6]), 0), 15)
                else:
                    for lane in range(32):
                        zero = np.int32(np.int8(side_symbols[min_at + lane]))
                        contexts[phase, cell, lane] += 16 * min(max(zero - np.int32(meta[6]), 0), 15)


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
    """Fill the side symbols of one row group and the low parts of its halves (uint16 (n_halves, rows, blocks))."""
    n_blocks = meta[0]
    side_symbols[:] = 0
    for f in range(halves.shape[0]):
        hi_at = side_at[halves[f, 0]]
        lo_at = side_at[halves[f, 1]] if halves[f, 1] >= 0 else -1
        delta = halves[f, 4]
        for row in range(n_rows):
            base = ((row & 1) * n_blocks) * 32 + (row >> 1)
            for block in range(n_blocks):
                v = np.int32(half_values[f, first + row, block])
                sign = v >> 15
                v &= 0x7FFF
                if delta >= 0:
                    v = (v - np.int32(half_values[delta, first + row, block] & 0x7FFF)) & 0x7FFF
                side_symbols[hi_at + base + block * 32] = v >> 7
                low = (v & 127) | (sign << 7)
                low_bits[f, row, block] = low
                if lo_at >= 0:
                    side_symbols[lo_at + base + block * 32] = low
    for f in range(byte_fields.shape[0]):
        at = side_at[byte_fields[f, 0]]
        n_columns = byte_fields[f, 1] * n_blocks
        for row in range(n_rows):
            base = ((row & 1) * n_columns) * 32 + (row >> 1)
            for column in range(n_columns):
                side_symbols[at + base + column * 32] = byte_values[first + row, byte_fields[f, 2] + column]


@njit(cache=True, nogil=True)
def _side_offsets(meta: np.ndarray, sides: np.ndarray) -> np.ndarray:
    at = np.zeros(sides.shape[0] + 1, np.int64)
    for s in range(sides.shape[0]):
        at[s + 1] = at[s] + 64 * meta[0] * sides[s, 0]
    return at


@njit(cache=True, nogil=True)
def count_groups(
    n_rows: int,
    half_values: np.ndarray,
    byte_values: np.ndarray,
    symbols: np.ndarray,
    meta: np.ndarray,
    sides: np.ndarray,
    halves: np.ndarray,
    byte_fields: np.ndarray,
    levels: np.ndarray,
    side_counts: np.ndarray,
    cell_counts: np.ndarray,
    forced_counts: np.ndarray,
) -> None:
    """Add the symbols of a run of row groups to the counts of their contexts.

    `side_counts` uint32 (n_sides, 32, 256); `cell_counts` uint32 (512, 256); `forced_counts` int64 (2,): blocks with
    forced codes, and how many of these are negative. `symbols` is changed: forced codes are taken out.
    """
    n_blocks = meta[0]
    n_cells = meta[1]
    side_at = _side_offsets(meta, sides)
    side_symbols = np.zeros(side_at[-1], np.uint8)
    low_bits = np.zeros((max(halves.shape[0], 1), 64, n_blocks), np.uint16)
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
            columns = sides[s, 0] * n_blocks
            plane = side_symbols[side_at[s] : side_at[s + 1]].reshape((2, columns, 32))
            o = sides[s, 3]
            other = side_symbols[side_at[o] : side_at[o + 1]].reshape((2, -1, 32))
            side_contexts(plane, sides[s, 1], sides[s, 2], other, side_context)
            for phase in range(2):
                n_lanes = (rows + 1 - phase) // 2
                for column in range(columns):
                    for lane in range(n_lanes):
                        side_counts[s, side_context[phase, column, lane], plane[phase, column, lane]] += 1
        cell_symbols = meta[2]
        base = 0
        if meta[4]:
            if _take_forced(symbols[first : first + rows], meta, positions):
                cell_symbols = meta[3]
                forced_counts[0] += rows * n_blocks
                if meta[4] == 3:
                    for i in range(rows * n_blocks):
                        forced_counts[1] += positions[i] & 1
            else:
                base = 256
        cell_contexts(side_symbols, side_at, meta, levels, base, contexts)
        for row in range(rows):
            for cell in range(n_cells):
                counts = cell_counts[contexts[row & 1, cell, row >> 1]]
                at = cell * meta[2]
                for i in range(cell_symbols):
                    counts[symbols[first + row, at + i]] += uint32(1)


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
    out: np.ndarray,
    sizes: np.ndarray,
    unforced: np.ndarray,
) -> int:
    """Encode a run of row groups.

    Parameters
    ----------
    entries : uint32 (n_tables, 256), encode entries
    side_tables : uint8 (n_sides, 32), table of each side context
    cell_tables : uint8 (512,), table of each cell context
    out : uint32, output words of all groups one after the other
    sizes : int64 (n_groups,), output, words of each group; -1 where it does not fit `out` or has no codeword
    unforced : bool (n_groups,), output, whether the group's codes are not forced

    Returns
    -------
    int : words written.
    """
    n_blocks = meta[0]
    n_cells = meta[1]
    side_at = _side_offsets(meta, sides)
    side_symbols = np.zeros(side_at[-1], np.uint8)
    low_bits = np.zeros((max(halves.shape[0], 1), 64, n_blocks), np.uint16)
    positions = np.zeros(64 * n_blocks, np.uint32)
    contexts = np.zeros((2, n_cells, 32), np.int32)
    tables = np.zeros((2, n_cells, 32), np.uint8)
    widest = 1
    for s in range(sides.shape[0]):
        widest = max(widest, sides[s, 0])
    raw_bits_per_row = 0
    for f in range(halves.shape[0]):
        raw_bits_per_row += n_blocks * halves[f, 2]
    raw_bits_per_row += n_blocks * _forced_bits(meta[4])
    for r in range(raws.shape[0]):
        raw_bits_per_row += n_blocks * raws[r, 0] * raws[r, 1]
    raw = np.zeros(64 * raw_bits_per_row // 8 + 16, np.uint8)
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
            if _take_forced(group, meta, positions):
                cell_symbols = meta[3]
                forced = meta[4]
            else:
                base = 256
        unforced[g] = base > 0
        # Raw bits.
        raw[:] = 0
        n_raw = 0
        for f in range(halves.shape[0]):
            for row in range(rows):
                n_raw = pack_bits(low_bits[f, row], halves[f, 2], raw, n_raw)
        if forced:
            n_raw = pack_bits(positions[: rows * n_blocks], _forced_bits(forced), raw, n_raw)
        for r in range(raws.shape[0]):
            columns = raws[r, 0] * n_blocks
            for row in range(rows):
                n_raw = pack_bits(
                    raw_values[first + row, raws[r, 2] : raws[r, 2] + columns], raws[r, 1], raw, n_raw
                )
        # The stream.
        words = out[out_at:]
        buf = np.zeros(32, np.uint64)
        pending = np.zeros(32, np.int32)
        held = np.zeros(32, np.int32)
        slots = np.zeros((32, 2), np.int64)
        pos = np.zeros(1, np.int64)
        status = 0
        for s in range(sides.shape[0]):
            columns = sides[s, 0] * n_blocks
            plane = side_symbols[side_at[s] : side_at[s + 1]]
            o = sides[s, 3]
            other = side_symbols[side_at[o] : side_at[o + 1]].reshape((2, -1, 32))
            side_table = np.empty((2, columns, 32), np.uint8)
            side_contexts(plane.reshape((2, columns, 32)), sides[s, 1], sides[s, 2], other, side_table)
            for phase in range(2):
                for column in range(columns):
                    for lane in range(32):
                        side_table[phase, column, lane] = side_tables[s, side_table[phase, column, lane]]
            if status == 0:
                status = encode_cells(
                    plane, (columns * 32, 32, 0, 1), side_table, entries, 1, rows, words, buf, pending, held, slots, pos
                )
        cell_contexts(side_symbols, side_at, meta, levels, base, contexts)
        for phase in range(2):
            for cell in range(n_cells):
                for lane in range(32):
                    tables[phase, cell, lane] = cell_tables[contexts[phase, cell, lane]]
        width = n_cells * meta[2]
        if status == 0:
            status = encode_cells(
                group.ravel(),
                (width, meta[2], 1, 2 * width),
                tables,
                entries,
                cell_symbols,
                rows,
                words,
                buf,
                pending,
                held,
                slots,
                pos,
            )
        if status != 0:
            sizes[g] = -1
            continue
        n_left = np.int64(0)
        for lane in range(32):
            n_left += held[lane]
        n_tail = min(n_left, n_raw)
        n_body = n_raw - n_tail
        tail = np.zeros((n_tail >> 3) + 2, np.uint8)
        for i in range(n_tail):
            k = n_body + i
            tail[i >> 3] |= ((raw[k >> 3] >> (7 - (k & 7))) & 1) << (7 - (i & 7))
        flush_lanes(words, buf, pending, held, slots, tail, n_tail)
        n_words = pos[0]
        body_words = (n_body + 31) // 32
        if n_words + body_words > words.size:
            sizes[g] = -1
            continue
        if n_body & 7:
            raw[n_body >> 3] &= (0xFF00 >> (n_body & 7)) & 255
        body_bytes = (n_body + 7) // 8
        raw[body_bytes : body_words * 4] = 0
        for i in range(body_words):
            words[n_words + i] = (
                uint32(raw[4 * i])
                | (uint32(raw[4 * i + 1]) << uint32(8))
                | (uint32(raw[4 * i + 2]) << uint32(16))
                | (uint32(raw[4 * i + 3]) << uint32(24))
            )
        sizes[g] = n_words + body_words
        out_at += sizes[g]
    return out_at


@njit(cache=True, nogil=True)
def _scatter_symbols(
    packed: np.ndarray, phase: int, n_lanes: int, symbols: np.ndarray, cell_stride: int, offset: int, n_cell: int
) -> None:
    """Write the decoder's packed symbols uint32 (cells, quads, 32) of one phase into rows of bytes.

    Symbol i of a cell goes to ``symbols[row, offset + cell * cell_stride + i]``; `n_cell` symbols are written.
    """
    n_quads = packed.shape[1]
    for cell in range(packed.shape[0]):
        at = offset + cell * cell_stride
        for quad in range(n_quads):
            left = n_cell - 4 * quad
            column = at + 4 * quad
            if left >= 4:
                for lane in range(n_lanes):
                    v = packed[cell, quad, lane]
                    row = 2 * lane + phase
                    symbols[row, column] = v & uint32(255)
                    symbols[row, column + 1] = (v >> uint32(8)) & uint32(255)
                    symbols[row, column + 2] = (v >> uint32(16)) & uint32(255)
                    symbols[row, column + 3] = (v >> uint32(24)) & uint32(255)
            else:
                for lane in range(n_lanes):
                    v = packed[cell, quad, lane]
                    row = 2 * lane + phase
                    for i in range(left):
                        symbols[row, column + i] = (v >> uint32(8 * i)) & uint32(255)


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
    half_values: np.ndarray,
    byte_values: np.ndarray,
    symbols: np.ndarray,
    symbol_layout: tuple,
    raw_values: np.ndarray,
    status: np.ndarray,
) -> None:
    """Decode a run of row groups into plane arrays.

    Parameters
    ----------
    words : uint32, holds all groups; at least 64 words lie behind the last of them
    starts, sizes : int64 (n_groups,), first word and words of each group
    kinds : uint8 (n_groups,), 0 forced or plain, 1 not forced, 2 skip (stored raw)
    flat_tables : uint16 of `canonical.decode_tables`
    side_offsets : int32 (n_sides, 32), table offset of each side context
    cell_offsets : int32 (512,), table offset of each cell context
    symbols : uint8 (rows, bytes), output; symbol i of cell c of a row goes to column ``offset + c * stride + i``
    symbol_layout : (stride, offset)
    status : uint8 (n_groups,), output: GROUP_OK or GROUP_DAMAGED
    """
    n_blocks = meta[0]
    n_cells = meta[1]
    stride, offset = symbol_layout
    side_at = _side_offsets(meta, sides)
    side_symbols = np.zeros(max(side_at[-1], 1), np.uint8)
    contexts = np.zeros((2, n_cells, 32), np.int32)
    offsets = np.zeros((n_cells, 32), np.int32)
    quads = (meta[2] + 3) // 4
    packed = np.empty((n_cells, quads, 32), np.uint32)
    positions = np.zeros(64 * n_blocks, np.uint32)
    low = np.zeros(n_blocks, np.uint16)
    raw_bits_per_row = n_blocks * _forced_bits(meta[4])
    for f in range(halves.shape[0]):
        raw_bits_per_row += n_blocks * halves[f, 2]
    for r in range(raws.shape[0]):
        raw_bits_per_row += n_blocks * raws[r, 0] * raws[r, 1]
    raw = np.zeros(64 * raw_bits_per_row // 8 + 64 * 8 + 64, np.uint8)
    buf = np.zeros(32, np.uint64)
    held = np.zeros(32, np.int32)
    pos = np.zeros(1, np.int64)
    for first in range(0, n_rows, 64):
        g = first // 64
        status[g] = 0
        if kinds[g] == 2:
            continue
        rows = min(64, n_rows - first)
        forced = meta[4]
        base = 0
        cell_symbols = meta[3]
        if kinds[g] == 1:
            forced = 0
            base = 256
            cell_symbols = meta[2]
        start = starts[g]
        size = sizes[g]
        buf[:] = 0
        held[:] = 0
        pos[0] = 0
        stream = words[start:]
        limit = stream.size
        for s in range(sides.shape[0]):
            columns = sides[s, 0] * n_blocks
            plane = side_symbols[side_at[s] : side_at[s + 1]].reshape((2, columns, 32))
            o = sides[s, 3]
            other = side_symbols[side_at[o] : side_at[o + 1]].reshape((2, -1, 32))
            for phase in range(2):
                n_lanes = (rows + 1 - phase) // 2
                if n_lanes:
                    decode_side_phase(
                        stream, limit, flat_tables, side_offsets[s], sides[s, 1], sides[s, 2], other[phase], n_lanes,
                        plane[phase], buf, held, pos,
                    )
        cell_contexts(side_symbols, side_at, meta, levels, base, contexts)
        group = symbols[first : first + rows]
        quads_now = (cell_symbols + 3) // 4
        view = packed.ravel()[: n_cells * quads_now * 32].reshape((n_cells, quads_now, 32))
        for phase in range(2):
            n_lanes = (rows + 1 - phase) // 2
            if n_lanes == 0:
                continue
            for cell in range(n_cells):
                for lane in range(32):
                    offsets[cell, lane] = cell_offsets[contexts[phase, cell, lane]]
            decode_cells_phase(stream, limit, flat_tables, offsets, cell_symbols, n_lanes, view, buf, held, pos)
            _scatter_symbols(view, phase, n_lanes, group, stride, offset, cell_symbols)
        n_words = pos[0]
        if n_words > size:
            status[g] = 2
            continue
        # Raw bits: the body behind the stream, the end in the left-over bits.
        n_raw = 0
        for f in range(halves.shape[0]):
            n_raw += rows * n_blocks * halves[f, 2]
        if forced:
            n_raw += rows * n_blocks * _forced_bits(forced)
        for r in range(raws.shape[0]):
            n_raw += rows * n_blocks * raws[r, 0] * raws[r, 1]
        n_left = np.int64(0)
        for lane in range(32):
            n_left += held[lane]
        n_body = n_raw - min(n_left, n_raw)
        body_words = (n_body + 31) // 32
        if n_words + body_words != size:
            status[g] = 2
            continue
        raw_words = raw[: 4 * ((raw.size) // 4)].view(np.uint32)
        for i in range(body_words):
            raw_words[i] = stream[n_words + i]
        end = (n_body + n_left + 7) // 8 + 8
        for i in range((n_body + 7) // 8, end):
            raw[i] = 0
        left_over_bits(buf, held, raw, n_body)
        at = 0
        for f in range(halves.shape[0]):
            hi_at = side_at[halves[f, 0]]
            lo_at = side_at[halves[f, 1]] if halves[f, 1] >= 0 else -1
            raw_bits = halves[f, 2]
            sign = halves[f, 3] << 15
            delta = halves[f, 4]
            for row in range(rows):
                lane_base = ((row & 1) * n_blocks) * 32 + (row >> 1)
                if raw_bits:
                    at = unpack_bits(raw, at, raw_bits, low)
                for block in range(n_blocks):
                    hi = np.int32(side_symbols[hi_at + lane_base + block * 32]) << 7
                    lo = np.int32(low[block])
                    if lo_at >= 0:
                        lo = np.int32(side_symbols[lo_at + lane_base + block * 32])
                    v = hi | (lo & 127)
                    if delta >= 0:
                        v = (v + np.int32(half_values[delta, first + row, block] & 0x7FFF)) & 0x7FFF
                    if raw_bits != 7:
                        v |= (lo >> 7) << 15
                    half_values[f, first + row, block] = v | sign
        for f in range(byte_fields.shape[0]):
            side = side_at[byte_fields[f, 0]]
            n_columns = byte_fields[f, 1] * n_blocks
            for row in range(rows):
                lane_base = ((row & 1) * n_columns) * 32 + (row >> 1)
                for column in range(n_columns):
                    byte_values[first + row, byte_fields[f, 2] + column] = side_symbols[side + lane_base + column * 32]
        if forced:
            at = unpack_bits(raw, at, _forced_bits(forced), positions[: rows * n_blocks])
            put_forced(group[:, offset:], forced, n_blocks, meta[2], stride, positions)
        for r in range(raws.shape[0]):
            columns = raws[r, 0] * n_blocks
            for row in range(rows):
                at = unpack_bits(raw, at, raws[r, 1], raw_values[first + row, raws[r, 2] : raws[r, 2] + columns])


