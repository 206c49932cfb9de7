"""Optimal code lengths under a length limit: package-merge (Larmore and Hirschberg, JACM 37(3), 1990).

Ties are broken in a fixed way, so that the same counts give the same lengths on every machine
(`docs/format.md`, "Code lengths"): among items of equal weight a leaf comes before a package, and a
leaf with a smaller symbol before one with a larger symbol; packages keep the order in which they
were made.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from lazyweights.codecs import MAX_CODE_LENGTH
from lazyweights.errors import CodecError


def code_lengths_reference(counts: list[int], max_code_length: int = MAX_CODE_LENGTH) -> list[int]:
    """Plain Python reference of `code_lengths`: lists of symbols, merged level by level.

    >>> code_lengths_reference([5, 1, 1, 0])
    [1, 2, 2, 0]
    >>> code_lengths_reference([7, 0])
    [1, 0]
    """
    leaves: list[tuple[int, tuple[int, ...]]] = [(count, (symbol,)) for symbol, count in enumerate(counts) if count > 0]
    leaves.sort(key=lambda item: item[0])
    lengths = [0] * len(counts)
    if len(leaves) == 1:
        lengths[leaves[0][1][0]] = 1
    if len(leaves) <= 1:
        return lengths
    if len(leaves) > 1 << max_code_length:
        raise CodecError("more symbols than codewords", expected=1 << max_code_length, found=len(leaves))
    level = list(leaves)
    for _ in range(max_code_length - 1):
        packages = [
            (level[i][0] + level[i + 1][0], level[i][1] + level[i + 1][1]) for i in range(0, len(level) - 1, 2)
        ]
        merged = []
        i = j = 0
        while i < len(leaves) or j < len(packages):
            if j == len(packages) or (i < len(leaves) and leaves[i][0] <= packages[j][0]):
                merged.append(leaves[i])
                i += 1
            else:
                merged.append(packages[j])
                j += 1
        level = merged
    for _, symbols in level[: 2 * len(leaves) - 2]:
        for symbol in symbols:
            lengths[symbol] += 1
    return lengths


@njit(cache=True, nogil=True)
def _package_merge(counts: np.ndarray, max_code_length: int, lengths: np.ndarray) -> int:
    """Fill `lengths`; return the number of symbols with a count, or -1 where no code exists."""
    n_symbols = counts.size
    symbol_of = np.empty(n_symbols, np.int64)
    n = 0
    for s in range(n_symbols):
        lengths[s] = 0
        if counts[s] > 0:
            symbol_of[n] = s
            n += 1
    if n <= 1:
        if n == 1:
            lengths[symbol_of[0]] = 1
        return n
    if n > 1 << max_code_length:
        return -1
    leaf_weight = np.empty(n, np.int64)
    for i in range(n):  # insertion sort by (count, symbol): n is at most 256 and often nearly sorted
        s = symbol_of[i]
        w = counts[s]
        k = i
        while k > 0 and leaf_weight[k - 1] > w:
            leaf_weight[k] = leaf_weight[k - 1]
            symbol_of[k] = symbol_of[k - 1]
            k -= 1
        leaf_weight[k] = w
        symbol_of[k] = s
    # is_leaf[level, i]: what item i of that level is; packages are in order, so counts suffice to walk back.
    is_leaf = np.zeros((max_code_length, 2 * n), np.bool_)
    level = leaf_weight.copy()
    n_items = n
    is_leaf[0, :n] = True
    for depth in range(1, max_code_length):
        n_packages = n_items // 2
        merged = np.empty(n + n_packages, np.int64)
        i = 0
        j = 0
        for k in range(n + n_packages):
            take_leaf = False
            if j == n_packages:
                take_leaf = True
            elif i < n:
                take_leaf = leaf_weight[i] <= level[2 * j] + level[2 * j + 1]
            if take_leaf:
                merged[k] = leaf_weight[i]
                is_leaf[depth, k] = True
                i += 1
            else:
                merged[k] = level[2 * j] + level[2 * j + 1]
                j += 1
        level = merged
        n_items = n + n_packages
    take = 2 * n - 2
    for depth in range(max_code_length - 1, -1, -1):
        n_leaves = 0
        for k in range(take):
            if is_leaf[depth, k]:
                n_leaves += 1
        for i in range(n_leaves):
            lengths[symbol_of[i]] += 1
        take = 2 * (take - n_leaves)
    return n


def code_lengths(counts: np.ndarray, max_code_length: int = MAX_CODE_LENGTH) -> np.ndarray:
    """Return the code lengths that minimise the coded size under a length limit.

    Parameters
    ----------
    counts : ndarray of int, shape (alphabet_size,)
        How often each symbol occurs; symbols with count 0 get no codeword.
    max_code_length : int
        Longest codeword in bits.

    Returns
    -------
    ndarray of uint8, shape (alphabet_size,)
        Code lengths in bits, 0 for symbols without a codeword. A one-symbol alphabet gets length 1,
        which stands for the empty codeword (see `canonical`).

    Raises
    ------
    CodecError
        If there are more symbols than codewords of the longest length.
    """
    values = np.ascontiguousarray(counts, dtype=np.int64)
    lengths = np.zeros(values.size, np.uint8)
    if _package_merge(values, max_code_length, lengths) < 0:
        raise CodecError("more symbols than codewords", expected=1 << max_code_length, found=int((values > 0).sum()))
    return lengths
