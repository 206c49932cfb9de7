"""Containers: what is packed dequantizes to step times code, by the reference of the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from lazyweights.errors import QuantizationError
from lazyweights.quant.containers import CONTAINERS, Container, find_container, pack, snap, split_steps
from lazyweights.quant.factors import factorize
from lazyweights.quant.gptq import quantize_rows

ALL = list(CONTAINERS.values())


def dequantize(container: Container, packed: np.ndarray, rows: int) -> np.ndarray:
    kind = gguf.GGMLQuantizationType(container.type_id)
    assert kind.name == container.name
    return gguf.quants.dequantize(packed.reshape(rows, -1), kind)


@pytest.mark.parametrize("container", ALL, ids=lambda c: c.name)
def test_packed_values_are_steps_times_codes(container: Container) -> None:
    rng = np.random.default_rng(1)
    rows, columns = 3, 512
    codes = rng.integers(container.lowest, container.highest + 1, (rows, columns)).astype(np.int8)
    codes[:, :2] = container.lowest, container.highest
    scales, sub_scales = split_steps(container, rng.uniform(0.01, 0.03, columns // container.sub_columns))
    row_scales = np.float16(np.array([1.0, 0.5, 4.0])[:, None] * scales).astype(np.float32)
    row_sub_scales = np.broadcast_to(sub_scales.astype(np.uint8), (rows, len(sub_scales)))
    packed = pack(container, (rows, columns), codes, row_scales, np.ascontiguousarray(row_sub_scales))
    steps = np.repeat(row_scales, container.block_columns, axis=1) * np.repeat(row_sub_scales, container.sub_columns, axis=1)
    assert np.allclose(dequantize(container, packed, rows), steps * codes, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("container", ALL, ids=lambda c: c.name)
def test_steps_come_close_and_leave_room_to_widen(container: Container) -> None:
    wanted = np.random.default_rng(2).uniform(0.02, 0.03, 512 // container.sub_columns)
    scales, sub_scales = split_steps(container, wanted)
    got = np.repeat(scales, container.block_columns // container.sub_columns) * sub_scales
    # Half a unit of the sub-scales, or of four significant bits.
    assert np.abs(got / wanted - 1).max() < (1 / 16 if container.max_sub_scale == 1 else 0.9 / (container.max_sub_scale // 2))
    assert 2 * sub_scales.max() <= max(container.max_sub_scale, 2)


@pytest.mark.parametrize("container", ALL, ids=lambda c: c.name)
def test_outliers_are_reached(container: Container) -> None:
    """Blocks with a far weight get wider steps; all others keep the shared one; errors stay below half a step."""
    rng = np.random.default_rng(3)
    rows, columns = 4, 512
    scales, sub_scales = split_steps(container, np.full(columns // container.sub_columns, 0.25))
    step = float(scales[0] * sub_scales[0])
    weights = (rng.uniform(-0.9, 0.9, (rows, columns)) * step).astype(np.float32)
    weights[1, 37] = 3.1 * container.highest * step
    weights[2, 300] = -50.0 * container.highest * step
    factor = factorize(np.eye(columns), 0.0)
    found = quantize_rows(weights, factor, container, scales, sub_scales, np.ones(rows))
    values = dequantize(container, pack(container, weights.shape, found.codes, found.scales, found.sub_scales), rows)
    own_steps = np.repeat(found.scales, container.block_columns, axis=1)
    own_steps *= np.repeat(found.sub_scales, container.sub_columns, axis=1)
    assert np.all(np.abs(values - weights) <= 0.5001 * own_steps)
    assert np.all(own_steps[[0, 3]] == np.float32(step))
    quarters = container.max_sub_scale == 1
    assert own_steps[1, 37] == np.float32((3.5 if quarters else 4) * step)
    assert own_steps[2, 300] == np.float32((56 if quarters else 64) * step)
    assert found.n_widened >= 2
    if container.max_sub_scale == 1:
        assert found.n_widened == 2
        assert np.count_nonzero(found.scales != np.float32(step)) == 2


def test_clipping_without_widening() -> None:
    container = CONTAINERS["Q4_0"]
    weights = np.zeros((1, 32), np.float32)
    weights[0, :2] = 100, -100
    factor = factorize(np.eye(32), 0.0)
    found = quantize_rows(weights, factor, container, np.ones(1), np.ones(1, np.int32), np.ones(1), widen=False)
    assert found.codes[0, :3].tolist() == [7, -8, 0]
    assert found.scales.tolist() == [[1.0]]
    assert found.loss[0] == pytest.approx(93**2 + 92**2)


def test_steps_too_large_for_a_min() -> None:
    container = CONTAINERS["Q4_1"]
    with pytest.raises(QuantizationError, match="another container"):
        pack(container, (1, 32), np.zeros((1, 32), np.int8), np.full((1, 1), 60000, np.float32), np.ones((1, 1), np.uint8))


def test_find_container() -> None:
    assert find_container("q6_k") is CONTAINERS["Q6_K"]
    with pytest.raises(QuantizationError, match="Q2_K, Q3_K"):
        find_container("Q9_K")


def test_snap_keeps_four_bits() -> None:
    values = np.geomspace(1e-4, 10, 1000)
    snapped = snap(values)
    assert np.abs(snapped / values - 1).max() <= 1 / 16
    fraction = np.frexp(snapped)[0] * 16
    assert np.array_equal(fraction, np.rint(fraction))
