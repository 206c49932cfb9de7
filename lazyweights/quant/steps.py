"""How wide each step is: where the bits go.

With steps s the error of a weight after GPTQ costs ``row_weight * s^2 / (12 * U[j, j]^2)`` (see `lazyweights.quant.factors`),
and a code costs ``log2(spread / s)`` bits. Least bits for a given sum of costs means that every weight costs the same
(water-filling, as in arXiv 2603.04956):

    s[row, column] = step * U[column, column] / sqrt(row_weight[row] * coherence)

with one global `step`, for all tensors. The predicted divergence is then ``step^2 / 24`` a weight. What is stored allows one step
per sub-block, so that U enters by the mean of ``1 / U^2`` there, and rows share the pattern of a tensor up to a factor that is a
power of the square root of 2.

Without gradients (a plain Hessian) the size of a tensor's steps is a share of the root mean square of its weights, by kind of
tensor; the shares were measured on one small model and are a guess for others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lazyweights.quant.factors import Factor

KIND_SHARES = {
    "attn_q": 0.36, "attn_k": 0.125, "attn_v": 0.048, "attn_output": 0.383, "ffn_gate": 0.304, "ffn_up": 0.244,
    "ffn_down": 0.178, "token_embd": 0.16, "output": 0.16,
}  # fmt: skip
"""Step over the root mean square of the weights that cost about equal divergence a weight, without gradients."""

DEFAULT_SHARE = 0.2
MAX_ROW_RATIO = 256.0
"""Row weights below their mean by more than this are raised: the gradients of rare rows are badly known."""

ROW_FACTORS_PER_OCTAVE = 2
RARE_TOKEN_SHARE = 0.1
"""Of the weight of embedding rows, what is spread evenly over all tokens: other texts use other words."""


@dataclass(frozen=True)
class StepPattern:
    """Steps of a tensor for a global step of 1.

    Attributes
    ----------
    columns : numpy.ndarray
        float64 (columns,), those of a row with the factor 1.
    row_factors : numpy.ndarray
        float64 (rows,).
    row_costs : numpy.ndarray
        float64 (rows,): what a unit of error' H error in a row costs, in nats of divergence per token; zeros if unknown.
    """

    columns: np.ndarray
    row_factors: np.ndarray
    row_costs: np.ndarray

    def sub_block_steps(self, step: float, sub_columns: int) -> np.ndarray:
        """Return the steps of sub-blocks, float64 (columns / sub_columns,), with which their weights cost what they should.

        A squared error costs ``1 / columns[j]^2``: of these the mean is taken.
        """
        return step / np.sqrt((self.columns.reshape(-1, sub_columns) ** -2.0).mean(axis=1))


def curved_pattern(factor: Factor, row_weights: np.ndarray, coherence: float, is_embedding: bool) -> StepPattern:
    """Return the pattern that gradients ask for.

    Parameters
    ----------
    factor : Factor
    row_weights : numpy.ndarray
        float64 (rows,).
    coherence : float
    is_embedding : bool
        Whether rows are tokens.
    """
    weights = np.nan_to_num(np.asarray(row_weights, np.float64), posinf=0.0)
    mean = float(weights.mean())
    if mean <= 0:
        mean, weights = 1.0, np.ones_like(weights)
    if is_embedding:
        weights = weights + RARE_TOKEN_SHARE * mean
    costs = np.maximum(weights, mean / MAX_ROW_RATIO) * max(coherence, 1.0)
    logs = -0.5 * np.log2(costs)
    middle = float(logs.mean())
    row_factors = np.exp2(np.rint((logs - middle) * ROW_FACTORS_PER_OCTAVE) / ROW_FACTORS_PER_OCTAVE)
    return StepPattern(factor.diagonal * 2.0**middle, row_factors, costs / 2)


def relative_pattern(factor: Factor, kind: str, root_mean_square: float, rows: int) -> StepPattern:
    """Return the pattern without gradients.

    Parameters
    ----------
    factor : Factor
    kind : str
        Like ``attn_q``.
    root_mean_square : float
        Of the tensor's weights.
    rows : int
    """
    share = KIND_SHARES.get(kind, DEFAULT_SHARE) * (root_mean_square or 1.0)
    relative = factor.diagonal / np.exp(np.log(factor.diagonal).mean())
    return StepPattern(relative * share, np.ones(rows), np.zeros(rows))


def even_pattern(pattern: StepPattern, over_columns: bool, over_rows: bool) -> StepPattern:
    """Return the pattern with its columns, or its rows, made equal: what it would be without that knowledge."""
    columns, rows = pattern.columns, pattern.row_factors
    if over_columns:
        columns = np.full_like(columns, np.exp(np.log(columns).mean()))
    if over_rows:
        rows = np.ones_like(rows)
    return StepPattern(columns, rows, pattern.row_costs)


def widening_cost(factors: np.ndarray) -> float:
    """Return what it costs to make steps wider, as a share of the error that all weights have otherwise.

    A step that is f times as wide has f^2 times the error and saves log2(f) bits, which are worth 2 ln 2 errors each.

    Parameters
    ----------
    factors : numpy.ndarray
        Of sub-blocks, f; up to 1 where nothing needs to be wider.

    Examples
    --------
    >>> round(widening_cost(np.array([0.5, 1.0, 2.0])), 3)
    0.538
    """
    wider = np.maximum(factors, 1.0)
    return float(np.mean(wider * wider - 1 - 2 * np.log(wider)))
