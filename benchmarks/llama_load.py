"""Loading into llama.cpp: a coded file beside the GGUF that it holds.

Usage: python benchmarks/llama_load.py [--quick] [--models NAME ...]

``load`` goes from the path of a file to a model of llama.cpp that is ready for a context: header, vocabulary, and tensors
mapped, of a coded file decoded and checked too. Both files are in the page cache, and what a process does once (imports,
compiled kernels) was done before; all cores decode. The two take turns, the order changing from round to round, and freeing
a model is not counted. ``process`` is a whole Python process, from its start to the end of its first load, imports included.

``peak`` is the largest resident set of a process that loads, and evaluates some tokens. It counts pages that are mapped: the
GGUF's from the page cache, which other processes may share, or those of the memory file, which are memory of this process.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import Model, command_line, compare, console, finish, load_models, parse_arguments, scratch, spread, verify
from common import Timing as Seconds

from lazyweights.container.encoder import encode_file
from lazyweights.errors import BackendUnavailableError
from lazyweights.llama import library
from lazyweights.llama.memory_file import model_path
from lazyweights.llama.model import Model as LoadedModel

ALL_MODELS = ("smollm2", "gemma")
PROCESS = "import sys; from lazyweights.llama.model import Model; Model(sys.argv[1]).close()"
PROMPT = "The quick brown fox jumps over"
N_TOKENS = 16


def load_seconds(path: Path) -> tuple[float, float]:
    """Load a model; return the seconds, and those of processor time."""
    cpu, wall = time.process_time(), time.perf_counter()
    model = LoadedModel(path)
    done = time.perf_counter() - wall, time.process_time() - cpu
    model.close()
    return done


def busy_seconds() -> float:
    """Processor time that the whole machine has used; 0 where it does not tell."""
    try:
        user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def take_turns(paths: dict[str, Path], runs: int) -> dict[str, Seconds]:
    """Load each file `runs` times after a warm-up, in turns, every other round in the opposite order."""
    timings = {name: Seconds([], []) for name in paths}
    for path in paths.values():
        load_seconds(path)
    for run in range(runs):
        for name in list(paths)[:: -1 if run % 2 else 1]:
            wall, cpu = load_seconds(paths[name])
            timings[name].wall.append(wall)
            timings[name].cpu.append(cpu)
    return timings


def decode_seconds(path: Path, runs: int) -> list[float]:
    """Decode into a memory file, with nothing else going on."""
    found = []
    for _ in range(runs + 1):
        with model_path(path) as memory:
            pass
        found.append(memory.seconds)
    return found[1:]


def process_seconds(path: Path) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", PROCESS, str(path)], check=True)
    return time.perf_counter() - start


def generate(path: Path) -> dict[str, Any]:
    """Run ``lazyweights run`` in a process of its own; return what it reports."""
    command = [*command_line(), "run", "--json", "-q", str(path), "-p", PROMPT, "-n", str(N_TOKENS), "--seed", "1"]
    report: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return report


def measure(model: Model, folder: Path, runs: int) -> dict[str, Any]:
    """Measure one model."""
    coded = folder / f"{model.key}.lw"
    encode_file(model.path, coded)
    with model_path(coded) as memory:
        verify(Path(memory.path).read_bytes() == model.path.read_bytes(), f"{model.label} in the memory file")
    paths = {"plain": model.path, "coded": coded}
    busy, own, start = busy_seconds(), time.process_time(), time.perf_counter()
    timings = take_turns(paths, runs)
    others = (busy_seconds() - busy - (time.process_time() - own)) / (time.perf_counter() - start)
    decoding = decode_seconds(coded, runs)
    processes: dict[str, list[float]] = {name: [] for name in paths}
    for run in range(runs):
        for name in list(paths)[:: -1 if run % 2 else 1]:
            processes[name].append(process_seconds(paths[name]))
    reports = {name: generate(path) for name, path in paths.items()}
    verify(reports["plain"]["tokens"] == reports["coded"]["tokens"], f"tokens of {model.label}")
    ratio = compare(timings["plain"], timings["coded"])
    console.print(f"{model.label}: a coded file takes {ratio['ratio_of_medians']} times as long to load; "
                  f"meanwhile others kept {others:.2f} cores busy")  # fmt: skip
    return {
        **model.report(),
        "coded_bytes": coded.stat().st_size,
        "load_seconds": {name: spread(t.wall, 4) for name, t in timings.items()},
        "load_cpu_seconds": {name: spread(t.cpu, 4) for name, t in timings.items()},
        "cores_taken_by_others": round(max(others, 0.0), 2),
        "coded_vs_plain": ratio,
        "decode_alone_gb_per_s": spread([model.n_bytes / 1e9 / t for t in decoding], 3),
        "process_seconds": {name: spread(values, 3) for name, values in processes.items()},
        "processes_coded_vs_plain": round(statistics.median(processes["coded"]) / statistics.median(processes["plain"]), 3),
        "memory_bytes": {
            name: {key: report[f"{key}_bytes"] for key in ("peak", "anonymous", "file", "shared")}
            for name, report in reports.items()
        },
        "same_tokens": len(reports["coded"]["tokens"]),
    }


def main() -> None:
    """Measure and write the JSON."""
    args = parse_arguments(__doc__, ALL_MODELS)
    try:
        library.load()
    except BackendUnavailableError as error:
        console.print(f"[yellow]nothing is measured: {error}")
        return
    found, skipped = load_models(args.models)
    results = {}
    with scratch(sum(model.n_bytes for model in found)) as folder:
        for model in found:
            results[model.key] = measure(model, folder, args.runs)
    load_after = round(os.getloadavg()[0], 2)
    body = {"llama_cpp": library.build_text(), "load_after": load_after, "models": results, "skipped": skipped}
    finish("llama_load", args, body)


if __name__ == "__main__":
    main()
