"""Few code tables for many contexts: cluster their counts by exact coded size.

Every context of every tensor has its own counts of 256 symbols. A table for each would cost more than it saves, so
contexts share a *pool*. The clustering is Lloyd's algorithm with the coded size as distance: assign each context to the
table that codes it in the fewest bits, rebuild each table from its contexts' counts by package-merge, repeat.

Everything is exact in integers, so the same counts give the same pool on every machine: sizes are sums below 2**53, which
float64 holds exactly whatever the order of summation, and those of small contexts are below 2**24, which float32 holds.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from lazyweights.codecs.package_merge import code_lengths
from lazyweights.codecs.size_kernels import all_sizes, smallest_sizes

MAX_TABLES = 255
"""Tables are numbered by bytes; one number stays free for the null table."""

TABLE_COST_BITS = 800
"""What a table must save to be kept: about what its lengths take in the file."""

TABLES_OF_ONE_TENSOR = 10
"""Tables that the cells of one tensor use at most: a decoder is fast while they fit its first cache, 4 KiB each."""

NO_OWNER = -1
"""Owner of a context that may use any table."""

MAX_CLUSTERED = 8192
"""Contexts that take part in the search; with more, the largest ones."""

_ABSENT = 64  # stand-in length of a symbol that a table cannot code


def _costs(lengths: np.ndarray) -> np.ndarray:
    """Bits of each symbol in each table, float64 (n_tables, 256)."""
    return np.where(lengths == 0, _ABSENT, effective_lengths(lengths)).astype(np.float64)


def _sizes(counts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Coded bits of each context under each table, exact, float64 (n_contexts, n_tables)."""
    return all_sizes(counts, _costs(lengths))


def _reassign(counts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Give each context the table that codes it in the fewest bits, the first of equal ones, and rebuild the tables.

    Returns
    -------
    (lengths, table_of) : as of `build_pool`
    """
    table_of, totals = smallest_sizes(counts, _costs(lengths))
    used = totals.any(axis=1)
    return np.stack([code_lengths(row) for row in totals[used]]), (np.cumsum(used) - 1)[table_of]


def sum_rows(counts: np.ndarray, labels: np.ndarray, n_labels: int) -> np.ndarray:
    """Return the summed counts of each label 0 .. n_labels - 1, int64 (n_labels, 256)."""
    out = np.zeros((n_labels, counts.shape[1]), np.int64)
    _add_rows(counts, labels.astype(np.int64), out)
    return out


@njit(cache=True, nogil=True)
def _add_rows(counts: np.ndarray, labels: np.ndarray, out: np.ndarray) -> None:
    for i in range(counts.shape[0]):
        row = labels[i]
        for s in range(counts.shape[1]):
            out[row, s] += counts[i, s]


@njit(cache=True, nogil=True)
def _describe(counts: np.ndarray) -> tuple:
    """Return the sum of each row of counts and how many of them are not 0, both int64 (n_contexts,)."""
    totals = np.empty(counts.shape[0], np.int64)
    n_symbols = np.empty(counts.shape[0], np.int64)
    for i in range(counts.shape[0]):
        total = np.int64(0)
        n = np.int64(0)
        for s in range(np.uint64(counts.shape[1])):
            total += np.int64(counts[i, s])
            n += np.int64(counts[i, s] > 0)
        totals[i] = total
        n_symbols[i] = n
    return totals, n_symbols


def _rebuild(counts: np.ndarray, table_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the lengths of the used tables and each context's new table number."""
    _, renumbered = np.unique(table_of, return_inverse=True)
    lengths = np.stack([code_lengths(row) for row in sum_rows(counts, renumbered, int(renumbered.max()) + 1)])
    return lengths, renumbered


def effective_lengths(lengths: np.ndarray) -> np.ndarray:
    """Return what codewords really take, int64 (n_tables, 256): 0 bits in a one-symbol table."""
    out = lengths.astype(np.int64)
    out[(out > 0).sum(axis=1) == 1] = 0
    return out


@njit(cache=True, nogil=True)
def coded_bits(counts: np.ndarray, table_of: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the coded bits of each context with its table, int64 (n_contexts,)."""
    out = np.empty(counts.shape[0], np.int64)
    for i in range(counts.shape[0]):
        row = lengths[table_of[i]]
        bits = np.int64(0)
        for s in range(np.uint64(counts.shape[1])):
            bits += np.int64(counts[i, s]) * row[s]
        out[i] = bits
    return out


def _seeds(group_counts: np.ndarray, n_tables: int) -> np.ndarray:
    """Return lengths of up to `n_tables` tables: farthest first by bits lost against each group's own table."""
    own = np.stack([code_lengths(c) for c in group_counts])
    costs = _costs(own)
    own_bits = coded_bits(group_counts, np.arange(len(own)), effective_lengths(own))
    total = code_lengths(group_counts.sum(axis=0))[None]
    seeds = [total[0]]
    best = _total_costs(group_counts, _costs(total)[0].astype(np.int64))
    while len(seeds) < n_tables:
        loss = best - own_bits
        k = int(np.argmax(loss))
        if loss[k] < TABLE_COST_BITS:
            break
        seeds.append(own[k])
        best = np.minimum(best, _total_costs(group_counts, costs[k].astype(np.int64)))
    return np.stack(seeds)


@njit(cache=True, nogil=True)
def _total_costs(counts: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Return the sum of each row's counts times the costs of the symbols, int64 (n_rows,)."""
    out = np.empty(counts.shape[0], np.int64)
    for i in range(counts.shape[0]):
        bits = np.int64(0)
        for s in range(np.uint64(costs.size)):
            bits += counts[i, s] * costs[s]
        out[i] = bits
    return out


def _constant_tables(counts: np.ndarray, n_symbols: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return a one-symbol table for each symbol whose constant contexts would gain from it, uint8 (n, 256).

    `n_symbols` says how many symbols each context has; constant contexts have one. A quantizer that shares its step sizes
    makes such contexts, a different constant in each tensor; the sums of groups do not show them.
    """
    constant = np.flatnonzero(n_symbols == 1)
    if not constant.size:
        return np.zeros((0, counts.shape[1]), np.uint8)
    symbols = counts[constant].argmax(axis=1)
    lost = np.bincount(symbols, _sizes(counts[constant], lengths).min(axis=1), minlength=counts.shape[1])
    order = np.argsort(-lost, kind="stable")
    wanted = [s for s in order[: MAX_TABLES - len(lengths)].tolist() if lost[s] > TABLE_COST_BITS]
    tables = np.zeros((len(wanted), counts.shape[1]), np.uint8)
    tables[np.arange(len(wanted)), wanted] = 1
    return tables


def build_pool(
    counts: np.ndarray, groups: np.ndarray, owners: np.ndarray | None = None, n_tables: int = 96, n_rounds: int = 3
) -> tuple[np.ndarray, np.ndarray]:
    """Cluster contexts into tables.

    Parameters
    ----------
    counts : ndarray of uint32, shape (n_contexts, 256)
        Symbol counts; every context has at least one symbol.
    groups : ndarray of int, shape (n_contexts,)
        Contexts that mean the same in different tensors share a group; the search starts from the groups' sums.
    owners : ndarray of int, shape (n_contexts,), optional
        Contexts of one owner >= 0 (the cells of a tensor) share at most TABLES_OF_ONE_TENSOR tables; NO_OWNER: no limit.
    n_tables : int
        Tables the search starts from, at most MAX_TABLES; tables for constant contexts come on top.
    n_rounds : int
        Rounds of assignment and rebuilding.

    Returns
    -------
    lengths : ndarray of uint8, shape (n_used, 256)
    table_of : ndarray of int, shape (n_contexts,)
        Each symbol that a context has, has a codeword in its table.
    """
    _, group_of = np.unique(groups, return_inverse=True)
    group_counts = sum_rows(counts, group_of, int(group_of.max()) + 1)
    lengths = _seeds(group_counts, n_tables)
    totals, n_symbols = _describe(counts)
    lengths = np.concatenate([lengths, _constant_tables(counts, n_symbols, lengths)])
    # The largest contexts decide what the tables look like; all of them are assigned in the end.
    largest = counts
    if len(counts) > MAX_CLUSTERED:
        order = np.argsort(-totals, kind="stable")
        chosen = np.sort(order[:MAX_CLUSTERED])
        # Groups of small contexts, such as those of many short tensors, take part as their sums.
        others = np.setdiff1d(np.arange(len(group_counts)), group_of[chosen])
        largest = np.concatenate([counts[chosen], np.minimum(group_counts[others], (1 << 32) - 1).astype(np.uint32)])
    for _ in range(n_rounds):
        lengths, table_of = _reassign(largest, lengths)
    lengths, table_of = _drop_small(largest, lengths, table_of)
    if largest is not counts:
        for _ in range(2):
            lengths, table_of = _reassign(counts, lengths)
    if owners is not None:
        for _ in range(2):
            lengths, table_of = _rebuild(counts, _limit_tables(counts, lengths, owners))
    return lengths, table_of


def _limit_tables(counts: np.ndarray, lengths: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """Return the best table of each context such that no owner has more than TABLES_OF_ONE_TENSOR of them.

    An owner gives up its tables one by one, the one first that costs it the least.
    """
    sizes = _sizes(counts, lengths)
    table_of = sizes.argmin(axis=1)
    order = np.argsort(owners, kind="stable")
    bounds = np.flatnonzero(np.diff(owners[order], prepend=NO_OWNER - 1, append=owners.max(initial=0) + 1))
    for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        if owners[order[first]] != NO_OWNER:
            _limit_owner(sizes, order[first:last], table_of, TABLES_OF_ONE_TENSOR)
    return table_of


@njit(cache=True, nogil=True)
def _limit_owner(sizes: np.ndarray, mine: np.ndarray, table_of: np.ndarray, limit: int) -> None:
    """Reassign the contexts `mine` so that they use at most `limit` tables; `sizes` float64 (n_contexts, n_tables)."""
    used = np.unique(table_of[mine])
    best = np.full(mine.size, -1)
    second = np.full(mine.size, -1)
    n_used = used.size
    while True:
        lost = np.zeros(used.size)
        for i in range(mine.size):
            row = mine[i]
            if best[i] < 0 or second[i] < 0 or used[best[i]] < 0 or used[second[i]] < 0:
                best[i] = second[i] = -1
                for k in range(used.size):
                    if used[k] < 0:
                        continue
                    if best[i] < 0 or sizes[row, used[k]] < sizes[row, used[best[i]]]:
                        best[i], second[i] = k, best[i]
                    elif second[i] < 0 or sizes[row, used[k]] < sizes[row, used[second[i]]]:
                        second[i] = k
            if second[i] >= 0:
                lost[best[i]] += sizes[row, used[second[i]]] - sizes[row, used[best[i]]]
        if n_used <= limit:
            break
        for k in range(used.size):
            if used[k] < 0:
                lost[k] = np.inf
        used[lost.argmin()] = -1
        n_used -= 1
    for i in range(mine.size):
        table_of[mine[i]] = used[best[i]]


def _drop_small(counts: np.ndarray, lengths: np.ndarray, table_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Drop the tables that save less than they cost, the least useful first."""
    while len(lengths) > 1:
        sizes = _sizes(counts, lengths)
        rows = np.arange(len(counts))
        own = sizes[rows, table_of].copy()
        sizes[rows, table_of] = np.inf
        saved = np.bincount(table_of, sizes.min(axis=1) - own, minlength=len(lengths))
        useless = np.flatnonzero(saved < TABLE_COST_BITS)
        if useless.size == 0:
            break
        # Dropping many at once could drop two that stand in for each other: at most a quarter, least useful first.
        order = useless[np.argsort(saved[useless], kind="stable")]
        gone = order[: max(1, useless.size // 4)]
        sizes[:, gone] = np.inf
        moved = np.isin(table_of, gone)
        table_of = np.where(moved, sizes.argmin(axis=1), table_of)
        lengths, table_of = _rebuild(counts, table_of)
    return lengths, table_of
