"""Imatrix files of llama.cpp, both formats: sums of squares of the inputs of each weight, which are diagonal Hessians.

GGUF format (what llama-imatrix writes today): ``general.type`` is ``imatrix``; for each weight two F32 tensors,
``NAME.in_sum2`` (n columns, matrices) with the sums and ``NAME.counts`` (1, matrices) with the rows they come from.

Legacy format (``.dat``), little-endian, no magic::

    int32 entries
    entries times: int32 length, name, int32 calls, int32 n values, n float32
    int32 chunks, int32 length, name of the data set     (missing in older files)

Its values are mean squares times `calls`, the number of chunks; rows are not counted, and an entry does not say how many
matrices it holds. So what is read from it is one matrix with calls times the tokens of a chunk for rows, and an expert that no
row came to, whose squares are written as ones, is not told from others.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from lazyweights.container.atomic import AtomicFile
from lazyweights.container.gguf_scan import Scan, scan_gguf
from lazyweights.container.gguf_values import GGUF_MAGIC, STRING, U32, read_metadata
from lazyweights.errors import FormatError, TruncatedError
from lazyweights.llama.capture import InputGroup
from lazyweights.llama.ggml_tensor import F32
from lazyweights.llama.hessians import CaptureInfo, Hessians

SUMS_SUFFIX, COUNTS_SUFFIX = ".in_sum2", ".counts"
DATASETS_KEY, CHUNK_COUNT_KEY, CHUNK_SIZE_KEY = "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"
DEFAULT_CHUNK_SIZE = 512
ALIGNMENT = 32
GGUF_VERSION, ARRAY = 3, 9
MAX_NAME_BYTES = 4096


class Entry(NamedTuple):
    """A weight: its sums of squares, float64 (matrices, n), and the rows they come from, int64 (matrices,)."""

    name: str
    sums: np.ndarray
    counts: np.ndarray


def is_imatrix(path: str | os.PathLike[str]) -> bool:
    """Whether a file is to be read as an imatrix: a GGUF, or what does not start as a safetensors file."""
    with open(path, "rb") as file:
        head = file.read(9)
    if head.startswith(GGUF_MAGIC):
        return True
    # In the legacy format bytes 4 to 7 are the length of a name; in the other one the upper half of a small number.
    return not (head[8:] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32)


def read_imatrix(path: str | os.PathLike[str], chunk_size: int = DEFAULT_CHUNK_SIZE) -> Hessians:
    """Read an imatrix file of either format as diagonal Hessians.

    Parameters
    ----------
    path : str or os.PathLike
    chunk_size : int
        Tokens of a chunk, for the legacy format, which does not say.

    Raises
    ------
    FormatError
        If it is no imatrix file, or damaged.
    """
    name = os.fspath(path)
    with open(path, "rb") as file:
        data = file.read()
    entries, chunks, size, datasets = (_parse_gguf if data.startswith(GGUF_MAGIC) else _parse_legacy)(data, name, chunk_size)
    groups = [InputGroup((e.name,), e.sums.shape[1], len(e.counts), len(e.counts) > 1) for e in entries]
    info = CaptureInfo("diagonal", text=", ".join(map(os.path.basename, datasets)), n_ctx=size, n_chunks=chunks)
    zeros = {e.name: np.zeros(len(e.counts), np.int64) for e in entries}
    return Hessians(info, groups, {e.name: e.sums for e in entries}, {e.name: e.counts for e in entries}, zeros)


_Parsed = tuple[list[Entry], int, int, list[str]]  # entries, chunks, tokens of a chunk, data sets


def _parse_gguf(data: bytes, path: str, chunk_size: int) -> _Parsed:
    scan = scan_gguf(data)
    metadata = read_metadata(data)
    if metadata.get("general.type") != "imatrix":
        raise FormatError("this GGUF is no imatrix file", path=path, expected="imatrix", found=metadata.get("general.type"))
    if scan.problem is not None:
        raise FormatError(f"the imatrix file is damaged: {scan.problem}", path=path)
    tensors = _float_tensors(data, scan, path)
    entries = []
    for key, sums in tensors.items():
        if not key.endswith(SUMS_SUFFIX):
            continue
        name = key.removesuffix(SUMS_SUFFIX)
        counts = tensors.get(name + COUNTS_SUFFIX)
        if counts is None or not counts.size or sums.size % counts.size:
            raise FormatError("sums and counts do not fit together", path=path, tensor=name)
        # Older files have one count for several matrices: then it is one matrix, as in the legacy format.
        rows = np.rint(counts.reshape(-1)).astype(np.int64)
        entries.append(Entry(name, sums.reshape(len(rows), -1).astype(np.float64), rows))
    if not entries:
        raise FormatError("the imatrix file has no entries", path=path)
    datasets = metadata.get(DATASETS_KEY)
    size = metadata.get(CHUNK_SIZE_KEY, chunk_size)
    texts = [str(name) for name in datasets] if isinstance(datasets, list) else []
    return entries, int(metadata.get(CHUNK_COUNT_KEY, 0)), int(size), texts


def _float_tensors(data: bytes, scan: Scan, path: str) -> dict[str, np.ndarray]:
    found = {}
    for span in scan.spans:
        if span.tensor is None:
            continue
        tensor = scan.tensors[span.tensor]
        if tensor.type_id != F32 or scan.byte_order != "little":
            raise FormatError("not F32", path=path, tensor=tensor.name, found=tensor.type_id)
        found[tensor.name] = np.frombuffer(data, "<f4", tensor.n_bytes // 4, tensor.offset)
    return found


def _parse_legacy(data: bytes, path: str, chunk_size: int) -> _Parsed:
    pos = 0

    def take(n_bytes: int, what: str) -> bytes:
        nonlocal pos
        if not 0 <= n_bytes <= len(data) - pos:
            raise TruncatedError(f"not an imatrix file, or cut short: {what} is not there", path=path, offset=pos)
        pos += n_bytes
        return data[pos - n_bytes : pos]

    def number(what: str) -> int:
        return int(struct.unpack("<i", take(4, what))[0])

    n_entries = number("the number of entries")
    if not 1 <= n_entries <= len(data) // 12:
        raise FormatError("not an imatrix file: the number of entries makes no sense", path=path, found=n_entries)
    entries = []
    for _ in range(n_entries):
        length = number("the length of a name")
        if not 1 <= length <= MAX_NAME_BYTES:
            raise FormatError("not an imatrix file: the length of a name makes no sense", path=path, offset=pos, found=length)
        name = take(length, "a name").decode("utf-8", "surrogateescape")
        calls = number(f"calls of {name}")
        n_values = number(f"the number of values of {name}")
        values = np.frombuffer(take(4 * n_values, f"the values of {name}"), "<f4").astype(np.float64)
        if n_values < 1 or calls < 0:
            raise FormatError("an entry without values", path=path, tensor=name)
        rows = np.array([max(calls, 1) * chunk_size], np.int64)
        entries.append(Entry(name, values[None] * chunk_size, rows))
    chunks, datasets = 0, []
    if pos < len(data):
        chunks = number("the number of chunks")
    if pos < len(data):
        datasets.append(take(number("the length of the data set's name"), "the data set's name").decode("utf-8", "replace"))
    return entries, chunks, chunk_size, datasets


def write_imatrix(
    path: str | os.PathLike[str], hessians: Hessians, file_format: str = "gguf", *, process_output: bool = False,
    force: bool = False,
) -> None:  # fmt: skip
    """Write sums of squares, or the diagonals of Hessians, as an imatrix file that llama-quantize reads.

    Parameters
    ----------
    path : str or os.PathLike
        The file, whole or not at all.
    hessians : Hessians
        Of the kind "hessian" or "diagonal".
    file_format : str
        "gguf" or "dat".
    process_output : bool
        Include the output matrix; llama-imatrix leaves it out unless it is told to.
    force : bool
        Replace a file that exists.

    Raises
    ------
    OutputExistsError, LazyWeightsError
        As for `AtomicFile`.
    """
    pack: Callable[[list[Entry], Hessians], Iterable[bytes]] = {"gguf": _pack_gguf, "dat": _pack_legacy}[file_format]
    entries = imatrix_entries(hessians, process_output=process_output)
    with AtomicFile(path, force) as file:
        for part in pack(entries, hessians):
            file.write(part)


def imatrix_entries(hessians: Hessians, *, process_output: bool) -> list[Entry]:
    """Return what an imatrix says of each weight, sorted by name; weights that no row came to are left out."""
    entries = []
    for group in hessians.groups:
        counts = np.atleast_1d(hessians.n_rows(group.leader))
        if not counts.any() or (group.is_output and not process_output):
            continue
        sums = hessians.diagonal(group.leader).reshape(len(counts), -1)
        entries += [Entry(name, sums, counts) for name in group.weights]
    return sorted(entries)


def mean_squares(entry: Entry) -> np.ndarray:
    """Return mean squares, float32 (matrices * n,), ones for a matrix that no row came to: what the quantizers take."""
    counts = entry.counts[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        means = np.where(counts > 0, entry.sums.astype(np.float32) / counts.astype(np.float32), np.float32(1))
    return np.ascontiguousarray(means, np.float32).reshape(-1)


def _chunk_size(hessians: Hessians) -> int:
    return hessians.info.n_ctx or DEFAULT_CHUNK_SIZE


def _last_chunk(entries: list[Entry], chunk_size: int) -> int:
    return max((int(entry.counts.max()) for entry in entries), default=0) // chunk_size


def _pack_legacy(entries: list[Entry], hessians: Hessians) -> Iterable[bytes]:
    chunk_size = _chunk_size(hessians)
    yield struct.pack("<i", len(entries))
    for entry in entries:
        name = entry.name.encode("utf-8", "surrogateescape")
        calls = -(-int(entry.counts.max()) // chunk_size)
        values = mean_squares(entry) * np.float32(calls)
        yield struct.pack("<i", len(name)) + name + struct.pack("<ii", calls, values.size)
        yield values.astype("<f4").tobytes()
    dataset = hessians.info.text.encode()
    yield struct.pack("<ii", _last_chunk(entries, chunk_size), len(dataset)) + dataset


def _pack_gguf(entries: list[Entry], hessians: Hessians) -> Iterable[bytes]:
    def text(value: str) -> bytes:
        data = value.encode("utf-8", "surrogateescape")
        return struct.pack("<Q", len(data)) + data

    chunk_size = _chunk_size(hessians)
    pairs = [
        text("general.type") + struct.pack("<I", STRING) + text("imatrix"),
        text(DATASETS_KEY) + struct.pack("<IIQ", ARRAY, STRING, 1) + text(hessians.info.text),
        text(CHUNK_COUNT_KEY) + struct.pack("<II", U32, _last_chunk(entries, chunk_size)),
        text(CHUNK_SIZE_KEY) + struct.pack("<II", U32, chunk_size),
    ]
    infos, payload, offset = [], [], 0
    for entry in entries:
        for suffix, values in ((SUMS_SUFFIX, entry.sums), (COUNTS_SUFFIX, entry.counts[:, None])):
            data = values.astype("<f4").tobytes()
            shape = values.shape[::-1]
            infos.append(text(entry.name + suffix) + struct.pack("<IQQIQ", 2, *shape, F32, offset))
            payload.append(data + bytes(-len(data) % ALIGNMENT))
            offset += len(payload[-1])
    header = GGUF_MAGIC + struct.pack("<IQQ", GGUF_VERSION, len(infos), len(pairs)) + b"".join(pairs + infos)
    yield header + bytes(-len(header) % ALIGNMENT)
    yield from payload
