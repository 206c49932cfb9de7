"""Logarithms in integers, so that every machine finds the same."""

from __future__ import annotations

import functools

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
def _log2_fraction(rest: int) -> int:
    """Return ``floor(65536 * log2(1 + rest / 2**64))`` for uint64 `rest`, by squaring, in integers only."""
    one = np.uint64(1)
    low_half = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    x = np.uint64(rest)  # stands for 1 + x / 2**64
    fraction = np.uint64(0)
    for _ in range(16):
        low, high = x & low_half, x >> half
        middle = low * high
        carry = (low * low >> half) + (middle & low_half) + (middle & low_half)
        square = high * high + (middle >> half) + (middle >> half) + (carry >> half)
        # (1 + x / 2**64)**2 = 1 + (2 x + square) / 2**64, which is below 4.
        doubled = x << one
        y = doubled + square
        whole = (x >> np.uint64(63)) + np.uint64(y < doubled)
        fraction = fraction << one
        if whole > 0:
            fraction |= one
            y = (y >> one) | ((whole - one) << np.uint64(63))
        x = y
    return fraction


@njit(cache=True, nogil=True)
def log2_all(values: np.ndarray) -> np.ndarray:
    """Return ``floor(65536 * log2(n))`` of each positive n of an int64 array, int64, in integers only."""
    out = np.empty(values.size, np.int64)
    for i in range(values.size):
        n = np.uint64(values[i])
        whole = np.uint64(0)
        while n >> whole > np.uint64(1):
            whole += np.uint64(1)
        # The bits below the highest one, from the top of 64 bits on.
        rest = (n << (np.uint64(63) - whole)) << np.uint64(1)
        out[i] = np.int64(whole << np.uint64(16) | _log2_fraction(rest))
    return out


@functools.cache
def coarse_logs() -> np.ndarray:
    """Logarithms of 16-bit numbers in 1/256, for `coarse_log`; int64 (65536,), 0 for 0."""
    return np.concatenate([np.zeros(1, np.int64), log2_all(np.arange(1, 1 << 16)) >> 8])


@njit(cache=True, nogil=True)
def coarse_log(n: int, logs: np.ndarray) -> int:
    """Return the logarithm of a positive number in 1/256; that of a large one is taken from its 16 highest bits."""
    shift = 0
    while n >> shift >= 65536:
        shift += 1
    return logs[n >> shift] + 256 * shift


@njit(cache=True, nogil=True)
def entropy_sizes(counts: np.ndarray, logs: np.ndarray) -> np.ndarray:
    """Return the order-0 entropy of each row of counts, int64 (n, n_symbols), in 1/256 bits, float64 (n,), whole numbers."""
    out = np.zeros(counts.shape[0])
    for i in range(counts.shape[0]):
        of_total = coarse_log(counts[i].sum(), logs)
        size = 0
        for s in range(counts.shape[1]):
            n = counts[i, s]
            if n > 0:
                size += n * (of_total - coarse_log(n, logs))
        out[i] = size
    return out
