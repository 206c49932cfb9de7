"""The tuned quantizer on the reference model: what it costs, what each part of it brings, and how containers compare.

Usage: python benchmarks/tuned.py [--quick]

Cost: the commands as processes of their own, with all cores; the peak is the largest resident set that the kernel saw, with
the pages of the model and of the curvature that are mapped. Estimates: the same for larger models, by the multiplications that
they take and the arrays that are held; nothing of that size was run. Parts: the method with one part changed, its step chosen
so that the coded file has the size of the whole method's file (within 1 %), and the divergence that this size then costs.
Containers: the same step in other formats; the GGUF is decoded from its coded file and compared. Calibrated on WikiText-2's
validation split, 64 chunks of 512 tokens, judged by llama.cpp on 20 chunks of its test split (--quick: 2 and 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capture import find_text, require
from common import Model, command_line, console, finish, load_models, parse_arguments, scratch
from memory import peak

from lazyweights.container.decoder import decode_file
from lazyweights.container.encoder import encode_file
from lazyweights.llama import library
from lazyweights.llama.chunks import read_text
from lazyweights.llama.passes import capture
from lazyweights.llama.perplexity import kl_divergence, perplexity
from lazyweights.quant.rate_control import smallest_step_within_size
from lazyweights.quant.tuned import TunedQuantizer

CHUNKS, JUDGED, QUICK_CHUNKS = 64, 20, 2
TEST_TEXT = "wiki.test.raw"
STEP = 1.0
SIZE_TOLERANCE = 0.01
SCRATCH_BYTES = 5_000_000_000
PLAIN = {"use_gptq": False, "use_widening": False, "use_column_steps": False, "use_row_steps": False, "use_sensitivity": False}
PARTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("without GPTQ: rounding to nearest", "curvature", {"use_gptq": False}),
    ("without wider steps for outliers", "curvature", {"use_widening": False}),
    ("one step for all columns of a row", "curvature", {"use_column_steps": False}),
    ("one step for all rows of a tensor", "curvature", {"use_row_steps": False}),
    ("steps of tensors by kind, not by gradients", "curvature", {"use_sensitivity": False}),
    ("plain Hessians, no gradients at all", "hessians", {}),
    ("token embedding stays F16", "curvature", {"quantize_embedding": False}),
    ("rate-aware rounding, 0.06 squared steps a bit", "curvature", {"rate_weight": 0.06}),
    ("shared steps only: nearest, clipped, one step a tensor by kind", "curvature", PLAIN),
)
CONTAINERS = ("auto", "Q8_0", "Q6_K", "Q5_K", "Q4_K")
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


class Judge:
    """Codes and evaluates models."""

    def __init__(self, model: Model, text: Path, n_chunks: int, folder: Path) -> None:
        self.folder, self.base = folder, folder / "base"
        self.ppl = perplexity(model.path, read_text(text), n_chunks=n_chunks, base_file=self.base).ppl.value

    def code(self, path: Path) -> int:
        """Return the coded size; the coded file must give the GGUF back."""
        coded, back = self.folder / "x.lw", self.folder / "back.gguf"
        result = encode_file(path, coded, force=True)
        decode_file(coded, back, force=True)
        require(back.read_bytes() == path.read_bytes(), "the coded file gives another GGUF back")
        return result.coded_bytes

    def judge(self, path: Path) -> Row:
        """Return quality, each with its standard error."""
        found = kl_divergence(path, self.base).statistics
        return {
            "ppl": found.ppl.value, "ratio": found.ratio.value, "ratio_error": found.ratio.error, "kld": found.kld.value,
            "kld_error": found.kld.error,
        }  # fmt: skip


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


def quantize(model: Model, known: Path, step: float, path: Path, settings: dict[str, Any]) -> Row:
    """Write a model; return what the quantizer says of it."""
    with TunedQuantizer(model.path, known, **settings) as quantizer:
        result = quantizer.quantize(path, step, force=True)
    bits = sum(report["entropy_bits"] * report["n_weights"] for report in result.tensors)
    return {
        "step": step, "seconds": round(result.seconds, 1), "gguf_bytes": result.output_bytes, "n_weights": result.n_weights,
        "entropy_bits": bits / sum(report["n_weights"] for report in result.tensors), "predicted_kld": result.predicted_kld,
        "widened": max(report["widened"] for report in result.tensors),
        "types": sorted({report["type"] for report in result.tensors}),
    }  # fmt: skip


def measure_parts(model: Model, known: dict[str, Path], judge: Judge, folder: Path) -> list[Row]:
    """The whole method, then each variant at its coded size."""
    path = folder / "x.gguf"
    whole = quantize(model, known["curvature"], STEP, path, {})
    rows = [{"what": "the whole method", **whole, "coded_bytes": judge.code(path), **judge.judge(path)}]
    limit = rows[0]["coded_bytes"] * (1 + SIZE_TOLERANCE / 2)
    for what, name, settings in PARTS:
        facts: Row = {}

        def size(step: float, name: str = name, settings: dict[str, Any] = settings, facts: Row = facts) -> float:
            facts.update(quantize(model, known[name], step, path, settings))
            facts["coded_bytes"] = judge.code(path)
            return float(facts["coded_bytes"])

        found = smallest_step_within_size(size, limit, tolerance=SIZE_TOLERANCE, max_trials=5)
        if found.best is not None and found.best.step != facts["step"]:
            size(found.best.step)
        rows.append({"what": what, **facts, "is_same_size": found.best is not None, **judge.judge(path)})
        console.print(f"{what}: {facts['coded_bytes'] / 1e6:.2f} MB, divergence {rows[-1]['kld']:.4f}")
    return rows


def measure_containers(model: Model, known: Path, judge: Judge, folder: Path) -> list[Row]:
    """One step in several formats."""
    rows = []
    for name in CONTAINERS:
        path = folder / "x.gguf"
        facts = quantize(model, known, STEP, path, {"container": name})
        rows.append({"container": name, **facts, "coded_bytes": judge.code(path), **judge.judge(path)})
        console.print(f"{name}: {rows[-1]['coded_bytes'] / 1e6:.2f} MB, divergence {rows[-1]['kld']:.4f}")
    return rows


def main() -> None:
    """Measure and write the JSON."""
    args = parse_arguments(__doc__)
    (model,), skipped = load_models(["reference-f16"])
    text = find_text()
    test = text.with_name(TEST_TEXT)
    require(test.is_file(), f"{TEST_TEXT} is not beside {text.name}")
    n_chunks = QUICK_CHUNKS if args.quick else CHUNKS
    with scratch(SCRATCH_BYTES, in_memory=False) as folder:
        cost = measure_cost(model, text, n_chunks, folder)
        known = {"curvature": folder / "curvature", "hessians": folder / "hessians"}
        capture(model.path, text, known["hessians"], n_chunks=n_chunks)
        judge = Judge(model, test, QUICK_CHUNKS if args.quick else JUDGED, folder)
        containers = measure_containers(model, known["curvature"], judge, folder)
        parts = measure_parts(model, known, judge, folder)
    body = {
        "cost": cost, "estimates": estimate(cost, n_chunks, args.environment["machine"]["cores"]),
        "parts": parts, "containers": containers, "files": [model.report()], "source_ppl": judge.ppl,
        "text": text.name, "test_text": TEST_TEXT, "n_chunks": n_chunks, "judged_chunks": QUICK_CHUNKS if args.quick else JUDGED,
        "llama_cpp": library.build_text(), "skipped": skipped,
    }  # fmt: skip
    finish("tuned", args, body)


if __name__ == "__main__":
    main()
