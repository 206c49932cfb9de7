"""The context of each cell: which table its codes are decoded with, found from the side symbols alone."""

from __future__ import annotations

import numpy as np
from numba import njit

# Indices into `meta`, the integer parameters of a tensor.
BLOCKS, CELLS, CELL_SYMBOLS, FORCED_CELL_SYMBOLS, FORCED, MODE, ZERO_BASE = 0, 1, 2, 3, 4, 5, 6
SCALE_SIDE, SUB_SIDE, MIN_SIDE, SUB_MIN_SIDE, LEVEL_STEPS = 7, 8, 9, 10, 11


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
    says where zero sits among the codes.

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
    if mode == 0:
        per_block = n_cells // n_blocks
        for phase in range(2):
            for cell in range(n_cells):
                contexts[phase, cell, :] = base + (cell % per_block) % 256
        return
    scale_at = n_streams * side_at[meta[7]]
    scale_columns = (side_at[meta[7] + 1] - side_at[meta[7]]) // 64
    per_scale = n_cells // scale_columns
    level = np.empty((n_cells, 32), np.int32)
    mean16 = np.empty(32, np.int32)
    spread = np.empty(32, np.int32)
    for phase in range(2):
        plane = phase * n_streams + stream
        mean16[:] = 0
        for cell in range(n_cells):
            at = scale_at + (plane * scale_columns + cell // per_scale) * 32
            if meta[11]:
                for lane in range(32):
                    level[cell, lane] = np.int32(side_symbols[at + lane]) * np.int32(meta[11])
            elif meta[8] >= 0:
                sub_at = n_streams * side_at[meta[8]] + (plane * n_cells + cell) * 32
                for lane in range(32):
                    level[cell, lane] = np.int32(side_symbols[at + lane]) + levels[0, side_symbols[sub_at + lane]]
            else:
                for lane in range(32):
                    level[cell, lane] = np.int32(side_symbols[at + lane])
            for lane in range(32):
                mean16[lane] += level[cell, lane]
        for lane in range(32):
            mean16[lane] = np.int32(np.int64(mean16[lane]) * 16 // n_cells)
        spread[:] = 0
        for cell in range(n_cells):
            for lane in range(32):
                relative = level[cell, lane] * 16 - mean16[lane]
                spread[lane] += abs(relative)
                contexts[phase, cell, lane] = base + min(max(((relative + 8) >> 4) + 8, 0), 15)
        if mode == 1:
            for lane in range(32):
                spread[lane] = 16 * min(spread[lane] // np.int32(8 * n_cells), 15)
            for cell in range(n_cells):
                for lane in range(32):
                    contexts[phase, cell, lane] += spread[lane]
            continue
        zero_base = np.int32(meta[6])
        min_at = n_streams * side_at[meta[9]]
        for cell in range(n_cells):
            at = min_at + (plane * scale_columns + cell // per_scale) * 32
            if meta[10] >= 0:
                sub_at = n_streams * side_at[meta[8]] + (plane * n_cells + cell) * 32
                sub_min_at = n_streams * side_at[meta[10]] + (plane * n_cells + cell) * 32
                for lane in range(32):
                    zero = np.int32(np.int8(side_symbols[at + lane]))
                    zero += levels[1, side_symbols[sub_min_at + lane]] - levels[0, side_symbols[sub_at + lane]]
                    contexts[phase, cell, lane] += 16 * min(max(zero - zero_base, 0), 15)
            else:
                for lane in range(32):
                    zero = np.int32(np.int8(side_symbols[at + lane]))
                    contexts[phase, cell, lane] += 16 * min(max(zero - zero_base, 0), 15)
