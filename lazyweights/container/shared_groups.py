"""Shared rows in numba: row groups of tensors whose rows share their side values, to symbols, counts and words.

Arrays are those of `group_encode`; `references` and `columns` those of `shared_rows`. Side columns are numbered plane after
plane: column c of plane s is number ``side_at[s] // 64 + c``.
"""

from __future__ import annotations

import numpy as np
from numba import njit, uint32

from lazyweights.codecs.rans import encode_rans
from lazyweights.container.group_encode import _split_sides, columns_of, side_offsets_of
from lazyweights.container.symbol_kernels import log_level

CODE_SIGNED, CODES, CODE_BITS = 0, 1, 2
"""Indices into `code_shape`: whether a symbol is one signed byte, the codes of a symbol, and the bits of a code."""


@njit(cache=True, nogil=True)
def count_columns(symbols: np.ndarray, counts: np.ndarray) -> None:
    """Add symbols, uint8 (rows, columns), to the counts of their columns, int64 (columns, 256)."""
    for row in range(symbols.shape[0]):
        for column in range(np.uint64(symbols.shape[1])):
            counts[column, symbols[row, column]] += 1


@njit(cache=True, nogil=True)
def fill_side_rows(half_values: np.ndarray, byte_values: np.ndarray, delta_of: np.ndarray, sides: np.ndarray) -> None:
    """Fill the side symbols of rows, uint8 (rows, side columns): plane after plane, in stream order.

    `delta_of` int64 (n_halves,): the half field that is subtracted, or -1.
    """
    n_halves, n_rows, n_blocks = half_values.shape
    for row in range(n_rows):
        for f in range(n_halves):
            delta = max(delta_of[f], 0)
            keep = np.int32(0x7FFF if delta_of[f] >= 0 else 0)
            high = np.uint64(2 * f * n_blocks)
            low = high + np.uint64(n_blocks)
            for block in range(np.uint64(n_blocks)):
                stored = np.int32(half_values[f, row, block])
                v = (stored - (np.int32(half_values[delta, row, block]) & keep)) & np.int32(0x7FFF)
                sides[row, high + block] = v >> np.int32(7)
                sides[row, low + block] = (v & np.int32(127)) | ((stored >> np.int32(8)) & np.int32(128))
        at = np.uint64(2 * n_halves * n_blocks)
        for column in range(np.uint64(byte_values.shape[1])):
            sides[row, at + column] = byte_values[row, column]


@njit(cache=True, nogil=True)
def fill_modes(rows: np.ndarray, labels: np.ndarray, out: np.ndarray) -> None:
    """Fill the most frequent value of each column of rows, uint8 (n, columns), that have a label, the smallest of equal ones.

    `labels` int64 (n,); `out` uint8 (n_labels, columns).
    """
    counts = np.zeros((out.shape[0], 256), np.int32)
    for column in range(rows.shape[1]):
        counts[:] = 0
        for row in range(rows.shape[0]):
            counts[labels[row], rows[row, column]] += np.int32(1)
        for label in range(out.shape[0]):
            most = 0
            for value in range(1, 256):
                most = value if counts[label, value] > counts[label, most] else most
            out[label, column] = most


@njit(cache=True, nogil=True)
def least_different(rows: np.ndarray) -> int:
    """Return the sum, over rows uint8 (n, columns), of how many values differ from those of the other row that is most alike."""
    n_rows, n_columns = rows.shape
    least = np.full(n_rows, n_columns + 1)
    for i in range(n_rows):
        for k in range(i):
            n = np.uint32(0)
            for column in range(np.uint64(n_columns)):
                n += np.uint32(rows[i, column] != rows[k, column])
            least[i] = min(least[i], np.int64(n))
            least[k] = min(least[k], np.int64(n))
    return least.sum()


@njit(cache=True, nogil=True)
def count_different(rows: np.ndarray, references: np.ndarray, out: np.ndarray) -> None:
    """Count in how many values each row, uint8 (n, columns), differs from each reference; `out` int64 (n, references)."""
    for i in range(rows.shape[0]):
        for k in range(references.shape[0]):
            n = np.uint32(0)
            for column in range(np.uint64(rows.shape[1])):
                n += np.uint32(rows[i, column] != references[k, column])
            out[i, k] = n


@njit(cache=True, nogil=True)
def shift_levels(
    differences: np.ndarray,
    side_at: np.ndarray,
    meta: np.ndarray,
    levels: np.ndarray,
    references: np.ndarray,
    row_symbols: np.ndarray,
    cell_levels: np.ndarray,
) -> None:
    """Fill the level of each cell: that of its row, less four for each octave that its scale is above the reference.

    Parameters
    ----------
    differences : uint8, flat; plane s is (2 phases, columns, 32) from ``side_at[s]``: side symbols less the references
    row_symbols : uint8 (2, 32), ``16 * reference + level``
    cell_levels : int32 (2, cells, 32), output, 0 .. 15
    """
    n_cells = meta[1]
    scale_at, scale_end = side_at[meta[7]], side_at[meta[7] + 1]
    scale_columns = (scale_end - scale_at) // 64
    per_scale = n_cells // scale_columns
    lanes = np.uint64(32)
    any_scale = differences[scale_at:scale_end].any()
    any_sub = False
    sub_at = np.int64(0)
    if meta[8] >= 0:
        sub_at = side_at[meta[8]]
        any_sub = differences[sub_at : side_at[meta[8] + 1]].any()
    for phase in range(2):
        for cell in range(n_cells):
            at = np.uint64(scale_at + (phase * scale_columns + cell // per_scale) * 32)
            if not any_scale and not any_sub:
                for lane in range(lanes):
                    cell_levels[phase, cell, lane] = row_symbols[phase, lane] & np.uint8(15)
                continue
            for lane in range(lanes):
                cell_levels[phase, cell, lane] = np.int32(np.int8(differences[at + lane]))
            if any_sub:
                column = sub_at // 64 + cell
                for lane in range(32):
                    number = min(np.int64(row_symbols[phase, lane]) >> 4, references.shape[0] - 1)
                    reference = np.int64(references[number, column])
                    sub = (np.int64(differences[sub_at + (phase * n_cells + cell) * 32 + lane]) + reference) & 255
                    cell_levels[phase, cell, lane] += levels[0, sub] - levels[0, reference]
            for lane in range(lanes):
                level = np.int32(row_symbols[phase, lane] & np.uint8(15)) - (cell_levels[phase, cell, lane] >> np.int32(1))
                cell_levels[phase, cell, lane] = min(max(level, np.int32(0)), np.int32(15))


@njit(cache=True, nogil=True)
def _row_width(
    symbols: np.ndarray, start: int, phase: int, lane: int, cell_levels: np.ndarray, cell_symbols: int, code_shape: np.ndarray
) -> int:
    """Return how far the codes of a row lie apart, in 1/8 octaves: the mean distance of neighbours in a cell.

    It says how wide codes spread wherever zero is. The row begins at `start` of `symbols`, uint8, flat. Only cells of the
    middle level count, if there are any.
    """
    n_cells = cell_levels.shape[1]
    some = False
    for cell in range(n_cells):
        some |= cell_levels[phase, cell, lane] == 8
    total = np.int64(0)
    n = np.int64(0)
    steps = np.uint64(cell_symbols - 1)
    one = np.uint64(1)
    mask = np.uint8((1 << code_shape[2]) - 1)
    for cell in range(n_cells):
        if some and cell_levels[phase, cell, lane] != 8:
            continue
        at = np.uint64(start + cell * cell_symbols)
        of_cell = np.int32(0)
        if code_shape[0]:
            for i in range(steps):
                of_cell += abs(np.int32(np.int8(symbols[at + i])) - np.int32(np.int8(symbols[at + i + one])))
        else:
            for k in range(code_shape[1]):
                shift = np.uint8(k * code_shape[2])
                for i in range(steps):
                    a, b = (symbols[at + i] >> shift) & mask, (symbols[at + i + one] >> shift) & mask
                    of_cell += abs(np.int32(a) - np.int32(b))
        total += of_cell
        n += code_shape[1] * (cell_symbols - 1)
    return log_level(16 * total // max(n, 1))


@njit(cache=True, nogil=True)
def prepare_group(
    first: int,
    n_rows: int,
    half_values: np.ndarray,
    byte_values: np.ndarray,
    symbols: np.ndarray,
    meta: np.ndarray,
    sides: np.ndarray,
    halves: np.ndarray,
    byte_fields: np.ndarray,
    levels: np.ndarray,
    references: np.ndarray,
    row_base: int,
    code_shape: np.ndarray,
    side_at: np.ndarray,
    low_bits: np.ndarray,
    differences: np.ndarray,
    row_symbols: np.ndarray,
    cell_levels: np.ndarray,
    widths: np.ndarray,
) -> None:
    """Find the symbols of a row group that starts at row `first`.

    Output: `differences` and `cell_levels` as for `shift_levels`, `row_symbols` uint8 (2, 32), and `widths` int64 (rows,), what
    `_row_width` says of each row.
    """
    flat = symbols.reshape(symbols.size)
    _split_sides(
        first, n_rows, half_values, byte_values, meta, sides, halves, byte_fields, side_at, differences, low_bits
    )
    row_symbols[:] = 0
    for row in range(n_rows):
        phase, lane = row & 1, row >> 1
        nearest, fewest = 0, np.int64(1) << 62
        for k in range(references.shape[0] if references.shape[0] > 1 else 0):
            n = np.int64(0)
            for s in range(sides.shape[0]):
                columns = columns_of(sides[s, 0], meta[0])
                at = side_at[s] + phase * columns * 32 + lane
                for column in range(columns):
                    n += np.int64(differences[at + 32 * column] != references[k, side_at[s] // 64 + column])
            if n < fewest:
                nearest, fewest = k, n
        for s in range(sides.shape[0]):
            columns = columns_of(sides[s, 0], meta[0])
            at = side_at[s] + phase * columns * 32 + lane
            for column in range(columns):
                differences[at + 32 * column] -= references[nearest, side_at[s] // 64 + column]
        row_symbols[phase, lane] = 16 * nearest + 8
    # Cells at the level of their row, for now the middle one, tell how wide it is.
    shift_levels(differences, side_at, meta, levels, references, row_symbols, cell_levels)
    for row in range(n_rows):
        phase, lane = row & 1, row >> 1
        start = (first + row) * symbols.shape[1]
        widths[first + row] = _row_width(flat, start, phase, lane, cell_levels, meta[2], code_shape)
        level = min(max((widths[first + row] - row_base) >> 1, 0), 15)
        row_symbols[phase, lane] += level - 8
    shift_levels(differences, side_at, meta, levels, references, row_symbols, cell_levels)


@njit(cache=True, nogil=True)
def count_shared_groups(
    n_rows: int,
    half_values: np.ndarray,
    byte_values: np.ndarray,
    symbols: np.ndarray,
    meta: np.ndarray,
    sides: np.ndarray,
    halves: np.ndarray,
    byte_fields: np.ndarray,
    levels: np.ndarray,
    references: np.ndarray,
    columns: np.ndarray,
    row_base: int,
    code_shape: np.ndarray,
    side_counts: np.ndarray,
    cell_counts: np.ndarray,
    widths: np.ndarray,
) -> None:
    """Add the symbols of a run of row groups to the counts of their contexts.

    `side_counts` int64 (n_sides + 2, 256): of the side planes, the row symbols, and the last codes of the rows, which have no
    context; `cell_counts` uint32 (512, 256); `widths` int64 (rows,), output. Where
    `cell_counts` has no rows, nothing is counted.
    """
    n_cells = meta[1]
    n_sides = sides.shape[0]
    side_at = side_offsets_of(meta, sides)
    differences = np.zeros(side_at[-1], np.uint8)
    low_bits = np.zeros((max(halves.shape[0], 1), 64 * meta[0]), np.uint16)
    row_symbols = np.zeros((2, 32), np.uint8)
    cell_levels = np.zeros((2, n_cells, 32), np.int32)
    for first in range(0, n_rows, 64):
        rows = min(64, n_rows - first)
        prepare_group(
            first, rows, half_values, byte_values, symbols, meta, sides, halves, byte_fields, levels, references, row_base,
            code_shape, side_at, low_bits, differences, row_symbols, cell_levels, widths,
        )
        if cell_counts.size == 0:
            continue
        for row in range(rows):
            phase, lane = row & 1, row >> 1
            for s in range(n_sides):
                n_columns = columns_of(sides[s, 0], meta[0])
                at = side_at[s] + phase * n_columns * 32 + lane
                for column in range(n_columns):
                    side_counts[s, differences[at + 32 * column]] += 1
            side_counts[n_sides, row_symbols[phase, lane]] += 1
            for cell in range(n_cells):
                start = np.uint64(cell * meta[2])
                level = np.uint64(cell_levels[phase, cell, lane])
                for i in range(np.uint64(meta[2] - (cell == n_cells - 1))):
                    column = start + i
                    context = (np.uint64(columns[column]) << np.uint64(4)) + level
                    cell_counts[context, np.uint64(symbols[first + row, column])] += uint32(1)
            side_counts[n_sides + 1, symbols[first + row, columns.size - 1]] += 1


@njit(cache=True, nogil=True)
def encode_shared_groups(
    n_rows: int,
    half_values: np.ndarray,
    byte_values: np.ndarray,
    symbols: np.ndarray,
    meta: np.ndarray,
    sides: np.ndarray,
    halves: np.ndarray,
    byte_fields: np.ndarray,
    levels: np.ndarray,
    references: np.ndarray,
    columns: np.ndarray,
    row_base: int,
    code_shape: np.ndarray,
    side_tables: np.ndarray,
    row_table: int,
    cell_tables: np.ndarray,
    freqs: np.ndarray,
    row_bytes: int,
    out: np.ndarray,
    sizes: np.ndarray,
) -> int:
    """Encode a run of row groups; return the words written.

    Parameters
    ----------
    side_tables : uint8 (n_sides, 32), of which the first of each plane counts
    freqs, row_bytes, out, sizes : as for `group_encode.encode_groups`
    """
    n_cells = meta[1]
    n_coded = columns.size - 1
    side_at = side_offsets_of(meta, sides)
    differences = np.zeros(side_at[-1], np.uint8)
    low_bits = np.zeros((max(halves.shape[0], 1), 64 * meta[0]), np.uint16)
    row_symbols = np.zeros((2, 32), np.uint8)
    cell_levels = np.zeros((2, n_cells, 32), np.int32)
    widths = np.zeros(n_rows, np.int64)
    tables = np.zeros((2, n_coded, 32), np.uint8)
    most = 1
    for s in range(sides.shape[0]):
        most = max(most, columns_of(sides[s, 0], meta[0]))
    constant = np.zeros(64 * most, np.uint8)
    states = np.zeros(32, np.uint32)
    scratch = np.zeros(64 * columns.size + side_at[-1] + 128, np.uint16)
    out_at = 0
    for first in range(0, n_rows, 64):
        g = first // 64
        rows = min(64, n_rows - first)
        n_lanes = (rows + 1) // 2
        prepare_group(
            first, rows, half_values, byte_values, symbols, meta, sides, halves, byte_fields, levels, references, row_base,
            code_shape, side_at, low_bits, differences, row_symbols, cell_levels, widths,
        )
        group = symbols[first : first + rows]
        for phase in range(2):
            for column in range(n_coded):
                context = np.uint64(columns[column]) << np.uint64(4)
                cell = column // meta[2]
                for lane in range(np.uint64(32)):
                    tables[phase, column, lane] = cell_tables[context + np.uint64(cell_levels[phase, cell, lane])]
        # The coder runs backwards: from the last codes, which are its starting states, to the row symbols.
        for lane in range(n_lanes):
            states[lane] = uint32(0x10000) | (uint32(group[2 * lane, n_coded]) << uint32(8))
            if 2 * lane + 1 < rows:
                states[lane] |= uint32(group[2 * lane + 1, n_coded])
        strides = (columns.size, 1, 1, 2 * columns.size)
        n_halves = encode_rans(group.ravel(), strides, tables, freqs, 1, rows, states, scratch)
        s = sides.shape[0]
        while n_halves >= 0 and s >= 0:
            # Behind the side planes, and so in front of them in the stream, come the row symbols.
            is_row = s == 0
            plane = s - 1
            n_columns = 1 if is_row else columns_of(sides[plane, 0], meta[0])
            constant[: 64 * n_columns] = row_table if is_row else side_tables[plane, 0]
            of_plane = constant[: 64 * n_columns].reshape((2, n_columns, 32))
            values = row_symbols.reshape(64) if is_row else differences[side_at[plane] : side_at[plane + 1]]
            left = scratch[: scratch.size - n_halves]
            n = encode_rans(values, (32 * n_columns, 32, 1, 1), of_plane, freqs, 1, rows, states, left)
            n_halves = n_halves + n if n >= 0 else n
            s -= 1
        n_words = n_lanes + (n_halves + 1) // 2
        if n_halves < 0 or 4 * n_words >= rows * row_bytes or out_at + n_words > out.size:
            sizes[g] = -1
            continue
        for lane in range(n_lanes):
            out[out_at + lane] = states[lane]
        start = scratch.size - n_halves
        at = out_at + n_lanes
        for i in range(0, n_halves, 2):
            word = uint32(scratch[start + i])
            if i + 1 < n_halves:
                word |= uint32(scratch[start + i + 1]) << uint32(16)
            out[at] = word
            at += 1
        sizes[g] = n_words
        out_at += n_words
    return out_at
