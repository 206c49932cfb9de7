"""Units of a coded file: source bytes to (kind, payload, checksum), and back.

The functions are pure: a unit depends on its source bytes, the plan of its tensor and the tables only, so units may be
coded by any number of threads in any order.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from lazyweights.blocks.types import GGML_TYPES
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

HEADER_LEVEL = 12
"""zstd level of the GGUF header, which is worth more work than other verbatim bytes."""

SKIPPED_GROUP = 2
GROUP_DAMAGED = 2
_STREAM_KINDS = np.full(16, SKIPPED_GROUP, np.uint8)
_STREAM_KINDS[CODED], _STREAM_KINDS[CODED_UNFORCED] = 0, 1
"""Kinds of units to kinds of row groups in `group_decode` (which loads numba, so it is not imported here)."""

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
        return rans.rans_tables(self.freqs) if self.freqs.any() else np.zeros(0, np.uint32)


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
    if filtered is not None and len(filtered) < len(data) and unfilter_chunk(filtered, len(data)) == data:
        return Unit(FILTERED, filtered, best.checksum)
    packed = compress(data, VERBATIM_LEVEL if arrays is None else HEADER_LEVEL)
    return Unit(ZSTD, packed, best.checksum) if len(packed) < len(data) else best


def decode_verbatim(kind: int, payload: bytes | memoryview, n_bytes: int, unit: int, offset: int) -> bytes | memoryview:
    """Inverse of `encode_verbatim`; does not look at the checksum.

    Parameters
    ----------
    kind, payload : of the unit
    n_bytes : source bytes of the unit
    unit, offset : number within the span and place in the file, for error messages

    Raises
    ------
    FormatError
        If the payload does not give `n_bytes` bytes.
    """
    if kind == RAW:
        return payload
    try:
        if kind == FILTERED:
            return unfilter_chunk(payload, n_bytes)
        return decompress(payload, n_bytes, "a verbatim chunk")
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
    entries["checksum"] = [checksum(source[at : at + step]) for at in starts.tolist()]
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
    part = Part(span, 0, len(kinds), len(back))
    decode_parts([part], kinds, sizes, offsets - ((sizes + 3) & ~np.int64(3)), words, tables, back.reshape(-1))
    if not equal_bytes(back.reshape(-1), packed.reshape(-1)):
        raise CodecError("what was encoded does not decode to the same bytes; please report this", tensor=span.name)


@dataclass(frozen=True)
class Part:
    """Row groups of one outer index of a tensor that are decoded together.

    Attributes
    ----------
    span : CodedSpan
        The tensor.
    first_unit : int
        Number of the first row group within the span.
    n_units, n_rows : int
    first_byte : int
        Where its packed rows start in the output.
    """

    span: CodedSpan
    first_unit: int
    n_units: int
    n_rows: int
    first_byte: int = 0


def decode_parts(
    parts: list[Part],
    kinds: np.ndarray,
    sizes: np.ndarray,
    offsets: np.ndarray,
    words: np.ndarray,
    tables: Tables,
    out: np.ndarray,
) -> None:
    """Decode row groups into `out`, uint8, flat. Does not look at checksums.

    Parameters
    ----------
    parts : what to decode; several only where `CodedSpan.decode_arrays` is not None for all of them
    kinds, sizes, offsets : per row group of all parts, its kind, payload bytes and byte offset in `words` (multiples of 4)
    words : uint32, at least READ_AHEAD_WORDS longer than the last payload
    tables : the table set of the plans of all parts

    Raises
    ------
    CodecError
        If a stream does not have the length that its unit says.
    """
    stream_kinds = _STREAM_KINDS[kinds]
    n_words = sizes >> 2
    skipped = np.flatnonzero(stream_kinds == SKIPPED_GROUP)
    if skipped.size < len(kinds):
        starts = offsets >> 2
        words = words.view()
        words.flags.writeable = False  # a mapped file is, and each combination would compile anew
        if words.size < READ_AHEAD_WORDS:
            raise CodecError("a decoder needs words behind the last stream", expected=READ_AHEAD_WORDS, found=words.size)
        if parts[0].span.decode_arrays is not None:
            status = _decode_batch(parts, words, starts, n_words, stream_kinds, tables, out)
        else:
            status = _decode_planes(parts[0], words, starts, n_words, stream_kinds, tables, out)
        damaged = (status == GROUP_DAMAGED) | ((n_words << 2 != sizes) & (stream_kinds != SKIPPED_GROUP))
        if damaged.any():
            part, unit, _ = _locate(parts, int(np.argmax(damaged)))
            raise CodecError(
                "a code stream does not have the length that its row group says", tensor=part.span.name, row_group=unit
            )
    for k in skipped.tolist():
        part, unit, rows = _locate(parts, k)
        span = part.span
        packed = out[rows].reshape(-1, span.row_bytes)
        payload = words.view(np.uint8)[int(offsets[k]) : int(offsets[k]) + int(sizes[k])]
        if kinds[k] == RAW:
            packed[:] = payload.reshape(packed.shape)
            continue
        assert span.plan is not None
        coder = span.coder
        table = int(span.plan.cell_tables[0]) * TABLE_SIZE
        try:
            arrays = unit_stream.decode_group(payload, len(packed), coder, tables.flat[table : table + TABLE_SIZE + 16])
            coder.join(arrays, packed)
        except (CodecError, BlockLayoutError) as error:
            error.tensor, error.row_group = span.name, unit
            raise


def _decode_batch(
    parts: list[Part], words: np.ndarray, starts: np.ndarray, sizes: np.ndarray, kinds: np.ndarray, tables: Tables,
    out: np.ndarray,
) -> np.ndarray:
    """Decode parts in one compiled call; return the status of each row group."""
    from lazyweights.container import batch_decode

    if any(part.span.plan is not None and part.span.plan.coder == SHARED for part in parts):
        return _decode_each(parts, words, starts, sizes, kinds, tables, out)
    arrays: list[batch_decode.PlanArrays] = []
    rows = []
    first = 0
    by_rans = False
    for part in parts:
        mine = part.span.decode_arrays
        assert mine is not None
        assert part.span.plan is not None
        arrays.append(mine)
        rows.append([part.n_rows, first, part.n_units, part.first_byte, *mine.numbers])
        first += part.n_units
        by_rans |= part.span.plan.coder == RANS
    status = np.zeros(first, np.uint8)
    rans_tables = tables.rans_flat if by_rans else np.zeros(0, np.uint32)
    batch_decode.decode_plans(rows, arrays, words, starts, sizes, kinds, tables.flat, rans_tables, out, status)
    return status


def _decode_each(
    parts: list[Part], words: np.ndarray, starts: np.ndarray, sizes: np.ndarray, kinds: np.ndarray, tables: Tables,
    out: np.ndarray,
) -> np.ndarray:
    """Decode parts of which some have shared rows one by one; return the status of each row group."""
    from lazyweights.container import shared_decode

    status = np.zeros(len(starts), np.uint8)
    first = 0
    for part in parts:
        units = slice(first, first + part.n_units)
        first += part.n_units
        span = part.span
        assert span.plan is not None
        if span.plan.coder != SHARED:
            status[units] = _decode_batch([part], words, starts[units], sizes[units], kinds[units], tables, out)
            continue
        packed = out[part.first_byte : part.first_byte + part.n_rows * span.row_bytes].reshape(part.n_rows, span.row_bytes)
        shared_decode.decode_shared_rows(
            span.coder, span.plan, words, starts[units], sizes[units], kinds[units],
            tables.rans_flat, packed, status[units],
        )
    return status


def _decode_planes(
    part: Part, words: np.ndarray, starts: np.ndarray, sizes: np.ndarray, kinds: np.ndarray, tables: Tables, out: np.ndarray
) -> np.ndarray:
    """Decode a part of a type that is not decoded in batches; return the status of each row group."""
    span = part.span
    assert span.plan is not None
    coder = span.coder
    packed = out[part.first_byte : part.first_byte + part.n_rows * span.row_bytes].reshape(part.n_rows, span.row_bytes)
    try:
        return coder.decode(part.n_rows, words, starts, sizes, kinds, span.plan, tables.flat, tables.rans_flat, packed)
    except BlockLayoutError as error:
        error.tensor, error.row_group = span.name, part.first_unit
        raise


def _group_bytes(part: Part, k: int) -> slice:
    """The bytes of row group k of a part in the output."""
    row_bytes = part.span.row_bytes
    first, last = TILE_ROWS * k, min(TILE_ROWS * (k + 1), part.n_rows)
    return slice(part.first_byte + first * row_bytes, part.first_byte + last * row_bytes)


def _locate(parts: list[Part], k: int) -> tuple[Part, int, slice]:
    """Return the part that row group k of a batch belongs to, its number within the span, and its bytes in the output."""
    for part in parts:
        if k < part.n_units:
            return part, part.first_unit + k, _group_bytes(part, k)
        k -= part.n_units
    raise IndexError(k)


def check_units(parts: list[Part], checksums: np.ndarray, out: np.ndarray) -> None:
    """Compare the checksum of each row group in `out`, uint8, flat, with the file's.

    Raises
    ------
    ChecksumError
    """
    view = memoryview(out)
    all_expected = iter(checksums.tolist())
    for part in parts:
        size = TILE_ROWS * part.span.row_bytes
        end = part.first_byte + part.n_rows * part.span.row_bytes
        for k in range(part.n_units):
            at = part.first_byte + k * size
            found = checksum(view[at : min(at + size, end)])
            expected = next(all_expected)
            if found != expected:
                raise ChecksumError(
                    "a row group is damaged", tensor=part.span.name, row_group=part.first_unit + k,
                    expected=f"{expected:016x}", found=f"{found:016x}",
                )


def rows_per_run(span: CodedSpan, run_bytes: int) -> int:
    """Rows (whole row groups) to code at a time so that a run has about `run_bytes` packed bytes."""
    known = GGML_TYPES[span.type_id]
    row_bytes = span.shape[0] // known.block_size * known.block_bytes
    return max(1, run_bytes // (TILE_ROWS * row_bytes)) * TILE_ROWS
