"""The file with what is known of a model's inputs: curvature where gradients are known, Hessians of llama.cpp elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from lazyweights.errors import QuantizationError
from lazyweights.llama.passes import capture
from lazyweights.quant.curvature import measure_curvature


@dataclass(frozen=True)
class Measured:
    """What was written.

    Attributes
    ----------
    kind : str
        "curvature" or "hessian".
    reason : str
        Why it is no curvature, "" if it is.
    """

    kind: str
    reason: str


def measure_inputs(
    model: str | os.PathLike[str], text: str | os.PathLike[str], output: str | os.PathLike[str], *, n_ctx: int = 512,
    n_chunks: int | None = None, seed: int = 0, threads: int = 0, force: bool = False, allow_requantize: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> Measured:  # fmt: skip
    """Run a model on a text and write what the tuned quantizer needs.

    Parameters
    ----------
    As in `measure_curvature`.

    Returns
    -------
    Measured
    """
    try:
        measure_curvature(
            model, text, output, n_ctx=n_ctx, n_chunks=n_chunks, seed=seed, threads=threads, force=force,
            allow_requantize=allow_requantize, progress=progress,
        )  # fmt: skip
    except QuantizationError as error:
        if error.tensor is not None and "quantized already" in error.message:
            raise
        reason = error.message
    else:
        return Measured("curvature", "")
    capture(
        model, text, output, kind="hessian", n_ctx=n_ctx, n_chunks=n_chunks, threads=threads, force=force,
        progress=None if progress is None else lambda p: progress(p.n_done, p.n_total, "Hessians, chunks"),
    )  # fmt: skip
    return Measured("hessian", reason)
