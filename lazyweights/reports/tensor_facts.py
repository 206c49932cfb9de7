"""What is said of each tensor of a quantized model: bytes, entropy, which codes occur how often, and the error of its weights.

The error is the squared change of the outputs of a weight on the inputs that were captured, relative to the squares of these
outputs: with E the difference from the source W and H the Hessian of the inputs, ``tr(E H E^T) / tr(W H W^T)``. Where only the
diagonal of H is known that takes its place; where nothing is, it is the plain ``|E|^2 / |W|^2``.
"""

from __future__ import annotations

import math
import mmap
import os
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from lazyweights.blocks import planes
from lazyweights.blocks.types import GGML_TYPES
from lazyweights.container.gguf_scan import scan_gguf
from lazyweights.container.inspect import TensorReport, inspect_file
from lazyweights.container.reader import CodedFile
from lazyweights.errors import BlockLayoutError, LazyWeightsError
from lazyweights.llama.hessians import Hessians
from lazyweights.llama.memory_file import is_coded_file

RUN_WEIGHTS = 1 << 23
"""Weights that are looked at together."""

MAX_CODES = 256
"""Codes of more values than this have no histogram."""

SIGNED_CODES = ("Q8_0",)
"""Types whose codes are stored as two's complement."""

HESSIAN, DIAGONAL, PLAIN = "hessian", "diagonal", "plain"


@dataclass(frozen=True)
class TensorFacts:
    """One tensor of a quantized model.

    Attributes
    ----------
    name, type : str
    n_weights : int
    packed_bytes, coded_bytes : int
        In the GGUF and in the coded file.
    entropy_bits : float or None
        Order-0 entropy of the codes, bits per weight; of trellis codes, of their indices; of floats, of exponent and raw bits
        together. None where there are none.
    first_code : int
        What the first count stands for.
    counts : list of int
        How often each code occurs, from the first to the last that does; empty where the type has no codes of up to 256 values.
    error : float or None
        Relative, see the module; None where it is not known.
    error_kind : str
        HESSIAN, DIAGONAL or PLAIN: by what the error is weighted.
    """

    name: str
    type: str
    n_weights: int
    packed_bytes: int
    coded_bytes: int
    entropy_bits: float | None
    first_code: int
    counts: list[int]
    error: float | None
    error_kind: str


class Weights:
    """The weights of a GGUF or a coded file, some rows at a time. A context manager.

    Parameters
    ----------
    path : str or os.PathLike
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._coded: CodedFile | None = None
        self._map: mmap.mmap | None = None
        if is_coded_file(path):
            self._coded = CodedFile(path)
            entries: list[Any] = list(self._coded.tensors())
        else:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            scan = scan_gguf(self._map)
            entries = [scan.tensors[span.tensor] for span in scan.spans if span.tensor is not None]
        self._entries = {entry.name: entry for entry in entries}

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._coded is not None:
            self._coded.close()
        if self._map is not None:
            self._map.close()

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, int, int]:
        """Return (outer, rows, columns)."""
        columns, rows, *outer = (*self._entries[name].shape, 1, 1)[: max(2, len(self._entries[name].shape))]
        return math.prod(outer), rows, columns

    def type_id(self, name: str) -> int:
        """Return the GGML type."""
        return int(self._entries[name].type_id)

    def packed(self, name: str, outer: int, start: int, stop: int) -> np.ndarray:
        """Return packed rows of one outer index, uint8 (rows, row bytes), a copy."""
        if self._coded is not None:
            return self._coded.get_rows(name, start, stop, outer)
        assert self._map is not None
        entry = self._entries[name]
        n_outer, rows, _ = self.shape(name)
        row_bytes = entry.n_bytes // (n_outer * rows)
        offset = entry.offset + (outer * rows + start) * row_bytes
        return np.frombuffer(self._map[offset : offset + (stop - start) * row_bytes], np.uint8).reshape(-1, row_bytes)

    def floats(self, name: str, packed: np.ndarray) -> np.ndarray:
        """Return the values of packed rows, float32; needs the gguf package (ImportError, NotImplementedError)."""
        import gguf

        kind = gguf.GGMLQuantizationType(self.type_id(name))
        return np.asarray(gguf.quants.dequantize(packed, kind), np.float32)


class TensorExaminer:
    """Finds the facts of the tensors of quantized models of one source. A context manager.

    Parameters
    ----------
    source : str or os.PathLike
        The model before it was quantized, a GGUF or a coded file.
    hessians : Hessians, optional
        Full or diagonal.
    """

    def __init__(self, source: str | os.PathLike[str], hessians: Hessians | None) -> None:
        self._source = Weights(source)
        self._hessians = hessians
        self._energies: dict[str, float] = {}

    def __enter__(self) -> TensorExaminer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._source.__exit__(kind, error, trace)

    def examine(self, coded_path: str | os.PathLike[str], *, with_errors: bool = True) -> tuple[TensorFacts, ...]:
        """Return the facts of all tensors of a coded file, in the order of the file.

        Parameters
        ----------
        coded_path : str or os.PathLike
        with_errors : bool
            Compare the weights with those of the source.
        """
        reports = inspect_file(coded_path).tensors
        with Weights(coded_path) as weights:
            return tuple(self._facts(weights, report, with_errors) for report in reports)

    def _facts(self, weights: Weights, report: TensorReport, with_errors: bool) -> TensorFacts:
        name = report.name
        comparison = None
        if with_errors and name in self._source and self._source.shape(name) == weights.shape(name):
            comparison = _Comparison(self._hessians, name, self._source.shape(name), name not in self._energies)
        counts = np.zeros(MAX_CODES, np.int64)
        n_outer, rows, columns = weights.shape(name)
        step = max(1, RUN_WEIGHTS // max(columns, 1))
        has_codes = _code_bits(weights.type_id(name)) is not None
        for outer in range(n_outer):
            for start in range(0, rows, step):
                stop = min(start + step, rows)
                packed = weights.packed(name, outer, start, stop)
                if has_codes:
                    codes = planes.split(weights.type_id(name), packed, (columns, stop - start)).planes["codes"]
                    counts += np.bincount(codes.reshape(-1), minlength=MAX_CODES)
                if comparison is not None:
                    before = self._source.packed(name, outer, start, stop)
                    try:
                        comparison.add(outer, self._source.floats(name, before), weights.floats(name, packed))
                    except (ImportError, NotImplementedError, ValueError):
                        comparison = None
        error = None
        if comparison is not None:
            self._energies.setdefault(name, comparison.energy)
            error = comparison.error(self._energies[name])
        first, used = _trim(counts, weights.type_id(name)) if has_codes else (0, [])
        # Trellis codes are coded by their indices: half of what their own entropy counts is known.
        entropy = count_entropy(np.array(used)) if used and not report.is_trellis else report.entropy_bits
        return TensorFacts(
            name, report.type_name, report.n_weights, report.source_bytes, report.coded_bytes or 0, entropy, first, used,
            error, PLAIN if comparison is None else comparison.kind,
        )  # fmt: skip


class _Comparison:
    """Sums of one tensor: of its error, and of its own outputs where they are not known yet."""

    def __init__(self, hessians: Hessians | None, name: str, shape: tuple[int, int, int], needs_energy: bool) -> None:
        self._values: np.ndarray | None = None
        self.kind = PLAIN
        if hessians is not None and name in hessians and np.shape(hessians[name])[-1] == shape[2]:
            self.kind = HESSIAN if hessians.info.kind == "hessian" else DIAGONAL
            self._values = hessians[name]
            if self._values.ndim == (2 if self.kind == HESSIAN else 1):
                self._values = self._values[None]
        self._n_outer = shape[0]
        self._needs_energy = needs_energy
        self._cached: tuple[int, np.ndarray] | None = None
        self.energy = 0.0
        self._loss = 0.0

    def add(self, outer: int, before: np.ndarray, after: np.ndarray) -> None:
        """Take in rows of one outer index."""
        matrix = self._matrix(outer)
        self._loss += self._weighted(after - before, matrix)
        if self._needs_energy:
            self.energy += self._weighted(before, matrix)

    def error(self, energy: float) -> float | None:
        """Return the relative error, None where it is not defined."""
        error = self._loss / energy if energy > 0 else math.nan
        return max(error, 0.0) if math.isfinite(error) else None

    def _matrix(self, outer: int) -> np.ndarray | None:
        if self._values is None:
            return None
        number = outer * len(self._values) // self._n_outer
        if self._cached is None or self._cached[0] != number:
            self._cached = (number, np.asarray(self._values[number], np.float32))
        return self._cached[1]

    def _weighted(self, rows: np.ndarray, matrix: np.ndarray | None) -> float:
        wide = rows if matrix is None else rows @ matrix if self.kind == HESSIAN else rows * matrix
        # Sums of rows in float32, of all rows in float64: a row has a few thousand elements, a tensor millions.
        return float(np.einsum("ij,ij->i", wide, rows).astype(np.float64).sum())


def _code_bits(type_id: int) -> int | None:
    """Bits of the codes of a type; None where there are no codes of up to 256 values."""
    if type_id not in GGML_TYPES:
        return None
    try:
        found = next((spec.bits for spec in planes.plane_specs(type_id) if spec.name == "codes"), None)
    except BlockLayoutError:
        return None
    return found if found is not None and 1 << found <= MAX_CODES else None


def _trim(counts: np.ndarray, type_id: int) -> tuple[int, list[int]]:
    """Return the first code that occurs, and the counts from it to the last one."""
    low = 0
    if GGML_TYPES[type_id].name in SIGNED_CODES:
        counts, low = np.roll(counts, MAX_CODES // 2), -MAX_CODES // 2
    used = np.flatnonzero(counts)
    if not used.size:
        return 0, []
    return low + int(used[0]), [int(n) for n in counts[used[0] : used[-1] + 1]]


def count_entropy(counts: np.ndarray) -> float:
    """Return the order-0 entropy of counted codes, bits each.

    >>> count_entropy(np.array([1, 1, 2]))
    1.5
    """
    used = counts[counts > 0].astype(np.float64)
    total = float(used.sum())
    return float((used * np.log2(total / used)).sum() / total) if total else 0.0


def check_hessians(path: str | os.PathLike[str]) -> Hessians:
    """Open Hessians or an imatrix file, for errors and for llama.cpp's quantizer.

    Raises
    ------
    LazyWeightsError
        If it holds samples only.
    FormatError
        If it is neither, or damaged.
    """
    found = Hessians.load(path)
    if found.info.kind == "samples":
        raise LazyWeightsError("samples say too little: capture Hessians or the diagonal", path=os.fspath(path))
    return found
