"""The document of a report: everything that the JSON, the Markdown and the page say, as JSON values.

Keys are stable from one `SCHEMA_VERSION` on; new ones may come.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

import lazyweights
from lazyweights.container.inspect import inspect_file
from lazyweights.llama import library
from lazyweights.reports.comparison import BudgetChoice, at_equal_kld, choose
from lazyweights.reports.model_report import Measurements, ReportOptions
from lazyweights.reports.points import STOCK, TUNED, Point, finite
from lazyweights.reports.tensor_facts import TensorFacts, count_entropy

SCHEMA, SCHEMA_VERSION = "lazyweights.report", 1
MAX_SHOWN = 8
"""Points whose tensors are shown."""

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")


def build_document(
    measured: Measurements, source: str | os.PathLike[str], text: str | os.PathLike[str], options: ReportOptions
) -> dict[str, Any]:
    """Put everything into one document.

    Parameters
    ----------
    measured : Measurements
    source, text : str or os.PathLike
        Only their names are told, not their folders.
    options : ReportOptions
    """
    points = measured.points
    choices = choose(points, sorted(options.budgets))
    shown = shown_points(points, choices)
    metadata = inspect_file(source).metadata
    title = metadata.get("general.name")
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "model": {
            "file": os.path.basename(os.fspath(source)),
            "name": title if isinstance(title, str) and title else os.path.basename(os.fspath(source)),
            "architecture": str(metadata.get("general.architecture", "")),
        },
        "evaluation": {"text": os.path.basename(os.fspath(text)), **points[0].options.get("evaluation", {})},
        "calibration": measured.calibration,
        "tuned_calibration": measured.curvature if any(point.kind == TUNED for point in points) else None,
        "versions": {"lazyweights": lazyweights.__version__, "llama_cpp": library.build_text(), "numpy": np.__version__},
        "machine": machine(),
        "budgets": [_choice_dict(choice) for choice in choices],
        "equal_kld": [
            {
                "point": row.point.id, "kld": row.point.kld and row.point.kld.value, "coded_bytes": row.point.coded_bytes,
                "stock_bytes": row.stock_bytes, "saving": row.saving, "coded_stock_bytes": row.coded_stock_bytes,
                "saving_over_coded": row.saving_over_coded,
            }
            for row in at_equal_kld(points)
        ],
        "left_out": [{"name": name, "reason": reason} for name, reason in measured.left_out],
        "shown": [point.id for point in shown],
        "points": [_point_dict(point) for point in points],
    }  # fmt: skip


def _point_dict(point: Point) -> dict[str, Any]:
    found = point.as_dict()
    tensors = found.pop("tensors")
    for tensor in tensors:  # the counts of each tensor stay in the file of the point
        del tensor["counts"], tensor["first_code"]
    seconds = found.pop("seconds")
    return {
        "id": point.id, **found, "increase_percent": finite(100 * point.increase), "seconds": seconds,
        "kinds": kind_rows(point.tensors), "tensors": tensors,
    }  # fmt: skip


def _choice_dict(choice: BudgetChoice) -> dict[str, Any]:
    def named(point: Point | None) -> str | None:
        return None if point is None else point.id

    return {
        "percent": choice.budget, "stock": named(choice.stock), "coded_stock": named(choice.coded_stock),
        "tuned": named(choice.tuned), "saving": choice.saving, "saving_over_coded": choice.saving_over_coded,
        "saving_by_coding": choice.saving_by_coding,
    }  # fmt: skip


def shown_points(points: Sequence[Point], choices: Sequence[BudgetChoice]) -> list[Point]:
    """Choose the points whose tensors are shown: for each budget the best tuned one, then the best stock one."""
    wanted = [choice.tuned for choice in choices] + [choice.stock for choice in choices]
    found = list({point.id: point for point in wanted if point is not None}.values())
    if not found:
        found = [point for kind in (TUNED, STOCK) for point in points if point.kind == kind]
    return found[:MAX_SHOWN]


def split_name(name: str) -> tuple[int | None, str]:
    """Return the layer of a tensor, None for those outside layers, and what kind it is.

    >>> split_name("blk.7.attn_q.weight"), split_name("output_norm.weight")
    ((7, 'attn_q'), (None, 'output_norm'))
    """
    found = _BLOCK.fullmatch(name)
    layer, rest = (int(found[1]), found[2]) if found else (None, name)
    return layer, rest.removesuffix(".weight")


def kind_rows(tensors: Sequence[TensorFacts]) -> list[dict[str, Any]]:
    """Sum up tensors by kind and type, in the order of the file: bytes, entropy, and the histogram of codes."""
    groups: dict[tuple[str, str], list[TensorFacts]] = {}
    for tensor in tensors:
        groups.setdefault((split_name(tensor.name)[1], tensor.type), []).append(tensor)
    rows = []
    for (kind, type_name), members in groups.items():
        first, counts = _sum_counts(members)
        n_weights = sum(tensor.n_weights for tensor in members)
        known = [tensor for tensor in members if tensor.entropy_bits is not None and tensor.n_weights]
        own = sum((tensor.entropy_bits or 0) * tensor.n_weights for tensor in known)
        rows.append({
            "kind": kind, "type": type_name, "n_tensors": len(members), "n_weights": n_weights,
            "packed_bytes": sum(tensor.packed_bytes for tensor in members),
            "coded_bytes": sum(tensor.coded_bytes for tensor in members),
            "entropy_bits": own / sum(tensor.n_weights for tensor in known) if known else None,
            "pooled_entropy_bits": count_entropy(np.array(counts)) if counts else None,
            "first_code": first, "counts": counts,
        })  # fmt: skip
    return rows


def _sum_counts(tensors: Sequence[TensorFacts]) -> tuple[int, list[int]]:
    used = [tensor for tensor in tensors if tensor.counts]
    if not used:
        return 0, []
    first = min(tensor.first_code for tensor in used)
    last = max(tensor.first_code + len(tensor.counts) for tensor in used)
    total = np.zeros(last - first, np.int64)
    for tensor in used:
        total[tensor.first_code - first : tensor.first_code - first + len(tensor.counts)] += tensor.counts
    return first, [int(n) for n in total]


def machine() -> dict[str, Any]:
    """Say on what machine this runs."""
    return {
        "processor": _processor(), "cores": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}",
        "python": ".".join(map(str, sys.version_info[:3])),
    }  # fmt: skip


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            found = re.search(r"^model name\s*: (.+)$", file.read(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def document_json(document: dict[str, Any]) -> str:
    """Write a document as JSON; lists of numbers stay on one line."""
    text = json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False)
    return re.sub(r"\[\n\s*([-\d.e+,\s]+?)\n\s*\]", lambda found: "[" + re.sub(r"\s+", "", found[1]) + "]", text) + "\n"
