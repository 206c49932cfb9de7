"""Sizes by GGML type: raw, order-0 entropy, the coded file, zstd -19 and xz -9.

Usage: python benchmarks/type_sizes.py [--quick] [--models NAME ...]

Two kinds of data: one tensor of 4096 x 1024 weights (Gaussian rows of uneven scale, 0.2 % outliers) quantized to each
type by libgguf's reference code, and the tensors of the real files, taken together by type. Columns of the result:

- ``order0``: order-0 entropy of each tensor's code plane (float: exponents; vector codebook: grid indices), every other
  plane raw. What an ideal order-0 coder of the codes would need, without its table.
- ``order0_all``: order-0 entropy of every plane up to 16 bits wide. A lower bound that no coder reaches: the empirical
  entropy of 16-bit scales counts no table, which would be as large as the scales.
- ``ours``: payload and unit table of the coded tensors. ``ours_all``: with header, head and tables (one-tensor files).

A type is marked where ours is larger than its ``order0``. zstd and xz take at most the first 32 MiB of a type's bytes in a
real file (``peer_input_bytes``). The first run takes some minutes, most of it in them; later runs take their sizes from the
JSON.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import Model, console, finish, load_models, parse_arguments, scratch
from peers import SizeCache

from lazyweights.blocks import GGML_TYPES, TYPE_BY_NAME, Planes, join, plane_specs, split
from lazyweights.container.decoder import verify_file
from lazyweights.container.encoder import encode_file
from lazyweights.container.inspect import inspect_file
from lazyweights.container.reader import CodedFile
from tests.make_gguf import build_gguf, gaussian_weights, quantized_tensor_bytes

ALL_MODELS = ("smollm2", "gemma", "reference-f16", "reference-bf16", "reference-q8_0")
SHAPE, QUICK_SHAPE = (1024, 4096), (1024, 256)
SEED = 20
CODE_PLANES = ("codes", "exponent", "index", "values")
DERIVED_PLANES = ("escape",)
"""Planes that no bits of the packed block stand for: they cost their entropy, not their width."""
COUNT_STEP = 1 << 22
MAX_COUNTED_BITS = 16
PEER_BYTES = 1 << 25


def entropy_bytes(values: np.ndarray) -> float:
    """Order-0 entropy of an array of unsigned integers of up to 16 bits, in bytes for all of it.

    >>> entropy_bytes(np.array([0, 1, 2, 3] * 4, np.uint8))
    4.0
    """
    flat = values.reshape(-1)
    counts = np.zeros(1 << 16, np.int64)
    for start in range(0, flat.size, COUNT_STEP):
        counts += np.bincount(flat[start : start + COUNT_STEP], minlength=counts.size)
    used = counts[counts > 0]
    return float(np.sum(used * (np.log2(flat.size) - np.log2(used)))) / 8


def order0_bytes(type_id: int, data: bytes | np.ndarray, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return ``order0`` and ``order0_all`` of a tensor, in bytes (see the module)."""
    planes = split(type_id, data, shape).planes
    specs = {spec.name: spec for spec in plane_specs(type_id)}
    code_plane = next(name for name in CODE_PLANES if name in specs)
    codes = everything = 0.0
    for name, plane in planes.items():
        raw = plane.size * specs[name].bits / 8
        coded = entropy_bytes(plane) if specs[name].bits <= MAX_COUNTED_BITS else raw
        codes += coded if name == code_plane or name in DERIVED_PLANES else raw
        everything += min(raw, coded) if name not in DERIVED_PLANES else coded
    return codes, everything


def simple_tensor_bytes(name: str, shape: tuple[int, int], rng: np.random.Generator) -> bytes:
    """Quantize to the types that no reference quantizer of libgguf writes, by rounding to the nearest code."""
    known = TYPE_BY_NAME[name]
    blocks = gaussian_weights(shape, rng).reshape(-1, known.block_size)
    largest = {"Q8_1": 127, "Q8_K": 127, "Q2_0": 1}[name]
    scale = np.maximum(np.abs(blocks).max(axis=1, keepdims=True), 1e-9) / largest
    codes = np.rint(blocks / scale).astype(np.int32)
    per_row = {"codes": (codes + (name == "Q2_0")) & 0xFF}
    if name == "Q8_K":
        per_row["scale"] = scale.astype(np.float32).view(np.uint32)
        per_row["block_sums"] = codes.reshape(len(codes), 16, 16).sum(axis=2) & 0xFFFF
    else:
        per_row["scale"] = scale.astype(np.float16).view(np.uint16)
    if name == "Q8_1":
        per_row["sum"] = (scale * codes.sum(axis=1, keepdims=True)).astype(np.float16).view(np.uint16)
    specs = plane_specs(known.type_id)
    planes = {s.name: np.ascontiguousarray(per_row[s.name].reshape(1, shape[1], -1).astype(s.dtype)) for s in specs}
    return join(Planes(known.type_id, (1, shape[1], shape[0]), planes)).tobytes()


def row(type_id: int, data: str, raw: int, order0: Sequence[float], ours: int, peers: dict[str, int]) -> dict[str, Any]:
    """One line of the result."""
    return {
        "type": GGML_TYPES[type_id].name,
        "data": data,
        "raw": raw,
        "order0": round(order0[0]),
        "order0_all": round(order0[1]),
        "ours": ours,
        "peer_input_bytes": min(raw, PEER_BYTES),
        **peers,
        "over_order0": bool(ours > order0[0]),
    }


def measure_types(shape: tuple[int, int], cache: SizeCache, peers: list[str], folder: Path) -> list[dict[str, Any]]:
    """One quantized tensor of every type."""
    rows = []
    datas: dict[str, bytes] = {}
    for type_id, known in GGML_TYPES.items():
        data = quantized_tensor_bytes(type_id, shape, np.random.default_rng(SEED))
        if data is None:
            data = simple_tensor_bytes(known.name, shape, np.random.default_rng(SEED))
        source, coded = folder / "one.gguf", folder / "one.lw"
        source.write_bytes(build_gguf([("blk.0.ffn_up.weight", type_id, shape, data)], {"general.architecture": "llama"}))
        result = encode_file(source, coded, force=True)
        verify_file(coded, against=source)
        ours = inspect_file(coded).tensors[0].coded_bytes
        assert ours is not None
        made = row(type_id, "Gaussian", len(data), order0_bytes(type_id, data, shape), ours, {})
        rows.append({**made, "ours_all": result.coded_bytes})
        datas[known.name] = data
        console.print(f"{known.name}: {len(data):,} -> {ours:,} bytes")
    sizes = cache.measure(datas, peers)
    return [{**made, **sizes[made["type"]]} for made in rows]


def measure_model(model: Model, cache: SizeCache, peers: list[str]) -> list[dict[str, Any]]:
    """The tensors of a real file by type."""
    mapped = np.memmap(model.path, np.uint8, "r")
    with scratch(model.n_bytes) as folder:
        coded = folder / "coded.lw"
        encode_file(model.path, coded)
        verify_file(coded, against=model.path)
        reports = {t.name: t for t in inspect_file(coded).tensors}
        with CodedFile(coded) as file:
            tensors = file.layout.head.tensors
    totals: dict[int, list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0])
    parts: dict[int, list[np.ndarray]] = defaultdict(list)
    for tensor in tensors:
        data = mapped[tensor.offset : tensor.offset + tensor.n_bytes]
        parts[tensor.type_id].append(data)
        found = (tensor.n_bytes, *order0_bytes(tensor.type_id, data, tensor.shape), reports[tensor.name].coded_bytes)
        totals[tensor.type_id] = [a + (b or 0) for a, b in zip(totals[tensor.type_id], found, strict=True)]
    rows = []
    for type_id, (raw, order0, order0_all, ours) in sorted(totals.items()):
        name = f"{model.label} {GGML_TYPES[type_id].name}"
        sizes = cache.measure({name: np.concatenate(parts.pop(type_id))[:PEER_BYTES]}, peers)[name]
        rows.append(row(type_id, model.label, int(raw), (order0, order0_all), int(ours), sizes))
    return rows


def main() -> None:
    """Measure and write the JSON."""
    args = parse_arguments(__doc__, ALL_MODELS)
    found, missing = load_models(args.models[:1] if args.quick else args.models)
    cache = SizeCache("type_sizes")
    peers = ["zstd -3"] if args.quick else ["zstd -19", "xz -9"]
    shape = QUICK_SHAPE if args.quick else SHAPE
    rows: list[dict[str, Any]] = []
    try:
        with scratch(1 << 27) as folder:
            rows += measure_types(shape, cache, peers, folder)
    except ImportError as error:
        missing["Gaussian"] = f"{error.name} cannot be imported"
    for model in found:
        rows += measure_model(model, cache, peers)
    finish("type_sizes", args, {
        "shape": shape, "seed": SEED, "rows": rows, "skipped": missing,
        "models": {model.key: model.report() for model in found}, "peer_sizes": cache.used,
    })  # fmt: skip


if __name__ == "__main__":
    main()
