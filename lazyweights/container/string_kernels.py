"""Strings behind 64-bit lengths, and running sums, as GGUF headers hold them by the hundred thousand, in numba."""

from __future__ import annotations

import numpy as np
from numba import njit

from lazyweights.codecs.byte_access import load_u64, store_u32, store_u64


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
def join_strings(characters: np.ndarray, sizes: np.ndarray, long_sizes: np.ndarray, region: np.ndarray) -> None:
    """Inverse of `take_characters`: fill `region`, which has 8 bytes a string more than `characters`.

    `sizes` : uint8, 255 where the next of `long_sizes`, uint32, is the size
    """
    at = np.uint64(0)
    source = np.uint64(0)
    eight = np.uint64(8)
    next_long = np.uint64(0)
    for i in range(np.uint64(sizes.size)):
        n = np.uint64(sizes[i])
        if n == np.uint64(255):
            n = np.uint64(long_sizes[next_long])
            next_long += np.uint64(1)
        store_u64(region, np.int64(at), n)
        at += eight
        # Eight characters at a time: what is written behind a string is written again by the next one.
        if source + n + eight <= np.uint64(characters.size) and at + n + eight <= np.uint64(region.size):
            k = np.uint64(0)
            while k < n:
                store_u64(region, np.int64(at + k), load_u64(characters, np.int64(source + k)))
                k += eight
        else:
            for k in range(n):
                region[at + k] = characters[source + k]
        at += n
        source += n


@njit(cache=True, nogil=True)
def add_up(deltas: np.ndarray, out: np.ndarray) -> None:
    """Write running sums of 32-bit differences, modulo 2**32.

    deltas : uint8 (4 n,): first the low bytes of all n differences, then the next ones, ...; out : uint8 (4 n,), output
    """
    n = np.uint64(deltas.size // 4)
    total = np.uint32(0)
    for i in range(n):
        for k in range(np.uint64(4)):
            total += np.uint32(deltas[k * n + i]) << np.uint32(np.uint64(8) * k)
        store_u32(out, np.int64(np.uint64(4) * i), total)
