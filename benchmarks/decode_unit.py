"""The decode unit on real streams: cycles per weight, losses by kind, and what other streams or units would change (modelled).

Usage: python benchmarks/decode_unit.py [--quick] [--models NAME ...]

Every tensor of every model is coded with the preset `unit` and run through the cycle model, and the codes that it decodes are
compared with those of the decoder. The improvement study writes the same symbols as other streams, for 4-bit codes in pairs
(Q4_1) and 5-bit codes (Q5_0), and runs these. Rates of a unit are those of one engine with all the bandwidth it can use, times
the engines, at 1 GHz. Cycles follow from the model; areas from `hardware/area.py`, fitted to the source document.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import common
import numpy as np

from lazyweights.codecs import canonical
from lazyweights.codecs.package_merge import code_lengths
from lazyweights.container.encoder import encode_file
from lazyweights.container.reader import CodedFile
from lazyweights.hardware import area, placement
from lazyweights.hardware.engine_kernels import simulate_unit
from lazyweights.hardware.rans_engine import simulate_rans
from lazyweights.hardware.stream_variants import StreamVariant, restore_symbols, write_stream
from lazyweights.hardware.unit_config import STEP_BYTES, Layout, Loss, UnitConfig, table_entries
from lazyweights.reports.unit_streams import PlainTensor, UnitTensor, golden_symbols, read_tensors, tensor_symbols

DEFAULT = ("smollm2", "gemma")
CLOCK_HZ = 1e9
AMPLE = UnitConfig(n_engines=1, bytes_per_cycle=STEP_BYTES)
SHARED = UnitConfig(bytes_per_cycle=placement.DOCUMENT_BANDWIDTH / CLOCK_HZ)
STUDY_TYPES = {"Q4_1": "pairs", "Q5_0": "singles"}
STUDY_WEIGHTS, QUICK_WEIGHTS = 16_000_000, 1_000_000
NARROW, NARROWER = 10, 9
"""Longest codewords of the variants with smaller tables, in bits."""


@dataclass(frozen=True)
class Variant:
    """One row of the study."""

    key: str
    label: str
    stream: StreamVariant = field(default_factory=StreamVariant)
    fifo_words: int = 2
    queue_steps: int = 32
    n_engines: int = 4
    two_symbols: bool = False
    window_bits: int = 11
    changes: str = "unit"

    def design(self) -> area.HuffmanDesign:
        return area.HuffmanDesign(
            n_engines=self.n_engines, window_bits=self.window_bits, entry_bits=16 if self.two_symbols else 12,
            fifo_words=self.fifo_words, queue_steps=self.queue_steps, two_symbols=self.two_symbols,
            demand=self.stream.layout == Layout.DEMAND, row_order=self.stream.balanced,
        )  # fmt: skip


WIDE, BALANCED, DEMAND = StreamVariant(512), StreamVariant(balanced=True), StreamVariant(layout=Layout.DEMAND)
VARIANTS = (
    Variant("baseline", "baseline: preset `unit`, four engines", changes="–"),
    Variant("engines-5", "five engines", n_engines=5),
    Variant("fifo-1", "lane FIFOs of 1 word", fifo_words=1),
    Variant("fifo-4", "lane FIFOs of 4 words", fifo_words=4),
    Variant("fifo-8", "lane FIFOs of 8 words", fifo_words=8),
    Variant("demand", "demand layout", DEMAND, changes="format, unit"),
    Variant("demand-512", "demand layout, tiles of 64 x 512", StreamVariant(512, Layout.DEMAND), changes="format, unit"),
    Variant("balanced", "balanced lanes (stored order)", BALANCED, changes="format, unit"),
    Variant("tile-512", "tiles of 64 x 512", WIDE, changes="format"),
    Variant("tile-1024", "tiles of 64 x 1024", StreamVariant(1024), changes="format"),
    Variant("two", "two symbols a look-up", two_symbols=True),
    Variant("narrow", f"codewords of at most {NARROW} bits", window_bits=NARROW, changes="writer, unit"),
    Variant("two-narrow", f"two symbols, at most {NARROW} bits", two_symbols=True, window_bits=NARROW, changes="writer, unit"),
    Variant("two-narrower", f"two symbols, at most {NARROWER} bits", two_symbols=True, window_bits=NARROWER,
            changes="writer, unit"),
    Variant("two-narrow-three", f"two symbols, at most {NARROW} bits, three engines", two_symbols=True, window_bits=NARROW,
            n_engines=3, changes="writer, unit"),
    Variant("two-narrow-512", f"two symbols, at most {NARROW} bits, tiles of 64 x 512", WIDE, two_symbols=True,
            window_bits=NARROW, changes="format, writer, unit"),
    Variant("two-narrow-balanced-512", f"two symbols, at most {NARROW} bits, 64 x 512, balanced",
            StreamVariant(512, balanced=True), two_symbols=True, window_bits=NARROW, changes="format, writer, unit"),
)  # fmt: skip


class Sum:
    """Runs added up."""

    def __init__(self) -> None:
        self.n_weights = self.cycles = 0
        self.lanes = np.zeros(len(Loss), np.int64)

    def add(self, n_weights: int, run: Any) -> None:
        self.n_weights += n_weights
        self.cycles += run.cycles
        self.lanes += run.lane_cycles

    def report(self) -> dict[str, Any]:
        total = max(1, int(self.lanes.sum()))
        return {
            "cycles_per_weight": self.cycles / self.n_weights,
            "weights_per_cycle": self.n_weights / self.cycles,
            "shares": {loss.name.lower(): float(self.lanes[loss]) / total for loss in Loss},
        }


def run_model(path: str) -> tuple[dict[str, Any], dict[str, list[UnitTensor]]]:
    """Run every tensor of a coded file; return the report and the tensors of the study."""
    types: dict[str, dict[str, Any]] = {}
    kept: dict[str, list[UnitTensor]] = {}
    plain = {"tensors": 0, "bytes": 0}
    seconds = 0.0
    n_weights = n_tensors = 0
    with CodedFile(path) as file:
        for tensor in read_tensors(file):
            if isinstance(tensor, PlainTensor):
                plain["tensors"] += 1
                plain["bytes"] += tensor.n_bytes
                continue
            stream = tensor.stream
            if not n_tensors:
                simulate_unit(stream, AMPLE)  # compiles
            started = time.process_time()
            alone = simulate_unit(stream, AMPLE)
            seconds += time.process_time() - started
            shared = simulate_unit(stream, SHARED)
            golden = golden_symbols(stream, tensor.decode_table)
            common.verify(np.array_equal(alone.symbols, golden), f"{tensor.name}, one engine")
            common.verify(np.array_equal(shared.symbols, golden), f"{tensor.name}, four engines")
            row = types.setdefault(
                tensor.type_name,
                {"tensors": 0, "coded_bytes": 0, "raw_groups": 0, "stream_bytes": 0, "alone": Sum(), "shared": Sum(),
                 "weights_per_symbol": stream.weights_per_symbol, "bits": dict.fromkeys((11, NARROW, NARROWER), 0)},
            )  # fmt: skip
            counts = np.bincount(golden, minlength=256)
            for limit in row["bits"]:
                row["bits"][limit] += int((counts * code_lengths(counts, limit)).sum())
            row["tensors"] += 1
            row["coded_bytes"] += tensor.coded_bytes - tensor.raw_bytes
            row["raw_groups"] += tensor.n_raw_groups
            row["stream_bytes"] += stream.stream_bytes
            row["alone"].add(stream.n_weights, alone)
            row["shared"].add(stream.n_weights, shared)
            n_weights += stream.n_weights
            n_tensors += 1
            if tensor.type_name in STUDY_TYPES:
                kept.setdefault(tensor.type_name, []).append(tensor)
    rows = []
    for name, row in types.items():
        n = row["alone"].n_weights
        rows.append({
            "type": name, "tensors": row["tensors"], "weights": n, "raw_groups": row["raw_groups"],
            "weights_per_symbol": row["weights_per_symbol"], "coded_bpw": 8 * row["coded_bytes"] / n,
            "payload_bpw": 8 * row["stream_bytes"] / n, "one_engine": row["alone"].report(),
            "four_engines": row["shared"].report(),
            "limit_cost": {str(limit): row["bits"][limit] / max(1, row["bits"][11]) - 1 for limit in (NARROW, NARROWER)},
        })  # fmt: skip
    rate = {"weights": n_weights, "million_weights_per_s": n_weights / seconds / 1e6, "threads": 1}
    return {"types": rows, "plain": plain, "tensors_compared": n_tensors, "simulator": rate}, kept


def narrow_lengths(symbols: np.ndarray, window_bits: int) -> np.ndarray:
    """Code lengths of the symbols under a limit."""
    return code_lengths(np.bincount(symbols.ravel(), minlength=256), window_bits)


def run_variant(variant: Variant, data: dict[str, list[tuple[UnitTensor, np.ndarray]]]) -> dict[str, Any]:
    """Write and run the tensors of the study in one way."""
    config = UnitConfig(n_engines=1, bytes_per_cycle=STEP_BYTES, fifo_words=variant.fifo_words, queue_steps=variant.queue_steps)
    found: dict[str, Any] = {}
    for type_name, tensors in data.items():
        total = Sum()
        codeword_bits = read_bytes = 0
        for tensor, symbols in tensors:
            lengths = tensor.lengths if variant.window_bits == 11 else narrow_lengths(symbols, variant.window_bits)
            decode_table = canonical.decode_tables(lengths[None])
            table = table_entries(decode_table, tensor.symbol_bits, variant.two_symbols, variant.window_bits)
            side_bytes = STEP_BYTES * int(tensor.stream.side_steps.max())
            per_symbol = tensor.stream.weights_per_symbol
            written = write_stream(symbols, canonical.codewords(lengths), table, per_symbol, side_bytes, variant.stream)
            run = simulate_unit(written.stream, config)
            common.verify(np.array_equal(restore_symbols(written, run.symbols, len(symbols)), symbols), variant.label)
            total.add(written.stream.n_weights, run)
            codeword_bits += written.codeword_bits
            read_bytes += written.stream.stream_bytes + written.extra_bytes
        found[STUDY_TYPES[type_name]] = {
            **total.report(), "padding": 1 - codeword_bits / (8 * read_bytes), "payload_bpw": 8 * read_bytes / total.n_weights,
            "rate": total.n_weights / total.cycles * variant.n_engines * CLOCK_HZ,
        }  # fmt: skip
    report: dict[str, Any] = {
        "key": variant.key, "label": variant.label, "changes": variant.changes, **found,
        "pj_per_symbol": area.huffman_symbol_pj(variant.design().entry_bits), "area_mm2": variant.design().area_mm2(),
        "parts_mm2": variant.design().parts(),
    }  # fmt: skip
    if set(found) == {"pairs", "singles"}:
        report["points_covered"] = placement.points_covered(found["pairs"]["rate"], found["singles"]["rate"])
    return report


def run_rans(data: dict[str, list[tuple[UnitTensor, np.ndarray]]]) -> dict[str, Any]:
    """One rANS engine on the tensors of the study."""
    step_cycles = int(np.ceil(area.RANS_STEP_NS * CLOCK_HZ / 1e9))
    found: dict[str, Any] = {
        "step_cycles": step_cycles, "step_ns": area.RANS_STEP_NS, "sram_efficiency": area.SRAM_EFFICIENCY,
        "area_ratio": {"pairs": area.rans_area_ratio(256), "singles": area.rans_area_ratio(32)},
        "area_ratio_interleaved": {"pairs": area.rans_area_ratio(256, True), "singles": area.rans_area_ratio(32, True)},
        "symbol_pj": {"huffman": area.huffman_symbol_pj(), "rans": area.rans_symbol_pj()},
    }  # fmt: skip
    for type_name, tensors in data.items():
        tensor, symbols = tensors[0]
        per_symbol = tensor.stream.weights_per_symbol
        run = simulate_rans(symbols, step_cycles=step_cycles, tile_symbols=256 // per_symbol)
        common.verify(np.array_equal(run.symbols, symbols), "rANS")
        n_weights = symbols.size * per_symbol
        found[STUDY_TYPES[type_name]] = {
            "tensor": tensor.name, "cycles_per_weight": run.cycles / n_weights, "payload_bpw": 8 * run.stream_bytes / n_weights,
            "huffman_payload_bpw": 8 * tensor.stream.stream_bytes / n_weights,
        }  # fmt: skip
    return found


def main() -> None:
    """Run the benchmark."""
    args = common.parse_arguments(__doc__, DEFAULT)
    found, missing = common.load_models(args.models)
    models: dict[str, Any] = {}
    data: dict[str, list[tuple[UnitTensor, np.ndarray]]] = {}
    most = QUICK_WEIGHTS if args.quick else STUDY_WEIGHTS
    for model in found:
        with common.scratch(model.n_bytes) as folder:
            coded = folder / "coded.gguf.lw"
            encode_file(model.path, coded, preset="unit", threads=1)
            report, kept = run_model(str(coded))
        models[model.key] = {**model.report(), **report}
        for name, tensors in kept.items():
            if name in data:
                continue
            chosen, n = [], 0
            for tensor in tensors:
                if n < most and not tensor.n_raw_groups:
                    chosen.append((tensor, tensor_symbols(tensor)))
                    n += tensor.stream.n_weights
            data[name] = chosen
        common.console.print(f"{model.label}: {report['simulator']['million_weights_per_s']:.0f} M weights/s simulated")
    points = [
        {"coded_bpw": p.coded_bpw, "pairs": p.pairs, "given": p.is_given,
         "required": placement.required_rate(placement.DOCUMENT_BANDWIDTH, p.coded_bpw)}
        for p in placement.operating_points()
    ]  # fmt: skip
    rows = []
    for variant in VARIANTS:
        rows.append(run_variant(variant, data))
        common.console.print(rows[-1]["label"], rows[-1].get("points_covered"), round(rows[-1]["area_mm2"], 3))
    study = {name: {"tensors": len(t), "weights": sum(x.stream.n_weights for x, _ in t)} for name, t in data.items()}
    body = {"modelled": True, "models": models, "points": points, "study": study, "rows": rows, "rans": run_rans(data)}
    common.finish("decode_unit", args, {**body, "skipped": missing})


if __name__ == "__main__":
    main()
