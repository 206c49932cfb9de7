"""Names and orders of rows, against the gguf package and plain loops."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from lazyweights.errors import QuantizationError
from lazyweights.quant.hf_names import FAMILIES, Target, expected_names, family_of, interleaved, target_of

MODULES = (
    "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
)  # fmt: skip
DENSE = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@pytest.mark.parametrize(
    ("architecture", "modules"),
    [
        ("LLAMA", (*MODULES, *DENSE)),
        ("LLAMA", ("block_sparse_moe.gate",)),
        ("QWEN2", (*MODULES, *DENSE)),
        ("QWEN3", (*MODULES, *DENSE, "self_attn.q_norm", "self_attn.k_norm")),
        ("QWEN3MOE", (*MODULES, "mlp.gate", "self_attn.q_norm", "self_attn.k_norm")),
    ],
)
def test_names_are_those_of_the_gguf_package(architecture: str, modules: tuple[str, ...]) -> None:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture], 12)
    full = ["model.embed_tokens", "model.norm", "lm_head", *(f"model.layers.{i}.{m}" for i in (0, 11) for m in modules)]
    for module in full:
        for part in ("weight", "bias"):
            target = target_of(f"{module}.{part}")
            assert target is not None
            assert target.name == names.get_name(f"{module}.{part}", (".weight", ".bias"))
            assert target.expert is None


def test_experts() -> None:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, 3)
    for part in ("gate", "up", "down"):
        assert target_of(f"model.layers.2.mlp.experts.17.{part}_proj.weight") == Target(
            names.get_name(f"model.layers.2.mlp.experts.{part}_proj") + ".weight", 17
        )
    for part, inner in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        found = target_of(f"model.layers.2.block_sparse_moe.experts.0.{inner}.weight")
        assert found == Target(f"blk.2.ffn_{part}_exps.weight", 0)


def test_derived_and_unknown_names() -> None:
    assert target_of("model.layers.0.self_attn.rotary_emb.inv_freq") is None
    unknown = ("model.layers.0.self_attn.x_proj.weight", "lm_head.scale", "model.layers.0.input_layernorm", "", "model.layers.x")
    for name in unknown:
        with pytest.raises(QuantizationError, match="no GGUF tensor is known") as caught:
            target_of(name)
        assert caught.value.tensor == name


def test_only_heads_of_q_and_k_are_marked() -> None:
    marked = {m for m in (*MODULES, *DENSE) if target_of(f"model.layers.0.{m}.weight").heads}  # type: ignore[union-attr]
    assert marked == {"self_attn.q_proj", "self_attn.k_proj"}


@pytest.mark.parametrize("architectures", [None, [], "LlamaForCausalLM", ["GemmaForCausalLM"]])
def test_unknown_architectures_are_refused(architectures: object) -> None:
    with pytest.raises(QuantizationError, match="known are LlamaForCausalLM, "):
        family_of(architectures)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_expected_names_are_those_of_the_architecture(name: str) -> None:
    family = FAMILIES[name]
    kinds = gguf.MODEL_TENSORS[next(a for a, text in gguf.MODEL_ARCH_NAMES.items() if text == family.architecture)]
    known = {gguf.TENSOR_NAMES[kind].format(bid=i) for kind in kinds for i in range(2)}
    expected = expected_names(family, 2)
    assert len(set(expected)) == len(expected)
    assert {part.rpartition(".")[0] for part in expected} <= known


@pytest.mark.parametrize(("n_heads", "size"), [(1, 2), (2, 8), (5, 64)])
def test_interleaved_rows(n_heads: int, size: int) -> None:
    order = interleaved(n_heads * size, n_heads)
    for head in range(n_heads):
        for pair in range(size // 2):
            assert order[head * size + 2 * pair] == head * size + pair
            assert order[head * size + 2 * pair + 1] == head * size + pair + size // 2
    assert np.array_equal(np.sort(order), np.arange(n_heads * size))


@pytest.mark.parametrize(("n_rows", "n_heads"), [(64, 3), (6, 2), (4, 0)])
def test_rows_that_are_not_heads(n_rows: int, n_heads: int) -> None:
    with pytest.raises(QuantizationError, match=f"{n_rows} rows are not those of {n_heads} heads"):
        interleaved(n_rows, n_heads)
