"""The transformer in numpy: its logits are llama.cpp's, its gradients those of finite differences."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from lazyweights.errors import QuantizationError
from lazyweights.quant.float_source import FloatSource
from lazyweights.quant.gguf_rewrite import open_gguf
from lazyweights.quant.transformer import (
    Architecture,
    Layer,
    Rotation,
    attend,
    attend_backward,
    layer_weight_names,
    normalize,
    normalize_backward,
    read_architecture,
)
from tests.llama.tiny_model import write_tiny_model

ARCH = {name: Architecture(name, 1, 24, 4, 2, 6, 6, 1e-5, 100.0, 6) for name in ("llama", "qwen2", "qwen3")}


def random_layer(name: str, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"attn_q": (24, 24), "attn_k": (12, 24), "attn_v": (12, 24), "attn_output": (24, 24), "ffn_gate": (40, 24),
              "ffn_up": (40, 24), "ffn_down": (24, 40)}  # fmt: skip
    weights = {f"blk.0.{kind}.weight": 0.4 * rng.standard_normal(shape) for kind, shape in shapes.items()}
    for kind in ("attn_norm", "ffn_norm"):
        weights[f"blk.0.{kind}.weight"] = rng.uniform(0.5, 1.5, 24)
    if name == "qwen2":
        for kind in ("attn_q", "attn_k", "attn_v"):
            weights[f"blk.0.{kind}.bias"] = rng.standard_normal(len(weights[f"blk.0.{kind}.weight"]))
    if name == "qwen3":
        for kind in ("attn_q_norm", "attn_k_norm"):
            weights[f"blk.0.{kind}.weight"] = rng.uniform(0.5, 1.5, 6)
    return {key: value.astype(np.float32) for key, value in weights.items()}


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_gradients(name: str) -> None:
    """Directional derivatives of the input and of every matrix, against central differences."""
    rng = np.random.default_rng(1)
    weights = random_layer(name)
    rotation = Rotation(ARCH[name], 5)
    x, gradient = (rng.standard_normal((5, 24)).astype(np.float32) for _ in range(2))

    def loss(values: dict[str, np.ndarray], inputs: np.ndarray) -> float:
        out = Layer(ARCH[name], 0, values, rotation).forward(inputs)
        return float((out.astype(np.float64) * gradient).sum())

    seen: dict[str, np.ndarray] = {}
    layer = Layer(ARCH[name], 0, weights, rotation)
    to_x = layer.backward(x, gradient, lambda key, inputs, g: seen.__setitem__(key, g.T @ inputs))
    assert set(seen) == set(layer_weight_names(0))

    h = 2e-3
    direction = rng.standard_normal(x.shape).astype(np.float32)
    slope = (loss(weights, x + h * direction) - loss(weights, x - h * direction)) / (2 * h)
    assert slope == pytest.approx(float((to_x * direction).sum()), rel=0.005, abs=0.1)
    for key, found in seen.items():
        direction = rng.standard_normal(found.shape).astype(np.float32)
        ends = [loss({**weights, key: weights[key] + sign * h * direction}, x) for sign in (1, -1)]
        assert (ends[0] - ends[1]) / (2 * h) == pytest.approx(float((found * direction).sum()), rel=0.005, abs=0.3), key


def test_attention_is_causal_and_weighted() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((4, heads, 6)).astype(np.float32) for heads in (4, 2, 2))
    out = attend(q, k, v)
    assert np.allclose(out[0, 1], v[0, 0])
    assert np.allclose(out[0, 2], v[0, 1])
    later = attend(q, np.concatenate([k[:3], 9 * k[3:]]), v)
    assert np.array_equal(out[:3], later[:3])
    assert not np.allclose(out[3], later[3])
    to_q, to_k, to_v = attend_backward(q, k, v, np.ones_like(out))
    assert np.allclose(to_v.sum(axis=0), 4 * 2, atol=1e-4)  # each of 2 heads passes the gradient of 4 tokens on
    assert np.allclose(to_q[0], 0, atol=1e-6)
    assert to_k.shape == k.shape


def test_normalize() -> None:
    x = np.array([[3.0, 4.0]], np.float32)
    w = np.array([1.0, 2.0], np.float32)
    rms = np.sqrt(12.5)
    assert np.allclose(normalize(x, w, 0.0), [[3 / rms, 8 / rms]])
    assert np.allclose(normalize_backward(x, np.ones(2, np.float32), 0.0, x), 0, atol=1e-6)  # growing x changes nothing


def test_rotations_turn_back() -> None:
    for arch in ARCH.values():
        rotation = Rotation(arch, 7, np.array([1.0, 2.0, 4.0], np.float32))
        x = np.random.default_rng(0).standard_normal((7, 2, 6)).astype(np.float32)
        turned = rotation.apply(x)
        assert np.array_equal(turned[0], x[0])
        assert not np.allclose(turned[1:], x[1:])
        assert np.allclose(rotation.apply(turned, -1), x, atol=1e-6)


@pytest.mark.parametrize("is_tied", [False, True])
def test_logits_are_those_of_llama_cpp(tmp_path: Path, is_tied: bool) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    path = write_tiny_model(tmp_path / "tiny.gguf", file_type="F32", tied=is_tied)
    tokens = [1, *range(40, 60)]
    import lazyweights

    llama = lazyweights.load_llama(path, n_ctx=64, logits_all=True, verbose=False)
    llama.eval(tokens)
    expected = np.array(llama.scores[: len(tokens)])
    llama.close()
    del llama_cpp

    with open_gguf(path) as (view, scan):
        source = FloatSource(view, scan)
        arch = read_architecture(source.metadata)
        rotation = Rotation(arch, len(tokens))
        x = source.rows("token_embd.weight")[tokens]
        for index in range(arch.n_layers):
            x = Layer(arch, index, source.layer_weights(f"blk.{index}."), rotation).forward(x)
        x = normalize(x, source.vector("output_norm.weight"), arch.norm_epsilon)
        logits = x @ source.rows("token_embd.weight" if is_tied else "output.weight").T
    assert np.allclose(logits, expected, atol=2e-3 * np.abs(expected).max())


def test_unknown_models_say_why() -> None:
    with pytest.raises(QuantizationError, match=r"'mamba'.*llama, qwen2, qwen3"):
        read_architecture({"general.architecture": "mamba"})
    base = {"general.architecture": "llama", "llama.block_count": 1, "llama.embedding_length": 8, "llama.attention.head_count": 2,
            "llama.attention.layer_norm_rms_epsilon": 1e-5}  # fmt: skip
    assert read_architecture(base).key_length == 4
    with pytest.raises(QuantizationError, match="mixtures"):
        read_architecture({**base, "llama.expert_count": 8})
    with pytest.raises(QuantizationError, match="scaled"):
        read_architecture({**base, "llama.rope.scaling.type": "yarn"})
    with pytest.raises(QuantizationError, match=r"llama\.attention\.head_count_kv is a list"):
        read_architecture({**base, "llama.attention.head_count_kv": [1, 2]})
    with pytest.raises(QuantizationError, match=r"llama\.block_count is missing"):
        read_architecture({key: value for key, value in base.items() if "block_count" not in key})


def test_float_source_reads_all_floats(tmp_path: Path) -> None:
    values = np.array([[1.5, -2.0, 0.25, 3.0]] * 3, np.float32)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    for kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16):
        writer.add_tensor(kind.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    tiled = np.tile(values, (1, 8))
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("Q8_0", gguf.quants.quantize(tiled, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_gguf(tmp_path / "x.gguf") as (view, scan):
        source = FloatSource(view, scan)
        for name in ("F32", "F16", "BF16"):
            assert np.array_equal(source.rows(name, 1, 3), values[1:])
        with pytest.raises(QuantizationError, match="--allow-requantize"):
            source.rows("Q8_0")
        assert np.allclose(FloatSource(view, scan, True).rows("Q8_0", 0, 2), tiled[:2], atol=0.02)
        del source
