"""Layers become blocks whose dequantized values, by the gguf package, are those of the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from lazyweights.blocks.types import TYPE_BY_NAME, type_name
from lazyweights.errors import QuantizationError
from lazyweights.quant import gptq_blocks
from lazyweights.quant.gptq_blocks import F32, block_groups, pack_layer, smallest_type
from lazyweights.quant.gptq_checkpoint import GptqCheckpoint, GptqLayer
from tests.quant.gptq_samples import SampleLayer, make_layer, write_safetensors


def read(folder: Path, sample: SampleLayer, bits: int, version: int = 1) -> GptqLayer:
    layout = "gptq" if version == 1 else "gptq_v2"
    quantization = {"bits": bits, "group_size": 32, "quant_method": "gptq", "checkpoint_format": layout}
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    write_safetensors(folder / "model.safetensors", {f"m.{part}": array for part, array in sample.arrays.items()})
    return GptqCheckpoint(folder).layer("m")


def dequantized(layer: GptqLayer, type_id: int, order: np.ndarray | None = None) -> np.ndarray:
    """Pack, and dequantize with the gguf package."""
    packed = np.concatenate([chunk.reshape(-1).view(np.uint8) for chunk in pack_layer(layer, type_id, order)])
    if type_id == F32:
        return packed.view(np.float32).reshape(layer.n_outputs, layer.n_inputs)
    values = gguf.quants.dequantize(packed.reshape(layer.n_outputs, -1), gguf.GGMLQuantizationType(type_id))
    return values.reshape(layer.n_outputs, layer.n_inputs)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("group_size", [32, 64, -1])
@pytest.mark.parametrize(
    ("bits", "symmetric", "expected"),
    [
        (2, True, "Q4_0"), (2, False, "Q4_0"), (3, True, "Q4_0"), (3, False, "Q4_0"), (4, True, "Q4_0"), (4, False, "Q5_0"),
        (8, True, "Q8_0"),
    ],
)  # fmt: skip
def test_weights_are_those_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int, symmetric: bool, expected: str, group_size: int, version: int
) -> None:
    monkeypatch.setattr(gptq_blocks, "SLAB_WEIGHTS", 128 * 7)  # several slabs, the last one not full
    rng = np.random.default_rng(bits)
    sample = make_layer(rng, 128, 48, bits, group_size, symmetric=symmetric, version=version)
    layer = read(tmp_path, sample, bits, version)
    type_id = smallest_type(layer)
    assert type_name(type_id) == expected
    assert np.array_equal(dequantized(layer, type_id), sample.weights)
    order = rng.permutation(48)
    assert np.array_equal(dequantized(layer, type_id, order), sample.weights[order])
    assert np.array_equal(dequantized(layer, F32, order), sample.weights[order])
    for larger in ("Q4_0", "Q5_0", "Q8_0"):
        if TYPE_BY_NAME[larger].type_id > type_id:
            assert np.array_equal(dequantized(layer, TYPE_BY_NAME[larger].type_id), sample.weights)


def test_scales_are_copied_bit_by_bit(tmp_path: Path) -> None:
    sample = make_layer(np.random.default_rng(5), 64, 32, 4, 32)
    scales = sample.arrays["scales"]
    scales[0, :4] = np.array([0.0, -0.0, 6e-8, -65504], np.float16)
    (packed,) = pack_layer(read(tmp_path, sample, 4), TYPE_BY_NAME["Q4_0"].type_id)
    stored = packed.reshape(32, 2, 18)[:, :, :2].copy().view(np.uint16)[:, :, 0]
    assert np.array_equal(stored, scales.T.view(np.uint16))


def with_range(low: int, high: int, bits: int = 8, zero: int = 100) -> SampleLayer:
    """A layer whose differences reach exactly from `low` to `high`, the last one in the last output."""
    codes = np.full((64, 32), zero)
    codes[3, 1], codes[60, 31] = zero + low, zero + high
    return make_layer(np.random.default_rng(0), 64, 32, bits, 32, codes=codes, zeros=np.full((2, 32), zero))


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-8, 7, "Q4_0"), (-9, 7, "Q5_0"), (-8, 8, "Q5_0"), (-16, 15, "Q5_0"), (-17, 0, "Q8_0"), (0, 16, "Q8_0"),
        (-100, 127, "Q8_0"),
    ],
)  # fmt: skip
def test_smallest_type_that_holds_the_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, low: int, high: int, expected: str
) -> None:
    monkeypatch.setattr(gptq_blocks, "SLAB_WEIGHTS", 256)
    sample = with_range(low, high)
    layer = read(tmp_path, sample, 8)
    assert type_name(smallest_type(layer)) == expected
    assert np.array_equal(dequantized(layer, smallest_type(layer)), sample.weights)


@pytest.mark.parametrize(("zero", "low", "high"), [(100, 0, 128), (129, -129, 0)])
def test_codes_that_nothing_holds(tmp_path: Path, zero: int, low: int, high: int) -> None:
    sample = with_range(low, high, zero=zero)
    layer = read(tmp_path, sample, 8)
    with pytest.raises(QuantizationError, match=f"from {low} to {high} at least.*sym=True") as caught:
        smallest_type(layer)
    assert caught.value.tensor == "m"
    assert np.array_equal(dequantized(layer, F32), sample.weights)


def test_symmetric_layers_need_no_look_at_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = read(tmp_path, make_layer(np.random.default_rng(0), 64, 32, 4, 32), 4)

    def fail(*_: Any) -> None:
        raise AssertionError("codes are read")

    monkeypatch.setattr(GptqLayer, "codes", fail)
    assert type_name(smallest_type(layer)) == "Q4_0"


# Groups.


def shuffled(n_inputs: int, size: int) -> np.ndarray:
    return np.random.default_rng(9).permutation(n_inputs) // size


def test_act_order_is_refused_with_what_works(tmp_path: Path) -> None:
    sample = make_layer(np.random.default_rng(1), 128, 32, 4, 32, groups=shuffled(128, 32))
    layer = read(tmp_path, sample, 4)
    said = r"in 4 of 4 blocks .*\(act-order, desc_act\).* desc_act=False, or with group_size=-1"
    with pytest.raises(QuantizationError, match=said):
        block_groups(layer)
    with pytest.raises(QuantizationError):
        next(pack_layer(layer, TYPE_BY_NAME["Q4_0"].type_id))
    assert np.array_equal(dequantized(layer, F32), sample.weights)


def test_act_order_of_whole_blocks(tmp_path: Path) -> None:
    groups = np.repeat([2, 0, 1, 0], 32)
    sample = make_layer(np.random.default_rng(1), 128, 32, 4, 32, groups=groups, symmetric=False)
    layer = read(tmp_path, sample, 4)
    assert block_groups(layer).tolist() == [2, 0, 1, 0]
    assert np.array_equal(dequantized(layer, smallest_type(layer)), sample.weights)


def test_act_order_with_one_group(tmp_path: Path) -> None:
    sample = make_layer(np.random.default_rng(1), 128, 32, 4, -1, groups=np.zeros(128, int))
    layer = read(tmp_path, sample, 4)
    assert np.array_equal(dequantized(layer, smallest_type(layer)), sample.weights)


def test_mixed_groups_with_equal_scales(tmp_path: Path) -> None:
    """Zero points may differ within a block: they are part of the integers."""
    rng = np.random.default_rng(1)
    scales = np.repeat(rng.lognormal(-3, 1, (1, 32)).astype(np.float16), 4, axis=0)
    sample = make_layer(rng, 128, 32, 4, 32, groups=shuffled(128, 32), scales=scales, symmetric=False)
    layer = read(tmp_path, sample, 4)
    assert np.array_equal(dequantized(layer, smallest_type(layer)), sample.weights)
    sample.arrays["scales"][2, 7] *= 2
    with pytest.raises(QuantizationError, match="act-order"):
        block_groups(read(tmp_path, sample, 4))


def test_small_groups(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    scales = np.repeat(rng.lognormal(-3, 1, (4, 32)).astype(np.float16), 2, axis=0)
    sample = make_layer(rng, 128, 32, 4, 16, scales=scales, symmetric=False)
    layer = read(tmp_path, sample, 4)
    assert np.array_equal(dequantized(layer, smallest_type(layer)), sample.weights)
    with pytest.raises(QuantizationError, match=r"in 4 of 4 blocks .* a group size that is a multiple of 32"):
        block_groups(read(tmp_path, make_layer(rng, 128, 32, 4, 16), 4))


def test_inputs_that_are_no_whole_blocks(tmp_path: Path) -> None:
    sample = make_layer(np.random.default_rng(1), 48, 32, 4, -1)
    layer = read(tmp_path, sample, 4)
    with pytest.raises(QuantizationError, match="48 inputs are not a multiple of the 32"):
        block_groups(layer)
