"""Clusters of counts: sizes are exact, what differs comes apart, nothing costs more than one table for all."""

from __future__ import annotations

import numpy as np
import pytest

from lazyweights.codecs import rans_pool
from lazyweights.codecs.log2 import log2_all


def bells(rng: np.random.Generator, widths: np.ndarray, n: int = 4000) -> np.ndarray:
    codes = np.clip(np.rint(rng.standard_normal((len(widths), n)) * widths[:, None]), -127, 127).astype(np.int64) & 255
    return np.stack([np.bincount(row, minlength=256) for row in codes])


def test_log2_of_small_and_large_numbers() -> None:
    values = np.array([1, 2, 3, 65535, 65536, 10**9, (1 << 62) - 1])
    expected = np.log2(values.astype(np.float64)) * 65536
    np.testing.assert_allclose(log2_all(values), expected, atol=1.01)


def test_sizes_are_what_an_ideal_coder_takes() -> None:
    counts = bells(np.random.default_rng(1), np.array([3.0, 10.0, 30.0]))
    p = counts / counts.sum(axis=1, keepdims=True)
    for k in range(3):
        expected = float(-(counts[k] * np.log2(np.where(p[k] > 0, p[k], 1))).sum())
        assert rans_pool.own_bits(counts[k][None]) == pytest.approx(expected, rel=2e-3)
        assert rans_pool.sizes(counts, counts)[k, k] / rans_pool.BIT == pytest.approx(expected, rel=2e-3)


def test_widths_that_differ_by_little_come_apart() -> None:
    rng = np.random.default_rng(2)
    widths = np.repeat(8 * 2.0 ** (np.arange(6) / 4), 20)
    counts = bells(rng, widths, 20_000)
    labels, bits = rans_pool.cluster(counts, rans_pool.seed_tables(counts, 6, 100))
    assert labels.tolist() == np.repeat(np.arange(6), 20).tolist()
    assert bits < 1.002 * rans_pool.own_bits(counts) + 20


def test_more_tables_cost_no_more() -> None:
    rng = np.random.default_rng(3)
    counts = bells(rng, 4 * 2.0 ** rng.uniform(-2, 2, 150))
    bits = [rans_pool.cluster(counts, rans_pool.seed_tables(counts, n, 0))[1] for n in (1, 2, 4, 8, 16)]
    assert bits == sorted(bits, reverse=True)
    assert bits[-1] >= rans_pool.own_bits(counts)


def test_rows_without_symbols() -> None:
    counts = np.zeros((4, 256), np.int64)
    counts[1, 3], counts[3, 9] = 10_000, 10_000
    labels, bits = rans_pool.cluster(counts, rans_pool.seed_tables(counts, 8, 100))
    assert labels[1] != labels[3]
    assert bits == 0
