"""Peak memory of encode, decode and verify, each a process of its own.

Usage: python benchmarks/memory.py [--quick]

Measured on a real file and on a GGUF of 6 GB (--quick: 0.8 GB) that is written here: the tensors of Gemma-3-270m four times
over, as new layers, each with several times the rows, rotated by random amounts; 944 tensors, as many as a model of 100
layers has. MB are 10^6 bytes of the largest resident set that the kernel saw (`ru_maxrss`; it counts no page cache).
Encoding verifies. The large file is deleted as soon as it is encoded, and what the coded file decodes to is compared by
SHA-256. The peer is the zstd command at level 3.

``first run`` is a process that finds no compiled kernels and has them compiled, by processes of its own one after the other.
Its row has the peak of the largest of all these processes, and what all of them held together at a time: the sum of their
resident sets, sampled every 20 ms. Pages that they share are counted once for each.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from common import (
    COPY_BYTES,
    QUICK_RESULTS,
    Model,
    command_line,
    console,
    file_sha256,
    finish,
    load_models,
    parse_arguments,
    scratch,
    verify,
)

from lazyweights.container.gguf_scan import TensorInfo, scan_gguf
from tests.make_gguf import pack_header, pack_pair, pack_tensor_info

LARGE_BYTES, QUICK_LARGE_BYTES = 6_000_000_000, 800_000_000
LAYER_COPIES = 4
FREE_BYTES = 16_000_000_000
MANY_THREADS = 8
ALIGNMENT = 32
SEED = 3
SAMPLE_SECONDS = 0.02
LAUNCHER = """
import os, subprocess, sys, time

def resident(pid):
    try:
        with open(f"/proc/{pid}/statm") as file:
            pages = int(file.read().split()[1])
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            children = file.read().split()
    except (OSError, IndexError):
        return 0
    return pages + sum(resident(child) for child in children)

interval, *command = sys.argv[1:]
process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
together = pid = 0
while pid == 0:
    if float(interval):
        together = max(together, resident(process.pid))
        time.sleep(float(interval))
    pid, status, usage = os.wait4(process.pid, os.WNOHANG if float(interval) else 0)
process.returncode = os.waitstatus_to_exitcode(status)
print(1024 * usage.ru_maxrss, together * os.sysconf("SC_PAGE_SIZE"))
sys.exit(process.returncode and 1)
"""
"""A small process between: what the kernel counts for a child starts with what its parent holds when it is started. It
prints the bytes of the largest resident set of the command and of the processes that it started, and, where it is given an
interval in seconds, the largest sum of the resident sets of all of them."""
Row = dict[str, Any]


def peak(
    command: Sequence[str | os.PathLike[str]], variables: dict[str, str] | None = None, interval: float = 0
) -> tuple[float, float, float]:
    """Run a command; return the peak resident set of its largest process and of all together (0 without interval), in MB, and
    its seconds."""
    launcher = [sys.executable, "-S", "-E", "-c", LAUNCHER, str(interval), *(os.fspath(part) for part in command)]
    start = time.perf_counter()
    done = subprocess.run(launcher, stdout=subprocess.PIPE, env={**os.environ, **(variables or {})}, check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{Path(command[0]).name} failed with exit code {done.returncode}")
    largest, together = (int(n) / 1e6 for n in done.stdout.split())
    return largest, together, seconds


def measure(
    rows: list[Row], file: str, n_bytes: int, what: str, command: Sequence[str | os.PathLike[str]], threads: int,
    variables: dict[str, str] | None = None, interval: float = 0,
) -> None:  # fmt: skip
    """Run a command and append its row."""
    megabytes, together, seconds = peak(command, variables, interval)
    row: Row = {"file": file, "bytes": n_bytes, "command": what, "threads": threads, "peak_mb": round(megabytes, 1),
                "seconds": round(seconds, 2)}  # fmt: skip
    if interval:
        row["together_mb"] = round(together, 1)
    rows.append(row)
    of_all = f", {together:.0f} MB together" if interval else ""
    console.print(f"{file}: {what}, {threads} thread(s): {megabytes:.0f} MB{of_all}, {seconds:.1f} s")


def measure_model(rows: list[Row], model: Model, folder: Path, skipped: dict[str, str]) -> None:
    """A real file: every verb, with few and with many threads, and the peer."""
    coded, back = folder / "coded.lw", folder / "back.gguf"
    run = command_line()
    cores = os.cpu_count() or 1

    def add(what: str, command: Sequence[str | os.PathLike[str]], threads: int) -> None:
        measure(rows, model.label, model.n_bytes, what, command, threads)

    def add_first(what: str, command: Sequence[str | os.PathLike[str]]) -> None:
        kernels = {"NUMBA_CACHE_DIR": str(folder / what)}
        measure(rows, model.label, model.n_bytes, f"{what}, first run", command, cores, kernels, SAMPLE_SECONDS)

    add_first("encode", [*run, "encode", f"-T{cores}", "-f", model.path, "-o", coded])
    add_first("decode", [*run, "decode", f"-T{cores}", "-f", coded, "-o", back])
    verify(file_sha256(back) == model.sha256, "lazyweights decode")
    peak([*run, "encode", "-T1", "-f", model.path, "-o", coded])  # compiled kernels are on disk from here on
    for threads in sorted({1, cores, MANY_THREADS}):
        add("encode", [*run, "encode", f"-T{threads}", "-f", model.path, "-o", coded], threads)
        add("decode", [*run, "decode", f"-T{threads}", "-f", coded, "-o", back], threads)
        verify(file_sha256(back) == model.sha256, "lazyweights decode")
        add("verify", [*run, "verify", f"-T{threads}", coded], threads)
    if shutil.which("zstd") is None:
        skipped["zstd"] = "there is no zstd command"
        return
    packed = folder / "packed.zst"
    add("zstd -3", ["zstd", "-q", "-f", "-3", "-T1", model.path.resolve(), "-o", packed], 1)
    add("zstd -d", ["zstd", "-q", "-f", "-d", packed, "-o", back], 1)
    verify(file_sha256(back) == model.sha256, "zstd")


def copy_range(source: BinaryIO, sink: BinaryIO, digest: Any, offset: int, n_bytes: int) -> None:
    """Copy a part of a file in small steps."""
    source.seek(offset)
    while n_bytes:
        block = source.read(min(n_bytes, COPY_BYTES))
        sink.write(block)
        digest.update(block)
        n_bytes -= len(block)


def write_large(model: Path, target: Path, n_bytes: int) -> tuple[int, str, int]:
    """Write the large file in little memory; return its size, its SHA-256 and its number of tensors."""
    with open(model, "rb") as source:
        scan = scan_gguf(source.read(1 << 25), os.fstat(source.fileno()).st_size)
        tensors = [scan.tensors[s.tensor] for s in scan.spans if s.tensor is not None]
        repeats = max(1, n_bytes // (LAYER_COPIES * sum(t.n_bytes for t in tensors)))
        listed: list[tuple[TensorInfo, int]] = []
        infos, offset = [], 0
        for copy in range(LAYER_COPIES):
            for t in tensors:
                n = repeats if len(t.shape) > 1 else 1
                shape = (t.shape[0], t.shape[1] * n, *t.shape[2:]) if len(t.shape) > 1 else t.shape
                infos.append(pack_tensor_info(f"blk.{copy}.{t.name}", t.type_id, shape, offset))
                listed.append((t, n))
                offset += t.n_bytes * n + -t.n_bytes * n % ALIGNMENT
        header = pack_header(len(listed), 1) + pack_pair("general.architecture", "gemma3") + b"".join(infos)
        header += bytes(-len(header) % ALIGNMENT)
        digest = hashlib.sha256(header)
        rng = np.random.default_rng(SEED)
        with open(target, "wb") as sink:
            sink.write(header)
            for t, n in listed:
                rows = t.shape[1] if len(t.shape) > 1 else 1
                for _ in range(n):
                    first = int(rng.integers(rows)) * (t.n_bytes // rows)
                    copy_range(source, sink, digest, t.offset + first, t.n_bytes - first)
                    copy_range(source, sink, digest, t.offset, first)
                padding = bytes(-t.n_bytes * n % ALIGNMENT)
                sink.write(padding)
                digest.update(padding)
    return target.stat().st_size, digest.hexdigest(), len(listed)


def measure_large(rows: list[Row], model: Model, folder: Path, n_bytes: int) -> dict[str, Any]:
    """The large file: encode, delete, verify, decode."""
    large, coded, back = folder / "large.gguf", folder / "large.lw", folder / "back.gguf"
    size, sha256, n_tensors = write_large(model.path, large, n_bytes)
    label = f"synthetic, {size / 1e9:.1f} GB, {n_tensors} tensors"
    cores = os.cpu_count() or 1
    run = command_line()
    measure(rows, label, size, "encode", [*run, "encode", f"-T{cores}", large, "-o", coded], cores)
    large.unlink()
    coded_bytes = coded.stat().st_size
    measure(rows, label, size, "verify", [*run, "verify", f"-T{cores}", coded], cores)
    measure(rows, label, size, "decode", [*run, "decode", f"-T{cores}", coded, "-o", back], cores)
    verify(file_sha256(back) == sha256, "lazyweights decode of the large file")
    return {"label": label, "bytes": size, "sha256": sha256, "coded_bytes": coded_bytes}


def main() -> None:
    """Measure and write the JSON."""
    args = parse_arguments(__doc__)
    found, skipped = load_models(["smollm2" if args.quick else "gemma"])
    rows: list[Row] = []
    files = [model.report() for model in found]
    n_bytes = QUICK_LARGE_BYTES if args.quick else LARGE_BYTES
    with scratch(0, in_memory=False) as folder:
        measure_model(rows, found[0], folder, skipped)
    if shutil.disk_usage(QUICK_RESULTS).free < (FREE_BYTES if not args.quick else 4 * n_bytes):
        skipped["synthetic"] = f"less than {FREE_BYTES / 1e9:.0f} GB of disk are free"
    else:
        with scratch(0, in_memory=False) as folder:
            files.append(measure_large(rows, found[0], folder, n_bytes))
    finish("memory", args, {"rows": rows, "files": files, "skipped": skipped})


if __name__ == "__main__":
    main()
