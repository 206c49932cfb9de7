"""What is in a GGUF or coded file, and what coding does or would do to it."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from lazyweights.blocks.types import type_name
from lazyweights.container import coded_file, planning
from lazyweights.container.encoder import Source, analyse, header_arrays, open_source, scan_source, scan_spans
from lazyweights.container.gguf_scan import Scan, read_metadata
from lazyweights.container.gguf_values import CODED_MAGIC
from lazyweights.container.jobs import ProgressCallback, thread_count
from lazyweights.container.reader import CodedFile
from lazyweights.container.stream_layout import newest_form
from lazyweights.container.tensor_coder import TensorPlan, is_codable, tensor_coder
from lazyweights.container.unit_codec import encode_verbatim
from lazyweights.errors import LazyWeightsError

SAMPLE_ROWS = 64
"""Rows of each tensor from which `inspect_file` without `estimate` takes the entropy of a GGUF file."""


@dataclass(frozen=True)
class TensorReport:
    """One tensor.

    Attributes
    ----------
    name, type_name : str
    shape : tuple of int
        GGUF order.
    n_weights, source_bytes : int
    coded_bytes : int or None
        Payload and unit table entries; None where it is not known.
    entropy_bits : float or None
        Order-0 entropy of the codes, bits per weight (trellis codes: of their indices; floats: exponent and raw bits together).
    payload_bpw : float or None
        Bits per weight of the codes alone, coded.
    bpw : float
        Bits per weight with scales, padding and index; of the source where the coded size is not known.
    is_trellis : bool
        Whether the tensor is coded by the indices of trellis codes; False where that is not known.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    n_weights: int
    source_bytes: int
    coded_bytes: int | None
    entropy_bits: float | None
    payload_bpw: float | None
    bpw: float
    is_trellis: bool = False


@dataclass(frozen=True)
class FileReport:
    """One file; see `TensorReport` for the tensors.

    Attributes
    ----------
    kind : str
        ``"gguf"`` or ``"coded"``.
    coded_bytes : int or None
        Size of the coded file: measured, or estimated where `estimated` is set.
    overhead_bytes : int or None
        Bytes of the coded file that belong to no tensor: header, tables, verbatim bytes of the source.
    estimated : bool
        Whether coded sizes are computed rather than measured. The entropy of a GGUF file that was not estimated comes
        from a sample of each tensor's first rows.
    """

    path: str
    kind: str
    source_bytes: int
    coded_bytes: int | None
    sha256: str | None
    preset: str | None
    version: int
    n_weights: int
    overhead_bytes: int | None
    metadata: dict[str, Any]
    tensors: tuple[TensorReport, ...]
    estimated: bool
    problem: str | None
    data_offset: int
    alignment: int


def inspect_file(
    path: str | os.PathLike[str],
    *,
    estimate: bool = False,
    threads: int = 0,
    progress: ProgressCallback | None = None,
    max_array: int | None = 8,
) -> FileReport:
    """Report on a GGUF or coded file.

    Parameters
    ----------
    path : path
    estimate : bool
        For a GGUF file: compute what coding would save (reads the whole file).
    threads : int
        For `estimate`; 0: all cores.
    max_array : int or None
        Longer metadata arrays are elided.

    Raises
    ------
    FormatError, LazyWeightsError
        If the file is neither, is damaged, or cannot be read.
    """
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            if file.read(4) == CODED_MAGIC:
                return _inspect_coded(name, max_array)
            return _inspect_gguf(open_source(name, file.fileno()), estimate, thread_count(threads), progress, max_array)
    except OSError as error:
        raise LazyWeightsError(f"cannot read: {error.strerror}", path=name) from error
    except LazyWeightsError as error:
        error.path = error.path or name
        raise


def _is_trellis(plan: TensorPlan | None) -> bool:
    return plan is not None and plan.shared is not None and plan.shared.is_trellis


def _count(shape: tuple[int, ...]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n


def _inspect_coded(path: str, max_array: int | None) -> FileReport:
    with CodedFile(path) as file:
        layout = file.layout
        header = file.header_bytes()
        metadata = read_metadata(header, max_array=max_array)
        sizes = (layout.sizes + 3) & ~np.int64(3)
        first_unit = {i: unit for i, _, unit, _ in layout.spans()}
        span_offset = {i: offset for i, _, _, offset in layout.spans()}
        reports = []
        in_tensors = 0
        for t in file.tensors():
            span = layout.head.spans[t.span]
            n_weights = _count(t.shape)
            if span.is_coded:
                units = slice(first_unit[t.span], first_unit[t.span] + span.n_units)
                coded = int(sizes[units].sum()) + coded_file.UNIT_DTYPE.itemsize * span.n_units
                in_tensors += coded
                reports.append(
                    TensorReport(
                        t.name, type_name(t.type_id), t.shape, n_weights, t.n_bytes, coded,
                        span.entropy_millibits / 1000, span.code_bits / n_weights, 8 * coded / n_weights,
                        _is_trellis(span.plan),
                    )
                )
            else:
                coded = _verbatim_share(layout, first_unit[t.span], span, t.offset - span_offset[t.span], t.n_bytes)
                in_tensors += coded
                reports.append(
                    TensorReport(
                        t.name, type_name(t.type_id), t.shape, n_weights, t.n_bytes, coded, None, None,
                        8 * coded / max(n_weights, 1),
                    )
                )
        version = int.from_bytes(header[4:8], "little") if len(header) >= 8 else 0
        return FileReport(
            path, "coded", layout.source_size, layout.file_size, layout.sha256.hex(), layout.preset,
            version if version < 1 << 16 else 3, sum(r.n_weights for r in reports),
            max(layout.file_size - in_tensors, 0), metadata, tuple(reports), False, None, len(header),
            int(metadata.get("general.alignment", 32)) if isinstance(metadata.get("general.alignment", 32), int) else 32,
        )


def _verbatim_share(layout: coded_file.Layout, first_unit: int, span: coded_file.CodedSpan, at: int, n_bytes: int) -> int:
    """Payload bytes that stand for bytes ``at .. at + n_bytes`` of a verbatim span: each chunk's shared out by length."""
    total = 0
    for unit in range(at // coded_file.CHUNK_BYTES, -(-(at + n_bytes) // coded_file.CHUNK_BYTES)):
        start = unit * coded_file.CHUNK_BYTES
        inside = min(at + n_bytes, start + coded_file.CHUNK_BYTES) - max(at, start)
        total += int(layout.sizes[first_unit + unit]) * inside // span.unit_bytes(unit)
    return total


def _inspect_gguf(
    source: Source, estimate: bool, threads: int, progress: ProgressCallback | None, max_array: int | None
) -> FileReport:
    scan = scan_source(source)
    with mmap.mmap(source.fd, 0, access=mmap.ACCESS_READ) as mapped:
        metadata = read_metadata(mapped, max_array=max_array)
    if estimate:
        analysis = analyse(source, scan, False, threads, progress)
        statistics, plans, digest = analysis.statistics, analysis.plans, analysis.sha256.hex()
    else:
        statistics, plans, digest = _sampled(source, scan), None, None
    reports = []
    total = 0
    spans = scan_spans(scan)
    for i, scanned in enumerate(scan.spans):
        if scanned.tensor is None:
            total += scanned.n_bytes
            continue
        t = scan.tensors[scanned.tensor]
        n_weights = _count(t.shape)
        coded = entropy = payload = None
        found = statistics.get(i)
        if found is not None:
            entropy = found.entropy_millibits / 1000
        if plans is not None:
            coded = t.n_bytes
            if i in plans and found is not None:
                units = spans[i].groups_per_outer * spans[i].outer
                coded = min(coded, -(-found.coded_bits // 8)) + (coded_file.UNIT_DTYPE.itemsize + 2) * units
                payload = found.code_bits / n_weights
            total += coded
        reports.append(
            TensorReport(
                t.name, type_name(t.type_id), t.shape, n_weights, t.n_bytes, coded, entropy, payload,
                8 * (coded if coded is not None else t.n_bytes) / max(n_weights, 1),
                _is_trellis(plans.get(i)) if plans is not None else False,
            )
        )
    overhead = None
    if estimate:
        header = source.read(0, min(scan.data_offset, source.size))
        verbatim = total - sum(r.coded_bytes or 0 for r in reports)
        _, arrays = header_arrays(source, scan)
        chunks = range(0, len(header), coded_file.CHUNK_BYTES)
        packed = [encode_verbatim(bytes(header[at : at + coded_file.CHUNK_BYTES]), arrays, at) for at in chunks]
        saved = len(header) - sum(len(unit.payload) for unit in packed)
        overhead = verbatim - saved + coded_file.HEADER_BYTES + coded_file.TRAILER_BYTES
        total = overhead + sum(r.coded_bytes or 0 for r in reports)
    return FileReport(
        source.path, "gguf", source.size, total if estimate else None, digest, None, scan.version,
        sum(r.n_weights for r in reports), overhead, metadata, tuple(reports), estimate, scan.problem, scan.data_offset,
        scan.alignment,
    )


def _sampled(source: Source, scan: Scan) -> dict[int, planning.SpanStatistics]:
    """Entropy of the codes in each tensor's first rows."""
    found = {}
    for i, scanned in enumerate(scan.spans):
        tensor = scan.tensors[scanned.tensor] if scanned.tensor is not None else None
        if tensor is None or not is_codable(tensor.type_id, tensor.shape):
            continue
        coder = tensor_coder(tensor.type_id, tensor.shape[0], newest_form(tensor.type_id, whole_codes=True))
        n_rows = scanned.n_bytes // coder.row_bytes
        rows = min(SAMPLE_ROWS, n_rows)
        packed = np.frombuffer(source.read(scanned.offset, rows * coder.row_bytes), np.uint8).reshape(rows, -1)
        found[i] = planning.sample_statistics(coder, packed, n_rows)
    return found
