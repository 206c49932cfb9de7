"""Numbers of variable length: many at once are what one after the other are, and errors are the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyweights.container.numbers import NumberReader, pack_numbers
from lazyweights.errors import LazyWeightsError, LimitError, TruncatedError


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 130), st.integers(0, 5000), st.integers(0, 1 << 40)), max_size=40),
    st.integers(0, 42), st.sampled_from([127, 128, 4096, 1 << 14, 1 << 41]), st.binary(max_size=3),
)  # fmt: skip
def test_many_numbers_are_as_one_by_one(values: list[int], n: int, limit: int, tail: bytes) -> None:
    data = pack_numbers(values) + tail
    one_by_one, at_once, a_few = NumberReader(data), NumberReader(data), NumberReader(data)
    try:
        expected = [one_by_one.number(limit) for _ in range(n)]
    except LazyWeightsError as error:
        with pytest.raises(type(error)):
            at_once.numbers(n, limit)
        with pytest.raises(LazyWeightsError):
            a_few.several(n, limit)
        return
    assert at_once.numbers(n, limit).tolist() == expected
    assert a_few.several(n, limit) == expected
    assert at_once.at == a_few.at == one_by_one.at


def test_numbers_longer_than_they_need_be() -> None:
    data = bytes([0x80, 0x00, 0x85, 0x80, 0x00, 0x07])
    assert NumberReader(data).numbers(3, 4096).tolist() == [0, 5, 7]
    assert NumberReader(data).several(3) == [0, 5, 7]
    assert NumberReader(data).numbers(3, 4096).dtype == np.int64


def test_a_number_without_an_end() -> None:
    with pytest.raises(LimitError):
        NumberReader(b"\xff" * 1000).several(1)
    with pytest.raises(TruncatedError):
        NumberReader(b"\xff" * 5).several(1)
