"""Measures one model after another: llama.cpp on a text, the coded size, and the facts of all tensors."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import xxhash

from lazyweights.container.atomic import coded_name
from lazyweights.container.encoder import encode_file
from lazyweights.container.inspect import inspect_file
from lazyweights.llama import library
from lazyweights.llama import perplexity as evaluator
from lazyweights.llama.chunks import read_text
from lazyweights.llama.divergence import Estimate
from lazyweights.llama.logits_file import LogitsFile
from lazyweights.llama.memory_file import is_coded_file
from lazyweights.reports.points import SOURCE, Point, point_key
from lazyweights.reports.tensor_facts import TensorExaminer

Notify = Callable[[str, int, int], None]
"""Told what is at work, and how much of it is done of how much (0 of 0: not known)."""

FORMAT_OF_BASE = "base-{key}.logits"


@dataclass(frozen=True)
class Evaluated:
    """The text and how it is evaluated: what all points of a report have in common."""

    text_path: str
    text: bytes
    n_ctx: int
    n_chunks: int | None

    @classmethod
    def read(cls, path: str | os.PathLike[str], n_ctx: int, n_chunks: int | None) -> Evaluated:
        """Read a text.

        Raises
        ------
        LazyWeightsError
            If it cannot be read.
        """
        return cls(os.fspath(path), read_text(path), n_ctx, n_chunks)

    def facts(self) -> dict[str, Any]:
        """What the numbers depend on."""
        return {
            "text": xxhash.xxh3_128_hexdigest(self.text), "n_ctx": self.n_ctx, "n_chunks": self.n_chunks,
            "llama_cpp": library.build_text(),
        }  # fmt: skip


class Judge:
    """Measures models of one source on one text.

    Parameters
    ----------
    source : str or os.PathLike
        A GGUF or a coded file.
    source_identity : dict
        Of `points.file_identity`.
    evaluated : Evaluated
    folder : str
        Where the base logits are kept.
    threads : int
        0: all cores.
    notify : callable
    """

    def __init__(
        self, source: str | os.PathLike[str], source_identity: dict[str, Any], evaluated: Evaluated, folder: str, threads: int,
        notify: Notify,
    ) -> None:  # fmt: skip
        self.source = os.fspath(source)
        self.evaluated = evaluated
        self.threads = threads
        self._folder = folder
        self._notify = notify
        self._facts = {"source": source_identity, **evaluated.facts()}
        key = point_key(self._facts)
        self.base_path = os.path.join(folder, FORMAT_OF_BASE.format(key=key[:16]))
        self._base_is_checked = False
        self._name = ""

    def facts(self) -> dict[str, Any]:
        """What every number depends on: source, text, context, chunks, llama.cpp."""
        return dict(self._facts)

    def source_perplexity(self) -> evaluator.PerplexityResult:
        """Evaluate the source, which writes the base logits."""
        os.makedirs(self._folder, exist_ok=True)
        result = evaluator.perplexity(
            self.source, self.evaluated.text, n_ctx=self.evaluated.n_ctx, n_chunks=self.evaluated.n_chunks, threads=self.threads,
            base_file=self.base_path, force=True, **self._callbacks("evaluate"),
        )  # fmt: skip
        self._base_is_checked = True
        return result

    def ensure_base(self) -> None:
        """Evaluate the source once more where its logits are gone."""
        if self._base_is_checked:
            return
        try:
            with LogitsFile(self.base_path):
                self._base_is_checked = True
        except Exception:  # missing, or damaged: it is written anew
            self.source_perplexity()

    def drop_base(self) -> None:
        """Delete the base logits."""
        with suppress(FileNotFoundError):
            os.unlink(self.base_path)
        self._base_is_checked = False

    def measure(
        self, model: str, kind: str, name: str, key: str, options: dict[str, Any], examiner: TensorExaminer,
        seconds: dict[str, float],
    ) -> Point:  # fmt: skip
        """Code a model, evaluate it, look at its tensors.

        Parameters
        ----------
        model : str
            A GGUF (or, the source, a coded file). The coded file is written beside it, and is there afterwards.
        kind, name, key, options
            Of the point.
        examiner : TensorExaminer
        seconds : dict
            What was spent so far, by what.
        """
        self._name = name
        is_source = kind == SOURCE
        coded, n_weights, source_bytes = self._coded(model, seconds)
        kld: Estimate | None = None
        same_top: Estimate | None = None
        quantiles: dict[str, float] = {}
        if is_source:
            measured = self.source_perplexity()
            ppl, ratio, seconds["evaluate"] = measured.ppl, Estimate(1.0, 0.0), measured.seconds
            options = {**options, "evaluation": _evaluation_facts(measured.evaluation)}
        else:
            self.ensure_base()
            result = evaluator.kl_divergence(model, self.base_path, threads=self.threads, **self._callbacks("compare"))
            found = result.statistics
            seconds["evaluate"] = result.seconds
            ppl, ratio, kld, same_top, quantiles = found.ppl, found.ratio, found.kld, found.same_top_p, found.kld_quantiles
        self._stage("look at tensors", 0, 0)
        tensors = examiner.examine(coded, with_errors=not is_source)
        return Point(
            kind, name, key, options, source_bytes, os.path.getsize(coded), n_weights, ppl, ratio, kld, same_top, quantiles,
            tensors, seconds,
        )  # fmt: skip

    def _coded(self, model: str, seconds: dict[str, float]) -> tuple[str, int, int]:
        """Return the coded file of a model, its weights, and the bytes of its GGUF."""
        if is_coded_file(model):
            report = inspect_file(model)
            return model, report.n_weights, report.source_bytes
        output = os.path.join(self._folder, "models", os.path.basename(coded_name(model)))
        os.makedirs(os.path.dirname(output), exist_ok=True)
        started = time.monotonic()
        result = encode_file(
            model, output, threads=self.threads, force=True,
            progress=lambda progress: self._stage(progress.stage, progress.n_bytes, progress.total_bytes),
        )  # fmt: skip
        seconds["encode"] = time.monotonic() - started
        return output, result.n_weights, result.source_bytes

    def _stage(self, what: str, done: int, total: int) -> None:
        self._notify(f"{self._name}: {what}", done, total)

    def _callbacks(self, stage: str) -> dict[str, Any]:
        total = 0

        def started(evaluation: evaluator.Evaluation) -> None:
            nonlocal total
            total = evaluation.n_chunks
            self._stage(f"{stage}, chunks", 0, total)

        return {"started": started, "chunk_done": lambda done, _: self._stage(f"{stage}, chunks", done, total)}


def _evaluation_facts(evaluation: evaluator.Evaluation) -> dict[str, Any]:
    """What a report says of the evaluation."""
    names = ("description", "n_tokens", "n_chunks", "n_ctx", "n_scored", "n_vocab", "adds_bos", "n_ctx_train", "build")
    return {name: getattr(evaluation, name) for name in names}
