"""Write a GGUF file again with other tensors: metadata byte for byte, what is not replaced byte for byte.

`write_gguf` takes the header of a source and, for each tensor to replace, a function that makes it. What surprises:

- A tensor is made when its turn comes and written chunk by chunk; nothing of it is kept. Its type may be decided then:
  a tensor description has the same size whatever the type is, so the header is filled in last.
- Shapes are those of the file: columns (contiguous) first, the reverse of numpy.
- Tensors keep the order of the source, and new ones follow it. Offsets are the running padded sum of the sizes, as llama.cpp
  demands, also where those of the source are not. Gaps are zeros, and what follows the last tensor of the source is left out.
- The source is read as it is: its version and alignment are kept. Version 1 and big-endian files are refused, because
  their metadata cannot be copied into a file that llama.cpp reads.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from lazyweights.blocks.types import GGML_TYPES
from lazyweights.container.atomic import AtomicFile
from lazyweights.container.gguf_scan import MAX_DIMS, Scan, TensorInfo, scan_gguf
from lazyweights.container.gguf_values import STRING, U32, Buffer, HeaderReader, byte_view, show_name
from lazyweights.errors import BlockLayoutError, FormatError, VersionError

COPY_BYTES = 1 << 23

Chunk = bytes | bytearray | memoryview | np.ndarray
NewTensor = tuple[int, tuple[int, ...], Iterable[Chunk]]
"""Type, shape (columns first), and the packed bytes in order, in pieces of any size."""

Replacements = Mapping[str, Callable[[], NewTensor]]
Pair = tuple[int, bytes]
"""Value type of a metadata value, and its bytes."""


@dataclass(frozen=True)
class RewriteResult:
    """What `write_gguf` wrote.

    Attributes
    ----------
    tensors : tuple of TensorInfo
        In the order of the file.
    n_replaced : int
        How many of them did not come from the source.
    output_bytes : int
        Size of the whole file.
    """

    tensors: tuple[TensorInfo, ...]
    n_replaced: int
    output_bytes: int

    @property
    def n_weights(self) -> int:
        """Elements of all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)


def u32_pair(value: int) -> Pair:
    """Return a 32-bit unsigned number as a metadata value."""
    return U32, struct.pack("<I", value)


def string_pair(text: str) -> Pair:
    """Return a string as a metadata value."""
    data = text.encode()
    return STRING, struct.pack("<Q", len(data)) + data


@contextmanager
def open_gguf(source: str | os.PathLike[str] | Buffer) -> Iterator[tuple[memoryview, Scan]]:
    """Map a GGUF file, or view one in memory, and scan it.

    Raises
    ------
    FormatError
        If it is not a GGUF file, or not whole.
    """
    if isinstance(source, bytes | bytearray | memoryview | mmap.mmap):
        with byte_view(source) as view:
            yield view, _checked_scan(view, None)
        return
    path = os.fspath(source)
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise FormatError("this is an empty file, not a GGUF file", path=path)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, byte_view(mapped) as view:
            yield view, _checked_scan(view, path)


def _checked_scan(view: memoryview, path: str | None) -> Scan:
    try:
        scan = scan_gguf(view)
        if scan.byte_order != "little" or scan.version == 1:
            what = "big-endian" if scan.byte_order != "little" else "of version 1"
            raise VersionError(f"this GGUF file is {what}; convert the model anew")
        if scan.problem is not None:
            raise FormatError(f"this GGUF file is damaged or not understood: {scan.problem}")
    except FormatError as error:
        error.path = path
        raise
    return scan


def write_gguf(
    source: str | os.PathLike[str] | Buffer,
    output: str | os.PathLike[str],
    replacements: Replacements,
    *,
    new_shapes: Mapping[str, tuple[int, ...]] | None = None,
    pairs: Mapping[str, Pair] | None = None,
    drop_pairs: Collection[str] = (),
    force: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> RewriteResult:
    """Write a GGUF file with the metadata of a source and some of its tensors replaced.

    Parameters
    ----------
    source : str, os.PathLike or buffer
        A whole little-endian GGUF file of version 2 or 3.
    output : str or os.PathLike
        The file to write, whole or not at all.
    replacements : mapping of str to callable
        For a tensor's name a function without parameters that returns ``(type_id, shape, chunks)``. It is called, and its
        chunks are read to their end, when the tensor is written. The shape needs as many dimensions as in the source.
        All other tensors are copied byte for byte.
    new_shapes : mapping of str to tuple of int, optional
        The shapes of the tensors in `replacements` that the source does not have, in the order in which to append them.
    pairs : mapping of str to (value type, bytes), optional
        Metadata to set: in the place of the pair of that key, or behind all others; see `u32_pair` and `string_pair`.
        Not ``general.alignment``, which stays that of the source.
    drop_pairs : collection of str
        Metadata to leave out: keys, or beginnings of keys that end in a dot.
    force : bool
        Replace an output that exists already.
    progress : callable, optional
        Told tensors done, tensors in all, and the name of the tensor at work.

    Returns
    -------
    RewriteResult

    Raises
    ------
    FormatError
        If the source is not such a file; see `open_gguf`.
    BlockLayoutError
        If a replacement names no tensor, or its shape, type and bytes do not fit together.
    LazyWeightsError
        If the output is there already and `force` is not given, is the source itself, or cannot be written.
    """
    path = None if isinstance(source, bytes | bytearray | memoryview | mmap.mmap) else source
    added = dict(new_shapes or {})
    with open_gguf(source) as (view, scan), AtomicFile(output, force, path) as file:
        listed: list[tuple[str, int, TensorInfo | None]] = [(t.name, len(t.shape), t) for t in scan.tensors]
        listed += [(name, len(shape), None) for name, shape in added.items()]
        _check_names(scan, replacements, added)
        packed_pairs, n_pairs = _pack_pairs(view, pairs or {}, drop_pairs)
        head = struct.pack("<4sIQQ", b"GGUF", scan.version, len(listed), n_pairs) + packed_pairs
        header_bytes = len(head) + sum(_info_bytes(name, n_dims) for name, n_dims, _ in listed)
        data_offset = -(-header_bytes // scan.alignment) * scan.alignment
        file.write(bytes(data_offset))

        written: list[TensorInfo] = []
        offset = data_offset
        for index, (name, n_dims, old) in enumerate(listed):
            if progress is not None:
                progress(index, len(listed), name)
            if old is not None and name not in replacements:
                written.append(TensorInfo(name, old.type_id, old.shape, offset, old.n_bytes))
                _copy(file, view, old)
            else:
                new = _write_tensor(file, name, n_dims, offset, replacements[name]())
                if added.get(name, new.shape) != new.shape:
                    said = "the shape is not the one announced"
                    raise BlockLayoutError(said, tensor=name, expected=added[name], found=new.shape)
                written.append(new)
            padding = -written[-1].n_bytes % scan.alignment
            file.write(bytes(padding))
            offset += written[-1].n_bytes + padding
        file.seek(0)
        file.write(head)
        for tensor in written:
            file.write(_pack_info(tensor, data_offset))
        if progress is not None:
            progress(len(listed), len(listed), "")
    return RewriteResult(tuple(written), sum(name in replacements for name, _, _ in listed), offset)


def _check_names(scan: Scan, replacements: Replacements, added: Mapping[str, tuple[int, ...]]) -> None:
    names = {tensor.name for tensor in scan.tensors}
    for name in replacements:
        if name not in names and name not in added:
            raise BlockLayoutError("there is no tensor of this name to replace", tensor=name)
    for name, shape in added.items():
        if name in names:
            raise BlockLayoutError("a tensor of this name is there already", tensor=name)
        if name not in replacements:
            raise BlockLayoutError("nothing makes this new tensor", tensor=name)
        if not 1 <= len(shape) <= MAX_DIMS:
            raise BlockLayoutError("a tensor has 1 to 4 dimensions", tensor=name, found=shape)


def _pack_pairs(view: memoryview, changed: Mapping[str, Pair], dropped: Collection[str]) -> tuple[bytes, int]:
    """Return the bytes of all pairs, copied where nothing changes them, and their number."""
    prefixes = tuple(key for key in dropped if key.endswith("."))
    if "general.alignment" in {*changed, *dropped}:
        raise ValueError("the alignment stays that of the source")
    out = bytearray()
    n_pairs = 0
    left = dict(changed)
    reader = HeaderReader(view)
    reader.read_counts()
    start = reader.pos
    for raw_key, value_type in reader.pairs():
        reader.skip_value(value_type, f"the value of {show_name(raw_key)}")
        key = raw_key.decode("utf-8", "surrogateescape")
        if key in changed:
            if key in left:
                out += _pack_pair(key, *left.pop(key))
                n_pairs += 1
        elif key == "general.alignment" or (key not in dropped and not key.startswith(prefixes)):
            out += view[start : reader.pos]
            n_pairs += 1
        start = reader.pos
    for key, (value_type, value) in left.items():
        out += _pack_pair(key, value_type, value)
    return bytes(out), n_pairs + len(left)


def _pack_pair(key: str, value_type: int, value: bytes) -> bytes:
    name = key.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", value_type) + value


def _info_bytes(name: str, n_dims: int) -> int:
    return 8 + len(name.encode("utf-8", "surrogateescape")) + 4 + 8 * n_dims + 4 + 8


def _pack_info(tensor: TensorInfo, data_offset: int) -> bytes:
    name = tensor.name.encode("utf-8", "surrogateescape")
    dims = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
    return struct.pack("<Q", len(name)) + name + dims + struct.pack("<IQ", tensor.type_id, tensor.offset - data_offset)


def _copy(file: BinaryIO, view: memoryview, tensor: TensorInfo) -> None:
    end = tensor.offset + tensor.n_bytes
    for start in range(tensor.offset, end, COPY_BYTES):
        file.write(view[start : min(start + COPY_BYTES, end)])


def _write_tensor(file: BinaryIO, name: str, n_dims: int, offset: int, new: NewTensor) -> TensorInfo:
    type_id, shape, chunks = new
    n_bytes = tensor_bytes(type_id, shape, name)
    if len(shape) != n_dims:
        raise BlockLayoutError("the number of dimensions must stay as it is", tensor=name, expected=n_dims, found=len(shape))
    n_written = 0
    for chunk in chunks:
        data = _flat_bytes(chunk)
        n_written += len(data)
        if n_written > n_bytes:
            break
        file.write(data)
    if n_written != n_bytes:
        raise BlockLayoutError("the bytes made do not fill type and shape", tensor=name, expected=n_bytes, found=n_written)
    return TensorInfo(name, type_id, tuple(shape), offset, n_bytes)


def tensor_bytes(type_id: int, shape: tuple[int, ...], name: str | None = None) -> int:
    """Return the size of a tensor.

    Raises
    ------
    BlockLayoutError
        If the type is not known or the rows are not whole blocks of it.
    """
    ggml_type = GGML_TYPES.get(type_id)
    if ggml_type is None:
        raise BlockLayoutError(f"the type {type_id} is not known", tensor=name)
    if not shape or any(dim < 1 for dim in shape) or shape[0] % ggml_type.block_size:
        raise BlockLayoutError(f"rows are not whole blocks of {ggml_type.name}", tensor=name, found=shape)
    return math.prod(shape) // ggml_type.block_size * ggml_type.block_bytes


def _flat_bytes(chunk: Any) -> memoryview:
    if isinstance(chunk, np.ndarray):
        return memoryview(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8))
    return memoryview(chunk).cast("B")


