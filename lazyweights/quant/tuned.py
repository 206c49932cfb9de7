"""The tuned quantizer: steps that are shared, GPTQ that makes up for them, an ordinary GGUF that codes well.

`TunedQuantizer` is prepared once for a model and what is known of its inputs; `quantize` writes a model for one global step.
The work goes by slabs of rows, on all cores, each with one thread of BLAS; the bytes do not depend on the number of threads.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from lazyweights.codecs import TILE_ROWS
from lazyweights.container.jobs import ordered_map, thread_count
from lazyweights.errors import QuantizationError
from lazyweights.llama.memory_file import model_path
from lazyweights.quant.containers import CONTAINERS, Container, find_container, pack, split_steps
from lazyweights.quant.curvature import EMBEDDING, OUTPUT
from lazyweights.quant.factors import Factor, factorize, large_first, spread_within_blocks
from lazyweights.quant.float_source import FLOATS, FloatSource
from lazyweights.quant.gguf_rewrite import NewTensor, open_gguf, write_gguf
from lazyweights.quant.gptq import quantize_rows
from lazyweights.quant.journal import Journal
from lazyweights.quant.knowledge import Knowledge
from lazyweights.quant.steps import StepPattern, curved_pattern, even_pattern, relative_pattern, widening_cost
from lazyweights.quant.trellis_rounding import FINE_STEP, TRELLIS_GAIN

SLAB_ROWS = 4096
"""Rows that are quantized together: whole row groups, in which trellises begin anew."""

TARGET_DIVERGENCE = 0.02
"""Divergence per token that a step of 1 is predicted to cost."""

DEFAULT_WIDENED = 0.002
"""Share of sub-blocks that may need a wider step in a container that is chosen."""

METHOD_VERSION = 3
"""Changes when the same step and settings give other bytes: what was finished or measured before is not used then."""

MAX_FALLBACKS = 0.1
"""Share of the weights whose Hessian may be unusable before a run fails."""

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class TunedSettings:
    """What decides how a model is quantized, besides the step.

    Attributes
    ----------
    container : str
        "auto", or a name of `CONTAINERS` for all tensors (32-wide ones take its place where rows are not whole blocks).
    damp_frac : float
        See `factorize`.
    rate_weight : float
        Cost of a bit in squared steps, see `quantize_rows`.
    use_gptq, use_order, use_trellis, use_widening, use_column_steps, use_row_steps, use_sensitivity, quantize_embedding : bool
        Parts of the method, to see what each brings. Without `use_sensitivity` steps go by kind of tensor.
    """

    container: str = "auto"
    damp_frac: float = 0.15
    rate_weight: float = 0.0
    use_gptq: bool = True
    use_order: bool = True
    use_trellis: bool = True
    use_widening: bool = True
    use_column_steps: bool = True
    use_row_steps: bool = True
    use_sensitivity: bool = True
    quantize_embedding: bool = True


@dataclass(frozen=True)
class TunedResult:
    """What was written.

    Attributes
    ----------
    settings : dict
        Of the run, the step among them.
    seconds : float
    output_bytes, n_weights : int
    predicted_kld : float
        Sum of the predicted divergences; 0 if unknown.
    tensors : list of dict
        ``name, type, n_weights, entropy_bits`` (order 0, per weight), ``error`` (predicted divergence), ``widened`` (share of
        sub-blocks), ``damp_frac, n_dead, fallback`` (None, or what replaced the Hessian), ``fallback_share`` (of the experts),
        ``n_dropped`` (tokens left out in calibration, not being finite).
    n_reused : int
        Tensors that an interrupted run had finished.
    """

    settings: dict[str, Any]
    seconds: float
    output_bytes: int
    n_weights: int
    predicted_kld: float
    tensors: list[dict[str, Any]] = field(repr=False)
    n_reused: int = 0


@dataclass(frozen=True)
class _Prepared:
    """A matrix ready to be quantized: a tensor, or one expert of it."""

    name: str
    first_row: int
    shape: tuple[int, int]
    container: Container
    order: np.ndarray
    factor: Factor
    scales: np.ndarray
    sub_scales: np.ndarray
    pattern: StepPattern
    fallback: str | None
    on_trellis: bool


@dataclass(frozen=True)
class _Slab:
    packed: np.ndarray
    counts: np.ndarray
    error: float
    n_widened: int


class TunedQuantizer:
    """Quantizes one model. A context manager.

    Parameters
    ----------
    source : str or os.PathLike
        A GGUF of floats, or its coded file.
    hessians : str or os.PathLike
        A curvature file (`measure_curvature`), or Hessians (`lazyweights.llama.capture`), which know no gradients.
    threads : int
        0: all cores.
    allow_requantize : bool
        Take tensors that are quantized already.
    settings
        See `TunedSettings`.

    Attributes
    ----------
    names : list of str
        The tensors that are quantized.
    left_out : list of str
        Matrices that stay as they are because nothing is known of their inputs.

    Raises
    ------
    FormatError
        If a file is damaged or not of its kind.
    QuantizationError
        If the source is quantized, or nothing in it can be.
    """

    def __init__(
        self, source: str | os.PathLike[str], hessians: str | os.PathLike[str], *, threads: int = 0,
        allow_requantize: bool = False, **settings: Any,
    ) -> None:  # fmt: skip
        self.settings = TunedSettings(**settings)
        if self.settings.container != "auto":
            find_container(self.settings.container)
        self._threads = thread_count(threads)
        self._known = Knowledge(hessians)
        self._files = [_file_identity(source), _file_identity(hessians)]
        self._stack = ExitStack()
        try:
            self._path = self._stack.enter_context(model_path(source, threads=threads)).path
            self._view, self._scan = self._stack.enter_context(open_gguf(self._path))
            self._source = FloatSource(self._view, self._scan, allow_requantize)
            self.left_out: list[str] = []
            self.names = self._choose()
        except BaseException:
            self._stack.close()
            raise
        self.n_weights = sum(rows * columns for rows, columns in map(self._source.shape, self.names))

    def __enter__(self) -> TunedQuantizer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the source."""
        self._stack.close()

    def quantize(
        self, output: str | os.PathLike[str], step: float, *, progress: Progress | None = None, force: bool = False,
        parts: str | os.PathLike[str] | None = None,
    ) -> TunedResult:  # fmt: skip
        """Write the model, quantized with a global step.

        Parameters
        ----------
        output : str or os.PathLike
            The GGUF to write, whole or not at all.
        step : float
            Above 0. Twice the step costs about four times the divergence and saves about one bit a weight.
        progress : callable, optional
            Told tensors done, tensors in all, and the tensor at work.
        force : bool
            Replace an output that exists.
        parts : str or os.PathLike, optional
            Folder for finished tensors, from which a run that was interrupted goes on. Removed at the end.

        Returns
        -------
        TunedResult

        Raises
        ------
        QuantizationError
            If the step is no number above 0, or too many Hessians cannot be used.
        """
        if not 0 < step < float("inf"):
            raise QuantizationError(f"a step of {step}: it has to be above 0")
        started = time.monotonic()
        journal = None if parts is None else Journal(Path(parts), self._identity(step))
        reports: list[dict[str, Any]] = []
        tensors = self._tensors(step, journal, reports)
        made = {name: functools.partial(next, tensors) for name in self.names}
        with threadpool_limits(1):
            try:
                result = write_gguf(self._path, output, made, force=force, progress=progress)
            finally:
                tensors.close()
        if journal is not None:
            journal.remove()
        return TunedResult(
            {"step": step, **asdict(self.settings)}, time.monotonic() - started, result.output_bytes, result.n_weights,
            sum(report["error"] for report in reports), reports, 0 if journal is None else journal.n_reused,
        )  # fmt: skip

    def _choose(self) -> list[str]:
        """Return the names of the tensors to quantize, in the order of the file."""
        names = []
        self._known.is_tied = OUTPUT not in self._source.tensors
        for info in self._scan.tensors:
            if len(info.shape) not in (2, 3) or not info.name.endswith(".weight") or info.shape[0] % 32 or "norm" in info.name:
                continue
            if info.name in (EMBEDDING, OUTPUT) and not self.settings.quantize_embedding:
                continue
            if info.type_id not in FLOATS:
                self._source.rows(info.name, 0, 1)  # says what to do if it may not be
            if "ffn_gate_inp" in info.name:  # it sends tokens to experts; llama.cpp's own quantizer leaves it too
                continue
            if info.name in self._known or info.name == EMBEDDING:
                names.append(info.name)
            else:
                self.left_out.append(info.name)
        if not any(name in self._known for name in names):
            raise QuantizationError("the Hessians are of none of this model's matrices: were they captured from another model?")
        return names

    def _identity(self, step: float) -> str:
        """Return what tells runs apart that may not share finished tensors."""
        return json.dumps([METHOD_VERSION, *self._files, repr(step), asdict(self.settings)], sort_keys=True)

    def _tensors(self, step: float, journal: Journal | None, reports: list[dict[str, Any]]) -> Generator[NewTensor, None, None]:
        """Yield the new tensors in the order of `names`; slabs are computed ahead, on all cores."""
        prepared = {
            (name, matrix): _Once(functools.partial(self._prepare, name, matrix, step), self._n_slabs(name))
            for name in self.names
            for matrix in range(self._n_matrices(name))
        }
        stored = {name: journal is not None and journal.has(name) for name in self.names}

        def slabs_of(name: str) -> Iterator[tuple[str, int, int]]:
            rows = self._source.shape(name)[0] // self._n_matrices(name)
            return ((name, matrix, start) for matrix in range(self._n_matrices(name)) for start in range(0, rows, SLAB_ROWS))

        def slabs() -> Iterator[tuple[str, int, int]]:
            return (slab for name in self.names if not stored[name] for slab in slabs_of(name))

        def work(item: tuple[str, int, int]) -> _Slab:
            with prepared[item[:2]] as tensor:
                return self._quantize_slab(tensor, item[2])

        with closing(ordered_map(work, slabs(), self._threads)) as results:
            for name in self.names:
                if stored[name] and journal is not None:
                    report, packed = journal.load(name)
                else:
                    found = [next(results) for _ in slabs_of(name)]
                    matrices = [prepared[name, matrix].facts for matrix in range(self._n_matrices(name))]
                    report = {**_describe(name, matrices, found), "n_dropped": self._known.n_dropped(name)}
                    packed = np.concatenate([slab.packed for slab in found])
                    if journal is not None:
                        journal.store(name, report, packed)
                reports.append(report)
                if name == self.names[-1]:
                    _check_fallbacks(reports)  # before the file gets its name
                yield CONTAINERS[report["type"]].type_id, self._source.tensors[name].shape, [packed]

    def _n_matrices(self, name: str) -> int:
        """Return how many matrices a tensor is: its experts, or 1."""
        shape = self._source.tensors[name].shape
        return shape[2] if len(shape) == 3 else 1

    def _n_slabs(self, name: str) -> int:
        """Return the slabs of each matrix of a tensor."""
        return -(-(self._source.shape(name)[0] // self._n_matrices(name)) // SLAB_ROWS)

    def _prepare(self, name: str, matrix: int, step: float) -> _Prepared:
        settings = self.settings
        all_rows, columns = self._source.shape(name)
        rows = all_rows // self._n_matrices(name)
        hessian, row_weights, coherence, fallback = self._known.of(name, matrix, (rows, columns))
        order, factor = self._ordered(hessian)
        if factor.is_diagonal and factor.n_dead < columns and fallback is None:
            fallback = "diagonal"
        is_embedding = name in (EMBEDDING, OUTPUT)
        weights = self._source.rows(name, matrix * rows, (matrix + 1) * rows)
        if not np.isfinite(weights).all():
            raise QuantizationError("the model has weights that are NaN or infinite here", tensor=name)
        weights = weights[:, order]
        curved = None if row_weights is None else curved_pattern(factor, row_weights, coherence, is_embedding)
        if curved is not None and settings.use_sensitivity:
            pattern = curved
        else:
            root = float(np.sqrt(np.mean(np.square(weights, dtype=np.float64))))
            pattern = relative_pattern(factor, name.split(".")[-2], root, rows)
            if curved is not None:
                pattern = StepPattern(pattern.columns, curved.row_factors, curved.row_costs)
        pattern = even_pattern(pattern, not settings.use_column_steps, not settings.use_row_steps)
        scale = self._unit(row_weights is not None and settings.use_sensitivity) * step
        asked = self._asked(columns)
        on_trellis = self._is_on_trellis(asked or CONTAINERS["Q8_0"], weights, pattern, scale, self._n_matrices(name))
        if on_trellis:
            scale *= FINE_STEP
        container = asked or _narrowest(weights, pattern, scale, self._n_matrices(name) > 1, on_trellis)
        if not settings.use_gptq:
            factor = Factor(
                np.diag(factor.diagonal).astype(np.float32), factor.diagonal, factor.damp_frac, factor.n_dead, factor.is_diagonal
            )
        scales, sub_scales = split_steps(container, pattern.sub_block_steps(scale, container.sub_columns))
        return _Prepared(
            name, matrix * rows, (rows, columns), container, order, factor, scales, sub_scales, pattern, fallback, on_trellis
        )

    def _ordered(self, hessian: np.ndarray) -> tuple[np.ndarray, Factor]:
        """Return the order in which columns are rounded, int64 (columns,), and the factor of the Hessian in that order.

        Of the order of the file and large inputs first, it is the one in which columns that share a step are more alike.
        """
        factor = factorize(hessian, self.settings.damp_frac)
        order = np.arange(len(hessian))
        if not self.settings.use_order or factor.is_diagonal:
            return order, factor
        asked = self._asked(len(hessian))
        block, sub = (32, 32) if asked is None else (asked.block_columns, asked.sub_columns)
        other = large_first(np.diagonal(hessian), block, sub)
        reordered = factorize(hessian[np.ix_(other, other)], self.settings.damp_frac)
        if spread_within_blocks(reordered.diagonal, sub) < spread_within_blocks(factor.diagonal, sub):
            return other, reordered
        return order, factor

    def _asked(self, columns: int) -> Container | None:
        """Return the container that was asked for, or what takes its place where rows are not whole blocks; None: none was."""
        if self.settings.container == "auto":
            return None
        asked = find_container(self.settings.container)
        if columns % asked.block_columns == 0:
            return asked
        fitting = [c for c in CONTAINERS.values() if c.block_columns == 32 and c.bits >= asked.bits and not c.has_min]
        return min(fitting, key=lambda c: c.bits)

    def _is_on_trellis(
        self, container: Container, weights: np.ndarray, pattern: StepPattern, scale: float, n_matrices: int
    ) -> bool:
        """Return whether a matrix is rounded down a trellis, given the widest container that it may get.

        Paths are as long as row groups, so experts must be whole ones. And the trellis has to bring more than is lost to steps
        that are wider because its finer grid reaches less far.
        """
        if not (self.settings.use_trellis and container.may_trellis and (n_matrices == 1 or len(weights) % TILE_ROWS == 0)):
            return False
        needed = _needed_codes(weights, pattern, scale, container.sub_columns) / container.highest
        return widening_cost(needed / FINE_STEP) < widening_cost(needed) + TRELLIS_GAIN

    def _unit(self, is_curved: bool) -> float:
        """Return what a global step of 1 is: see `steps`."""
        return float(np.sqrt(24 * TARGET_DIVERGENCE / self.n_weights)) if is_curved else 0.5

    def _quantize_slab(self, tensor: _Prepared, start: int) -> _Slab:
        rows = slice(start, min(start + SLAB_ROWS, tensor.shape[0]))
        weights = self._source.rows(tensor.name, tensor.first_row + rows.start, tensor.first_row + rows.stop)
        found = quantize_rows(
            weights[:, tensor.order], tensor.factor, tensor.container, tensor.scales, tensor.sub_scales,
            tensor.pattern.row_factors[rows], rate_weight=self.settings.rate_weight, widen=self.settings.use_widening,
            on_trellis=tensor.on_trellis, row_costs=tensor.pattern.row_costs[rows],
        )  # fmt: skip
        container, back = tensor.container, np.argsort(tensor.order)
        packed = pack(
            container, found.codes.shape, found.codes[:, back],
            found.scales[:, back[:: container.block_columns] // container.block_columns],
            found.sub_scales[:, back[:: container.sub_columns] // container.sub_columns],
        )  # fmt: skip
        return _Slab(packed, found.counts, float(found.loss @ tensor.pattern.row_costs[rows]), found.n_widened)


def _needed_codes(weights: np.ndarray, pattern: StepPattern, scale: float, sub_columns: int) -> np.ndarray:
    """Return how many steps the largest weight of each sub-block is away from 0, float64 (rows, sub-blocks)."""
    sub_blocks = weights.reshape(len(weights), -1, sub_columns)
    largest = np.maximum(sub_blocks.max(axis=2), -sub_blocks.min(axis=2))
    return largest / (pattern.sub_block_steps(scale, sub_columns) * pattern.row_factors[:, None])


def _narrowest(weights: np.ndarray, pattern: StepPattern, scale: float, is_expert: bool, on_trellis: bool) -> Container:
    """Return the narrowest container in which few sub-blocks are widened.

    The experts of a tensor need one container for all of them, which is the widest.
    """
    widest = CONTAINERS["Q8_0"]
    if is_expert:
        return widest
    needed = _needed_codes(weights, pattern, scale, 32)
    choices = [c for c in CONTAINERS.values() if c.block_columns == 32 and not c.has_min and c.may_trellis >= on_trellis]
    fitting = [c for c in choices if np.mean(needed > c.highest) <= DEFAULT_WIDENED]
    return min(fitting, key=lambda c: c.bits, default=widest)


def _facts(matrix: _Prepared) -> dict[str, Any]:
    factor = matrix.factor
    return {
        "container": matrix.container, "damp_frac": factor.damp_frac, "n_dead": factor.n_dead, "fallback": matrix.fallback
    }


def _describe(name: str, matrices: list[dict[str, Any]], slabs: list[_Slab]) -> dict[str, Any]:
    container = matrices[0]["container"]
    replaced = [matrix["fallback"] for matrix in matrices if matrix["fallback"] is not None]
    counts = sum((slab.counts for slab in slabs), np.zeros(256, np.int64))
    n = int(counts.sum())
    seen = counts[counts > 0]
    entropy = float((seen * np.log2(n / seen)).sum()) / n
    n_sub_blocks = n // container.sub_columns
    return {
        "name": name, "type": container.name, "n_weights": n, "entropy_bits": entropy,
        "error": sum(slab.error for slab in slabs), "widened": sum(slab.n_widened for slab in slabs) / n_sub_blocks,
        "damp_frac": max(matrix["damp_frac"] for matrix in matrices), "n_dead": sum(matrix["n_dead"] for matrix in matrices),
        "fallback": replaced[0] if replaced else None, "fallback_share": len(replaced) / len(matrices),
    }  # fmt: skip


def _check_fallbacks(reports: list[dict[str, Any]]) -> None:
    lost = [report["name"] for report in reports if report["fallback"] is not None]
    n_lost = sum(report["n_weights"] * report["fallback_share"] for report in reports)
    share = n_lost / sum(report["n_weights"] for report in reports)
    if share > MAX_FALLBACKS:
        shown = ", ".join(lost[:5]) + (" ..." if len(lost) > 5 else "")
        raise QuantizationError(f"{share:.0%} of the weights have no usable Hessian ({shown}): use a longer calibration text")


def _file_identity(path: str | os.PathLike[str]) -> list[Any]:
    """Return what tells whether a file is still the one that was used."""
    found = os.stat(path)
    return [os.path.basename(os.fspath(path)), found.st_size, found.st_mtime_ns, found.st_ino]


class _Once:
    """A matrix that is prepared by whichever thread needs it first, and let go of when its last slab is done.

    As a context manager it gives the matrix to one slab.

    Attributes
    ----------
    facts : dict
        What is reported of it; there once it was prepared.
    """

    def __init__(self, make: Callable[[], _Prepared], n_slabs: int) -> None:
        self._make, self._n_left = make, n_slabs
        self._lock = threading.Lock()
        self._value: _Prepared | None = None
        self.facts: dict[str, Any] = {}

    def __enter__(self) -> _Prepared:
        with self._lock:
            if self._value is None:
                self._value = self._make()
                self.facts = _facts(self._value)
            return self._value

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._n_left -= 1
            if self._n_left <= 0:
                self._value = None
