"""What ``inspect`` prints for people: a summary, a table by tensor type, and a table of tensors."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from lazyweights.cli.messages import bpw_text, count_text, printable, saving_text, size_text
from lazyweights.cli.tables import Column, print_table
from lazyweights.cli.type_summary import summarize_types

if TYPE_CHECKING:
    from lazyweights.container.inspect import FileReport

SHOWN_KEYS = ("general.architecture", "general.name", "general.license", "split.no", "split.count")
MAX_VALUE_CHARS = 100


def print_report(report: FileReport, *, tensors: bool, all_metadata: bool, markdown: bool) -> None:
    """Print a report on stdout."""
    _print_pairs(printable(os.path.basename(report.path)), _summary(report, all_metadata), markdown)
    print_type_table(report, markdown=markdown)
    if tensors:
        if markdown:
            print()
        print_tensor_table(report, markdown=markdown)


def _summary(report: FileReport, all_metadata: bool) -> list[tuple[str, str]]:
    source, coded, n_weights = report.source_bytes, report.coded_bytes, report.n_weights
    if report.kind == "coded":
        preset = f", preset {report.preset}" if report.preset else ""
        pairs = [("format", f"coded file of GGUF version {report.version}{preset}")]
    else:
        pairs = [("format", f"GGUF version {report.version}")]
    pairs.append(("contents", f"{len(report.tensors)} tensors, {count_text(n_weights)} weights"))
    pairs.append(("source size", _size(source, n_weights)))
    if coded is not None:
        name = "coded size (estimate)" if report.estimated else "coded size"
        pairs.append((name, f"{_size(coded, n_weights)}, {saving_text(source, coded)}"))
    if report.sha256:
        pairs.append(("SHA-256", f"{report.sha256} (of the source)" if report.kind == "coded" else report.sha256))
    pairs.append(("data", f"from offset {report.data_offset}, aligned to {report.alignment}"))
    keys = list(report.metadata) if all_metadata else [key for key in SHOWN_KEYS if key in report.metadata]
    pairs += [(key, value_text(report.metadata[key])) for key in keys]
    if report.problem:
        pairs.append(("problem", report.problem))
    return [(printable(key), printable(value)) for key, value in pairs]


def _size(n_bytes: int, n_weights: int) -> str:
    exact = f" ({n_bytes:,} bytes)" if n_bytes >= 1000 else ""
    bits = f", {bpw_text(n_bytes, n_weights)} bits per weight" if n_weights else ""
    return f"{size_text(n_bytes)}{exact}{bits}"


def _print_pairs(title: str, pairs: list[tuple[str, str]], markdown: bool) -> None:
    if markdown:
        print(f"## {title}\n")
        for key, value in pairs:
            print(f"- {key}: {value}")
        print()
        return
    print(title)
    width = max(len(key) for key, _ in pairs)
    for key, value in pairs:
        print(f"  {key:<{width}}  {value}")


def value_text(value: Any) -> str:
    """Write a metadata value on one line, cut where it is long."""
    text = repr(value) if isinstance(value, list) else str(value)
    return text if len(text) <= MAX_VALUE_CHARS else text[:MAX_VALUE_CHARS] + f"... ({len(text)} characters)"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _saving(source_bytes: int, coded_bytes: int | None) -> str:
    if coded_bytes is None or not source_bytes:
        return ""
    return f"{100 * (1 - coded_bytes / source_bytes):.2f} %"


def _entropy_heading(report: FileReport) -> str:
    """Without an estimate the entropy of a GGUF file is that of the first rows of each tensor."""
    return "entropy (sample)" if report.kind == "gguf" and not report.estimated else "entropy"


def print_type_table(report: FileReport, *, markdown: bool = False, to_stderr: bool = False) -> None:
    """Print one row for each tensor type, one for the bytes outside tensors, and the whole file."""
    columns = [
        Column("type", is_text=True),
        Column("tensors"),
        Column("weights"),
        Column("source bytes"),
        Column("bpw"),
        Column(_entropy_heading(report)),
        Column("coded bytes"),
        Column("payload bpw"),
        Column("coded bpw"),
        Column("saving"),
    ]
    rows = []
    for row in summarize_types(report):
        rows.append(
            [
                row.type_name,
                str(row.n_tensors),
                count_text(row.n_weights),
                f"{row.source_bytes:,}",
                _number(row.source_bpw),
                _number(row.entropy_bits),
                "" if row.coded_bytes is None else f"{row.coded_bytes:,}",
                _number(row.payload_bpw),
                _number(row.coded_bpw),
                _saving(row.source_bytes, row.coded_bytes),
            ]
        )
    source, coded = report.source_bytes, report.coded_bytes
    rest = source - sum(tensor.source_bytes for tensor in report.tensors)
    coded_rest = None if coded is None else coded - sum(tensor.coded_bytes or 0 for tensor in report.tensors)
    coded_cell = "" if coded_rest is None else f"{coded_rest:,}"
    rows.append(["(other)", "", "", f"{rest:,}", "", "", coded_cell, "", "", _saving(rest, coded_rest)])
    total = [
        "file",
        str(len(report.tensors)),
        count_text(report.n_weights),
        f"{source:,}",
        bpw_text(source, report.n_weights),
        "",
        "" if coded is None else f"{coded:,}",
        "",
        "" if coded is None else bpw_text(coded, report.n_weights),
        _saving(source, coded),
    ]
    print_table(columns, rows, total, markdown=markdown, to_stderr=to_stderr)


def print_tensor_table(report: FileReport, *, markdown: bool = False) -> None:
    """Print one row for each tensor."""
    columns = [
        Column("tensor", is_text=True),
        Column("type", is_text=True),
        Column("shape", is_text=True),
        Column("source bytes"),
        Column(_entropy_heading(report)),
        Column("coded bytes"),
        Column("payload bpw"),
        Column("bpw"),
        Column("saving"),
    ]
    rows = [
        [
            tensor.name,
            tensor.type_name,
            " x ".join(map(str, tensor.shape)),
            f"{tensor.source_bytes:,}",
            _number(tensor.entropy_bits),
            "" if tensor.coded_bytes is None else f"{tensor.coded_bytes:,}",
            _number(tensor.payload_bpw),
            _number(tensor.bpw),
            _saving(tensor.source_bytes, tensor.coded_bytes),
        ]
        for tensor in report.tensors
    ]
    print_table(columns, rows, markdown=markdown)
