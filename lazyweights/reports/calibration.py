"""What a report knows of the inputs of weights: from nowhere, from files, or from a text on which it is measured when needed.

There are two things to know. Hessians as llama.cpp sees them are for the errors of weights and, their diagonal, for the imatrix
of stock formats. Curvature, which weighs them by gradients, is for the tuned quantizer; where gradients of a model are not known,
or nothing else is given, the Hessians serve it too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from lazyweights.errors import QuantizationError
from lazyweights.llama import passes
from lazyweights.quant import curvature as curvatures
from lazyweights.reports.points import file_identity, point_key
from lazyweights.reports.tensor_facts import check_hessians


class Calibration:
    """Files with what is known of the inputs.

    Parameters
    ----------
    source : str
    source_identity : dict
        Of `points.file_identity`.
    folder : str
        Where measured files go.
    hessians : str or os.PathLike, optional
        A file with Hessians, or an imatrix.
    curvature : str or os.PathLike, optional
        A file with curvature.
    text : str or os.PathLike, optional
        A text to measure on what is not given.
    n_ctx, n_chunks : int
        Of measuring.
    threads : int
    stage : callable
        Told what is at work, done, of how much.

    Raises
    ------
    LazyWeightsError
        If a file cannot be read, or holds something else.
    """

    def __init__(
        self, source: str, source_identity: dict[str, Any], folder: str, hessians: str | os.PathLike[str] | None,
        curvature: str | os.PathLike[str] | None, text: str | os.PathLike[str] | None, n_ctx: int, n_chunks: int, threads: int,
        stage: Callable[[str, int, int], None],
    ) -> None:  # fmt: skip
        self._source, self._n_ctx, self._n_chunks, self._threads, self._stage = source, n_ctx, n_chunks, threads, stage
        self._text = None if text is None else os.fspath(text)
        self._path = None if hessians is None else os.fspath(hessians)
        self._curvature_path = None if curvature is None else os.fspath(curvature)
        self._facts: dict[str, Any] | None = None
        self._curvature_facts: dict[str, Any] | None = None
        self._measured: list[str] = []
        if self._path is not None:
            info = check_hessians(self._path).info
            self._facts = {
                "text": info.text, "kind": info.kind, "n_ctx": info.n_ctx, "n_chunks": info.n_chunks, **file_identity(self._path)
            }
        if self._curvature_path is not None:
            known = asdict(curvatures.Curvature(self._curvature_path).info)
            self._curvature_facts = {
                "text": known["text"], "kind": "curvature", "n_ctx": known["n_ctx"], "n_chunks": known["n_chunks"],
                **file_identity(self._curvature_path),
            }  # fmt: skip
        if self._text is not None:
            shared = {"text": os.path.basename(self._text), "n_ctx": n_ctx, "n_chunks": n_chunks, **file_identity(self._text)}

            def place(kind: str) -> tuple[dict[str, Any], str]:
                facts = {**shared, "kind": kind}
                key = point_key({"source": source_identity, **facts})
                self._measured.append(os.path.join(folder, f"{kind}-{key[:16]}.safetensors"))
                return facts, self._measured[-1]

            if self._path is None:
                self._facts, self._path = place("hessian")
            if self._curvature_path is None:
                self._curvature_facts, self._curvature_path = place("curvature")

    def facts(self) -> dict[str, Any] | None:
        """What the Hessians come from, None where there are none."""
        return self._facts

    def tuned_facts(self) -> dict[str, Any] | None:
        """What the tuned quantizer's knowledge comes from, None where there is none."""
        return self._curvature_facts or self._facts

    def path(self) -> str | None:
        """The file with the Hessians, measured now where that is still to be done; None where there are none."""
        path = self._path
        if path is None or path not in self._measured or os.path.exists(path):
            return path
        assert self._text is not None
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self._stage("capture Hessians", 0, 0)
        passes.capture(
            self._source, self._text, path, n_ctx=self._n_ctx, n_chunks=self._n_chunks, threads=self._threads, force=True,
            progress=lambda progress: self._stage("capture Hessians, chunks", progress.n_done, progress.n_total),
        )  # fmt: skip
        return path

    def tuned_path(self) -> str | None:
        """The file for the tuned quantizer, measured now where that is still to be done; None where there is none."""
        path = self._curvature_path
        if path is None:
            return self.path()
        if path not in self._measured or os.path.exists(path):
            return path
        assert self._text is not None
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self._stage("measure curvature", 0, 0)
        try:
            curvatures.measure_curvature(
                self._source, self._text, path, n_ctx=self._n_ctx, n_chunks=self._n_chunks, threads=self._threads, force=True,
                progress=lambda done, total, what: self._stage(f"measure curvature: {what}", done, total),
            )  # fmt: skip
        except QuantizationError:
            return self.path()  # gradients of this model are not known
        return path

    def drop(self) -> None:
        """Delete what was measured."""
        for path in self._measured:
            with suppress(FileNotFoundError):
                os.unlink(path)
