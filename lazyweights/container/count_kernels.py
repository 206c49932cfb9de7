"""What planning asks of the counts of a tensor, in numba."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
def used_rows(counts: np.ndarray) -> np.ndarray:
    """Return which rows of uint32 (n_contexts, 256) have a count, bool (n_contexts,)."""
    used = np.zeros(counts.shape[0], np.bool_)
    for i in range(counts.shape[0]):
        any_bits = np.uint32(0)
        for s in range(np.uint64(counts.shape[1])):
            any_bits |= counts[i, s]
        used[i] = any_bits != 0
    return used


@njit(cache=True, nogil=True)
def total_counts(counts: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Return the sum of the used rows of uint32 (n_contexts, 256), int64 (256,)."""
    total = np.zeros(counts.shape[1], np.int64)
    for i in range(counts.shape[0]):
        if used[i]:
            for s in range(np.uint64(counts.shape[1])):
                total[s] += np.int64(counts[i, s])
    return total
