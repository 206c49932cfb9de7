"""Random access: one row group of 64 rows of one tensor, warm, from an open coded file.

Usage: python benchmarks/random_access.py [--quick] [--models NAME ...]

Row groups are drawn at random, the same ones for each peer, and each call is timed alone. Beside ``get_rows``: a zstd -3
frame of the same rows (what a seekable zstd file would hold), and copying the rows from the mapped source.

That a call reads its own bytes only is proven rather than trusted: of a copy of the coded file everything but the part
read at opening and the payload of that row group is left out (holes, so zeros), and the rows still come back right.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from common import Model, console, finish, load_models, parse_arguments, scratch, verify

import lazyweights
from lazyweights.container.encoder import encode_file
from lazyweights.container.reader import CodedFile

ALL_MODELS = ("smollm2", "gemma")
TENSORS = ("token_embd.weight", "blk.0.ffn_gate.weight", "blk.0.ffn_down.weight")
GROUP_ROWS = 64
N_CALLS, QUICK_CALLS = 2000, 200
PROVEN_GROUPS = 3
SEED = 5


def timed(calls: Sequence[int], works: dict[str, Callable[[int], object]]) -> dict[str, dict[str, float]]:
    """Microseconds of each work, median and 99th percentile over the calls, works in turns."""
    for call in calls[: len(calls) // 10]:
        for work in works.values():
            work(call)
    taken: dict[str, list[float]] = {name: [] for name in works}
    for call in calls:
        for name, work in works.items():
            start = time.perf_counter_ns()
            work(call)
            taken[name].append((time.perf_counter_ns() - start) / 1000)
    return {
        name: {"median": round(statistics.median(t), 1), "p99": round(float(np.percentile(t, 99)), 1),
               "min": round(min(t), 1), "max": round(max(t), 1)}
        for name, t in taken.items()
    }  # fmt: skip


def check_isolated(coded: Path, folder: Path, name: str, start: int, stop: int, expected: bytes) -> None:
    """Read rows from a copy of the file that holds their payload and nothing else of the payload section."""
    with lazyweights.open(coded) as file:
        layout = file.layout
        info = file.tensor_info(name)
        first = next(unit for i, _, unit, _ in layout.spans() if i == info.span) + start // GROUP_ROWS
        at, n_bytes = int(layout.offsets()[first]), file.payload_bytes(name, start, stop)
        verify(n_bytes == int(layout.sizes[first]), "payload_bytes")
    alone = folder / "alone.lw"
    with open(coded, "rb") as whole, open(alone, "wb") as part:
        part.write(whole.read(layout.payload_offset))
        part.truncate(layout.file_size)
        for file_ in (whole, part):
            file_.seek(at)
        part.write(whole.read(n_bytes))
    with lazyweights.open(alone) as file:
        verify(file.get_rows(name, start, stop).tobytes() == expected, f"{name} from a file with only its own bytes")


def measure_tensor(model: Model, file: CodedFile, coded: Path, folder: Path, name: str, n_calls: int) -> dict[str, Any]:
    """One tensor of one model."""
    info = file.tensor_info(name)
    rows = info.shape[1]
    row_bytes = info.n_bytes // rows
    n_groups = rows // GROUP_ROWS
    mapped = memoryview(np.memmap(model.path, np.uint8, "r"))

    def source_rows(group: int) -> memoryview:
        at = info.offset + group * GROUP_ROWS * row_bytes
        return mapped[at : at + GROUP_ROWS * row_bytes]

    def ours(group: int) -> np.ndarray:
        return file.get_rows(name, group * GROUP_ROWS, (group + 1) * GROUP_ROWS)

    calls = np.random.default_rng(SEED).integers(0, n_groups, n_calls).tolist()
    compressor, decompressor = zstandard.ZstdCompressor(level=3, write_checksum=True), zstandard.ZstdDecompressor()
    frames = {group: compressor.compress(source_rows(group)) for group in set(calls)}
    for group, frame in frames.items():
        verify(ours(group).tobytes() == source_rows(group), f"{model.label} {name}")
        verify(decompressor.decompress(frame) == source_rows(group), "zstd -3")
    for group in calls[:PROVEN_GROUPS]:
        start = group * GROUP_ROWS
        check_isolated(coded, folder, name, start, start + GROUP_ROWS, bytes(source_rows(group)))
    payloads = [file.payload_bytes(name, group * GROUP_ROWS, (group + 1) * GROUP_ROWS) for group in frames]
    times = timed(calls, {"ours": ours, "zstd -3 frame": lambda group: decompressor.decompress(frames[group]),
                          "copy of the source": lambda group: bytes(source_rows(group))})  # fmt: skip
    console.print(f"{model.label} {name}: {times['ours']['median']} us")
    return {
        "model": model.key, "tensor": name, "shape": info.shape, "type_id": info.type_id, "calls": n_calls,
        "distinct_groups": len(frames), "source_bytes": GROUP_ROWS * row_bytes,
        "payload_bytes": {"median": round(statistics.median(payloads)), "max": max(payloads)},
        "zstd_frame_bytes": {"median": round(statistics.median(map(len, frames.values())))},
        "microseconds": times,
    }  # fmt: skip


def measure(model: Model, n_calls: int) -> dict[str, Any]:
    """All tensors of one model."""
    with scratch(2 * model.n_bytes) as folder:
        coded = folder / "coded.lw"
        encode_file(model.path, coded)
        opening = []
        for _ in range(10):
            start = time.perf_counter()
            with lazyweights.open(coded):
                opening.append(1000 * (time.perf_counter() - start))
        with lazyweights.open(coded) as file:
            layout = file.layout
            names = [name for name in TENSORS if name in file]
            rows = [measure_tensor(model, file, coded, folder, name, n_calls) for name in names]
    return {
        **model.report(), "coded_bytes": layout.file_size, "read_at_opening": layout.payload_offset,
        "opening_ms": round(statistics.median(opening), 1), "tensors": rows,
    }  # fmt: skip


def main() -> None:
    """Measure and write the JSON."""
    args = parse_arguments(__doc__, ALL_MODELS)
    found, missing = load_models(args.models[:1] if args.quick else args.models)
    measured = {model.key: measure(model, QUICK_CALLS if args.quick else N_CALLS) for model in found}
    finish("random_access", args, {"group_rows": GROUP_ROWS, "models": measured, "skipped": missing})


if __name__ == "__main__":
    main()
