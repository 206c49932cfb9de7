"""GPTQ checkpoints made here: packed with plain loops from the layout's description, with the float weights beside them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.llama.tiny_model import N_EMBEDDING, N_FEED_FORWARD, N_HEADS, N_KV_HEADS, N_LAYERS, N_VOCAB

_NAMES = {"float16": "F16", "float32": "F32", "float64": "F64", "int32": "I32", "int64": "I64", "uint16": "BF16"}


def write_safetensors(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    """Write arrays; uint16 stands for BF16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, array in arrays.items():
        data = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": _NAMES[array.dtype.name], "shape": list(array.shape), "data_offsets": [len(body), len(body) + len(data)],
        }  # fmt: skip
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return path


def pack_down(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack codes ``(n, columns)`` into int32 words ``(n * bits / 32, columns)``, one code after the other."""
    n, columns = codes.shape
    words = np.zeros((-(-n * bits // 32), columns), np.uint64)
    if bits != 3:
        per_word = 32 // bits
        for i in range(n):
            for column in range(columns):
                words[i // per_word, column] |= np.uint64(int(codes[i, column]) << (bits * (i % per_word)))
    else:
        for start in range(0, n, 32):  # ten codes, one in two words, ten, one in two words, ten
            word = start // 32 * 3
            for column in range(columns):
                part = [int(code) for code in codes[start : start + 32, column]]
                part += [0] * (32 - len(part))
                first, second, third = 0, 0, 0
                for j in range(10):
                    first |= part[j] << (3 * j)
                    second |= part[11 + j] << (3 * j + 1)
                    third |= part[22 + j] << (3 * j + 2)
                first |= (part[10] & 3) << 30
                second |= part[10] >> 2 | (part[21] & 1) << 31
                third |= part[21] >> 1
                for k, value in enumerate((first, second, third)):
                    if word + k < len(words):
                        words[word + k, column] = value
    return words.astype(np.uint32).view(np.int32)


@dataclass
class SampleLayer:
    """A layer: its arrays under their short names, and its weights ``(outputs, inputs)`` in float32."""

    arrays: dict[str, np.ndarray]
    weights: np.ndarray


def make_layer(
    rng: np.random.Generator, n_inputs: int, n_outputs: int, bits: int, group_size: int, *,
    symmetric: bool = True, version: int = 1, groups: np.ndarray | None = None, zeros: np.ndarray | None = None,
    scales: np.ndarray | None = None, codes: np.ndarray | None = None,
) -> SampleLayer:  # fmt: skip
    """Make a layer of random codes; every code that the bits allow occurs."""
    size = n_inputs if group_size == -1 else group_size
    n_groups = -(-n_inputs // size)
    if groups is None:
        groups = np.arange(n_inputs) // size
    if codes is None:
        codes = rng.integers(0, 1 << bits, (n_inputs, n_outputs))
        codes[:2, 0] = 0, (1 << bits) - 1
    if scales is None:
        scales = rng.lognormal(-3, 1, (n_groups, n_outputs)).astype(np.float16)
        scales[0, -1] = np.float16(3e-7)  # subnormal
    if zeros is None:
        middle = np.full((n_groups, n_outputs), 1 << (bits - 1))
        zeros = middle if symmetric else rng.integers(1, 1 << bits, middle.shape)
    stored = (zeros - (version == 1)) % (1 << bits)
    weights = np.empty((n_outputs, n_inputs), np.float32)
    wide = scales.astype(np.float32) if scales.dtype != np.uint16 else (scales.astype(np.uint32) << 16).view(np.float32)
    for i in range(n_inputs):
        weights[:, i] = wide[groups[i]] * (codes[i] - zeros[groups[i]]).astype(np.float32)
    arrays = {
        "qweight": pack_down(codes, bits), "qzeros": np.ascontiguousarray(pack_down(stored.T, bits).T), "scales": scales,
        "g_idx": groups.astype(np.int32),
    }  # fmt: skip
    return SampleLayer(arrays, weights)


@dataclass
class SampleModel:
    """A tiny llama checkpoint: configuration, arrays, and the float32 weights by their Hugging Face names."""

    config: dict[str, Any]
    arrays: dict[str, np.ndarray]
    weights: dict[str, np.ndarray] = field(default_factory=dict)

    def write(self, folder: Path, *, shards: int = 1, own_file: bool = False) -> Path:
        """Write the folder; `own_file`: the configuration of quantization in ``quantize_config.json``, as AutoGPTQ does."""
        folder.mkdir(exist_ok=True)
        config = dict(self.config)
        if own_file:
            (folder / "quantize_config.json").write_text(json.dumps(config.pop("quantization_config")))
        (folder / "config.json").write_text(json.dumps(config))
        if shards == 1:
            write_safetensors(folder / "model.safetensors", self.arrays)
            return folder
        names = sorted(self.arrays)
        weight_map = {name: f"model-{i * shards // len(names) + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
        for file in set(weight_map.values()):
            write_safetensors(folder / file, {name: self.arrays[name] for name in names if weight_map[name] == file})
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder


def make_model(
    bits: int = 4, group_size: int = 32, *, symmetric: bool = True, version: int = 1, seed: int = 0, tied: bool = False,
    hf_name: str = "LlamaForCausalLM", float_dtype: str = "float16", n_experts: int = 0,
) -> SampleModel:  # fmt: skip
    """Make a checkpoint whose sizes are those of `tests.llama.tiny_model`: its GGUF is a base for it."""
    rng = np.random.default_rng(seed)
    config: dict[str, Any] = {
        "architectures": [hf_name], "hidden_size": N_EMBEDDING, "intermediate_size": N_FEED_FORWARD,
        "num_hidden_layers": N_LAYERS, "num_attention_heads": N_HEADS, "num_key_value_heads": N_KV_HEADS,
        "vocab_size": N_VOCAB, "tie_word_embeddings": tied,
        "quantization_config": {
            "bits": bits, "group_size": group_size, "desc_act": False, "sym": symmetric, "quant_method": "gptq",
            "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
        },
    }  # fmt: skip
    model = SampleModel(config, {})

    def plain(name: str, values: np.ndarray) -> None:
        if float_dtype == "uint16":
            stored = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
            model.weights[name] = (stored.astype(np.uint32) << 16).view(np.float32)
        else:
            stored = values.astype(float_dtype)
            model.weights[name] = stored.astype(np.float32)
        model.arrays[name] = stored

    def linear(name: str, n_inputs: int, n_outputs: int) -> None:
        n_groups = 1 if group_size == -1 else -(-n_inputs // group_size)
        scales = (rng.lognormal(-1, 0.3, (n_groups, n_outputs)) / 2**bits).astype(np.float16)
        layer = make_layer(rng, n_inputs, n_outputs, bits, group_size, symmetric=symmetric, version=version, scales=scales)
        for part, array in layer.arrays.items():
            model.arrays[f"{name}.{part}"] = array
        model.weights[f"{name}.weight"] = layer.weights

    def norm(name: str) -> None:
        plain(name, 1 + rng.standard_normal(N_EMBEDDING) / 16)

    n_kv = N_EMBEDDING // N_HEADS * N_KV_HEADS
    plain("model.embed_tokens.weight", rng.standard_normal((N_VOCAB, N_EMBEDDING)))
    for i in range(N_LAYERS):
        at = f"model.layers.{i}."
        norm(at + "input_layernorm.weight")
        linear(at + "self_attn.q_proj", N_EMBEDDING, N_EMBEDDING)
        linear(at + "self_attn.k_proj", N_EMBEDDING, n_kv)
        linear(at + "self_attn.v_proj", N_EMBEDDING, n_kv)
        linear(at + "self_attn.o_proj", N_EMBEDDING, N_EMBEDDING)
        norm(at + "post_attention_layernorm.weight")
        if n_experts:
            config["num_local_experts"], config["num_experts_per_tok"] = n_experts, 2
            plain(at + "block_sparse_moe.gate.weight", rng.standard_normal((n_experts, N_EMBEDDING)) / 8)
        for e in range(max(n_experts, 1)):
            inner = f"block_sparse_moe.experts.{e}." if n_experts else "mlp."
            gate, up, down = ("w1", "w3", "w2") if n_experts else ("gate_proj", "up_proj", "down_proj")
            linear(at + inner + gate, N_EMBEDDING, N_FEED_FORWARD)
            linear(at + inner + up, N_EMBEDDING, N_FEED_FORWARD)
            linear(at + inner + down, N_FEED_FORWARD, N_EMBEDDING)
    norm("model.norm.weight")
    if not tied:
        plain("lm_head.weight", rng.standard_normal((N_VOCAB, N_EMBEDDING)) / 5)
    return model


def add_layer_bias(model: SampleModel, name: str, values: np.ndarray) -> None:
    """Give a quantized layer a bias."""
    model.arrays[f"{name}.bias"] = values.astype(np.float16)
