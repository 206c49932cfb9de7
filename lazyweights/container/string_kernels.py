"""Strings behind 64-bit lengths, as GGUF headers hold them by the hundred thousand, in numba."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
def _step(data: np.ndarray, at: int) -> int:
    """Return the end of the string at `at`, or -1 where it leaves `data`, uint8."""
    if at + 8 > data.size:
        return -1
    length = np.uint64(0)
    for k in range(8):
        length |= np.uint64(data[at + k]) << np.uint64(8 * k)
    if length > np.uint64(data.size - at - 8):
        return -1
    return at + 8 + np.int64(length)


@njit(cache=True, nogil=True)
def follow_strings(data: np.ndarray, first: int, n_strings: int) -> int:
    """Return the end of `n_strings` strings from offset `first` on, or -1 where they leave `data`, uint8."""
    at = np.int64(first)
    for _ in range(n_strings):
        at = _step(data, at)
        if at < 0:
            return -1
    return at


@njit(cache=True, nogil=True)
def fill_starts(data: np.ndarray, first: int, starts: np.ndarray) -> bool:
    """Fill where each string starts and, last, where they end, int64; return whether all are inside `data`, uint8."""
    at = np.int64(first)
    for i in range(starts.size - 1):
        starts[i] = at
        at = _step(data, at)
        if at < 0:
            return False
    starts[-1] = at
    return True


@njit(cache=True, nogil=True)
def take_characters(region: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the characters of strings of the given sizes, uint8, without the lengths before them."""
    out = np.empty(region.size - 8 * sizes.size, np.uint8)
    source = 0
    target = 0
    for size in sizes:
        source += 8
        for i in range(size):
            out[target + i] = region[source + i]
        source += size
        target += size
    return out


@njit(cache=True, nogil=True)
def join_strings(characters: np.ndarray, sizes: np.ndarray, region: np.ndarray) -> None:
    """Inverse of `take_characters`: fill `region`, which has 8 bytes a string more than `characters`."""
    source = 0
    target = 0
    for size in sizes:
        for k in range(8):
            region[target + k] = (np.uint64(size) >> np.uint64(8 * k)) & np.uint64(255)
        target += 8
        for i in range(size):
            region[target + i] = characters[source + i]
        source += size
        target += size
