"""Files in the safetensors format: eight bytes with the length of a JSON header, the header, then the arrays.

Written here because it is so little: names, types, shapes and places of the arrays, and a dictionary of strings under
``__metadata__``. Arrays are filled in any order, so that nothing has to be held until the end. Other readers of the format
open these files too.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from lazyweights.container.gguf_values import describe_bytes
from lazyweights.errors import FormatError, LimitError, OffsetError, TruncatedError

MAX_HEADER_BYTES = 100_000_000
LENGTH_BYTES = 8
ALIGNMENT = 64
METADATA_KEY = "__metadata__"

_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "BOOL": "?",
}  # fmt: skip
_ITEM_BYTES = {
    **{name: np.dtype(dtype).itemsize for name, dtype in _DTYPES.items()},
    "BF16": 2, "U16": 2, "U32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8,
}  # fmt: skip
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}


class SafetensorsWriter:
    """Writes arrays whose types and shapes are known before.

    Parameters
    ----------
    file : BinaryIO
        Open for writing, seekable, empty.
    arrays : mapping of str to (dtype, shape)
        In the order of the file.
    metadata : mapping of str to str
    """

    def __init__(
        self, file: BinaryIO, arrays: Mapping[str, tuple[Any, tuple[int, ...]]], metadata: Mapping[str, str]
    ) -> None:
        self._file = file
        self._arrays: dict[str, tuple[np.dtype, tuple[int, ...], int]] = {}
        header: dict[str, Any] = {METADATA_KEY: dict(metadata)}
        end = 0
        for name, (kind, shape) in arrays.items():
            dtype = np.dtype(kind)
            start, end = end, end + dtype.itemsize * math.prod(shape)
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
            self._arrays[name] = (dtype, shape, start)
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT)
        self._data_offset = LENGTH_BYTES + len(text)
        file.write(len(text).to_bytes(LENGTH_BYTES, "little"))
        file.write(text)
        file.truncate(self._data_offset + end)

    def write(self, name: str, values: np.ndarray, first: int = 0) -> None:
        """Write values from index `first` of the first dimension on."""
        dtype, shape, start = self._arrays[name]
        if values.shape[1:] != shape[1:] or first + len(values) > shape[0]:
            raise ValueError(f"{name} has the shape {shape}, not {values.shape} from {first} on")
        self._file.seek(self._data_offset + start + first * dtype.itemsize * math.prod(shape[1:]))
        for part in values:  # one by one: a change of type needs room for one only
            self._file.write(np.ascontiguousarray(part, dtype).reshape(-1).view(np.uint8).data)


@dataclass(frozen=True)
class ArrayEntry:
    """One array as the header describes it, its place checked against the file.

    Attributes
    ----------
    dtype : str
        The format's own name, such as ``F16`` or ``BF16``.
    shape : tuple of int
    offset, n_bytes : int
        Place in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


def read_header(path: str | os.PathLike[str]) -> tuple[dict[str, ArrayEntry], dict[str, str]]:
    """Read what arrays a file has, of any type, without reading them, and its metadata.

    Raises
    ------
    FormatError
        If the file is not as the format demands.
    """
    name = os.fspath(path)
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or length > size - LENGTH_BYTES:
            file.seek(0)
            looks = describe_bytes(file.read(512))
            raise TruncatedError(f"not a safetensors file, or cut short: it looks like {looks}", path=name)
        if length > MAX_HEADER_BYTES:
            raise LimitError("the header is too long", path=name, expected=MAX_HEADER_BYTES, found=length)
        try:
            header = json.loads(file.read(length))
            metadata = {str(key): str(value) for key, value in header.pop(METADATA_KEY, {}).items()}
            listed = [(str(key), e["dtype"], tuple(e["shape"]), *e["data_offsets"]) for key, e in header.items()]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise FormatError("the header is not that of a safetensors file", path=name) from error
    data_offset = LENGTH_BYTES + length
    entries = {}
    for key, kind, shape, start, stop in listed:
        is_sound = isinstance(kind, str) and all(type(n) is int and n >= 0 for n in (*shape, start, stop))
        if not is_sound or stop - start != _ITEM_BYTES.get(kind, 0) * math.prod(shape):
            raise FormatError("type, shape and place do not fit together", path=name, tensor=key)
        if stop > size - data_offset:
            raise OffsetError("this leaves the file", path=name, tensor=key, expected=size, found=data_offset + stop)
        entries[key] = ArrayEntry(kind, shape, data_offset + start, stop - start)
    return entries, metadata


def read_safetensors(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Map the arrays of a file, read-only, and return them with the metadata.

    Raises
    ------
    FormatError
        If the file is not as the format demands, or holds an array of a type that numpy does not have.
    """
    entries, metadata = read_header(path)
    arrays = {}
    whole = np.memmap(path, np.uint8, "r")
    for key, entry in entries.items():
        if entry.dtype not in _DTYPES:
            raise FormatError(f"numpy has no type {entry.dtype}", path=os.fspath(path), tensor=key)
        arrays[key] = view_array(whole, entry, _DTYPES[entry.dtype])
    return arrays, metadata


def view_array(whole: np.ndarray, entry: ArrayEntry, dtype: str) -> np.ndarray:
    """View an array in the mapped bytes of its file, or copy it where it is not aligned."""
    part = whole[entry.offset : entry.offset + entry.n_bytes]
    if entry.offset % np.dtype(dtype).alignment:
        return part.copy().view(dtype).reshape(entry.shape)
    return np.ndarray(entry.shape, dtype, part)
