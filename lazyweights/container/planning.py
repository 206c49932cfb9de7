"""From counts to plans: field modes, table pools, and which tensors are worth coding at all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lazyweights.codecs.package_merge import code_lengths
from lazyweights.codecs.table_pool import MAX_TABLES, build_pool
from lazyweights.container.stream_layout import N_CELL_CONTEXTS
from lazyweights.container.tensor_coder import (
    LOW_CODED,
    LOW_RAW,
    SIGN_CLEAR,
    SIGN_SET,
    SIGN_STORED,
    Counts,
    HalfMode,
    TensorCoder,
    TensorPlan,
)

MAX_SET_CONTEXTS = 1 << 16
"""Contexts that share one table set; more start a new set, which bounds the memory of planning (64 MiB)."""

MIN_SAVING = 1 / 512
"""Share of its bytes that coding must save, or the tensor stays verbatim."""

LOW_CODED_BITS = 6.5
"""The low bytes of a half field are coded where that takes fewer bits than this on average."""


@dataclass
class Counted:
    """A tensor with its counts, reduced to the contexts that occur."""

    index: int
    coder: TensorCoder
    modes: tuple[HalfMode, ...]
    bases: tuple[int, ...]
    contexts: np.ndarray
    counts: np.ndarray
    n_sides: int
    raw_bits: int
    source_bytes: int


def reduce_counts(index: int, coder: TensorCoder, counts: Counts, n_rows: int, lockstep: bool) -> Counted:
    """Choose the field modes of a tensor and drop what is empty or not needed.

    Contexts are numbered side * 32 + context, then those of cells.
    """
    names = coder.side_names(coder.count_modes())
    modes = []
    keep = []
    n_blocks = n_rows * coder.n_blocks
    raw_bits = n_blocks * sum(n * bits for _, n, bits in coder.raw_planes)
    halves = [h.name for h in coder.layout.halves]
    for i, name in enumerate(names):
        if name.endswith(".low"):
            low = counts.sides[i].astype(np.int64).sum(axis=0)
            mode = _half_mode(low)
            modes.append(mode)
            if mode.low == LOW_CODED:
                keep.append(i)
            else:
                raw_bits += n_blocks * (8 if mode.sign == SIGN_STORED else 7)
        else:
            keep.append(i)
    assert len(modes) == len(halves)
    sides = counts.sides[keep].reshape(-1, 256)
    cells = counts.cells
    if lockstep:
        cells = np.zeros_like(cells)
        cells[0] = counts.cells.sum(axis=0)
        modes = [HalfMode(LOW_RAW, SIGN_STORED) for _ in halves]
        keep = [i for i, name in enumerate(names) if not name.endswith(".low")]
        sides = np.zeros((32 * len(keep), 256), np.uint32)
        raw_bits = n_blocks * (
            16 * len(halves) + 8 * sum(b.per_block for b in coder.layout.bytes_)
            + sum(n * bits for _, n, bits in coder.raw_planes)
        )
    elif coder.layout.forced:
        plain = counts.cells[N_CELL_CONTEXTS:].sum(dtype=np.int64) // max(coder.cell_symbols, 1)
        raw_bits += (n_blocks - int(plain)) * (5, 10, 6)[coder.layout.forced - 1]
    everything = np.concatenate([sides, cells])
    used = np.flatnonzero(everything.any(axis=1))
    return Counted(
        index, coder, tuple(modes), tuple(counts.bases[i] for i in keep), used, everything[used], len(keep), raw_bits,
        n_rows * coder.row_bytes,
    )


def _half_mode(low: np.ndarray) -> HalfMode:
    n = int(low.sum())
    lengths = code_lengths(low).astype(np.int64)
    coded_bits = 0 if (low > 0).sum() == 1 else int((low * lengths).sum())
    if coded_bits < LOW_CODED_BITS * n:
        return HalfMode(LOW_CODED, SIGN_CLEAR)
    negative = int(low[128:].sum())
    sign = SIGN_CLEAR if negative == 0 else SIGN_SET if negative == n else SIGN_STORED
    return HalfMode(LOW_RAW, sign)


def make_plans(counted: list[Counted], lockstep: bool) -> tuple[list[np.ndarray], dict[int, TensorPlan]]:
    """Build the table sets and the plan of each tensor that coding shrinks.

    Returns
    -------
    table_sets : list of ndarray of uint8, shape (n_tables, 256), code lengths
    plans : by `Counted.index`
    """
    table_sets: list[np.ndarray] = []
    plans: dict[int, TensorPlan] = {}
    for batch in _batches(counted, lockstep):
        lengths, tables = _tables(batch, lockstep)
        used = np.zeros(len(lengths), np.bool_)
        kept: list[tuple[Counted, np.ndarray]] = []
        start = 0
        for c in batch:
            mine = tables[start : start + len(c.contexts)]
            start += len(c.contexts)
            if _coded_bits(c, lengths, mine) < 8 * c.source_bytes * (1 - MIN_SAVING):
                kept.append((c, mine))
                used[mine] = True
        renumber = np.cumsum(used) - 1
        for c, mine in kept:
            numbers = np.zeros(32 * c.n_sides + 2 * N_CELL_CONTEXTS, np.uint8)
            numbers[c.contexts] = renumber[mine]
            _fill_unused(numbers, c.contexts)
            plans[c.index] = TensorPlan(
                c.modes, c.bases, numbers[: 32 * c.n_sides].reshape(-1, 32), numbers[32 * c.n_sides :], len(table_sets)
            )
        if kept:
            table_sets.append(lengths[used])
    return table_sets, plans


def _batches(counted: list[Counted], lockstep: bool) -> list[list[Counted]]:
    batches: list[list[Counted]] = [[]]
    n = 0
    for c in counted:
        full = len(batches[-1]) >= MAX_TABLES if lockstep else n + len(c.contexts) > MAX_SET_CONTEXTS
        if batches[-1] and full:
            batches.append([])
            n = 0
        batches[-1].append(c)
        n += len(c.contexts)
    return batches if batches[-1] else []


def _tables(batch: list[Counted], lockstep: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return (lengths, table of each context of the batch)."""
    if lockstep:  # one table per tensor, its own
        return np.stack([code_lengths(c.counts[0]) for c in batch]), np.arange(len(batch))
    counts = np.concatenate([c.counts for c in batch])
    groups = np.concatenate([c.contexts + 4096 * c.coder.type.type_id + (c.n_sides << 20) for c in batch])
    return build_pool(counts, groups)


def _coded_bits(c: Counted, lengths: np.ndarray, tables: np.ndarray) -> int:
    used = lengths[tables].astype(np.int64)
    used[(used > 0).sum(axis=1) == 1] = 0
    return int((used * c.counts).sum()) + c.raw_bits


def _fill_unused(numbers: np.ndarray, used: np.ndarray) -> None:
    """Give contexts that do not occur the number of the used one before them: runs compress well."""
    last = np.zeros(len(numbers), np.int64)
    last[used] = used
    numbers[:] = numbers[np.maximum.accumulate(last)]
