"""GPTQ with given steps, against a plain version with the textbook's update of the inverse Hessian."""

from __future__ import annotations

import numpy as np
import pytest

from lazyweights.quant.containers import CONTAINERS, split_steps
from lazyweights.quant.factors import factorize
from lazyweights.quant.gptq import QuantizedRows, quantize_rows

Q8_0 = CONTAINERS["Q8_0"]


def layer(rows: int, columns: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((4 * columns, columns)) @ (np.eye(columns) + 0.5 * rng.standard_normal((columns, columns)) / 8)
    return rng.standard_normal((rows, columns)).astype(np.float32), x.T @ x / len(x)


def run(weights: np.ndarray, hessian: np.ndarray, step: float = 0.25, **options: float) -> QuantizedRows:
    scales, sub_scales = split_steps(Q8_0, np.full(weights.shape[1] // 32, step))
    return quantize_rows(weights, factorize(hessian, 0.0), Q8_0, scales, sub_scales, np.ones(len(weights)), **options)


def plain(weights: np.ndarray, hessian: np.ndarray, step: float) -> np.ndarray:
    """Round column by column, with the inverse Hessian of the columns that are left."""
    work = weights.astype(np.float64)
    codes = np.zeros(weights.shape, np.int64)
    for j in range(weights.shape[1]):
        inverse = np.linalg.inv(hessian[j:, j:])
        codes[:, j] = np.rint(work[:, j] / step)
        error = (work[:, j] - step * codes[:, j]) / inverse[0, 0]
        work[:, j:] -= error[:, None] * inverse[0]
    return codes


def test_codes_are_those_of_the_plain_version() -> None:
    weights, hessian = layer(5, 160)  # more than one run of columns
    assert np.array_equal(run(weights, hessian).codes, plain(weights, hessian, 0.25))


def test_loss_is_the_quadratic_form() -> None:
    weights, hessian = layer(6, 64)
    found = run(weights, hessian)
    error = 0.25 * found.codes - weights
    assert np.allclose(found.loss, np.einsum("ri,ij,rj->r", error, hessian, error), rtol=1e-3)


def test_better_than_rounding() -> None:
    weights, hessian = layer(16, 128)
    found = run(weights, hessian)
    error = 0.25 * np.rint(weights / 0.25) - weights
    assert found.loss.sum() < 0.8 * np.einsum("ri,ij,rj->", error, hessian, error)


def test_rate_weight_buys_bits() -> None:
    weights, hessian = layer(64, 512)

    def entropy(codes: np.ndarray) -> float:
        counts = np.unique(codes, return_counts=True)[1]
        return float(-(counts / codes.size * np.log2(counts / codes.size)).sum())

    nearest, aware = run(weights, hessian, 1.0), run(weights, hessian, 1.0, rate_weight=0.1)
    assert entropy(aware.codes) < entropy(nearest.codes) - 0.01
    assert nearest.loss.sum() < aware.loss.sum() < 1.2 * nearest.loss.sum()


def test_rows_have_their_own_factors() -> None:
    weights, hessian = layer(3, 32)
    scales, sub_scales = split_steps(Q8_0, np.array([0.25]))
    found = quantize_rows(weights, factorize(hessian, 0.0), Q8_0, scales, sub_scales, np.array([1.0, 0.5, 2.0]))
    assert found.scales.reshape(-1).tolist() == [0.25, 0.125, 0.5]
    for row, step in enumerate((0.25, 0.125, 0.5)):
        assert np.array_equal(found.codes[row], plain(weights[row : row + 1], hessian, step)[0])


def test_no_sub_block_gets_narrower() -> None:
    """An outlier doubles d of its block; the sub-scales of its neighbours are halved and rounded up."""
    container = CONTAINERS["Q4_K"]
    weights = np.zeros((1, 256), np.float32)
    weights[0, 0] = 1000.0
    weights[0, 32:] = 0.05 * 5 * 7
    sub_scales = np.full(8, 5, np.int32)
    found = quantize_rows(weights, factorize(np.eye(256), 0.0), container, np.full(1, 0.05), sub_scales, np.ones(1))
    steps = found.scales[0, 0] * found.sub_scales[0].astype(np.float64)
    assert steps[0] * 7 >= 1000.0 * 0.97
    assert steps[1:].min() >= 0.05 * 5 * 0.999
    assert np.abs(found.codes[0, 32:] * np.repeat(steps, 32)[32:] - weights[0, 32:]).max() <= steps[1] / 2


def test_steps_must_fit() -> None:
    weights, hessian = layer(4, 64)
    scales, sub_scales = split_steps(Q8_0, np.full(2, 0.25))
    for bad in ((scales[:1], sub_scales, np.ones(4)), (scales, sub_scales[:1], np.ones(4)), (scales, sub_scales, np.ones(3))):
        with pytest.raises(ValueError, match="do not fit"):
            quantize_rows(weights, factorize(hessian), Q8_0, *bad)


@pytest.mark.parametrize("name", ["Q6_K", "Q4_K", "Q3_K"])
def test_slabs_do_not_see_each_other(name: str) -> None:
    weights, hessian = layer(8, 512)
    container = CONTAINERS[name]
    scales, sub_scales = split_steps(container, np.full(512 // container.sub_columns, 0.3))
    factor = factorize(hessian)

    def part(rows: slice) -> QuantizedRows:
        return quantize_rows(weights[rows], factor, container, scales, sub_scales, np.ones(len(weights[rows])))

    whole, first, second = part(slice(8)), part(slice(3)), part(slice(3, 8))
    assert np.array_equal(whole.codes, np.concatenate([first.codes, second.codes]))
    assert np.array_equal(whole.sub_scales, np.concatenate([first.sub_scales, second.sub_scales]))
