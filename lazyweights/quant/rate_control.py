"""Which global step meets a budget: a search with few measurements, each of which may take minutes.

Two kinds of values come with a step. What quality loses (perplexity over that of the source, less 1) rises with it,
about as its square; the coded size falls. Both searches work on the logarithms of step and value, where the curves are all but
straight lines: the next step lies on the line through the two measurements nearest to the limit.

A measurement has noise, so the curve is monotone only roughly. Nothing is concluded from a curve: a step keeps the limit
if its measured value does, and the result is the best of those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

LOWEST_STEP, HIGHEST_STEP = 1 / 64, 64.0
LOSS_SLOPE, SIZE_SLOPE = 2.0, 0.3
"""Change of ln(value) with ln(step) where two measurements do not say it: losses grow with the square of the error; a code of
about five bits loses one bit, a fifth, where the step doubles."""

MAX_FACTOR, BLIND_FACTOR = 16.0, 4.0
"""Largest ratio of a step to the one before where the limit is not enclosed yet; and the ratio where values say nothing, being
lost in noise or not finite."""

EDGE, WIDER_EDGE = 0.02, 4.0
"""Of an enclosing interval, at each of its ends: the next step keeps this distance. It widens by a factor with each measurement
that falls on the same side as the one before, so that a curve with a jump does not hold up the search."""

NEAR = 0.1
"""In ln(value / limit): where the nearest measurement is no further off, the next step may be as close to it as it comes."""

CAUTION = 0.7
"""Share of a loss limit that the last measurement aims at where none has kept the limit so far."""


@dataclass(frozen=True)
class Trial:
    """A step and the value that was measured with it."""

    step: float
    value: float


@dataclass(frozen=True)
class StepSearch:
    """What a search found.

    Attributes
    ----------
    best : Trial or None
        Of those that keep the limit (measured now or known before) the one with the largest step, or, for sizes, the
        smallest. None where none does.
    limit : float
    trials : tuple of Trial
        Measured by this search, in their order.
    """

    best: Trial | None
    limit: float
    trials: tuple[Trial, ...]


def largest_step_within_loss(
    measure: Callable[[float], float], limit: float, *, start: float = 1.0, known: Iterable[Trial] = (),
    max_trials: int = 4, tolerance: float = 0.05, lowest: float = LOWEST_STEP, highest: float = HIGHEST_STEP,
) -> StepSearch:  # fmt: skip
    """Find the largest step whose loss, which rises with the step, stays within a limit.

    Parameters
    ----------
    measure : callable
        Returns the loss of a step. It may be noisy, also negative; NaN counts as too much.
    limit : float
        Largest loss allowed, above 0. A budget of 2 % of perplexity is 0.02, with losses ``ppl / source_ppl - 1``.
    start : float
        Where to begin if nothing is known.
    known : iterable of Trial
        Measured before; they cost no measurement, and may be the answer.
    max_trials : int
        Measurements at most.
    tolerance : float
        Share of the limit that may be left unused: a loss above ``(1 - tolerance) * limit`` and within it ends the search.
    lowest, highest : float
        Range of steps.

    Returns
    -------
    StepSearch

    Raises
    ------
    ValueError
        If a limit or a range makes no sense.

    Examples
    --------
    >>> search = largest_step_within_loss(lambda step: 0.004 * step**2, 0.02)
    >>> round(search.best.step, 2), len(search.trials)
    (2.21, 2)
    """
    return _search(measure, limit, 1, LOSS_SLOPE, start, known, max_trials, tolerance, lowest, highest)


def smallest_step_within_size(
    measure: Callable[[float], float], limit: float, *, start: float = 1.0, known: Iterable[Trial] = (),
    max_trials: int = 6, tolerance: float = 0.002, lowest: float = LOWEST_STEP, highest: float = HIGHEST_STEP,
) -> StepSearch:  # fmt: skip
    """Find the smallest step whose size, which falls with the step, stays within a limit.

    Parameters
    ----------
    measure : callable
        Returns the size of a step: coded bytes, or bits per weight.
    limit : float
        Largest size allowed, in the same unit.
    start, known, max_trials, tolerance, lowest, highest
        As in `largest_step_within_loss`.

    Returns
    -------
    StepSearch

    Raises
    ------
    ValueError
        If a limit or a range makes no sense.

    Examples
    --------
    >>> import math
    >>> search = smallest_step_within_size(lambda step: 5 - math.log2(step), 4.0)
    >>> 3.99 < search.best.value <= 4
    True
    """
    return _search(measure, limit, -1, SIZE_SLOPE, start, known, max_trials, tolerance, lowest, highest)


@dataclass(frozen=True)
class _Point:
    """A trial in the coordinates of the search: both searches look for the largest z with y <= 0, and y rises with z."""

    z: float
    y: float
    trial: Trial


def _search(
    measure: Callable[[float], float], limit: float, sign: int, slope: float, start: float, known: Iterable[Trial],
    max_trials: int, tolerance: float, lowest: float, highest: float,
) -> StepSearch:  # fmt: skip
    if not (limit > 0 and math.isfinite(limit)):
        raise ValueError(f"a limit of {limit}: it has to be above 0")
    if not 0 < lowest <= start <= highest < math.inf:
        raise ValueError(f"steps from {lowest} over {start} to {highest} are no range")
    if not 0 <= tolerance < 1:
        raise ValueError(f"a tolerance of {tolerance}: it has to be at least 0 and below 1")
    def point(trial: Trial) -> _Point:
        return _Point(sign * math.log(trial.step), _height(trial.value, limit), trial)

    points = [point(trial) for trial in known]
    trials: list[Trial] = []
    while len(trials) < max_trials:
        below = max((p for p in points if p.y <= 0), key=lambda p: p.z, default=None)
        if below is not None and below.y >= math.log1p(-tolerance):
            break
        # Where noise puts a step that is too much below one that keeps the limit, the latter counts.
        above = min((p for p in points if p.y > 0 and (below is None or p.z > below.z)), key=lambda p: p.z, default=None)
        is_last = len(trials) + 1 == max_trials
        aim = math.log1p(-tolerance / 2)
        if is_last and sign > 0:  # what is too much now is wasted
            aim = math.log(CAUTION) if below is None else math.log(max(1 - 2 * tolerance, CAUTION))
        z = sign * math.log(start) if not points else _next(points, below, above, aim, slope, _same_side(trials, limit))
        step = min(max(math.exp(sign * z), lowest), highest)
        step = next((end for end in (lowest, highest) if math.isclose(step, end)), step)
        if any(math.isclose(step, p.trial.step, rel_tol=1e-4) for p in points):
            break
        trials.append(Trial(step, float(measure(step))))
        points.append(point(trials[-1]))
    best = max((p for p in points if p.y <= 0), key=lambda p: p.z, default=None)
    return StepSearch(None if best is None else best.trial, limit, tuple(trials))


def _height(value: float, limit: float) -> float:
    """Return ln(value / limit); where noise makes a loss 0 or less it is far below, NaN is far above."""
    if math.isnan(value) or value == math.inf:
        return math.inf
    return math.log(value / limit) if value > 0 else -math.inf


def _same_side(trials: list[Trial], limit: float) -> int:
    """Return how many of the last trials fell on the side of the very last one, besides that."""
    sides = [_height(trial.value, limit) <= 0 for trial in reversed(trials)]
    return next((k for k, side in enumerate(sides) if side != sides[0]), len(sides)) - 1 if sides else 0


def _next(
    points: list[_Point], below: _Point | None, above: _Point | None, aim: float, slope: float, n_same: int
) -> float:
    """Return the z to measure next: by the line through the two points nearest to the limit, but inside what encloses it."""
    near = sorted((p for p in points if math.isfinite(p.y)), key=lambda p: abs(p.y))
    enclosed = below is not None and above is not None
    if enclosed and (not near or math.isinf(above.y)):  # type: ignore[union-attr]
        return (below.z + above.z) / 2  # type: ignore[union-attr]
    if not near:
        assert below is not None or above is not None
        blind = math.log(BLIND_FACTOR)
        return below.z + blind if below is not None else above.z - blind  # type: ignore[union-attr]
    found = slope
    if len(near) > 1 and near[0].z != near[1].z:
        found = (near[0].y - near[1].y) / (near[0].z - near[1].z)
    origin = near[0]
    if slope / 3 <= found <= slope * 3:
        slope = found
    elif below is not None and above is not None and math.isfinite(below.y):
        # Of two close points noise makes any slope: what encloses the limit says more.
        origin, slope = above, (above.y - below.y) / (above.z - below.z)
    else:
        slope = min(max(found, slope / 3), slope * 3)
    z = origin.z + min(max((aim - origin.y) / slope, -math.log(MAX_FACTOR)), math.log(MAX_FACTOR))
    if below is not None and above is not None:
        edge = min(EDGE * WIDER_EDGE ** (n_same if abs(near[0].y) > NEAR else 0), 0.5) * (above.z - below.z)
        return min(max(z, below.z + edge), above.z - edge)
    if above is not None:
        return min(z, above.z)
    assert below is not None
    return max(z, below.z)
