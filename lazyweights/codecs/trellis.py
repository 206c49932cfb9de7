"""Trellis codes: a rule down each column of codes that leaves one parity at every place, so that the low bit costs nothing.

Trellis-coded quantization (Marcellin and Fischer, IEEE Trans. Communications 38(1), 1990) lets a state decide which half of all
codes may stand at a place, the even or the odd ones. What is coded is the *index*, the code without its low bit; the state
restores that. States are those of the 32-state code of Ungerboeck (IEEE Trans. Information Theory 28(1), 1982; parity-check
polynomials 45 and 10, octal). Each column of a row group has a trellis of its own, which starts in state 0 at its first row:

- a code has the parity of the state: ``code & 1 == state & 1``;
- its index is ``code >> 1``, for signed codes with their sign;
- the next state is ``state >> 1``, with `FEEDBACK` flipped where the state is odd and `INPUT` where the index is.

`docs/format.md`, "Trellis codes", is normative. Symbols are bytes; signed codes are two's complement.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from lazyweights.codecs import TILE_ROWS

N_STATES = 32
FEEDBACK = 18
INPUT = 4


def _transitions() -> np.ndarray:
    states = np.arange(N_STATES, dtype=np.int64)[:, None]
    return states >> 1 ^ FEEDBACK * (states & 1) ^ INPUT * np.arange(2, dtype=np.int64)


TRANSITIONS = _transitions()
"""The next state of each state, by the low bit of the index: int64 (32, 2)."""


@njit(cache=True, nogil=True, inline="always")
def _next_state(state: np.uint8, index: np.uint8) -> np.uint8:
    """Return the state behind an index, without branches, so that columns are vectorised."""
    one = np.uint8(1)
    odd, odd_index = np.uint8(0) - (state & one), np.uint8(0) - (index & one)
    return np.uint8(state >> one) ^ (odd & np.uint8(FEEDBACK)) ^ (odd_index & np.uint8(INPUT))


@njit(cache=True, nogil=True)
def to_indices(symbols: np.ndarray, is_signed: bool) -> np.ndarray:
    """Turn codes into their indices, in place.

    Parameters
    ----------
    symbols : ndarray of uint8, shape (rows, columns)
        Whole row groups of 64 rows, the last may be short.
    is_signed : bool
        Whether the codes are two's complement of 8 bits.

    Returns
    -------
    ndarray of bool, shape (row groups,)
        Whether the codes of a row group are trellis codes. Those of another are not given back by `from_indices`.
    """
    n_rows, n_columns = symbols.shape
    one = np.uint8(1)
    sign = np.uint8(128 if is_signed else 0)
    states = np.zeros(n_columns, np.uint8)
    wrong = np.zeros(n_columns, np.uint8)
    valid = np.zeros((n_rows + TILE_ROWS - 1) // TILE_ROWS, np.bool_)
    for g in range(valid.size):
        states[:] = 0
        wrong[:] = 0
        for row in range(TILE_ROWS * g, min(TILE_ROWS * (g + 1), n_rows)):
            codes = symbols[row]
            for column in range(np.uint64(n_columns)):
                code, state = codes[column], states[column]
                index = np.uint8(code >> one) | (code & sign)
                wrong[column] |= code ^ state
                states[column] = _next_state(state, index)
                codes[column] = index
        valid[g] = not (wrong & one).any()
    return valid


@njit(cache=True, nogil=True)
def from_indices(symbols: np.ndarray, start: int, stride: int, n_rows: int, states: np.ndarray) -> None:
    """Turn the indices of a row group into its codes, in place.

    Parameters
    ----------
    symbols : ndarray of uint8, flat
        Row r is the part of it from ``start + r * stride`` on, as many columns as there are states.
    n_rows : int
        1 .. 64.
    states : ndarray of uint8, shape (columns,)
        Scratch.
    """
    one = np.uint8(1)
    states[:] = 0
    for row in range(n_rows):
        at = start + row * stride
        codes = symbols[at : at + states.size]
        for column in range(np.uint64(states.size)):
            index, state = codes[column], states[column]
            states[column] = _next_state(state, index)
            codes[column] = np.uint8(index << one) | (state & one)
