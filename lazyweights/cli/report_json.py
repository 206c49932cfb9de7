"""What ``inspect --json`` prints: the keys below are stable, new ones may come."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

from lazyweights.cli.type_summary import summarize_types

if TYPE_CHECKING:
    from lazyweights.container.inspect import FileReport


def report_json(report: FileReport, *, tensors: bool, indent: int | None) -> str:
    """Write a report as JSON.

    An array of the metadata that was left out becomes ``{"elided": type, "length": n}``; a number that JSON cannot
    hold (NaN, infinity) becomes a string.

    Parameters
    ----------
    report : FileReport
    tensors : bool
        Whether to list the tensors; without them the key ``tensors`` is missing.
    indent : int or None
        Spaces to indent by; None for a single line.
    """
    source, coded, n_weights = report.source_bytes, report.coded_bytes, report.n_weights
    document: dict[str, Any] = {
        "path": report.path,
        "kind": report.kind,
        "version": report.version,
        "preset": report.preset,
        "n_tensors": len(report.tensors),
        "n_weights": n_weights,
        "source_bytes": source,
        "coded_bytes": coded,
        "overhead_bytes": report.overhead_bytes,
        "source_bpw": 8 * source / n_weights if n_weights else None,
        "coded_bpw": 8 * coded / n_weights if n_weights and coded is not None else None,
        "saving": 1 - coded / source if source and coded is not None else None,
        "estimated": report.estimated,
        "sha256": report.sha256,
        "data_offset": report.data_offset,
        "alignment": report.alignment,
        "problem": report.problem,
        "metadata": {key: _plain(value) for key, value in report.metadata.items()},
        "types": [dataclasses.asdict(row) for row in summarize_types(report)],
    }
    if tensors:
        document["tensors"] = [
            {
                "name": tensor.name,
                "type_name": tensor.type_name,
                "shape": list(tensor.shape),
                "n_weights": tensor.n_weights,
                "source_bytes": tensor.source_bytes,
                "coded_bytes": tensor.coded_bytes,
                "entropy_bits": tensor.entropy_bits,
                "payload_bpw": tensor.payload_bpw,
                "bpw": tensor.bpw,
            }
            for tensor in report.tensors
        ]
    return json.dumps(document, indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    from lazyweights.container.gguf_scan import ElidedArray

    if isinstance(value, ElidedArray):
        return {"elided": value.type_name, "length": value.length}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
