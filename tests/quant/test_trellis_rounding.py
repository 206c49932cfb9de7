"""Rounding down a trellis, against all paths of a short column and against the rule in plain Python."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lazyweights.quant.trellis_rounding import FINE_STEP, Scratch, round_column


def chosen(
    values: np.ndarray, weights: np.ndarray | None = None, span: tuple[int, int] = (-127, 127), rate_weight: float = 0.0,
    lengths: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    values = np.asarray(values, np.float32)
    codes = np.full(len(values), 99, np.int8)
    round_column(
        values, np.ones(len(values), np.float32) if weights is None else weights.astype(np.float32), *span,
        np.float32(rate_weight), np.zeros(256, np.float32) if lengths is None else lengths, Scratch(len(values)).arrays, codes,
    )  # fmt: skip
    return codes


def next_state(state: int, code: int) -> int:
    return (state >> 1) ^ (18 if state & 1 else 0) ^ (4 if (code >> 1) & 1 else 0)


def obeys(codes: np.ndarray) -> bool:
    for first in range(0, len(codes), 64):
        state = 0
        for code in codes[first : first + 64].tolist():
            if code & 1 != state & 1:
                return False
            state = next_state(state, code)
    return True


def cost(codes: np.ndarray, values: np.ndarray, weights: np.ndarray) -> float:
    return float((weights * (codes - values) ** 2).sum())


def test_no_path_is_better() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        values, weights = rng.normal(0, 3, 7).astype(np.float32), rng.uniform(0.2, 2, 7)
        best = np.inf
        for bits in itertools.product((0, 1), repeat=7):
            state, path = 0, []
            for value, bit in zip(values.tolist(), bits, strict=True):
                remainder = (state & 1) + 2 * bit
                path.append(remainder + 4 * round((value - remainder) / 4))
                state = next_state(state, path[-1])
            best = min(best, cost(np.array(path), values, weights))
        found = chosen(values, weights)
        assert obeys(found)
        assert cost(found, values, weights) == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 200])
def test_the_rule_holds_in_every_row_group(rows: int) -> None:
    values = np.random.default_rng(rows).normal(0, 20, rows)
    codes = chosen(values)
    assert obeys(codes)
    assert np.abs(codes - values).max() < 4


def test_same_error_as_plain_rounding_with_less_entropy() -> None:
    """On the grid that `FINE_STEP` says, the error is that of a whole step, and the indices take 0.1 bits less."""
    values = np.random.default_rng(3).normal(0, 6, 64 * 1500)
    codes = chosen(values / FINE_STEP)
    plain = np.rint(values)
    assert np.mean((codes * FINE_STEP - values) ** 2) == pytest.approx(np.mean((plain - values) ** 2), rel=0.03)

    def entropy(numbers: np.ndarray) -> float:
        n = np.unique(numbers, return_counts=True)[1]
        return float(-(n / n.sum() * np.log2(n / n.sum())).sum())

    assert entropy(codes.astype(np.int64) >> 1) < entropy(plain) - 0.15


@pytest.mark.parametrize("span", [(-127, 127), (-32, 31), (-16, 15)])
def test_codes_stay_in_range(span: tuple[int, int]) -> None:
    values = np.concatenate([np.random.default_rng(5).normal(0, span[1], 300), [1e30, -1e30, np.inf, -np.inf]])
    codes = chosen(values, span=span)
    assert (codes.min(), codes.max()) == span or (codes.min() >= span[0] and codes.max() >= span[1] - 3)
    assert codes.max() <= span[1]
    assert obeys(codes)


def test_weights_say_whose_error_counts() -> None:
    rng = np.random.default_rng(7)
    values, weights = rng.normal(0, 5, 64 * 50), np.where(np.arange(64 * 50) % 2, 4.0, 0.25)
    errors = (chosen(values, weights) - values) ** 2
    assert errors[1::2].mean() < 0.7 * errors[::2].mean()


def test_bits_may_count() -> None:
    values = np.random.default_rng(9).normal(0, 3, 64 * 100)
    lengths = np.abs(np.arange(256) - 128).astype(np.float32)  # small codes are short
    nearest, aware = chosen(values), chosen(values, rate_weight=2.0, lengths=lengths)
    assert np.abs(aware.astype(int)).mean() < np.abs(nearest.astype(int)).mean() - 0.2
    assert obeys(aware)
