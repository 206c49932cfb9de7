"""Transformers of the llama kind in numpy, one layer at a time, forward and backward: what gradients need and llama.cpp lacks.

A chunk of text is a float32 matrix (tokens, features); chunks do not see each other. A layer is run forward from its input to
its output, and backward from the gradient of its output to the gradient of its input; backward runs forward again, so that
nothing but the inputs of layers need be kept. On the way back each weight matrix hands its input and the gradient of its output
to a recorder. The products run in single precision, in BLAS.

What surprises: GGUF rotates neighbouring pairs of features for the architecture ``llama`` and pairs half a head apart for
the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lazyweights.errors import QuantizationError

Recorder = Callable[[str, np.ndarray, np.ndarray], None]
"""Takes the name of a weight, its input (tokens, columns) and the gradient of its output (tokens, rows)."""

Weights = Mapping[str, np.ndarray]

HAS_HALF_PAIRS = {"llama": False, "qwen2": True, "qwen3": True}
"""The architectures that are known here, and whether rotary pairs lie half a head apart."""


@dataclass(frozen=True)
class Architecture:
    """The numbers that shape a model.

    Attributes
    ----------
    name : str
        As in ``general.architecture``.
    n_layers, n_embedding, n_heads, n_kv_heads, key_length, value_length : int
    norm_epsilon : float
    rope_base : float
    rope_dims : int
        Features of a head that are rotated.
    """

    name: str
    n_layers: int
    n_embedding: int
    n_heads: int
    n_kv_heads: int
    key_length: int
    value_length: int
    norm_epsilon: float
    rope_base: float
    rope_dims: int


def read_architecture(metadata: Mapping[str, Any]) -> Architecture:
    """Read the numbers from the metadata of a GGUF file.

    Raises
    ------
    QuantizationError
        If the model is none of those that are known here; says why.
    """
    name = str(metadata.get("general.architecture", ""))
    if name not in HAS_HALF_PAIRS:
        known = ", ".join(HAS_HALF_PAIRS)
        raise QuantizationError(f"gradients of the architecture {name!r} are not known here (known are {known})")

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{name}.{key}", default)
        if value is None or isinstance(value, list):
            raise QuantizationError(f"{name}.{key} is {'missing' if value is None else 'a list, which is not known here'}")
        return value

    if get("expert_count", 0):
        raise QuantizationError("gradients of mixtures of experts are not known here")
    if get("rope.scaling.type", "none") not in ("none", ""):
        raise QuantizationError("gradients of models with scaled rotary positions are not known here")
    n_heads, n_embedding = int(get("attention.head_count")), int(get("embedding_length"))
    key_length = int(get("attention.key_length", n_embedding // n_heads))
    return Architecture(
        name, int(get("block_count")), n_embedding, n_heads, int(get("attention.head_count_kv", n_heads)), key_length,
        int(get("attention.value_length", key_length)), float(get("attention.layer_norm_rms_epsilon")),
        float(get("rope.freq_base", 10000.0)), int(get("rope.dimension_count", key_length)),
    )  # fmt: skip


def layer_weight_names(layer: int) -> tuple[str, ...]:
    """Return the names of the matrices of a layer, in the order of the graph."""
    kinds = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    return tuple(f"blk.{layer}.{kind}.weight" for kind in kinds)


def normalize(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    """Divide each last dimension by its root mean square and multiply it with a weight."""
    return x * _inverse_rms(x, epsilon) * weight


def normalize_backward(x: np.ndarray, weight: np.ndarray, epsilon: float, gradient: np.ndarray) -> np.ndarray:
    """Return the gradient of the input of `normalize`."""
    inverse = _inverse_rms(x, epsilon)
    scaled = gradient * weight
    return inverse * (scaled - x * (inverse * inverse * np.mean(scaled * x, axis=-1, keepdims=True)))


def _inverse_rms(x: np.ndarray, epsilon: float) -> np.ndarray:
    return (1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(epsilon))).astype(np.float32)


class Rotation:
    """Rotary positions of a chunk.

    Parameters
    ----------
    architecture : Architecture
    n_tokens : int
    factors : numpy.ndarray, optional
        float32 (rope_dims / 2,), what the tensor ``rope_freqs.weight`` divides the frequencies by.
    """

    def __init__(self, architecture: Architecture, n_tokens: int, factors: np.ndarray | None = None) -> None:
        dims = architecture.rope_dims
        frequencies = architecture.rope_base ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)
        if factors is not None:
            frequencies = frequencies / factors
        angles = np.arange(n_tokens, dtype=np.float64)[:, None] * frequencies
        self._cos, self._sin = (np.asarray(f(angles), np.float32)[:, None] for f in (np.cos, np.sin))
        half = dims // 2
        is_half = HAS_HALF_PAIRS[architecture.name]
        self._first = slice(0, half) if is_half else slice(0, dims, 2)
        self._second = slice(half, dims) if is_half else slice(1, dims, 2)

    def apply(self, x: np.ndarray, sign: int = 1) -> np.ndarray:
        """Rotate heads, float32 (tokens, heads, features); `sign` -1 turns back, which is how gradients go."""
        out = x.copy()
        a, b, sin = x[..., self._first], x[..., self._second], self._sin * np.float32(sign)
        out[..., self._first] = a * self._cos - b * sin
        out[..., self._second] = a * sin + b * self._cos
        return out


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention.

    Parameters
    ----------
    q, k, v : numpy.ndarray
        float32 (tokens, heads, features); `k` and `v` may have fewer heads, each shared by neighbouring heads of `q`.

    Returns
    -------
    numpy.ndarray
        float32 (tokens, heads of q, features of v).
    """
    out = np.empty((*q.shape[:2], v.shape[2]), np.float32)
    for head, shared in _heads(q, k):
        out[:, head] = _probabilities(q[:, head], k[:, shared]) @ v[:, shared]
    return out


def attend_backward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, gradient: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the gradients of `q`, `k` and `v` from that of the output of `attend`."""
    to_q, to_k, to_v = np.empty_like(q), np.zeros_like(k), np.zeros_like(v)
    scale = np.float32(1 / math.sqrt(q.shape[2]))
    for head, shared in _heads(q, k):
        p = _probabilities(q[:, head], k[:, shared])
        to_v[:, shared] += p.T @ gradient[:, head]
        to_p = gradient[:, head] @ v[:, shared].T
        to_scores = p * (to_p - np.sum(to_p * p, axis=1, keepdims=True)) * scale
        to_q[:, head] = to_scores @ k[:, shared]
        to_k[:, shared] += to_scores.T @ q[:, head]
    return to_q, to_k, to_v


def _heads(q: np.ndarray, k: np.ndarray) -> list[tuple[int, int]]:
    share = q.shape[1] // k.shape[1]
    return [(head, head // share) for head in range(q.shape[1])]


def _probabilities(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    scores = (q @ k.T) * np.float32(1 / math.sqrt(q.shape[1]))
    scores[np.triu_indices(len(scores), 1)] = -np.inf
    scores -= scores.max(axis=1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=1, keepdims=True)
    return scores


@dataclass(frozen=True)
class _Attention:
    """What the first half of a layer computes."""

    normed: np.ndarray
    raw_q: np.ndarray
    raw_k: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    out: np.ndarray


class Layer:
    """One layer: attention, then a gated feed-forward part, each behind a norm and added to what it came from.

    Parameters
    ----------
    architecture : Architecture
    index : int
        Which layer.
    weights : mapping of str to numpy.ndarray
        float32 by name: matrices (rows, columns), norms and biases.
    rotation : Rotation
    """

    def __init__(self, architecture: Architecture, index: int, weights: Weights, rotation: Rotation) -> None:
        self._arch, self._prefix, self._weights, self._rotation = architecture, f"blk.{index}.", weights, rotation

    def forward(self, x: np.ndarray) -> np.ndarray:
        """Return the output of the layer, float32 (tokens, features)."""
        middle = x + self._project("attn_output", _flat(self._attention(x).out))
        gate, up = (self._project(kind, self._norm("ffn_norm", middle)) for kind in ("ffn_gate", "ffn_up"))
        return middle + self._project("ffn_down", gate * _sigmoid(gate) * up)

    def backward(self, x: np.ndarray, gradient: np.ndarray, record: Recorder) -> np.ndarray:
        """Return the gradient of the input `x` from that of the output; `record` every matrix on the way."""
        first = self._attention(x)
        heads = _flat(first.out)
        middle = x + self._project("attn_output", heads)
        normed = self._norm("ffn_norm", middle)
        gate, up = self._project("ffn_gate", normed), self._project("ffn_up", normed)
        sigmoid = _sigmoid(gate)
        silu = gate * sigmoid

        to_hidden = self._back("ffn_down", silu * up, gradient, record)
        to_normed = self._back("ffn_up", normed, to_hidden * silu, record)
        to_normed += self._back("ffn_gate", normed, to_hidden * up * sigmoid * (1 + gate * (1 - sigmoid)), record)
        gradient = gradient + self._norm_back("ffn_norm", middle, to_normed)

        to_heads = self._back("attn_output", heads, gradient, record).reshape(first.out.shape)
        to_q, to_k, to_v = attend_backward(first.q, first.k, first.v, to_heads)
        to_q = self._head_norm_back("attn_q_norm", first.raw_q, self._rotation.apply(to_q, -1))
        to_k = self._head_norm_back("attn_k_norm", first.raw_k, self._rotation.apply(to_k, -1))
        to_normed = self._back("attn_q", first.normed, _flat(to_q), record)
        to_normed += self._back("attn_k", first.normed, _flat(to_k), record)
        to_normed += self._back("attn_v", first.normed, _flat(to_v), record)
        return gradient + self._norm_back("attn_norm", x, to_normed)

    def _attention(self, x: np.ndarray) -> _Attention:
        arch = self._arch
        normed = self._norm("attn_norm", x)
        raw_q = self._project("attn_q", normed).reshape(-1, arch.n_heads, arch.key_length)
        raw_k = self._project("attn_k", normed).reshape(-1, arch.n_kv_heads, arch.key_length)
        v = self._project("attn_v", normed).reshape(-1, arch.n_kv_heads, arch.value_length)
        q = self._rotation.apply(self._head_norm("attn_q_norm", raw_q))
        k = self._rotation.apply(self._head_norm("attn_k_norm", raw_k))
        return _Attention(normed, raw_q, raw_k, q, k, v, attend(q, k, v))

    def _project(self, kind: str, x: np.ndarray) -> np.ndarray:
        out = x @ self._weights[f"{self._prefix}{kind}.weight"].T
        bias = self._weights.get(f"{self._prefix}{kind}.bias")
        return out if bias is None else out + bias

    def _back(self, kind: str, x: np.ndarray, gradient: np.ndarray, record: Recorder) -> np.ndarray:
        name = f"{self._prefix}{kind}.weight"
        record(name, x, gradient)
        return gradient @ self._weights[name]

    def _norm(self, kind: str, x: np.ndarray) -> np.ndarray:
        return normalize(x, self._weights[f"{self._prefix}{kind}.weight"], self._arch.norm_epsilon)

    def _norm_back(self, kind: str, x: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        return normalize_backward(x, self._weights[f"{self._prefix}{kind}.weight"], self._arch.norm_epsilon, gradient)

    def _head_norm(self, kind: str, x: np.ndarray) -> np.ndarray:
        return self._norm(kind, x) if f"{self._prefix}{kind}.weight" in self._weights else x

    def _head_norm_back(self, kind: str, x: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        return self._norm_back(kind, x, gradient) if f"{self._prefix}{kind}.weight" in self._weights else gradient


def _flat(heads: np.ndarray) -> np.ndarray:
    return heads.reshape(len(heads), -1)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(np.minimum(-x, np.float32(80))))
