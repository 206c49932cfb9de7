"""From counts to plans: field modes, table pools, and which tensors are worth coding at all."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from lazyweights.codecs import N_LANES
from lazyweights.codecs.log2 import coarse_logs, entropy_sizes, log2_all
from lazyweights.codecs.package_merge import code_lengths
from lazyweights.codecs.rans import normalized_freqs
from lazyweights.codecs.table_pool import MAX_TABLES, NO_OWNER, build_pool, coded_bits, effective_lengths, sum_rows
from lazyweights.container.coded_file import TableSet
from lazyweights.container.count_kernels import merge_contexts, total_counts, used_rows
from lazyweights.container.shared_planning import SharedCounted, plan_shared
from lazyweights.container.shared_rows import first_rows_share, may_share, trellis_indices
from lazyweights.container.stream_layout import (
    BY_LEVEL,
    BY_ZERO_AND_LEVEL,
    FORCED_ABS_127,
    FORCED_BITS,
    FORCED_MIN,
    FORCED_MIN_MAX,
    N_CELL_CONTEXTS,
    N_LEVELS,
    WINDOW_LOW_BITS,
    WINDOWED,
)
from lazyweights.container.tensor_coder import (
    HUFFMAN,
    LOW_CODED,
    LOW_RAW,
    RANS,
    SIGN_CLEAR,
    SIGN_SET,
    SIGN_STORED,
    Counts,
    HalfMode,
    TensorCoder,
    TensorPlan,
)

MAX_SET_CONTEXTS = 32768
"""Contexts that share one table set; more start a new set, which bounds the memory of planning (1 KiB a context)."""

MAX_SET_SHARED = 64
"""Tensors with shared rows that share one table set."""

MIN_SAVING = 1 / 512
"""Share of its bytes that coding must save, or the tensor stays verbatim."""

LOCKSTEP_PADDING = 3
"""Percent of the code bits that padding the lanes of a tile takes."""

UNIT_BITS = 8 * 14
"""An entry of the unit table and padding."""

LANE_END_BITS = 48
"""Left-over bits of a lane, which raw bits fill if there are enough."""

PLAN_BITS = 8 * 40
"""About what a plan takes in the compressed head."""

RANS_MIN_SAVING = 1 / 2048
"""Share of a tensor's bytes that rANS must save over a Huffman code."""

RANS_MIN_SAVING_HALVES = 1 / 128
"""The same for F16 and BF16: half of their bits are raw and cost no time, so the symbols decide how long decoding takes."""

RANS_STATE_BITS, RANS_TAIL_BITS = 9, 16
"""What the state of a lane costs beside the symbols, on average; and its bits that raw bits fill if there are enough."""

SPLIT_MAX_LOSS = 1 / 64
"""Bits a code that splitting off the low bits may cost. It brings about as much: codewords of whole bits waste less on symbols
of two codes, and half as many symbols are decoded."""

SAMPLE_BIAS_BITS = 1 / (2 * math.log(2))
"""Bits by which the entropy of a sample is too low for each symbol that occurs (the correction of Miller and Madow)."""

FEW_SYMBOLS = 2048
"""Contexts of cells with fewer symbols share their table with the context of the next level."""

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
    verbatim_bytes: int
    n_weights: int
    code_counts: np.ndarray
    forced_bits: int
    n_units: int
    low_bits: int


@dataclass(frozen=True)
class SpanStatistics:
    """What coding does to a tensor, known before anything is written.

    Attributes
    ----------
    entropy_millibits : int
        Order-0 entropy of the codes (of trellis codes: of their indices; for floats: exponent and raw bits), thousandths of a
        bit per weight.
    code_bits : int
        Bits that the codes take when coded, without scales, tables and index.
    coded_bits : int
        Bits of the tensor's payload, without index.
    """

    entropy_millibits: int
    code_bits: int
    coded_bits: int


def reduce_counts(
    index: int, coder: TensorCoder, counts: Counts, n_rows: int, n_units: int, lockstep: bool
) -> Counted:
    """Choose the field modes of a tensor and drop what is empty or not needed.

    Contexts are numbered side * 32 + context, then those of cells.
    """
    names = coder.side_names(coder.count_modes())
    modes = []
    keep = []
    n_blocks = n_rows * coder.n_blocks
    used_sides = used_rows(counts.sides.reshape(-1, 256))
    used_cells = used_rows(counts.cells)
    raw_bits = n_blocks * sum(n * bits for _, n, bits in coder.raw_planes)
    halves = [h.name for h in coder.layout.halves]
    for i, name in enumerate(names):
        if name.endswith(".low"):
            mode = _half_mode(total_counts(counts.sides[i], used_sides[32 * i : 32 * i + 32]))
            modes.append(mode)
            if mode.low == LOW_CODED:
                keep.append(i)
            else:
                raw_bits += n_blocks * (8 if mode.sign == SIGN_STORED else 7)
        else:
            keep.append(i)
    assert len(modes) == len(halves)
    code_counts = _code_counts(coder, counts, used_cells)
    planes = [counts.sides[i] for i in keep]
    cells = counts.cells
    if lockstep:
        cells = counts.cells.sum(axis=0, dtype=np.uint32)[None]
        used_cells = used_rows(cells)
        modes = [HalfMode(LOW_RAW, SIGN_STORED) for _ in halves]
        keep = [i for i, name in enumerate(names) if not name.endswith(".low")]
        planes = []
        raw_bits = n_blocks * (
            16 * len(halves) + sum(n * bits for _, n, bits in coder.raw_planes)
        ) + 8 * n_rows * sum(coder.byte_columns(b.per_block) for b in coder.layout.bytes_)
    forced_bits = 0 if lockstep else int(counts.forced[0]) * (FORCED_BITS[coder.layout.forced] - coder.layout.low_bits)
    if coder.layout.forced == WINDOWED and not lockstep:  # fewer raw bits, rather than more
        forced_bits = -int(counts.forced[0]) * coder.cell_codes * (coder.wide_bits - WINDOW_LOW_BITS)
    raw_bits += forced_bits
    if coder.layout.mode in (BY_LEVEL, BY_ZERO_AND_LEVEL) and not lockstep:
        cells = np.empty_like(counts.cells)
        used_cells = merge_contexts(counts.cells, used_cells, N_LEVELS, FEW_SYMBOLS, cells)
    used = [used_sides[32 * i : 32 * i + 32] if planes else np.zeros(32, np.bool_) for i in keep] + [used_cells]
    kept = [rows[mask] for rows, mask in zip([*planes, cells], used if planes else used[-1:], strict=True)]
    return Counted(
        index, coder, tuple(modes), tuple(counts.bases[i] for i in keep), np.flatnonzero(np.concatenate(used)),
        np.concatenate(kept), len(keep), raw_bits, n_rows * coder.row_bytes,
        min(counts.zstd_bytes or n_rows * coder.row_bytes, n_rows * coder.row_bytes), n_rows * coder.columns, code_counts,
        forced_bits, n_units, n_rows * coder.columns * coder.layout.low_bits,
    )


def _code_counts(coder: TensorCoder, counts: Counts, used: np.ndarray) -> np.ndarray:
    """Counts of the codes themselves (or of the coded part of wide codes), int64 (bytes, 256): one row but for I16."""
    layout = coder.layout
    if layout.low_bits:
        return counts.codes[None]
    if coder.bytes_per_code > 1:
        return counts.cells.reshape(-1, coder.bytes_per_code, 256).sum(axis=0, dtype=np.int64)
    plain = total_counts(counts.cells, used)
    if layout.forced == WINDOWED:  # of exponents: a windowed code is an exponent and three mantissa bits
        plain = total_counts(counts.cells[N_CELL_CONTEXTS:], used[N_CELL_CONTEXTS:])
        windowed = total_counts(counts.cells[:N_CELL_CONTEXTS], used[:N_CELL_CONTEXTS])
        if counts.forced[0]:
            np.add.at(plain, counts.bases[0] + (np.arange(256) >> 3), windowed)
        else:
            plain += windowed
    symbols = coder.code_counts(plain)
    n, negative = int(counts.forced[0]), int(counts.forced[1])
    if layout.forced in (FORCED_MIN, FORCED_MIN_MAX):
        symbols[0] += n
    if layout.forced == FORCED_MIN_MAX:
        symbols[(1 << layout.code_bits) - 1] += n
    if layout.forced == FORCED_ABS_127:
        symbols[127] += n - negative
        symbols[129] += negative
    return symbols[None]


def log2_q16(n: int) -> int:
    """Return ``floor(65536 * log2(n))`` for n below 2**63, in integers only, so that every machine finds the same.

    >>> log2_q16(1), log2_q16(2), log2_q16(3)
    (0, 65536, 103872)
    """
    return int(log2_all(np.array([n], np.int64))[0])


def entropy_bits_q16(counts: np.ndarray) -> int:
    """Return the order-0 entropy of all counted symbols together, in 1/65536 bits (a bound, rounded up)."""
    used = counts[counts > 0].astype(np.int64)
    total = int(used.sum())
    of_total = log2_q16(total) if total else 0
    return int((used * (of_total - log2_all(used))).sum())  # below 2**63 for fewer than 2**43 symbols


def is_worth_splitting(codes: np.ndarray, low_bits: int) -> bool:
    """Return whether codes with these counts, int64 (256,), are coded as small where their low bits are split off.

    Forced codes do not count: they are not coded, and the many of them would be the dearest to split.
    """
    n = int(codes.sum())
    high = codes.reshape(-1, 1 << low_bits).sum(axis=1)
    bias = int(SAMPLE_BIAS_BITS * (np.count_nonzero(codes) - np.count_nonzero(high)) * (1 << 16))
    loss = entropy_bits_q16(high) + (low_bits << 16) * n - entropy_bits_q16(codes) - bias
    return loss <= int(SPLIT_MAX_LOSS * (n << 16))


def _half_mode(low: np.ndarray) -> HalfMode:
    n = int(low.sum())
    # No code is shorter than the entropy; where that is too long already (rounding apart) there is no need to find one.
    if float(entropy_sizes(low[None], coarse_logs())[0]) < 256 * (LOW_CODED_BITS + 0.05) * n:
        coded_bits = 0 if np.count_nonzero(low) == 1 else int((low * code_lengths(low)).sum())
        if coded_bits < LOW_CODED_BITS * n:
            return HalfMode(LOW_CODED, SIGN_CLEAR)
    negative = int(low[128:].sum())
    sign = SIGN_CLEAR if negative == 0 else SIGN_SET if negative == n else SIGN_STORED
    return HalfMode(LOW_RAW, sign)


class Planner:
    """Makes table sets and plans from counted tensors, a batch at a time: the counts of a batch go when it is planned.

    Parameters
    ----------
    lockstep : bool
        Preset `unit`.

    Attributes
    ----------
    table_sets : list of TableSet
    plans : dict
        By `Counted.index`, of the tensors that coding shrinks.
    statistics : dict
        By `Counted.index`, of every counted tensor.
    """

    def __init__(self, lockstep: bool) -> None:
        self.table_sets: list[TableSet] = []
        self.plans: dict[int, TensorPlan] = {}
        self.statistics: dict[int, SpanStatistics] = {}
        self._lockstep = lockstep
        self._batch: list[Counted] = []
        self._n_contexts = 0
        self._shared: list[SharedCounted] = []

    def add(self, counted: Counted) -> None:
        """Add the next tensor; plan the batch before it if the two together are too large."""
        n = len(counted.contexts)
        if (len(self._batch) >= MAX_TABLES) if self._lockstep else (self._n_contexts + n > MAX_SET_CONTEXTS):
            self.finish()
        self._batch.append(counted)
        self._n_contexts += n

    def add_shared(self, counted: SharedCounted) -> None:
        """Add the next tensor whose rows share their scales; plan those before it if they are too many."""
        if len(self._shared) >= MAX_SET_SHARED:
            self._finish_shared()
        self._shared.append(counted)

    def finish(self) -> None:
        """Plan the tensors that were added since the last time."""
        batch, self._batch, self._n_contexts = self._batch, [], 0
        if batch:
            self._plan(batch)

    def finish_all(self) -> None:
        """Plan all tensors that are not planned yet."""
        self.finish()
        self._finish_shared()

    def _finish_shared(self) -> None:
        batch, self._shared = self._shared, []
        if not batch:
            return
        tables, plans = plan_shared(batch, len(self.table_sets))
        kept = False
        for c, planned in zip(batch, plans, strict=True):
            n_rows = c.source_bytes // c.coder.row_bytes
            state_bits = (RANS_STATE_BITS + RANS_TAIL_BITS) * min(N_LANES, -(-n_rows // (2 * c.n_units))) * c.n_units
            entropy = sum(entropy_bits_q16(row) for row in c.code_counts) >> 16
            n_counted = max(c.n_weights - c.counts.raw_rows * c.coder.columns, 1)
            raw_bits = 8 * c.counts.raw_rows * c.coder.row_bytes
            self.statistics[c.index] = SpanStatistics(
                1000 * entropy // n_counted, planned.code_bits, planned.code_bits + planned.side_bits + state_bits + raw_bits
            )
            bits = self.statistics[c.index].coded_bits + c.n_units * UNIT_BITS + PLAN_BITS
            if bits < 8 * c.source_bytes * (1 - MIN_SAVING):
                self.plans[c.index] = planned.plan
                kept = True
        if kept:
            self.table_sets.append(tables)

    def _plan(self, batch: list[Counted]) -> None:
        lockstep = self._lockstep
        lengths, tables = _tables(batch, lockstep)
        freqs = np.zeros(lengths.shape, np.uint16)
        by_rans = set() if lockstep else _choose_rans(batch, lengths, tables, freqs)
        effective = effective_lengths(lengths)
        used = np.zeros(len(lengths), np.bool_)
        kept: list[tuple[Counted, np.ndarray]] = []
        start = 0
        for c in batch:
            mine = tables[start : start + len(c.contexts)]
            start += len(c.contexts)
            found = _statistics(c, effective, mine, freqs if c.index in by_rans else None)
            self.statistics[c.index] = found
            bits = found.coded_bits + _overhead_bits(c, c.index in by_rans)
            if lockstep:
                bits += found.code_bits * LOCKSTEP_PADDING // 100
            if bits < 8 * c.verbatim_bytes * (1 - MIN_SAVING):
                kept.append((c, mine))
                used[mine] = True
        renumber = np.cumsum(used) - 1
        for c, mine in kept:
            numbers = np.zeros(32 * c.n_sides + 2 * N_CELL_CONTEXTS, np.uint8)
            numbers[c.contexts] = renumber[mine]
            _fill_unused(numbers[: 32 * c.n_sides], c.contexts[c.contexts < 32 * c.n_sides])
            _fill_unused(numbers[32 * c.n_sides :], c.contexts[c.contexts >= 32 * c.n_sides] - 32 * c.n_sides)
            self.plans[c.index] = TensorPlan(
                c.modes, c.bases, numbers[: 32 * c.n_sides].reshape(-1, 32), numbers[32 * c.n_sides :],
                len(self.table_sets), RANS if c.index in by_rans else HUFFMAN, form=c.coder.form,
            )
        if kept:
            self.table_sets.append(TableSet(lengths[used], freqs[used]))


def _overhead_bits(c: Counted, by_rans: bool) -> int:
    """Bits that coding a tensor costs beside its payload: unit table, padding, states, lane ends without raw bits, plan."""
    n_rows = c.source_bytes // c.coder.row_bytes
    n_lanes = min(N_LANES, -(-n_rows // (2 * c.n_units)))
    room = (LANE_END_BITS + RANS_TAIL_BITS * by_rans) * n_lanes
    states = RANS_STATE_BITS * n_lanes * by_rans
    return c.n_units * (UNIT_BITS + states + max(room - c.raw_bits // c.n_units, 0)) + PLAN_BITS


def _tables(batch: list[Counted], lockstep: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return (lengths, table of each context of the batch)."""
    if lockstep:  # one table per tensor, its own
        return np.stack([code_lengths(c.counts[0]) for c in batch]), np.arange(len(batch))
    counts = np.concatenate([c.counts for c in batch])
    groups = np.concatenate([c.contexts + 4096 * c.coder.type.type_id + (c.n_sides << 20) for c in batch])
    owners = np.concatenate([np.where(c.contexts >= 32 * c.n_sides, i, NO_OWNER) for i, c in enumerate(batch)])
    return build_pool(counts, groups, owners)


def _choose_rans(batch: list[Counted], lengths: np.ndarray, tables: np.ndarray, freqs: np.ndarray) -> set[int]:
    """Return the tensors (`Counted.index`) whose cells rANS codes enough smaller, and fill the frequencies they need.

    rANS decodes at about half the speed of a Huffman code. Types whose contexts come from scales keep their Huffman codes
    (`docs/coders.md`).
    """
    chosen: set[int] = set()
    sums = np.zeros((len(lengths), 256), np.int64)
    start = 0
    for c in batch:
        if c.coder.layout.prefers_size:
            cells = c.contexts >= 32 * c.n_sides
            sums += sum_rows(c.counts[cells], tables[start : start + len(c.contexts)][cells], len(lengths))
        start += len(c.contexts)
    candidates = np.zeros_like(freqs)
    for t in np.flatnonzero(sums.any(axis=1)):
        candidates[t] = normalized_freqs(sums[t])
    start = 0
    for c in batch:
        mine = tables[start : start + len(c.contexts)]
        start += len(c.contexts)
        cells = c.contexts >= 32 * c.n_sides
        if not c.coder.layout.prefers_size or not cells.any():
            continue
        huffman = int(coded_bits(c.counts[cells], mine[cells], effective_lengths(lengths)).sum()) + _overhead_bits(c, False)
        bits = rans_bits(c.counts[cells], mine[cells], candidates) + _overhead_bits(c, True)
        least = RANS_MIN_SAVING_HALVES if c.coder.layout.codes == "words" else RANS_MIN_SAVING
        if huffman - bits > least * 8 * c.source_bytes:
            chosen.add(c.index)
            freqs[mine[cells]] = candidates[mine[cells]]
    return chosen


def rans_bits(counts: np.ndarray, tables: np.ndarray, freqs: np.ndarray) -> int:
    """Return the bits that rANS takes for some contexts, without states; exact to 1/65536 bit a symbol, rounded up."""
    costs = np.where(freqs > 0, (12 << 16) - _freq_logs()[freqs], 0)
    return int(coded_bits(counts, tables, costs).sum()) + 65535 >> 16


@functools.cache
def _freq_logs() -> np.ndarray:
    """Logarithms of the frequencies 0 (not to be used) .. 4096 in 1/65536, int64 (4097,)."""
    return np.concatenate([np.zeros(1, np.int64), log2_all(np.arange(1, 4097))])


def _statistics(
    c: Counted, lengths: np.ndarray, tables: np.ndarray, freqs: np.ndarray | None
) -> SpanStatistics:
    bits = coded_bits(c.counts, tables, lengths)
    cells = c.contexts >= 32 * c.n_sides
    if freqs is not None:
        bits[cells] = 0
        bits[np.flatnonzero(cells)[0]] = rans_bits(c.counts[cells], tables[cells], freqs)
    wide = sum(n * b for name, n, b in c.coder.raw_planes if name in ("low", "sign_mantissa"))
    wide_bits = wide * (c.source_bytes // c.coder.row_bytes) * c.coder.n_blocks
    entropy = (sum(entropy_bits_q16(row) for row in c.code_counts) >> 16) + wide_bits
    return SpanStatistics(
        1000 * entropy // c.n_weights, int(bits[cells].sum()) + c.forced_bits + wide_bits + c.low_bits,
        int(bits.sum()) + c.raw_bits + c.low_bits,
    )


def _fill_unused(numbers: np.ndarray, used: np.ndarray) -> None:
    """Give contexts that do not occur the number of the used one before them (or the first): runs compress well."""
    if used.size:
        last = np.full(len(numbers), used[0], np.int64)
        last[used] = used
        numbers[:] = numbers[np.maximum.accumulate(last)]


def sample_statistics(coder: TensorCoder, packed: np.ndarray, n_rows: int) -> SpanStatistics:
    """Return the entropy of the codes in the first of `n_rows` packed rows, uint8 (rows, row_bytes); sizes are 0 (not known)."""
    counts = coder.symbol_counts(packed)
    if may_share(coder, n_rows) and coder.layout.may_have_trellis:
        arrays = coder.split(packed)
        indices = trellis_indices(coder, arrays)
        if indices is not None and first_rows_share(coder, arrays):
            counts = np.bincount(indices.ravel(), minlength=256)[None]
    n_weights = packed.shape[0] * coder.columns
    wide = sum(n * b for name, n, b in coder.raw_planes if name in ("low", "sign_mantissa"))
    entropy = (sum(entropy_bits_q16(row) for row in counts) >> 16) + wide * packed.shape[0] * coder.n_blocks
    return SpanStatistics(1000 * entropy // n_weights, 0, 0)
