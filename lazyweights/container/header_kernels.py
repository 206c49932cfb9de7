"""The inner loops of `header_filter.unfilter_chunk`, in numba: a vocabulary has some 10^5 strings."""

from __future__ import annotations

import numpy as np
from numba import njit

from lazyweights.codecs.byte_access import store_u32, store_u64


@njit(cache=True, nogil=True)
def weave(sizes: np.ndarray, characters: np.ndarray, out: np.ndarray) -> None:
    """Write strings as GGUF has them: each its size, eight bytes, then its characters.

    sizes : int64 (n,); characters : uint8 (sum of sizes,); out : uint8 (sum of sizes + 8 n,), output
    """
    at = np.uint64(0)
    source = np.uint64(0)
    for i in range(sizes.size):
        n = np.uint64(sizes[i])
        store_u64(out, np.int64(at), n)
        at += np.uint64(8)
        for k in range(n):
            out[at + k] = characters[source + k]
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
