"""Write coded files: two passes over the source, in bounded memory.

1. Analyse: count the symbols of every tensor, hash the source; choose field modes and tables (`planning`).
2. Encode: code each unit, decode it again and compare, write it.

The output depends on the source and the preset alone: not on threads, machine or run.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import BinaryIO, NamedTuple

import numpy as np

from lazyweights.codecs import TILE_ROWS
from lazyweights.container import coded_file, planning
from lazyweights.container.atomic import AtomicFile
from lazyweights.container.coded_file import CHUNK_BYTES, CodedSpan, Head, Layout, TableSet, TensorEntry
from lazyweights.container.gguf_scan import Scan, scan_gguf
from lazyweights.container.header_filter import ItemArray, find_arrays
from lazyweights.container.jobs import BufferPool, Progress, ProgressCallback, ordered_map, thread_count
from lazyweights.container.shared_planning import reduce_shared_counts
from lazyweights.container.shared_rows import SharedRows, find_shared_rows, first_rows_share, may_share, sample_groups
from lazyweights.container.stream_layout import newest_form
from lazyweights.container.string_kernels import follow_strings
from lazyweights.container.tensor_coder import Counts, SharedCounts, TensorCoder, TensorPlan, is_codable, tensor_coder
from lazyweights.container.unit_codec import Tables, UnitRun, encode_rows, encode_verbatim, rows_per_run, unit_run
from lazyweights.errors import FormatError, LazyWeightsError

COUNT_RUN_BYTES = 1 << 22
COUNT_PIECE_BYTES = 1 << 19
"""A run is counted in pieces that stay in the processor's cache."""

ENCODE_RUN_BYTES = 1 << 20
MAX_GROWTH = 1024
"""A coded file that would be more bytes than this above its source keeps the source whole."""

MAX_FILTERED_HEADER = 1 << 26
"""A GGUF header larger than this is compressed as it is."""

__all__ = ["EncodeResult", "Progress", "encode_file"]


@dataclass(frozen=True)
class EncodeResult:
    """What `encode_file` did.

    Attributes
    ----------
    source, output : str
    source_bytes, coded_bytes : int
        Whole files.
    n_weights : int
        Elements of all tensors.
    seconds : float
    problem : str or None
        What of the source is not understood (and therefore kept verbatim).
    """

    source: str
    output: str
    source_bytes: int
    coded_bytes: int
    n_weights: int
    seconds: float
    problem: str | None

    @property
    def source_bpw(self) -> float:
        """Bits per weight of the source, everything counted."""
        return 8 * self.source_bytes / max(self.n_weights, 1)

    @property
    def coded_bpw(self) -> float:
        """Bits per weight of the coded file, everything counted."""
        return 8 * self.coded_bytes / max(self.n_weights, 1)

    @property
    def saving(self) -> float:
        """Share of the source's bytes that coding saved."""
        return 1 - self.coded_bytes / max(self.source_bytes, 1)


@dataclass(frozen=True)
class Source:
    """An open source file."""

    path: str
    fd: int
    size: int
    stamp: tuple[int, int, int]

    def read(self, offset: int, n_bytes: int) -> bytearray:
        """Read bytes into a new array."""
        out = bytearray(n_bytes)
        self.read_into(offset, memoryview(out))
        return out

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill a view with the bytes from `offset` on.

        Raises
        ------
        LazyWeightsError
            If the file ends before.
        """
        n_bytes = len(view)
        done = 0
        while done < n_bytes:
            n = os.preadv(self.fd, [view[done:]], offset + done)
            if n == 0:
                raise LazyWeightsError("the file became shorter while it was read", path=self.path)
            done += n


def open_source(path: str, fd: int) -> Source:
    """Return the source of an open file."""
    return Source(path, fd, os.fstat(fd).st_size, _stamp(fd))


def _stamp(fd: int) -> tuple[int, int, int]:
    status = os.fstat(fd)
    return status.st_size, status.st_mtime_ns, status.st_ino


def encode_file(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    preset: str = "dense",
    threads: int = 0,
    verify: bool = True,
    force: bool = False,
    progress: ProgressCallback | None = None,
) -> EncodeResult:
    """Write the coded file of a GGUF file.

    Parameters
    ----------
    source, output : path
    preset : {"dense", "unit"}
        ``dense``: smallest file. ``unit``: what the hardware decode unit reads.
    threads : int
        0: all cores. The output bytes do not depend on it.
    verify : bool
        Decode each unit again and compare before it is written.
    force : bool
        Replace an output that is there already.
    progress : callable, optional
        Called with a `Progress` after each run of row groups.

    Raises
    ------
    FormatError
        If the source is not a GGUF file.
    LazyWeightsError
        If a file cannot be read or written, or the source changes meanwhile.
    """
    started = time.monotonic()
    path = os.fspath(source)
    if preset not in ("dense", "unit"):
        raise LazyWeightsError("the preset is not known", expected="dense or unit", found=preset)
    n_threads = thread_count(threads)
    try:
        with AtomicFile(output, force, source) as sink, open(path, "rb") as file:
            opened = open_source(path, file.fileno())
            scan = scan_source(opened)
            analysis = analyse(opened, scan, preset == "unit", n_threads, progress)
            head = _head(scan, analysis)
            coded_bytes = _write(opened, scan, head, analysis.sha256, preset == "unit", n_threads, verify, sink, progress)
            if coded_bytes > opened.size + MAX_GROWTH:
                head = Head([CodedSpan(opened.size)], [])
                sink.seek(0)
                sink.truncate()
                coded_bytes = _write(opened, scan, head, analysis.sha256, False, n_threads, verify, sink, progress)
            if _stamp(file.fileno()) != opened.stamp:
                raise LazyWeightsError("the file was changed while it was encoded; encode it again", path=path)
    except OSError as error:
        raise LazyWeightsError(f"cannot read: {error.strerror}", path=path) from error
    except LazyWeightsError as error:
        error.path = error.path or path
        raise
    n_weights = sum(int(np.prod(t.shape, dtype=np.float64)) for t in scan.tensors)
    return EncodeResult(
        path, os.fspath(output), opened.size, coded_bytes, n_weights, time.monotonic() - started, scan.problem
    )


def scan_source(source: Source) -> Scan:
    if source.size == 0:
        raise FormatError("this is an empty file, not a GGUF file", path=source.path)
    with mmap.mmap(source.fd, 0, access=mmap.ACCESS_READ) as mapped:
        return scan_gguf(mapped, source.size, lambda view, at, n: follow_strings(np.frombuffer(view, np.uint8), at, n))


def scan_spans(scan: Scan) -> list[CodedSpan]:
    """Return the scan's spans with what may be coded marked by name, type and shape (no plans yet)."""
    spans = []
    for span in scan.spans:
        tensor = scan.tensors[span.tensor] if span.tensor is not None else None
        if tensor is not None and is_codable(tensor.type_id, tensor.shape):
            spans.append(CodedSpan(span.n_bytes, tensor.name, tensor.type_id, tensor.shape))
        else:
            spans.append(CodedSpan(span.n_bytes))
    return spans


class _Run(NamedTuple):
    """Some rows of one outer index of a tensor, or a verbatim chunk (rows = 0)."""

    span: int
    offset: int
    n_bytes: int
    rows: int
    unit: int


def runs(spans: list[CodedSpan], run_bytes: int) -> Iterator[_Run]:
    """Yield the runs of all spans in file order; `unit` counts within the span."""
    offset = 0
    for i, span in enumerate(spans):
        if span.type_id < 0:
            for unit, start in enumerate(range(0, span.n_bytes, CHUNK_BYTES)):
                yield _Run(i, offset + start, min(CHUNK_BYTES, span.n_bytes - start), 0, unit)
        else:
            step = rows_per_run(span, run_bytes)
            at = offset
            for outer in range(span.outer):
                for row in range(0, span.n_rows, step):
                    rows = min(step, span.n_rows - row)
                    unit = outer * span.groups_per_outer + row // TILE_ROWS
                    yield _Run(i, at, rows * span.row_bytes, rows, unit)
                    at += rows * span.row_bytes
        offset += span.n_bytes


def header_arrays(source: Source, scan: Scan) -> tuple[int, list[ItemArray]]:
    """Return the size of the GGUF header, 0 where it is not understood, and its arrays."""
    if not scan.tensors or not 0 < scan.data_offset <= min(source.size, MAX_FILTERED_HEADER):
        return 0, []
    return scan.data_offset, find_arrays(bytes(source.read(0, scan.data_offset)))


@dataclass(frozen=True)
class Analysis:
    """Result of the first pass: tables, plans and statistics by span number of the scan, SHA-256 of the source."""

    table_sets: list[TableSet]
    plans: dict[int, TensorPlan]
    statistics: dict[int, planning.SpanStatistics]
    sha256: bytes


def analyse(
    source: Source, scan: Scan, lockstep: bool, threads: int, progress: ProgressCallback | None = None
) -> Analysis:
    """Count the symbols of every tensor, choose its plan, hash the source."""
    spans = scan_spans(scan)
    first_rows = _first_rows(spans)
    looks = ordered_map(lambda i: _look(source, spans, first_rows, i, lockstep), first_rows, threads)
    seen = dict(looks)
    pool = BufferPool()

    def count(run: _Run) -> tuple[_Run, np.ndarray, Counts | SharedCounts | None]:
        span = spans[run.span]
        buffer = pool.take(run.n_bytes)
        if run.rows == 0:
            source.read_into(run.offset, memoryview(buffer))
            return run, buffer, None
        bases, shared, coder = seen[run.span]
        if shared is not None:
            shared_counts = coder.new_shared_counts(shared)
        else:
            counts = coder.new_counts(bases)
        packed = buffer.reshape(run.rows, -1)
        step = rows_per_run(span, COUNT_PIECE_BYTES)
        for row in range(0, run.rows, step):
            piece = packed[row : row + step]
            source.read_into(run.offset + row * span.row_bytes, memoryview(piece.reshape(-1)))
            if shared is not None:
                coder.count_shared(piece, shared_counts)
            else:
                coder.count(piece, counts, plain=lockstep)
        return run, buffer, counts if shared is None else shared_counts

    planner = planning.Planner(lockstep)
    digest = hashlib.sha256()
    current: Counts | SharedCounts | None = None
    done = 0
    todo = list(runs(spans, COUNT_RUN_BYTES))
    for k, (run, buffer, counts) in enumerate(ordered_map(count, todo, threads)):
        digest.update(buffer)  # runs come in the order of the source and cover it
        pool.give(buffer)
        if counts is not None:
            if current is None:
                current = counts
            else:
                current.add(counts)  # type: ignore[arg-type]  # of the same tensor, so of the same kind
            if k + 1 == len(todo) or todo[k + 1].span != run.span:
                span = spans[run.span]
                coder = seen[run.span].coder
                n_rows = span.n_rows * span.outer
                n_units = span.groups_per_outer * span.outer
                if isinstance(current, SharedCounts):
                    planner.add_shared(reduce_shared_counts(run.span, coder, current, n_rows, n_units))
                else:
                    planner.add(planning.reduce_counts(run.span, coder, current, n_rows, n_units, lockstep))
                current = None
        done += run.n_bytes
        if progress:
            progress(Progress(done, source.size, 0, "analyse", spans[run.span].name))
    planner.finish_all()
    return Analysis(planner.table_sets, planner.plans, planner.statistics, digest.digest())


class _Look(NamedTuple):
    """What is known of a tensor before it is counted: the bases of its contexts, what its rows share, and its coder."""

    bases: tuple[int, ...]
    shared: SharedRows | None
    coder: TensorCoder


def _read_rows(source: Source, span: CodedSpan, offset: int, rows: int) -> np.ndarray:
    """Return packed rows of a tensor from `offset` on, uint8 (rows, row_bytes)."""
    return np.frombuffer(source.read(offset, rows * span.row_bytes), np.uint8).reshape(rows, -1)


def _look(
    source: Source, spans: list[CodedSpan], first_rows: dict[int, tuple[int, int]], i: int, lockstep: bool
) -> tuple[int, _Look]:
    """Look at a sample of tensor i; return its number and what is known of it."""
    span = spans[i]
    n_rows = span.n_rows * span.outer
    # Codes stay whole where rows share scales, and in preset `unit`.
    coder = tensor_coder(span.type_id, span.shape[0], newest_form(span.type_id, whole_codes=True))
    offset, rows = first_rows[i]
    arrays = coder.split(_read_rows(source, span, offset, rows))
    bases = coder.context_bases(arrays)
    shares = not lockstep and may_share(coder, n_rows) and first_rows_share(coder, arrays)
    splits = not lockstep and newest_form(span.type_id) != coder.form
    if not shares and not splits:
        return i, _Look(bases, None, coder)
    parts = []
    for first in sample_groups(n_rows, span.row_bytes):
        parts.append(_read_rows(source, span, offset + first * span.row_bytes, min(TILE_ROWS, n_rows - first)))
    sample = np.concatenate(parts)
    if shares:
        # The row groups of a sample run on from one outer index to the next, those of a tensor do not.
        are_whole = span.outer == 1 or span.n_rows % TILE_ROWS == 0
        shared = find_shared_rows(coder, sample, may_have_trellis=are_whole)
        if shared is not None:
            return i, _Look(bases, shared, coder)
    if splits:
        counts = coder.new_counts(bases)
        coder.count(sample, counts)
        splitting = tensor_coder(span.type_id, span.shape[0])
        if planning.is_worth_splitting(coder.code_counts(counts.cells.sum(axis=0)), splitting.layout.low_bits):
            coder = splitting
    return i, _Look(bases, None, coder)


def _first_rows(spans: list[CodedSpan]) -> dict[int, tuple[int, int]]:
    """Offset and number of the rows of each tensor's first row group."""
    first = {}
    offset = 0
    for i, span in enumerate(spans):
        if span.type_id >= 0:
            first[i] = (offset, span.unit_rows(0))
        offset += span.n_bytes
    return first


def _head(scan: Scan, analysis: Analysis) -> Head:
    """Return the head: spans with plans, runs of verbatim spans merged."""
    merged: list[CodedSpan] = []
    tensors: list[TensorEntry] = []
    for i, (span, scanned) in enumerate(zip(scan_spans(scan), scan.spans, strict=True)):
        plan = analysis.plans.get(i)
        if plan is not None:
            found = analysis.statistics[i]
            merged.append(
                replace(span, plan=plan, entropy_millibits=found.entropy_millibits, code_bits=found.code_bits)
            )
        elif merged and merged[-1].plan is None and i > 1:
            merged[-1] = CodedSpan(merged[-1].n_bytes + span.n_bytes)
        else:
            merged.append(CodedSpan(span.n_bytes))
        if scanned.tensor is not None:
            t = scan.tensors[scanned.tensor]
            tensors.append(TensorEntry(t.name, t.type_id, t.shape, t.offset, t.n_bytes, len(merged) - 1))
    return Head(merged, tensors, analysis.table_sets)


def _write(
    source: Source,
    scan: Scan,
    head: Head,
    sha256: bytes,
    lockstep: bool,
    threads: int,
    verify: bool,
    sink: BinaryIO,
    progress: ProgressCallback | None,
) -> int:
    packed_head, head_raw_bytes = coded_file.head_parts(head)
    units = np.zeros(sum(s.n_units for s in head.spans), coded_file.UNIT_DTYPE)
    payload_offset = coded_file.payload_offset(len(packed_head), len(units))
    tables = [Tables(table_set) for table_set in head.table_sets]
    sink.write(bytes(payload_offset))
    header_bytes, arrays = header_arrays(source, scan)
    pool = BufferPool()

    def encode(run: _Run) -> tuple[_Run, UnitRun]:
        span = head.spans[run.span]
        if span.plan is None:
            data = source.read(run.offset, run.n_bytes)
            in_header = run.offset < header_bytes
            return run, unit_run(encode_verbatim(bytes(data), arrays if in_header else None, run.offset))
        buffer = pool.take(run.n_bytes)
        source.read_into(run.offset, memoryview(buffer))
        coded = encode_rows(span, buffer.reshape(run.rows, -1), tables[span.plan.table_set], lockstep, verify)
        pool.give(buffer)
        return run, coded

    at = payload_offset
    done = k = 0
    for run, coded in ordered_map(encode, runs(head.spans, ENCODE_RUN_BYTES), threads):
        units[k : k + len(coded.entries)] = coded.entries
        k += len(coded.entries)
        for part in coded.parts:
            sink.write(part)
            at += len(part)
        done += run.n_bytes
        if progress:
            progress(Progress(done, source.size, at, "encode", head.spans[run.span].name))
    sink.write(bytes(coded_file.TRAILER_BYTES))
    layout = Layout(
        source.size, at + coded_file.TRAILER_BYTES, sha256, coded_file.FLAG_UNIT_PRESET if lockstep else 0, head, units,
        payload_offset,
    )
    sink.seek(0)
    sink.write(coded_file.pack_header(layout, packed_head, head_raw_bytes))
    sink.write(packed_head)
    sink.write(units.tobytes())
    return layout.file_size
