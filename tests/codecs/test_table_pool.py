"""Table pools: every symbol has a codeword, no pool is worse than one table, no table is kept that saves too little."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from lazyweights.codecs import table_pool
from lazyweights.codecs.canonical import check_lengths
from lazyweights.codecs.package_merge import code_lengths
from lazyweights.codecs.table_pool import MAX_TABLES, TABLE_COST_BITS, build_pool

FAR = 1 << 40


def coded_bits(counts: np.ndarray, lengths: np.ndarray) -> int:
    """Exact size of some counts under one table; FAR where a symbol has no codeword."""
    used = np.flatnonzero(counts)
    if (lengths[used] == 0).any():
        return FAR
    if np.count_nonzero(lengths) == 1:
        return 0
    return int((counts[used].astype(object) * lengths[used].astype(object)).sum())


def pool_bits(counts: np.ndarray, lengths: np.ndarray, table_of: np.ndarray) -> int:
    return sum(coded_bits(row, lengths[t]) for row, t in zip(counts, table_of.tolist(), strict=True))


def check_pool(counts: np.ndarray, groups: np.ndarray, **options: int) -> tuple[np.ndarray, np.ndarray]:
    """Build a pool and check all that holds for every pool."""
    lengths, table_of = build_pool(counts, groups, **options)
    assert lengths.dtype == np.uint8
    assert lengths.shape[1] == 256
    assert table_of.shape == (len(counts),)
    assert sorted(set(table_of.tolist())) == list(range(len(lengths))), "a table is not used, or not there"
    assert len(lengths) <= MAX_TABLES
    for row in lengths:
        check_lengths(row)
    for t in range(len(lengths)):
        # No table has codewords that none of its contexts needs, and it is the best one for them.
        total = counts[table_of == t].astype(np.int64).sum(axis=0)
        assert np.array_equal(lengths[t] > 0, total > 0)
        assert coded_bits(total, lengths[t]) == coded_bits(total, code_lengths(total))
    bits = pool_bits(counts, lengths, table_of)
    total = counts.astype(np.int64).sum(axis=0)
    assert bits <= coded_bits(total, code_lengths(total))
    if len(lengths) > 1:
        for t in range(len(lengths)):
            others = np.delete(lengths, t, axis=0)
            alone = sum(min(coded_bits(row, o) for o in others) for row in counts[table_of == t])
            own = sum(coded_bits(row, lengths[t]) for row in counts[table_of == t])
            assert alone - own >= TABLE_COST_BITS, "a table saves less than it costs"
    again = build_pool(counts.copy(), groups.copy(), **options)
    assert np.array_equal(again[0], lengths)
    assert np.array_equal(again[1], table_of)
    return lengths, table_of


def geometric_contexts(rng: np.random.Generator, n: int, symbols: int = 256) -> np.ndarray:
    """Counts of contexts whose width and centre differ."""
    counts = np.zeros((n, 256), np.uint32)
    at = np.arange(symbols)
    for i in range(n):
        centre, width = rng.integers(symbols), rng.uniform(1, symbols / 4)
        counts[i, :symbols] = rng.poisson(3000 * np.exp(-np.abs(at - centre) / width))
        counts[i, centre] += 1
    return counts


@pytest.mark.parametrize("seed", range(4))
def test_contexts_of_many_kinds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = geometric_contexts(rng, 120, 256 if seed % 2 else 32)
    lengths, _ = check_pool(counts, rng.integers(0, 40, 120))
    assert len(lengths) > 3


def test_few_tables() -> None:
    rng = np.random.default_rng(5)
    counts = geometric_contexts(rng, 60)
    sizes = []
    for n_tables in (1, 2, 5, 20):
        lengths, table_of = check_pool(counts, np.arange(60), n_tables=n_tables)
        sizes.append(pool_bits(counts, lengths, table_of))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 0.95 * sizes[0]


def test_more_kinds_than_numbers() -> None:
    """Tables are numbered by bytes, whatever the contexts ask for."""
    counts = np.zeros((400, 256), np.uint32)
    for i in range(400):
        counts[i, i % 256] = 50_000
        counts[i, (i * 7 + 1) % 256] += 20_000
    lengths, _ = check_pool(counts, np.arange(400), n_tables=MAX_TABLES)
    assert len(lengths) > 50


def test_one_context() -> None:
    for counts in (np.eye(256, dtype=np.uint32)[:1] * 9, np.full((1, 256), 3, np.uint32)):
        lengths, table_of = check_pool(counts, np.zeros(1, np.int64))
        assert len(lengths) == 1
        assert table_of.tolist() == [0]


def test_equal_contexts_share_a_table() -> None:
    row = geometric_contexts(np.random.default_rng(6), 1)
    lengths, _ = check_pool(np.repeat(row, 50, axis=0), np.arange(50))
    assert len(lengths) == 1


def test_small_contexts_share_a_table() -> None:
    """Contexts of a few symbols cannot pay for tables of their own."""
    counts = np.zeros((100, 256), np.uint32)
    counts[np.arange(100), np.arange(100)] = 2
    lengths, _ = check_pool(counts, np.arange(100))
    assert len(lengths) == 1


@pytest.mark.parametrize("n_groups", [1, 20])
def test_constant_contexts_cost_no_bits(n_groups: int) -> None:
    """One symbol for each context, another for each: what a shared step of its own for each tensor looks like."""
    counts = np.zeros((20, 256), np.uint32)
    counts[np.arange(20), 3 * np.arange(20)] = 100_000
    lengths, table_of = check_pool(counts, np.arange(20) % n_groups)
    assert pool_bits(counts, lengths, table_of) <= 20 * TABLE_COST_BITS


def test_wide_counts() -> None:
    """Counts near 2**32: sizes are still exact."""
    rng = np.random.default_rng(7)
    counts = geometric_contexts(rng, 10)
    counts[:, :4] = (1 << 32) - 1 - np.arange(40, dtype=np.uint32).reshape(10, 4)
    check_pool(counts, np.arange(10))


def test_counts_of_other_dtypes_give_the_same_pool() -> None:
    counts = geometric_contexts(np.random.default_rng(8), 30)
    first = build_pool(counts, np.arange(30))
    for dtype in (np.int64, np.uint64):
        other = build_pool(counts.astype(dtype), np.arange(30))
        assert np.array_equal(first[0], other[0])
        assert np.array_equal(first[1], other[1])


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 12).flatmap(
        lambda n: st.tuples(
            arrays.arrays(
                np.uint32, (n, 8), elements=st.sampled_from([0, 0, 0, 1, 2, 3, 50, 400, 5000, 1 << 20, (1 << 32) - 1])
            ),
            arrays.arrays(np.int64, n, elements=st.integers(0, 3)),
            st.sampled_from([1, 2, 3, MAX_TABLES]),
        )
    )
)
def test_any_counts(drawn: tuple[np.ndarray, np.ndarray, int]) -> None:
    few, groups, n_tables = drawn
    counts = np.zeros((len(few), 256), np.uint32)
    counts[:, ::36] = few
    counts[:, 0] += counts.sum(axis=1) == 0  # every context has a symbol
    check_pool(counts, groups, n_tables=n_tables)


def test_groups_of_small_contexts_keep_their_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many short tensors with codes of their own, beside so many large contexts that no single short one is looked at."""
    monkeypatch.setattr(table_pool, "MAX_CLUSTERED", 50)
    rng = np.random.default_rng(3)
    large = geometric_contexts(rng, 100)
    small = np.zeros((200, 256), np.uint32)
    small[:, 200:204] = rng.integers(1, 4, (200, 4))
    counts = np.concatenate([large, small])
    groups = np.concatenate([np.arange(100) % 10, np.full(200, 99)])
    lengths, table_of = build_pool(counts, groups)
    assert pool_bits(small, lengths, table_of[100:]) <= 2.1 * int(small.sum())
