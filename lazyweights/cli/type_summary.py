"""Sums over the tensors of one type."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lazyweights.container.inspect import FileReport, TensorReport


@dataclass(frozen=True)
class TypeSummary:
    """All tensors of one type.

    Attributes
    ----------
    type_name : str
    n_tensors, n_weights, source_bytes : int
    coded_bytes : int or None
        None if it is not known of every tensor.
    entropy_bits, payload_bpw : float or None
        Means over the weights of the tensors that have them.
    source_bpw, coded_bpw : float or None
        Bits per weight, everything in the tensors counted; None without weights or `coded_bytes`.
    """

    type_name: str
    n_tensors: int
    n_weights: int
    source_bytes: int
    coded_bytes: int | None
    entropy_bits: float | None
    payload_bpw: float | None
    source_bpw: float | None
    coded_bpw: float | None


def summarize_types(report: FileReport) -> list[TypeSummary]:
    """Sum up the tensors of a file by type, the type with the most source bytes first."""
    by_type: dict[str, list[TensorReport]] = {}
    for tensor in report.tensors:
        by_type.setdefault(tensor.type_name, []).append(tensor)
    rows = [_summarize(type_name, tensors) for type_name, tensors in by_type.items()]
    return sorted(rows, key=lambda row: (-row.source_bytes, row.type_name))


def _summarize(type_name: str, tensors: list[TensorReport]) -> TypeSummary:
    n_weights = sum(tensor.n_weights for tensor in tensors)
    source_bytes = sum(tensor.source_bytes for tensor in tensors)
    coded = [tensor.coded_bytes for tensor in tensors if tensor.coded_bytes is not None]
    coded_bytes = sum(coded) if len(coded) == len(tensors) else None
    return TypeSummary(
        type_name=type_name,
        n_tensors=len(tensors),
        n_weights=n_weights,
        source_bytes=source_bytes,
        coded_bytes=coded_bytes,
        entropy_bits=_mean((tensor.entropy_bits, tensor.n_weights) for tensor in tensors),
        payload_bpw=_mean((tensor.payload_bpw, tensor.n_weights) for tensor in tensors),
        source_bpw=8 * source_bytes / n_weights if n_weights else None,
        coded_bpw=8 * coded_bytes / n_weights if n_weights and coded_bytes is not None else None,
    )


def _mean(values: Iterable[tuple[float | None, int]]) -> float | None:
    known = [(value, weight) for value, weight in values if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None
