"""Rows of log-probabilities and their statistics, on made-up logits; llama.cpp is not needed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lazyweights.llama.divergence import mean_and_error, quantile, summarize
from lazyweights.llama.log_probs import Divergences, RowWorkers, row_words


def packed(logits: np.ndarray, targets: np.ndarray, threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
    rows = np.full((len(logits), row_words(logits.shape[1])), 7, "<u2")
    with RowWorkers(logits.shape[1], threads) as workers:
        return workers.pack(logits, targets, rows), rows


def made_up(n: int, n_vocab: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(0, 4, (n, n_vocab)).astype(np.float32), rng.integers(0, n_vocab, n).astype(np.int32)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(("n", "n_vocab"), [(1, 1), (3, 10), (7, 1001)])
def test_likelihoods(n: int, n_vocab: int, threads: int) -> None:
    logits, targets = made_up(n, n_vocab)
    with RowWorkers(n_vocab, threads) as workers:
        found = workers.nll(logits, targets)
    wide = logits.astype(np.float64)
    expected = np.log(np.exp(wide).sum(axis=1)) - wide[np.arange(n), targets]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(packed(logits, targets, threads)[0], expected, atol=1e-5)


def test_row_of_a_base_by_hand() -> None:
    """Logits 0 and -ln 3: probabilities 3/4 and 1/4, codes at both ends of the range."""
    logits = np.array([[0, -math.log(3), -math.log(3)]], np.float32)
    _, rows = packed(logits, np.array([0], np.int32))
    scale, low = rows[0, :4].view("<f4")
    assert rows[0, 4:].tolist() == [65535, 0, 0, 0]
    assert scale == pytest.approx(math.log(3) / 65535)
    assert low == pytest.approx(math.log(1 / 5))


def test_row_keeps_sixteen_nats() -> None:
    logits = np.array([[20, 12, 4, 3.9, -50, -np.inf]], np.float32)
    _, rows = packed(logits, np.array([0], np.int32))
    assert rows[0, 4:].tolist() == [65535, 32768, 0, 0, 0, 0]  # 32767.5 to the even neighbour


def test_row_of_equal_logits() -> None:
    _, rows = packed(np.full((1, 4), 2.5, np.float32), np.array([3], np.int32))
    scale, low = rows[0, :4].view("<f4")
    assert scale == 0
    assert low == pytest.approx(math.log(1 / 4))
    assert not rows[0, 4:].any()


@pytest.mark.parametrize("threads", [1, 3])
def test_comparison(threads: int) -> None:
    n, n_vocab = 9, 33
    (base, targets), (logits, _) = made_up(n, n_vocab), made_up(n, n_vocab, seed=1)
    _, rows = packed(base, targets)
    out = Divergences.empty(n)
    with RowWorkers(n_vocab, threads) as workers:
        workers.compare(logits, targets, rows, out)
    p, q = (a - np.log(np.exp(a.astype(np.float64)).sum(axis=1, keepdims=True)) for a in (base, logits))
    np.testing.assert_allclose(out.kld, (np.exp(p) * (p - q)).sum(axis=1), rtol=1e-3)
    at = np.arange(n)
    np.testing.assert_allclose(out.nll, -q[at, targets], atol=1e-5)
    np.testing.assert_allclose(out.nll_base, np.minimum(-p[at, targets], -(p.max(axis=1) - 16)), atol=5e-4)
    np.testing.assert_allclose(out.delta_p, np.exp(q[at, targets]) - np.exp(p[at, targets]), atol=1e-4)
    assert out.same_top.tolist() == (p.argmax(axis=1) == q.argmax(axis=1)).tolist()


def test_comparison_with_impossible_tokens() -> None:
    """What Q finds impossible makes a divergence infinite where the base finds it likely, and else nothing."""
    base = np.array([[0, 0, -30, -30], [0, 0, -30, -30]], np.float32)
    logits = np.array([[0, 0, 0, -np.inf], [0, -np.inf, 0, 0]], np.float32)
    targets = np.zeros(2, np.int32)
    _, rows = packed(base, targets)
    out = Divergences.empty(2)
    with RowWorkers(4, 1) as workers:
        workers.compare(logits, targets, rows, out)
    assert out.kld.tolist() == [pytest.approx(math.log(3 / 2), rel=1e-5), math.inf]


def test_numbers_that_are_none() -> None:
    logits = np.zeros((3, 5), np.float32)
    logits[1, 2], logits[2, 2] = np.nan, np.inf
    targets = np.zeros(3, np.int32)
    with RowWorkers(5, 2) as workers:
        assert np.isnan(workers.nll(logits, targets)).tolist() == [False, True, True]
    assert np.isnan(packed(logits, targets)[0]).tolist()[:2] == [False, True]


def test_quantiles() -> None:
    values = np.arange(11, dtype=np.float32)
    assert [quantile(values, f) for f in (0.0, 0.5, 1.0)] == [0, 5, 10]
    assert quantile(values, 0.25) == 2.5
    assert quantile(values[:10], 0.5) == 4.5
    assert [quantile(values[:1], f) for f in (0.0, 0.1, 0.5, 0.999, 1.0)] == [0] * 5


def test_errors_need_more_than_ten_values() -> None:
    assert mean_and_error(np.arange(10.0)).error == 0
    assert mean_and_error(np.arange(11.0)).error == pytest.approx(math.sqrt(10 / 10))


def test_errors_of_differences_are_those_of_covariances() -> None:
    rng = np.random.default_rng(0)
    n = 200
    found = Divergences.empty(n)
    found.nll[:] = rng.gamma(2, 1, n)
    found.nll_base[:] = found.nll + rng.normal(0, 0.1, n)
    statistics = summarize(found)
    a, b = (found.nll.astype(np.float64), found.nll_base.astype(np.float64))
    covariance = np.cov(a, b, ddof=0) / (n - 1)
    error = math.sqrt(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1])
    assert statistics.ln_ratio.error == pytest.approx(error)
    assert statistics.ratio.error == pytest.approx(error * math.exp((a - b).mean()))
    p, q = math.exp(a.mean()), math.exp(b.mean())
    error = math.sqrt(p * p * covariance[0, 0] + q * q * covariance[1, 1] - 2 * p * q * covariance[0, 1])
    assert statistics.difference.value == pytest.approx(p - q)
    assert statistics.difference.error == pytest.approx(error)
    assert statistics.correlation == pytest.approx(np.corrcoef(a, b)[0, 1])
    assert statistics.ppl.error == pytest.approx(p * math.sqrt(covariance[0, 0]))


def test_statistics_that_are_not_defined() -> None:
    found = summarize(Divergences.empty(1))
    assert (found.ppl.value, found.kld.value, found.rms_delta_p.value) == (1, 0, 0)
    assert math.isnan(found.correlation)
    assert math.isnan(found.rms_delta_p.error)
    assert math.isnan(found.same_top_p.error)
    large = Divergences.empty(20)
    large.nll[:] = 1000
    assert summarize(large).ppl.value == math.inf
    assert math.isnan(summarize(large).difference.error)
    large.nll[3] = large.kld[3] = math.inf
    assert (summarize(large).kld.value, summarize(large).kld_quantiles["maximum"]) == (math.inf, math.inf)
    assert math.isnan(summarize(large).kld.error)
