"""Where the Hessians of a report come from: nowhere, a file, or a text on which they are captured when first needed."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lazyweights.llama import passes
from lazyweights.reports.points import file_identity, point_key
from lazyweights.reports.tensor_facts import check_hessians


class Calibration:
    """Hessians for the quantizers and for the errors of weights.

    Parameters
    ----------
    source : str
    source_identity : dict
        Of `points.file_identity`.
    folder : str
        Where captured Hessians go.
    hessians : str or os.PathLike, optional
        A file with Hessians, or an imatrix.
    text : str or os.PathLike, optional
        A text to capture Hessians on.
    n_ctx, n_chunks : int
        Of the capture.
    threads : int
    stage : callable
        Told what is at work, done, of how much.

    Raises
    ------
    LazyWeightsError
        If a file cannot be read, or holds samples only.
    """

    def __init__(
        self, source: str, source_identity: dict[str, Any], folder: str, hessians: str | os.PathLike[str] | None,
        text: str | os.PathLike[str] | None, n_ctx: int, n_chunks: int, threads: int, stage: Callable[[str, int, int], None],
    ) -> None:  # fmt: skip
        self._source, self._n_ctx, self._n_chunks, self._threads, self._stage = source, n_ctx, n_chunks, threads, stage
        self._text = None if text is None else os.fspath(text)
        self._path = None if hessians is None else os.fspath(hessians)
        self._captured: str | None = None
        self._facts: dict[str, Any] | None = None
        if self._path is not None:
            info = check_hessians(self._path).info
            self._facts = {
                "text": info.text, "kind": info.kind, "n_ctx": info.n_ctx, "n_chunks": info.n_chunks, **file_identity(self._path)
            }
        elif self._text is not None:
            self._facts = {
                "text": os.path.basename(self._text), "kind": "hessian", "n_ctx": n_ctx,
                "n_chunks": n_chunks, **file_identity(self._text),
            }  # fmt: skip
            key = point_key({"source": source_identity, **self._facts})
            self._captured = os.path.join(folder, f"hessians-{key[:16]}.safetensors")

    def facts(self) -> dict[str, Any] | None:
        """What the Hessians come from, None where there are none."""
        return self._facts

    def path(self) -> str | None:
        """The file with the Hessians, captured now where that is still to be done; None where there are none."""
        if self._captured is None or os.path.exists(self._captured):
            return self._path or self._captured
        assert self._text is not None
        os.makedirs(os.path.dirname(self._captured), exist_ok=True)
        self._stage("capture Hessians", 0, 0)
        passes.capture(
            self._source, self._text, self._captured, n_ctx=self._n_ctx, n_chunks=self._n_chunks,
            threads=self._threads, force=True,
            progress=lambda progress: self._stage("capture Hessians, chunks", progress.n_done, progress.n_total),
        )  # fmt: skip
        return self._captured

    def drop(self) -> None:
        """Delete what was captured."""
        if self._captured is not None:
            with suppress(FileNotFoundError):
                os.unlink(self._captured)


