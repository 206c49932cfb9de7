"""Factors of inverse Hessians."""

from __future__ import annotations

import numpy as np
import pytest

from lazyweights.quant.factors import factorize, large_first, spread_within_blocks


def hessian(n: int, rank: int, seed: int = 0) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal((rank, n))
    return x.T @ x / rank


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 200])
def test_upper_gives_the_inverse(n: int) -> None:
    h = hessian(n, 3 * n)
    factor = factorize(h, damp_frac=0.0)
    upper = factor.upper.astype(np.float64)
    assert np.array_equal(upper, np.triu(upper))
    assert np.allclose(upper.T @ upper @ h, np.eye(n), atol=1e-3)
    assert np.allclose(factor.diagonal, upper.diagonal(), rtol=1e-6)
    assert (factor.n_dead, factor.is_diagonal, factor.damp_frac) == (0, False, 0.0)


def test_diagonal_is_what_a_column_costs() -> None:
    """1 / U[j, j]^2 is the least of e' H e over e with e[j] = 1 and nothing before j."""
    h = hessian(6, 20)
    factor = factorize(h, damp_frac=0.0)
    for j in range(6):
        rest = h[j + 1 :, j + 1 :]
        schur = h[j, j] - (h[j, j + 1 :] @ np.linalg.solve(rest, h[j + 1 :, j]) if j < 5 else 0.0)
        assert 1 / factor.diagonal[j] ** 2 == pytest.approx(schur, rel=1e-9)


def test_damping_grows_until_it_works() -> None:
    h = hessian(8, 3)  # singular
    h[0, 0] -= 0.05 * h.diagonal().mean()  # and indefinite
    factor = factorize(h, damp_frac=0.001)
    assert factor.damp_frac in (0.01, 0.1, 1.0)
    assert not factor.is_diagonal
    assert np.isfinite(factor.upper).all()


def test_dead_columns_do_not_matter() -> None:
    h = hessian(5, 20)
    h[2, :] = h[:, 2] = 0
    factor = factorize(h, damp_frac=0.0)
    alive = [0, 1, 3, 4]
    assert factor.n_dead == 1
    assert np.array_equal(factor.upper[2, alive], np.zeros(4, np.float32))
    assert np.allclose(factor.upper[np.ix_(alive, alive)], factorize(h[np.ix_(alive, alive)], 0.0).upper, atol=1e-6)


def test_nothing_known() -> None:
    factor = factorize(np.zeros((3, 3)))
    assert factor.is_diagonal
    assert factor.n_dead == 3
    assert np.array_equal(factor.upper, np.diag(factor.upper.diagonal()))


def test_what_is_not_finite_falls_back_to_the_diagonal() -> None:
    h = hessian(4, 20)
    h[0, 1] = np.nan
    factor = factorize(h)
    assert factor.is_diagonal
    assert np.count_nonzero(factor.upper - np.diag(factor.upper.diagonal())) == 0
    assert np.argsort(factor.diagonal).tolist() == np.argsort(-h.diagonal()).tolist()


@pytest.mark.parametrize(("block", "sub"), [(32, 32), (256, 16), (256, 32)])
def test_large_inputs_come_first_and_blocks_stay_together(block: int, sub: int) -> None:
    diagonal = np.random.default_rng(2).random(1024)
    order = large_first(diagonal, block, sub)
    assert np.array_equal(np.sort(order), np.arange(1024))
    blocks, subs = order.reshape(-1, block) // block, order.reshape(-1, sub) // sub
    assert np.array_equal(blocks, np.broadcast_to(blocks[:, :1], blocks.shape))
    assert np.array_equal(subs, np.broadcast_to(subs[:, :1], subs.shape))
    assert (np.diff(diagonal.reshape(-1, block).mean(axis=1)[blocks[:, 0]]) <= 0).all()
    assert (np.diff(diagonal.reshape(-1, sub).mean(axis=1)[subs[:, 0]].reshape(-1, block // sub), axis=1) <= 0).all()
    assert (np.diff(diagonal[order].reshape(-1, sub), axis=1) <= 0).all()


def test_equally_large_units_stay_apart() -> None:
    assert large_first(np.ones(128), 64, 32).tolist() == list(range(128))


def test_spread_within_blocks() -> None:
    """Where half of the columns matter four times as much, a shared step costs what the mean of the squares says."""
    assert spread_within_blocks(np.full(64, 0.3), 32) == pytest.approx(0)
    half = np.where(np.arange(32) % 2, 1.0, 0.5)
    assert spread_within_blocks(half, 32) == pytest.approx(0.5 * np.log2((1 + 4) / 2) - 0.5)
