"""Trellis codes against the rule in plain Python, column by column."""

from __future__ import annotations

import numpy as np
import pytest

from lazyweights.codecs import trellis


def codes_of(indices: list[int]) -> list[int]:
    """Return the codes of a column of indices, not bounded."""
    codes, state = [], 0
    for i, k in enumerate(indices):
        if i % 64 == 0:
            state = 0
        codes.append(2 * k + (state & 1))
        state = (state >> 1) ^ (18 if state & 1 else 0) ^ (4 if k & 1 else 0)
    return codes


def indices_of(codes: list[int]) -> tuple[list[int], list[bool]]:
    """Return the indices of a column of codes, and whether each row group obeys the rule."""
    indices, valid, state = [], [], 0
    for i, u in enumerate(codes):
        if i % 64 == 0:
            state = 0
            valid.append(True)
        valid[-1] &= u & 1 == state & 1
        indices.append(u >> 1)
        state = (state >> 1) ^ (18 if state & 1 else 0) ^ (4 if u >> 1 & 1 else 0)
    return indices, valid


def test_transitions() -> None:
    assert trellis.TRANSITIONS.dtype == np.int64
    assert trellis.TRANSITIONS.shape == (trellis.N_STATES, 2)
    for state in range(trellis.N_STATES):
        for k in range(2):
            assert trellis.TRANSITIONS[state, k] == (state >> 1) ^ (18 if state & 1 else 0) ^ (4 if k else 0)
    # A trellis: two ways out of each state, two into each.
    assert np.bincount(trellis.TRANSITIONS.ravel(), minlength=32).tolist() == [2] * 32


@pytest.mark.parametrize("is_signed", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (2, 32), (63, 5), (64, 33), (65, 96), (200, 40)])
def test_both_ways(shape: tuple[int, int], is_signed: bool) -> None:
    rng = np.random.default_rng([70, *shape])
    low = -64 if is_signed else 0
    indices = rng.integers(low, low + 128, shape)
    codes = np.array([codes_of(column) for column in indices.T.tolist()]).T
    dtype = np.int8 if is_signed else np.uint8
    symbols = codes.astype(dtype).view(np.uint8)
    found = symbols.copy()
    assert trellis.to_indices(found, is_signed).tolist() == [True] * -(-shape[0] // 64)
    assert np.array_equal(found.view(dtype), indices)
    states = np.full(shape[1], 7, np.uint8)
    for first in range(0, shape[0], 64):
        n_rows = min(64, shape[0] - first)
        trellis.from_indices(found.reshape(-1), first * shape[1], shape[1], n_rows, states)
    assert np.array_equal(found, symbols)


@pytest.mark.parametrize("is_signed", [True, False])
def test_wrong_codes(is_signed: bool) -> None:
    """Row groups that break the rule are told from those that do not, wherever they do."""
    rng = np.random.default_rng(71)
    low = -64 if is_signed else 0
    for row, column in [(0, 0), (63, 8), (64, 3), (130, 9), (139, 0)]:
        codes = np.array([codes_of(of_column) for of_column in rng.integers(low, low + 128, (10, 140)).tolist()]).T
        codes[row, column] ^= 1
        expected = np.all([indices_of(of_column)[1] for of_column in codes.T.tolist()], axis=0)
        assert expected.tolist() == [row // 64 != g for g in range(3)]
        found = trellis.to_indices(codes.astype(np.int8 if is_signed else np.uint8).view(np.uint8), is_signed)
        assert found.tolist() == expected.tolist()


def test_any_byte_has_a_code() -> None:
    """Indices of damaged streams need not be those of any code: they are doubled modulo 256."""
    rng = np.random.default_rng(72)
    indices = rng.integers(0, 256, (64, 48)).astype(np.uint8)
    found = indices.copy()
    trellis.from_indices(found.reshape(-1), 0, 48, 64, np.zeros(48, np.uint8))
    expected = np.array([codes_of(column) for column in indices.T.tolist()]).T & 255
    assert np.array_equal(found, expected)


def test_rows_that_lie_apart() -> None:
    """What lies between rows and in front of them is left alone."""
    rng = np.random.default_rng(73)
    buffer = rng.integers(0, 256, 5000).astype(np.uint8)
    found = buffer.copy()
    trellis.from_indices(found, 11, 70, 40, np.zeros(50, np.uint8))
    rows = [slice(11 + 70 * row, 61 + 70 * row) for row in range(40)]
    expected = np.array([codes_of(column) for column in np.array([buffer[r] for r in rows]).T.tolist()]).T & 255
    assert np.array_equal(np.array([found[r] for r in rows]), expected)
    for r in rows:
        buffer[r] = found[r] = 0
    assert np.array_equal(found, buffer)
