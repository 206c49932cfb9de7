"""GPTQ with given steps: round column by column, let later columns make up for the errors, pay for bits.

`quantize_rows` takes a slab of rows that share a factor (`lazyweights.quant.factors`) and steps that are shared down the
columns. Rows do not see each other, but for the trellis and the code lengths that rate-aware rounding pays, which are counted
over the slab.

Codes are rounded to the nearest, or down a trellis (`lazyweights.quant.trellis_rounding`), which couples the 64 rows of a row
group. Columns go in runs of `RUN` columns: inside a run the compiled loop updates, behind it one matrix product does. Everything
is computed by one thread in a fixed order, so that equal input gives equal codes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numba import njit

from lazyweights.quant.containers import Container
from lazyweights.quant.factors import Factor
from lazyweights.quant.trellis_rounding import Scratch, round_column

RUN = 128
MAX_DOUBLINGS = 30
WIDENING = 2
"""Eighths of octaves by which a step grows until its weights are in reach."""

SMALLEST_NORMAL = float(np.finfo(np.float16).smallest_normal)


@dataclass(frozen=True)
class QuantizedRows:
    """A slab of quantized rows.

    Attributes
    ----------
    codes : numpy.ndarray
        int8 (rows, columns), signed.
    scales : numpy.ndarray
        float32 (rows, blocks), d.
    sub_scales : numpy.ndarray
        uint8 (rows, sub-blocks).
    loss : numpy.ndarray
        float64 (rows,): error' H error of each row, H with its damping.
    n_widened : int
        Sub-blocks that got a wider step.
    counts : numpy.ndarray
        int64 (256,): of the codes from -128 on, or of their indices ``code >> 1`` on a trellis, which is what is coded.
    """

    codes: np.ndarray
    scales: np.ndarray
    sub_scales: np.ndarray
    loss: np.ndarray
    n_widened: int
    counts: np.ndarray


def quantize_rows(
    weights: np.ndarray, factor: Factor, container: Container, scales: np.ndarray, sub_scales: np.ndarray,
    row_factors: np.ndarray, *, rate_weight: float = 0.0, widen: bool = True, on_trellis: bool = False,
    row_costs: np.ndarray | None = None,
) -> QuantizedRows:  # fmt: skip
    """Quantize a slab of rows.

    Parameters
    ----------
    weights : numpy.ndarray
        float32 (rows, columns), finite. Not changed.
    factor : Factor
    container : Container
    scales, sub_scales : numpy.ndarray
        float64 (columns / block_columns,) and int32 (columns / sub_columns,): those of a row with the factor 1.
    row_factors : numpy.ndarray
        float64 (rows,), what d of each row is multiplied with.
    rate_weight : float
        What a bit costs, in squared steps. 0 rounds to nearest.
    widen : bool
        Make the steps of sub-blocks with a weight out of reach wider; otherwise such weights are clipped.
    on_trellis : bool
        Let the codes of each column obey the trellis.
    row_costs : numpy.ndarray, optional
        float64 (rows,): what an error costs in each row compared with others, which only a trellis trades. All the same if None.

    Returns
    -------
    QuantizedRows
    """
    rows, columns = weights.shape
    blocks, subs = columns // container.block_columns, columns // container.sub_columns
    if columns % container.block_columns or (len(row_factors), len(scales), len(sub_scales)) != (rows, blocks, subs):
        raise ValueError(f"{rows} rows of {columns} columns do not fit the steps given")
    with np.errstate(over="ignore"):
        base = (row_factors[:, None] * scales[None]).astype(np.float16)
    base = np.clip(base, np.finfo(np.float16).smallest_subnormal, np.finfo(np.float16).max).astype(np.float32)
    work = weights.astype(np.float32)  # a copy: errors are added to it
    codes = np.empty((columns, rows), np.int8)
    widenings = np.zeros(base.shape, np.uint8)
    found_sub_scales = np.empty((rows, len(sub_scales)), np.uint8)
    loss = np.zeros(rows)
    counts = np.zeros(256, np.int64)
    lengths = np.zeros(256, np.float32)
    costs = row_costs if row_costs is not None and row_costs.any() else np.ones(rows)
    scratch = Scratch(rows if on_trellis else 0).arrays
    n_widened = 0
    for start in range(0, columns, RUN):
        stop = min(start + RUN, columns)
        if rate_weight > 0 and start > 0:
            lengths = _code_lengths(counts)
        run = np.ascontiguousarray(work[:, start:stop].T)
        errors = np.empty_like(run)
        n_widened += _quantize_run(
            run, work, factor.upper, base, sub_scales, container.block_columns, container.sub_columns, container.lowest,
            container.highest, container.max_sub_scale, start, np.float32(rate_weight if start else 0.0), lengths, widen,
            on_trellis, costs, scratch, codes[start:stop], widenings, found_sub_scales, errors, loss, counts,
        )  # fmt: skip
        if stop < columns:
            work[:, stop:] -= errors.T @ factor.upper[start:stop, stop:]
    scales_of_rows = np.minimum(_all_wider(base, widenings), np.float32(np.finfo(np.float16).max))
    return QuantizedRows(np.ascontiguousarray(codes.T), scales_of_rows, found_sub_scales, loss, n_widened, counts)


def _code_lengths(counts: np.ndarray) -> np.ndarray:
    """Return the ideal code lengths of the codes so far, float32 (256,) from code -128 on, in bits."""
    smooth = counts + 0.5
    return (np.log2(smooth.sum()) - np.log2(smooth)).astype(np.float32)


@njit(cache=True, nogil=True)
def _quantize_run(
    run, work, upper, base, sub_scales, block_columns, sub_columns, lowest, highest, max_sub_scale, start, rate_weight, lengths,
    widen, on_trellis, row_costs, scratch, codes, widenings, found_sub_scales, errors, loss, counts,
):  # fmt: skip
    """Quantize a run of columns, (columns, rows), that begins at column `start`; return how many sub-blocks were widened.

    `work` has the weights of all columns, (rows, columns), without what this run's errors add to them.
    """
    n_columns, rows = run.shape
    # Half a step less than what rounds to it: columns before may push a weight further out. A trellis may ask for one code more.
    reach = np.float32(highest - 2 if on_trellis else highest)
    n_widened = 0
    steps = np.empty(rows, np.float32)
    values = np.empty(rows, np.float32)
    weights = np.empty(rows, np.float32)
    for sub in range(start // sub_columns, (start + n_columns) // sub_columns):
        first = sub * sub_columns
        block = first // block_columns
        for row in range(rows):
            if first % block_columns == 0:
                widenings[row, block] = 0
                if widen and max_sub_scale > 1:
                    # d serves a whole block: how often must it double beyond what the sub-scales can take?
                    for other in range(sub, sub + block_columns // sub_columns):
                        largest = np.float32(0)
                        for column in range(other * sub_columns, (other + 1) * sub_columns):
                            largest = max(largest, abs(work[row, column]))
                        need = _doublings_needed(largest, base[row, block] * np.float32(sub_scales[other]), reach)
                        if 8 * (need - 1) > widenings[row, block]:
                            widenings[row, block] = 8 * (need - 1)
            scale = base[row, block]
            multiple = sub_scales[sub]
            if widen:
                largest = np.float32(0)
                for column in range(first - start, first - start + sub_columns):
                    largest = max(largest, abs(run[column, row]))
                if max_sub_scale == 1:
                    widenings[row, block] = _widenings_needed(largest, scale, reach)
                    n_widened += widenings[row, block] > 0
                else:
                    doublings = np.int64(widenings[row, block]) // 8
                    shift = _doublings_needed(largest, scale * np.float32(multiple), reach) - doublings
                    wanted = multiple << shift if shift >= 0 else -((-multiple) >> -shift)  # rounded up: not narrower
                    n_widened += (wanted << doublings) > multiple
                    multiple = min(wanted, max_sub_scale)
            found_sub_scales[row, sub] = multiple
            steps[row] = _wider(scale, np.int64(widenings[row, block])) * np.float32(multiple)
        for row in range(rows):
            weights[row] = row_costs[row] * np.float64(steps[row]) * np.float64(steps[row])
        mean = max(np.mean(weights), np.float32(1e-30))
        for column in range(first - start, first - start + sub_columns):
            for row in range(rows):
                values[row] = run[column, row] * (np.float32(1) / steps[row])
            if on_trellis:
                round_column(values, weights / mean, lowest, highest, rate_weight, lengths, scratch, codes[column])
            else:
                _round_to_nearest(values, lowest, highest, rate_weight, lengths, codes[column])
            diagonal = upper[start + column, start + column]
            for row in range(rows):
                error = (run[column, row] - np.float32(codes[column, row]) * steps[row]) / diagonal
                errors[column, row] = error
                loss[row] += error * error
                counts[(np.int64(codes[column, row]) >> np.int64(on_trellis)) + 128] += 1
            for later in range(column + 1, n_columns):
                factor = upper[start + column, start + later]
                for row in range(rows):
                    run[later, row] -= errors[column, row] * factor
    return n_widened


@njit(cache=True, nogil=True)
def _round_to_nearest(values, lowest, highest, rate_weight, lengths, codes):
    """Round the values of a column; a code next to the nearest is taken where it is shorter by more than the error costs."""
    for row in range(len(values)):
        x = values[row]
        nearest = np.rint(x)
        if not (nearest >= lowest):
            nearest = np.float32(lowest)
        if nearest > highest:
            nearest = np.float32(highest)
        if rate_weight > 0 and nearest != 0:
            shorter = nearest - np.float32(1) if nearest > 0 else nearest + np.float32(1)
            cost = (x - nearest) * (x - nearest) + rate_weight * lengths[np.int64(nearest) + 128]
            if (x - shorter) * (x - shorter) + rate_weight * lengths[np.int64(shorter) + 128] < cost:
                nearest = shorter
        codes[row] = np.int8(nearest)


@njit(cache=True, nogil=True, inline="always")
def _doublings_needed(largest, step, reach):
    """Return how often a step must double until a weight is within reach."""
    need = 0
    while largest > reach * step and need < MAX_DOUBLINGS:
        step *= np.float32(2)
        need += 1
    return need


@njit(cache=True, nogil=True)
def _widenings_needed(largest, scale, reach):
    """Return how many eighths of octaves a scale must grow until a weight is within reach."""
    need = 8 * max(_doublings_needed(largest, scale, reach) - 1, 0)
    while largest > reach * _wider(scale, need) and need < 8 * MAX_DOUBLINGS:
        need += WIDENING
    return need


@njit(cache=True, nogil=True)
def _wider(scale, eighths):
    """Return a scale that is some eighths of octaves wider, each an eighth of the power of two below it.

    So it keeps the seven low bits of its half-precision mantissa, which a coded file then has no need to store again.
    """
    if eighths == 0:
        return np.float32(scale)
    fraction, exponent = math.frexp(scale)
    if scale < SMALLEST_NORMAL:
        return np.float32(math.ldexp(scale, (eighths + 7) // 8))
    place = (fraction - 0.5) * 16.0 + eighths
    octaves = math.floor(place / 8.0)
    return np.float32(math.ldexp(0.5 + (place - 8.0 * octaves) / 16.0, exponent + octaves))


@njit(cache=True, nogil=True)
def _all_wider(scales, eighths):
    out = np.empty_like(scales)
    for row in range(scales.shape[0]):
        for block in range(scales.shape[1]):
            out[row, block] = _wider(scales[row, block], np.int64(eighths[row, block]))
    return out
