"""Units of a coded file: source bytes to (kind, payload, checksum), and back.

The functions are pure: a unit depends on its source bytes, the plan of its tensor and the tables only, so units may be
coded by any number of threads in any order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lazyweights.codecs import TABLE_SIZE, TILE_ROWS, canonical, rans
from lazyweights.container import unit_stream
from lazyweights.container.coded_file import (
    CODED,
    CODED_UNFORCED,
    FILTERED,
    LOCKSTEP,
    RAW,
    UNIT_DTYPE,
    ZSTD,
    CodedSpan,
    TableSet,
    checksum,
)
from lazyweights.container.header_filter import ItemArray, filter_chunk, unfilter_chunk
from lazyweights.container.tensor_coder import RANS, SHARED
from lazyweights.container.zstd_frames import VERBATIM_LEVEL, compress, decompress
from lazyweights.errors import BlockLayoutError, ChecksumError, CodecError, FormatError

if TYPE_CHECKING:
    from lazyweights.container import batch_decode

HEADER_LEVEL = 12
"""zstd level of the GGUF header, which is worth more work than other verbatim bytes."""

SKIPPED_GROUP = 2
GROUP_DAMAGED, GROUP_WRONG = 2, 4
_STREAM_KINDS = np.full(16, SKIPPED_GROUP, np.uint8)
_STREAM_KINDS[CODED], _STREAM_KINDS[CODED_UNFORCED] = 0, 1
"""Kinds of units to kinds of row groups in `group_decode` (which loads numba, so it is not imported here)."""

STREAMS = 4
"""Row groups that `group_decode` decodes at a time."""

READ_AHEAD_WORDS = 64
"""Words behind a payload that a decoder may read."""


@dataclass(frozen=True)
class Unit:
    """One coded unit."""

    kind: int
    payload: bytes | memoryview
    checksum: int


@dataclass(frozen=True)
class UnitRun:
    """Units that follow each other in a file.

    Attributes
    ----------
    entries : ndarray of coded_file.UNIT_DTYPE, shape (n_units,)
        Of the unit table.
    parts : list of bytes or memoryview
        The payloads, each padded to a multiple of 4 bytes, in any number of parts.
    """

    entries: np.ndarray
    parts: list[bytes | memoryview]


class Tables:
    """A table set, and what encoders and decoders make of it when first used.

    Attributes
    ----------
    lengths : ndarray of uint8, shape (n_tables, 256)
        Code lengths.
    freqs : ndarray of uint16, shape (n_tables, 256)
        Frequencies for rANS; a row of zeros where no tensor needs them.
    """

    def __init__(self, table_set: TableSet) -> None:
        self.lengths = table_set.lengths
        self.freqs = table_set.freqs

    @functools.cached_property
    def entries(self) -> np.ndarray:
        """Huffman encode entries, uint32 (n_tables, 256)."""
        return canonical.codewords(self.lengths)

    @functools.cached_property
    def lane_entries(self) -> np.ndarray:
        """The same for lane streams, uint16 (`lane_encode.encode_entries`)."""
        from lazyweights.codecs import lane_encode

        return lane_encode.encode_entries(self.entries)

    @functools.cached_property
    def flat(self) -> np.ndarray:
        """Huffman decode tables, uint16 (`canonical.decode_tables`)."""
        return canonical.decode_tables(self.lengths)

    @functools.cached_property
    def freq_entries(self) -> np.ndarray:
        """rANS encode entries, uint32 (n_tables, 256)."""
        return rans.freq_entries(self.freqs)

    @functools.cached_property
    def rans_flat(self) -> np.ndarray:
        """rANS decode tables, uint32 (`rans.rans_tables`); empty where no table has frequencies."""
        return rans.rans_tables(self.freqs) if self.freqs.any() else self.no_rans

    no_rans = np.zeros(0, np.uint32)
    """In place of `rans_flat` where it is not needed."""


def encode_verbatim(data: bytes, arrays: list[ItemArray] | None = None, offset: int = 0) -> Unit:
    """Encode a chunk of verbatim bytes: regrouped if it is a header with arrays, else by zstd, or raw if neither shrinks it.

    Parameters
    ----------
    data : the chunk
    arrays : arrays of the GGUF header, where the chunk belongs to it
    offset : of the chunk in the file
    """
    best = Unit(RAW, data, checksum(data))
    filtered = filter_chunk(data, arrays, offset) if arrays else None
    if filtered is not None and len(filtered) < len(data):
        back = np.empty(len(data), np.uint8)
        unfilter_chunk(filtered, back)
        if back.data == data:
            return Unit(FILTERED, filtered, best.checksum)
    packed = compress(data, VERBATIM_LEVEL if arrays is None else HEADER_LEVEL)
    return Unit(ZSTD, packed, best.checksum) if len(packed) < len(data) else best


def decode_verbatim(kind: int, payload: bytes | memoryview, out: np.ndarray, unit: int, offset: int) -> None:
    """Inverse of `encode_verbatim`; does not look at the checksum.

    Parameters
    ----------
    kind, payload : of the unit
    out : uint8, of the size of the unit; filled
    unit, offset : number within the span and place in the file, for error messages

    Raises
    ------
    FormatError
        If the payload does not give as many bytes.
    """
    try:
        if kind == FILTERED:
            unfilter_chunk(payload, out)
            return
        data = payload if kind == RAW else decompress(payload, out.size, "a verbatim chunk")
        if len(data) != out.size:
            raise FormatError("a verbatim chunk has another size", expected=out.size, found=len(data))
        out[:] = np.frombuffer(data, np.uint8)
    except FormatError as error:
        error.row_group, error.offset = unit, offset
        raise


def unit_run(unit: Unit) -> UnitRun:
    """Return a single unit as a run."""
    n = len(unit.payload)
    entries = np.array([(n | unit.kind << 28, unit.checksum)], UNIT_DTYPE)
    return UnitRun(entries, [unit.payload, bytes(-n % 4)])


def encode_rows(span: CodedSpan, packed: np.ndarray, tables: Tables, lockstep: bool, verify: bool) -> UnitRun:
    """Encode the row groups of some packed rows of one outer index.

    Parameters
    ----------
    span : the tensor
    packed : uint8 (rows, row_bytes), starting at a row group
    tables : the table set of the span's plan
    lockstep : preset `unit`
    verify : decode again and compare

    Raises
    ------
    CodecError
        If what was encoded does not decode to the same bytes (a bug, or broken memory).
    """
    from lazyweights.container.unit_checksums import fill_checksums

    assert span.plan is not None
    coder = span.coder
    source = memoryview(packed.reshape(-1))
    step = TILE_ROWS * packed.shape[1]
    starts = np.arange(0, packed.size, step)
    source_sizes = np.minimum(packed.size - starts, step)
    if lockstep:
        arrays = coder.split(packed)
        code_entries = tables.entries[span.plan.cell_tables[0]]
        parts: list[bytes | memoryview] = []
        for first in range(0, len(packed), TILE_ROWS):  # nothing where a symbol has no codeword
            parts.append(unit_stream.encode_group(arrays, slice(first, first + TILE_ROWS), coder, code_entries) or b"")
        sizes = np.array([len(part) or packed.size for part in parts], np.int64)
        kinds = np.full(len(parts), LOCKSTEP)
        raw = sizes >= source_sizes
    else:
        words, n_words, unforced = coder.encode(packed, span.plan, tables.lane_entries, tables.freq_entries)
        raw = n_words < 0
        sizes = 4 * n_words
        kinds = np.where(unforced, CODED_UNFORCED, CODED)
        ends = np.cumsum(np.where(raw, 0, sizes))
        view = memoryview(words).cast("B")
        parts = [view[: int(ends[-1])]]
        if raw.any():
            parts = [view[end - size : end] for end, size in zip(ends.tolist(), sizes.tolist(), strict=True)]
    if raw.any():
        kinds[raw], sizes[raw] = RAW, source_sizes[raw]
        for k in np.flatnonzero(raw).tolist():
            parts[k] = bytes(source[k * step : (k + 1) * step])
    if lockstep or raw.any():
        parts = [part if len(part) % 4 == 0 else bytes(part) + bytes(-len(part) % 4) for part in parts]
    entries = np.empty(len(sizes), UNIT_DTYPE)
    entries["size"] = sizes | kinds << 28
    runs = np.array([[len(sizes), step, packed.size]], np.int64)
    checksums = np.empty(len(sizes), np.uint64)
    fill_checksums(packed.reshape(-1), runs, checksums)
    entries["checksum"] = checksums
    if verify:
        _verify(span, packed, kinds, sizes, parts if lockstep or raw.any() else words, tables)
    return UnitRun(entries, parts)


def _verify(
    span: CodedSpan, packed: np.ndarray, kinds: np.ndarray, sizes: np.ndarray, payload: np.ndarray | list[bytes | memoryview],
    tables: Tables,
) -> None:
    """Decode row groups, whose payload stands in words or parts, and compare them with the rows that they come from.

    Raises
    ------
    CodecError
        If they differ.
    """
    from lazyweights.codecs.byte_access import equal_bytes

    offsets = np.cumsum((sizes + 3) & ~np.int64(3))
    if isinstance(payload, list):
        words = np.zeros(int(offsets[-1]) // 4 + READ_AHEAD_WORDS, np.uint32)
        words.view(np.uint8)[: int(offsets[-1])] = np.frombuffer(b"".join(payload), np.uint8)
    else:
        words = payload
    back = np.empty_like(packed)
    prepared = prepare_parts([[Part(span, 0, len(kinds), len(back))]])[0]
    words = words.view()
    words.flags.writeable = False
    decode_parts(prepared, units_of(kinds, sizes, offsets - ((sizes + 3) & ~np.int64(3))), words, tables, back.reshape(-1))
    if not equal_bytes(back.reshape(-1), packed.reshape(-1)):
        raise CodecError("what was encoded does not decode to the same bytes; please report this", tensor=span.name)


class Part(NamedTuple):
    """Row groups of one outer index of a tensor that are decoded together, or a chunk of verbatim bytes.

    Attributes
    ----------
    span : CodedSpan
        The tensor.
    first_unit : int
        Number of the first row group (or of the chunk) within the span.
    n_units, n_rows : int
        Row groups and rows; of verbatim bytes 1 and 0.
    first_byte : int
        Where its packed rows start in the output.
    place : int
        Number of the first row group among all that are handed over with their kinds and sizes.
    """

    span: CodedSpan
    first_unit: int
    n_units: int
    n_rows: int
    first_byte: int = 0
    place: int = 0


class Units(NamedTuple):
    """What a decoder needs to know of units that follow each other; `units_of` makes it.

    Attributes
    ----------
    kinds, sizes, offsets : ndarray, shape (n_units,)
        Kind, payload bytes and byte offset from the first word (a multiple of 4).
    stream_kinds, starts, n_words : ndarray, shape (n_units,)
        The same for `group_decode`: uint8 kinds of row groups, int64 first word and words.
    checksums : ndarray of uint64, shape (n_units,), or empty
        Of the source bytes; empty: they are not looked at.
    """

    kinds: np.ndarray
    sizes: np.ndarray
    offsets: np.ndarray
    stream_kinds: np.ndarray
    starts: np.ndarray
    n_words: np.ndarray
    checksums: np.ndarray

    def some(self, units: slice) -> Units:
        """Return some of the units."""
        return Units(*(column[units] for column in self))

    def behind(self, base: int) -> Units:
        """Return the same units with offsets that count from byte `base` on, a multiple of 4."""
        return self._replace(offsets=self.offsets - base, starts=self.starts - base // 4)


def units_of(kinds: np.ndarray, sizes: np.ndarray, offsets: np.ndarray, checksums: np.ndarray | None = None) -> Units:
    """Return what a decoder needs to know of units, given the columns of `Units`."""
    stream_kinds = _STREAM_KINDS[kinds]
    # No stream has a part of a word: its length is found to be wrong then.
    n_words = np.where((sizes & 3 != 0) & (stream_kinds != SKIPPED_GROUP), -1, sizes >> 2)
    found = np.empty(0, np.uint64) if checksums is None else np.array(checksums, np.uint64)
    return Units(kinds, sizes, offsets, stream_kinds, offsets >> 2, n_words, found)


class PreparedParts:
    """Parts that are decoded together, and the arrays with which that is done; `prepare_parts` makes them."""

    def __init__(self, parts: list[Part]) -> None:
        self.parts = parts
        self.batch: batch_decode.Batch | None = None
        self.in_batch = slice(0)
        self.by_rans = False
        self.alone: list[Part] = []


def prepare_parts(jobs: Iterable[list[Part]]) -> list[PreparedParts]:
    """Prepare what is decoded by a call each: the arrays of all of them are made at once, which is quicker than one by one."""
    from lazyweights.container import batch_decode

    prepared = [PreparedParts(parts) for parts in jobs]
    rows: list[list[int]] = []
    arrays: list[batch_decode.PlanArrays] = []
    for job in prepared:
        first = len(rows)
        for part in job.parts:
            plan = part.span.plan
            if plan is None:
                continue
            mine = part.span.decode_arrays if plan.coder != SHARED else None
            if mine is None:
                job.alone.append(part)
                continue
            rows.append([part.n_rows, part.place, part.n_units, part.first_byte])
            arrays.append(mine)
            job.by_rans |= plan.coder == RANS
        job.in_batch = slice(first, len(rows))
    if rows:
        batch = batch_decode.Batch(rows, arrays)
        for job in prepared:
            job.batch = batch if job.in_batch.start < job.in_batch.stop else None
    return prepared


def decode_parts(
    prepared: PreparedParts, units: Units, words: np.ndarray, tables: Tables | None, out: np.ndarray, base: int = 0
) -> None:
    """Decode row groups and chunks of verbatim bytes into `out`, uint8, flat, and compare checksums.

    Parameters
    ----------
    prepared : what to decode, in the order of its units
    units : of all parts
    words : uint32, not to be written to, at least READ_AHEAD_WORDS longer than the last payload
    tables : the table set of the plans of all parts; None where all are verbatim bytes
    base : file offset of the first word, for error messages

    Raises
    ------
    FormatError, CodecError
        If a payload does not give the bytes of its unit.
    ChecksumError
    """
    from lazyweights.container.unit_checksums import HASH_ADDRESS

    if words.size < READ_AHEAD_WORDS:
        raise CodecError("a decoder needs words behind the last stream", expected=READ_AHEAD_WORDS, found=words.size)
    status = np.zeros(len(units.kinds), np.uint8)
    if prepared.alone or prepared.batch is not None:
        assert tables is not None
        _decode_streams(prepared, units, words, tables, out, status, HASH_ADDRESS)
        if GROUP_DAMAGED in status:
            part, unit, _ = _locate(prepared.parts, int(np.argmax(status == GROUP_DAMAGED)))
            raise CodecError(
                "a code stream does not have the length that its row group says", tensor=part.span.name, row_group=unit
            )
    skipped = (units.stream_kinds == SKIPPED_GROUP).nonzero()[0].tolist()
    if skipped:
        _decode_skipped(prepared, skipped, units, words, tables, out, base)
    if units.checksums.size:
        if skipped or prepared.alone or not HASH_ADDRESS:
            _compare_checksums(prepared, skipped, units.checksums, out, status, HASH_ADDRESS != 0)
        if status.any():
            raise _checksum_error(prepared, units, out, int(np.argmax(status)), base)


def _decode_skipped(
    prepared: PreparedParts, skipped: list[int], units: Units, words: np.ndarray, tables: Tables | None, out: np.ndarray,
    base: int,
) -> None:
    """Decode units that are no streams of row groups; the other arguments are those of `decode_parts`."""
    payloads = memoryview(words).cast("B")
    for k in skipped:
        part, unit, place = _locate(prepared.parts, k)
        at, kind = int(units.offsets[k]), int(units.kinds[k])
        payload = payloads[at : at + int(units.sizes[k])]
        if part.span.plan is None or kind == RAW:
            decode_verbatim(kind, payload, out[place], unit, base + at)
            continue
        span = part.span
        packed = out[place].reshape(-1, span.row_bytes)
        coder = span.coder
        assert tables is not None
        table = int(part.span.plan.cell_tables[0]) * TABLE_SIZE
        try:
            arrays = unit_stream.decode_group(
                np.frombuffer(payload, np.uint8), len(packed), coder, tables.flat[table : table + TABLE_SIZE + 16]
            )
            coder.join(arrays, packed)
        except (CodecError, BlockLayoutError) as error:
            error.tensor, error.row_group = span.name, unit
            raise


def _decode_streams(
    prepared: PreparedParts, units: Units, words: np.ndarray, tables: Tables, out: np.ndarray, status: np.ndarray,
    hash_address: int,
) -> None:
    """Decode the coded row groups of some parts, those that can be in one compiled call; fill the status of their units.

    `hash_address` : 0, or of the function with which that call compares checksums
    """
    for part in prepared.alone:
        mine = slice(part.place, part.place + part.n_units)
        _decode_alone(part, words, units.starts[mine], units.n_words[mine], units.stream_kinds[mine], tables, out, status[mine])
    if prepared.batch is not None:
        rans_tables = tables.rans_flat if prepared.by_rans else tables.no_rans
        prepared.batch.decode(
            prepared.in_batch, words, units.starts, units.n_words, units.stream_kinds, tables.flat, rans_tables, out, status,
            hash_address, units.checksums,
        )


def _decode_alone(
    part: Part, words: np.ndarray, starts: np.ndarray, sizes: np.ndarray, kinds: np.ndarray, tables: Tables, out: np.ndarray,
    status: np.ndarray,
) -> None:
    """Decode a part that has shared rows or a type that is not decoded in batches; fill the status of its row groups."""
    span, plan = part.span, part.span.plan
    assert plan is not None
    coder = span.coder
    packed = out[part.first_byte : part.first_byte + part.n_rows * span.row_bytes].reshape(part.n_rows, span.row_bytes)
    if plan.coder == SHARED and span.decode_arrays is not None:
        from lazyweights.container import shared_decode

        shared_decode.decode_shared_rows(coder, plan, words, starts, sizes, kinds, tables.rans_flat, packed, status)
        return
    try:
        status[:] = coder.decode(part.n_rows, words, starts, sizes, kinds, plan, tables.flat, tables.rans_flat, packed)
    except BlockLayoutError as error:
        error.tensor, error.row_group = span.name, part.first_unit
        raise


def _unit_bytes(part: Part, k: int) -> slice:
    """The bytes of unit k of a part in the output."""
    if part.span.plan is None:
        return slice(part.first_byte, part.first_byte + part.span.unit_bytes(part.first_unit))
    row_bytes = part.span.row_bytes
    first, last = TILE_ROWS * k, min(TILE_ROWS * (k + 1), part.n_rows)
    return slice(part.first_byte + first * row_bytes, part.first_byte + last * row_bytes)


def _locate(parts: list[Part], k: int) -> tuple[Part, int, slice]:
    """Return the part that unit k belongs to, its number within the span, and its bytes in the output."""
    part = next(part for part in parts if part.place <= k < part.place + part.n_units)
    return part, part.first_unit + k - part.place, _unit_bytes(part, k - part.place)


def _compare_checksums(
    prepared: PreparedParts, skipped: list[int], expected: np.ndarray, out: np.ndarray, status: np.ndarray, is_partly_done: bool
) -> None:
    """Compare the checksums of units in `out` that were not compared yet, and mark in `status` which are wrong.

    `is_partly_done` : whether the streams of row groups decoded in a batch were compared
    """
    alone = {part.place for part in prepared.alone}
    for part in prepared.parts:
        mine: Iterable[int] = range(part.place, part.place + part.n_units)
        if is_partly_done and part.place not in alone:
            mine = [k for k in skipped if k in mine]
        for k in mine:
            if checksum(out[_unit_bytes(part, k - part.place)]) != int(expected[k]):
                status[k] = GROUP_WRONG


def _checksum_error(prepared: PreparedParts, units: Units, out: np.ndarray, k: int, base: int) -> ChecksumError:
    """Return the error that says that unit k is damaged."""
    part, unit, place = _locate(prepared.parts, k)
    if part.span.plan is None:
        return ChecksumError("a verbatim chunk is damaged", row_group=unit, offset=base + int(units.offsets[k]))
    return ChecksumError(
        "a row group is damaged", tensor=part.span.name, row_group=unit, expected=f"{int(units.checksums[k]):016x}",
        found=f"{checksum(out[place]):016x}",
    )


def rows_per_run(span: CodedSpan, run_bytes: int) -> int:
    """Rows (whole row groups, where there are many a multiple of four) to code at a time: about `run_bytes` packed bytes."""
    n_groups = max(1, run_bytes // (TILE_ROWS * span.row_bytes))
    return (n_groups if n_groups < STREAMS else n_groups // STREAMS * STREAMS) * TILE_ROWS
