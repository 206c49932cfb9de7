"""The file with what is known of a model's inputs: curvature where gradients are known, Hessians of llama.cpp elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from lazyweights.errors import QuantizationError
from lazyweights.llama.memory_file import model_path
from lazyweights.llama.passes import capture
from lazyweights.quant.curvature import measure_curvature
from lazyweights.quant.float_source import FLOATS, FloatSource
from lazyweights.quant.gguf_rewrite import open_gguf
from lazyweights.quant.transformer import read_architecture


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
    reason = _why_no_gradients(model, allow_requantize)
    if not reason:
        measure_curvature(
            model, text, output, n_ctx=n_ctx, n_chunks=n_chunks, seed=seed, threads=threads, force=force,
            allow_requantize=allow_requantize, progress=progress,
        )  # fmt: skip
        return Measured("curvature", "")
    capture(
        model, text, output, kind="hessian", n_ctx=n_ctx, n_chunks=n_chunks, threads=threads, force=force,
        progress=None if progress is None else lambda p: progress(p.n_done, p.n_total, "Hessians, chunks"),
    )  # fmt: skip
    return Measured("hessian", reason)


def _why_no_gradients(model: str | os.PathLike[str], allow_requantize: bool) -> str:
    """Return why gradients of a model are not known, "" where they are.

    Raises
    ------
    QuantizationError
        If the model is quantized already, and that is not allowed.
    """
    with model_path(model) as plain, open_gguf(plain.path) as (view, scan):
        source = FloatSource(view, scan, allow_requantize)
        for name, info in source.tensors.items():
            if len(info.shape) > 1 and info.type_id not in FLOATS:
                source.rows(name, 0, 1)  # says what to do
        try:
            read_architecture(source.metadata)
        except QuantizationError as error:
            return error.message
    return ""
