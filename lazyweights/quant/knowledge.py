"""What is known of the inputs of weights, whichever kind of file says it: a curvature file, Hessians or an imatrix."""

from __future__ import annotations

import os

import numpy as np

from lazyweights.errors import QuantizationError
from lazyweights.llama.hessians import Hessians
from lazyweights.llama.imatrix import is_imatrix
from lazyweights.llama.safetensors_file import read_safetensors
from lazyweights.quant.curvature import EMBEDDING, FORMAT, OUTPUT, Curvature

MIN_TOKENS = 32
"""Tokens that an expert needs for a Hessian of its own."""


class Knowledge:
    """What a file says of the inputs of weights.

    Parameters
    ----------
    path : str or os.PathLike

    Attributes
    ----------
    is_tied : bool
        Whether the token embedding is the output matrix too; to be set by who knows the model.

    Raises
    ------
    FormatError
        If the file is damaged or none of these.
    QuantizationError
        If it holds samples.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._curvature: Curvature | None = None
        self._hessians: Hessians | None = None
        self.is_tied = False
        if not is_imatrix(path) and read_safetensors(path)[1].get("format") == FORMAT:
            self._curvature = Curvature(path)
            return
        self._hessians = Hessians.load(path)
        if self._hessians.info.kind == "samples":
            raise QuantizationError("samples cannot be used here: capture Hessians", path=os.fspath(path))

    def __contains__(self, name: str) -> bool:
        known = self._curvature if self._curvature is not None else self._hessians
        return known is not None and name in known

    def n_dropped(self, name: str) -> int:
        """Return how many tokens were left out because something was not finite."""
        if self._curvature is not None:
            return self._curvature[name].n_dropped if name in self._curvature else 0
        return self._hessians.n_dropped(name) if self._hessians is not None and name in self._hessians else 0

    def of(self, name: str, matrix: int, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray | None, float, str | None]:
        """Return Hessian, row weights (None: unknown), coherence, and what replaced the Hessian (None: nothing)."""
        rows, columns = shape
        if self._curvature is not None and name in self._curvature:
            found = self._curvature[name]
            if len(found.row_weights) != rows:
                raise _of_another_model(name, rows, len(found.row_weights))
            lost = "identity" if found.n_dropped and not found.row_weights.any() else None
            return _checked(found.hessian, name, columns), found.row_weights, found.coherence, lost
        if self._hessians is None:
            return np.eye(columns), None, 1.0, "identity"
        # A tied embedding is used as the output matrix, under whose name its inputs are captured.
        key = name
        if name == EMBEDDING and name not in self._hessians:
            if not (self.is_tied and OUTPUT in self._hessians):
                return np.eye(columns), None, 1.0, None  # a table of rows, which have no inputs
            key = OUTPUT
        n_rows = np.atleast_1d(self._hessians.n_rows(key))
        diagonals = np.atleast_2d(_checked(self._hessians.diagonal(key), name, columns))
        if not matrix < len(n_rows) == len(diagonals):
            raise QuantizationError("what is known of the inputs is not by expert: capture Hessians", tensor=name)
        if n_rows[matrix] < min(MIN_TOKENS, n_rows.max()) or not n_rows[matrix]:  # an expert that few tokens came to
            if not n_rows.sum():
                return np.eye(columns), None, 1.0, "identity"
            return np.diag(diagonals.sum(axis=0) / n_rows.sum()), None, 1.0, "diagonal of all experts"
        if self._hessians.info.kind == "hessian":
            whole = self._hessians[key]
            return (whole[matrix] if whole.ndim == 3 else whole) / n_rows[matrix], None, 1.0, None
        return np.diag(diagonals[matrix] / n_rows[matrix]), None, 1.0, None


def _checked(array: np.ndarray, name: str, columns: int) -> np.ndarray:
    if array.shape[-1] != columns:
        raise _of_another_model(name, columns, array.shape[-1])
    return array


def _of_another_model(name: str, expected: int, found: int) -> QuantizationError:
    return QuantizationError("the Hessian is that of another model", tensor=name, expected=expected, found=found)
