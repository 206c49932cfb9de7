"""GPTQ with given steps, against a plain version with the textbook's update of the inverse Hessian."""

from __future__ import annotations

import numpy as np
import pytest

from lazyweights.quant.containers import CONTAINERS, split_steps
from lazyweights.quant.factors import factorize
from lazyweights.quant.gptq import QuantizedRows, quantize_rows
from lazyweights.quant.trellis_rounding import FINE_STEP

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


def test_a_wider_step_keeps_the_low_bits_of_its_scale() -> None:
    """It grows by quarters of octaves, which change the upper mantissa bits only, and no further than it has to."""
    rng = np.random.default_rng(4)
    weights = rng.uniform(-1, 1, (40, 96)).astype(np.float32)
    scales, sub_scales = split_steps(Q8_0, np.full(3, 0.0213))
    weights[::2, 40] = np.geomspace(scales[0] * 127.5, scales[0] * 127 * 300, 20)
    found = quantize_rows(weights, factorize(np.eye(96), 0.0), Q8_0, scales, sub_scales, np.ones(40))
    bits = found.scales.astype(np.float16).view(np.uint16).astype(int)
    ours = int(np.float16(scales[0]).view(np.uint16))
    assert (found.scales.astype(np.float16) == found.scales).all()
    assert set((bits[:, 0] - ours).tolist()) == set((bits[1::2, 1] - ours).tolist()) == {0}
    assert set(((bits[::2, 1] - ours) % 256).tolist()) == {0}
    needed = weights[::2, 40] / 127
    assert (found.scales[::2, 1] >= needed).all()
    assert (found.scales[::2, 1] <= 1.26 * needed).all()
    assert found.n_widened == 20
    assert np.abs(found.codes * np.repeat(found.scales, 32, axis=1) - weights).max() <= found.scales.max() / 2


@pytest.mark.parametrize("name", ["Q8_0", "Q6_K", "Q5_0"])
def test_on_a_trellis_codes_obey_it_and_cost_less(name: str) -> None:
    """Of two neighbouring codes one is allowed, row groups start anew, and later columns make up for the errors as ever."""
    weights, hessian = layer(130, 512)
    container = CONTAINERS[name]
    factor, ones = factorize(hessian), np.ones(130)

    def entropy(found: QuantizedRows) -> float:
        counts = found.counts[found.counts > 0]
        assert counts.sum() == weights.size
        return float(-(counts / weights.size * np.log2(counts / weights.size)).sum())

    def quantize(step: float, on_trellis: bool) -> QuantizedRows:
        scales, sub_scales = split_steps(container, np.full(512 // container.sub_columns, step))
        return quantize_rows(weights, factor, container, scales, sub_scales, ones, on_trellis=on_trellis)

    plain, found = quantize(0.5, False), quantize(0.5 * FINE_STEP, True)
    for first in (0, 64, 128):
        state = np.zeros(512, np.int64)
        for row in found.codes[first : first + 64].astype(np.int64):
            assert np.array_equal(row & 1, state & 1)
            state = (state >> 1) ^ np.where(state & 1, 18, 0) ^ np.where(row >> 1 & 1, 4, 0)
    assert found.loss.sum() == pytest.approx(plain.loss.sum(), rel=0.05)
    assert entropy(found) < entropy(plain) - 0.1
    error = found.codes * found.scales.repeat(container.block_columns, 1) * found.sub_scales.repeat(container.sub_columns, 1)
    error = error.astype(np.float64) - weights
    damped = hessian + 0.01 * np.diag(hessian).mean() * np.eye(512)
    assert np.allclose(found.loss, np.einsum("ri,ij,rj->r", error, damped, error), rtol=1e-3)


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
