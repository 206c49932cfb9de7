"""A llama forward pass in plain numpy, from Hugging Face weights by their names: what llama.cpp must compute from the GGUF."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def _norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def _rotate(x: np.ndarray) -> np.ndarray:
    """Rotate ``(tokens, heads, size)``: element i together with the one half a head further."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def logits(weights: Mapping[str, np.ndarray], config: Mapping[str, Any], tokens: list[int]) -> np.ndarray:
    """Return the logits of every position: float64 ``(tokens, vocabulary)``."""
    n_heads, n_kv = config["num_attention_heads"], config["num_key_value_heads"]
    x = weights["model.embed_tokens.weight"][tokens].astype(np.float64)
    mask = np.triu(np.full((len(tokens), len(tokens)), -np.inf), 1)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."

        def project(name: str, y: np.ndarray, at: str = at) -> np.ndarray:
            return y @ weights[f"{at}{name}.weight"].T.astype(np.float64)

        y = _norm(x, weights[at + "input_layernorm.weight"])
        q = _rotate(project("self_attn.q_proj", y).reshape(len(tokens), n_heads, -1))
        k = _rotate(project("self_attn.k_proj", y).reshape(len(tokens), n_kv, -1))
        v = project("self_attn.v_proj", y).reshape(len(tokens), n_kv, -1)
        k, v = (np.repeat(z, n_heads // n_kv, axis=1) for z in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1]) + mask
        x = x + project("self_attn.o_proj", np.einsum("hqk,khd->qhd", _softmax(scores), v).reshape(len(tokens), -1))
        y = _norm(x, weights[at + "post_attention_layernorm.weight"])
        gate = project("mlp.gate_proj", y)
        x = x + project("mlp.down_proj", gate / (1 + np.exp(-gate)) * project("mlp.up_proj", y))
    x = _norm(x, weights["model.norm.weight"])
    return x @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).T
