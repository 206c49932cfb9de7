"""Step patterns."""

from __future__ import annotations

import numpy as np
import pytest

from lazyweights.quant.factors import factorize
from lazyweights.quant.steps import MAX_ROW_RATIO, curved_pattern, even_pattern, relative_pattern


def test_equal_costs() -> None:
    """A step's cost, row weight * s^2 / U^2, is the same for all weights but for the rounding of row factors."""
    rng = np.random.default_rng(0)
    hessian = np.diag(rng.uniform(0.1, 10, 64))
    weights = rng.uniform(0.1, 10, 50)
    factor = factorize(hessian, 0.0)
    pattern = curved_pattern(factor, weights, 1.0, False)
    steps = pattern.columns[None] * pattern.row_factors[:, None]
    costs = weights[:, None] * steps**2 / factor.diagonal[None] ** 2
    assert np.abs(np.log2(costs)).max() <= 0.5001  # row factors are rounded by up to a quarter of an octave, costs are squares
    halves = 2 * np.log2(pattern.row_factors)
    assert np.allclose(halves, np.rint(halves), atol=1e-9)
    assert np.allclose(pattern.row_costs, weights / 2)


def test_a_step_of_many_columns_costs_what_theirs_would() -> None:
    rng = np.random.default_rng(1)
    pattern = curved_pattern(factorize(np.diag(rng.uniform(0.01, 100, 96)), 0.0), np.ones(4), 1.0, False)
    steps = pattern.sub_block_steps(1.5, 32)
    cost = (steps[:, None] / pattern.columns.reshape(3, 32)) ** 2
    assert cost.mean(axis=1).tolist() == pytest.approx([1.5**2] * 3)


def test_coherence_narrows_all_steps() -> None:
    factor, weights = factorize(np.eye(32), 0.0), np.ones(4)
    plain, coherent = (curved_pattern(factor, weights, c, False) for c in (1.0, 4.0))
    assert np.allclose(coherent.columns, plain.columns / 2)
    assert np.allclose(coherent.row_costs, 4 * plain.row_costs)
    assert np.allclose(curved_pattern(factor, weights, 0.1, False).columns, plain.columns)


def test_rows_without_gradients_are_bounded() -> None:
    weights = np.array([1.0, 0.0, np.nan, 1.0])
    pattern = curved_pattern(factorize(np.eye(32), 0.0), weights, 1.0, False)
    assert pattern.row_factors.max() / pattern.row_factors.min() <= np.sqrt(MAX_ROW_RATIO) * 1.5
    assert np.isfinite(pattern.row_factors).all()
    assert np.isfinite(curved_pattern(factorize(np.eye(32), 0.0), np.zeros(4), 1.0, False).columns).all()


def test_rare_tokens_keep_a_share() -> None:
    weights = np.array([10.0, 0.0])
    plain, shared = (curved_pattern(factorize(np.eye(32), 0.0), weights, 1.0, flag) for flag in (False, True))
    assert plain.row_factors[1] / plain.row_factors[0] > 2 * shared.row_factors[1] / shared.row_factors[0]


def test_relative_pattern_follows_the_weights() -> None:
    factor = factorize(np.diag(np.linspace(1, 2, 64)), 0.0)
    pattern = relative_pattern(factor, "attn_q", 3.0, 7)
    assert np.exp(np.log(pattern.columns).mean()) == pytest.approx(3 * 0.36)
    assert pattern.columns[0] / pattern.columns[-1] == pytest.approx(2**0.5, rel=1e-3)
    assert pattern.sub_block_steps(2.0, 1)[[0, -1]].tolist() == pytest.approx((2 * pattern.columns[[0, -1]]).tolist())
    assert np.array_equal(pattern.row_factors, np.ones(7))


def test_even_pattern() -> None:
    pattern = curved_pattern(factorize(np.diag(np.linspace(1, 2, 64)), 0.0), np.array([1.0, 4.0]), 1.0, False)
    even = even_pattern(pattern, True, True)
    assert len(set(even.columns)) == len(set(even.row_factors)) == 1
    assert np.log(even.columns).mean() == pytest.approx(np.log(pattern.columns).mean())
    assert even_pattern(pattern, False, False) == pattern or np.array_equal(
        even_pattern(pattern, False, False).columns, pattern.columns
    )
