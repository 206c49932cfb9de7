"""Whole checkpoints: weights are those of the checkpoint, metadata those of the base, and llama.cpp runs the result."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import lazyweights
from lazyweights.blocks.types import type_name
from lazyweights.container.gguf_scan import read_metadata, scan_gguf
from lazyweights.errors import FormatError, OutputExistsError, QuantizationError
from lazyweights.quant import gptq_import
from lazyweights.quant.gguf_rewrite import string_pair, u32_pair, write_gguf
from lazyweights.quant.gptq_import import import_gptq
from tests.llama.tiny_model import N_EMBEDDING, N_HEADS, N_KV_HEADS, N_LAYERS, N_VOCAB, write_tiny_model
from tests.make_gguf import build_gguf
from tests.quant import hf_llama
from tests.quant.gptq_samples import SampleModel, add_layer_bias, make_layer, make_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("base") / "base.gguf", file_type="Q8_0", seed=5)


@pytest.fixture
def vocabulary(base: Path, tmp_path: Path) -> Path:
    """The base without its tensors."""
    return without_tensors(base, tmp_path / "vocabulary.gguf")


def without_tensors(base: Path, path: Path) -> Path:
    data = base.read_bytes()
    scan = scan_gguf(data)
    infos = sum(8 + len(t.name) + 4 + 8 * len(t.shape) + 12 for t in scan.tensors)
    end = gguf_header_end(data) - infos
    path.write_bytes(data[:8] + bytes(8) + data[16:end])
    return path


def gguf_header_end(data: bytes) -> int:
    """Where the tensor descriptions end: behind the last one."""
    scan = scan_gguf(data)
    name = scan.tensors[-1].name.encode()
    at = data.rindex(len(name).to_bytes(8, "little") + name, 0, scan.data_offset)
    return at + 8 + len(name) + 4 + 8 * len(scan.tensors[-1].shape) + 12


def values_of(path: Path) -> dict[str, np.ndarray]:
    """All tensors, dequantized by the gguf package: float32, in the order of numpy."""
    return {
        t.name: gguf.quants.dequantize(t.data, t.tensor_type).reshape(tuple(int(n) for n in t.shape[::-1]))
        for t in gguf.GGUFReader(path).tensors
    }


def types_of(path: Path) -> dict[str, str]:
    return {t.name: type_name(t.type_id) for t in scan_gguf(path.read_bytes()).tensors}


def neighbours(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """Reorder rows of heads by loops: halves of a head become neighbours."""
    out = np.empty_like(weight)
    size = len(weight) // n_heads
    for row in range(len(weight)):
        head, inner = divmod(row, size)
        half, pair = divmod(inner, size // 2)
        out[head * size + 2 * pair + half] = weight[row]
    return out


def expected_values(model: SampleModel) -> dict[str, np.ndarray]:
    """The weights by their GGUF names, spelled out."""
    w = model.weights
    out = {"token_embd.weight": w["model.embed_tokens.weight"], "output_norm.weight": w["model.norm.weight"]}
    if "lm_head.weight" in w:
        out["output.weight"] = w["lm_head.weight"]
    for i in range(N_LAYERS):
        at, to = f"model.layers.{i}.", f"blk.{i}."
        out[to + "attn_norm.weight"] = w[at + "input_layernorm.weight"]
        out[to + "attn_q.weight"] = neighbours(w[at + "self_attn.q_proj.weight"], N_HEADS)
        out[to + "attn_k.weight"] = neighbours(w[at + "self_attn.k_proj.weight"], N_KV_HEADS)
        out[to + "attn_v.weight"] = w[at + "self_attn.v_proj.weight"]
        out[to + "attn_output.weight"] = w[at + "self_attn.o_proj.weight"]
        out[to + "ffn_norm.weight"] = w[at + "post_attention_layernorm.weight"]
        if at + "mlp.gate_proj.weight" in w:
            for part in ("gate", "up", "down"):
                out[f"{to}ffn_{part}.weight"] = w[f"{at}mlp.{part}_proj.weight"]
        else:
            experts = at + "block_sparse_moe."
            out[to + "ffn_gate_inp.weight"] = w[experts + "gate.weight"]
            for part, inner in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
                names = [f"{experts}experts.{e}.{inner}.weight" for e in range(model.config["num_local_experts"])]
                out[f"{to}ffn_{part}_exps.weight"] = np.stack([w[name] for name in names])
    return out


def assert_equal_values(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(found[name], values), name


@pytest.mark.parametrize("float_dtype", ["float16", "uint16", "float32"])
@pytest.mark.parametrize(
    ("bits", "group_size", "symmetric", "expected"),
    [
        (4, 32, True, "Q4_0"), (4, -1, False, "Q5_0"), (3, 32, False, "Q4_0"), (2, -1, True, "Q4_0"), (8, 32, True, "Q8_0"),
    ],
)  # fmt: skip
def test_weights_and_metadata(
    base: Path, tmp_path: Path, bits: int, group_size: int, symmetric: bool, expected: str, float_dtype: str
) -> None:
    model = make_model(bits, group_size, symmetric=symmetric, float_dtype=float_dtype)
    output = tmp_path / "out.gguf"
    result = import_gptq(model.write(tmp_path / "hf"), base, output)
    assert_equal_values(values_of(output), expected_values(model))
    types = types_of(output)
    assert list(types) == list(types_of(base))
    kept = {"float16": "F16", "uint16": "BF16", "float32": "F32"}[float_dtype]
    for name, found in types.items():
        assert found == ("F32" if "norm" in name else kept if name in ("token_embd.weight", "output.weight") else expected), name
    metadata, before = read_metadata(output.read_bytes()), read_metadata(base.read_bytes())
    assert metadata["general.quantization_version"] == 2
    assert metadata["general.file_type"] == {"Q4_0": 2, "Q5_0": 8, "Q8_0": 7}[expected]
    assert {**before, "general.quantization_version": 2, "general.file_type": metadata["general.file_type"]} == metadata
    assert (result.n_quantized, result.n_other, result.types) == (7 * N_LAYERS, 3 + 2 * N_LAYERS, {expected: 7 * N_LAYERS})
    assert result.output_bytes == output.stat().st_size


def test_bytes_of_the_metadata_are_those_of_the_base(vocabulary: Path, tmp_path: Path) -> None:
    start = tmp_path / "start.gguf"
    write_gguf(vocabulary, start, {}, pairs={"general.file_type": u32_pair(99), "quantize.imatrix.file": string_pair("x")})
    output = tmp_path / "out.gguf"
    import_gptq(make_model().write(tmp_path / "hf"), start, output)
    pairs = vocabulary.read_bytes()[24:]
    assert output.read_bytes()[24 : 24 + len(pairs)] == pairs
    metadata = read_metadata(output.read_bytes())
    assert (metadata["general.file_type"], "quantize.imatrix.file" in metadata) == (2, False)


@pytest.mark.parametrize("own_file", [False, True])
@pytest.mark.parametrize("version", [1, 2])
def test_shards_versions_and_configurations(base: Path, tmp_path: Path, version: int, own_file: bool) -> None:
    model = make_model(4, 32, symmetric=False, version=version)
    if version == 1:
        del model.config["quantization_config"]["checkpoint_format"]
    folder = model.write(tmp_path / "hf", shards=3, own_file=own_file)
    output = tmp_path / "out.gguf"
    import_gptq(folder, base, output)
    assert_equal_values(values_of(output), expected_values(model))


def test_base_without_tensors(vocabulary: Path, tmp_path: Path) -> None:
    model = make_model(3, 32, symmetric=False)
    output = tmp_path / "out.gguf"
    import_gptq(model.write(tmp_path / "hf"), vocabulary, output)
    assert_equal_values(values_of(output), expected_values(model))


def test_coded_base(base: Path, tmp_path: Path) -> None:
    lazyweights.encode(base, tmp_path / "base.gguf.lw")
    folder = make_model().write(tmp_path / "hf")
    for name, source in (("a", base), ("b", tmp_path / "base.gguf.lw")):
        import_gptq(folder, source, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("has_head", [False, True])
def test_tied_embeddings(tmp_path: Path, base: Path, has_head: bool) -> None:
    tied_base = write_tiny_model(tmp_path / "tied.gguf", tied=True)
    model = make_model(tied=True)
    expected = expected_values(model)
    if has_head:
        model.arrays["lm_head.weight"] = model.arrays["model.embed_tokens.weight"]
    folder = model.write(tmp_path / "hf")
    import_gptq(folder, tied_base, tmp_path / "out.gguf")
    import_gptq(folder, without_tensors(tied_base, tmp_path / "vocabulary.gguf"), tmp_path / "new.gguf")
    import_gptq(folder, base, tmp_path / "both.gguf")  # this one stores the matrix twice
    assert_equal_values(values_of(tmp_path / "out.gguf"), expected)
    assert_equal_values(values_of(tmp_path / "new.gguf"), expected)
    assert_equal_values(values_of(tmp_path / "both.gguf"), {**expected, "output.weight": expected["token_embd.weight"]})


def test_a_head_that_is_not_tied_is_not_dropped(tmp_path: Path) -> None:
    tied_base = write_tiny_model(tmp_path / "tied.gguf", tied=True)
    model = make_model()
    model.config["tie_word_embeddings"] = True
    with pytest.raises(QuantizationError, match=r"the base has no tensor output\.weight"):
        import_gptq(model.write(tmp_path / "hf"), tied_base, tmp_path / "out.gguf")


def test_layers_that_are_not_quantized(base: Path, tmp_path: Path) -> None:
    model = make_model()
    name = "model.layers.1.self_attn.q_proj"
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        del model.arrays[f"{name}.{part}"]
    model.arrays[f"{name}.weight"] = np.random.default_rng(1).standard_normal((N_EMBEDDING, N_EMBEDDING)).astype(np.float16)
    model.weights[f"{name}.weight"] = model.arrays[f"{name}.weight"].astype(np.float32)
    output = tmp_path / "out.gguf"
    result = import_gptq(model.write(tmp_path / "hf"), base, output)
    assert_equal_values(values_of(output), expected_values(model))
    assert types_of(output)["blk.1.attn_q.weight"] == "F16"
    assert result.n_quantized == 7 * N_LAYERS - 1


def test_quantized_head(base: Path, tmp_path: Path) -> None:
    model = make_model()
    del model.arrays["lm_head.weight"]
    layer = make_layer(np.random.default_rng(3), N_EMBEDDING, N_VOCAB, 8, 64)
    model.arrays |= {f"lm_head.{part}": array for part, array in layer.arrays.items()}
    model.weights["lm_head.weight"] = layer.weights
    output = tmp_path / "out.gguf"
    import_gptq(model.write(tmp_path / "hf"), base, output)
    assert_equal_values(values_of(output), expected_values(model))
    assert types_of(output)["output.weight"] == "Q8_0"


def test_biases(base: Path, vocabulary: Path, tmp_path: Path) -> None:
    model = make_model()
    for i in range(N_LAYERS):
        for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj"):
            add_layer_bias(model, f"model.layers.{i}.{name}", np.zeros(model.arrays[f"model.layers.{i}.{name}.scales"].shape[1]))
    output = tmp_path / "out.gguf"
    import_gptq(model.write(tmp_path / "hf"), base, output)
    assert_equal_values(values_of(output), expected_values(model))
    bias = np.random.default_rng(3).standard_normal(N_EMBEDDING)
    add_layer_bias(model, "model.layers.1.self_attn.q_proj", bias)
    folder = model.write(tmp_path / "hf")
    with pytest.raises(QuantizationError, match=r"the base has no tensor blk\.1\.attn_q\.bias"):
        import_gptq(folder, base, output, force=True)
    import_gptq(folder, vocabulary, output, force=True)
    found = values_of(output)["blk.1.attn_q.bias"]
    assert np.array_equal(found, neighbours(bias.astype(np.float16).astype(np.float32), N_HEADS))
    assert types_of(output)["blk.1.attn_q.bias"] == "F32"


def test_experts(tmp_path: Path) -> None:
    base = write_tiny_model(tmp_path / "base.gguf", n_experts=4)
    model = make_model(hf_name="MixtralForCausalLM", n_experts=4)
    name = "model.layers.0.block_sparse_moe.experts.2.w1"  # one expert needs the larger type, so all of its tensor have it
    scales = model.arrays[f"{name}.scales"]
    layer = make_layer(np.random.default_rng(2), N_EMBEDDING, scales.shape[1], 4, 32, symmetric=False, scales=scales)
    model.arrays |= {f"{name}.{part}": array for part, array in layer.arrays.items()}
    model.weights[f"{name}.weight"] = layer.weights
    output = tmp_path / "out.gguf"
    import_gptq(model.write(tmp_path / "hf"), base, output)
    assert_equal_values(values_of(output), expected_values(model))
    types = types_of(output)
    assert (types["blk.0.ffn_gate_exps.weight"], types["blk.1.ffn_gate_exps.weight"]) == ("Q5_0", "Q4_0")
    assert types["blk.0.ffn_gate_inp.weight"] == "F32"
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        del model.arrays[f"{name}.{part}"]
    with pytest.raises(QuantizationError, match=r"blk\.0\.ffn_gate_exps\.weight needs 4 experts, and the checkpoint has 3"):
        import_gptq(model.write(tmp_path / "hf"), base, output, force=True)


def test_tables_of_rotary_factors_come_from_the_base(base: Path, tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    with_table = tmp_path / "base.gguf"
    write_gguf(base, with_table, {"rope_freqs.weight": lambda: (0, (8,), [factors])}, new_shapes={"rope_freqs.weight": (8,)})
    model = make_model()
    model.config["rope_scaling"] = {"rope_type": "llama3"}
    folder = model.write(tmp_path / "hf")
    import_gptq(folder, with_table, tmp_path / "out.gguf")
    assert_equal_values(values_of(tmp_path / "out.gguf"), {**expected_values(model), "rope_freqs.weight": factors})
    with pytest.raises(QuantizationError, match="of the kind llama3 needs a table"):
        import_gptq(folder, without_tensors(base, tmp_path / "v.gguf"), tmp_path / "new.gguf")


# Refusals.


def act_order(model: SampleModel) -> None:
    model.arrays["model.layers.1.mlp.down_proj.g_idx"] = np.random.default_rng(1).permutation(96).astype(np.int32) // 32


def test_act_order_is_refused_or_stored_as_floats(base: Path, tmp_path: Path) -> None:
    model = make_model()
    act_order(model)
    folder = model.write(tmp_path / "hf")
    output = tmp_path / "out.gguf"
    with pytest.raises(QuantizationError, match="desc_act=False") as caught:
        import_gptq(folder, base, output)
    assert caught.value.tensor == "model.layers.1.mlp.down_proj"
    assert caught.value.path == str(folder)
    assert not output.exists()
    import_gptq(folder, base, output, float_fallback=True)
    assert types_of(output)["blk.1.ffn_down.weight"] == "F32"
    name = "model.layers.1.mlp.down_proj"
    scales = model.arrays[f"{name}.scales"].astype(np.float32)
    groups = model.arrays[f"{name}.g_idx"]
    sequential = np.arange(96) // 32
    integers = model.weights[f"{name}.weight"] / scales[sequential].T
    assert np.array_equal(values_of(output)["blk.1.ffn_down.weight"], np.rint(integers) * scales[groups].T)


def with_config(**changed: Any) -> Callable[[SampleModel], None]:
    return lambda model: model.config.update(changed)


def with_array(name: str, array: np.ndarray | None) -> Callable[[SampleModel], None]:
    def change(model: SampleModel) -> None:
        if array is None:
            del model.arrays[name]
        else:
            model.arrays[name] = array

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (with_config(architectures=["GemmaForCausalLM"]), "GemmaForCausalLM is not imported"),
        (with_config(architectures=["Qwen2ForCausalLM"]), "Qwen2ForCausalLM is qwen2 in GGUF, and the base llama"),
        (with_config(hidden_size=128), "hidden_size is 128 in config.json, and llama.embedding_length is 64"),
        (with_config(num_key_value_heads=4), "num_key_value_heads is 4"),
        (with_config(num_hidden_layers="2"), "config.json lacks"),
        (with_config(rms_norm_eps=1e-6), "rms_norm_eps is 1e-06 in config.json, and .* is 1e-05 in the base"),
        (with_array("model.norm.weight", None), "no array for 1 tensors; the first is output_norm.weight"),
        (with_array("lm_head.weight", None), "no array for 1 tensors; the first is output.weight"),
        (with_array("model.norm.weight", np.ones(32, np.float16)), r"expected \(64,\), found \(32,\)"),
        (with_array("model.norm.weight", np.ones(64)), "F64"),
        (with_array("model.layers.0.mlp.extra.weight", np.ones(64, np.float16)), "no GGUF tensor is known"),
        (with_array("model.layers.7.input_layernorm.weight", np.ones(64, np.float16)), "the base has no tensor blk.7"),
        (with_array("model.layers.0.mlp.up_proj.weight", np.ones((96, 64), np.float16)), "goes to the tensor blk.0.ffn_up"),
    ],
)
def test_models_that_do_not_fit(base: Path, tmp_path: Path, change: Callable[[SampleModel], None], said: str) -> None:
    model = make_model()
    change(model)
    output = tmp_path / "out.gguf"
    with pytest.raises(QuantizationError, match=said) as caught:
        import_gptq(model.write(tmp_path / "hf"), base, output)
    assert caught.value.path == str(tmp_path / "hf")
    assert not output.exists()


def test_bases_that_do_not_fit(vocabulary: Path, base: Path, tmp_path: Path) -> None:
    folder = make_model().write(tmp_path / "hf")
    output, odd = tmp_path / "out.gguf", tmp_path / "odd.gguf"
    odd.write_bytes(build_gguf([], {"general.architecture": "llama"}))
    with pytest.raises(QuantizationError, match="no tokenizer"):
        import_gptq(folder, odd, output)
    odd.write_bytes(build_gguf([], {"general.architecture": "llama", "tokenizer.ggml.tokens": ["a", "b"]}))
    with pytest.raises(QuantizationError, match=f"it has 2 tokens, and the checkpoint {N_VOCAB}"):
        import_gptq(folder, odd, output)
    write_gguf(base, odd, {}, pairs={"split.count": u32_pair(2)}, force=True)
    with pytest.raises(QuantizationError, match="one shard of several"):
        import_gptq(folder, odd, output)
    odd.write_bytes(base.read_bytes()[:-100])
    with pytest.raises(FormatError, match="missing from the file"):
        import_gptq(folder, odd, output)
    model = make_model()
    del model.arrays["model.layers.1.input_layernorm.weight"]
    with pytest.raises(QuantizationError, match=r"the first is blk\.1\.attn_norm\.weight"):
        import_gptq(model.write(tmp_path / "hf"), vocabulary, output)
    assert not output.exists()


def test_outputs_are_not_replaced(base: Path, tmp_path: Path) -> None:
    folder = make_model().write(tmp_path / "hf")
    output = tmp_path / "out.gguf"
    output.write_bytes(b"old")
    with pytest.raises(OutputExistsError):
        import_gptq(folder, base, output)
    before = base.read_bytes()
    with pytest.raises(OutputExistsError, match="input itself"):
        import_gptq(folder, base, base, force=True)
    assert (output.read_bytes(), base.read_bytes()) == (b"old", before)
    import_gptq(folder, base, output, force=True)
    assert scan_gguf(output.read_bytes()).problem is None


def test_progress_and_chunks(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gptq_import, "CHUNK_VALUES", 64 * 5)
    model = make_model()
    steps: list[tuple[int, int, str]] = []
    output = tmp_path / "out.gguf"
    import_gptq(model.write(tmp_path / "hf"), base, output, progress=lambda *step: steps.append(step))
    assert_equal_values(values_of(output), expected_values(model))
    n = 3 + 9 * N_LAYERS
    assert [step[:2] for step in steps] == [(i, 2 * n) for i in range(2 * n + 1)]


# llama.cpp.


def llama_logits(path: Path, tokens: list[int]) -> np.ndarray:
    model = lazyweights.load_llama(path, n_ctx=64, n_batch=64, logits_all=True, verbose=False)
    try:
        model.eval(tokens)
        return np.array(model.scores[: len(tokens)], np.float64)
    finally:
        model.close()


@pytest.mark.parametrize("with_tensors", [True, False])
def test_llama_cpp_computes_what_the_checkpoint_says(base: Path, vocabulary: Path, tmp_path: Path, with_tensors: bool) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    model = make_model(4, 32, symmetric=False)
    output, plain = tmp_path / "out.gguf", tmp_path / "f32.gguf"
    import_gptq(model.write(tmp_path / "hf"), base if with_tensors else vocabulary, output)
    tokens = [1, *np.random.default_rng(0).integers(3, N_VOCAB, 20).tolist()]
    expected = hf_llama.logits(model.weights, model.config, tokens)
    # llama.cpp rounds activations to 8 bits where weights are quantized: the same values as F32 show the rest exactly.
    values = values_of(output)
    floats = {name: (lambda v=v: (0, v.shape[::-1], [v])) for name, v in values.items()}
    write_gguf(output, plain, floats)
    assert np.abs(llama_logits(plain, tokens) - expected).max() < 1e-3 * np.abs(expected).max()
    assert np.abs(llama_logits(output, tokens) - expected).max() < 0.1 * np.abs(expected).max()
    # The comparison sees the order of rows: with that of Hugging Face it fails.
    model.weights["model.layers.0.self_attn.q_proj.weight"] = values["blk.0.attn_q.weight"]
    wrong = hf_llama.logits(model.weights, model.config, tokens)
    assert np.abs(wrong - expected).max() > 1e-2 * np.abs(expected).max()


def test_config_of_quantization_survives_odd_values(base: Path, tmp_path: Path) -> None:
    model = make_model()
    folder = model.write(tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= {"dynamic": None, "meta": {"quantizer": ["gptqmodel:7.7.0"]}, "damp_percent": 0.05}
    config |= {"rope_scaling": None, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "head_dim": 16}
    (folder / "config.json").write_text(json.dumps(config))
    import_gptq(folder, base, tmp_path / "out.gguf")
    assert_equal_values(values_of(tmp_path / "out.gguf"), expected_values(model))
