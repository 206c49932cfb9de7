"""Comparing bytes in numba."""

from __future__ import annotations

import numpy as np
import pytest

from lazyweights.codecs.byte_access import equal_bytes


@pytest.mark.parametrize("size", [0, 1, 7, 64, 1001])
def test_equal_bytes_finds_any_difference(size: int) -> None:
    a = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)
    assert equal_bytes(a, a.copy())
    for at in {0, size // 2, size - 1} if size else ():
        b = a.copy()
        b[at] ^= 128
        assert not equal_bytes(a, b)
