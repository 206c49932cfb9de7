"""Checksums of many units at once: those that xxhash gives for one at a time, by compiled code and without it."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from lazyweights.container import unit_checksums
from lazyweights.container.unit_checksums import HASH_ADDRESS, fill_checksums

RUNS = np.array([[3, 1000, 2500], [1, 17, 17], [2, 241, 482], [1, 4096, 1], [4, 9000, 36000]], np.int64)


@pytest.mark.parametrize("compiled", [True, False])
def test_checksums_are_those_of_xxhash(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    if not compiled:
        monkeypatch.setattr(unit_checksums, "HASH_ADDRESS", 0)
    elif not HASH_ADDRESS:
        pytest.skip("the xxhash package does not show its C function")
    data = np.random.default_rng(0).integers(0, 256, int(RUNS[:, 2].sum()), np.uint8)
    expected, at = [], 0
    for n_units, size, total in RUNS.tolist():
        end = at + total
        for _ in range(n_units):
            expected.append(xxhash.xxh3_64_intdigest(data[at : min(at + size, end)].tobytes()))
            at = min(at + size, end)
    out = np.zeros(len(expected), np.uint64)
    fill_checksums(data, RUNS, out)
    assert out.tolist() == expected


def test_units_larger_than_the_data() -> None:
    with pytest.raises(ValueError, match="not those of the data"):
        fill_checksums(np.zeros(10, np.uint8), np.array([[1, 11, 11]]), np.zeros(1, np.uint64))
    with pytest.raises(ValueError, match="not those of the data"):
        fill_checksums(np.zeros(10, np.uint8), np.array([[2, 5, 10]]), np.zeros(1, np.uint64))
