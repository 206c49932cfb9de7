"""The numba kernels of the formats that most files are made of. Imported inside functions: it loads numba.

Every pair ``split_<type>(blocks, *planes)`` and ``join_<type>(blocks, *planes)`` is a bijection between
``(n, block_bytes)`` uint8 blocks and ``(n, per_block)`` planes, in the order of the type's layout; the input side is
read-only, the output side is written in full. The byte layouts are described where the layouts are declared
(`simple`, `k_quants`, `fp4`).

Traps. Indices stay two-dimensional, so that LLVM can prove them non-negative and vectorise. Trip counts of inner loops
with a short body come from array shapes (``codes.shape[1] // 2``): constant ones get fully unrolled before the
vectoriser sees them, which costs a factor of four (the long body of Q6_K and the plain copies escape that). Bytes are
widened before they are shifted out of their eight bits, so that the same text run as plain Python
(``NUMBA_DISABLE_JIT=1``, the reference) computes the same. The join kernels rely on values in range, which
`planes.join` checks.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(inline="always")
def _get_u16(blocks: np.ndarray, b: int, at: int) -> np.uint16:
    return np.uint16(blocks[b, at]) | np.uint16(blocks[b, at + 1]) << 8


@njit(inline="always")
def _put_u16(blocks: np.ndarray, b: int, at: int, value: np.uint16) -> None:
    blocks[b, at] = value & 0xFF
    blocks[b, at + 1] = value >> 8


@njit(inline="always")
def _get_nibbles(blocks: np.ndarray, b: int, at: int, codes: np.ndarray) -> None:
    half = codes.shape[1] // 2
    for i in range(half):
        byte = blocks[b, at + i]
        codes[b, i] = byte & 0xF
        codes[b, half + i] = byte >> 4


@njit(inline="always")
def _put_nibbles(blocks: np.ndarray, b: int, at: int, codes: np.ndarray) -> None:
    half = codes.shape[1] // 2
    for i in range(half):
        blocks[b, at + i] = codes[b, i] & 0xF | (codes[b, half + i] & 0xF) << 4


@njit(inline="always")
def _get_fives(blocks: np.ndarray, b: int, at: int, codes: np.ndarray) -> None:
    half = codes.shape[1] // 2
    low, high = _get_u16(blocks, b, at), _get_u16(blocks, b, at + 2)
    for i in range(half):
        byte = blocks[b, at + 4 + i]
        codes[b, i] = byte & 0xF | (low >> i & 1) << 4
        codes[b, half + i] = byte >> 4 | (high >> i & 1) << 4


@njit(inline="always")
def _put_fives(blocks: np.ndarray, b: int, at: int, codes: np.ndarray) -> None:
    low = np.uint16(0)
    high = np.uint16(0)
    half = codes.shape[1] // 2
    for i in range(half):
        low |= np.uint16(codes[b, i] >> 4) << i
        high |= np.uint16(codes[b, half + i] >> 4) << i
    _put_u16(blocks, b, at, low)
    _put_u16(blocks, b, at + 2, high)
    _put_nibbles(blocks, b, at + 4, codes)


@njit(cache=True, nogil=True)
def split_q4_0(blocks: np.ndarray, scale: np.ndarray, codes: np.ndarray) -> None:
    for b in range(blocks.shape[0]):
        scale[b, 0] = _get_u16(blocks, b, 0)
        _get_nibbles(blocks, b, 2, codes)


@njit(cache=True, nogil=True)
def join_q4_0(blocks: np.ndarray, scale: np.ndarray, codes: np.ndarray) -> None:
    for b in range(blocks.shape[0]):
        _put_u16(blocks, b, 0, scale[b, 0])
        _put_nibbles(blocks, b, 2, codes)


@njit(cache=True, nogil=True)
def split_q4_1(blocks: np.ndarray, scale: np.ndarray, minimum: np.ndarray, codes: np.ndarray) -> None:
    for b in range(blocks.shape[0]):
        scale[b, 0] = _get_u16(blocks, b, 0)
        minimum[b, 0] = _get_u16(blocks, b, 2)
        _get_nibbles(blocks, b, 4, codes)


@njit(cache=True, nogil=True)
def join_q4_1(blocks: np.ndarray, scale: np.ndarray, minimum: np.ndarray, codes: np.ndarray) -> None:
    for b in range(blocks.shape[0]):
        _put_u16(blocks, b, 0, scale[b, 0])
        _put_u16(blocks, b, 2, minimum[b, 0])
        _put_nibbles(blocks, b, 4, codes)


@njit(cache=True, nogil=True)
def split_q5_0(blocks: np.ndarray, scale: np.ndarray, codes: np.ndarray) -> None:
    for b in range(blocks.shape[0]):
        scale[b, 0] = _get_u16(blocks, b, 0)
        _get_fives(blocks, b, 2, codes)


@njit(cache=True, nogil=True)
def join_q5_0(blocks: np.ndarray, scale: np.ndarray, codes: np.ndarray) -> None:
    for b in range(blocks.shape[0]):
        _put_u16(blocks, b, 0, scale[b, 0])
        _put_fives(blocks, b, 2, codes)


@njit(cache=True, nogil=True)
def split_q5_1(blocks: np.ndarray, scale: np.ndarray, minimum: np.ndarray, codes: np.ndarray) -> None:
    for b in range(blocks.shape[0]):
        scale[b, 0] = _get_u16(blocks, b, 0)
        minimum[b, 0] = _get_u16(blocks, b, 2)
        _get_fives(blocks, b, 4, codes)


@njit(cache=True, nogil=True)
def join_q5_1(blocks: np.ndarray, scale: np.ndarray, minimum: np.ndarray, codes: np.ndarray) -> None:
    for b in range(blocks.shape[0]):
        _put_u16(blocks, b, 0, scale[b, 0])
        _put_u16(blocks, b, 2, minimum[b, 0])
        _put_fives(blocks, b, 4, codes)


@njit(cache=True, nogil=True)
def split_q8_0(blocks: np.ndarray, scale: np.ndarray, codes: np.ndarray) -> None:
    for b in range(blocks.shape[0]):
        scale[b, 0] = _get_u16(blocks, b, 0)
        for i in range(32):
            codes[b, i] = blocks[b, 2 + i]


@njit(cache=True, nogil=True)
def join_q8_0(blocks: np.ndarray, scale: np.ndarray, codes: np.ndarray) -> None:
    for b in range(blocks.shape[0]):
        _put_u16(blocks, b, 0, scale[b, 0])
        for i in range(32):
            blocks[b, 2 + i] = codes[b, i]


@njit(cache=True, nogil=True)
def split_mxfp4(blocks: np.ndarray, scale: np.ndarray, codes: np.ndarray) -> None:
    for b in range(blocks.shape[0]):
        scale[b, 0] = blocks[b, 0]
        _get_nibbles(blocks, b, 1, codes)


@njit(cache=True, nogil=True)
def join_mxfp4(blocks: np.ndarray, scale: np.ndarray, codes: np.ndarray) -> None:
    for b in range(blocks.shape[0]):
        blocks[b, 0] = scale[b, 0]
        _put_nibbles(blocks, b, 1, codes)


@njit(inline="always")
def _get_sub_scales(blocks: np.ndarray, b: int, sub_scale: np.ndarray, sub_min: np.ndarray) -> None:
    for i in range(4):
        first, second, third = blocks[b, 4 + i], blocks[b, 8 + i], blocks[b, 12 + i]
        sub_scale[b, i] = first & 0x3F
        sub_min[b, i] = second & 0x3F
        sub_scale[b, 4 + i] = third & 0xF | first >> 6 << 4
        sub_min[b, 4 + i] = third >> 4 | second >> 6 << 4


@njit(inline="always")
def _put_sub_scales(blocks: np.ndarray, b: int, sub_scale: np.ndarray, sub_min: np.ndarray) -> None:
    for i in range(4):
        high_scale, high_min = sub_scale[b, 4 + i], sub_min[b, 4 + i]
        blocks[b, 4 + i] = sub_scale[b, i] & 0x3F | (high_scale >> 4 & 3) << 6
        blocks[b, 8 + i] = sub_min[b, i] & 0x3F | (high_min >> 4 & 3) << 6
        blocks[b, 12 + i] = high_scale & 0xF | (high_min & 0xF) << 4


@njit(cache=True, nogil=True)
def split_q4_k(
    blocks: np.ndarray,
    scale: np.ndarray,
    min_scale: np.ndarray,
    sub_scale: np.ndarray,
    sub_min: np.ndarray,
    codes: np.ndarray,
) -> None:
    width = codes.shape[1] // 8
    for b in range(blocks.shape[0]):
        scale[b, 0] = _get_u16(blocks, b, 0)
        min_scale[b, 0] = _get_u16(blocks, b, 2)
        _get_sub_scales(blocks, b, sub_scale, sub_min)
        for group in range(4):
            for i in range(width):
                byte = blocks[b, 16 + width * group + i]
                codes[b, 2 * width * group + i] = byte & 0xF
                codes[b, 2 * width * group + width + i] = byte >> 4


@njit(cache=True, nogil=True)
def join_q4_k(
    blocks: np.ndarray,
    scale: np.ndarray,
    min_scale: np.ndarray,
    sub_scale: np.ndarray,
    sub_min: np.ndarray,
    codes: np.ndarray,
) -> None:
    width = codes.shape[1] // 8
    for b in range(blocks.shape[0]):
        _put_u16(blocks, b, 0, scale[b, 0])
        _put_u16(blocks, b, 2, min_scale[b, 0])
        _put_sub_scales(blocks, b, sub_scale, sub_min)
        for group in range(4):
            for i in range(width):
                low, high = codes[b, 2 * width * group + i], codes[b, 2 * width * group + width + i]
                blocks[b, 16 + width * group + i] = low & 0xF | (high & 0xF) << 4


@njit(cache=True, nogil=True)
def split_q5_k(
    blocks: np.ndarray,
    scale: np.ndarray,
    min_scale: np.ndarray,
    sub_scale: np.ndarray,
    sub_min: np.ndarray,
    codes: np.ndarray,
) -> None:
    width = codes.shape[1] // 8
    for b in range(blocks.shape[0]):
        scale[b, 0] = _get_u16(blocks, b, 0)
        min_scale[b, 0] = _get_u16(blocks, b, 2)
        _get_sub_scales(blocks, b, sub_scale, sub_min)
        for group in range(4):
            for i in range(width):
                high = blocks[b, 16 + i] >> (2 * group)
                byte = blocks[b, 48 + width * group + i]
                codes[b, 2 * width * group + i] = byte & 0xF | (high & 1) << 4
                codes[b, 2 * width * group + width + i] = byte >> 4 | (high >> 1 & 1) << 4


@njit(cache=True, nogil=True)
def join_q5_k(
    blocks: np.ndarray,
    scale: np.ndarray,
    min_scale: np.ndarray,
    sub_scale: np.ndarray,
    sub_min: np.ndarray,
    codes: np.ndarray,
) -> None:
    width = codes.shape[1] // 8
    for b in range(blocks.shape[0]):
        _put_u16(blocks, b, 0, scale[b, 0])
        _put_u16(blocks, b, 2, min_scale[b, 0])
        _put_sub_scales(blocks, b, sub_scale, sub_min)
        for i in range(width):
            high = np.uint8(0)
            for group in range(8):
                high |= (codes[b, width * group + i] >> 4 & 1) << group
            blocks[b, 16 + i] = high
        for group in range(4):
            for i in range(width):
                low, high = codes[b, 2 * width * group + i], codes[b, 2 * width * group + width + i]
                blocks[b, 48 + width * group + i] = low & 0xF | (high & 0xF) << 4


@njit(cache=True, nogil=True)
def split_q6_k(blocks: np.ndarray, scale: np.ndarray, sub_scale: np.ndarray, codes: np.ndarray) -> None:
    for b in range(blocks.shape[0]):
        scale[b, 0] = _get_u16(blocks, b, 208)
        for i in range(16):
            sub_scale[b, i] = blocks[b, 192 + i]
        for half in range(2):
            for i in range(32):
                first, second = blocks[b, 64 * half + i], blocks[b, 64 * half + 32 + i]
                high = blocks[b, 128 + 32 * half + i]
                codes[b, 128 * half + i] = first & 0xF | (high & 3) << 4
                codes[b, 128 * half + 32 + i] = second & 0xF | (high >> 2 & 3) << 4
                codes[b, 128 * half + 64 + i] = first >> 4 | (high >> 4 & 3) << 4
                codes[b, 128 * half + 96 + i] = second >> 4 | (high >> 6) << 4


@njit(cache=True, nogil=True)
def join_q6_k(blocks: np.ndarray, scale: np.ndarray, sub_scale: np.ndarray, codes: np.ndarray) -> None:
    for b in range(blocks.shape[0]):
        _put_u16(blocks, b, 208, scale[b, 0])
        for i in range(16):
            blocks[b, 192 + i] = sub_scale[b, i]
        for half in range(2):
            for i in range(32):
                first, second = codes[b, 128 * half + i], codes[b, 128 * half + 32 + i]
                third, fourth = codes[b, 128 * half + 64 + i], codes[b, 128 * half + 96 + i]
                blocks[b, 64 * half + i] = first & 0xF | (third & 0xF) << 4
                blocks[b, 64 * half + 32 + i] = second & 0xF | (fourth & 0xF) << 4
                blocks[b, 128 + 32 * half + i] = first >> 4 | second >> 4 << 2 | third >> 4 << 4 | fourth >> 4 << 6
