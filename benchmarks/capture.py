"""Activation capture on the reference model: time, memory, what the Hessians are like, and stock formats with an imatrix.

Usage: python benchmarks/capture.py [--quick]

Each command is a process of its own, with all cores. Its peak is the largest resident set that the kernel saw (`ru_maxrss`), with
the pages of the model that it maps. The text is WikiText-2's validation split, 32 chunks of 512 tokens (--quick: 2). Verified:
Hessians are symmetric to the bit and have no eigenvalue below -1e-12 of the largest, their diagonals equal the squares of the
imatrix run, and several passes give the same values as one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import Model, command_line, console, finish, load_models, parse_arguments, scratch
from memory import peak
from models import MODEL_DIR, REFERENCE_SCRIPT

from lazyweights.llama import library
from lazyweights.llama.hessians import Hessians

TEXT = "wiki.valid.txt"
CHUNKS, QUICK_CHUNKS, N_CTX = 32, 2, 512
SMALL_MEMORY = 300_000_000
EIGENVALUES_OF = (
    "blk.0.attn_q.weight", "blk.0.ffn_down.weight", "blk.1.attn_q.weight", "blk.15.attn_output.weight", "blk.15.ffn_up.weight",
    "blk.29.ffn_down.weight", "token_embd.weight",
)  # fmt: skip
STOCK_TYPES = ("Q8_0", "Q4_K_M", "Q4_1", "IQ4_XS", "Q3_K_M", "Q2_K")
MAX_NEGATIVE, MAX_DIAGONAL_ERROR = -1e-12, 3e-7
SCRATCH_BYTES = 3_000_000_000
Row = dict[str, Any]


def find_text() -> Path:
    """Return the text; end the benchmark where there is none."""
    for path in (MODEL_DIR.parent / TEXT, REFERENCE_SCRIPT.with_name(TEXT)):
        if path.is_file():
            return path
    raise SystemExit(f"{TEXT} is neither in .cache nor beside what builds the reference model")


def require(is_so: bool, what: str) -> None:
    """End the benchmark where a result is wrong."""
    if not is_so:
        raise SystemExit(what)


def measure(rows: list[Row], what: str, command: Sequence[str | os.PathLike[str]], output: Path, **facts: object) -> None:
    """Run a command and append its row."""
    megabytes, seconds = peak(command)
    rows.append({"what": what, **facts, "seconds": round(seconds, 1), "peak_mb": round(megabytes, 1),
                 "output_bytes": output.stat().st_size})  # fmt: skip
    console.print(f"{what}: {seconds:.1f} s, {megabytes:.0f} MB")


def measure_capture(rows: list[Row], model: Model, text: Path, n_chunks: int, folder: Path) -> None:
    """Hessians at once and in passes, and an imatrix."""
    runs: list[tuple[str, str, list[str]]] = [
        ("Hessians", "h", []),
        (f"Hessians, --max-memory {SMALL_MEMORY // 10**6}M", "passes", ["--max-memory", str(SMALL_MEMORY), "--dtype", "f32"]),
        ("imatrix", "i.gguf", ["--process-output"]),
    ]
    for what, name, options in runs:
        output = folder / name
        command = [*command_line(), "capture", str(model.path), "-f", str(text), "-o", str(output), "-c", str(N_CTX)]
        measure(rows, what, [*command, "--chunks", str(n_chunks), *options], output, n_tokens=n_chunks * N_CTX)


def check_hessians(folder: Path) -> list[Row]:
    """Verify the Hessians; return what they are like."""
    hessians, squares, passes = (Hessians.load(folder / name) for name in ("h", "i.gguf", "passes"))
    require(set(hessians) == set(squares), "Hessians and imatrix are of different weights")
    rows = []
    for name in hessians:
        values = np.array(hessians[name])
        require(np.array_equal(values, values.T), f"{name}: not symmetric")
        require(np.array_equal(values.astype(np.float32), passes[name]), f"{name}: several passes give something else")
        diagonal, known = hessians.diagonal(name), squares.diagonal(name)
        error = float(np.max(np.abs(diagonal - known) / np.where(diagonal > 0, diagonal, 1)))
        require(error <= MAX_DIAGONAL_ERROR, f"{name}: the diagonal is not that of the imatrix")
        if name in EIGENVALUES_OF:
            eigenvalues = np.linalg.eigvalsh(values)
            least = float(eigenvalues[0] / eigenvalues[-1])
            require(least >= MAX_NEGATIVE, f"{name}: not positive semi-definite")
            rows.append({"weight": name, "n": len(values), "rows": hessians.n_rows(name), "largest": float(eigenvalues[-1]),
                         "least_to_largest": least, "diagonal_error": error})  # fmt: skip
    return rows


def measure_stock(model: Model, imatrix: Path, folder: Path) -> list[Row]:
    """Quantize to stock types."""
    rows: list[Row] = []
    for name in STOCK_TYPES:
        output = folder / "stock.gguf"
        command = [*command_line(), "stock-quantize", "-f", model.path, output, name, "--imatrix", imatrix]
        measure(rows, name, command, output)
        rows[-1]["bpw"] = round(8 * output.stat().st_size / n_weights(output), 3)
        output.unlink()
    return rows


def n_weights(path: Path) -> int:
    """Weights of a GGUF."""
    from lazyweights.container.inspect import inspect_file

    return sum(tensor.n_weights for tensor in inspect_file(path).tensors)


def main() -> None:
    """Measure and write the JSON."""
    args = parse_arguments(__doc__)
    found, skipped = load_models(["reference-f16"])
    text = find_text()
    n_chunks = QUICK_CHUNKS if args.quick else CHUNKS
    rows: list[Row] = []
    with scratch(SCRATCH_BYTES, in_memory=False) as folder:
        measure_capture(rows, found[0], text, n_chunks, folder)
        hessians = check_hessians(folder)
        stock = measure_stock(found[0], folder / "i.gguf", folder)
    body = {"rows": rows, "hessians": hessians, "stock": stock, "files": [found[0].report()], "text": TEXT,
            "llama_cpp": library.build_text(), "skipped": skipped}  # fmt: skip
    finish("capture", args, body)


if __name__ == "__main__":
    main()
