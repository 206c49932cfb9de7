"""Speed of decoding and encoding real files, beside zstd, xz and ZipNN in the same run.

Usage: python benchmarks/codec_speed.py [--quick] [--models NAME ...]

MB/s are 10^6 source bytes per second, from and to memory (page cache, tmpfs), median of seven runs that alternate with
those of the peers, after a warm-up. In the rows of one thread everything is kept on one core, so the helper threads that
``lazyweights encode`` (hashing) and the ``zstd`` command (input and output) start do not count for free.

- ``library``: decode the coded file and check its checksums into reused buffers, nothing written; zstd (3, with its
  checksum) streams into a reused buffer, or decodes with one call into one (system libzstd); ZipNN decodes from memory.
- ``process``: the whole command, start included, to ``/dev/null``.
- Encoding goes from file to file; ours with and without verification. zstd -19 and xz -9 once, on a slice.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import hashlib
import lzma
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from common import (
    Model,
    Timing,
    command_line,
    compare,
    console,
    file_sha256,
    finish,
    interleave,
    load_models,
    one_core,
    parse_arguments,
    run_quietly,
    scratch,
    speed,
    verify,
    zipnn_codec,
    zipnn_pack,
)

from lazyweights.container.decoder import _decode_units, read_layout, verify_file
from lazyweights.container.encoder import encode_file

ALL_MODELS = ("smollm2", "gemma", "reference-f16", "reference-bf16")
BUFFER_BYTES = 1 << 20
SLICE_BYTES = 1 << 24
OURS = "lazyweights"
Row = dict[str, Any]


def decode_ours(coded: Path, threads: int) -> None:
    """Decode a file and check its checksums, as `decode` does, but write nothing."""
    with open(coded, "rb") as file:
        layout = read_layout(file, coded.stat().st_size)
        for _ in _decode_units(layout, file.fileno(), threads, ""):
            pass


def zstd_streamer(packed: Path) -> Callable[[], None]:
    """Return what decodes a zstd file into a reused buffer, part by part."""
    buffer = bytearray(BUFFER_BYTES)

    def decode() -> None:
        with open(packed, "rb") as file:
            reader = zstandard.ZstdDecompressor().stream_reader(file, read_size=BUFFER_BYTES)
            while reader.readinto(buffer):
                pass

    return decode


def zstd_one_call(packed: Path, source: Path) -> Callable[[], None] | None:
    """Return what decodes a zstd frame with one call into a reused buffer: no window to copy. None without libzstd."""
    name = ctypes.util.find_library("zstd")
    if name is None:
        return None
    function = ctypes.CDLL(name).ZSTD_decompress
    function.restype = ctypes.c_size_t
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t]
    data = np.fromfile(packed, np.uint8)
    out = np.empty(source.stat().st_size, np.uint8)

    def decode() -> None:
        if function(out.ctypes.data, out.size, data.ctypes.data, data.size) != out.size:
            raise SystemExit("libzstd: an error in a frame that was verified before")

    decode()
    verify(np.array_equal(out, np.memmap(source, np.uint8, "r")), "libzstd")
    return decode


def zstd_file(source: Path, target: Path, level: int) -> None:
    """Compress a file on one thread."""
    compressor = zstandard.ZstdCompressor(level=level, write_checksum=True)
    with open(source, "rb") as file, open(target, "wb") as sink:
        compressor.copy_stream(file, sink, size=source.stat().st_size, read_size=BUFFER_BYTES)


def verified(model: Model, folder: Path) -> tuple[Path, Path]:
    """Return the coded file and the zstd -3 file, both decoded and compared."""
    coded, packed = folder / "model.lw", folder / "model.zst"
    encode_file(model.path, coded)
    verify_file(coded, against=model.path)
    zstd_file(model.path, packed, 3)
    digest = hashlib.sha256()
    with open(packed, "rb") as file:
        for part in zstandard.ZstdDecompressor().read_to_iter(file, read_size=BUFFER_BYTES):
            digest.update(part)
    verify(digest.hexdigest() == model.sha256, "zstd -3")
    run = folder / "command.gguf"
    run_quietly([*command_line(), "decode", "-q", "-f", "-T1", coded, "-o", run])
    verify(file_sha256(run) == model.sha256, "lazyweights decode")
    run.unlink()
    return coded, packed


def add(rows: list[Row], model: Model, verb: str, way: str, threads: int, timings: dict[str, Timing]) -> None:
    """Append the rows of runs that alternated, each with its ratio to ours."""
    ours = timings[OURS]
    for codec, timing in timings.items():
        made: Row = {"model": model.key, "verb": verb, "way": way, "threads": threads, "codec": codec}
        made["mb_per_s"] = speed(model.n_bytes, timing)
        if timing is not ours:
            made["ours_vs_this"] = compare(ours, timing)
        rows.append(made)
        console.print(f"{model.label}: {verb}, {way}, {threads} thread(s): {codec} {made['mb_per_s']['median']} MB/s")


def measure_decode(model: Model, coded: Path, packed: Path, runs: int, rows: list[Row], skipped: dict[str, str]) -> None:
    """Decode: in memory and as whole processes on one core, then on two threads."""
    works: dict[str, Callable[[], object]] = {OURS: lambda: decode_ours(coded, 1)}
    works["zstd -3, streamed"] = zstd_streamer(packed)
    one_call = zstd_one_call(packed, model.path)
    if one_call:
        works["zstd -3, one call"] = one_call
    else:
        skipped["zstd -3, one call"] = "there is no libzstd on this system"
    make, reason = zipnn_codec()
    best = zipnn_pack(model.path)
    if make and best:
        zipnn, data = make(best[0]), best[1]
        works["zipnn"] = lambda: zipnn.decompress(data)
    else:
        skipped["zipnn"] = reason
    with one_core():
        add(rows, model, "decode", "library", 1, interleave(works, runs))
    del works
    process: dict[str, Callable[[], object]] = {OURS: lambda: run_quietly([*command_line(), "decode", "-q", "-T1", "-c", coded])}
    if shutil.which("zstd"):
        process["zstd -3"] = lambda: run_quietly(["zstd", "-q", "-d", "-c", packed])
    else:
        skipped["zstd -3, process"] = "there is no zstd command"
    with one_core():
        add(rows, model, "decode", "process", 1, interleave(process, runs))


def measure_encode(model: Model, folder: Path, runs: int, rows: list[Row]) -> None:
    """Encode on one core."""
    target = folder / "timed"

    def ours(verify_too: bool) -> Callable[[], object]:
        return lambda: encode_file(model.path, target, threads=1, verify=verify_too, force=True)

    works: dict[str, Callable[[], object]] = {OURS: ours(True), "lazyweights --no-verify": ours(False)}
    works["zstd -1"] = lambda: zstd_file(model.path, target, 1)
    works["zstd -3"] = lambda: zstd_file(model.path, target, 3)
    with one_core():
        add(rows, model, "encode", "library", 1, interleave(works, runs))


def measure_scaling(model: Model, coded: Path, folder: Path, runs: int) -> list[Row]:
    """One thread against two, both free to run on any core."""
    target = folder / "timed"
    found = []
    verbs: dict[str, Callable[[int], object]] = {
        "decode": lambda threads: decode_ours(coded, threads),
        "encode": lambda threads: encode_file(model.path, target, threads=threads, force=True),
    }
    for verb, work in verbs.items():
        timings = interleave({str(n): functools.partial(work, n) for n in (1, 2)}, runs)
        made: Row = {"model": model.key, "verb": verb, **{f"threads_{n}": speed(model.n_bytes, t) for n, t in timings.items()}}
        made["two_vs_one"] = compare(timings["2"], timings["1"])
        found.append(made)
        console.print(f"{model.label}: {verb}, 2 threads: {made['two_vs_one']['ratio_of_medians']} times 1 thread")
    return found


def measure_slow_peers(model: Model) -> list[Row]:
    """One run of each slow compressor, on the middle of the file."""
    with open(model.path, "rb") as file:
        file.seek(max(0, model.n_bytes - SLICE_BYTES) // 2)
        data = file.read(SLICE_BYTES)
    works: dict[str, Callable[[], bytes]] = {
        "zstd -19": lambda: zstandard.ZstdCompressor(level=19).compress(data),
        "xz -9": lambda: lzma.compress(data, preset=9),
    }
    rows = []
    for codec, work in works.items():
        with one_core():
            start = time.perf_counter()
            packed = work()
            seconds = time.perf_counter() - start
        back = zstandard.ZstdDecompressor().decompress(packed) if codec != "xz -9" else lzma.decompress(packed)
        verify(back == data, codec)
        rows.append({"model": model.key, "codec": codec, "slice_bytes": len(data), "runs": 1,
                     "mb_per_s": round(len(data) / 1e6 / seconds, 2)})  # fmt: skip
    return rows


def main() -> None:
    """Measure and write the JSON."""
    args = parse_arguments(__doc__, ALL_MODELS)
    found, skipped = load_models(args.models[:1] if args.quick else args.models)
    rows: list[Row] = []
    scaling: list[Row] = []
    slow: list[Row] = []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for model in found:
        with scratch(4 * model.n_bytes) as folder:
            coded, packed = verified(model, folder)
            measure_decode(model, coded, packed, args.runs, rows, skipped)
            measure_encode(model, folder, args.runs, rows)
            slow += measure_slow_peers(model)
            if cores > 1:
                scaling += measure_scaling(model, coded, folder, args.runs)
            else:
                skipped["scaling"] = "this machine has one core"
    finish("codec_speed", args, {
        "models": {model.key: model.report() for model in found}, "rows": rows, "scaling": scaling, "slow_peers": slow,
        "skipped": skipped,
    })  # fmt: skip


if __name__ == "__main__":
    main()
