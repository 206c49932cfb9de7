"""Decode and verify coded files, whole: by threads from a file, or in one forward pass from a pipe."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

import numpy as np

from lazyweights.codecs import TILE_ROWS
from lazyweights.container import coded_file
from lazyweights.container.atomic import AtomicFile
from lazyweights.container.coded_file import HEADER_BYTES, UNIT_DTYPE, Header, Layout
from lazyweights.container.encoder import runs
from lazyweights.container.jobs import BufferPool, Progress, ProgressCallback, ordered_map, thread_count
from lazyweights.container.unit_codec import (
    READ_AHEAD_WORDS,
    Part,
    PreparedParts,
    Tables,
    Units,
    decode_parts,
    prepare_parts,
    units_of,
)
from lazyweights.errors import ChecksumError, FormatError, LazyWeightsError, TruncatedError

RUN_BYTES, THREADED_RUN_BYTES = 1 << 22, 1 << 21
"""Source bytes decoded at a time: by one thread, and by each of several, which share a cache and come to an end together."""

IN_FLIGHT = 8
"""Results that wait for their turn, at least: the header takes longer than the jobs behind it."""

KEPT_BYTES = 1 << 25
"""Bytes of the coded file that stay in memory behind the place where a decoder is."""

_POPULATE_READ = 22
"""Advice of Linux 5.14 and later that Python's `mmap` does not name: read what is mapped now, not page by page."""


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
class Placed:
    """How far `iter_placed` is.

    Attributes
    ----------
    n_bytes : int
        So many bytes, counted from the start, are there.
    header_bytes : int
        The first coded tensor starts here, so the GGUF header ends before; the size where no tensor is coded.
    source_bytes : int
        Size of the whole.
    """

    n_bytes: int
    header_bytes: int
    source_bytes: int


@dataclass(frozen=True)
class _Job:
    """Neighbouring units that are decoded together: row groups of some tensors and chunks of verbatim bytes."""

    prepared: PreparedParts
    units: slice  # within the file
    first_byte: int  # within the source
    n_bytes: int
    table_set: int  # of all plans; -1 where all bytes are verbatim

    @property
    def parts(self) -> list[Part]:
        return self.prepared.parts

    @property
    def name(self) -> str:
        """The first tensor, "" where there is none."""
        return next((part.span.name for part in self.parts if part.span.name), "")


def _jobs(layout: Layout, threads: int = 1) -> list[_Job]:
    """Return the jobs of a file in order, a few MiB each: many tensors are smaller than that."""
    cuts = list(_cut(layout, threads))
    prepared = prepare_parts(cut.parts for cut in cuts)
    return [_Job(mine, *cut[1:]) for mine, cut in zip(prepared, cuts, strict=True)]


class _Cut(NamedTuple):
    """What is known of a `_Job` before it is prepared."""

    parts: list[Part]
    units: slice
    first_byte: int
    n_bytes: int
    table_set: int


def _cut(layout: Layout, threads: int) -> Iterator[_Cut]:
    """Yield what becomes a job each.

    The bytes before the first coded tensor are jobs of their own: who wants the header first does not wait for a tensor.
    """
    parts: list[Part] = []
    unit = start = first_byte = n_bytes = 0
    table_set = -1
    in_header = True
    run_bytes = RUN_BYTES if threads == 1 else THREADED_RUN_BYTES
    for run in runs(layout.head.spans, run_bytes):
        span = layout.head.spans[run.span]
        mine = span.plan.table_set if span.plan is not None else table_set
        ends_header = in_header and span.plan is not None
        in_header &= span.plan is None
        if parts and (n_bytes + run.n_bytes > run_bytes or (mine != table_set and table_set >= 0) or ends_header):
            yield _Cut(parts, slice(start, unit), first_byte, n_bytes, table_set)
            first_byte += n_bytes
            parts, n_bytes, start = [], 0, unit
            table_set = -1
            mine = span.plan.table_set if span.plan is not None else -1
        table_set = mine
        n_units = -(-run.rows // TILE_ROWS) if run.rows else 1
        parts.append(Part(span, run.unit, n_units, run.rows, n_bytes, unit - start))
        unit += n_units
        n_bytes += run.n_bytes
    if parts:
        yield _Cut(parts, slice(start, unit), first_byte, n_bytes, table_set)


def _units(layout: Layout) -> Units:
    """Return all units of a file; offsets count from its start."""
    return units_of(layout.kinds, layout.sizes, layout.offsets()[:-1], layout.units["checksum"])


def _decode_job(job: _Job, units: Units, words: np.ndarray, base: int, tables: list[Tables], pool: BufferPool) -> np.ndarray:
    """Decode one job from `words`, whose first byte is at file offset `base`; compare the checksums.

    `units` : those of the job. The array that is returned, uint8, belongs to `pool`.

    Raises
    ------
    FormatError, CodecError
    """
    flat = pool.take(job.n_bytes)
    decode_parts(job.prepared, units, words, tables[job.table_set] if job.table_set >= 0 else None, flat, base)
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


class _MappedFile:
    """A file in memory, of which only what was decoded last takes room. Thread-safe.

    Parameters
    ----------
    fd, size, path : of the file
    reads_ahead : whether to read what is asked for at once, not page by page. Quicker for one thread; several would wait
        for each other
    """

    def __init__(self, fd: int, size: int, path: str, reads_ahead: bool) -> None:
        self._path = path
        try:
            self._map = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise TruncatedError("the file became shorter while it was read", path=path) from error
        self._reads_ahead = reads_ahead and sys.platform == "linux"
        self._forgotten = 0

    def words(self) -> np.ndarray:
        """Return the whole file, uint32."""
        return np.frombuffer(self._map, "<u4", len(self._map) // 4)

    def read_ahead(self, base: int, end: int) -> None:
        """Read bytes `base` to `end` and what a decoder may read behind them.

        Raises
        ------
        TruncatedError
            If the file is no longer as long as that.
        """
        if self._reads_ahead:
            start = base // mmap.PAGESIZE * mmap.PAGESIZE
            try:
                self._map.madvise(_POPULATE_READ, start, end + 4 * READ_AHEAD_WORDS - start)
            except OSError as error:
                if error.errno == errno.EFAULT:
                    raise TruncatedError("the file became shorter while it was read", path=self._path) from error
                self._reads_ahead = False  # an older system

    def forget(self, end: int) -> None:
        """Let go of the memory of what lies `KEPT_BYTES` before byte `end`, in large pieces; it can be read again."""
        end = (end // KEPT_BYTES - 1) * KEPT_BYTES
        if end > self._forgotten and hasattr(mmap, "MADV_DONTNEED"):
            start, self._forgotten = self._forgotten, end
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)

    def close(self) -> None:
        """Give back map and file, unless what `words` returned is still in use: then that happens when it is no more."""
        with suppress(BufferError):
            self._map.close()


_OUTPUTS = BufferPool()
"""For decoded jobs. They stay for the next file: the system clears fresh ones, which takes a tenth of the time of decoding."""


class _Worker:
    """Decodes the jobs of an open file. Thread-safe."""

    def __init__(self, layout: Layout, fd: int, path: str, threads: int) -> None:
        self._file = _MappedFile(fd, layout.file_size, path, threads == 1)
        self._words: np.ndarray | None = self._file.words()
        self._offsets = layout.offsets()
        self._units = _units(layout)
        self._tables = [Tables(table_set) for table_set in layout.head.table_sets]

    def decode(self, job: _Job) -> np.ndarray:
        """Return the bytes of a job, uint8, valid until they are given back with `release`.

        Raises
        ------
        FormatError, CodecError
        """
        assert self._words is not None
        base, end = int(self._offsets[job.units.start]), int(self._offsets[job.units.stop])
        self._file.read_ahead(base, end)
        try:
            return _decode_job(job, self._units.some(job.units), self._words, 0, self._tables, _OUTPUTS)
        except LazyWeightsError as error:
            traceback.clear_frames(error.__traceback__)  # they hold the map, and with it the file, as long as the error lives
            raise
        finally:
            self._file.forget(end)

    def release(self, data: np.ndarray) -> None:
        """Take back what `decode` returned."""
        _OUTPUTS.give(data)

    def close(self) -> None:
        """Give back the file; nothing can be decoded after that."""
        self._words = None
        self._file.close()


def _decode_units(layout: Layout, fd: int, threads: int, path: str) -> Iterator[tuple[_Job, np.ndarray]]:
    """Yield the decoded jobs of an open file in order; the data of one is valid until the next is asked for."""
    worker = _Worker(layout, fd, path, threads)
    jobs = _jobs(layout, threads)
    with closing(worker):
        for job, data in ordered_map(lambda job: (job, worker.decode(job)), jobs, threads, in_flight=IN_FLIGHT):
            yield job, data
            worker.release(data)


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Give the errors of the body the file they are about; those of the system become ours."""
    try:
        yield
    except OSError as error:
        raise LazyWeightsError(f"cannot read: {error.strerror}", path=path) from error
    except LazyWeightsError as error:
        error.path = error.path or path
        raise


def iter_decoded(
    source: str | os.PathLike[str], *, threads: int = 0, progress: ProgressCallback | None = None
) -> Iterator[memoryview]:
    """Yield the bytes of the file that a coded file holds, part by part; a part is valid until the next is asked for.

    The checksum of every unit is checked.

    Raises
    ------
    FormatError, CodecError
        If the source is not a coded file or is damaged; what was yielded before is right.
    LazyWeightsError
        If the file cannot be read.
    """
    path = os.fspath(source)
    with _naming(path), open(path, "rb") as file:
        layout = read_layout(file, os.fstat(file.fileno()).st_size)
        done = 0
        for job, data in _decode_units(layout, file.fileno(), thread_count(threads), path):
            yield memoryview(data)
            done += job.n_bytes
            if progress:
                progress(Progress(done, layout.source_size, 0, "decode", job.name))


def iter_placed(
    source: str | os.PathLike[str], sink: int, *, threads: int = 0, progress: ProgressCallback | None = None
) -> Generator[Placed, None, None]:
    """Decode a coded file into an open file, each part at its place by the thread that decoded it.

    Quicker than writing what `iter_decoded` yields: a part is copied by its thread while it is in that core's cache, and
    no thread waits for another.

    Parameters
    ----------
    source : str or os.PathLike
        A coded file.
    sink : int
        Descriptor of an empty file that can be written at any place.
    threads, progress
        As for `iter_decoded`.

    Yields
    ------
    Placed
        The first time nothing is there, the last time all of it.

    Raises
    ------
    FormatError, CodecError
        If the source is not a coded file or is damaged.
    LazyWeightsError
        If a file cannot be read or written.
    """
    path = os.fspath(source)
    with _naming(path), open(path, "rb") as file:
        layout = read_layout(file, os.fstat(file.fileno()).st_size)
        size = layout.source_size
        header_bytes = next((offset for _, span, _, offset in layout.spans() if span.is_coded), size)
        yield Placed(0, header_bytes, size)
        n_threads = thread_count(threads)
        worker = _Worker(layout, file.fileno(), path, n_threads)

        def place(job: _Job) -> _Job:
            data = worker.decode(job)
            _write_at(sink, data, job.first_byte)
            worker.release(data)
            return job

        with closing(worker):
            for job in ordered_map(place, _jobs(layout, n_threads), n_threads, in_flight=IN_FLIGHT):
                done = job.first_byte + job.n_bytes
                if progress:
                    progress(Progress(done, size, 0, "decode", job.name))
                yield Placed(done, header_bytes, size)


def load_kernels(source: str | os.PathLike[str]) -> None:
    """Decode the first part of each tensor type of a coded file, so that the compiled kernels are there.

    Raises
    ------
    FormatError, CodecError
        If the source is not a coded file, or what is decoded is damaged.
    LazyWeightsError
        If the file cannot be read.
    """
    path = os.fspath(source)
    with _naming(path), open(path, "rb") as file:
        layout = read_layout(file, os.fstat(file.fileno()).st_size)
        seen: set[tuple[int, int]] = set()
        with closing(_Worker(layout, file.fileno(), path, threads=1)) as worker:
            for job in _jobs(layout):
                kinds = {(part.span.type_id, part.span.plan.coder) for part in job.parts if part.span.plan}
                if kinds - seen:
                    worker.release(worker.decode(job))
                seen |= kinds


def _write_at(fd: int, data: np.ndarray, offset: int) -> None:
    left = memoryview(data)
    try:
        while left:
            n = os.pwrite(fd, left, offset)
            left, offset = left[n:], offset + n
    except OSError as error:
        raise LazyWeightsError(f"no room for what is decoded: {error.strerror}") from error


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
    with _naming(path), open(path, "rb") as file:
        layout = read_layout(file, os.fstat(file.fileno()).st_size)
        with AtomicFile(output, force, source) as sink:
            done = 0
            for job, data in _decode_units(layout, file.fileno(), thread_count(threads), path):
                sink.write(data)
                done += job.n_bytes
                if progress:
                    progress(Progress(done, layout.source_size, 0, "decode", job.name))
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
    units = _units(layout)
    tables = [Tables(table_set) for table_set in layout.head.table_sets]
    done = 0
    for job in _jobs(layout):
        base, end = int(offsets[job.units.start]), int(offsets[job.units.stop])
        data = read_exactly(source.read, end - base, "its payload")
        words = np.zeros((end - base) // 4 + READ_AHEAD_WORDS, np.uint32)
        words.view(np.uint8)[: end - base] = np.frombuffer(data, np.uint8)
        words.flags.writeable = False
        decoded = _decode_job(job, units.some(job.units).behind(base), words, base, tables, _OUTPUTS)
        sink.write(memoryview(decoded))
        _OUTPUTS.give(decoded)
        done += job.n_bytes
        if progress:
            progress(Progress(done, layout.source_size, 0, "decode", job.name))
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
                        progress(Progress(done, layout.source_size, 0, "verify", job.name))
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
    raise ChecksumError("the files differ", path=path, tensor=job.name or None, offset=at)
