"""Random access to a coded file: tensors, rows and experts, decoded when they are asked for."""

from __future__ import annotations

import math
import mmap
import os
import threading
from contextlib import suppress
from types import TracebackType
from typing import Any

import numpy as np

from lazyweights.blocks.types import type_name
from lazyweights.codecs import TILE_ROWS
from lazyweights.container.coded_file import (
    CHUNK_BYTES,
    HEADER_BYTES,
    UNIT_DTYPE,
    Layout,
    TensorEntry,
    checksum,
    unpack_header,
    unpack_layout,
)
from lazyweights.container.gguf_scan import read_metadata, scan_gguf
from lazyweights.container.gguf_values import GGUF_MAGIC
from lazyweights.container.unit_codec import Part, Tables, decode_parts, decode_verbatim, prepare_parts, units_of
from lazyweights.errors import BackendUnavailableError, BlockLayoutError, ChecksumError, LazyWeightsError

MAX_SCANNED_BYTES = 1 << 26
"""How much of a file that was kept whole is read for its header."""


class CodedFile:
    """A coded file, mapped into memory. Thread-safe; a context manager.

    Only the bytes that a call needs are read: a row group is found by its offset, decoded alone, and its checksum
    checked.

    Parameters
    ----------
    path : str or os.PathLike

    Raises
    ------
    FormatError
        If the file is not a coded file (`NotCodedError`) or its header, head or unit table is damaged.
    LazyWeightsError
        If it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        try:
            with open(self.path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                header = unpack_header(file.read(HEADER_BYTES), size)
                head = file.read(header.head_bytes)
                table = file.read(header.n_units * UNIT_DTYPE.itemsize)
                self._map: mmap.mmap | None = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self.layout: Layout = unpack_layout(header, head, table)
        except OSError as error:
            raise LazyWeightsError(f"cannot read: {error.strerror}", path=self.path) from error
        except LazyWeightsError as error:
            error.path = error.path or self.path
            raise
        self._words: np.ndarray | None = np.frombuffer(self._map, "<u4", size // 4)
        self._offsets = self.layout.offsets()
        self._sizes = self.layout.sizes
        self._kinds = self.layout.kinds
        self._units = units_of(self._kinds, self._sizes, self._offsets[:-1], self.layout.units["checksum"])
        self._spans = list(self.layout.spans())
        self._tables: dict[int, Tables] = {}
        self._lock = threading.Lock()
        self._metadata: dict[str, Any] | None = None
        try:
            self._tensors = {t.name: t for t in self.layout.head.tensors or self._scanned()}
        except LazyWeightsError as error:
            error.path = error.path or self.path
            self.close()
            raise

    def _scanned(self) -> list[TensorEntry]:
        """Tensors of a file that was kept whole: its head lists none, so they come from the source's own header."""
        size = self.layout.source_size
        if len(self._spans) != 1:
            return []
        header = bytes(self._source_bytes(0, min(size, MAX_SCANNED_BYTES)))
        if not header.startswith(GGUF_MAGIC):
            return []
        scan = scan_gguf(header, size)
        tensors = (scan.tensors[s.tensor] for s in scan.spans if s.tensor is not None)
        return [TensorEntry(t.name, t.type_id, t.shape, t.offset, t.n_bytes, 0) for t in tensors]

    def __enter__(self) -> CodedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file. Arrays that were returned stay valid: they are copies."""
        mapped, self._map = self._map, None
        if mapped is not None:
            self._words = None
            with suppress(BufferError):  # another thread still decodes: the map goes when it is done
                mapped.close()

    def keys(self) -> list[str]:
        """Names of the tensors in file order."""
        return list(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def tensor_info(self, name: str) -> TensorEntry:
        """Type, shape (GGUF order) and place of a tensor.

        Raises
        ------
        KeyError
            If there is no tensor of that name.
        """
        return self._tensors[name]

    @property
    def metadata(self) -> dict[str, Any]:
        """The key-value pairs of the GGUF header."""
        with self._lock:
            if self._metadata is None:
                self._metadata = read_metadata(self.header_bytes())
            return self._metadata

    def tensors(self) -> list[TensorEntry]:
        """All tensors in file order."""
        return list(self._tensors.values())

    def header_bytes(self) -> bytes:
        """The source's bytes before its first tensor: the GGUF header (at most the first 64 MiB)."""
        first = min((t.offset for t in self._tensors.values()), default=self.layout.source_size)
        return bytes(self._source_bytes(0, min(first, MAX_SCANNED_BYTES)))

    def get_tensor(self, name: str, dequantize: bool = False) -> np.ndarray:
        """Return a whole tensor.

        Parameters
        ----------
        name : str
        dequantize : bool
            False: packed GGML bytes. True: float32 values (needs the ``gguf`` package).

        Returns
        -------
        ndarray
            Packed: uint8, shape ``(ne[3], ne[2], ne[1], row bytes)`` without leading ones (of the dimensions the tensor
            does not have). Dequantized: float32 in the same order with ``ne[0]`` last.

        Raises
        ------
        KeyError, FormatError, CodecError, BackendUnavailableError
        """
        info = self._tensors[name]
        data = self._source_bytes(info.offset, info.n_bytes)
        packed = np.frombuffer(data, np.uint8).reshape(self._packed_shape(info))
        return self._dequantize(info, packed) if dequantize else packed

    def get_rows(self, name: str, start: int, stop: int, outer: int = 0, dequantize: bool = False) -> np.ndarray:
        """Return rows ``start .. stop - 1`` of one outer index; only the row groups they touch are decoded.

        Parameters
        ----------
        name : str
        start, stop : int
            Rows (``ne[1]``), 0 <= start <= stop <= rows.
        outer : int
            Index over the dimensions above the rows (the expert).
        dequantize : bool
            As in `get_tensor`.

        Returns
        -------
        ndarray of uint8, shape (stop - start, row bytes), or float32, shape (stop - start, ne[0])

        Raises
        ------
        KeyError, IndexError, FormatError, CodecError, BackendUnavailableError
        """
        info, row_bytes = self._check_rows(name, start, stop, outer)
        rows = info.shape[1] if len(info.shape) > 1 else 1
        offset = info.offset + (outer * rows + start) * row_bytes
        data = self._source_bytes(offset, (stop - start) * row_bytes)
        packed = np.frombuffer(data, np.uint8).reshape(stop - start, row_bytes)
        return self._dequantize(info, packed) if dequantize else packed

    def get_expert(self, name: str, expert: int, dequantize: bool = False) -> np.ndarray:
        """Return all rows of one outer index of a 3-D tensor, decoded alone.

        Raises
        ------
        KeyError, IndexError, FormatError, CodecError, BackendUnavailableError
        """
        info = self._tensors[name]
        return self.get_rows(name, 0, info.shape[1] if len(info.shape) > 1 else 1, expert, dequantize)

    def payload_bytes(self, name: str, start: int, stop: int, outer: int = 0) -> int:
        """Payload bytes that `get_rows` needs for these rows.

        Raises
        ------
        KeyError, IndexError
        """
        info, row_bytes = self._check_rows(name, start, stop, outer)
        if start == stop:
            return 0
        _, span, first, begin = self._spans[info.span]
        if not span.is_coded:
            rows = info.shape[1] if len(info.shape) > 1 else 1
            at = info.offset + (outer * rows + start) * row_bytes - begin
            units = range(at // CHUNK_BYTES, -(-(at + (stop - start) * row_bytes) // CHUNK_BYTES))
            return int(self._sizes[first + units.start : first + units.stop].sum())
        first += outer * span.groups_per_outer
        return int(self._sizes[first + start // TILE_ROWS : first + -(-stop // TILE_ROWS)].sum())

    def _check_rows(self, name: str, start: int, stop: int, outer: int) -> tuple[TensorEntry, int]:
        """Return the tensor and the bytes of a row, after checking that the rows are there."""
        info = self._tensors[name]
        rows = info.shape[1] if len(info.shape) > 1 else 1
        n_outer = math.prod(info.shape[2:])
        if not 0 <= start <= stop <= rows:
            raise IndexError(f"rows {start}:{stop} are not within the {rows} rows of {name!r}")
        if not 0 <= outer < n_outer:
            raise IndexError(f"outer index {outer} is not within the {n_outer} of {name!r}")
        return info, info.n_bytes // (rows * n_outer)

    def _packed_shape(self, info: TensorEntry) -> tuple[int, ...]:
        outer = tuple(reversed(info.shape[1:]))
        rows = int(np.prod(outer, dtype=np.int64))
        return (*outer, info.n_bytes // max(rows, 1))

    def _dequantize(self, info: TensorEntry, packed: np.ndarray) -> np.ndarray:
        try:
            import gguf
        except ImportError as error:
            raise BackendUnavailableError("dequantize=True needs the gguf package: pip install gguf") from error
        try:
            return gguf.quants.dequantize(packed, gguf.GGMLQuantizationType(info.type_id)).astype(np.float32)
        except (NotImplementedError, ValueError) as error:
            raise BlockLayoutError(
                f"the gguf package cannot dequantize {type_name(info.type_id)}", path=self.path, tensor=info.name
            ) from error

    def _table_set(self, number: int) -> Tables:
        with self._lock:
            if number not in self._tables:
                self._tables[number] = Tables(self.layout.head.table_sets[number])
            return self._tables[number]

    def _source_bytes(self, offset: int, n_bytes: int) -> bytearray:
        """Return source bytes ``offset .. offset + n_bytes``; decodes the units they touch."""
        words = self._words  # taken once: the file may be closed by another thread meanwhile
        if words is None:
            raise LazyWeightsError("the file is closed", path=self.path)
        out = bytearray(n_bytes)
        target = memoryview(out)
        done = 0
        starts = [s[3] for s in self._spans]
        i = int(np.searchsorted(starts, offset, "right")) - 1
        try:
            while done < n_bytes:
                _, span, _, start = self._spans[i]
                n = min(n_bytes - done, start + span.n_bytes - (offset + done))
                if span.is_coded:
                    self._read_rows(words, i, offset + done - start, target[done : done + n])
                else:
                    self._read_verbatim(words, i, offset + done - start, target[done : done + n])
                done += n
                i += 1
        except LazyWeightsError as error:
            error.path = error.path or self.path
            raise
        return out

    def _read_verbatim(self, words: np.ndarray, i: int, at: int, target: memoryview) -> None:
        _, span, first, _ = self._spans[i]
        done = 0
        while done < len(target):
            unit = (at + done) // CHUNK_BYTES
            k = first + unit
            begin, size = int(self._offsets[k]), int(self._sizes[k])
            payload = memoryview(words.view(np.uint8)[begin : begin + size])
            chunk = np.empty(span.unit_bytes(unit), np.uint8)
            decode_verbatim(int(self._kinds[k]), payload, chunk, unit, begin)
            data = chunk.data
            if checksum(data) != int(self.layout.units["checksum"][k]):
                raise ChecksumError("a verbatim chunk is damaged", row_group=unit, offset=begin)
            skip = at + done - unit * CHUNK_BYTES
            n = min(len(target) - done, len(data) - skip)
            target[done : done + n] = data[skip : skip + n]
            done += n

    def _read_rows(self, words: np.ndarray, i: int, at: int, target: memoryview) -> None:
        """Decode the row groups that source bytes ``at .. at + len(target)`` of span i touch."""
        _, span, first, _ = self._spans[i]
        assert span.plan is not None
        per_outer = span.n_rows * span.row_bytes
        done = 0
        while done < len(target):
            outer, inside = divmod(at + done, per_outer)
            n = min(len(target) - done, per_outer - inside)
            first_row, last_row = inside // span.row_bytes, -(-(inside + n) // span.row_bytes)
            group = first_row // TILE_ROWS
            n_groups = -(-last_row // TILE_ROWS) - group
            unit = outer * span.groups_per_outer + group
            units = slice(first + unit, first + unit + n_groups)
            n_rows = min(span.n_rows, (group + n_groups) * TILE_ROWS) - group * TILE_ROWS
            skip = inside - group * TILE_ROWS * span.row_bytes
            whole = skip == 0 and n == n_rows * span.row_bytes
            flat = np.frombuffer(target[done : done + n], np.uint8) if whole else np.empty(n_rows * span.row_bytes, np.uint8)
            tables = self._table_set(span.plan.table_set)
            part = [Part(span, unit, n_groups, n_rows)]
            prepared = prepare_parts([part])[0]
            decode_parts(prepared, self._units.some(units), words, tables, flat)
            if not whole:
                target[done : done + n] = memoryview(flat)[skip : skip + n]
            done += n

