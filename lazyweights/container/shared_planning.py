"""From counts to plans of tensors whose rows share their scales: one pool of frequency tables for all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from lazyweights.codecs.rans import normalized_freqs
from lazyweights.codecs.rans_pool import BIT, cluster, seed_tables, sizes
from lazyweights.codecs.table_pool import MAX_TABLES, sum_rows
from lazyweights.container.coded_file import TableSet
from lazyweights.container.tensor_coder import N_SIDE_CONTEXTS, SHARED, SharedCounts, TensorCoder, TensorPlan

TABLES_OF_ONE_TENSOR = 16
"""Tables that the codes of one tensor use at most: a decoder is fast while they fit its second cache, 16 KiB each."""

TABLE_COST_BITS = 800
"""About what the frequencies of a table take in the file."""

MERGE_LOSS_BITS = 200
"""What a tensor must lose by the table of others to be the seed of a further one, which serves several tensors then."""


@dataclass
class SharedCounted:
    """A tensor whose rows share their scales, with the counts of the tables that it would have of its own.

    Attributes
    ----------
    table_counts : ndarray of int64, shape (n, 256)
        Of the side planes, the row symbols, and the clusters of cell contexts.
    clusters : ndarray of uint8, shape (512,)
        The cluster of each cell context.
    code_counts : ndarray of int64, shape (1, 256)
    """

    index: int
    coder: TensorCoder
    counts: SharedCounts
    table_counts: np.ndarray
    clusters: np.ndarray
    code_counts: np.ndarray
    source_bytes: int
    n_weights: int
    n_units: int

    @property
    def n_fields(self) -> int:
        """Side planes and row symbols: tables in front of those of the cells."""
        return len(self.counts.sides) - 1


def reduce_shared_counts(index: int, coder: TensorCoder, counts: SharedCounts, n_rows: int, n_units: int) -> SharedCounted:
    """Cluster the contexts of a tensor's codes; what is kept of the counts does not grow with their number."""
    cells = counts.cells.astype(np.int64)
    clusters, _ = cluster(cells, seed_tables(cells, TABLES_OF_ONE_TENSOR, TABLE_COST_BITS))
    used = np.flatnonzero(cells.any(axis=1))
    last = np.full(len(cells), used[0] if used.size else 0)
    last[used] = used
    last = np.maximum.accumulate(last)
    clusters = clusters[last]  # contexts that do not occur are like the one before: runs compress well
    symbols = cells.sum(axis=0) + counts.sides[-1]
    table_counts = np.concatenate([counts.sides[:-1], sum_rows(cells, clusters, int(clusters.max()) + 1)])
    kept = replace(counts, cells=counts.cells[:0])
    return SharedCounted(
        index, coder, kept, table_counts, clusters.astype(np.uint8), coder.code_counts(symbols)[None],
        n_rows * coder.row_bytes, n_rows * coder.columns, n_units,
    )


@dataclass(frozen=True)
class SharedPlan:
    """A plan, and the bits that codes and side values take by it, without states."""

    plan: TensorPlan
    code_bits: int
    side_bits: int


def plan_shared(batch: list[SharedCounted], table_set: int) -> tuple[TableSet, list[SharedPlan]]:
    """Return a table set, to be number `table_set` of the file, and the plans of some tensors."""
    counts = np.concatenate([c.table_counts for c in batch])
    labels, _ = cluster(counts, seed_tables(counts, MAX_TABLES, MERGE_LOSS_BITS))
    totals = sum_rows(counts, labels, int(labels.max()) + 1)
    freqs = np.stack([normalized_freqs(row) for row in totals])
    lengths = np.zeros(freqs.shape, np.uint8)
    lengths[:, 0] = 1  # no symbol has a codeword of a table that is for rANS only
    plans = []
    start = 0
    for c in batch:
        mine = labels[start : start + len(c.table_counts)]
        bits = sizes(c.table_counts, freqs.astype(np.int64)[mine])[np.arange(len(mine)), np.arange(len(mine))]
        start += len(c.table_counts)
        modes = c.coder.shared_modes()
        n_sides = c.n_fields - 1
        plan = TensorPlan(
            modes, (0,) * n_sides, np.repeat(mine[:n_sides, None], N_SIDE_CONTEXTS, axis=1).astype(np.uint8),
            mine[c.n_fields :][c.clusters].astype(np.uint8), table_set, SHARED,
            replace(c.counts.shared, row_table=int(mine[n_sides])),
        )
        plans.append(SharedPlan(plan, int(bits[c.n_fields :].sum()) // BIT, int(bits[: c.n_fields].sum()) // BIT))
    return TableSet(lengths, freqs), plans
