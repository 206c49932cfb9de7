"""Rounding down a trellis: of two neighbouring codes one is allowed, and which one depends on the codes above.

Trellis-coded quantization (Marcellin and Fischer, 1990) on a grid of half the step: each code of a column has to have the parity
that a state machine of 32 states asks for, whose next state follows from the code. A decoder that knows the state needs no low
bit, so a code takes what one of the whole step would take; the encoder's choice among the paths brings about one decibel.
The paths of a row group start in state 0 (`lazyweights.codecs.trellis` has the rule); the best one is found by the
Viterbi algorithm, for all row groups side by side.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from lazyweights.codecs import TILE_ROWS
from lazyweights.codecs.trellis import N_STATES, TRANSITIONS

FINE_STEP = float(np.sqrt(15 / 48))
"""Grid over the step of a plain rounding with the same mean square error: what 4 / 15 of a squared grid is to 1 / 12."""

TRELLIS_GAIN = 0.22
"""What the trellis saves, as a share of the error that would cost as much: 2 ln 2 times 0.16 bits."""

FAR = np.float32(1e30)


def _arrivals() -> tuple[np.ndarray, np.ndarray]:
    """Return, for each state, the two states that lead to it and the code modulo 4 that does, int64 (32, 2)."""
    states = np.full((N_STATES, 2), -1, np.int64)
    remainders = np.zeros((N_STATES, 2), np.int64)
    for state in range(N_STATES):
        for bit in range(2):
            arrived = int(TRANSITIONS[state, bit])
            way = int(states[arrived, 0] >= 0)
            states[arrived, way] = state
            remainders[arrived, way] = (state & 1) + 2 * bit
    return states, remainders


_FROM, _REMAINDERS = _arrivals()


class Scratch:
    """Arrays that `round_column` works in.

    Parameters
    ----------
    rows : int
        Of a slab.
    """

    def __init__(self, rows: int) -> None:
        groups = -(-rows // TILE_ROWS)
        self.arrays = (
            np.zeros((2, N_STATES, groups), np.float32), np.zeros((4, groups), np.float32),
            np.zeros((TILE_ROWS, 4, groups), np.int16), np.zeros((TILE_ROWS, N_STATES, groups), np.uint8),
        )  # fmt: skip


@njit(cache=True, nogil=True)
def round_column(
    values: np.ndarray,
    weights: np.ndarray,
    lowest: int,
    highest: int,
    rate_weight: float,
    lengths: np.ndarray,
    scratch: tuple,
    codes: np.ndarray,
) -> None:
    """Choose the codes of a column that obey the trellis and cost least.

    Parameters
    ----------
    values : float32 (rows,), in grid steps
    weights : float32 (rows,), what a squared grid step of error costs
    lowest, highest : range of the codes
    rate_weight : what a bit costs; 0: bits do not count
    lengths : float32 (256,), bits of the index ``code >> 1`` from -128 on
    scratch : of `Scratch`
    codes : int8 (rows,), output
    """
    costs, errors, candidates, ways = scratch
    rows = len(values)
    groups = costs.shape[2]
    now = 0
    costs[0] = FAR
    costs[0, 0] = np.float32(0)
    for t in range(TILE_ROWS):
        for g in range(groups):
            row = TILE_ROWS * g + t
            value = values[row] if row < rows else np.float32(0)
            weight = weights[row] if row < rows else np.float32(0)
            if not abs(value) < np.float32(30000):
                value = np.float32(30000) if value > 0 else np.float32(-30000)
            for remainder in range(4):
                code = np.float32(4) * np.rint((value - np.float32(remainder)) * np.float32(0.25)) + np.float32(remainder)
                if code > highest:
                    code = np.float32(highest - ((highest - remainder) & 3))
                if code < lowest:
                    code = np.float32(lowest + ((remainder - lowest) & 3))
                error = (value - code) * (value - code) * weight
                whole = np.int64(code)
                if rate_weight > 0:
                    error += rate_weight * lengths[(whole >> 1) + 128]
                errors[remainder, g] = error
                candidates[t, remainder, g] = whole
        for state in range(N_STATES):
            first, second = costs[now, _FROM[state, 0]], costs[now, _FROM[state, 1]]
            of_first, of_second = errors[_REMAINDERS[state, 0]], errors[_REMAINDERS[state, 1]]
            best, way = costs[1 - now, state], ways[t, state]
            for g in range(groups):
                a = first[g] + of_first[g]
                b = second[g] + of_second[g]
                is_second = b < a
                best[g] = b if is_second else a
                way[g] = np.uint8(is_second)
        now = 1 - now
    for g in range(groups):
        state = 0
        for other in range(1, N_STATES):
            if costs[now, other, g] < costs[now, state, g]:
                state = other
        for back in range(TILE_ROWS):
            t = TILE_ROWS - 1 - back
            way_taken = ways[t, state, g]
            if TILE_ROWS * g + t < rows:
                codes[TILE_ROWS * g + t] = candidates[t, _REMAINDERS[state, way_taken], g]
            state = _FROM[state, way_taken]
