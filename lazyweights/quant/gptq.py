"""GPTQ with given steps: round column by column, let later columns make up for the errors, pay for bits.

`quantize_rows` takes a slab of rows that share a factor (`lazyweights.quant.factors`) and steps that are shared down the
columns. Rows do not see each other, except that the code lengths which rate-aware rounding pays are counted over the slab.

Columns go in runs of `RUN` columns: inside a run the compiled loop updates, behind it one matrix product does. Everything is
computed by one thread in a fixed order, so that equal input gives equal codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from lazyweights.quant.containers import Container
from lazyweights.quant.factors import Factor

RUN = 128
MAX_DOUBLINGS = 30


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
    """

    codes: np.ndarray
    scales: np.ndarray
    sub_scales: np.ndarray
    loss: np.ndarray
    n_widened: int


def quantize_rows(
    weights: np.ndarray, factor: Factor, container: Container, scales: np.ndarray, sub_scales: np.ndarray,
    row_factors: np.ndarray, *, rate_weight: float = 0.0, widen: bool = True,
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
        Double the steps of sub-blocks with a weight out of reach; otherwise such weights are clipped.

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
    codes = np.empty((rows, columns), np.int8)
    doublings = np.zeros(base.shape, np.uint8)
    found_sub_scales = np.empty((rows, len(sub_scales)), np.uint8)
    loss = np.zeros(rows)
    counts = np.zeros(256, np.int64)
    lengths = np.zeros(256, np.float32)
    n_widened = 0
    for start in range(0, columns, RUN):
        stop = min(start + RUN, columns)
        if rate_weight > 0 and start > 0:
            lengths = _code_lengths(counts)
        errors = np.empty((rows, stop - start), np.float32)
        n_widened += _quantize_run(
            work, factor.upper, base, sub_scales, container.block_columns, container.sub_columns, container.lowest,
            container.highest, container.max_sub_scale, start, stop, np.float32(rate_weight if start else 0.0), lengths, widen,
            codes, doublings, found_sub_scales, errors, loss, counts,
        )  # fmt: skip
        if stop < columns:
            work[:, stop:] -= errors @ factor.upper[start:stop, stop:]
    scales_of_rows = np.minimum(np.ldexp(base, doublings.astype(np.int32)), np.float32(np.finfo(np.float16).max))
    return QuantizedRows(codes, scales_of_rows, found_sub_scales, loss, n_widened)


def _code_lengths(counts: np.ndarray) -> np.ndarray:
    """Return the ideal code lengths of the codes so far, float32 (256,) from code -128 on, in bits."""
    smooth = counts + 0.5
    return (np.log2(smooth.sum()) - np.log2(smooth)).astype(np.float32)


@njit(cache=True, nogil=True)
def _quantize_run(
    work, upper, base, sub_scales, block_columns, sub_columns, lowest, highest, max_sub_scale, start, stop, rate_weight, lengths,
    widen, codes, doublings, found_sub_scales, errors, loss, counts,
):  # fmt: skip
    """Quantize columns `start` to `stop` of all rows; return how many sub-blocks were widened."""
    rows = len(work)
    reach = np.float32(highest)  # half a step less than what rounds to it: columns before may push a weight further out
    n_widened = 0
    for row in range(rows):
        for sub in range(start // sub_columns, stop // sub_columns):
            first = sub * sub_columns
            block = first // block_columns
            if first % block_columns == 0:
                doublings[row, block] = 0
                if widen and max_sub_scale > 1:
                    # d serves a whole block: how often must it double beyond what the sub-scales can take?
                    for other in range(sub, sub + block_columns // sub_columns):
                        step = base[row, block] * np.float32(sub_scales[other])
                        need = _doublings_needed(work, row, other * sub_columns, sub_columns, step, reach)
                        if need > doublings[row, block] + 1:
                            doublings[row, block] = need - 1
            scale = base[row, block]
            multiple = sub_scales[sub]
            if widen:
                need = _doublings_needed(work, row, first, sub_columns, scale * np.float32(multiple), reach)
                if max_sub_scale == 1:
                    doublings[row, block] = need
                    n_widened += need > 0
                else:
                    shift = need - np.int64(doublings[row, block])
                    wanted = multiple << shift if shift >= 0 else -((-multiple) >> -shift)  # rounded up: not narrower
                    n_widened += (wanted << doublings[row, block]) > multiple
                    multiple = min(wanted, max_sub_scale)
            found_sub_scales[row, sub] = multiple
            step = np.float32(np.ldexp(scale, np.int64(doublings[row, block])) * np.float32(multiple))
            inverse = np.float32(1) / step
            for column in range(first, first + sub_columns):
                value = work[row, column]
                x = value * inverse
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
                codes[row, column] = np.int8(nearest)
                counts[np.int64(nearest) + 128] += 1
                error = (value - nearest * step) / upper[column, column]
                errors[row, column - start] = error
                loss[row] += error * error
                for later in range(column + 1, stop):
                    work[row, later] -= error * upper[column, later]
    return n_widened


@njit(cache=True, nogil=True, inline="always")
def _doublings_needed(work, row, first, sub_columns, step, reach):
    """Return how often a step must double until every weight of a sub-block is within reach."""
    largest = np.float32(0)
    for column in range(first, first + sub_columns):
        size = abs(work[row, column])
        if size > largest:
            largest = size
    need = 0
    while largest > reach * step and need < MAX_DOUBLINGS:
        step *= np.float32(2)
        need += 1
    return need
