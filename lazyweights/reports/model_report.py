"""A whole report on a model: stock formats and tuned points measured, cached, compared and written.

What surprises:

- Nothing is done twice. Points are taken from the folder where they are there (`points.PointStore`); the base logits and
  captured Hessians are only made when a point is to be measured.
- Models are temporary: each is deleted once it is measured. So is what the folder holds for one run only, but an interrupted run
  leaves the base logits and the Hessians for the next one; all of these files are whole.
- A format that llama.cpp cannot make is left out, with the reason in the report; the others are measured all the same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

import lazyweights
from lazyweights.errors import BackendUnavailableError, LazyWeightsError
from lazyweights.llama.hessians import Hessians
from lazyweights.llama.perplexity import DEFAULT_CONTEXT
from lazyweights.llama.stock import file_type_name, stock_quantize
from lazyweights.quant.rate_control import Trial, largest_step_within_loss
from lazyweights.reports.calibration import Calibration
from lazyweights.reports.judge import Evaluated, Judge
from lazyweights.reports.points import SOURCE, STOCK, TUNED, Point, PointStore, file_identity, point_key
from lazyweights.reports.tensor_facts import TensorExaminer

DEFAULT_FORMATS = (
    "Q8_0", "Q6_K", "Q5_K_M", "Q5_1", "Q5_0", "Q5_K_S", "Q4_K_M", "Q4_K_S", "Q4_1", "IQ4_NL", "IQ4_XS", "Q4_0", "Q3_K_L",
    "Q3_K_M", "Q3_K_S", "Q2_K",
)  # fmt: skip
DEFAULT_BUDGETS = (1.0, 2.0, 5.0, 10.0)
CALIBRATION_CHUNKS = 64
MAX_TRIALS = 6
"""Steps that are measured for one budget at most."""


class Watcher(Protocol):
    """Told what happens, for progress and messages."""

    def stage(self, what: str, done: int, total: int) -> None:
        """Something is at work, `done` of `total` (0: not known)."""

    def point(self, point: Point, reused: bool) -> None:
        """A point is there."""

    def left_out(self, name: str, reason: str) -> None:
        """A format or the tuned quantizer could not be measured."""


class SilentWatcher:
    """Says nothing."""

    def stage(self, what: str, done: int, total: int) -> None:
        """Ignore it."""

    def point(self, point: Point, reused: bool) -> None:
        """Ignore it."""

    def left_out(self, name: str, reason: str) -> None:
        """Ignore it."""


@dataclass(frozen=True)
class ReportOptions:
    """What is measured, and how.

    Attributes
    ----------
    formats : tuple of str
        Stock formats, in any case.
    budgets : tuple of float
        Percent of perplexity over that of the source.
    n_ctx : int
    n_chunks : int or None
        Of the text; None: all that it fills.
    calibration_chunks : int
        Of the calibration text.
    threads : int
        0: all cores.
    tuned : bool
        Whether to search tuned points.
    tuned_settings : mapping
        Keyword arguments of the tuned quantizer, JSON values.
    keep : bool
        Keep the base logits and captured Hessians.
    keep_models : bool
        Keep the models and their coded files.
    """

    formats: tuple[str, ...] = DEFAULT_FORMATS
    budgets: tuple[float, ...] = DEFAULT_BUDGETS
    n_ctx: int = DEFAULT_CONTEXT
    n_chunks: int | None = None
    calibration_chunks: int = CALIBRATION_CHUNKS
    threads: int = 0
    tuned: bool = True
    tuned_settings: Mapping[str, Any] = field(default_factory=dict)
    keep: bool = False
    keep_models: bool = False


@dataclass(frozen=True)
class Measurements:
    """What a run measured or found measured.

    Attributes
    ----------
    points : list of Point
        The source, the stock formats in their order, tuned points from the largest coded file to the smallest.
    left_out : list of (str, str)
        Names and reasons.
    calibration, curvature : dict or None
        What the Hessians come from, and what the tuned quantizer knows.
    n_measured, n_reused : int
        Points.
    """

    points: list[Point]
    left_out: list[tuple[str, str]]
    calibration: dict[str, Any] | None
    curvature: dict[str, Any] | None
    n_measured: int
    n_reused: int


def measure_model(
    source: str | os.PathLike[str], text: str | os.PathLike[str], folder: str | os.PathLike[str], *,
    hessians: str | os.PathLike[str] | None = None, curvature: str | os.PathLike[str] | None = None,
    calibration: str | os.PathLike[str] | None = None, options: ReportOptions | None = None, watcher: Watcher | None = None,
) -> Measurements:  # fmt: skip
    """Measure the stock formats and tuned points of a model, or take them from the folder.

    Parameters
    ----------
    source : str or os.PathLike
        A GGUF of floats or its coded file.
    text : str or os.PathLike
        The text to evaluate.
    folder : str or os.PathLike
        For points and temporary files; created if it is not there.
    hessians : str or os.PathLike, optional
        Hessians or an imatrix file: for stock formats and errors of weights, and for tuned files where `curvature` is not given.
    curvature : str or os.PathLike, optional
        A curvature file, for tuned files.
    calibration : str or os.PathLike, optional
        A text on which to measure what is not given.
    options : ReportOptions, optional
    watcher : Watcher, optional

    Returns
    -------
    Measurements

    Raises
    ------
    BackendUnavailableError
        If llama.cpp is not installed.
    QuantizationError
        If there is no such format.
    LazyWeightsError
        If a file cannot be read or written, or the source cannot be evaluated.
    ValueError
        If `hessians` and `calibration` are both given, or a number is out of range.
    """
    if hessians is not None and calibration is not None:
        raise ValueError("Hessians and a text to capture them on: one of them is enough")
    options = options or ReportOptions()
    with _Run(source, text, folder, hessians, curvature, calibration, options, watcher or SilentWatcher()) as run:
        return run.all()


class _Run:
    """One run: what it shares between points, and what it has found so far."""

    def __init__(
        self, source: str | os.PathLike[str], text: str | os.PathLike[str], folder: str | os.PathLike[str],
        hessians: str | os.PathLike[str] | None, curvature: str | os.PathLike[str] | None,
        calibration: str | os.PathLike[str] | None, options: ReportOptions, watcher: Watcher,
    ) -> None:  # fmt: skip
        self.source = os.fspath(source)
        self.folder = os.fspath(folder)
        self.options = options
        self.watcher = watcher
        self.formats = list(dict.fromkeys(file_type_name(name) for name in options.formats))
        evaluated = Evaluated.read(text, options.n_ctx, options.n_chunks)
        identity = file_identity(source)
        self.judge = Judge(source, identity, evaluated, self.folder, options.threads, watcher.stage)
        self.store = PointStore(os.path.join(self.folder, "points"))
        self.calibration = Calibration(
            self.source, identity, self.folder, hessians, curvature, calibration, options.n_ctx, options.calibration_chunks,
            options.threads, watcher.stage,
        )  # fmt: skip
        self.left_out: list[tuple[str, str]] = []
        self.n_measured = self.n_reused = 0
        self._stack = ExitStack()
        self._examiner: TensorExaminer | None = None

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()
        with suppress(OSError):
            os.rmdir(os.path.join(self.folder, "models"))  # where it is empty

    def all(self) -> Measurements:
        """Measure everything, then drop what was for this run only."""
        source = self.source_point()
        stock = [point for name in self.formats if (point := self.stock_point(name)) is not None]
        tuned = self.tuned_points() if self.options.tuned else []
        self._stack.close()
        if not self.options.keep:
            self.judge.drop_base()
            self.calibration.drop()
        points = [source, *stock, *sorted(tuned, key=lambda point: (-point.coded_bytes, point.name))]
        return Measurements(
            points, self.left_out, self.calibration.facts(), self.calibration.tuned_facts(), self.n_measured, self.n_reused
        )

    def source_point(self) -> Point:
        """The model itself."""
        key = point_key({**self.judge.facts(), "kind": SOURCE, "version": lazyweights.__version__})
        found = self._reuse(key)
        if found is None:
            try:
                found = self.judge.measure(self.source, SOURCE, "source", key, {}, self._examine(), {})
            finally:
                self._drop(os.path.join(self.folder, "models", os.path.basename(self.source) + ".lw"))
            self._keep(found)
        return found

    def stock_point(self, name: str) -> Point | None:
        """One of llama.cpp's formats; None where llama.cpp cannot make it."""
        options: dict[str, Any] = {"format": name, "imatrix": self.calibration.facts()}
        key = self._key(STOCK, options)
        found = self._reuse(key)
        if found is not None:
            return found
        output = self._output(name, key)
        seconds: dict[str, float] = {}
        try:
            self.watcher.stage(f"{name}: quantize", 0, 0)
            if not os.path.exists(output):
                result = stock_quantize(
                    self.source, output, name, imatrix=self.calibration.path(), threads=self.options.threads, force=True,
                    progress=lambda done, total, _: self.watcher.stage(f"{name}: quantize", done, total),
                )  # fmt: skip
                seconds["quantize"] = result.seconds
            found = self.judge.measure(output, STOCK, name, key, options, self._examine(), seconds)
        except BackendUnavailableError:
            raise
        except LazyWeightsError as error:
            self._leave_out(name, error.message)
            return None
        finally:
            self._drop(output, output + ".lw")
        self._keep(found)
        return found

    def tuned_points(self) -> list[Point]:
        """The tuned points of all budgets, those of earlier runs included."""
        from lazyweights.quant.tuned import METHOD_VERSION, TunedQuantizer  # here, because it compiles kernels

        if self.calibration.tuned_facts() is None:
            self._leave_out("tuned", "it needs to know the inputs of weights: give a text to measure them on, or a file")
            return []
        facts = {"settings": dict(self.options.tuned_settings), "hessians": self.calibration.tuned_facts()}
        family = self._key(TUNED, {**facts, "method": METHOD_VERSION})
        points = {point.key: point for point in self.store.of_family(family)}
        self.n_reused += len(points)
        for point in points.values():
            self.watcher.point(point, reused=True)
        with _LazyQuantizer(TunedQuantizer, self) as quantizer:
            try:
                for budget in sorted(self.options.budgets):
                    self._search(budget, family, facts, points, quantizer)
            except BackendUnavailableError:
                raise
            except LazyWeightsError as error:
                self._leave_out("tuned", error.message)
        return list(points.values())

    def _search(
        self, budget: float, family: str, facts: dict[str, Any], points: dict[str, Point], quantizer: _LazyQuantizer
    ) -> None:
        """Measure steps until the largest one within a budget is known; add their points."""
        search_key = point_key({"family": family, "budget": budget, "max_trials": MAX_TRIALS})
        if self.store.search_ended(search_key):
            return

        def measure(step: float) -> float:
            point = self._tuned_point(float(f"{step:.4g}"), family, facts, points, quantizer)
            points[point.key] = point
            return point.increase

        known = [Trial(point.options["step"], point.increase) for point in sorted(points.values(), key=lambda p: p.key)]
        found = largest_step_within_loss(measure, budget / 100, known=known, max_trials=MAX_TRIALS)
        best = None if found.best is None else found.best.step
        self.store.end_search(search_key, {"family": family, "budget": budget, "step": best})

    def _tuned_point(
        self, step: float, family: str, facts: dict[str, Any], points: dict[str, Point], quantizer: _LazyQuantizer
    ) -> Point:
        key = point_key({"family": family, "step": step})
        found = points.get(key) or self._reuse(key)
        if found is not None:
            return found
        name = f"tuned {step:.4g}"
        output = self._output(name.replace(" ", "-"), key)
        try:
            self.watcher.stage(f"{name}: quantize", 0, 0)
            started = time.monotonic()
            with suppress(FileNotFoundError):
                os.unlink(output)  # of a run that was killed
            result = quantizer.quantize(output, step, lambda done, total: self.watcher.stage(f"{name}: quantize", done, total))
            seconds = {"quantize": time.monotonic() - started}
            options = {"step": step, "family": family, "settings": dict(result.settings), "hessians": facts["hessians"]}
            found = self.judge.measure(output, TUNED, name, key, options, self._examine(), seconds)
        finally:
            self._drop(output, output + ".lw")
        self._keep(found)
        return found

    def _key(self, kind: str, options: dict[str, Any]) -> str:
        return point_key({**self.judge.facts(), "kind": kind, "version": lazyweights.__version__, **options})

    def _output(self, name: str, key: str) -> str:
        folder = os.path.join(self.folder, "models")
        os.makedirs(folder, exist_ok=True)
        return os.path.join(folder, f"{name}.{key[:8]}.gguf")

    def _examine(self) -> TensorExaminer:
        if self._examiner is None:
            path = self.calibration.path()
            hessians = None if path is None else Hessians.load(path)
            self._examiner = self._stack.enter_context(TensorExaminer(self.source, hessians))
        return self._examiner

    def _reuse(self, key: str) -> Point | None:
        found = self.store.load(key)
        if found is not None:
            self.n_reused += 1
            self.watcher.point(found, reused=True)
        return found

    def _keep(self, point: Point) -> None:
        self.store.save(point)
        self.n_measured += 1
        self.watcher.point(point, reused=False)

    def _leave_out(self, name: str, reason: str) -> None:
        self.left_out.append((name, reason))
        self.watcher.left_out(name, reason)

    def _drop(self, *paths: str) -> None:
        if self.options.keep_models:
            return
        for path in paths:
            with suppress(FileNotFoundError):
                os.unlink(path)


class _LazyQuantizer:
    """The tuned quantizer, prepared when the first step is to be quantized. A context manager."""

    def __init__(self, factory: Any, run: _Run) -> None:
        self._factory = factory
        self._run = run
        self._quantizer: Any = None

    def __enter__(self) -> _LazyQuantizer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._quantizer is not None:
            self._quantizer.close()

    def quantize(self, output: str, step: float, progress: Callable[[int, int], None]) -> Any:
        """Write the model of a step; return the quantizer's result."""
        options = self._run.options
        if self._quantizer is None:
            self._run.watcher.stage("tuned: prepare", 0, 0)
            self._quantizer = self._factory(
                self._run.source, self._run.calibration.tuned_path(), threads=options.threads, **options.tuned_settings
            )
        return self._quantizer.quantize(output, step, progress=lambda done, total, _: progress(done, total))
