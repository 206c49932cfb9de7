"""Whole-file sizes: the coded file beside zstd and ZipNN.

Usage: python benchmarks/sizes.py [--quick] [--models NAME ...]

Every output is decoded and compared. The first run takes some minutes, most of it in zstd -19, whose sizes later
runs take from the JSON. xz is compared by type in `type_sizes.py`: whole files would take it a quarter of an hour.
"""

from __future__ import annotations

import mmap
from typing import Any

from common import Model, console, finish, load_models, parse_arguments, scratch, zipnn_codec, zipnn_pack
from peers import SizeCache

from lazyweights.container.decoder import verify_file
from lazyweights.container.encoder import EncodeResult, encode_file

ALL_MODELS = ("smollm2", "gemma", "reference-f16", "reference-bf16", "reference-q8_0")
UNIT_MODELS = ("smollm2",)
"""Models that are coded with preset `unit` too."""


def code(model: Model, preset: str) -> EncodeResult:
    """Encode, and verify against the source."""
    with scratch(model.n_bytes) as folder:
        coded = folder / "coded.lw"
        result = encode_file(model.path, coded, preset=preset)
        verify_file(coded, against=model.path)
        if coded.stat().st_size != result.coded_bytes:
            raise SystemExit(f"{model.label}: the coded file has another size than was reported")
    return result


def measure(model: Model, cache: SizeCache, peers: list[str]) -> dict[str, Any]:
    """All sizes of one model."""
    dense = code(model, "dense")
    sizes: dict[str, int] = {"dense": dense.coded_bytes}
    if model.key in UNIT_MODELS:
        sizes["unit"] = code(model, "unit").coded_bytes
    with open(model.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        sizes |= cache.measure({model.label: data}, peers)[model.label]
    packed = zipnn_pack(model.path)
    if packed:
        sizes["zipnn"] = len(packed[1])
    console.print(f"{model.label}: {model.n_bytes:,} -> {dense.coded_bytes:,} bytes")
    return {
        "model": model.key,
        **model.report(),
        "n_weights": dense.n_weights,
        "sizes": sizes,
        "bpw_before": round(dense.source_bpw, 4),
        "bpw_after": round(dense.coded_bpw, 4),
        "saving": round(dense.saving, 5),
        "zipnn_dtype": packed[0] if packed else None,
    }


def main() -> None:
    """Measure and write the JSON."""
    args = parse_arguments(__doc__, ALL_MODELS)
    found, missing = load_models(args.models[:1] if args.quick else args.models)
    cache = SizeCache("sizes")
    peers = ["zstd -3"] if args.quick else ["zstd -3", "zstd -19"]
    make, reason = zipnn_codec()
    rows = [measure(model, cache, peers) for model in found]
    skipped = missing if make else {**missing, "zipnn": reason}
    finish("sizes", args, {"rows": rows, "skipped": skipped, "peer_sizes": cache.used})


if __name__ == "__main__":
    main()
