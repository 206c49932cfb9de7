"""What comparisons with a base model amount to: means with their errors, quantiles, as llama-perplexity computes them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lazyweights.llama.log_probs import Divergences

KLD_FRACTIONS = {"maximum": 1.0, "99.9%": 0.999, "99.0%": 0.99, "95.0%": 0.95, "90.0%": 0.9, "median": 0.5,
                 "10.0%": 0.1, "5.0%": 0.05, "1.0%": 0.01, "0.1%": 0.001, "minimum": 0.0}  # fmt: skip
"""Quantiles that are reported, and their fractions."""

DELTA_P_FRACTIONS = {"maximum": 1.0, "99.9%": 0.999, "99.0%": 0.99, "95.0%": 0.95, "90.0%": 0.9, "75.0%": 0.75, "median": 0.5,
                     "25.0%": 0.25, "10.0%": 0.1, "5.0%": 0.05, "1.0%": 0.01, "0.1%": 0.001, "minimum": 0.0}  # fmt: skip


@dataclass(frozen=True)
class Estimate:
    """A value and its standard error, 0 where there are too few positions to tell, NaN where it is not defined."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.6f} +/- {self.error:.6f}"


@dataclass(frozen=True)
class DivergenceStatistics:
    """How a model (Q) differs from its base over all scored positions.

    Attributes
    ----------
    ppl, ppl_base : Estimate
        Perplexities.
    correlation : float
        Of the log-likelihoods of both, NaN where one of them does not vary.
    ln_ratio, ratio, difference : Estimate
        ln(PPL(Q) / PPL(base)), PPL(Q) / PPL(base), PPL(Q) - PPL(base).
    kld : Estimate
        Mean Kullback-Leibler divergence, in nats.
    kld_quantiles : dict
        Of the divergence, by the keys of `KLD_FRACTIONS`.
    delta_p : Estimate
        Mean of the probability of the token that follows, less that of the base: a fraction, not percent.
    delta_p_quantiles : dict
        By the keys of `DELTA_P_FRACTIONS`.
    rms_delta_p : Estimate
        Root mean square of the same.
    same_top_p : Estimate
        Fraction of positions at which both find the same token most likely.
    n_positions : int
        Scored positions.
    """

    ppl: Estimate
    ppl_base: Estimate
    correlation: float
    ln_ratio: Estimate
    ratio: Estimate
    difference: Estimate
    kld: Estimate
    kld_quantiles: dict[str, float]
    delta_p: Estimate
    delta_p_quantiles: dict[str, float]
    rms_delta_p: Estimate
    same_top_p: Estimate
    n_positions: int


def mean_and_error(values: np.ndarray) -> Estimate:
    """Return the mean of at least one value and its standard error, which is 0 for ten or fewer values."""
    wide = values.astype(np.float64)
    mean = float(wide.mean())
    n = len(wide)
    return Estimate(mean, math.sqrt(float(((wide - mean) ** 2).mean()) / (n - 1)) if n > 10 else 0.0)


def quantile(values: np.ndarray, fraction: float) -> float:
    """Return a quantile of sorted float32 values, between two of them by a straight line; float32 throughout."""
    if fraction in (0, 1):
        return float(values[0 if fraction == 0 else -1])
    if fraction == 0.5:
        middle = len(values) // 2
        return float(values[middle] if len(values) % 2 else np.float32(0.5) * (values[middle] + values[middle - 1]))
    position = np.float32(fraction) * np.float32(len(values) - 1)
    below = min(int(position), len(values) - 1)
    part = position - np.float32(below)
    return float((1 - part) * values[below] + part * values[min(below + 1, len(values) - 1)])


@np.errstate(invalid="ignore")  # where a token has probability 0, means are infinite and errors NaN
def summarize(found: Divergences) -> DivergenceStatistics:
    """Reduce the comparisons of at least one position to statistics."""
    n = len(found.nll)
    nll, nll_base = found.nll.astype(np.float64), found.nll_base.astype(np.float64)
    ln_ppl, ln_base = mean_and_error(nll), mean_and_error(nll_base)
    covariance = float(((nll - ln_ppl.value) * (nll_base - ln_base.value)).mean()) / max(n - 1, 1)
    ppl, base = _exponential(ln_ppl), _exponential(ln_base)
    # llama-perplexity takes the errors of differences from those of both sides and their covariance. This is the same, but
    # stays exact where the sides are all but equal.
    ln_ratio = mean_and_error(nll - nll_base)
    difference = math.nan
    if math.isfinite(ppl.value - base.value):
        difference = mean_and_error(ppl.value * (nll - ln_ppl.value) - base.value * (nll_base - ln_base.value)).error
    mean_square = mean_and_error(found.delta_p.astype(np.float64) ** 2)
    rms = math.sqrt(mean_square.value)
    top = float(found.same_top.mean())
    klds, deltas = np.sort(found.kld.astype(np.float32)), np.sort(found.delta_p)
    return DivergenceStatistics(
        ppl=ppl,
        ppl_base=base,
        correlation=_ratio(covariance, ln_ppl.error * ln_base.error),
        ln_ratio=ln_ratio,
        ratio=_exponential(ln_ratio),
        difference=Estimate(ppl.value - base.value, difference),
        kld=mean_and_error(found.kld),
        kld_quantiles={name: quantile(klds, fraction) for name, fraction in KLD_FRACTIONS.items()},
        delta_p=mean_and_error(found.delta_p),
        delta_p_quantiles={name: quantile(deltas, fraction) for name, fraction in DELTA_P_FRACTIONS.items()},
        rms_delta_p=Estimate(rms, _ratio(0.5 * mean_square.error, rms)),
        same_top_p=Estimate(top, math.sqrt(top * (1 - top) / (n - 1)) if n > 1 else math.nan),
        n_positions=n,
    )


def _exponential(ln: Estimate) -> Estimate:
    value = exponential(ln.value)
    return Estimate(value, value * ln.error if ln.error else 0.0)


def exponential(value: float) -> float:
    """Return exp(value), infinity where it is too large for a float64."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.nan
