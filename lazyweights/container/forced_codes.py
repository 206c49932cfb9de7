"""Codes that a quantizer cannot avoid: taken out of their blocks, so that only their position is stored.

The largest value of a Q8_0 block is always coded as 127 or -127; a Q4_1 or Q5_1 block always holds its smallest and its
largest code, a Q5_0 block its smallest. An entropy coder pays for each such code as if it could be missing. Here it is
swapped to the end of the block (a swap is undone exactly) and left out of the stream; its position, and for 127 its sign,
become raw bits. This holds for a whole row group or not at all: a group with a block that lacks the code is coded as it is.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from lazyweights.codecs.lane_kernels import put_forced_nibbles, take_forced_nibbles


@njit(cache=True, nogil=True)
def forced_bits(forced: int) -> int:
    if forced == 1:
        return 5
    if forced == 2:
        return 10
    if forced == 3:
        return 6
    return 0


@njit(inline="always")
def position_index(row: int, block: int, n_rows: int, n_blocks: int) -> int:
    """Place of a value among those of a row group in lane order: by row phase, block, lane."""
    phase = row & 1
    even_lanes = (n_rows + 1) // 2
    return phase * n_blocks * even_lanes + block * (even_lanes - phase * (n_rows & 1)) + (row >> 1)


@njit(cache=True, nogil=True)
def take_forced(symbols: np.ndarray, meta: np.ndarray, positions: np.ndarray) -> bool:
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
    for row in range(n_rows):
        for block in range(n_blocks):
            k = position_index(row, block, n_rows, n_blocks)
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
                positions[k] = take_forced_nibbles(cell)
    return True


@njit(cache=True, nogil=True)
def put_forced(symbols: np.ndarray, forced: int, n_blocks: int, width: int, stride: int, positions: np.ndarray) -> None:
    """Undo `take_forced`: block b of a row starts at column ``b * stride`` of `symbols`."""
    n_rows = symbols.shape[0]
    for row in range(n_rows):
        for block in range(n_blocks):
            k = position_index(row, block, n_rows, n_blocks)
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
                put_forced_nibbles(symbols[row, at : at + 16], position)


@njit(cache=True, nogil=True)
def take_window(symbols: np.ndarray, low: np.ndarray, base: int) -> bool:
    """Replace the exponents of a bfloat16 row group by windowed codes, in place; return False (nothing changed) if not all fit.

    A windowed code is the exponent and the three highest mantissa bits as one number, less ``8 * base``; it fits where it is
    below 256. `symbols` uint8: exponent in, code out. `low` uint32: sign over seven mantissa bits in, over four out.
    """
    for row in range(symbols.shape[0]):
        for i in range(symbols.shape[1]):
            code = ((np.int32(symbols[row, i]) - np.int32(base)) << 3) | (np.int32(low[row, i] & 127) >> 4)
            if code < 0 or code > 255:
                return False
    for row in range(symbols.shape[0]):
        for i in range(symbols.shape[1]):
            rest = np.int32(low[row, i])
            symbols[row, i] = ((np.int32(symbols[row, i]) - np.int32(base)) << 3) | ((rest & 127) >> 4)
            low[row, i] = ((rest >> 7) << 4) | (rest & 15)
    return True


@njit(cache=True, nogil=True)
def put_window(symbols: np.ndarray, low: np.ndarray, base: int) -> None:
    """Undo `take_window`."""
    for row in range(symbols.shape[0]):
        for i in range(symbols.shape[1]):
            code = np.int32(symbols[row, i]) + (np.int32(base) << 3)
            rest = np.int32(low[row, i])
            symbols[row, i] = (code >> 3) & 255
            low[row, i] = ((rest >> 4) << 7) | ((code & 7) << 4) | (rest & 15)
