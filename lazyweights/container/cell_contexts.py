"""The context of each cell: which table its codes are decoded with, found from the side symbols alone."""

from __future__ import annotations

import numpy as np
from numba import njit

# Indices into `meta`, the integer parameters of a tensor.
BLOCKS, CELLS, CELL_SYMBOLS, FORCED_CELL_SYMBOLS, FORCED, MODE, ZERO_BASE = 0, 1, 2, 3, 4, 5, 6
SCALE_SIDE, SUB_SIDE, MIN_SIDE, SUB_MIN_SIDE, LEVEL_STEPS, LOW_BITS = 7, 8, 9, 10, 11, 12


@njit(cache=True, nogil=True)
def cell_contexts(
    side_symbols: np.ndarray,
    side_at: np.ndarray,
    meta: np.ndarray,
    levels: np.ndarray,
    base: int,
    n_streams: int,
    stream: int,
    contexts: np.ndarray,
) -> None:
    """Fill the context of each cell of a row group.

    The *level* of a cell is the logarithm of its scale (with its sub-scale) in 1/8 octaves. It is compared with the mean
    level of the row: the larger the scale for the row, the narrower the codes spread. The *spread* of a row is the mean
    distance of its levels from that mean. The *zero level* of formats with a min is the logarithm of min over scale: it
    says where zero sits among the codes. Floats and integers have no scale; there the level of a row is stored. The bytes
    of integers stand in cells of their own, which have contexts of their own: the level, and for low bytes one more.

    Parameters
    ----------
    side_symbols : uint8, flat; plane s of this group is (2 phases, n_streams, columns, 32) from ``n_streams * side_at[s]``
    side_at : int64 (n_sides + 1,), first element of each plane for one stream
    meta : int64, see the constants
    levels : int32 (2, 256), level of each sub-scale and sub-min
    base : 0, or 256 where the group's codes are not forced
    n_streams, stream : how many groups are interleaved in `side_symbols`, and which of them this is
    contexts : int32 (2, cells, 32), output
    """
    n_blocks = meta[0]
    n_cells = meta[1]
    mode = meta[5]
    base32 = np.int32(base)
    if mode == 0:
        per_block = n_cells // n_blocks
        for phase in range(2):
            for cell in range(n_cells):
                contexts[phase, cell, :] = base + (cell % per_block) % 256
        return
    scale_at = n_streams * side_at[meta[7]]
    if mode == 3:
        per_block = n_cells // n_blocks
        for phase in range(2):
            for cell in range(n_cells):
                place = np.int32(cell % per_block)
                for lane in range(32):
                    level_of_row = np.int32(side_symbols[scale_at + (phase * n_streams + stream) * 32 + lane])
                    contexts[phase, cell, lane] = base32 + ((level_of_row + place) & np.int32(255))
        return
    scale_columns = (side_at[meta[7] + 1] - side_at[meta[7]]) // 64
    per_scale = n_cells // scale_columns
    level = np.empty(n_cells * 32, np.int32)
    mean16 = np.empty(32, np.int32)
    spread = np.empty(32, np.int32)
    flat = contexts.reshape(contexts.size)
    # Unsigned indices: signed ones would be checked for being negative, which keeps loops from being vectorised.
    lanes = np.uint64(32)
    for phase in range(2):
        plane = phase * n_streams + stream
        mean16[:] = 0
        for cell in range(n_cells):
            at = np.uint64(scale_at + (plane * scale_columns + cell // per_scale) * 32)
            to = np.uint64(cell * 32)
            if meta[11]:
                for lane in range(lanes):
                    level[to + lane] = np.int32(side_symbols[at + lane]) * np.int32(meta[11])
            elif meta[8] >= 0:
                sub = np.uint64(n_streams * side_at[meta[8]] + (plane * n_cells + cell) * 32)
                for lane in range(lanes):
                    level[to + lane] = np.int32(side_symbols[at + lane]) + levels[0, side_symbols[sub + lane]]
            else:
                for lane in range(lanes):
                    level[to + lane] = np.int32(side_symbols[at + lane])
            for lane in range(lanes):
                mean16[lane] += level[to + lane]
        for lane in range(32):
            mean16[lane] = np.int32(np.int64(mean16[lane]) * 16 // n_cells)
        spread[:] = 0
        for cell in range(n_cells):
            at = np.uint64(cell * 32)
            to = np.uint64((phase * n_cells + cell) * 32)
            for lane in range(lanes):
                relative = (level[at + lane] << np.int32(4)) - mean16[lane]
                spread[lane] += abs(relative)
                relative = ((relative + np.int32(8)) >> np.int32(4)) + np.int32(8)
                flat[to + lane] = base32 + min(max(relative, np.int32(0)), np.int32(15))
        if mode == 1:
            for lane in range(32):
                spread[lane] = np.int32(16) * min(spread[lane] // np.int32(8 * n_cells), np.int32(15))
            for cell in range(n_cells):
                to = np.uint64((phase * n_cells + cell) * 32)
                for lane in range(lanes):
                    flat[to + lane] += spread[lane]
            continue
        zero_base = np.int32(meta[6])
        min_at = n_streams * side_at[meta[9]]
        for cell in range(n_cells):
            at = np.uint64(min_at + (plane * scale_columns + cell // per_scale) * 32)
            to = np.uint64((phase * n_cells + cell) * 32)
            if meta[10] >= 0:
                sub = np.uint64(n_streams * side_at[meta[8]] + (plane * n_cells + cell) * 32)
                sub_min = np.uint64(n_streams * side_at[meta[10]] + (plane * n_cells + cell) * 32)
                for lane in range(lanes):
                    zero = np.int32(np.int8(side_symbols[at + lane])) - zero_base
                    zero += levels[1, side_symbols[sub_min + lane]] - levels[0, side_symbols[sub + lane]]
                    flat[to + lane] += min(max(zero, np.int32(0)), np.int32(15)) << np.int32(4)
            else:
                for lane in range(lanes):
                    zero = np.int32(np.int8(side_symbols[at + lane])) - zero_base
                    flat[to + lane] += min(max(zero, np.int32(0)), np.int32(15)) << np.int32(4)
