"""Code lengths and canonical codes."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyweights.codecs import MAX_CODE_LENGTH, canonical, package_merge
from lazyweights.errors import CodecError


def huffman_cost(counts: np.ndarray) -> int:
    """Coded bits of the unlimited Huffman code: the lower bound of every prefix code."""
    heap = [int(c) for c in counts if c > 0]
    heapq.heapify(heap)
    cost = 0
    while len(heap) > 1:
        merged = heapq.heappop(heap) + heapq.heappop(heap)
        cost += merged
        heapq.heappush(heap, merged)
    return cost


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=256), st.integers(8, 11))
def test_kernel_equals_reference(counts, limit):
    want = package_merge.code_lengths_reference(counts, limit)
    assert package_merge.code_lengths(np.array(counts), limit).tolist() == want


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=256))
def test_kraft_sum_is_one_and_cost_is_at_least_huffman(counts):
    lengths = package_merge.code_lengths(np.array(counts)).astype(np.int64)
    assert (2 ** (MAX_CODE_LENGTH - lengths)).sum() == 2**MAX_CODE_LENGTH
    cost = int((lengths * counts).sum())
    best = huffman_cost(np.array(counts))
    assert cost >= best
    if max(package_merge.code_lengths_reference(counts, 40)) <= MAX_CODE_LENGTH:
        assert cost == best


def test_fibonacci_counts_hit_the_limit():
    counts = [1, 1]
    while len(counts) < 30:
        counts.append(counts[-1] + counts[-2])
    lengths = package_merge.code_lengths(np.array(counts))
    assert lengths.max() == MAX_CODE_LENGTH
    canonical.check_lengths(lengths)
    # Optimal under the limit: exhaustive optimum by dynamic programming on the sorted counts.
    small = np.array(counts[:7])
    limited = package_merge.code_lengths(small, 4).astype(int)
    best = min(
        sum(c * n for c, n in zip(small, combo, strict=True))
        for combo in _complete_codes(len(small), 4)
    )
    assert int((limited * small).sum()) == best


def _complete_codes(n: int, limit: int, budget: int | None = None):
    budget = 2**limit if budget is None else budget
    if n == 0:
        if budget >= 0:
            yield ()
        return
    for length in range(1, limit + 1):
        if 2 ** (limit - length) <= budget:
            for rest in _complete_codes(n - 1, limit, budget - 2 ** (limit - length)):
                yield (length, *rest)


def test_ties_are_broken_by_symbol():
    assert package_merge.code_lengths(np.array([1, 1, 1])).tolist() == [2, 2, 1]
    assert package_merge.code_lengths(np.array([2, 1, 1, 2, 2])).tolist() == package_merge.code_lengths_reference([2, 1, 1, 2, 2])


def test_one_symbol_has_an_empty_codeword():
    lengths = package_merge.code_lengths(np.array([0, 0, 9, 0]))
    assert lengths.tolist() == [0, 0, 1, 0]
    assert canonical.codewords(lengths).tolist() == [0xFFFFFFFF, 0xFFFFFFFF, 0, 0xFFFFFFFF]
    padded = np.zeros(256, np.uint8)
    padded[2] = 1
    assert set(canonical.decode_tables(padded[None])[:2048].tolist()) == {2 << 8}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 10**5), min_size=256, max_size=256).filter(lambda c: sum(x > 0 for x in c) > 1))
def test_every_codeword_decodes_to_its_symbol(counts):
    lengths = package_merge.code_lengths(np.array(counts))
    table = canonical.decode_tables(lengths[None])
    for symbol, entry in enumerate(canonical.codewords(lengths).tolist()):
        if entry == 0xFFFFFFFF:
            assert lengths[symbol] == 0
            continue
        length, word = entry >> 16, entry & 0xFFFF
        for window in (word << 11 - length, (word + 1 << 11 - length) - 1):
            assert table[window] == symbol << 8 | length


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([0, 0], "no symbol"),
        ([12, 1], "too long"),
        ([2], "length 1"),
        ([1, 2], "complete prefix"),
        ([1, 1, 1], "complete prefix"),
    ],
)
def test_bad_lengths_are_refused(lengths, message):
    with pytest.raises(CodecError, match=message):
        canonical.check_lengths(np.array(lengths, np.uint8))


def test_more_symbols_than_codewords():
    with pytest.raises(CodecError, match="more symbols") as caught:
        package_merge.code_lengths(np.ones(9), 3)
    assert (caught.value.expected, caught.value.found) == (8, 9)
