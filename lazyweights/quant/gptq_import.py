"""Import a GPTQ checkpoint: write a GGUF file whose weights are the checkpoint's, exactly.

Metadata and tokenizer come from a base, a GGUF file of the same model: any quantization of it, or one of metadata only, as
llama.cpp's converter writes it with ``--vocab-only``. What surprises:

- Everything is planned and checked before a byte is written: names, shapes, types, whether GGUF can hold each layer.
- If the base has tensors, the output has exactly these, in the same order. Only tables of rotary factors are copied from it.
- If it has none, the output has what the architecture needs.
- Matrices that are not quantized keep their float type; vectors and the routers of experts become float32, as llama.cpp
  wants them. All of this is exact.
- A bias of nothing but zeros, as old versions save it for layers without one, is left out where the model has none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lazyweights.blocks.types import GGML_TYPES, TYPE_BY_NAME, type_name
from lazyweights.container.atomic import check_output
from lazyweights.container.gguf_scan import Scan, read_metadata
from lazyweights.container.gguf_values import ElidedArray
from lazyweights.errors import LazyWeightsError, QuantizationError
from lazyweights.llama.memory_file import model_path
from lazyweights.quant.gguf_rewrite import NewTensor, open_gguf, u32_pair, write_gguf
from lazyweights.quant.gptq_blocks import F32, block_groups, pack_layer, smallest_type
from lazyweights.quant.gptq_checkpoint import GptqCheckpoint, to_float32
from lazyweights.quant.hf_names import Family, expected_names, family_of, interleaved, target_of

COPIED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors of a base that a checkpoint does not have: computed from its configuration."""

FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "Q5_0": 8, "BF16": 32}
"""Numbers of ``general.file_type`` by the type that most weights have."""

CHUNK_VALUES = 1 << 22

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class ImportResult:
    """What `import_gptq` wrote.

    Attributes
    ----------
    output : str
    output_bytes, n_weights : int
        Of the whole file.
    n_quantized, n_other : int
        Tensors made of quantized layers, and all others.
    types : dict of str to int
        How many tensors of quantized layers have each type.
    seconds : float
    """

    output: str
    output_bytes: int
    n_weights: int
    n_quantized: int
    n_other: int
    types: dict[str, int]
    seconds: float

    @property
    def bpw(self) -> float:
        """Bits per weight, the whole file counted."""
        return 8 * self.output_bytes / max(self.n_weights, 1)


@dataclass(frozen=True)
class _Part:
    """One array or layer of the checkpoint; `n_heads` is not 0 where its rows change places."""

    name: str
    is_quantized: bool
    n_heads: int = 0


@dataclass
class _Tensor:
    """A tensor to write: one part, or one for each expert."""

    name: str
    parts: dict[int, _Part] = field(default_factory=dict)
    has_experts: bool = False
    shape: tuple[int, ...] = ()
    type_id: int = F32

    @property
    def is_quantized(self) -> bool:
        return any(part.is_quantized for part in self.parts.values())


def import_gptq(
    folder: str | os.PathLike[str],
    base: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    float_fallback: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> ImportResult:
    """Write the GGUF file of a GPTQ checkpoint.

    Parameters
    ----------
    folder : str or os.PathLike
        Holds ``config.json`` and safetensors files.
    base : str or os.PathLike
        A GGUF file of the same model, or its coded file.
    output : str or os.PathLike
        The GGUF file to write, whole or not at all.
    float_fallback : bool
        Store as F32 the layers that no quantized type holds exactly, instead of refusing them.
    force : bool
        Replace an output that exists already.
    progress : callable, optional
        Told steps done, steps in all, and the tensor at work. Each tensor is two steps: checked, written.

    Returns
    -------
    ImportResult

    Raises
    ------
    QuantizationError
        If the checkpoint is of a kind that is not imported, does not fit the base, or GGUF cannot hold it exactly; names the
        layer and says what would work.
    FormatError
        If a file is missing or damaged.
    LazyWeightsError
        If the output is there already and `force` is not given, or cannot be written.
    """
    started = time.monotonic()
    check_output(output, force, base)
    checkpoint = GptqCheckpoint(folder)
    with model_path(base) as plain, open_gguf(plain.path) as (view, scan):
        metadata = read_metadata(view, max_array=1024)
        try:
            tensors = _plan(checkpoint, scan, metadata)
            _check_tokens(metadata, tensors)
        except QuantizationError as error:
            error.path = error.path or checkpoint.folder
            raise
        n_steps = 2 * len(tensors)
        for index, tensor in enumerate(tensors):
            if progress is not None:
                progress(index, n_steps, tensor.name)
            tensor.type_id = _choose_type(checkpoint, tensor, float_fallback)
        known = {tensor.name for tensor in scan.tensors}
        written = write_gguf(
            plain.path,
            output,
            {tensor.name: _maker(checkpoint, tensor) for tensor in tensors},
            new_shapes={tensor.name: tensor.shape for tensor in tensors if tensor.name not in known},
            pairs={"general.file_type": u32_pair(_file_type(tensors)), "general.quantization_version": u32_pair(2)},
            drop_pairs=("quantize.imatrix.",),
            force=force,
            progress=None if progress is None else lambda n, _, name: progress(min(len(tensors) + n, n_steps), n_steps, name),
        )
    types: dict[str, int] = {}
    for tensor in tensors:
        if tensor.is_quantized:
            types[type_name(tensor.type_id)] = types.get(type_name(tensor.type_id), 0) + 1
    n_quantized = sum(types.values())
    return ImportResult(
        os.fspath(output), written.output_bytes, written.n_weights, n_quantized, len(written.tensors) - n_quantized, types,
        time.monotonic() - started,
    )  # fmt: skip


# What goes where.


def _plan(checkpoint: GptqCheckpoint, scan: Scan, metadata: Mapping[str, Any]) -> list[_Tensor]:
    """Return the tensors to write, in the order of the file, shapes set and checked."""
    config = checkpoint.config
    hf_name, family = family_of(config.get("architectures"))
    architecture = metadata.get("general.architecture")
    if architecture != family.architecture:
        raise QuantizationError(
            f"the base is not of this model: {hf_name} is {family.architecture} in GGUF, and the base {architecture}"
        )
    if scan.tensors and metadata.get("split.count", 0) not in (0, 1):
        raise QuantizationError("the base is one shard of several; merge them (llama-gguf-split --merge) or give a whole one")
    _check_config(config, metadata, family.architecture)
    found = _gather(checkpoint, family, config)
    for tensor in found.values():
        _set_shape(checkpoint, tensor, _number(config, "num_local_experts", _number(config, "num_experts", 0)))
    names = _names_of_base(scan) if scan.tensors else _names_of_family(family, config, found)
    if "output.weight" in names and "output.weight" not in found and config.get("tie_word_embeddings", True):
        found["output.weight"] = _tied_output(found)
    missing = [name for name in names if name not in found]
    if missing:
        raise QuantizationError(f"the checkpoint has no array for {len(missing)} tensors; the first is {missing[0]}")
    for tensor in list(found.values()):
        if tensor.name not in names and not _may_be_left_out(checkpoint, tensor, found, config):
            first = next(iter(tensor.parts.values())).name
            where = "the base" if scan.tensors else f"a GGUF of {hf_name}"
            raise QuantizationError(f"{where} has no tensor {tensor.name} for this array", tensor=first)
    _check_shapes(scan, found)
    return [found[name] for name in names]


def _gather(checkpoint: GptqCheckpoint, family: Family, config: Mapping[str, Any]) -> dict[str, _Tensor]:
    """Collect the arrays and layers of the checkpoint by the tensor that they go to."""
    n_heads = _number(config, "num_attention_heads", 0)
    heads = {"q": n_heads, "k": _number(config, "num_key_value_heads", n_heads)} if family.interleaves else {}
    found: dict[str, _Tensor] = {}
    arrays = [(f"{name}.weight", name, True) for name in checkpoint.layers] + [(name, name, False) for name in checkpoint.floats]
    for full, name, is_quantized in arrays:
        target = target_of(full)
        if target is None:
            continue
        tensor = found.setdefault(target.name, _Tensor(target.name, has_experts=target.expert is not None))
        place = target.expert or 0
        if place in tensor.parts:
            raise QuantizationError(f"{tensor.parts[place].name} goes to the tensor {target.name} too", tensor=name)
        tensor.parts[place] = _Part(name, is_quantized, heads.get(target.heads, 0))
    return found


def _set_shape(checkpoint: GptqCheckpoint, tensor: _Tensor, n_experts: int) -> None:
    shapes: set[tuple[int, ...]] = set()
    for part in tensor.parts.values():
        if part.is_quantized:
            layer = checkpoint.layer(part.name)
            shapes.add((layer.n_inputs, layer.n_outputs))
        else:
            shapes.add(checkpoint.float_shape(part.name)[::-1])
    if len(shapes) > 1:
        raise QuantizationError(f"the experts of {tensor.name} have different shapes: {sorted(shapes)}")
    (tensor.shape,) = shapes
    if not tensor.shape or 0 in tensor.shape:
        raise QuantizationError("an array without elements cannot be imported", tensor=tensor.parts[min(tensor.parts)].name)
    if tensor.has_experts:
        if sorted(tensor.parts) != list(range(n_experts)):
            raise QuantizationError(f"{tensor.name} needs {n_experts} experts, and the checkpoint has {len(tensor.parts)}")
        tensor.shape = (*tensor.shape, n_experts)


def _number(config: Mapping[str, Any], name: str, default: int) -> int:
    value = config.get(name)
    return value if isinstance(value, int) else default


def _names_of_base(scan: Scan) -> list[str]:
    return [tensor.name for tensor in scan.tensors if tensor.name not in COPIED]


def _names_of_family(family: Family, config: Mapping[str, Any], found: Mapping[str, _Tensor]) -> list[str]:
    """Return the tensors of a file whose base has only metadata."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = str(rope.get("rope_type", rope.get("type", ""))) if isinstance(rope, dict) else ""
    if kind in ("llama3", "longrope"):
        raise QuantizationError(
            f"rotary embedding of the kind {kind} needs a table that a base without tensors does not have: give a GGUF of this "
            "model that has tensors, of any type"
        )
    names = expected_names(family, _number(config, "num_hidden_layers", 0))
    if config.get("tie_word_embeddings", "output.weight" not in found) is False:
        names.append("output.weight")
    biases = ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias")
    return names + sorted(name for name in found if name.endswith(biases) and name not in names and family.interleaves)


def _tied_output(found: Mapping[str, _Tensor]) -> _Tensor:
    """Return an output matrix that is the token embedding: the checkpoint ties them, the base stores both."""
    tied = found.get("token_embd.weight")
    if tied is None:
        raise QuantizationError("the checkpoint has no token embedding")
    return _Tensor("output.weight", tied.parts, False, tied.shape)


def _may_be_left_out(
    checkpoint: GptqCheckpoint, tensor: _Tensor, found: Mapping[str, _Tensor], config: Mapping[str, Any]
) -> bool:
    if tensor.is_quantized:
        return False
    (part,) = tensor.parts.values() if len(tensor.parts) == 1 else (None,)
    if part is None:
        return False
    values = checkpoint.float_array(part.name).values
    if tensor.name.endswith(".bias"):
        return not np.any(to_float32(values))
    if tensor.name == "output.weight" and config.get("tie_word_embeddings") and "token_embd.weight" in found:
        (tied,) = found["token_embd.weight"].parts.values()
        return not tied.is_quantized and np.array_equal(values, checkpoint.float_array(tied.name).values)
    return False


# Does the base fit?


def _check_config(config: Mapping[str, Any], metadata: Mapping[str, Any], architecture: str) -> None:
    """Compare what both configurations say; a number that one of them lacks is not compared."""
    heads = metadata.get(f"{architecture}.attention.head_count")
    pairs = (
        ("block_count", "num_hidden_layers", None), ("embedding_length", "hidden_size", None),
        ("feed_forward_length", "intermediate_size", None), ("attention.head_count", "num_attention_heads", None),
        ("attention.head_count_kv", "num_key_value_heads", heads), ("expert_count", "num_local_experts", None),
        ("expert_count", "num_experts", None), ("attention.key_length", "head_dim", None),
    )  # fmt: skip
    for key, name, default in pairs:
        ours, theirs = config.get(name), metadata.get(f"{architecture}.{key}", default)
        if isinstance(ours, int) and isinstance(theirs, int) and ours != theirs:
            said = f"{name} is {ours} in config.json, and {architecture}.{key} is {theirs} in the base"
            raise QuantizationError(f"the base is not of this model: {said}")
    rope = config.get("rope_parameters")
    theta = config.get("rope_theta", rope.get("rope_theta") if isinstance(rope, dict) else None)
    for key, name, number in (
        ("attention.layer_norm_rms_epsilon", "rms_norm_eps", config.get("rms_norm_eps")), ("rope.freq_base", "rope_theta", theta),
    ):  # fmt: skip
        known = metadata.get(f"{architecture}.{key}")
        if isinstance(number, int | float) and isinstance(known, float) and np.float32(number) != np.float32(known):
            said = f"{name} is {number} in config.json, and {architecture}.{key} is {known:g} in the base"
            raise QuantizationError(f"the base is not of this model: {said}")
    if not isinstance(config.get("num_hidden_layers"), int) or not isinstance(config.get("num_attention_heads"), int):
        raise QuantizationError("config.json lacks num_hidden_layers or num_attention_heads")


def _check_shapes(scan: Scan, found: Mapping[str, _Tensor]) -> None:
    for tensor in scan.tensors:
        if tensor.name in found and found[tensor.name].shape != tensor.shape:
            raise QuantizationError(
                "the base is not of this model: the shape (columns first) differs", tensor=tensor.name,
                expected=tensor.shape, found=found[tensor.name].shape,
            )  # fmt: skip


def _check_tokens(metadata: Mapping[str, Any], tensors: list[_Tensor]) -> None:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list | ElidedArray):
        raise QuantizationError("the base has no tokenizer (tokenizer.ggml.tokens)")
    n_tokens = tokens.length if isinstance(tokens, ElidedArray) else len(tokens)
    (n_rows,) = {tensor.shape[-1] for tensor in tensors if tensor.name == "token_embd.weight"} or {n_tokens}
    if n_rows != n_tokens:
        raise QuantizationError(f"the base is not of this model: it has {n_tokens} tokens, and the checkpoint {n_rows}")


# What becomes of it.


def _choose_type(checkpoint: GptqCheckpoint, tensor: _Tensor, float_fallback: bool) -> int:
    """Return the smallest type that holds every part."""
    if not tensor.is_quantized:
        dtypes = {checkpoint.float_array(part.name).dtype for part in tensor.parts.values()}
        is_plain = len(tensor.shape) > 1 and not tensor.name.endswith(".ffn_gate_inp.weight")
        return TYPE_BY_NAME[dtypes.pop()].type_id if is_plain and len(dtypes) == 1 else F32
    chosen = 0  # the ids of the types that come into question grow with their size
    for part in tensor.parts.values():
        try:
            if not part.is_quantized:
                raise QuantizationError("this expert is not quantized, and others of its layer are", tensor=part.name)
            layer = checkpoint.layer(part.name)
            block_groups(layer)
            chosen = max(chosen, smallest_type(layer))
        except QuantizationError as error:
            if float_fallback:
                return F32
            error.path = error.path or checkpoint.folder
            raise
    return chosen


def _maker(checkpoint: GptqCheckpoint, tensor: _Tensor) -> Callable[[], NewTensor]:
    return lambda: (tensor.type_id, tensor.shape, _chunks(checkpoint, tensor))


def _chunks(checkpoint: GptqCheckpoint, tensor: _Tensor) -> Iterator[np.ndarray]:
    for _, part in sorted(tensor.parts.items()):
        order = interleaved(tensor.shape[-1 if len(tensor.shape) == 1 else 1], part.n_heads) if part.n_heads else None
        if part.is_quantized:
            yield from pack_layer(checkpoint.layer(part.name), tensor.type_id, order)
            continue
        values = checkpoint.float_array(part.name).values
        rows = max(1, CHUNK_VALUES * len(values) // max(values.size, 1))
        for start in range(0, len(values), rows):
            chunk = values[start : start + rows] if order is None else values[order[start : start + rows]]
            yield to_float32(chunk) if tensor.type_id == F32 else chunk


def _file_type(tensors: list[_Tensor]) -> int:
    """Return ``general.file_type``: that of the type that most weights of matrices have."""
    weights: dict[str, int] = {}
    for tensor in tensors:
        if len(tensor.shape) > 1:
            name = GGML_TYPES[tensor.type_id].name
            weights[name] = weights.get(name, 0) + int(np.prod(tensor.shape))
    if not weights:
        raise LazyWeightsError("there is no matrix to import")
    return FILE_TYPES[max(weights, key=lambda name: weights[name])]
