"""What the benchmarks share: models, timing, peers that may be missing, and the JSON they write.

Every script verifies bits first, warms up, and interleaves its runs with those of its peers (A B A B ...), so that
what else the machine does falls on both. ``--quick`` is for trying a script out: few runs, and the JSON goes to
``.cache/bench`` instead of ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import tables
import zstandard
from models import MODEL_DIR, REPOSITORY
from rich.console import Console
from rich.table import Table

import lazyweights

sys.path.append(str(REPOSITORY))  # tests.make_gguf builds GGUF files; an installed lazyweights comes before this

QUICK_RESULTS = REPOSITORY / ".cache" / "bench"
RUNS, QUICK_RUNS = 7, 2
COPY_BYTES = 1 << 22
PACKAGES = ("numpy", "numba", "zstandard", "xxhash", "gguf", "libgguf", "zipnn", "llama-cpp-python")

console = Console(stderr=True)


@dataclass(frozen=True)
class Model:
    """A file to measure on."""

    key: str
    label: str
    path: Path
    n_bytes: int
    sha256: str

    def report(self) -> dict[str, Any]:
        """What the JSON says of it."""
        return {"label": self.label, "bytes": self.n_bytes, "sha256": self.sha256}


SOURCES: dict[str, tuple[str, Callable[[Path], Path | None]]] = {
    "smollm2": ("SmolLM2-135M Q4_1", models.fetch_smollm2),
    "gemma": ("Gemma-3-270m Q4_K_M", models.fetch_gemma),
    "reference-f16": ("reference F16", lambda folder: models.reference_model(folder, "F16")),
    "reference-bf16": ("reference BF16", lambda folder: models.reference_model(folder, "BF16")),
    "reference-q8_0": ("reference Q8_0", lambda folder: reference_q8_0(folder)),
}


def parse_arguments(doc: str | None, default_models: Sequence[str] = ()) -> argparse.Namespace:
    """Parse the options that the scripts have in common."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few runs; the JSON goes to .cache/bench")
    if default_models:
        parser.add_argument("--models", nargs="+", choices=list(SOURCES), default=list(default_models), metavar="NAME")
    args = parser.parse_args()
    args.runs = QUICK_RUNS if args.quick else RUNS
    args.environment = environment()  # at the start: a commit may follow while the benchmark runs
    load = args.environment["machine"]["load_before"]
    if load > 0.3:
        console.print(f"[yellow]the machine is busy (load {load}): times will be noisy")
    return args


def load_models(names: Sequence[str]) -> tuple[list[Model], dict[str, str]]:
    """Return the models that can be had, and why the others cannot."""
    found, missing = [], {}
    for name in names:
        label, fetch = SOURCES[name]
        try:
            path = fetch(MODEL_DIR)
            if path is None:
                missing[name] = "what builds it is not beside the repository"
            else:
                found.append(Model(name, label, path, path.stat().st_size, file_sha256(path)))
        except (models.FetchError, ImportError, OSError) as error:
            missing[name] = type(error).__name__ if isinstance(error, OSError) else str(error)
    for name, reason in missing.items():
        console.print(f"[yellow]{name} is left out: {reason}")
    if not found:
        raise SystemExit("no model can be had, so there is nothing to measure")
    return found, missing


def reference_q8_0(folder: Path) -> Path | None:
    """Quantize the reference model to Q8_0 with the gguf package, unless that was done; None where there is no model."""
    target = folder / "reference-135m.Q8_0.gguf"
    source = models.reference_model(folder, "F16")
    if source is None or target.is_file():
        return target if source else None
    import gguf

    reader = gguf.GGUFReader(source)
    part = target.with_suffix(".part")
    writer = gguf.GGUFWriter(part, arch=reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        is_array = field.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if is_array else None)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    for tensor in reader.tensors:
        if tensor.tensor_type == gguf.GGMLQuantizationType.F16:
            writer.add_tensor(tensor.name, gguf.quants.quantize(tensor.data.astype("float32"), q8_0), raw_dtype=q8_0)
        else:
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(part, target)
    return target


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(COPY_BYTES):
            digest.update(block)
    return digest.hexdigest()


def command_line() -> list[str]:
    """The installed command beside this interpreter, or the module."""
    script = Path(sys.executable).parent / "lazyweights"
    return [str(script)] if script.is_file() else [sys.executable, "-m", "lazyweights"]


def run_quietly(command: Sequence[str | os.PathLike[str]]) -> None:
    """Run a command with its output thrown away; end the benchmark if it fails."""
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    if done.returncode:
        raise SystemExit(f"{Path(command[0]).name} failed: {done.stderr.decode(errors='replace').strip()[-300:]}")


def verify(is_equal: bool, what: str) -> None:
    """End the benchmark if bits differ: a wrong result has no speed and no size."""
    if not is_equal:
        raise SystemExit(f"{what}: what was decoded differs from its source")


def zipnn_codec() -> tuple[Callable[[str], Any] | None, str]:
    """Return a maker of one-thread ZipNN codecs by dtype name, or None and why it is missing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from zipnn import ZipNN
    except ImportError as error:
        return None, f"zipnn cannot be imported: {error.name or error}"
    return lambda dtype: ZipNN(input_format="byte", bytearray_dtype=dtype, threads=1), ""


def zipnn_pack(path: Path) -> tuple[str, bytes] | None:
    """Return ZipNN's smallest output for a file and the dtype that gives it, verified; None where it is missing."""
    make, _ = zipnn_codec()
    if make is None:
        return None
    data = path.read_bytes()
    best: tuple[str, bytes] | None = None
    for dtype in ("bfloat16", "float16", "float32"):
        packed = bytes(make(dtype).compress(bytearray(data)))  # a copy: it works in place
        if best is None or len(packed) < len(best[1]):
            best = dtype, packed
    assert best is not None
    verify(make(best[0]).decompress(best[1]) == data, f"zipnn on {path.name}")
    return best


@dataclass
class Timing:
    """Seconds of each run: on the clock, and of processor time (children and all threads included)."""

    wall: list[float]
    cpu: list[float]


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def interleave(works: Mapping[str, Callable[[], object]], runs: int) -> dict[str, Timing]:
    """Time each work `runs` times, in turns, after one warm-up call each."""
    for work in works.values():
        work()
    timings = {name: Timing([], []) for name in works}
    gc.collect()
    gc.disable()
    try:
        for _ in range(runs):
            for name, work in works.items():
                cpu, wall = _cpu_seconds(), time.perf_counter()
                work()
                timings[name].wall.append(time.perf_counter() - wall)
                timings[name].cpu.append(_cpu_seconds() - cpu)
    finally:
        gc.enable()
    return timings


def spread(values: Sequence[float], digits: int = 1) -> dict[str, Any]:
    """Median, minimum, maximum and number of some values."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
        "runs": len(values),
    }


def speed(n_bytes: int, timing: Timing) -> dict[str, Any]:
    """MB/s of a timing, and its processor time per time on the clock (1 thread undisturbed: 1.0)."""
    busy = statistics.median(c / w for c, w in zip(timing.cpu, timing.wall, strict=True))
    return {**spread([n_bytes / 1e6 / t for t in timing.wall]), "cpu_share": round(busy, 2)}


def compare(ours: Timing, peer: Timing) -> dict[str, Any]:
    """How many times faster than a peer: of the medians, and of the pairs of runs that followed each other."""
    pairs = [p / o for o, p in zip(ours.wall, peer.wall, strict=True)]
    of_medians = statistics.median(peer.wall) / statistics.median(ours.wall)
    return {"ratio_of_medians": round(of_medians, 3), "pairwise": spread(pairs, 3)}


@contextmanager
def one_core() -> Iterator[None]:
    """Keep this thread, and what it starts, on one core: helper threads of a "one-thread" codec get no other."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def scratch(n_bytes: int, *, in_memory: bool = True) -> Iterator[Path]:
    """Make a temporary folder: in memory if that has room for `n_bytes`, so that no disk is measured."""
    shm = Path("/dev/shm")
    parent = QUICK_RESULTS
    parent.mkdir(parents=True, exist_ok=True)
    if in_memory and os.access(shm, os.W_OK) and shutil.disk_usage(shm).free > 2 * n_bytes:
        parent = shm
    with tempfile.TemporaryDirectory(dir=parent, prefix="lazyweights-bench-") as folder:
        yield Path(folder)


def _processor() -> str:
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.is_file():
        for line in cpu_info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _first_line(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    package = Path(lazyweights.__file__).parent
    done = subprocess.run(command, cwd=package, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    return lines[0] if lines and done.returncode == 0 else None


def _package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment() -> dict[str, Any]:
    """Machine, versions, commit of the package and date. No host names, no paths."""
    commit = _first_line("git", "rev-parse", "HEAD")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": commit,
        "modified": commit is not None and _first_line("git", "status", "--porcelain", ".") is not None,
        "machine": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "system": platform.system(),
            "load_before": round(os.getloadavg()[0], 2),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: _package_version(name) for name in PACKAGES},
            "libzstd": ".".join(map(str, zstandard.ZSTD_VERSION)),
            "zstd_command": _first_line("zstd", "-q", "--version"),
            "xz_command": _first_line("xz", "--version"),
        },
    }


def finish(name: str, args: argparse.Namespace, body: Mapping[str, Any]) -> None:
    """Write the result of a benchmark as JSON and print its table, if it has one."""
    result = {"benchmark": name, "quick": args.quick, **args.environment, **body}
    path = (QUICK_RESULTS if args.quick else tables.RESULTS) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(part, path)
    for build in (build for source, build in tables.TABLES.values() if source == name):
        built = build(result)
        shown = Table(title=f"{name}: {path.relative_to(REPOSITORY)}", caption=built.note)
        for i, column in enumerate(built.header):
            shown.add_column(column.replace("<br>", "\n"), justify="left" if i < built.n_text else "right")
        for row in built.rows:
            shown.add_row(*(re.sub(r"[*`]", "", cell) for cell in row))
        Console(width=None if sys.stdout.isatty() else 150).print(shown)
