"""Sizes of contexts under tables are those of exact integer products."""

from __future__ import annotations

import numpy as np
import pytest

from lazyweights.codecs.size_kernels import all_sizes, smallest_sizes


@pytest.mark.parametrize(
    ("n_contexts", "n_tables", "n_symbols"), [(0, 3, 256), (1, 1, 256), (8, 32, 256), (37, 65, 256), (9, 5, 7)]
)
def test_sizes_equal_integer_products(n_contexts, n_tables, n_symbols):
    rng = np.random.default_rng(n_contexts)
    counts = (rng.random((n_contexts, n_symbols)) ** 8 * 1000).astype(np.uint32)
    # Too large for float32: one symbol, and the sum of many.
    counts[1::5, 0] = 2**32 - 1 - np.arange(len(counts[1::5]))
    counts[2::5] += 4097
    costs = rng.integers(0, 65, (n_tables, n_symbols))
    want = counts.astype(np.int64) @ costs.T
    sizes = all_sizes(counts, costs.astype(np.float64))
    assert sizes.dtype == np.float64
    np.testing.assert_array_equal(sizes.astype(np.int64), want)
    best, totals = smallest_sizes(counts, costs.astype(np.float64))
    np.testing.assert_array_equal(best, want.argmin(axis=1))
    for t in range(n_tables):
        np.testing.assert_array_equal(totals[t], counts[best == t].sum(axis=0, dtype=np.int64))


def test_the_first_of_equal_tables_is_chosen():
    counts = np.array([[3, 1, 0], [0, 0, 1]], np.uint32)
    costs = np.array([[2.0, 1.0, 4.0], [1.0, 4.0, 4.0], [2.0, 1.0, 1.0], [1.0, 4.0, 1.0]])
    assert smallest_sizes(counts, costs)[0].tolist() == [0, 2]
