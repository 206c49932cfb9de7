"""Checkpoints are read as they were packed, and what is damaged or of another kind is a typed error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lazyweights.errors import FormatError, LazyWeightsError, OffsetError, QuantizationError, TruncatedError
from lazyweights.quant.gptq_checkpoint import GptqCheckpoint, to_float32, unpack_bits
from tests.quant.gptq_samples import make_layer, pack_down, write_safetensors


def write_folder(folder: Path, arrays: dict[str, np.ndarray], **quantization: Any) -> Path:
    """Write a checkpoint of one layer, ``m``."""
    config = {"quantization_config": {"bits": 4, "group_size": 32, "quant_method": "gptq", "sym": False, **quantization}}
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", arrays)
    return folder


def sample_arrays(**changed: Any) -> dict[str, np.ndarray]:
    arrays = {f"m.{part}": array for part, array in make_layer(np.random.default_rng(1), 64, 16, 4, 32).arrays.items()}
    for part, array in changed.items():
        if array is None:
            del arrays[f"m.{part}"]
        else:
            arrays[f"m.{part}"] = array
    return arrays


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("n_values", [1, 10, 11, 21, 22, 31, 32, 33, 96])
def test_codes_come_back(bits: int, n_values: int) -> None:
    codes = np.random.default_rng(n_values).integers(0, 1 << bits, (n_values, 5))
    words = pack_down(codes, bits).view(np.uint32)
    assert np.array_equal(unpack_bits(words, bits, n_values), codes)


def test_three_bits_lie_in_two_words() -> None:
    codes = np.zeros((32, 1), int)
    codes[10], codes[21] = 0b101, 0b011
    words = pack_down(codes, 3).view(np.uint32)
    assert [hex(int(word)) for word in words[:, 0]] == ["0x40000000", "0x80000001", "0x1"]
    assert unpack_bits(words, 3, 32)[[10, 21], 0].tolist() == [0b101, 0b011]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_layer_is_read(tmp_path: Path, bits: int, symmetric: bool, version: int) -> None:
    sample = make_layer(np.random.default_rng(bits), 96, 32, bits, 32, symmetric=symmetric, version=version)
    layout = "gptq" if version == 1 else "gptq_v2"
    arrays = {f"m.{part}": array for part, array in sample.arrays.items()}
    folder = write_folder(tmp_path, arrays, bits=bits, sym=symmetric, checkpoint_format=layout)
    layer = GptqCheckpoint(folder).layer("m")
    assert (layer.bits, layer.n_inputs, layer.n_outputs, layer.n_groups) == (bits, 96, 32, 3)
    scales = layer.scales.view(np.float16).astype(np.float32)
    weights = scales.T[:, layer.groups] * (layer.codes(slice(None)).astype(np.float32) - layer.zeros.T[:, layer.groups])
    assert np.array_equal(weights, sample.weights)
    assert np.array_equal(layer.codes(np.array([31, 4])), layer.codes(slice(None))[[31, 4]])


def test_zero_point_that_wraps(tmp_path: Path) -> None:
    """Version 1 stores the zero point 0 as the largest code."""
    zeros = np.arange(32).reshape(2, 16) % 16
    sample = make_layer(np.random.default_rng(1), 64, 16, 4, 32, zeros=zeros)
    assert np.uint32(sample.arrays["qzeros"].view(np.uint32)[0, 0]) & 15 == 15
    layer = GptqCheckpoint(write_folder(tmp_path, {f"m.{k}": v for k, v in sample.arrays.items()})).layer("m")
    assert np.array_equal(layer.zeros, zeros)


def test_shapes_outrank_the_configuration(tmp_path: Path) -> None:
    """Single layers may have other bits and group sizes than the configuration says."""
    rng = np.random.default_rng(2)
    arrays = {f"a.{part}": array for part, array in make_layer(rng, 64, 32, 8, 64).arrays.items()}
    arrays |= {f"b.{part}": array for part, array in make_layer(rng, 64, 32, 4, 32).arrays.items()}
    del arrays["a.g_idx"], arrays["b.g_idx"]
    checkpoint = GptqCheckpoint(write_folder(tmp_path, arrays))
    assert checkpoint.layers == ("a", "b")
    a, b = checkpoint.layer("a"), checkpoint.layer("b")
    assert (a.bits, a.n_inputs, a.groups.max()) == (8, 64, 0)
    assert (b.bits, b.n_inputs) == (4, 64)
    assert np.array_equal(b.groups, np.arange(64) // 32)


def test_wide_scales_are_taken_where_float16_has_them(tmp_path: Path) -> None:
    exact = np.array([[1.5, -0.25, 2.0**-24, 65504.0, 0.0, 3 * 2.0**-24, 2.0**-14, -1.0] * 2] * 2)
    of_bfloat16 = (exact[:, [0, 1, 4, 7] * 4].astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    for scales in (exact.astype(np.float32), of_bfloat16):
        layer = GptqCheckpoint(write_folder(tmp_path, sample_arrays(scales=scales))).layer("m")
        assert np.array_equal(layer.scales.view(np.float16).astype(np.float32), to_float32(scales))


@pytest.mark.parametrize("value", [2.0**-25, 1 + 2.0**-11, 65536.0, 3 * 2.0**-25])
def test_scales_that_float16_lacks_are_refused(tmp_path: Path, value: float) -> None:
    scales = np.ones((2, 16), np.float32)
    scales[1, 3] = value
    with pytest.raises(QuantizationError, match=f"1 of 32 scales .* the first is {value!r}") as caught:
        GptqCheckpoint(write_folder(tmp_path, sample_arrays(scales=scales))).layer("m")
    assert caught.value.tensor == "m.scales"


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_scales_must_be_finite(tmp_path: Path, bad: float) -> None:
    scales = np.ones((2, 16), np.float16)
    scales[0, 5] = bad
    with pytest.raises(FormatError, match="infinite or not a number"):
        GptqCheckpoint(write_folder(tmp_path, sample_arrays(scales=scales))).layer("m")


@pytest.mark.parametrize(
    ("changed", "kind", "said"),
    [
        ({"scales": None}, FormatError, "no scales"),
        ({"qzeros": None}, FormatError, "no qzeros"),
        ({"qweight": np.zeros((8, 15), np.int32)}, FormatError, "do not fit together"),
        ({"qzeros": np.zeros((3, 2), np.int32)}, FormatError, "do not fit together"),
        ({"qzeros": np.zeros((2, 3), np.int32)}, QuantizationError, "none of 2, 3, 4 and 8 bits"),
        ({"qweight": np.zeros(8, np.int32)}, FormatError, "two dimensions"),
        ({"qweight": np.zeros((8, 16), np.int64)}, QuantizationError, "only of I32"),
        ({"scales": np.ones((2, 0), np.float16)}, FormatError, "two dimensions"),
        ({"scales": np.ones((2, 16))}, QuantizationError, "F64"),
        ({"g_idx": np.zeros(55, np.int32)}, FormatError, "g_idx is I32"),
        ({"g_idx": np.zeros(64, np.float16)}, FormatError, "g_idx is F16"),
        ({"g_idx": np.full(64, 2, np.int32)}, FormatError, "there are 2"),
        ({"g_idx": np.full(64, -1, np.int32)}, FormatError, "from -1"),
    ],
)
def test_parts_that_do_not_fit(tmp_path: Path, changed: dict, kind: type[LazyWeightsError], said: str) -> None:
    folder = write_folder(tmp_path, sample_arrays(**changed))
    with pytest.raises(kind, match=said) as caught:
        GptqCheckpoint(folder).layer("m")
    assert caught.value.tensor is not None
    assert caught.value.path is not None


def test_groups_that_cannot_be_told(tmp_path: Path) -> None:
    arrays = sample_arrays(g_idx=None, scales=np.ones((3, 16), np.float16), qzeros=np.zeros((3, 2), np.int32))
    with pytest.raises(FormatError, match="64 inputs are not 3 groups"):
        GptqCheckpoint(write_folder(tmp_path, arrays)).layer("m")


@pytest.mark.parametrize(("layout", "zeros", "seen"), [("gptq", 8, 9), ("gptq_v2", 7, 7)])
def test_wrong_version_is_noticed(tmp_path: Path, layout: str, zeros: int, seen: int) -> None:
    stored = np.tile(pack_down(np.full((16, 2), zeros), 4).T, 1)
    folder = write_folder(tmp_path, sample_arrays(qzeros=np.ascontiguousarray(stored)), sym=True, checkpoint_format=layout)
    with pytest.raises(QuantizationError, match=f"all zero points are {seen}.*checkpoint_format"):
        GptqCheckpoint(folder).layer("m")


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({"quant_method": "awq"}, "quantized by awq"),
        ({"checkpoint_format": "marlin"}, "format marlin is not read"),
        ({"is_marlin_format": True}, "format marlin is not read"),
        ({"bits": 5}, "5 bits are not read"),
        ({"bits": "4"}, "must be numbers"),
        ({"pack_dtype": "int16"}, "words of int16"),
    ],
)
def test_other_kinds_are_refused(tmp_path: Path, quantization: dict, said: str) -> None:
    with pytest.raises((QuantizationError, FormatError), match=said):
        GptqCheckpoint(write_folder(tmp_path, sample_arrays(), **quantization))


def test_folders_without_a_checkpoint(tmp_path: Path) -> None:
    def refuse(said: str, kind: type[LazyWeightsError] = FormatError) -> None:
        with pytest.raises(kind, match=said):
            GptqCheckpoint(tmp_path)

    with pytest.raises(FormatError, match="not a folder"):
        GptqCheckpoint(tmp_path / "missing")
    refuse("config.json: the file is missing")
    (tmp_path / "config.json").write_text("{")
    refuse("not a JSON text")
    (tmp_path / "config.json").write_text("[1]")
    refuse("not an object")
    (tmp_path / "config.json").write_text("{}")
    refuse("neither a quantization_config", QuantizationError)
    (tmp_path / "quantize_config.json").write_text('{"bits": 4}')
    refuse("no .safetensors file")
    (tmp_path / "model.bin").write_bytes(b"")
    refuse("save model.bin as safetensors first")
    write_safetensors(tmp_path / "a.safetensors", {"x": np.ones(3, np.float32)})
    refuse("nothing here is quantized", QuantizationError)
    write_safetensors(tmp_path / "a.safetensors", sample_arrays())
    assert GptqCheckpoint(tmp_path).layers == ("m",)
    write_safetensors(tmp_path / "b.safetensors", sample_arrays())
    refuse("is in a.safetensors too")


def test_indexes(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, sample_arrays())
    write_safetensors(folder / "other.safetensors", {"x": np.ones(3, np.float32)})
    index = folder / "model.safetensors.index.json"

    def refuse(said: str, weight_map: Any) -> None:
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(FormatError, match=said):
            GptqCheckpoint(folder)

    whole = {name: "model.safetensors" for name in sample_arrays()}
    refuse("does not map names", {**whole, "y": "../model.safetensors"})
    refuse("does not map names", {**whole, "y": 3})
    refuse("does not map names", [1])
    refuse("is missing", {**whole, "y": "gone.safetensors"})
    refuse("its shard does not have", {**whole, "y": "model.safetensors"})
    index.write_text(json.dumps({"weight_map": whole}))
    assert GptqCheckpoint(folder).floats == ()  # the file that the index does not name is left alone


def test_damaged_files(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, sample_arrays())
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for new, kind, said in (
        (data[:-1], OffsetError, "leaves the file"),
        (data[:40], TruncatedError, "cut short"),
        (b"version https://git-lfs.github.com/spec/v1\n", TruncatedError, "Git LFS pointer"),
        (data.replace(b'"I32"', b'"I16"', 1), FormatError, "do not fit together"),
        (data.replace(b'"dtype"', b'"dtyqe"', 1), FormatError, "header"),
    ):
        path.write_bytes(new)
        with pytest.raises(kind, match=said):
            GptqCheckpoint(folder)
