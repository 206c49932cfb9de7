"""Decode and verify coded files, whole: by threads from a file, or in one forward pass from a pipe."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from lazyweights.container import coded_file
from lazyweights.container.atomic import AtomicFile
from lazyweights.container.coded_file import HEADER_BYTES, UNIT_DTYPE, CodedSpan, Header, Layout
from lazyweights.container.encoder import runs
from lazyweights.container.jobs import BufferPool, Progress, ProgressCallback, ordered_map, thread_count
from lazyweights.container.unit_codec import READ_AHEAD_WORDS, Tables, check_units, decode_rows, decode_verbatim
from lazyweights.errors import ChecksumError, FormatError, LazyWeightsError, TruncatedError

RUN_BYTES = 1 << 20
"""Source bytes decoded at a time by one thread."""


@dataclass(frozen=True)
class DecodeResult:
    """What a decoder did: names ("" for a stream), whole-file bytes, seconds."""

    source: str
    output: str
    coded_bytes: int
    source_bytes: int
    seconds: float


@dataclass(frozen=True)
class VerifyResult:
    """A coded file that is whole: its source's size and SHA-256, tensors and units checked, seconds."""

    source: str
    source_bytes: int
    sha256: str
    n_tensors: int
    n_row_groups: int
    seconds: float


@dataclass(frozen=True)
class _Job:
    """A run of units of one span: the source bytes they give, and where their payloads are."""

    span: CodedSpan
    first_unit: int  # within the span
    units: slice  # within the file
    rows: int
    n_bytes: int


def _jobs(layout: Layout) -> Iterator[_Job]:
    first = {i: unit for i, _, unit, _ in layout.spans()}
    for run in runs(layout.head.spans, RUN_BYTES):
        span = layout.head.spans[run.span]
        start = first[run.span] + run.unit
        n_units = -(-run.rows // 64) if run.rows else 1
        yield _Job(span, run.unit, slice(start, start + n_units), run.rows, run.n_bytes)


def decode_job(
    job: _Job, layout: Layout, offsets: np.ndarray, base: int, words: np.ndarray, tables: list[Tables], pool: BufferPool
) -> bytes | memoryview | np.ndarray:
    """Decode one job from `words`, whose first byte is at file offset `base`; check the checksums.

    An array that is returned belongs to `pool`.

    Raises
    ------
    FormatError, CodecError
    """
    kinds = layout.kinds[job.units]
    sizes = layout.sizes[job.units]
    starts = offsets[job.units] - base
    checksums = layout.units["checksum"][job.units]
    if job.span.plan is None:
        payload = memoryview(words.view(np.uint8))[int(starts[0]) : int(starts[0]) + int(sizes[0])]
        data = decode_verbatim(int(kinds[0]), payload, job.n_bytes, job.first_unit, int(offsets[job.units][0]))
        if coded_file.checksum(data) != int(checksums[0]):
            raise ChecksumError("a verbatim chunk is damaged", row_group=job.first_unit, offset=int(offsets[job.units][0]))
        return data
    flat = pool.take(job.n_bytes)
    packed = flat.reshape(job.rows, job.span.row_bytes)
    decode_rows(job.span, job.first_unit, kinds, sizes, starts, words, tables[job.span.plan.table_set], packed)
    check_units(job.span, job.first_unit, checksums, packed)
    return flat


def read_exactly(read: Callable[[int], bytes], n_bytes: int, what: str) -> bytes:
    """Read `n_bytes` bytes from a stream.

    Raises
    ------
    TruncatedError
        If the stream ends before.
    """
    parts = []
    left = n_bytes
    while left:
        part = read(min(left, 1 << 24))
        if not part:
            raise TruncatedError(f"the file ends inside {what}", expected=n_bytes, found=n_bytes - left)
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def read_layout(file: BinaryIO, actual_size: int | None) -> Layout:
    """Read header, head and unit table from the start of a coded file; the file then stands at the payload.

    Raises
    ------
    FormatError (and its kinds)
    """
    start = b""
    while len(start) < HEADER_BYTES:
        part = file.read(HEADER_BYTES - len(start))
        if not part:
            break
        start += part
    header: Header = coded_file.unpack_header(start, actual_size)
    head = read_exactly(file.read, header.head_bytes, "its head")
    table = read_exactly(file.read, header.n_units * UNIT_DTYPE.itemsize, "its unit table")
    padding = read_exactly(file.read, header.payload_offset - header.prefix_bytes, "its header")
    if any(padding):
        raise FormatError("the bytes before the payload are not zero", offset=header.prefix_bytes)
    return coded_file.unpack_layout(header, head, table)


def _decode_units(
    layout: Layout, fd: int, threads: int, path: str
) -> Iterator[tuple[_Job, bytes | memoryview | np.ndarray]]:
    """Yield the decoded jobs of an open file in order; the data of one is valid until the next is asked for."""
    offsets = layout.offsets()
    tables = [Tables(table_set) for table_set in layout.head.table_sets]
    inputs, outputs = BufferPool(), BufferPool()

    def decode(job: _Job) -> tuple[_Job, bytes | memoryview | np.ndarray]:
        base = int(offsets[job.units.start])
        end = int(offsets[job.units.stop])
        buffer = inputs.take(end - base + 4 * READ_AHEAD_WORDS)
        words = buffer.view(np.uint32)
        target = memoryview(words).cast("B")
        done = 0
        while done < end - base:
            n = os.preadv(fd, [target[done : end - base]], base + done)
            if n == 0:
                raise TruncatedError("the file became shorter while it was read", path=path)
            done += n
        words[(end - base) // 4 :] = 0
        data = decode_job(job, layout, offsets, base, words, tables, outputs)
        if isinstance(data, memoryview):  # still in the input buffer
            data = bytes(data)
        inputs.give(buffer)
        return job, data

    for job, data in ordered_map(decode, _jobs(layout), threads):
        yield job, data
        if isinstance(data, np.ndarray):
            outputs.give(data)


def decode_file(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    threads: int = 0,
    force: bool = False,
    progress: ProgressCallback | None = None,
) -> DecodeResult:
    """Write the file that a coded file holds; the checksum of every unit is checked.

    Raises
    ------
    FormatError, CodecError
        If the source is not a coded file or is damaged; no output is left.
    LazyWeightsError
        If a file cannot be read or written.
    """
    started = time.monotonic()
    path = os.fspath(source)
    try:
        with open(path, "rb") as file:
            layout = read_layout(file, os.fstat(file.fileno()).st_size)
            with AtomicFile(output, force, source) as sink:
                done = 0
                for job, data in _decode_units(layout, file.fileno(), thread_count(threads), path):
                    sink.write(data)
                    done += job.n_bytes
                    if progress:
                        progress(Progress(done, layout.source_size, 0, "decode", job.span.name))
    except OSError as error:
        raise LazyWeightsError(f"cannot read: {error.strerror}", path=path) from error
    except LazyWeightsError as error:
        error.path = error.path or path
        raise
    return DecodeResult(path, os.fspath(output), layout.file_size, layout.source_size, time.monotonic() - started)


def decode_stream(source: BinaryIO, sink: BinaryIO, *, progress: ProgressCallback | None = None) -> DecodeResult:
    """Decode from a pipe to a pipe, in one forward pass.

    Raises
    ------
    FormatError, CodecError
        If the source is not a coded file or is damaged. What was written before is right but not all.
    """
    started = time.monotonic()
    layout = read_layout(source, None)
    offsets = layout.offsets()
    tables = [Tables(table_set) for table_set in layout.head.table_sets]
    pool = BufferPool()
    done = 0
    for job in _jobs(layout):
        base, end = int(offsets[job.units.start]), int(offsets[job.units.stop])
        data = read_exactly(source.read, end - base, "its payload")
        words = np.zeros((end - base) // 4 + READ_AHEAD_WORDS, np.uint32)
        words.view(np.uint8)[: end - base] = np.frombuffer(data, np.uint8)
        decoded = decode_job(job, layout, offsets, base, words, tables, pool)
        sink.write(memoryview(decoded))
        if isinstance(decoded, np.ndarray):
            pool.give(decoded)
        done += job.n_bytes
        if progress:
            progress(Progress(done, layout.source_size, 0, "decode", job.span.name))
    read_exactly(source.read, coded_file.TRAILER_BYTES, "its trailer")
    return DecodeResult("", "", layout.file_size, layout.source_size, time.monotonic() - started)


def verify_file(
    source: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    threads: int = 0,
    progress: ProgressCallback | None = None,
) -> VerifyResult:
    """Decode a coded file, write nothing; check every checksum, the SHA-256 and, if given, another file's bytes.

    Raises
    ------
    ChecksumError, FormatError, CodecError
        If the file is damaged or `against` differs.
    LazyWeightsError
        If a file cannot be read.
    """
    started = time.monotonic()
    path = os.fspath(source)
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            layout = read_layout(file, os.fstat(file.fileno()).st_size)
            other = open(against, "rb") if against is not None else None  # noqa: SIM115
            try:
                done = 0
                for job, data in _decode_units(layout, file.fileno(), thread_count(threads), path):
                    digest.update(data)
                    if other is not None:
                        _compare(other, memoryview(data), job, done, os.fspath(against or ""))
                    done += job.n_bytes
                    if progress:
                        progress(Progress(done, layout.source_size, 0, "verify", job.span.name))
                if other is not None and other.read(1):
                    size = os.fstat(other.fileno()).st_size
                    raise ChecksumError("the files differ in size", path=os.fspath(against or ""),
                                        expected=layout.source_size, found=size)
            finally:
                if other is not None:
                    other.close()
    except OSError as error:
        raise LazyWeightsError(f"cannot read: {error.strerror}", path=error.filename or path) from error
    except LazyWeightsError as error:
        error.path = error.path or path
        raise
    if digest.digest() != layout.sha256:
        raise ChecksumError("the whole file's SHA-256 differs", path=path, expected=layout.sha256.hex(),
                            found=digest.hexdigest())
    n_tensors = len(layout.head.tensors)
    return VerifyResult(path, layout.source_size, digest.hexdigest(), n_tensors, len(layout.units),
                        time.monotonic() - started)


def _compare(other: BinaryIO, data: memoryview, job: _Job, offset: int, path: str) -> None:
    expected = other.read(len(data))
    if expected == data:
        return
    a = np.frombuffer(expected, np.uint8)
    b = np.frombuffer(data, np.uint8)[: a.size]
    differs = np.flatnonzero(a != b)
    at = offset + (int(differs[0]) if differs.size else a.size)
    raise ChecksumError("the files differ", path=path, tensor=job.span.name or None, offset=at)
