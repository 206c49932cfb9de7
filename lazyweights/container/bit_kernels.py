"""Raw bits of a row group: values of fixed width, packed from the most significant bit of each byte."""

from __future__ import annotations

import numpy as np
from numba import njit, uint64

from lazyweights.codecs.vector_emit import AVAILABLE

SLACK_BYTES = 8
"""Bytes behind the last value that `unpack_bits` may read (their content does not matter)."""


@njit(cache=True, nogil=True)
def pack_bits(values: np.ndarray, n_bits: int, out: np.ndarray, at: int) -> int:
    """Append the low `n_bits` (0 .. 32) of each value to `out` from bit `at` on; return the bit behind the last.

    `out` is uint8 and zero from bit `at` on; `values` any unsigned integer array, read in C order.
    """
    flat = values.ravel()
    if n_bits == 8 and at % 8 == 0:
        first = at >> 3
        for i in range(flat.size):
            out[first + i] = np.uint8(flat[i] & 255)
        return at + 8 * flat.size
    if n_bits == 0:
        return at
    mask = (uint64(1) << uint64(n_bits)) - uint64(1)
    start = 0
    if n_bits <= 14:  # several values in one 64-bit store, which also writes zeros behind them
        step = 56 // n_bits
        n = uint64(n_bits)
        while start + step <= flat.size and (at >> 3) + 8 <= out.size:
            word = uint64(0)
            first = uint64(start)
            for i in range(uint64(step)):
                word = (word << n) | (uint64(flat[first + i]) & mask)
            k = uint64(at >> 3)
            word = (word << uint64(64 - (at & 7) - step * n_bits)) | (uint64(out[k]) << uint64(56))
            for i in range(8):
                out[k + uint64(i)] = np.uint8((word >> uint64(56 - 8 * i)) & uint64(255))
            start += step
            at += step * n_bits
    byte = at >> 3
    count = at & 7
    acc = uint64(out[byte] >> (8 - count)) if count else uint64(0)
    for i in range(start, flat.size):
        acc = (acc << uint64(n_bits)) | (uint64(flat[i]) & mask)
        count += n_bits
        while count >= 8:
            count -= 8
            out[byte] = np.uint8((acc >> uint64(count)) & uint64(255))
            byte += 1
    if count:
        out[byte] = np.uint8((acc << uint64(8 - count)) & uint64(255))
    return at + n_bits * (flat.size - start)


@njit(inline="always")
def _load64(packed: np.ndarray, k: int) -> int:
    """The eight bytes from k on as one number, the first one highest."""
    return (
        (uint64(packed[k]) << uint64(56))
        | (uint64(packed[k + 1]) << uint64(48))
        | (uint64(packed[k + 2]) << uint64(40))
        | (uint64(packed[k + 3]) << uint64(32))
        | (uint64(packed[k + 4]) << uint64(24))
        | (uint64(packed[k + 5]) << uint64(16))
        | (uint64(packed[k + 6]) << uint64(8))
        | uint64(packed[k + 7])
    )


@njit(cache=True, nogil=True)
def unpack_bits(packed: np.ndarray, at: int, n_bits: int, out: np.ndarray) -> int:
    """Read values of `n_bits` (0 .. 32) from bit `at` on into the 1-D array `out`; return the bit behind the last."""
    n = out.size
    if n_bits == 0:
        for i in range(n):
            out[i] = 0
        return at
    if n_bits == 8 and at % 8 == 0:
        first = at >> 3
        for i in range(n):
            out[i] = packed[first + i]
        return at + 8 * n
    down = uint64(64 - n_bits)
    start = 0
    if n_bits <= 14:  # several values of one 64-bit load
        step = 56 // n_bits
        while start + step <= n:
            k = at >> 3
            x = _load64(packed, k) << uint64(at & 7)
            for i in range(step):
                out[start + i] = x >> down
                x = x << uint64(n_bits)
            start += step
            at += step * n_bits
    for i in range(start, n):
        k = at >> 3
        x = _load64(packed, k)
        out[i] = (x << uint64(at & 7)) >> down
        at += n_bits
    return at


if AVAILABLE:
    from lazyweights.codecs.vector_fields import unpack_aligned as _unpack_aligned
else:

    @njit(cache=True, nogil=True)
    def _unpack_aligned(packed: np.ndarray, at: int, n_bits: int, out: np.ndarray) -> bool:
        return False


@njit(cache=True, nogil=True)
def unpack_many(packed: np.ndarray, at: int, n_bits: int, out: np.ndarray) -> int:
    """`unpack_bits`, quicker where the values start at a byte and fill whole vectors."""
    if _unpack_aligned(packed, at, n_bits, out):
        return at + n_bits * out.size
    return unpack_bits(packed, at, n_bits, out)
