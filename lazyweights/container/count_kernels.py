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


@njit(cache=True, nogil=True)
def merge_contexts(counts: np.ndarray, used: np.ndarray, run: int, enough: int, merged: np.ndarray) -> np.ndarray:
    """Merge neighbouring contexts of few symbols, from the first on until they have enough together.

    Parameters
    ----------
    counts : uint32 (n_contexts, 256)
    used : bool (n_contexts,), of `used_rows`
    run : contexts are neighbours within aligned runs of so many
    enough : symbols that are enough
    merged : uint32 (n_contexts, 256), output: the counts of the contexts that stand for others

    Returns
    -------
    bool (n_contexts,), the contexts that stand for themselves and the used ones up to the next such
    """
    n_contexts = counts.shape[0]
    n_symbols = np.uint64(counts.shape[1])
    kept = np.zeros(n_contexts, np.bool_)
    for first in range(0, n_contexts, run):
        before = -1
        current = -1
        total = np.int64(0)
        for k in range(first, min(first + run, n_contexts)):
            if not used[k]:
                continue
            if current < 0:
                current = k
                kept[k] = True
                total = np.int64(0)
                merged[k] = 0
            for s in range(n_symbols):
                merged[current, s] += counts[k, s]
                total += np.int64(counts[k, s])
            if total >= enough:
                before, current = current, -1
        if current >= 0 and before >= 0:  # the last ones have too few: they go to those before
            for s in range(n_symbols):
                merged[before, s] += merged[current, s]
            kept[current] = False
    return kept
