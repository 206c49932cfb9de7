"""Few frequency tables for many counts: cluster them by what an ideal coder with the table of a cluster would take.

`table_pool` does this for Huffman codes, whose sizes are whole bits. The bell-shaped distributions of codes with shared step
sizes differ in width by a little from column to column; what sets them apart is less than a bit a hundred symbols, so sizes are
counted in 1/256 bits here. They are integers below 2**53, which float64 holds exactly, so that every machine finds the same.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from lazyweights.codecs.log2 import coarse_log, coarse_logs, entropy_sizes
from lazyweights.codecs.table_pool import sum_rows

BIT = 256
"""Units of a bit."""

N_ROUNDS = 4

_ABSENT = 2 * BIT
"""What a symbol that a table lacks takes above one that it has seen once: it may be added."""


@njit(cache=True, nogil=True)
def _costs(totals: np.ndarray, logs: np.ndarray) -> np.ndarray:
    """Size of each symbol under the tables of some counts, float64 (256, n_tables), whole numbers."""
    out = np.empty((totals.shape[1], totals.shape[0]))
    for t in range(totals.shape[0]):
        of_total = coarse_log(totals[t].sum(), logs)
        for s in range(totals.shape[1]):
            n = totals[t, s]
            out[s, t] = of_total - coarse_log(n, logs) if n > 0 else of_total + _ABSENT
    return out


@njit(cache=True, nogil=True)
def _sizes(counts: np.ndarray, costs: np.ndarray, out: np.ndarray) -> None:
    """Fill `out`, float64 (n, n_tables), with ``counts @ costs``."""
    n_tables = costs.shape[1]
    for i in range(counts.shape[0]):
        for t in range(np.uint64(n_tables)):
            out[i, t] = 0.0
        for s in range(counts.shape[1]):
            count = np.float64(counts[i, s])
            if count > 0:
                for t in range(np.uint64(n_tables)):
                    out[i, t] += count * costs[s, t]


@njit(cache=True, nogil=True, fastmath={"reassoc"})  # the sums are exact whatever their order
def _improve(counts: np.ndarray, costs: np.ndarray, best: np.ndarray) -> None:
    """Lower `best`, float64 (n,), to what the rows of counts take with symbols of these costs, float64 (256,)."""
    for i in range(counts.shape[0]):
        size = 0.0
        for s in range(np.uint64(costs.size)):
            size += np.float64(counts[i, s]) * costs[s]
        best[i] = min(best[i], size)


def own_bits(counts: np.ndarray) -> int:
    """Return the order-0 entropies of the rows of counts together, in whole bits."""
    return int(entropy_sizes(counts, coarse_logs()).sum()) // BIT


def sizes(counts: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Return what each row of counts, int64 (n, 256), takes under the tables of `totals`, in 1/256 bits, float64."""
    out = np.empty((len(counts), len(totals)))
    _sizes(counts, _costs(totals, coarse_logs()), out)
    return out


def seed_tables(counts: np.ndarray, n_tables: int, cost_bits: int) -> np.ndarray:
    """Return tables to start `cluster` from: the sum of all counts, then rows that are farthest from those before.

    Parameters
    ----------
    counts : ndarray of int64, shape (n, 256)
        Rows without a symbol are allowed, but not only such.
    n_tables : int
        Tables at most.
    cost_bits : int
        What a table must save of the row that it is made of.

    Returns
    -------
    ndarray of int64, shape (1 .. n_tables, 256)
    """
    own = entropy_sizes(counts, coarse_logs())
    tables = [counts.sum(axis=0)]
    best = np.full(len(counts), np.inf)
    while True:
        _improve(counts, _costs(tables[-1][None], coarse_logs()).ravel(), best)
        k = int(np.argmax(best - own))
        if len(tables) == n_tables or best[k] - own[k] < cost_bits * BIT:
            return np.stack(tables)
        tables.append(counts[k])


def cluster(counts: np.ndarray, tables: np.ndarray) -> tuple[np.ndarray, int]:
    """Cluster rows of counts by Lloyd's algorithm.

    Parameters
    ----------
    counts : ndarray of int64, shape (n, 256)
    tables : ndarray of int64, shape (n_tables, 256)
        Of `seed_tables`.

    Returns
    -------
    labels : ndarray of int, shape (n,)
        Clusters are numbered by how many bits a symbol takes in them.
    n_bits : int
        What all rows take with the tables of their clusters.
    """
    for _ in range(N_ROUNDS):
        labels = sizes(counts, tables).argmin(axis=1)
        before, tables = tables, sum_rows(counts, labels, len(tables))
        kept = tables.any(axis=1)
        labels, tables = (np.cumsum(kept) - 1)[labels].clip(0), tables[kept]
        if np.array_equal(tables, before):
            break  # and so it would be in every further round
    own = entropy_sizes(tables, coarse_logs())
    order = np.argsort(own / tables.sum(axis=1), kind="stable")
    return np.argsort(order)[labels], int(own.sum()) // BIT
