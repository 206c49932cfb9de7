"""Time and memory of the tuned quantizer on the reference model, and estimates for larger ones.

Usage: python benchmarks/tuned_cost.py [--quick]

The commands are processes of their own, with all cores; the peak is the largest resident set that the kernel saw, with the
pages of the model and of the curvature that are mapped. Estimates go by the multiplications that a model takes and the arrays
that are held; nothing of that size was run. Calibrated on WikiText-2's validation split, 32 chunks of 512 tokens (--quick: 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capture import find_text
from common import Model, command_line, console, finish, load_models, parse_arguments, scratch
from memory import peak

from lazyweights.llama import library

CHUNKS, QUICK_CHUNKS = 32, 2
STEP = 1.0
SCRATCH_BYTES = 3_000_000_000
Row = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """The sizes of a model of the llama kind."""

    label: str
    n_layers: int
    n_embedding: int
    n_kv: int
    n_hidden: int
    n_vocab: int
    n_outputs: int = 2

    def matrices(self) -> list[tuple[int, int]]:
        """Rows and columns of the matrices of a layer."""
        d, hidden = self.n_embedding, self.n_hidden
        return [(d, d), (self.n_kv, d), (self.n_kv, d), (d, d), (hidden, d), (hidden, d), (d, hidden)]

    def n_weights(self) -> int:
        """Weights of all matrices."""
        return self.n_layers * sum(m * n for m, n in self.matrices()) + self.n_outputs * self.n_vocab * self.n_embedding

    def calibration_work(self, n_tokens: int) -> float:
        """Multiplications: each layer forward twice and back once, a Hessian and a product of gradients a matrix; the logits."""
        layer = sum(4 * m * n + n * n for m, n in self.matrices())
        return float(n_tokens) * (self.n_layers * layer + 2 * self.n_vocab * self.n_embedding)

    def quantization_work(self) -> float:
        """Multiplications: half a square of columns a row, and factors in double precision, which count twice."""
        layer = sum(m * n * n / 2 + 2 * (2 / 3) * n**3 for m, n in self.matrices())
        return self.n_layers * layer + self.n_outputs * self.n_vocab * self.n_embedding**2 / 2

    def curvature_bytes(self) -> int:
        """Of the curvature file."""
        return 4 * (self.n_layers * sum(n * n for _, n in self.matrices()) + self.n_outputs * self.n_embedding**2)

    def states_bytes(self, n_tokens: int) -> int:
        """Inputs of all layers, in a file while calibrating."""
        return 4 * n_tokens * (self.n_layers + 2) * self.n_embedding

    def calibration_memory(self, threads: int) -> int:
        """A layer in float32, its sums in float64, and what chunks in flight add; or the output matrix and its logits."""
        squares = sum(n * n for _, n in self.matrices())
        return 4 * sum(m * n for m, n in self.matrices()) + 8 * squares + 4 * squares * (2 * threads + 1)

    def quantization_memory(self, threads: int) -> int:
        """For each thread a tensor of the largest kind: its weights, and six squares of double precision while it is factored."""
        return threads * max(4 * m * n + 6 * 8 * n * n for m, n in self.matrices())


REFERENCE = Shape("reference model", 30, 576, 192, 1536, 49152, 1)
LARGER = (Shape("7B (Llama 2)", 32, 4096, 4096, 11008, 32000), Shape("70B (Llama 2)", 80, 8192, 1024, 28672, 32000))


def estimate(cost: list[Row], n_chunks: int, threads: int) -> list[Row]:
    """Scale the measured seconds by work; compute bytes from shapes."""
    n_tokens = 512 * n_chunks
    quantizing = cost[1]["seconds"]
    calibrating = cost[0]["seconds"] - quantizing
    rows = []
    for shape in (REFERENCE, *LARGER):
        rows.append({
            "model": shape.label, "n_weights": shape.n_weights(), "threads": threads,
            "calibration_hours": calibrating * shape.calibration_work(n_tokens) / REFERENCE.calibration_work(n_tokens) / 3600,
            "quantization_hours": quantizing * shape.quantization_work() / REFERENCE.quantization_work() / 3600,
            "calibration_memory_bytes": shape.calibration_memory(threads),
            "quantization_memory_bytes": shape.quantization_memory(threads),
            "curvature_bytes": shape.curvature_bytes(), "states_bytes": shape.states_bytes(n_tokens),
        })  # fmt: skip
    return rows


def measure_cost(model: Model, text: Path, n_chunks: int, folder: Path) -> list[Row]:
    """Calibrate and quantize, then quantize alone."""
    rows = []
    output, known = folder / "cost.gguf.lw", folder / "curvature"
    command = [*command_line(), "quantize", str(model.path), "-o", str(output), "-f", "--step", str(STEP)]
    for what, options in (
        (f"calibrate on {n_chunks} chunks and quantize", ["--calibration", str(text), "--chunks", str(n_chunks),
                                                         "--save-hessians", str(known)]),
        ("quantize with what was calibrated", ["--hessians", str(known)]),
    ):  # fmt: skip
        megabytes, seconds = peak([*command, *options])
        rows.append({"what": what, "seconds": round(seconds, 1), "peak_mb": round(megabytes, 1),
                     "coded_bytes": output.stat().st_size, "known_bytes": known.stat().st_size})  # fmt: skip
        console.print(f"{what}: {seconds:.0f} s, {megabytes:.0f} MB")
    return rows


def main() -> None:
    """Measure and write the JSON."""
    args = parse_arguments(__doc__)
    (model,), skipped = load_models(["reference-f16"])
    text = find_text()
    n_chunks = QUICK_CHUNKS if args.quick else CHUNKS
    with scratch(SCRATCH_BYTES, in_memory=False) as folder:
        cost = measure_cost(model, text, n_chunks, folder)
    estimates = estimate(cost, n_chunks, args.environment["machine"]["cores"])
    body = {"cost": cost, "estimates": estimates, "files": [model.report()], "text": text.name, "n_chunks": n_chunks,
            "llama_cpp": library.build_text(), "skipped": skipped}  # fmt: skip
    finish("tuned_cost", args, body)


if __name__ == "__main__":
    main()
