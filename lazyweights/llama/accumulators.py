"""What is kept of the rows that a weight is multiplied with: their Hessian, its diagonal, or some of them as they are.

One accumulator serves all weights that share an input. Of a weight of several matrices (experts, heads) it holds a range of
them, so that a pass need not hold them all.

Precision. All sums are of float64 products of float32 activations, which are exact: the error of an element H[i, j] is that of
adding up N of them, below 1e-13 of sqrt(H[i, i] H[j, j]) for a million rows. Multiplying in float32 would take half the time,
but its errors of 5e-7 make a Hessian of fewer rows than columns, or of inputs with large outliers, indefinite (measured:
smallest eigenvalues of -1e-8 of the largest).
"""

from __future__ import annotations

import functools
import math

import numpy as np

KINDS = ("hessian", "diagonal", "samples")
SECTIONS = {"hessian": "hessian", "diagonal": "squares", "samples": "samples"}
"""Under which name the file has the values of a kind."""

SEED = 20_480_512


@functools.lru_cache(maxsize=2)
def _scratch(n: int) -> np.ndarray:
    """A matrix to multiply into, kept: fresh memory costs a page fault every 4 KiB, and models have few sizes."""
    return np.empty((n, n))


class Accumulator:
    """Base: counts rows, and drops those that are not finite.

    Parameters
    ----------
    n_columns : int
        Elements of a row.
    first, stop : int
        The matrices of the weight that are held.

    Attributes
    ----------
    n_rows, n_dropped : numpy.ndarray
        int64 (stop - first,): rows that were added, and rows left out because an element was NaN or infinite.
    values : numpy.ndarray
        What is kept, first dimension stop - first.
    """

    values: np.ndarray

    def __init__(self, n_columns: int, first: int, stop: int) -> None:
        self.n_columns = n_columns
        self.first, self.stop = first, stop
        self.n_rows = np.zeros(stop - first, np.int64)
        self.n_dropped = np.zeros(stop - first, np.int64)

    def add(self, matrix: int, rows: np.ndarray) -> None:
        """Add the rows that a matrix is multiplied with.

        Parameters
        ----------
        matrix : int
            Which; those outside `first` to `stop` are ignored.
        rows : numpy.ndarray
            float32 (n, n_columns), any strides.
        """
        if not self.first <= matrix < self.stop or not len(rows):
            return
        rows = np.ascontiguousarray(rows, np.float32)
        slot = matrix - self.first
        finite = np.isfinite(rows).all(axis=1)
        if not finite.all():
            self.n_dropped[slot] += len(rows) - int(finite.sum())
            rows = rows[finite]
        if len(rows):
            self._add(slot, rows)
            self.n_rows[slot] += len(rows)

    def _add(self, slot: int, rows: np.ndarray) -> None:
        raise NotImplementedError


class SquareSums(Accumulator):
    """Sums of squares, float64 (matrices, n_columns): the diagonal of the Hessian, what llama.cpp calls an imatrix."""

    def __init__(self, n_columns: int, first: int, stop: int) -> None:
        super().__init__(n_columns, first, stop)
        self.values = np.zeros((stop - first, n_columns))

    def _add(self, slot: int, rows: np.ndarray) -> None:
        wide = rows.astype(np.float64)
        self.values[slot] += np.einsum("ij,ij->j", wide, wide)


class HessianSums(Accumulator):
    """X^T X, float64 (matrices, n_columns, n_columns), symmetric to the bit."""

    def __init__(self, n_columns: int, first: int, stop: int) -> None:
        super().__init__(n_columns, first, stop)
        self.values = np.zeros((stop - first, n_columns, n_columns))

    def _add(self, slot: int, rows: np.ndarray) -> None:
        wide = rows.astype(np.float64)
        product = _scratch(self.n_columns)
        np.matmul(wide.T, wide, out=product)  # numpy sees A^T A: half the work, and a symmetric result
        self.values[slot] += product


class RowSamples(Accumulator):
    """A uniform sample of the rows, float32 (matrices, limit, n_columns); rows of zeros where fewer came.

    A reservoir whose choice depends on nothing but the number of rows, so that weights that see every token keep the same
    tokens, in the same places.
    """

    def __init__(self, n_columns: int, first: int, stop: int, limit: int) -> None:
        super().__init__(n_columns, first, stop)
        self.values = np.zeros((stop - first, limit, n_columns), np.float32)
        self._random = [np.random.default_rng(SEED) for _ in range(stop - first)]

    def _add(self, slot: int, rows: np.ndarray) -> None:
        limit = self.values.shape[1]
        seen = int(self.n_rows[slot])
        n_filling = min(max(limit - seen, 0), len(rows))
        self.values[slot, seen : seen + n_filling] = rows[:n_filling]
        if n_filling == len(rows):
            return
        places = self._random[slot].integers(0, np.arange(seen + n_filling, seen + len(rows)) + 1)
        for row in np.flatnonzero(places < limit):  # in order: a later row may take the place of an earlier one
            self.values[slot, places[row]] = rows[n_filling + row]


def make(kind: str, n_columns: int, first: int, stop: int, n_samples: int) -> Accumulator:
    """Return an accumulator of a kind."""
    if kind == "hessian":
        return HessianSums(n_columns, first, stop)
    if kind == "diagonal":
        return SquareSums(n_columns, first, stop)
    return RowSamples(n_columns, first, stop, n_samples)


def matrix_shape(kind: str, n_columns: int, n_samples: int) -> tuple[int, ...]:
    """Return the shape of the values of one matrix."""
    return {"hessian": (n_columns, n_columns), "diagonal": (n_columns,), "samples": (n_samples, n_columns)}[kind]


def matrix_bytes(kind: str, n_columns: int, n_samples: int) -> int:
    """Return the bytes that the values of one matrix take in memory."""
    return math.prod(matrix_shape(kind, n_columns, n_samples)) * (4 if kind == "samples" else 8)


def scratch_bytes(kind: str, n_columns: int) -> int:
    """Return the bytes that adding rows takes besides."""
    return 8 * n_columns * n_columns if kind == "hessian" else 0
