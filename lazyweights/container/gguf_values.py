"""The start of a GGUF file: magic, version, counts, and the key/value pairs, read without trusting any of it.

What surprises:

- Every number here comes from the file and may be hostile. `HeaderReader.need` compares each declared size with
  the bytes left, as exact Python integers, before anything is read or allocated; the ``MAX_*`` limits bound what
  remains (walks over many tiny items). Real models stay far below them.
- Version 1 stores counts, lengths and dimensions in 32 bits, later versions in 64. Offsets of tensors have 64
  bits in all of them.
- The byte order is not declared. A big-endian file keeps the four magic bytes and swaps everything after them,
  so the version field tells: a small number in one order is a huge one in the other.
- No view of the caller's buffer outlives a call, so an mmap can be closed right after it.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from lazyweights.errors import FormatError, LimitError, TruncatedError, VersionError

Buffer = bytes | bytearray | memoryview | mmap.mmap

GGUF_MAGIC = b"GGUF"
CODED_MAGIC = b"LZWT"
GGUF_VERSIONS = (1, 2, 3)

MAX_NAME_BYTES = 65535
MAX_TEXT_BYTES = 1 << 24
MAX_PAIRS = 1 << 20
MAX_TENSORS = 1 << 18
MAX_ARRAY_STRINGS = 1 << 24
MAX_NESTED_ARRAYS = 1 << 20
MAX_DEPTH = 8

STRING, ARRAY, U32 = 8, 9, 4
_SCALAR_CODES = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_SCALAR_BYTES = {value_type: struct.calcsize("<" + code) for value_type, code in _SCALAR_CODES.items()}
VALUE_TYPE_NAMES = {
    0: "u8", 1: "i8", 2: "u16", 3: "i16", 4: "u32", 5: "i32", 6: "f32", 7: "bool", 8: "str", 9: "arr",
    10: "u64", 11: "i64", 12: "f64",
}  # fmt: skip

_MAGICS = (
    (GGUF_MAGIC, "a GGUF file"),
    (CODED_MAGIC, "a LazyWeights coded file"),
    (b"FUGG", "a GGUF file with swapped bytes"),
    (b"\x28\xb5\x2f\xfd", "a zstd stream"),
    (b"\x1f\x8b", "a gzip stream"),
    (b"\xfd7zXZ\x00", "an xz stream"),
    (b"BZh", "a bzip2 stream"),
    (b"\x04\x22\x4d\x18", "an lz4 stream"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-zip archive"),
    (b"PK\x03\x04", "a zip archive (PyTorch checkpoint?)"),
    (b"PK\x05\x06", "an empty zip archive"),
    (b"lmgg", "an old GGML/GGJT file"),
    (b"fmgg", "an old GGML/GGJT file"),
    (b"tjgg", "an old GGML/GGJT file"),
    (b"algg", "an old GGML LoRA adapter"),
    (b"\x80\x02", "a Python pickle (old PyTorch checkpoint?)"),
    (b"\x80\x04", "a Python pickle"),
    (b"\x93NUMPY", "a NumPy array file"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"version https://git-lfs.github.com/spec/", "a Git LFS pointer"),
)


def describe_bytes(head: bytes) -> str:
    """Say what a file looks like, from its first bytes.

    Parameters
    ----------
    head : bytes
        The start of the file; 512 bytes are plenty, and an empty `head` means an empty file.

    Returns
    -------
    str
        A noun phrase for an error message.

    Examples
    --------
    >>> describe_bytes(b"PK\\x03\\x04..."), describe_bytes(b"<!DOCTYPE html>")
    ('a zip archive (PyTorch checkpoint?)', 'an HTML page (failed download?)')
    """
    head = bytes(head[:4096])
    if not head:
        return "an empty file"
    for magic, what in _MAGICS:
        if head.startswith(magic):
            return what
    if len(head) < 4 and GGUF_MAGIC.startswith(head):
        return "the first bytes of a GGUF file, cut short"
    if head[257:262] == b"ustar":
        return "a tar archive"
    if len(head) >= 9 and head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") <= 100_000_000:
        return "a safetensors file"
    if not head.strip(b"\x00"):
        return "nothing but zero bytes (unfinished download?)"
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if start.startswith((b"<!doctype html", b"<html", b"<head")):
        return "an HTML page (failed download?)"
    if start.startswith(b"<?xml"):
        return "an XML document (failed download?)"
    text = head.decode("utf-8", "replace")
    if len(head) > 4:
        text = text.removesuffix("\ufffd")  # a character of several bytes that the end of `head` cuts
    if all(char.isprintable() or char in "\t\r\n\f\ufeff" for char in text) and "\ufffd" not in text:
        return "a JSON text" if start.startswith((b"{", b"[")) else "a text file"
    return f"an unknown kind of file (first bytes {head[:4].hex(' ')})"


@dataclass(frozen=True)
class ElidedArray:
    """Stands for a metadata value that was too long to read.

    Attributes
    ----------
    type_name : str
        Type of an element in llama.cpp's spelling, for example ``str`` or ``f32``; ``byte`` for a string that
        is itself too long.
    length : int
        Number of elements.
    """

    type_name: str
    length: int

    def __str__(self) -> str:
        return f"arr[{self.type_name},{self.length}]"


class HeaderReader:
    """A cursor over the header of a GGUF file that checks every step.

    Parameters
    ----------
    view : memoryview
        The file, or the start of it, as bytes.
    follow : callable, optional
        Steps over strings like `string_kernels.follow_strings`, for a caller that has loaded numba anyway: faster.

    Attributes
    ----------
    pos : int
        Offset of the next unread byte; never beyond the end of `view`.
    version : int
        Format version, 0 where the file ends before it.
    byte_order : str
        ``little`` or ``big``.
    n_tensors, n_pairs : int
        Declared counts, already checked against the bytes left.

    Raises
    ------
    FormatError
        If the bytes do not start with ``GGUF``. Every other method raises a `FormatError` too, of a subclass that
        says what is wrong, where the header cannot be followed.
    """

    def __init__(self, view: memoryview, follow: Callable[[Any, int, int], int] | None = None) -> None:
        if view[:4] != GGUF_MAGIC:
            raise FormatError(f"not a GGUF file: it looks like {describe_bytes(bytes(view[:4096]))}", offset=0)
        self.view = view
        self._follow = follow
        self.pos = 4
        self.version = 0
        self.byte_order = "little"
        self.n_tensors = 0
        self.n_pairs = 0
        self._prefix = "<"
        self._count_code = "Q"
        self._count_bytes = 8
        self._n_array_strings = 0
        self._n_nested_arrays = 0

    def read_counts(self) -> None:
        """Read version, byte order and the two counts.

        Raises
        ------
        FormatError
            If the file ends here, the version is unknown, or a count cannot fit into the bytes left.
        """
        if self.number("I", "the version") & 0xFFFF == 0:
            self.byte_order, self._prefix = "big", ">"
        self.pos = 4
        self.version = self.number("I", "the version")
        if self.version not in GGUF_VERSIONS:
            raise VersionError(f"GGUF version {self.version} is not known", offset=4)
        if self.version == 1:
            self._count_code, self._count_bytes = "I", 4
        self.n_tensors = self.count("the tensor count")
        self.n_pairs = self.count("the pair count")
        # Smallest pair: empty key, type, one byte. Smallest tensor description: empty name, no dimensions.
        self.need(
            self.n_pairs * (self._count_bytes + 5) + self.n_tensors * (self._count_bytes + 16),
            f"a header of {self.n_tensors} tensors and {self.n_pairs} pairs",
        )
        for found, limit, what in ((self.n_tensors, MAX_TENSORS, "tensors"), (self.n_pairs, MAX_PAIRS, "pairs")):
            if found > limit:
                raise LimitError(f"{found} {what} are more than the {limit} that are followed", offset=8)

    def need(self, n_bytes: int, what: str) -> None:
        """Raise `TruncatedError` unless `n_bytes` more bytes are there."""
        left = len(self.view) - self.pos
        if n_bytes > left:
            raise TruncatedError(f"{what} needs {n_bytes} bytes, {left} are left", offset=self.pos)

    def number(self, code: str, what: str) -> Any:
        """Read one number by its `struct` code in the byte order of the file."""
        n_bytes = struct.calcsize("<" + code)
        self.need(n_bytes, what)
        (value,) = struct.unpack_from(self._prefix + code, self.view, self.pos)
        self.pos += n_bytes
        return value

    def count(self, what: str) -> int:
        """Read a count, length or dimension: 32 bits in version 1, 64 bits later."""
        return int(self.number(self._count_code, what))

    def name(self, what: str) -> bytes:
        """Read a key or a tensor name.

        Raises
        ------
        TruncatedError, LimitError
            If it leaves the file or is longer than `MAX_NAME_BYTES`.
        """
        length = self.count(f"the length of {what}")
        self.need(length, what)
        if length > MAX_NAME_BYTES:
            raise LimitError(f"{what} of {length} bytes is longer than {MAX_NAME_BYTES}", offset=self.pos)
        self.pos += length
        return bytes(self.view[self.pos - length : self.pos])

    def pairs(self) -> Iterator[tuple[bytes, int]]:
        """Yield the key and the value type of each pair; the caller then reads or skips the value."""
        for index in range(self.n_pairs):
            key = self.name(f"the key of pair {index}")
            yield key, self.number("I", f"the value type of {show_name(key)}")

    def skip_value(self, value_type: int, what: str) -> None:
        """Step over a value without building it."""
        if value_type == ARRAY:
            self._skip_items(*self._array_head(what, 0), what, 0)
            return
        n_bytes = self.count(what) if value_type == STRING else self._scalar_bytes(value_type, what)
        self.need(n_bytes, what)
        self.pos += n_bytes

    def array_head(self, what: str) -> tuple[int, int]:
        """Read element type and length of an array that is a value; the caller steps over its elements."""
        return self._array_head(what, 0)

    def skip_items(self, item_type: int, length: int, what: str) -> None:
        """Step over the elements of an array behind its head."""
        self._skip_items(item_type, length, what, 0)

    def value(self, value_type: int, what: str, max_array: int | None, depth: int = 0) -> Any:
        """Read a value as a Python object; see `read_metadata` for what it becomes."""
        if value_type == STRING:
            return self._string(what)
        if value_type != ARRAY:
            self._scalar_bytes(value_type, what)
            return self.number(_SCALAR_CODES[value_type], what)
        item_type, length = self._array_head(what, depth)
        if max_array is not None and length > max_array:
            self._skip_items(item_type, length, what, depth)
            return ElidedArray(VALUE_TYPE_NAMES[item_type], length)
        if item_type == STRING:
            return [self._string(what) for _ in range(length)]
        if item_type == ARRAY:
            return [self.value(ARRAY, what, max_array, depth + 1) for _ in range(length)]
        items = struct.unpack_from(f"{self._prefix}{length}{_SCALAR_CODES[item_type]}", self.view, self.pos)
        self.pos += length * _SCALAR_BYTES[item_type]
        return list(items)

    def _scalar_bytes(self, value_type: int, what: str) -> int:
        n_bytes = _SCALAR_BYTES.get(value_type)
        if n_bytes is None:
            raise FormatError(f"{what} has the unknown value type {value_type}", offset=self.pos)
        return n_bytes

    def _string(self, what: str) -> str | ElidedArray:
        length = self.count(what)
        self.need(length, what)
        self.pos += length
        if length > MAX_TEXT_BYTES:
            return ElidedArray("byte", length)
        return str(self.view[self.pos - length : self.pos], "utf-8", "surrogateescape")

    def _array_head(self, what: str, depth: int) -> tuple[int, int]:
        """Read element type and length of an array, and check that the elements can be there."""
        if depth >= MAX_DEPTH:
            raise LimitError(f"{what} nests arrays deeper than {MAX_DEPTH}", offset=self.pos)
        item_type = self.number("I", what)
        length = self.count(what)
        if item_type == STRING:
            self.need(length * self._count_bytes, what)
            self._n_array_strings += length
        elif item_type == ARRAY:
            self.need(length * (self._count_bytes + 4), what)
            self._n_nested_arrays += length
        else:
            self.need(length * self._scalar_bytes(item_type, what), what)
        if self._n_array_strings > MAX_ARRAY_STRINGS or self._n_nested_arrays > MAX_NESTED_ARRAYS:
            raise LimitError(f"{what} has more items than are followed", offset=self.pos)
        return item_type, length

    def _skip_items(self, item_type: int, length: int, what: str, depth: int) -> None:
        if item_type == ARRAY:
            for _ in range(length):
                self._skip_items(*self._array_head(what, depth + 1), what, depth + 1)
        elif item_type == STRING:
            self._skip_strings(length, what)
        else:
            self.pos += length * _SCALAR_BYTES[item_type]

    def _skip_strings(self, length: int, what: str) -> None:
        # Vocabularies have 256k entries, so the loop checks nothing itself: `unpack_from` refuses to read outside
        # the view, a jump only ever goes forward, and the last one is checked below.
        unpack = struct.Struct(self._prefix + self._count_code).unpack_from
        view, step, pos = self.view, self._count_bytes, self.pos
        try:
            if self._follow and self._prefix == "<" and step == 8:
                end = self._follow(view, pos, length)
                pos = end if end >= 0 else len(view) + 1
                length = 0
            for _ in repeat(None, length):
                pos += unpack(view, pos)[0] + step
        except (struct.error, OverflowError, IndexError):
            pos = len(view) + 1
        if pos > len(view):
            raise TruncatedError(f"a string of {what} leaves the file", offset=self.pos)
        self.pos = pos


def show_name(name: bytes | str) -> str:
    """Quote a name for a message: printable whatever its bytes are, and short.

    >>> show_name(b"blk.0\\xff"), len(show_name("x" * 1000))
    ("'blk.0\\\\udcff'", 69)
    """
    text = name if isinstance(name, str) else name.decode("utf-8", "surrogateescape")
    return repr(text) if len(text) <= 64 else repr(text[:64]) + "..."


@contextmanager
def byte_view(buffer: Buffer, n_bytes: int | None = None) -> Iterator[memoryview]:
    """View a buffer as flat bytes, at most the first `n_bytes`, and let go of it afterwards."""
    with memoryview(buffer) as whole, whole.cast("B") as flat, flat[:n_bytes] as view:
        yield view


def read_metadata(buffer: Buffer, *, max_array: int | None = None) -> dict[str, Any]:
    """Read the key/value pairs of a GGUF file.

    Parameters
    ----------
    buffer : bytes, memoryview or mmap
        The file, or the start of it that holds the pairs.
    max_array : int, optional
        Arrays with more elements than this are stepped over and become an `ElidedArray`.

    Returns
    -------
    dict of str to Any
        Integers, floats, booleans, strings (UTF-8; other bytes become surrogate escapes) and lists of them, nested
        where the file nests arrays. A string longer than `MAX_TEXT_BYTES` is elided too. Where a key is repeated
        the first pair counts, as in llama.cpp. If the header cannot be followed to its end, the pairs before that
        point; `scan_gguf` says what is wrong.

    Raises
    ------
    FormatError
        If the bytes do not start with ``GGUF``; says what they look like.
    """
    metadata: dict[str, Any] = {}
    with byte_view(buffer) as view:
        reader = HeaderReader(view)
        try:
            reader.read_counts()
            for key, value_type in reader.pairs():
                value = reader.value(value_type, f"the value of {show_name(key)}", max_array)
                metadata.setdefault(key.decode("utf-8", "surrogateescape"), value)
        except FormatError:
            return metadata
    return metadata
