"""Code a real model with the command line, and check that nothing is lost.

Usage: python benchmarks/demo.py [MODEL.gguf]

Without an argument the demo model is fetched. Every command is printed as a user would type it, and every figure is
measured in this run.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import models

DEMO_DIR = models.REPOSITORY / ".cache" / "demo"
COMPARE_BYTES = 1 << 22


def command_line() -> list[str]:
    """The installed command beside this interpreter, or the module."""
    script = Path(sys.executable).parent / "lazyweights"
    return [str(script)] if script.is_file() else [sys.executable, "-m", "lazyweights"]


def run(*arguments: str) -> float:
    """Print a command, run it in the demo folder, and return its seconds; end the demo if it fails."""
    print(f"\n$ {' '.join(arguments)}", flush=True)
    command = [*command_line(), *arguments[1:]] if arguments[0] == "lazyweights" else list(arguments)
    start = time.perf_counter()
    code = subprocess.run(command, cwd=DEMO_DIR, check=False).returncode
    seconds = time.perf_counter() - start
    if code:
        sys.exit(f"demo: the command above failed with exit code {code}")
    return seconds


def first_difference(left: Path, right: Path) -> int | None:
    """Offset of the first byte that differs, None if the files are equal."""
    offset = 0
    with open(left, "rb") as left_file, open(right, "rb") as right_file:
        while True:
            left_block, right_block = left_file.read(COMPARE_BYTES), right_file.read(COMPARE_BYTES)
            if left_block != right_block:
                pairs = zip(left_block, right_block, strict=False)
                shorter = min(len(left_block), len(right_block))
                return offset + next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
            if not left_block:
                return None
            offset += len(left_block)


def main() -> int:
    """Run the demo; return the exit code."""
    source = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else models.fetch_smollm2(models.MODEL_DIR)
    shutil.rmtree(DEMO_DIR, ignore_errors=True)
    DEMO_DIR.mkdir(parents=True)
    model = DEMO_DIR / "model.gguf"
    model.symlink_to(source)
    coded, copy = DEMO_DIR / "model.gguf.lw", DEMO_DIR / "copy.gguf"

    print(f"{source.name} as {model.relative_to(models.REPOSITORY)}, {source.stat().st_size:,} bytes")
    first = run("lazyweights", "encode", "-f", "model.gguf")
    print(f"\nThat took {first:.1f} s with the kernels compiled or loaded on first use. Once more, from the cache:")
    seconds = {
        "encode": run("lazyweights", "encode", "-f", "model.gguf"),
        "verify": run("lazyweights", "verify", "model.gguf.lw", "--against", "model.gguf"),
        "decode": run("lazyweights", "decode", "model.gguf.lw", "-o", "copy.gguf"),
    }
    if shutil.which("cmp"):
        run("cmp", "copy.gguf", "model.gguf")
    run("lazyweights", "inspect", "model.gguf.lw")

    difference = first_difference(copy, source)
    if difference is not None:
        sys.exit(f"demo: the decoded file differs from its source at offset {difference:,}")
    source_bytes, coded_bytes = source.stat().st_size, coded.stat().st_size
    times = ", ".join(f"{verb} {time_:.1f} s" for verb, time_ in seconds.items())
    print(f"\nDecoded and compared here too: all {source_bytes:,} bytes are equal.")
    print(f"{source_bytes:,} -> {coded_bytes:,} bytes, {100 * (1 - coded_bytes / source_bytes):.2f} % saved.")
    print(f"Wall time, start of Python included: {times}.")
    copy.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
