"""The kernels of planning against plain integers."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyweights.container.count_kernels import merge_contexts, total_counts, used_rows
from lazyweights.container.planning import log2_q16


def log2_reference(n: int) -> int:
    """``floor(65536 * log2(n))`` by squaring, in Python's integers, to 64 bits."""
    whole = n.bit_length() - 1
    x = (n << 64) >> whole
    fraction = 0
    for _ in range(16):
        x = (x * x) >> 64
        fraction <<= 1
        if x >> 65:
            x >>= 1
            fraction |= 1
    return whole << 16 | fraction


@settings(deadline=None)
@given(st.one_of(st.integers(1, 2**20), st.integers(1, 2**63 - 1), st.integers(0, 62).map(lambda k: (1 << k + 1) - 1)))
def test_log2_equals_reference(n):
    assert log2_q16(n) == log2_reference(n)


def test_log2_of_small_numbers():
    assert [log2_q16(n) for n in range(1, 5000)] == [log2_reference(n) for n in range(1, 5000)]


def test_used_rows_and_totals():
    counts = np.zeros((40, 256), np.uint32)
    counts[3, 255] = 1
    counts[17] = 2**32 - 1
    counts[39, 0] = 5
    used = used_rows(counts)
    assert np.flatnonzero(used).tolist() == [3, 17, 39]
    np.testing.assert_array_equal(total_counts(counts, used), counts.astype(np.int64).sum(axis=0))
    assert not total_counts(counts, np.zeros(40, np.bool_)).any()


@given(st.lists(st.sampled_from([0, 0, 1, 3, 7, 20]), min_size=40, max_size=40), st.sampled_from([1, 8, 16]))
def test_merged_contexts(totals, enough):
    """Contexts stand for those behind them up to the next one that is kept, and have enough symbols if their run has."""
    counts = np.zeros((len(totals), 256), np.uint32)
    for k, total in enumerate(totals):
        counts[k, k % 5] = total
    used = used_rows(counts)
    merged = np.full_like(counts, 99)
    kept = merge_contexts(counts, used, 16, enough, merged)
    assert not (kept & ~used).any()
    for first in range(0, len(totals), 16):
        run = np.arange(first, min(first + 16, len(totals)))
        heads = run[kept[run]].tolist()
        assert bool(heads) == bool(used[run].any())
        if not heads:
            continue
        assert not used[first : heads[0]].any()
        for head, end in zip(heads, [*heads[1:], run[-1] + 1], strict=True):
            np.testing.assert_array_equal(merged[head], counts[head:end].sum(axis=0))
            assert merged[head].sum() >= min(enough, counts[run].sum())
