"""The bytes of a coded file outside its payload: header, head, unit table (`docs/format.md`).

::

    0                 fixed header, 128 bytes
    128               head: one zstd frame with the spans, tensors, plans and code tables
    unit_offset       unit table, 12 bytes a unit
    payload_offset    payloads of the units, each on a multiple of 4, in source order
    file_size - 256   zeros, so that a decoder may read ahead

A *unit* is what is checked and decoded at once: a row group of a tensor, or a chunk of verbatim bytes. Units follow
each other in the order of the source bytes that they give back, so the file decodes in one forward pass; their sizes
add up to their offsets, so each is found without reading the others.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from lazyweights.blocks.types import GGML_TYPES
from lazyweights.codecs import TILE_ROWS
from lazyweights.codecs.canonical import check_pool
from lazyweights.codecs.rans import PROB_SCALE, check_freqs
from lazyweights.container.gguf_scan import describe_bytes
from lazyweights.container.gguf_values import CODED_MAGIC
from lazyweights.container.numbers import NumberReader, pack_freqs, pack_number, pack_numbers
from lazyweights.container.shared_rows import MAX_REFERENCES, N_COLUMN_CLASSES, SharedRows
from lazyweights.container.stream_layout import newest_form
from lazyweights.container.tensor_coder import (
    HUFFMAN,
    LOW_CODED,
    RANS,
    SHARED,
    SHARED_TRELLIS,
    HalfMode,
    TensorCoder,
    TensorPlan,
    is_codable,
    tensor_coder,
)
from lazyweights.container.zstd_frames import compress, decompress
from lazyweights.errors import (
    ChecksumError,
    CodecError,
    FormatError,
    LimitError,
    NotCodedError,
    OffsetError,
    TruncatedError,
    VersionError,
)

if TYPE_CHECKING:
    from lazyweights.container.batch_decode import PlanArrays

VERSION = 1
HEADER = struct.Struct("<4sHHQQ32sIIQIIQQQ16sQ")
"""magic, version, flags, source size, file size, SHA-256, head bytes, head raw bytes, head checksum, units,
payload offset / 4, unit table checksum, two reserved words (zero), sixteen reserved bytes, header checksum."""

HEADER_BYTES = HEADER.size
TRAILER_BYTES = 256
CHUNK_BYTES = 1 << 22
MAX_HEAD_RATIO = 1 << 12
MAX_UNIT_BYTES = 1 << 28

SECOND_FORM = 4
"""What is added to the number of the coder where a plan is for the second form of its type."""

LONG_HEAD = 1 << 15
HEAD_LEVEL, LONG_HEAD_LEVEL, SHARED_HEAD_LEVEL = 19, 12, 17
"""zstd levels of heads up to so many bytes; of longer ones, for which 19 saves a tenth, some kilobytes, and takes five to
twenty-five times as long; and of heads with reference rows, in which a high level finds more."""

UNIT_DTYPE = np.dtype([("size", "<u4"), ("checksum", "<u8")])
"""size: payload bytes in bits 0..27, kind in bits 28..31; checksum: XXH3-64 of the source bytes of the unit."""

RAW, ZSTD, CODED, CODED_UNFORCED, LOCKSTEP, FILTERED = 0, 1, 2, 3, 4, 5
"""Kinds of units."""

FLAG_UNIT_PRESET = 1


@functools.lru_cache(maxsize=1024)
def _rows_of(type_id: int, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Return rows of one outer index, outer indices, packed bytes of a row, row groups of one outer index."""
    known = GGML_TYPES.get(type_id)
    rows = shape[1] if len(shape) > 1 else 1
    row_bytes = shape[0] // known.block_size * known.block_bytes if known and shape else 0
    return rows, math.prod(shape[2:]), row_bytes, -(-rows // TILE_ROWS)


@dataclass(frozen=True, init=False)
class CodedSpan:
    """A run of source bytes: a coded tensor, or verbatim bytes.

    Attributes
    ----------
    n_bytes : int
        Source bytes.
    name : str
        Tensor name, or "" where the bytes are verbatim.
    type_id, shape
        Of the tensor (GGUF order).
    plan : TensorPlan or None
        How the tensor is coded; None: verbatim bytes.
    entropy_millibits, code_bits : int
        Statistics of a coded tensor (`planning.SpanStatistics`); for reports only.
    n_rows, outer : int
        Rows of one outer index, and number of these (experts).
    row_bytes : int
        Packed bytes of a row.
    groups_per_outer, n_units : int
        Row groups of one outer index; units of the span.
    """

    n_bytes: int
    name: str
    type_id: int
    shape: tuple[int, ...]
    plan: TensorPlan | None
    entropy_millibits: int
    code_bits: int
    n_rows: int = field(init=False, repr=False, compare=False)
    outer: int = field(init=False, repr=False, compare=False)
    row_bytes: int = field(init=False, repr=False, compare=False)
    groups_per_outer: int = field(init=False, repr=False, compare=False)
    n_units: int = field(init=False, repr=False, compare=False)

    def __init__(
        self, n_bytes: int, name: str = "", type_id: int = -1, shape: tuple[int, ...] = (), plan: TensorPlan | None = None,
        entropy_millibits: int = 0, code_bits: int = 0,
    ) -> None:
        rows, outer, row_bytes, groups = _rows_of(type_id, shape)
        # At once: the class is frozen, and a file has hundreds of spans.
        self.__dict__.update(
            n_bytes=n_bytes, name=name, type_id=type_id, shape=shape, plan=plan, entropy_millibits=entropy_millibits,
            code_bits=code_bits, n_rows=rows, outer=outer, row_bytes=row_bytes, groups_per_outer=groups,
            n_units=groups * outer if plan is not None else -(-n_bytes // CHUNK_BYTES),
        )

    @property
    def is_coded(self) -> bool:
        return self.plan is not None

    @functools.cached_property
    def decode_arrays(self) -> PlanArrays | None:
        """What `batch_decode` needs of the tensor; None for verbatim bytes and types that are not decoded in batches."""
        if self.plan is None:
            return None
        from lazyweights.container import batch_decode

        return batch_decode.plan_arrays(self.coder, self.plan) if batch_decode.is_compiled(self.coder) else None

    @functools.cached_property
    def coder(self) -> TensorCoder:
        """The coder of a tensor: of the form that its plan names, or else of the one in which it would be written."""
        return tensor_coder(self.type_id, self.shape[0], None if self.plan is None else self.plan.form)

    def unit_rows(self, unit: int) -> int:
        """Rows of row group `unit` (counted over all outer indices)."""
        return min(TILE_ROWS, self.n_rows - TILE_ROWS * (unit % self.groups_per_outer))

    def unit_bytes(self, unit: int) -> int:
        """Source bytes of unit `unit` of this span."""
        if self.is_coded:
            return self.unit_rows(unit) * self.row_bytes
        return min(CHUNK_BYTES, self.n_bytes - CHUNK_BYTES * unit)


class TensorEntry(NamedTuple):
    """A tensor of the source, coded or not: where its bytes are."""

    name: str
    type_id: int
    shape: tuple[int, ...]
    offset: int
    n_bytes: int
    span: int


@dataclass(frozen=True)
class TableSet:
    """A pool of code tables: code lengths uint8 (n_tables, 256) and rANS frequencies uint16 (n_tables, 256) or zeros."""

    lengths: np.ndarray
    freqs: np.ndarray


@dataclass
class Head:
    """What the head frame holds: spans in source order, tensors, tables."""

    spans: list[CodedSpan]
    tensors: list[TensorEntry]
    table_sets: list[TableSet] = field(default_factory=list)


def _pack_plan(plan: TensorPlan) -> bytes:
    modes = [mode.low | mode.sign << 1 for mode in plan.modes]
    shared = plan.shared
    coder = SHARED_TRELLIS if shared is not None and shared.is_trellis else plan.coder + SECOND_FORM * plan.form
    numbers = pack_numbers([plan.table_set, coder, *modes, *plan.bases])
    packed = numbers + plan.side_tables.tobytes() + plan.cell_tables.tobytes()
    if shared is None:
        return packed
    packed += pack_numbers([shared.row_base, shared.row_table, len(shared.references)])
    return packed + shared.references.tobytes() + shared.columns.tobytes()


_BYTES = bytes(range(256))
_MODES = [HalfMode(value & 1, value >> 1) for value in range(6)]


def _unpack_plan(r: NumberReader, type_id: int, columns: int, table_sets: list[TableSet]) -> TensorPlan:
    table_set = r.number()
    if table_set >= len(table_sets):
        raise FormatError("a plan names a table set that is not there", expected=f"< {len(table_sets)}", found=table_set)
    cell_coder = r.number(SECOND_FORM + RANS if newest_form(type_id) else SHARED_TRELLIS)
    coder = tensor_coder(type_id, columns, cell_coder // SECOND_FORM)
    cell_coder -= SECOND_FORM * coder.form
    if coder.layout.low_bits and cell_coder != HUFFMAN:
        raise FormatError("a plan has split codes that are no Huffman codes", found=cell_coder)
    is_trellis = cell_coder == SHARED_TRELLIS
    if is_trellis:
        cell_coder = SHARED
    if cell_coder == SHARED and not coder.layout.may_share_rows:
        raise FormatError("a plan shares rows of a type whose scales are no halves")
    if is_trellis and not coder.layout.may_have_trellis:
        raise FormatError("a plan has trellis codes of a type with several codes to a symbol")
    modes = [_MODES[value] for value in r.several(len(coder.layout.halves), 5)]
    n_sides = len(coder.side_names(tuple(modes)))
    bases = tuple(r.several(n_sides, 255))
    packed = r.take(32 * n_sides + 512)
    n_tables = len(table_sets[table_set].lengths)
    if packed.translate(None, _BYTES[:n_tables]):  # what is left when the numbers of tables are taken out
        found = max(packed)
        raise FormatError("a plan names a table that is not there", expected=f"< {n_tables}", found=found)
    tables = np.frombuffer(packed, np.uint8).copy()  # read-only arrays are a type of their own, for which kernels compile anew
    side_tables, cell_tables = tables[: 32 * n_sides].reshape(n_sides, 32), tables[32 * n_sides :]
    shared = _unpack_shared(r, coder, tuple(modes), n_tables, is_trellis) if cell_coder == SHARED else None
    by_rans = cell_tables if cell_coder != HUFFMAN else cell_tables[:0]
    if shared is not None:
        by_rans = np.concatenate([by_rans, side_tables[:, 0], [shared.row_table]])
    if by_rans.size and not table_sets[table_set].freqs[by_rans].any(axis=1).all():
        raise FormatError("a plan names a table without frequencies for rANS")
    return TensorPlan(tuple(modes), bases, side_tables, cell_tables, table_set, cell_coder, shared, coder.form)


def _unpack_shared(
    r: NumberReader, coder: TensorCoder, modes: tuple[HalfMode, ...], n_tables: int, is_trellis: bool
) -> SharedRows:
    if any(mode.low != LOW_CODED for mode in modes):
        raise FormatError("a plan shares rows but does not code all of their scales")
    row_base, row_table = r.number(255), r.number(n_tables - 1)
    n_references = r.number(MAX_REFERENCES)
    if n_references == 0:
        raise FormatError("a plan shares rows but has no reference", expected="> 0", found=0)
    n_values = len(modes) * 2 * coder.n_blocks + sum(coder.byte_columns(b.per_block) for b in coder.layout.bytes_)
    references = np.frombuffer(r.take(n_references * n_values), np.uint8).reshape(n_references, n_values).copy()
    columns = np.frombuffer(r.take(coder.n_cells * coder.cell_symbols), np.uint8).copy()
    highest = int(columns.max())
    if highest >= N_COLUMN_CLASSES:
        raise FormatError("a plan has a column class that is not there", expected=f"< {N_COLUMN_CLASSES}", found=highest)
    return SharedRows(references, columns, row_base, row_table, is_trellis)


def pack_head(head: Head) -> bytes:
    """Return the bytes of the head before compression."""
    parts = [pack_number(len(head.table_sets))]
    for table_set in head.table_sets:
        parts += [pack_number(len(table_set.lengths)), table_set.lengths.astype(np.uint8).tobytes()]
        with_freqs = np.flatnonzero(table_set.freqs.any(axis=1))
        parts.append(pack_number(len(with_freqs)))
        for t in with_freqs.tolist():
            parts += [pack_number(t), pack_freqs(table_set.freqs[t])]
    parts.append(pack_number(len(head.spans)))
    for span in head.spans:
        parts.append(pack_numbers([span.n_bytes, int(span.is_coded)]))
        if span.plan is not None:
            parts.append(_pack_tensor(span))
            parts.append(pack_numbers([span.entropy_millibits, span.code_bits]))
            parts.append(_pack_plan(span.plan))
    verbatim = [t for t in head.tensors if not head.spans[t.span].is_coded]
    parts.append(pack_number(len(verbatim)))
    for tensor in verbatim:
        parts.append(_pack_tensor(tensor))
        parts.append(pack_numbers([tensor.offset, tensor.n_bytes]))
    return b"".join(parts)


def _pack_tensor(tensor: CodedSpan | TensorEntry) -> bytes:
    name = tensor.name.encode("utf-8", "surrogateescape")
    return pack_number(len(name)) + name + pack_numbers([tensor.type_id, len(tensor.shape), *tensor.shape])


def unpack_head(data: bytes, source_size: int) -> Head:
    """Inverse of `pack_head`; checks everything against the source size.

    Raises
    ------
    FormatError, CodecError
        If the head is not one that `pack_head` writes.
    """
    r = NumberReader(data)
    table_sets = []
    for _ in range(r.number(len(data))):
        n = r.number(255)
        lengths = np.frombuffer(r.take(256 * n), np.uint8).reshape(n, 256).copy()
        check_pool(lengths)
        freqs = np.zeros((n, 256), np.uint16)
        for _ in range(r.number(n)):
            t = r.number(n - 1)
            freqs[t] = r.numbers(256, PROB_SCALE)
            check_freqs(freqs[t])
        table_sets.append(TableSet(lengths, freqs))
    spans: list[CodedSpan] = []
    tensors: list[TensorEntry] = []
    offset = 0
    for i in range(r.number(len(data))):
        n_bytes = r.number(source_size - offset)
        if n_bytes == 0:
            raise FormatError("a span of the head is empty", found=0, expected="> 0")
        if r.number(1):
            name, type_id, shape = _unpack_tensor(r)
            if not is_codable(type_id, shape):
                raise FormatError("a coded span has a type or shape that is not coded", tensor=name, found=(type_id, shape))
            if _size_of(type_id, shape) != n_bytes:
                raise FormatError(
                    "the bytes of a coded span are not those of its shape", tensor=name,
                    expected=_size_of(type_id, shape), found=n_bytes,
                )
            entropy_millibits, code_bits = r.several(2)
            plan = _unpack_plan(r, type_id, shape[0], table_sets)
            spans.append(CodedSpan(n_bytes, name, type_id, shape, plan, entropy_millibits, code_bits))
            tensors.append(TensorEntry(name, type_id, shape, offset, n_bytes, i))
        else:
            spans.append(CodedSpan(n_bytes))
        offset += n_bytes
    if offset != source_size:
        raise OffsetError("the spans do not add up to the source", expected=source_size, found=offset)
    starts = np.cumsum([0] + [s.n_bytes for s in spans])
    for _ in range(r.number(len(data))):
        name, type_id, shape = _unpack_tensor(r)
        at = r.number(source_size)
        n_bytes = r.number(source_size - at)
        span = int(np.searchsorted(starts, at, "right")) - 1
        if span >= len(spans) or spans[span].is_coded or at + n_bytes > int(starts[span]) + spans[span].n_bytes:
            raise OffsetError("a verbatim tensor is not inside a verbatim span", tensor=name, offset=at)
        if n_bytes == 0 or n_bytes != _size_of(type_id, shape):
            raise FormatError("the bytes of a verbatim tensor are not those of its shape", tensor=name,
                              expected=_size_of(type_id, shape), found=n_bytes)
        tensors.append(TensorEntry(name, type_id, shape, at, n_bytes, span))
    r.finish()
    tensors.sort(key=lambda t: t.offset)
    return Head(spans, tensors, table_sets)


@functools.lru_cache(maxsize=1024)
def _size_of(type_id: int, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor; 0 where type and shape do not fit together."""
    known = GGML_TYPES.get(type_id)
    if known is None or not shape or shape[0] % known.block_size:
        return 0
    return math.prod(shape) // known.block_size * known.block_bytes


def _unpack_tensor(r: NumberReader) -> tuple[str, int, tuple[int, ...]]:
    name = r.data().decode("utf-8", "surrogateescape")
    type_id, n_dims = r.several(2, (1 << 32) - 1)
    if n_dims > 4:
        raise LimitError("a tensor has too many dimensions", tensor=name, expected="<= 4", found=n_dims)
    return name, type_id, tuple(r.several(n_dims))


@dataclass(frozen=True)
class Layout:
    """Everything of a coded file but its payload.

    Attributes
    ----------
    source_size, file_size : int
    sha256 : bytes
        Of the whole source.
    flags : int
    head : Head
    units : ndarray of UNIT_DTYPE
    payload_offset : int
    """

    source_size: int
    file_size: int
    sha256: bytes
    flags: int
    head: Head
    units: np.ndarray
    payload_offset: int

    @property
    def preset(self) -> str:
        return "unit" if self.flags & FLAG_UNIT_PRESET else "dense"

    @functools.cached_property
    def kinds(self) -> np.ndarray:
        """Kind of each unit, uint32."""
        return self.units["size"] >> 28

    @functools.cached_property
    def sizes(self) -> np.ndarray:
        """Payload bytes of each unit, int64."""
        return (self.units["size"] & (MAX_UNIT_BYTES - 1)).astype(np.int64)

    def offsets(self) -> np.ndarray:
        """File offset of each unit, and the end of the last, int64 (n_units + 1,)."""
        padded = (self.sizes + 3) & ~np.int64(3)
        return self.payload_offset + np.concatenate([np.zeros(1, np.int64), np.cumsum(padded)])

    def spans(self) -> Iterator[tuple[int, CodedSpan, int, int]]:
        """Yield (index, span, first unit, source offset)."""
        unit = offset = 0
        for i, span in enumerate(self.head.spans):
            yield i, span, unit, offset
            unit += span.n_units
            offset += span.n_bytes


checksum: Callable[[bytes | memoryview | np.ndarray], int] = xxhash.xxh3_64_intdigest
"""XXH3-64 with seed 0 of some bytes."""


def head_parts(layout_head: Head) -> tuple[bytes, int]:
    """Return the compressed head and its size before compression."""
    raw = pack_head(layout_head)
    level = HEAD_LEVEL
    if len(raw) > LONG_HEAD:
        shares = any(span.plan is not None and span.plan.shared is not None for span in layout_head.spans)
        level = SHARED_HEAD_LEVEL if shares else LONG_HEAD_LEVEL
    return compress(raw, level), len(raw)


def payload_offset(head_bytes: int, n_units: int) -> int:
    """File offset of the first payload."""
    end = HEADER_BYTES + head_bytes + n_units * UNIT_DTYPE.itemsize
    return (end + 63) & ~63


def pack_header(layout: Layout, head: bytes, head_raw_bytes: int) -> bytes:
    """Return the fixed header."""
    table = layout.units.tobytes()
    fields = (
        CODED_MAGIC, VERSION, layout.flags, layout.source_size, layout.file_size, layout.sha256, len(head),
        head_raw_bytes, checksum(head), len(layout.units), layout.payload_offset // 4, checksum(table), 0, 0, bytes(16),
    )
    return HEADER.pack(*fields, checksum(HEADER.pack(*fields, 0)[:-8]))


@dataclass(frozen=True)
class Header:
    """The fixed header, checked."""

    flags: int
    source_size: int
    file_size: int
    sha256: bytes
    head_bytes: int
    head_raw_bytes: int
    head_checksum: int
    n_units: int
    payload_offset: int
    table_checksum: int

    @property
    def prefix_bytes(self) -> int:
        """Bytes of header, head and unit table together."""
        return HEADER_BYTES + self.head_bytes + self.n_units * UNIT_DTYPE.itemsize


def unpack_header(data: bytes, actual_size: int | None) -> Header:
    """Read and check the fixed header.

    Parameters
    ----------
    data : the first 128 bytes (fewer where the file is shorter)
    actual_size : size of the file, None for a pipe

    Raises
    ------
    NotCodedError, VersionError, TruncatedError, ChecksumError, LimitError
    """
    if data[:4] != CODED_MAGIC:
        raise NotCodedError(f"this is not a coded file but {describe_bytes(data)}", offset=0)
    if len(data) < HEADER_BYTES:
        raise TruncatedError("the file ends inside its header", expected=HEADER_BYTES, found=len(data))
    f = HEADER.unpack(data[:HEADER_BYTES])
    if f[1] != VERSION:
        raise VersionError("this version of the format is not known here; update lazyweights", expected=VERSION, found=f[1])
    if f[15] != checksum(data[: HEADER_BYTES - 8]):
        raise ChecksumError("the header is damaged", offset=0, expected=f"{f[15]:016x}")
    if f[2] & ~FLAG_UNIT_PRESET or f[12] or f[13] or any(f[14]):
        raise VersionError("the header uses a feature that is not known here; update lazyweights", found=f[2])
    header = Header(f[2], f[3], f[4], f[5], f[6], f[7], f[8], f[9], f[10] * 4, f[11])
    if actual_size is not None and actual_size != header.file_size:
        raise TruncatedError("the file is not as long as it says", expected=header.file_size, found=actual_size)
    if header.head_raw_bytes > MAX_HEAD_RATIO * header.head_bytes + (1 << 16) or header.prefix_bytes > header.file_size:
        raise LimitError("the header declares more than the file holds", expected=header.file_size, found=header.prefix_bytes)
    if header.payload_offset != payload_offset(header.head_bytes, header.n_units):
        raise OffsetError(
            "the payload does not start where it must",
            expected=payload_offset(header.head_bytes, header.n_units), found=header.payload_offset,
        )
    return header


def unpack_layout(header: Header, head: bytes, table: bytes) -> Layout:
    """Read and check head and unit table.

    Raises
    ------
    FormatError (and its kinds)
    """
    if checksum(head) != header.head_checksum:
        raise ChecksumError("the head is damaged", offset=HEADER_BYTES)
    if checksum(table) != header.table_checksum:
        raise ChecksumError("the unit table is damaged", offset=HEADER_BYTES + header.head_bytes)
    raw = decompress(head, header.head_raw_bytes, "the head")
    try:
        unpacked = unpack_head(raw, header.source_size)
    except CodecError as error:
        raise FormatError(f"a code table of the head is wrong: {error}") from error
    units = np.frombuffer(table, UNIT_DTYPE)
    layout = Layout(
        header.source_size, header.file_size, header.sha256, header.flags, unpacked, units, header.payload_offset
    )
    if sum(s.n_units for s in unpacked.spans) != len(units):
        raise FormatError(
            "the spans need another number of units", expected=sum(s.n_units for s in unpacked.spans), found=len(units)
        )
    end = int(layout.offsets()[-1]) + TRAILER_BYTES
    if end != header.file_size:
        raise OffsetError("the payloads do not end where the file does", expected=end, found=header.file_size)
    _check_units(layout)
    return layout


def _check_units(layout: Layout) -> None:
    """Check kinds and sizes of all units at once; a wrong one is then looked up."""
    spans = layout.head.spans
    if not spans:
        return
    n_units = np.array([s.n_units for s in spans])
    last = np.cumsum(n_units) - 1
    source = np.repeat(np.array([s.unit_bytes(0) for s in spans], np.int64), n_units)
    source[last] = [s.unit_bytes(int(n) - 1) for s, n in zip(spans, n_units, strict=True)]
    for tensor, end, n in zip(spans, last.tolist(), n_units.tolist(), strict=True):
        if tensor.is_coded and tensor.outer > 1:
            per = tensor.groups_per_outer
            source[end - n + per : end + 1 : per] = tensor.unit_bytes(per - 1)
    coded = np.repeat(np.array([s.is_coded for s in spans]), n_units)
    kinds, sizes = layout.kinds, layout.sizes
    wrong_kind = ~np.where(coded, _ALLOWED[0][kinds], _ALLOWED[1][kinds])
    wrong_size = np.where(kinds == RAW, sizes != source, sizes >= source)
    wrong = wrong_kind | wrong_size
    if not wrong.any():
        return
    k = int(np.argmax(wrong))
    span = int(np.searchsorted(last, k))
    where: dict[str, Any] = {"tensor": spans[span].name or None, "row_group": k - int(last[span] + 1 - n_units[span])}
    if wrong_kind[k]:
        allowed = np.flatnonzero(_ALLOWED[0 if coded[k] else 1]).tolist()
        raise FormatError("a unit has a kind that its span cannot have", expected=allowed, found=int(kinds[k]), **where)
    raise LimitError("a unit has an impossible size", expected=f"<= {int(source[k])}", found=int(sizes[k]), **where)


_ALLOWED = np.zeros((2, 16), np.bool_)
_ALLOWED[0][[RAW, CODED, CODED_UNFORCED, LOCKSTEP]] = True
_ALLOWED[1][[RAW, ZSTD, FILTERED]] = True
"""Kinds of units that coded and verbatim spans may have."""
