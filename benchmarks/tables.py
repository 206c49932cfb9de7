"""Tables of the documentation, from the JSON of the benchmarks.

Usage: python benchmarks/tables.py [--check]

Fills ``<!-- table: NAME -->`` ... ``<!-- /table -->`` in README.md and docs/*.md; NAME is a key of `TABLES`. A table whose
benchmark has no JSON in benchmarks/results yet is left alone. ``--check`` writes nothing and exits with 1 if a table is not
what the JSON says. Needs the standard library only.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"

MARKER = re.compile(r"<!-- table: ([\w-]+) -->\n(.*?)<!-- /table -->", re.DOTALL)
OPENING, CLOSING = re.compile(r"<!-- table:"), re.compile(r"<!-- /table -->")
Result = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """A table: the first `n_text` columns are text, the others numbers."""

    header: list[str]
    rows: list[list[str]]
    note: str
    n_text: int = 1

    def markdown(self) -> str:
        """The table and its note as Markdown."""
        align = [":--" if i < self.n_text else "--:" for i in range(len(self.header))]
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.header, *self.rows)]
        return "\n".join([lines[0], "|" + "|".join(align) + "|", *lines[1:], "", f"*{self.note}*", ""])


def provenance(result: Result) -> str:
    """Where a result comes from, in a line."""
    machine = result["machine"]
    commit = (result["commit"] or "unknown")[:8] + ("+" if result["modified"] else "")
    return f"{machine['processor']}, {machine['cores']} cores; commit {commit}, {result['date']}"


def megabytes(n_bytes: float | None) -> str:
    """Bytes as MB."""
    return "–" if n_bytes is None else f"{n_bytes / 1e6:,.2f}"


def percent(share: float | None) -> str:
    """A share as a percentage."""
    return "–" if share is None else f"{100 * share:.2f}"


def sizes(result: Result) -> Table:
    """Whole files."""
    peers = ("unit", "zstd -3", "zstd -19", "zipnn")
    names = ("`unit`", "zstd -3", "zstd -19", "ZipNN")
    rows = [
        [
            row["label"], megabytes(row["bytes"]), f"**{megabytes(row['sizes']['dense'])}**",
            *(megabytes(row["sizes"].get(peer)) for peer in peers),
            f"{row['bpw_before']:.3f} → {row['bpw_after']:.3f}", f"{percent(row['saving'])} %",
        ]
        for row in result["rows"]
    ]  # fmt: skip
    header = ["model", "source", "`dense`", *names, "bits per weight", "saved"]
    return Table(header, rows, f"MB (10^6 bytes), whole files, everything counted. {provenance(result)}")


def types(result: Result) -> Table:
    """Sizes by type, in percent of the raw bytes."""
    columns = ("order0", "order0_all", "ours", "zstd -19", "xz -9")
    rows = []
    for row in result["rows"]:
        of = {c: row["peer_input_bytes"] if "-" in c else row["raw"] for c in columns}
        shares = {c: row[c] / of[c] if c in row else None for c in columns}
        cells = {c: percent(share) for c, share in shares.items()}
        cells["ours"] = f"**{cells['ours']}**" + (" †" if row["over_order0"] else "")
        rows.append([row["type"], row["data"], f"{row['raw']:,}", *cells.values()])
    note = (
        "Percent of the raw bytes. Order 0: of the codes, other planes raw; of all planes: no coder reaches it. "
        "Ours: payload and index; † where that is above the order 0 of the codes. zstd and xz: of the first 32 MiB at most. "
        + provenance(result)
    )
    header = ["type", "data", "bytes", "order 0,<br>codes", "order 0,<br>all planes", "ours", "zstd -19", "xz -9"]
    return Table(header, rows, note, 2)


def _range(spread: Result, digits: int) -> str:
    return f"{spread['median']:.{digits}f} ({spread['min']:.{digits}f}–{spread['max']:.{digits}f})"


def speed(result: Result) -> Table:
    """Decoding and encoding."""
    labels = {key: model["label"] for key, model in result["models"].items()}
    rows = []
    for row in result["rows"]:
        ratio = row.get("ours_vs_this")
        is_ours = row["codec"] == "lazyweights"
        rows.append([
            labels[row["model"]], f"{row['verb']}, {row['way']}", f"**{row['codec']}**" if is_ours else row["codec"], "1",
            _range(row["mb_per_s"], 0), f"{ratio['ratio_of_medians']:.2f}" if ratio else "1",
            f"{ratio['pairwise']['min']:.2f}–{ratio['pairwise']['max']:.2f}" if ratio else "",
        ])  # fmt: skip
    for row in result["slow_peers"]:
        what = f"encode, {row['slice_bytes'] / 2**20:.0f} MiB slice, one run"
        rows.append([labels[row["model"]], what, row["codec"], "1", f"{row['mb_per_s']:.1f}", "", ""])
    for row in result["scaling"]:
        ratio = row["two_vs_one"]
        rows.append([
            labels[row["model"]], f"{row['verb']}, library", "**lazyweights**", "2", _range(row["threads_2"], 0),
            f"{ratio['ratio_of_medians']:.2f} × one thread",
            f"{ratio['pairwise']['min']:.2f}–{ratio['pairwise']['max']:.2f}",
        ])  # fmt: skip
    runs = max((row["mb_per_s"]["runs"] for row in result["rows"]), default=0)
    note = (
        f"MB/s are 10^6 source bytes per second: median (min–max) of {runs} runs that alternate with the peers'; one thread "
        f"means one core. {provenance(result)}"
    )
    header = ["model", "what", "codec", "threads", "MB/s", "ours ÷ this,<br>medians", "run by run"]
    return Table(header, rows, note, 3)


def random_access(result: Result) -> Table:
    """Row groups."""
    rows = []
    for model in result["models"].values():
        for tensor in model["tensors"]:
            times = tensor["microseconds"]
            ours, payload = times["ours"], tensor["payload_bytes"]["median"]
            rows.append([
                model["label"], f"`{tensor['tensor']}`", f"{tensor['source_bytes']:,}", f"{payload:,}",
                f"{100 * payload / model['coded_bytes']:.4f} %",
                f"**{ours['median']:.0f}**", f"{ours['p99']:.0f}", f"{times['zstd -3 frame']['median']:.0f}",
            ])  # fmt: skip
    note = (
        f"One group of {result['group_rows']} rows, drawn at random, warm, one thread. Read: payload bytes (median), all that a "
        f"call reads. zstd -3: a frame of the same rows. {provenance(result)}"
    )
    header = ["model", "tensor", "bytes of<br>the rows", "bytes<br>read", "of the<br>file", "median<br>µs", "p99<br>µs",
              "zstd -3<br>median µs"]  # fmt: skip
    return Table(header, rows, note, 2)


def scalar(result: Result) -> Table:
    """Decoding without vector instructions."""
    rows = [
        [model["label"], *(_range(model[name], 0) for name in ("vector", "scalar")),
         f"{model['scalar_vs_vector']['ratio_of_medians']:.2f}"]
        for model in result["models"].values()
    ]  # fmt: skip
    note = f"MB/s (10^6 source bytes), one core, median (min–max) of runs in turns. {provenance(result)}"
    return Table(["model", "AVX-512", "scalar", "scalar ÷ AVX-512"], rows, note)


def memory(result: Result) -> Table:
    """Peak resident sets."""
    rows = [
        [
            row["file"], row["command"], str(row["threads"]), f"{row['peak_mb']:.0f}",
            f"{row['together_mb']:.0f}" if "together_mb" in row else "", f"{row['seconds']:.1f}",
        ]
        for row in result["rows"]
    ]
    note = (
        "MB (10^6 bytes) of the largest resident set of a process; all: the largest sum of those of all processes that run at a "
        f"time, where there is more than one. {provenance(result)}"
    )
    return Table(["file", "command", "threads", "peak MB", "all", "seconds"], rows, note, 2)


def coders(result: Result) -> Table:
    """Huffman and rANS on the same counts."""
    columns = ("order0_bits", "context_entropy_bits", "huffman_bits", "rans_bits")
    rows = [
        [model["label"], row["type"], *(f"{row[c]:.4f}" for c in columns)]
        for model in result["models"].values()
        for row in model["types"]
    ]
    header = ["model", "type", "order 0", "entropy given<br>the contexts", "Huffman", "rANS"]
    return Table(header, rows, f"Bits per code symbol, without tables and scales. {provenance(result)}", 2)


def llama_load(result: Result) -> Table:
    """Loading into llama.cpp."""
    rows = []
    for model in result["models"].values():
        for name, label in (("plain", "GGUF"), ("coded", "**coded file**")):
            load, memory = model["load_seconds"][name], model["memory_bytes"][name]
            ratio = model["coded_vs_plain"]["ratio_of_medians"]
            rows.append([
                model["label"], label, _range({key: 1000 * load[key] for key in ("median", "min", "max")}, 0),
                f"{ratio:.2f}" if name == "coded" else "1", f"{1000 * model['load_cpu_seconds'][name]['median']:.0f}",
                f"{model['process_seconds'][name]['median']:.2f}",
                *(f"{memory[key] / 1e6:.0f}" for key in ("peak", "anonymous", "file", "shared")),
            ])  # fmt: skip
    runs = max((model["load_seconds"]["plain"]["runs"] for model in result["models"].values()), default=0)
    note = (
        f"Load: median (min–max) of {runs} loads in a warm process, in turns. Process: from the start of Python to the end of "
        f"its first load. Memory: MB (10^6 bytes) resident in a process that generates 16 tokens. {provenance(result)}"
    )
    header = ["model", "from", "load, ms", "ratio", "processor<br>ms", "process<br>s", "peak<br>MB", "own<br>MB",
              "of files<br>MB", "memory file<br>MB"]  # fmt: skip
    return Table(header, rows, note, 2)


def capture(result: Result) -> Table:
    """Capture runs."""
    rows = [
        [row["what"], f"{row['n_tokens']:,}", f"{row['seconds']:.0f}", f"{row['peak_mb']:,.0f}", megabytes(row["output_bytes"])]
        for row in result["rows"]
    ]
    note = f"{result['files'][0]['label']} model, all cores, MB are 10^6 bytes. {result['llama_cpp']}; {provenance(result)}"
    return Table(["run", "tokens", "seconds", "peak resident MB", "output MB"], rows, note)


def hessians(result: Result) -> Table:
    """What captured Hessians are like."""
    rows = [
        [f"`{row['weight']}`", str(row["n"]), f"{row['rows']:,}", f"{row['largest']:.3g}", f"{row['least_to_largest']:.1e}",
         f"{row['diagonal_error']:.1e}"]
        for row in result["hessians"]
    ]  # fmt: skip
    header = ["weight", "columns", "rows", "largest eigenvalue", "smallest ÷ largest", "diagonal against imatrix"]
    note = "Last column: largest relative difference; an imatrix file has float32 values. " + provenance(result)
    return Table(header, rows, note)


def stock(result: Result) -> Table:
    """Stock formats."""
    rows = [
        [row["what"], megabytes(row["output_bytes"]), f"{row['bpw']:.3f}", f"{row['seconds']:.1f}", f"{row['peak_mb']:,.0f}"]
        for row in result["stock"]
    ]
    note = f"{result['files'][0]['label']} model with an imatrix, all cores. {result['llama_cpp']}; {provenance(result)}"
    return Table(["type", "MB", "bits per weight", "seconds", "peak resident MB"], rows, note)


REFERENCE_REPORT = "../../docs/reports/reference-135m/report"


def report_budgets(result: Result) -> Table:
    """The smallest files within budgets of perplexity."""
    points = {point["id"]: point for point in result["points"]}

    def cell(name: str | None, key: str) -> list[str]:
        if name is None:
            return ["–", "–"]
        point = points[name]
        grown = f"{point['increase_percent']:+.2f} ± {100 * point['ratio']['error']:.2f} %"
        return [("**" if point["kind"] == "tuned" else "") + megabytes(point[key]) + ("**" if point["kind"] == "tuned" else "")
                + (f" ({point['name']})" if point["kind"] == "stock" else ""), grown]  # fmt: skip

    rows = []
    for row in result["budgets"]:
        rows.append([
            f"+{row['percent']:g} %", *cell(row["stock"], "gguf_bytes"), cell(row["coded_stock"], "coded_bytes")[0],
            *cell(row["tuned"], "coded_bytes"), percent(row["saving"]) + " %", percent(row["saving_over_coded"]) + " %",
        ])  # fmt: skip
    header = ["budget", "stock, MB", "its perplexity", "stock, coded, MB", "tuned, coded, MB", "its perplexity", "less than it",
              "less than coded stock"]  # fmt: skip
    return Table(header, rows, _report_note(result))


def report_kld(result: Result) -> Table:
    """Tuned files against stock ones of the same divergence."""
    points = {point["id"]: point for point in result["points"]}
    rows = []
    for row in result["equal_kld"]:
        if row["stock_bytes"] is None:
            continue
        kld = points[row["point"]]["kld"]
        rows.append([
            f"{kld['value']:.4f} ± {kld['error']:.4f}", megabytes(row["coded_bytes"]), megabytes(row["stock_bytes"]),
            percent(row["saving"]) + " %", megabytes(row["coded_stock_bytes"]), percent(row["saving_over_coded"]) + " %",
        ])  # fmt: skip
    header = ["KL divergence", "tuned, coded, MB", "stock, MB", "less", "stock, coded, MB", "less"]
    return Table(header, rows, _report_note(result))


def _report_note(result: Result) -> str:
    evaluation, stock, tuned = result["evaluation"], result["calibration"], result["tuned_calibration"]
    return (
        f"{result['model']['name']}, whole files; {evaluation['n_chunks']} chunks of {evaluation['n_ctx']} tokens, "
        f"{evaluation['text']}, judged by llama.cpp. Stock formats with an imatrix of {stock['n_chunks']} chunks, tuned files "
        f"from {tuned['n_chunks']} chunks, of {tuned['text']}."
    )


def tuned_parts(result: Result) -> Table:
    """What each part of the tuned quantizer brings, at one coded size."""
    rows = []
    for row in result["parts"]:
        is_same = row.get("is_same_size", True)
        rows.append([
            row["what"], f"{row['coded_bytes'] / 1e6:.2f}" + ("" if is_same else " (another size)"), f"{row['step']:.3g}",
            f"{row['kld']:.4f} ± {row['kld_error']:.4f}",
            f"{100 * (row['ratio'] - 1):+.2f} ± {100 * row['ratio_error']:.2f} %",
        ])  # fmt: skip
    note = (
        f"Reference model; steps chosen so that the coded files have one size. Calibrated on {result['n_chunks']} chunks of "
        f"{result['text']}, judged on {result['judged_chunks']} chunks of {result['test_text']}. {provenance(result)}"
    )
    return Table(["variant", "coded MB", "step", "KL divergence", "perplexity"], rows, note)


def tuned_containers(result: Result) -> Table:
    """One step in several formats."""
    rows = [
        [
            row["container"], ", ".join(row["types"]), f"{row['gguf_bytes'] / 1e6:.2f}", f"{row['coded_bytes'] / 1e6:.2f}",
            f"{100 * row['widened']:.1f} %", f"{row['kld']:.4f} ± {row['kld_error']:.4f}",
            f"{100 * (row['ratio'] - 1):+.2f} ± {100 * row['ratio_error']:.2f} %",
        ]
        for row in result["containers"]
    ]  # fmt: skip
    header = ["container", "types", "GGUF MB", "coded MB", "most widened", "KL divergence", "perplexity"]
    note = f"Reference model, step {result['containers'][0]['step']:g}; coded files decoded and compared. {provenance(result)}"
    return Table(header, rows, note, 2)


def tuned_estimates(result: Result) -> Table:
    """What larger models would take."""
    rows = [
        [
            row["model"], f"{row['calibration_hours']:.2g} h", f"{row['calibration_memory_bytes'] / 1e9:.2g} GB",
            f"{row['quantization_hours']:.2g} h", f"{row['quantization_memory_bytes'] / 1e9:.2g} GB",
            f"{row['curvature_bytes'] / 1e9:.2g} GB", f"{row['states_bytes'] / 1e9:.2g} GB",
        ]
        for row in result["estimates"]
    ]  # fmt: skip
    header = ["model", "calibrate", "memory", "quantize, one point", "memory", "curvature file", "temporary file"]
    note = (
        f"**Estimated**, {result['estimates'][0]['threads']} cores, {result['n_chunks']} chunks: seconds of the reference "
        f"model scaled by multiplications, memory by the arrays held, without Python and mapped pages. {provenance(result)}"
    )
    return Table(header, rows, note)


def tuned_cost(result: Result) -> Table:
    """Time and memory of the tuned quantizer."""
    rows = [[row["what"], f"{row['seconds']:.0f}", f"{row['peak_mb']:,.0f}"] for row in result["cost"]]
    note = f"Reference model, whole commands with all cores, coding and verifying included. {provenance(result)}"
    return Table(["run", "seconds", "peak resident MB"], rows, note)


def gptq_import(result: Result) -> Table:
    """GPTQ checkpoints against GPTQModel's own dequantizer."""
    rows = [
        [
            str(row["bits"]), str(row["group_size"]), "yes" if row["symmetric"] else "no", "yes" if row["desc_act"] else "no",
            f"`{row['format']}`", "refused; with the fallback " * (row["refused"] is not None) + ", ".join(row["types"]),
            f"{row['n_values']:,}", str(row["n_different"]),
        ]
        for row in result["rows"]
    ]  # fmt: skip
    header = ["bits", "group size", "symmetric", "act-order", "format", "matrices become", "values compared", "different"]
    return Table(header, rows, f"GPTQModel {result['gptqmodel']}; {provenance(result)}", 6)


def gptq_oracle(result: Result) -> Table:
    """Errors of our GPTQ and of others by GPTQModel's, on its grid; the seeds of a layer together."""
    cases: dict[tuple[Any, ...], list[Result]] = {}
    for row in result["rows"]:
        case = tuple(row[key] for key in ("rows", "columns", "n_inputs", "bits", "group_size"))
        cases.setdefault(case, []).append(row)

    def ratios(of: list[Result], name: str, digits: int, errors: str = "error", base: str = "theirs") -> str:
        if not all(name in row.get(errors, {}) for row in of):
            return "–"
        found = sorted({f"{row[errors][name] / row[errors][base]:.{digits}f}" for row in of})
        return found[0] if len(found) == 1 else f"{found[0]}–{found[-1]}"

    rows = []
    for (n_rows, columns, n_inputs, bits, group_size), of in cases.items():
        rows.append([
            f"{n_rows} × {columns}", f"{n_inputs:,}", str(bits), "row" if group_size == -1 else str(group_size),
            ratios(of, "ours", 6), ratios(of, "ours", 6, "damped_error"), ratios(of, "exact", 6), ratios(of, "nearest", 2),
            ratios(of, "ours_without_lowest", 4), ratios(of, "theirs", 3, "reordered_error", "ours_in_order"),
        ])  # fmt: skip
    header = ["rows × columns", "inputs", "bits", "scale per", "**ours**", "ours,<br>damped H", "float64", "nearest",
              "ours without<br>−128", "reordered"]  # fmt: skip
    all_rows = result["rows"]
    firsts = [first for row in all_rows for first in row["first_differences"]]
    farthest = max((first["from_tie"] for first in firsts), default=0.0)
    damping = ", ".join(sorted({f"{row['damp_frac']:.0%}" for row in all_rows}))
    note = (
        "tr(E H E^T) divided by GPTQModel's; from the smallest to the largest of the seeds. Reordered: GPTQModel's when it takes "
        "groups with large inputs first, divided by ours on the grid that it finds then, in the order of the columns. Of "
        f"{sum(row['n_weights'] for row in all_rows):,} codes {sum(row['n_different']['ours'] for row in all_rows):,} are not "
        f"GPTQModel's, in {len(firsts)} of {sum(row['rows'] for row in all_rows):,} rows: "
        f"{sum(row['rows_worse'] for row in all_rows)} with a larger error, {sum(row['rows_better'] for row in all_rows)} with a "
        f"smaller one. In float64 the first such weight of a row is at most {farthest:.1e} steps "
        f"from the middle of two codes, and {sum(first['is_ours'] for first in firsts)} times nearer to ours. "
        f"GPTQModel {result['gptqmodel']}, damping {damping} of the mean of the diagonal; {provenance(result)}"
    )
    return Table(header, rows, note, 4)


def decode_unit(result: Result) -> Table:
    """Streams and units."""
    rows = []
    for row in result["rows"]:
        cells = []
        for kind in ("pairs", "singles"):
            found = row[kind]
            cells += [f"{found['cycles_per_weight']:.4f}", f"{percent(found['padding'])} %", f"{found['payload_bpw']:.3f}",
                      f"{found['rate'] / 1e9:.0f}"]  # fmt: skip
        rows.append([row["label"], row["changes"], *cells, f"{row['area_mm2']:.3f}", f"{row['points_covered']} of 6"])
    header = ["what", "changes"]
    for kind in ("4-bit pairs", "5-bit"):
        header += [f"{kind}:<br>cycles/weight", "padding", "code bits<br>per weight", "G weights/s"]
    note = (
        "Modelled. Cycles per weight: of one engine that is never short of bandwidth; G weights/s: of all engines at 1 GHz. "
        "Padding: share of what is read for the codes. Area: mm2, 7 nm class, fitted to 0.206 for the baseline. "
        + provenance(result)
    )
    return Table([*header, "area", "points<br>covered"], rows, note, 2)


def decode_unit_area(result: Result) -> Table:
    """Where the area is."""
    rows = []
    for row in result["rows"]:
        if row["key"] in ("baseline", "engines-5", "demand", "two", "two-narrow", "two-narrower"):
            parts = [f"{part:.4f}" for part in row["parts_mm2"].values()]
            rows.append([row["label"], *parts, f"{row['area_mm2']:.3f}", f"{row['pj_per_symbol']:.2f}"])
    header = ["what", *result["rows"][0]["parts_mm2"], "all", "pJ per<br>look-up"]
    return Table(header, rows, f"Modelled; mm2, 7 nm class, fitted to 0.206 for the baseline. {provenance(result)}")


def decode_unit_rans(result: Result) -> Table:
    """rANS beside Huffman codes."""
    found = result["rans"]
    rows = []
    for kind, label in (("pairs", "4-bit pairs"), ("singles", "5-bit")):
        row = found[kind]
        rows.append([
            label, f"`{row['tensor']}`", f"{row['huffman_payload_bpw']:.3f}", f"{row['payload_bpw']:.3f}",
            f"{row['cycles_per_weight']:.4f}", f"{found['area_ratio'][kind]:.2f}",
            f"{found['area_ratio_interleaved'][kind]:.2f}",
        ])  # fmt: skip
    header = ["codes", "tensor", "Huffman, code bits<br>per weight", "rANS, code bits<br>per weight",
              "rANS, cycles<br>per weight", "area ratio,<br>equal throughput", "area ratio,<br>interleaved"]  # fmt: skip
    energy = found["symbol_pj"]
    note = (
        f"Modelled. One engine; a step of {found['step_ns']:.2f} ns (fitted), {found['step_cycles']} cycles at 1 GHz. Fitted "
        f"share of bit cells in an SRAM array: {found['sram_efficiency']:.2f}. Energy of a symbol: Huffman "
        f"{energy['huffman']:.2f} pJ, rANS {energy['rans']:.2f} pJ. {provenance(result)}"
    )
    return Table(header, rows, note, 2)


_LOSSES = ("decode", "bandwidth", "latency", "imbalance", "table", "handover", "output", "idle", "drain")


def decode_unit_types(result: Result) -> Table:
    """Cycles of each type."""
    rows = []
    for model in result["models"].values():
        for row in model["types"]:
            for key, label in (("one_engine", "1, ample"), ("four_engines", "4, 102 B/cycle")):
                run = row[key]
                rows.append([
                    model["label"], row["type"], label, str(row["tensors"]), f"{row['coded_bpw']:.3f}",
                    f"{run['weights_per_cycle']:.1f}", f"{run['cycles_per_weight']:.4f}",
                    *(f"{100 * run['shares'][loss]:.1f}" for loss in _LOSSES),
                ])  # fmt: skip
    header = ["model", "type", "engines,<br>bus", "tensors", "coded bits<br>per weight", "weights<br>per cycle",
              "cycles<br>per weight"]  # fmt: skip
    speeds = ", ".join(f"{m['simulator']['million_weights_per_s']:.0f}" for m in result["models"].values())
    note = (
        "Modelled; the nine columns at the right are percent of the lane cycles. Every tensor with coded row groups is in it, "
        f"and its decoded codes are those of the decoder. Simulated in one thread: {speeds} M weights/s. {provenance(result)}"
    )
    return Table([*header, *_LOSSES], rows, note, 3)


def decode_unit_limits(result: Result) -> Table:
    """What shorter limits of codewords cost."""
    rows = []
    for model in result["models"].values():
        for row in model["types"]:
            rows.append([
                model["label"], row["type"], f"{row['payload_bpw']:.3f}",
                *(f"{100 * cost:.3f} %" for cost in row["limit_cost"].values()),
            ])  # fmt: skip
    limits = next(iter(result["models"].values()))["types"][0]["limit_cost"]
    header = ["model", "type", "code bits per weight,<br>at most 11", *(f"longer with<br>at most {limit}" for limit in limits)]
    return Table(header, rows, f"All codewords of all tensors, one best table a tensor. {provenance(result)}", 2)


def decode_unit_points(result: Result) -> Table:
    """The six operating points."""
    rows = []
    base = result["rows"][0]
    for point in result["points"]:
        kind = "pairs" if point["pairs"] else "singles"
        rows.append([
            f"{point['coded_bpw']:.3f}", "source document" if point["given"] else "assumption",
            "4 bits, pairs" if point["pairs"] else "5 bits", f"{point['required'] / 1e9:.0f}",
            "256" if point["pairs"] else "128", f"{base[kind]['rate'] / 1e9:.0f}",
            "yes" if base[kind]["rate"] >= point["required"] else "no",
        ])  # fmt: skip
    header = ["coded bits<br>per weight", "from", "codes", "needed,<br>G weights/s", "four engines,<br>peak",
              "four engines,<br>simulated", "covered"]  # fmt: skip
    return Table(header, rows, f"Modelled, at 102 GB/s and 1 GHz. {provenance(result)}", 3)


TABLES: dict[str, tuple[str, Callable[[Result], Table]]] = {
    "capture": ("capture", capture),
    "hessians": ("capture", hessians),
    "stock": ("capture", stock),
    "gptq_import": ("gptq_import_oracle", gptq_import),
    "gptq_oracle": ("gptq_oracle", gptq_oracle),
    "report_budgets": (REFERENCE_REPORT, report_budgets),
    "report_kld": (REFERENCE_REPORT, report_kld),
    "tuned_parts": ("tuned", tuned_parts),
    "tuned_containers": ("tuned", tuned_containers),
    "tuned_cost": ("tuned_cost", tuned_cost),
    "tuned_estimates": ("tuned_cost", tuned_estimates),
    "sizes": ("sizes", sizes),
    "types": ("type_sizes", types),
    "speed": ("codec_speed", speed),
    "random_access": ("random_access", random_access),
    "scalar": ("scalar_speed", scalar),
    "memory": ("memory", memory),
    "coders": ("coders", coders),
    "llama_load": ("llama_load", llama_load),
    "decode_unit": ("decode_unit", decode_unit),
    "decode_unit_points": ("decode_unit", decode_unit_points),
    "decode_unit_rans": ("decode_unit", decode_unit_rans),
    "decode_unit_area": ("decode_unit", decode_unit_area),
    "decode_unit_limits": ("decode_unit", decode_unit_limits),
    "decode_unit_types": ("decode_unit", decode_unit_types),
}
"""Name of a table: the benchmark whose JSON it shows, and what builds it."""


def load_tables(results: Path) -> dict[str, str]:
    """Return the Markdown of each table whose benchmark has JSON."""
    found = {}
    for name, (benchmark, build) in TABLES.items():
        path = results / f"{benchmark}.json"
        if path.is_file():
            found[name] = build(json.loads(path.read_text(encoding="utf-8"))).markdown()
    return found


def fill(text: str, tables: dict[str, str]) -> str:
    """Replace what stands between the markers.

    Parameters
    ----------
    text : a Markdown document
    tables : Markdown by name; tables that are not there are left as they stand

    Raises
    ------
    ValueError
        If a marker names no table of `TABLES` or lacks its other end.

    Examples
    --------
    >>> fill("<!-- table: sizes -->\\nold\\n<!-- /table -->", {"sizes": "new\\n"})
    '<!-- table: sizes -->\\nnew\\n<!-- /table -->'
    """
    found = MARKER.findall(text)
    if not len(found) == len(OPENING.findall(text)) == len(CLOSING.findall(text)) or any("<!-- table:" in b for _, b in found):
        raise ValueError("a table marker lacks its other end, or is not on a line of its own")
    unknown = {name for name, _ in found} - set(TABLES)
    if unknown:
        raise ValueError(f"there is no table {', '.join(sorted(unknown))}; there are {', '.join(TABLES)}")

    def replace(match: re.Match[str]) -> str:
        name, old = match.groups()
        return f"<!-- table: {name} -->\n{tables.get(name, old)}<!-- /table -->"

    return MARKER.sub(replace, text)


def stale_documents(repository: Path) -> dict[Path, str]:
    """Return the documents whose tables are not what the JSON says, with what they should hold."""
    tables = load_tables(repository / "benchmarks" / "results")
    stale = {}
    for path in [repository / "README.md", *sorted((repository / "docs").glob("*.md"))]:
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        try:
            filled = fill(text, tables)
        except ValueError as error:
            raise ValueError(f"{path.relative_to(repository)}: {error}") from error
        if filled != text:
            stale[path] = filled
    return stale


def main() -> int:
    """Fill or check the documents; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a table is out of date")
    args = parser.parse_args()
    try:
        stale = stale_documents(REPOSITORY)
    except ValueError as error:
        sys.exit(f"tables: {error}")
    for path, text in stale.items():
        print(f"{path.relative_to(REPOSITORY)}: {'out of date; run benchmarks/tables.py' if args.check else 'filled'}")
        if not args.check:
            path.write_text(text, encoding="utf-8")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
