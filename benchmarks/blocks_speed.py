"""Speed of `blocks.split` and `blocks.join` on one core, as JSON on stdout.

Usage: ``python benchmarks/blocks_speed.py [--mebibytes 64] [--types Q4_0 Q4_K ...]``

GB/s are 10^9 packed bytes per second, median, minimum and maximum of seven runs after a warm-up, on random blocks.
`split` allocates its planes and `join` its bytes, as callers see them. Bits are verified before the clock starts. The
peer of the same run is a copy of the packed bytes into fresh memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np

from lazyweights.blocks import TYPE_BY_NAME, join, split

DEFAULT_TYPES = ("Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0")
N_RUNS = 7


def gb_per_s(work: Callable[[], object], n_bytes: int) -> dict[str, float]:
    """Time `work` after one warm-up call."""
    work()
    speeds = []
    for _ in range(N_RUNS):
        start = time.perf_counter()
        work()
        speeds.append(n_bytes / 1e9 / (time.perf_counter() - start))
    return {
        "median": round(statistics.median(speeds), 3),
        "min": round(min(speeds), 3),
        "max": round(max(speeds), 3),
    }


def measure(name: str, n_bytes: int) -> dict[str, object]:
    """Verify and time one type on about `n_bytes` packed bytes."""
    known = TYPE_BY_NAME[name]
    n_rows = max(1, n_bytes // (16 * known.block_bytes))
    shape = (16 * known.block_size, n_rows)
    data = np.random.default_rng(known.type_id).integers(0, 256, n_rows * 16 * known.block_bytes, dtype=np.uint8)
    planes = split(known.type_id, data, shape)
    if not np.array_equal(join(planes), data):
        raise SystemExit(f"{name}: join(split(x)) differs from x")
    return {
        "type": name,
        "packed_bytes": data.size,
        "input_sha256": hashlib.sha256(data).hexdigest(),
        "split_gb_per_s": gb_per_s(lambda: split(known.type_id, data, shape), data.size),
        "join_gb_per_s": gb_per_s(lambda: join(planes), data.size),
        "copy_gb_per_s": gb_per_s(data.copy, data.size),
    }


def commit() -> str | None:
    """Return the commit of the checkout, None outside one."""
    found = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or None


def processor() -> str:
    """Return the processor's name as far as the system tells it."""
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        for line in cpu_info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of splitting and joining GGML blocks, as JSON on stdout.")
    parser.add_argument("--mebibytes", type=int, default=64, help="packed bytes per type")
    parser.add_argument("--types", nargs="+", default=DEFAULT_TYPES, choices=sorted(TYPE_BY_NAME), metavar="TYPE")
    arguments = parser.parse_args()
    result = {
        "benchmark": "blocks_speed",
        "commit": commit(),
        "machine": {"processor": processor(), "cores": os.cpu_count(), "system": platform.platform()},
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "numba": numba.__version__},
        "runs": N_RUNS,
        "results": [measure(name, arguments.mebibytes << 20) for name in arguments.types],
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
