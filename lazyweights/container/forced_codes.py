"""Codes that a quantizer cannot avoid: taken out of their blocks, so that only their position is stored.

The largest value of a Q8_0 block is always coded as 127 or -127; a Q4_1 or Q5_1 block always holds its smallest and its
largest code, a Q5_0 block its smallest. An entropy coder pays for each such code as if it could be missing. Here it is
swapped to the end of the block (a swap is undone exactly) and left out of the stream; its position, and for 127 its sign,
become raw bits. This holds for a whole row group or not at all: a group with a block that lacks the code is coded as it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types, uint64
from numba.extending import intrinsic

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


@intrinsic
def _trailing_zeros(typingctx: Any, x: Any) -> Any:
    """Number of zero bits below the lowest one bit of a uint64 that is not 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), codegen


_ONES = 0x0101010101010101
_HIGHS = 0x8080808080808080
_LOW_NIBBLES = 0x0F0F0F0F0F0F0F0F


@njit(inline="always")
def _zero_bytes(word: int) -> int:
    """Mark zero bytes with their top bit; exact up to and including the first one."""
    return (word - uint64(_ONES)) & ~word & uint64(_HIGHS)


@njit(inline="always")
def _first_byte(marks: int) -> int:
    return np.int64(_trailing_zeros(marks) >> uint64(3))


@njit(cache=True, nogil=True)
def _find_byte(words: np.ndarray, at: int, value: int, other: int) -> int:
    """Index of the first of 32 bytes (from word `at` on) that is `value` or `other`, or -1."""
    for part in range(4):
        word = words[np.uint64(at + part)]
        marks = _zero_bytes(word ^ (uint64(value) * uint64(_ONES)))
        marks |= _zero_bytes(word ^ (uint64(other) * uint64(_ONES)))
        if marks:
            # Marks behind the first match of one value may be false, but then they are not the first.
            return 8 * part + _first_byte(marks)
    return -1


@njit(cache=True, nogil=True)
def _find_nibble(first_word: int, second_word: int, value: int) -> int:
    """Index of the first of 32 nibbles (low ones of 16 bytes, then high ones) that is `value`, or -1."""
    pattern = uint64(value) * uint64(_ONES)
    for half in range(2):
        for part in range(2):
            word = first_word if part == 0 else second_word
            nibbles = (word >> uint64(4 * half)) & uint64(_LOW_NIBBLES)
            marks = _zero_bytes(nibbles ^ pattern)
            if marks:
                return 16 * half + 8 * part + _first_byte(marks)
    return -1


@njit(cache=True, nogil=True)
def _find_forced(symbols: np.ndarray, words: np.ndarray, row: int, at: int, forced: int, width: int) -> int:
    """Where the forced codes of a block are, as `take_forced` stores it; -1 where one is missing.

    `words` are the same bytes as `symbols`, eight to a word.
    """
    word_at = (row * symbols.shape[1] + at) >> 3
    if forced == 3:
        first = _find_byte(words, word_at, 127, 129)
        return first << 1 | symbols[row, at + first] >> 7 if first >= 0 else -1
    if forced == 1:
        return _find_byte(words, word_at, 0, 0)
    if width == 32:
        first = _find_byte(words, word_at, 0, 0)
        if first < 0:
            return -1
        moved = symbols[row, at + first]
        symbols[row, at + first] = symbols[row, at + 30]
        symbols[row, at + 30] = moved
        second = _find_byte(words, word_at, 31, 31)
        symbols[row, at + 30] = symbols[row, at + first]
        symbols[row, at + first] = moved
        return first << 5 | second if second >= 0 else -1
    low, high = words[np.uint64(word_at)], words[np.uint64(word_at + 1)]
    first = _find_nibble(low, high, 0)
    if first < 0:
        return -1
    # The same swap as in `take_forced_nibbles`: nibble 15 is the low half of byte 15; there the 0 goes.
    moved = (high >> uint64(56)) & uint64(15)
    high &= ~(uint64(15) << uint64(56))
    place = uint64(8 * (first & 7) + 4 * (first >> 4))
    if first & 8:
        high |= moved << place
    else:
        low |= moved << place
    if first == 15:
        high &= ~(uint64(15) << uint64(56))
    second = _find_nibble(low, high, 15)
    return first << 5 | second if second >= 0 else -1


@njit(cache=True, nogil=True)
def take_forced(symbols: np.ndarray, meta: np.ndarray, positions: np.ndarray) -> bool:
    """Move the forced codes of each block to its end, in place; return False (nothing changed) where one is missing.

    `symbols` uint8 (rows, blocks * cell symbols); `positions` uint32 (rows * blocks,), what goes into the file, in lane
    order.
    """
    forced = meta[4]
    n_rows = symbols.shape[0]
    n_blocks = meta[0]
    width = meta[2]
    words = symbols.reshape(symbols.size).view(np.uint64)
    for row in range(n_rows):
        for block in range(n_blocks):
            position = _find_forced(symbols, words, row, block * width, forced, width)
            if position < 0:
                return False
            positions[position_index(row, block, n_rows, n_blocks)] = position
    for row in range(n_rows):
        for block in range(n_blocks):
            at = block * width
            position = np.int64(positions[position_index(row, block, n_rows, n_blocks)])
            if forced == 3:
                symbols[row, at + (position >> 1)] = symbols[row, at + 31]
                symbols[row, at + 31] = 0
            elif forced == 1:
                symbols[row, at + position] = symbols[row, at + 31]
                symbols[row, at + 31] = 0
            elif width == 32:
                symbols[row, at + (position >> 5)] = symbols[row, at + 30]
                symbols[row, at + 30] = 0
                symbols[row, at + (position & 31)] = symbols[row, at + 31]
                symbols[row, at + 31] = 31
            else:
                take_forced_nibbles(symbols[row, at : at + 16], position)
    return True


@njit(cache=True, nogil=True)
def put_forced(
    out: np.ndarray, first: int, row_bytes: int, n_rows: int, forced: int, n_blocks: int, width: int, stride: int,
    positions: np.ndarray,
) -> None:
    """Undo `take_forced`: symbol i of block b of row r is byte ``first + r * row_bytes + b * stride + i`` of `out`."""
    step = np.uint64(2 * row_bytes)
    last = np.uint64(31)
    k = np.uint64(0)
    for phase in range(2):
        lanes = np.uint64((n_rows + 1 - phase) // 2)
        for block in range(n_blocks):
            at = np.uint64(first + phase * row_bytes + block * stride)
            if forced == 3:
                for lane in range(lanes):
                    position = np.uint64(positions[k + lane])
                    place = at + ((position >> np.uint64(1)) & last)
                    out[at + last] = out[place]
                    out[place] = np.uint64(127) + np.uint64(2) * (position & np.uint64(1))
                    at += step
            elif forced == 1:
                for lane in range(lanes):
                    place = at + (np.uint64(positions[k + lane]) & last)
                    out[at + last] = out[place]
                    out[place] = 0
                    at += step
            elif width == 32:
                for lane in range(lanes):
                    position = np.uint64(positions[k + lane])
                    second = at + (position & last)
                    first_place = at + ((position >> np.uint64(5)) & last)
                    out[at + np.uint64(30)] = 0
                    out[at + last] = out[second]
                    out[second] = 31
                    out[at + np.uint64(30)] = out[first_place]
                    out[first_place] = 0
                    at += step
            else:
                for lane in range(lanes):
                    put_forced_nibbles(out, np.int64(at), np.int64(positions[k + lane]))
                    at += step
            k += lanes


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
    """Undo `take_window`; `symbols` may have columns behind those of `low`."""
    for row in range(symbols.shape[0]):
        for i in range(low.shape[1]):
            code = np.int32(symbols[row, i]) + (np.int32(base) << 3)
            rest = np.int32(low[row, i])
            symbols[row, i] = (code >> 3) & 255
            low[row, i] = ((rest >> 4) << 7) | ((code & 7) << 4) | (rest & 15)
