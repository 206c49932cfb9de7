"""Decoding without vector instructions: what a CPU that lacks AVX-512 runs, measured on one that has it.

Usage: python benchmarks/scalar_speed.py [--quick] [--models NAME ...]

Decodes a coded file from the page cache, checksums included, nothing written, on one core: by the vector kernels, and by their
scalar twins, which are compiled for this run (half a minute). Seven runs, in turns, after both gave the right SHA-256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import Model, compare, console, finish, interleave, load_models, one_core, parse_arguments, scratch, speed, verify

from lazyweights.container import batch_decode, group_decode
from lazyweights.container.decoder import iter_decoded
from lazyweights.container.encoder import encode_file
from tests.container.coded_samples import scalar_decode_batch, scalar_decode_groups

ALL_MODELS = ("smollm2", "gemma")
VECTOR = (batch_decode.decode_batch, group_decode.decode_groups)


@contextmanager
def kernels(functions: tuple[Any, Any]) -> Iterator[None]:
    """Decode with a pair of compiled functions in place of `VECTOR`."""
    batch_decode.decode_batch, group_decode.decode_groups = functions
    try:
        yield
    finally:
        batch_decode.decode_batch, group_decode.decode_groups = VECTOR


def decode(coded: Path, functions: tuple[Any, Any]) -> None:
    """Decode and drop what comes out."""
    with kernels(functions):
        for _ in iter_decoded(coded, threads=1):
            pass


def sha256(coded: Path, functions: tuple[Any, Any]) -> str:
    """Return the SHA-256 of what a pair of compiled functions decodes."""
    digest = hashlib.sha256()
    with kernels(functions):
        for part in iter_decoded(coded, threads=1):
            digest.update(part)
    return digest.hexdigest()


def measure(model: Model, runs: int) -> dict[str, Any]:
    """Time one model."""
    scalar = (scalar_decode_batch(), scalar_decode_groups())
    with scratch(model.n_bytes) as folder:
        coded = folder / "model.lw"
        encode_file(model.path, coded)
        for functions in (VECTOR, scalar):
            verify(sha256(coded, functions) == model.sha256, "decoding")
        with one_core():
            timings = interleave({"vector": lambda: decode(coded, VECTOR), "scalar": lambda: decode(coded, scalar)}, runs)
    found = {**model.report(), **{name: speed(model.n_bytes, timing) for name, timing in timings.items()}}
    found["scalar_vs_vector"] = compare(timings["scalar"], timings["vector"])
    console.print(f"{model.label}: vector {found['vector']['median']} MB/s, scalar {found['scalar']['median']} MB/s")
    return found


def main() -> None:
    """Measure and write the JSON."""
    args = parse_arguments(__doc__, ALL_MODELS)
    found, missing = load_models(args.models[:1] if args.quick else args.models)
    measured = {model.key: measure(model, 3 if args.quick else 7) for model in found}
    finish("scalar_speed", args, {"models": measured, "skipped": missing})


if __name__ == "__main__":
    main()
