"""The tuned quantizer on the reference model: what each part of it brings, and how containers compare.

Usage: python benchmarks/tuned.py [--quick]

Parts: the method with one part changed, its step chosen so that the coded file has the size of the whole method's file (within
1 %), and the divergence that this size then costs. Containers: the same step in other formats; the GGUF is decoded from its coded
file and compared. Calibrated on WikiText-2's validation split, 64 chunks of 512 tokens (plain Hessians: 32), judged by
llama.cpp on 20 chunks of its test split (--quick: 2, 2 and 2). What was calibrated is kept in .cache/bench for the next run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from capture import find_text, require
from common import QUICK_RESULTS, Model, console, finish, load_models, parse_arguments, scratch

from lazyweights.container.decoder import decode_file
from lazyweights.container.encoder import encode_file
from lazyweights.llama import library
from lazyweights.llama.chunks import read_text
from lazyweights.llama.passes import capture
from lazyweights.llama.perplexity import kl_divergence, perplexity
from lazyweights.quant.curvature import measure_curvature
from lazyweights.quant.rate_control import smallest_step_within_size
from lazyweights.quant.tuned import TunedQuantizer

CHUNKS, HESSIAN_CHUNKS, JUDGED, QUICK_CHUNKS = 64, 32, 20, 2
TEST_TEXT = "wiki.test.raw"
STEP = 1.0
SIZE_TOLERANCE = 0.01
SCRATCH_BYTES = 5_000_000_000
PLAIN = {
    "use_gptq": False, "use_order": False, "use_trellis": False, "use_widening": False, "use_column_steps": False,
    "use_row_steps": False, "use_sensitivity": False,
}  # fmt: skip
PARTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("without GPTQ: rounding to nearest", "curvature", {"use_gptq": False}),
    ("columns in the order of the file", "curvature", {"use_order": False}),
    ("without the trellis: each code to the nearest", "curvature", {"use_trellis": False}),
    ("without wider steps for outliers", "curvature", {"use_widening": False}),
    ("one step for all columns of a row", "curvature", {"use_column_steps": False}),
    ("one step for all rows of a tensor", "curvature", {"use_row_steps": False}),
    ("steps of tensors by kind, not by gradients", "curvature", {"use_sensitivity": False}),
    ("plain Hessians, no gradients at all", "hessians", {}),
    ("token embedding stays F16", "curvature", {"quantize_embedding": False}),
    ("rate-aware rounding, 0.06 squared steps a bit", "curvature", {"rate_weight": 0.06}),
    ("shared steps only: nearest, clipped, one step a tensor by kind", "curvature", PLAIN),
)
CONTAINERS = ("auto", "Q8_0", "Q6_K", "Q4_K")
Row = dict[str, Any]


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

        is_same_size = settings.get("quantize_embedding", True)  # without it no step makes the file so small
        if is_same_size:
            found = smallest_step_within_size(size, limit, tolerance=SIZE_TOLERANCE, max_trials=4)
            is_same_size = found.best is not None
            if found.best is not None and found.best.step != facts["step"]:
                size(found.best.step)
        else:
            size(STEP)
        rows.append({"what": what, **facts, "is_same_size": is_same_size, **judge.judge(path)})
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


def calibrate(model: Model, text: Path, is_quick: bool) -> dict[str, Path]:
    """Measure curvature and plain Hessians, unless an earlier run has."""
    QUICK_RESULTS.mkdir(parents=True, exist_ok=True)
    chunks = {"curvature": CHUNKS, "hessians": HESSIAN_CHUNKS}
    if is_quick:
        chunks = dict.fromkeys(chunks, QUICK_CHUNKS)
    known = {name: QUICK_RESULTS / f"reference-{n}.{name}" for name, n in chunks.items()}
    for name, path in known.items():
        if not path.exists():
            (measure_curvature if name == "curvature" else capture)(model.path, text, path, n_chunks=chunks[name])
    return known


def main() -> None:
    """Measure and write the JSON."""
    args = parse_arguments(__doc__)
    (model,), skipped = load_models(["reference-f16"])
    text = find_text()
    test = text.with_name(TEST_TEXT)
    require(test.is_file(), f"{TEST_TEXT} is not beside {text.name}")
    judged = QUICK_CHUNKS if args.quick else JUDGED
    with scratch(SCRATCH_BYTES, in_memory=False) as folder:
        known = calibrate(model, text, args.quick)
        judge = Judge(model, test, judged, folder)
        parts = measure_parts(model, known, judge, folder)
        containers = measure_containers(model, known["curvature"], judge, folder)
    body = {
        "parts": parts, "containers": containers, "files": [model.report()], "source_ppl": judge.ppl, "text": text.name,
        "test_text": TEST_TEXT, "n_chunks": QUICK_CHUNKS if args.quick else CHUNKS, "judged_chunks": judged,
        "llama_cpp": library.build_text(), "skipped": skipped,
    }  # fmt: skip
    finish("tuned", args, body)


if __name__ == "__main__":
    main()
