"""Names of Hugging Face models of the llama family, and what becomes of them in GGUF.

Only architectures whose conversion is known to copy weights are listed (others add one to norms, join or cut matrices). Two
things are not plain copies:

- ``llama`` turns neighbouring elements of a head together (rotary embedding), Hugging Face element ``i`` and the one half a head
  further. So rows of q and k change places within each head (`interleaved`).
- The experts of a layer become one tensor with three dimensions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from lazyweights.errors import QuantizationError


@dataclass(frozen=True)
class Family:
    """What is particular to one architecture.

    Attributes
    ----------
    architecture : str
        ``general.architecture`` of its GGUF files.
    interleaves : bool
        Whether rows of q and k change places.
    layer_names : tuple of str
        GGUF tensors that each layer has besides those of all architectures.
    """

    architecture: str
    interleaves: bool = False
    layer_names: tuple[str, ...] = ()


_BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
_HEAD_NORMS = ("attn_q_norm.weight", "attn_k_norm.weight")
_DENSE = ("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight")
_EXPERTS = ("ffn_gate_inp.weight", "ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight")

FAMILIES = {
    "LlamaForCausalLM": Family("llama", True, _DENSE),
    "MistralForCausalLM": Family("llama", True, _DENSE),
    "MixtralForCausalLM": Family("llama", True, _EXPERTS),
    "Qwen2ForCausalLM": Family("qwen2", False, (*_BIASES, *_DENSE)),
    "Qwen3ForCausalLM": Family("qwen3", False, (*_HEAD_NORMS, *_DENSE)),
    "Qwen3MoeForCausalLM": Family("qwen3moe", False, (*_HEAD_NORMS, *_EXPERTS)),
}
"""By the name in ``architectures`` of config.json."""

COMMON_LAYER_NAMES = (
    "attn_norm.weight", "attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight", "ffn_norm.weight",
)  # fmt: skip
COMMON_NAMES = ("token_embd.weight", "output_norm.weight")

_MODULES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp",
}  # fmt: skip
_OUTER_MODULES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_EXPERT_MODULES = {
    "gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps",
}  # fmt: skip

_IN_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.(.+)")
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d{1,6})\.(\w+)")
_DERIVED = re.compile(r".*\.(?:rotary_emb\.inv_freq|self_attn\.(?:masked_)?bias)")


@dataclass(frozen=True)
class Target:
    """Where an array goes.

    Attributes
    ----------
    name : str
        GGUF tensor.
    expert : int or None
        Its place in the tensor's third dimension.
    heads : str
        ``q`` or ``k`` where the rows are those of heads, else "".
    """

    name: str
    expert: int | None = None
    heads: str = ""


def family_of(architectures: object) -> tuple[str, Family]:
    """Return the name and the particulars of a model's architecture.

    Raises
    ------
    QuantizationError
        If it is not one that is known.
    """
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else "no architecture"
    if name not in FAMILIES:
        raise QuantizationError(f"{name} is not imported; known are {', '.join(FAMILIES)}")
    return name, FAMILIES[name]


def target_of(name: str) -> Target | None:
    """Return where an array named ``MODULE.weight`` or ``MODULE.bias`` goes; None where GGUF derives it.

    Raises
    ------
    QuantizationError
        If no rule says.

    Examples
    --------
    >>> target_of("model.layers.3.self_attn.q_proj.weight")
    Target(name='blk.3.attn_q.weight', expert=None, heads='q')
    >>> target_of("model.layers.0.mlp.experts.7.up_proj.weight").expert
    7
    """
    if _DERIVED.fullmatch(name):
        return None
    module, _, part = name.rpartition(".")
    if part in ("weight", "bias"):
        if module in _OUTER_MODULES:
            return Target(f"{_OUTER_MODULES[module]}.{part}")
        found = _IN_LAYER.fullmatch(module)
        if found:
            layer, inner = int(found[1]), found[2]
            if inner in _MODULES:
                heads = {"attn_q": "q", "attn_k": "k"}.get(_MODULES[inner], "")
                return Target(f"blk.{layer}.{_MODULES[inner]}.{part}", None, heads)
            expert = _EXPERT.fullmatch(inner)
            if expert and expert[2] in _EXPERT_MODULES:
                return Target(f"blk.{layer}.{_EXPERT_MODULES[expert[2]]}.{part}", int(expert[1]))
    raise QuantizationError("no GGUF tensor is known for this array", tensor=name)


def expected_names(family: Family, n_layers: int) -> list[str]:
    """Return the tensors that a GGUF of this architecture has at least, in the order of its layers."""
    names = (*COMMON_LAYER_NAMES, *family.layer_names)
    return [COMMON_NAMES[0], *(f"blk.{i}.{name}" for i in range(n_layers) for name in names), COMMON_NAMES[1]]


def interleaved(n_rows: int, n_heads: int) -> np.ndarray:
    """Return which row of a Hugging Face q or k goes to each row of a ``llama`` GGUF.

    Raises
    ------
    QuantizationError
        If the rows are not those of so many heads.

    Examples
    --------
    >>> interleaved(8, 2).tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    if n_heads < 1 or n_rows % (2 * n_heads):
        raise QuantizationError(f"{n_rows} rows are not those of {n_heads} heads of even size")
    return np.arange(n_rows).reshape(n_heads, 2, -1).swapaxes(1, 2).reshape(-1)
