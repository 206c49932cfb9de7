"""Cut a GGUF file into spans: one for each tensor that is understood, verbatim ones for everything else.

The scanner serves lossless coding, so it has one duty above all: for every file that starts with ``GGUF`` the spans
partition the file, whatever the header claims. It never raises on hostile content. What it cannot follow stays
verbatim, and `Scan.problem` says why.

What surprises:

- A tensor in `Scan.tensors` need not have a span. It has one only if its type is known, it has 1 to 4 dimensions of
  at least 1, its rows are whole blocks, and its bytes lie in the file and overlap no tensor accepted before it (in
  order of offset, then of index). Otherwise its bytes belong to verbatim spans.
- In a big-endian file tensors are listed, but all spans are verbatim: the data is byte-swapped inside blocks, which no
  plane layout describes.
- Shapes keep the order of the file: columns (contiguous) first, the reverse of numpy.
- If the header cannot be followed to its end, no tensor has a place: the list is empty and the whole file is one span.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lazyweights.blocks.types import GGML_TYPES
from lazyweights.container.gguf_values import (
    U32,
    VALUE_TYPE_NAMES,
    Buffer,
    ElidedArray,
    HeaderReader,
    byte_view,
    describe_bytes,
    read_metadata,
    show_name,
)
from lazyweights.errors import FormatError, LimitError

__all__ = ["ElidedArray", "Scan", "Span", "TensorInfo", "describe_bytes", "read_metadata", "scan_gguf"]

DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as the header describes it.

    Attributes
    ----------
    name : str
        Decoded as UTF-8; other bytes become surrogate escapes. Need not be unique or non-empty.
    type_id : int
        GGML type; may be unknown to `GGML_TYPES`.
    shape : tuple of int
        0 to 4 dimensions in the order of the file, columns first. Any of them may be 0 or absurdly large.
    offset : int
        Where its data starts, from the start of the file. May lie beyond the end.
    n_bytes : int
        Size of its data, exact; 0 where it has none, the type is unknown, or its rows are not whole blocks.
    """

    name: str
    type_id: int
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


@dataclass(frozen=True)
class Span:
    """A piece of the file, never empty.

    Attributes
    ----------
    offset, n_bytes : int
        Its place in the file.
    tensor : int or None
        Index into `Scan.tensors`; None for bytes to keep verbatim (header, gaps, tail, anything not understood).
    """

    offset: int
    n_bytes: int
    tensor: int | None


@dataclass(frozen=True)
class Scan:
    """What a GGUF file consists of.

    Attributes
    ----------
    version : int
        Format version; 0 where the file ends before it.
    byte_order : str
        ``little`` or ``big``.
    alignment : int
        Alignment of the data section.
    data_offset : int
        Where the data section starts. May lie beyond the end of a file without tensors; the file size where the
        header cannot be followed to its end.
    tensors : tuple of TensorInfo
        In the order of the file.
    spans : tuple of Span
        In the order of their offsets; they cover the file exactly. The header is a span of its own.
    problem : str or None
        The first thing that is not as the format demands, and how many more there are; None if there is none.
    """

    version: int
    byte_order: str
    alignment: int
    data_offset: int
    tensors: tuple[TensorInfo, ...]
    spans: tuple[Span, ...]
    problem: str | None


def scan_gguf(
    buffer: Buffer, file_size: int | None = None, follow: Callable[[Any, int, int], int] | None = None
) -> Scan:
    """Read the header of a GGUF file and cut the file into spans.

    Reads no tensor data, so on an mmap only the pages of the header are touched. Versions 1 to 3, both byte orders.

    Parameters
    ----------
    buffer : bytes, memoryview or mmap
        The file, or the start of it that holds the whole header.
    file_size : int, optional
        Size of the file in bytes, if `buffer` is only its start.
    follow : callable, optional
        See `HeaderReader`.

    Returns
    -------
    Scan
        Its spans cover ``[0, file_size)``.

    Raises
    ------
    FormatError
        If the file does not start with ``GGUF``; says what it looks like.
    """
    with byte_view(buffer, file_size) as view:
        size = len(view) if file_size is None else file_size
        reader = HeaderReader(view, follow)
        alignment = DEFAULT_ALIGNMENT
        try:
            reader.read_counts()
            alignment = _read_alignment(reader)
            listed = _read_tensor_list(reader)
        except FormatError as error:
            verbatim = Span(0, size, None)
            return Scan(reader.version, reader.byte_order, alignment, size, (), (verbatim,), str(error))
        data_offset = -(-reader.pos // alignment) * alignment

    problems: list[str] = []
    tensors = _size_tensors(listed, data_offset, problems)
    accepted = _accept_extents(tensors, size, problems)
    if reader.byte_order == "big":
        accepted = []
    spans = _cover(tensors, accepted, min(data_offset, size), size)
    problem = problems[0] if problems else None
    if len(problems) > 1:
        problem = f"{problem} (and {len(problems) - 1} more)"
    return Scan(reader.version, reader.byte_order, alignment, data_offset, tensors, spans, problem)


_Listed = tuple[str, int, tuple[int, ...], int]  # name, type id, shape, offset in the data section


def _read_alignment(reader: HeaderReader) -> int:
    """Step over all pairs and return the alignment of the data section."""
    found: int | None = None
    for key, value_type in reader.pairs():
        if key != b"general.alignment":
            reader.skip_value(value_type, f"the value of {show_name(key)}")
            continue
        offset = reader.pos
        if value_type != U32:
            shown = VALUE_TYPE_NAMES.get(value_type, value_type)
            raise FormatError(f"general.alignment has the value type {shown}, not u32", offset=offset)
        value = reader.number("I", "the value of general.alignment")
        if value == 0:
            raise FormatError("general.alignment is 0", offset=offset)
        if found not in (None, value):
            raise FormatError(f"general.alignment is given twice, as {found} and as {value}", offset=offset)
        found = value
    return DEFAULT_ALIGNMENT if found is None else found


def _read_tensor_list(reader: HeaderReader) -> list[_Listed]:
    listed: list[_Listed] = []
    for index in range(reader.n_tensors):
        name = reader.name(f"the name of tensor {index}")
        what = f"the description of tensor {index}"
        offset = reader.pos
        n_dims = reader.number("I", what)
        if n_dims > MAX_DIMS:
            raise LimitError(f"tensor {show_name(name)} has {n_dims} dimensions, more than {MAX_DIMS}", offset=offset)
        shape = tuple(reader.count(what) for _ in range(n_dims))
        type_id = reader.number("I", what)
        listed.append((name.decode("utf-8", "surrogateescape"), type_id, shape, reader.number("Q", what)))
    return listed


def _size_tensors(listed: list[_Listed], data_offset: int, problems: list[str]) -> tuple[TensorInfo, ...]:
    """Give each tensor its exact size, and note what keeps a tensor from having one."""
    tensors = []
    names: set[str] = set()
    for name, type_id, shape, offset in listed:
        n_bytes = 0
        ggml_type = GGML_TYPES.get(type_id)
        columns = shape[0] if shape else 1
        if name in names:
            problems.append(f"more than one tensor is named {show_name(name)}")
        names.add(name)
        if ggml_type is None:
            problems.append(f"tensor {show_name(name)} has the unknown type {type_id}")
        elif columns % ggml_type.block_size:
            problems.append(
                f"tensor {show_name(name)} has {columns} columns, "
                f"not a multiple of the {ggml_type.block_size} of a {ggml_type.name} block"
            )
        else:
            n_bytes = math.prod(shape) // ggml_type.block_size * ggml_type.block_bytes
        tensors.append(TensorInfo(name, type_id, shape, data_offset + offset, n_bytes))
    return tuple(tensors)


def _accept_extents(tensors: tuple[TensorInfo, ...], size: int, problems: list[str]) -> list[int]:
    """Choose the tensors that get a span: inside the file, in order, none over another."""
    accepted: list[int] = []
    end = 0
    for index in sorted(range(len(tensors)), key=lambda i: (tensors[i].offset, i)):
        tensor = tensors[index]
        if not tensor.n_bytes or not tensor.shape:
            continue
        missing = tensor.offset + tensor.n_bytes - size
        if missing > 0:
            problems.append(
                f"tensor {show_name(tensor.name)} at offset {tensor.offset} has {tensor.n_bytes} bytes, "
                f"{min(missing, tensor.n_bytes)} of them are missing from the file"
            )
        elif tensor.offset < end:
            other = tensors[accepted[-1]].name
            problems.append(f"tensor {show_name(tensor.name)} overlaps tensor {show_name(other)}")
        else:
            accepted.append(index)
            end = tensor.offset + tensor.n_bytes
    return accepted


def _cover(tensors: tuple[TensorInfo, ...], accepted: list[int], header_bytes: int, size: int) -> tuple[Span, ...]:
    """Fill the room around the accepted tensors with verbatim spans."""
    spans = [Span(0, header_bytes, None)]
    pos = header_bytes
    for index in accepted:
        tensor = tensors[index]
        if tensor.offset > pos:
            spans.append(Span(pos, tensor.offset - pos, None))
        spans.append(Span(tensor.offset, tensor.n_bytes, index))
        pos = tensor.offset + tensor.n_bytes
    if pos < size:
        spans.append(Span(pos, size - pos, None))
    return tuple(spans)
