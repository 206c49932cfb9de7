"""The Cholesky factor of an inverse Hessian, which GPTQ walks along.

GPTQ rounds column after column and spreads each error over the columns to come. All it needs is the upper triangular U with
``H^-1 = U^T U``: row j, divided by its diagonal element, says how column j's error spreads, and ``1 / U[j, j]^2`` is what a
squared error of column j costs once all later columns have made up for it (Frantar et al., arXiv 2210.17323, section 3).

H is reversed, factored and inverted as a triangle, which is the same U without ever forming ``H^-1``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MAX_DAMP_FRAC = 10.0
_LEAF = 64


@dataclass(frozen=True)
class Factor:
    """What GPTQ needs of a Hessian.

    Attributes
    ----------
    upper : numpy.ndarray
        float32 (n, n), U.
    diagonal : numpy.ndarray
        float64 (n,), that of U.
    damp_frac : float
        Share of the mean of H's diagonal that was added to it.
    n_dead : int
        Columns whose input was always 0.
    is_diagonal : bool
        Whether only the diagonal of H was used, because no damping made H positive definite, or it is 0.
    """

    upper: np.ndarray
    diagonal: np.ndarray
    damp_frac: float
    n_dead: int
    is_diagonal: bool


def large_first(diagonal: np.ndarray, block_columns: int, sub_columns: int) -> np.ndarray:
    """Return an order of columns in which those with large inputs come first, while blocks and their sub-blocks stay together.

    Errors of early columns are made up for by many later ones.

    Parameters
    ----------
    diagonal : numpy.ndarray
        (n,), that of the Hessian.
    block_columns, sub_columns : int
        Columns of a block and of its sub-blocks; n is a multiple of both.

    Returns
    -------
    numpy.ndarray
        int64 (n,), the columns in their new order.

    Examples
    --------
    >>> large_first(np.array([1.0, 2.0, 5.0, 3.0]), 2, 2).tolist()
    [2, 3, 1, 0]
    """
    keys = [-diagonal]
    for width in (sub_columns, block_columns):
        means = diagonal.reshape(-1, width).mean(axis=1)
        keys += [np.arange(len(means)).repeat(width), -means.repeat(width)]  # the number keeps equally large ones apart
    return np.lexsort(keys)


def spread_within_blocks(diagonal: np.ndarray, sub_columns: int) -> float:
    """Return what it costs that the columns of a sub-block share a step, bits a weight; `diagonal` is that of U."""
    columns = np.log2(diagonal).reshape(-1, sub_columns)
    return float(0.5 * np.log2(np.exp2(2 * (columns.mean(axis=1, keepdims=True) - columns)).mean(axis=1)).mean())


def factorize(hessian: np.ndarray, damp_frac: float = 0.01) -> Factor:
    """Factor the inverse of a Hessian.

    Parameters
    ----------
    hessian : numpy.ndarray
        (n, n), symmetric, positive semidefinite up to rounding.
    damp_frac : float
        Added to the diagonal as a share of its mean; grows tenfold while the factorization fails.

    Returns
    -------
    Factor

    Examples
    --------
    >>> import numpy as np
    >>> h = np.array([[2.0, 1.0], [1.0, 3.0]])
    >>> u = factorize(h, damp_frac=0.0).upper
    >>> bool(np.allclose(u.T @ u @ h, np.eye(2), atol=1e-6))
    True
    """
    matrix = np.array(hessian, np.float64)
    diagonal = matrix.diagonal().copy()
    good = np.isfinite(diagonal) & (diagonal > 0)
    mean = float(diagonal[good].mean()) if good.any() else 1.0
    n_dead = int(len(diagonal) - np.count_nonzero(good))
    is_finite = bool(np.isfinite(matrix).all())
    while is_finite and good.any() and damp_frac <= MAX_DAMP_FRAC:
        damped = matrix.copy()
        damped[np.diag_indices(len(damped))] += damp_frac * mean
        damped[~good, ~good] += mean
        try:
            lower = np.linalg.cholesky(damped[::-1, ::-1])
        except np.linalg.LinAlgError:
            damp_frac = max(10 * damp_frac, 1e-4)
            continue
        upper = np.ascontiguousarray(_invert_lower(lower)[::-1, ::-1])
        return Factor(upper.astype(np.float32), upper.diagonal().copy(), damp_frac, n_dead, False)
    safe = np.where(good, diagonal, 0.0) + (mean * 0.01 if good.any() else 1.0)
    roots = 1 / np.sqrt(safe)
    return Factor(np.diag(roots).astype(np.float32), roots, 0.01, n_dead, True)


def _invert_lower(lower: np.ndarray) -> np.ndarray:
    """Invert a lower triangular matrix: halves by halves, so that nearly all of it is matrix products."""
    n = len(lower)
    if n <= _LEAF:
        return np.tril(np.linalg.inv(lower))
    half = n // 2
    out = np.zeros_like(lower)
    out[:half, :half] = _invert_lower(lower[:half, :half])
    out[half:, half:] = _invert_lower(lower[half:, half:])
    out[half:, :half] = -out[half:, half:] @ (lower[half:, :half] @ out[:half, :half])
    return out
