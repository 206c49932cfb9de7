"""GPTQModel as the oracle of `lazyweights import-gptq`.

Usage: python benchmarks/gptq_import_oracle.py [--quick]

Needs GPTQModel (`pip install gptqmodel`, which brings PyTorch and transformers); without it nothing is measured. A tiny llama
of random weights is quantized by GPTQModel itself and saved by it, once for each case. What import-gptq makes of the folder is
dequantized with the gguf package, and compared value by value with what GPTQModel's own dequantizer gives in float32. Where GGUF
cannot hold a checkpoint the JSON has the reason, and the comparison is with the float fallback. The first import of GPTQModel and
the cases take a few minutes.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from common import console, finish, parse_arguments, scratch

from lazyweights.blocks.types import type_name
from lazyweights.container.gguf_scan import scan_gguf
from lazyweights.errors import QuantizationError
from lazyweights.quant.gptq_import import import_gptq
from lazyweights.quant.hf_names import interleaved, target_of
from tests.llama import tiny_model

CASES = (
    # bits, group size, symmetric, desc_act, checkpoint format
    (2, 32, True, False, "gptq"), (2, 32, False, False, "gptq_v2"),
    (3, 32, True, False, "gptq"), (3, 64, False, False, "gptq_v2"),
    (4, 32, True, False, "gptq"), (4, 64, True, False, "gptq_v2"),
    (4, 32, False, False, "gptq"), (4, 32, False, False, "gptq_v2"),
    (4, -1, True, True, "gptq"), (4, 32, True, True, "gptq"),
    (8, 32, True, False, "gptq"), (8, 32, False, False, "gptq_v2"),
)  # fmt: skip
SEED = 7
N_FEED_FORWARD = 128
"""Of the model: groups of 64 fit."""


def write_float_model(folder: Path) -> None:
    """Save a tiny llama with a tokenizer, as GPTQModel loads it."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(SEED)
    config = LlamaConfig(
        hidden_size=tiny_model.N_EMBEDDING, intermediate_size=N_FEED_FORWARD, num_hidden_layers=tiny_model.N_LAYERS,
        num_attention_heads=tiny_model.N_HEADS, num_key_value_heads=tiny_model.N_KV_HEADS, vocab_size=tiny_model.N_VOCAB,
        max_position_embeddings=tiny_model.N_CONTEXT, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=False, rms_norm_eps=1e-5,
    )  # fmt: skip
    LlamaForCausalLM(config).half().save_pretrained(folder)
    words = {f"t{i}": i for i in range(tiny_model.N_VOCAB)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t0")), unk_token="t0", bos_token="t1", eos_token="t2",
        pad_token="t0",
    )  # fmt: skip
    tokenizer.save_pretrained(folder)


def quantize(source: Path, folder: Path, case: tuple[int, int, bool, bool, str]) -> None:
    """Quantize and save with GPTQModel."""
    from gptqmodel import GPTQModel, QuantizeConfig

    bits, group_size, symmetric, desc_act, layout = case
    config = QuantizeConfig(bits=bits, group_size=group_size, sym=symmetric, desc_act=desc_act, format=layout)
    model = GPTQModel.load(str(source), config, device="cpu")
    rng = np.random.default_rng(SEED)
    texts = rng.integers(3, tiny_model.N_VOCAB, (8, 64)).tolist()
    model.quantize([{"input_ids": text, "attention_mask": [1] * len(text)} for text in texts], batch_size=1)
    model.save(str(folder))


def oracle_values(folder: Path) -> dict[str, np.ndarray]:
    """Return all arrays of a checkpoint as GPTQModel dequantizes them, float32, by their GGUF names."""
    import torch
    from gptqmodel.utils.model_dequant import convert_gptq_file

    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    out: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in convert_gptq_file(path, torch.float32, config, "cpu").items():
            target = target_of(name)
            assert target is not None
            values = tensor.to(torch.float32).numpy()
            if target.heads:
                n_heads = tiny_model.N_HEADS if target.heads == "q" else tiny_model.N_KV_HEADS
                values = values[interleaved(len(values), n_heads)]
            out[target.name] = values
    return out


def compare(output: Path, expected: dict[str, np.ndarray]) -> tuple[int, int]:
    """Return how many values were compared and how many differ; end the benchmark if tensors are missing."""
    found = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(tuple(int(n) for n in tensor.shape[::-1]))
        for tensor in gguf.GGUFReader(output).tensors
    }
    if found.keys() != expected.keys():
        raise SystemExit(f"tensors differ: {sorted(found.keys() ^ expected.keys())}")
    n_values = sum(values.size for values in expected.values())
    return n_values, sum(int(np.sum(found[name] != values)) for name, values in expected.items())


def layer_types(output: Path) -> list[str]:
    """Return the types of the matrices in layers."""
    tensors = scan_gguf(output.read_bytes()).tensors
    return sorted({type_name(t.type_id) for t in tensors if t.name.startswith("blk.") and len(t.shape) > 1})


def run_case(work: Path, source: Path, base: Path, case: tuple[int, int, bool, bool, str]) -> dict[str, Any]:
    folder, output = work / "quantized", work / "out.gguf"
    shutil.rmtree(folder, ignore_errors=True)
    quantize(source, folder, case)
    row: dict[str, Any] = dict(zip(("bits", "group_size", "symmetric", "desc_act", "format"), case, strict=True))
    try:
        import_gptq(folder, base, output, force=True)
        row["refused"] = None
    except QuantizationError as error:
        row["refused"] = error.message
        import_gptq(folder, base, output, force=True, float_fallback=True)
    row["n_values"], row["n_different"] = compare(output, oracle_values(folder))
    row["types"] = layer_types(output)
    console.print(row)
    return row


def main() -> None:
    args = parse_arguments(__doc__)
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # its pool asks for two even where it finds fewer cores
    try:
        import gptqmodel
    except ImportError as error:
        sys.exit(f"GPTQModel cannot be imported ({error}), so there is nothing to compare with")
    with scratch(1 << 26) as work:
        base = work / "base.gguf"
        tiny_model.N_FEED_FORWARD = N_FEED_FORWARD
        tiny_model.write_tiny_model(base)
        source = work / "float"
        write_float_model(source)
        rows = [run_case(work, source, base, case) for case in (CASES[:2] if args.quick else CASES)]
    if any(row["n_different"] for row in rows):
        raise SystemExit("values differ from those of GPTQModel")
    finish("gptq_import_oracle", args, {"gptqmodel": gptqmodel.__version__, "rows": rows})


if __name__ == "__main__":
    main()
