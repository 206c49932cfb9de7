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

from lazyweights.codecs.log2 import coarse_logs, entropy_sizes
from lazyweights.codecs.package_merge import code_lengths
from lazyweights.codecs.size_kernels import all_sizes, smallest_sizes

MAX_TABLES = 255
"""Tables are numbered by bytes; one number stays free for the null table."""

TABLE_COST_BITS = 800
"""What a table must save to be kept: about what its lengths take in the file."""

TABLES_OF_ONE_TENSOR = 10
"""Tables that the cells of one tensor use at most: a decoder is fast while they fit its first cache, 4 KiB each."""

TABLE_WORTH = 1 / 8192
"""Share of a tensor's bits that each of its tables must save: with half as many tables a decoder is a tenth faster."""

NO_OWNER = -1
"""Owner of a context that may use any table."""

MAX_CLUSTERED = 1024
"""Contexts that take part in the search; with more, the largest ones."""

MAX_DECIDING = 64
"""Contexts of one owner, the largest ones, that decide which tables it uses."""

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
    totals = sum_rows(counts, table_of, int(table_of.max()) + 1)
    used = totals.any(axis=1)
    return np.stack([code_lengths(row) for row in totals[used]]), (np.cumsum(used) - 1)[table_of]


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
    """Return lengths of up to `n_tables` tables: farthest first by bits lost against each group's own table.

    A group's own table is made when the group may be the farthest, that is where it is by the entropy of its counts.
    """
    own_bits = np.floor(entropy_sizes(group_counts, coarse_logs()) / 256).astype(np.int64)
    own: dict[int, np.ndarray] = {}
    seeds = [code_lengths(group_counts.sum(axis=0))]
    best = _total_costs(group_counts, _costs(seeds[0][None])[0].astype(np.int64))
    while len(seeds) < n_tables:
        loss = best - own_bits
        k = int(np.argmax(loss))
        if loss[k] < TABLE_COST_BITS:
            break
        if k not in own:
            own[k] = code_lengths(group_counts[k])
            own_bits[k] = int((group_counts[k] * effective_lengths(own[k][None])[0]).sum())
            continue
        seeds.append(own[k])
        best = np.minimum(best, _total_costs(group_counts, _costs(own[k][None])[0].astype(np.int64)))
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
    counts: np.ndarray, groups: np.ndarray, owners: np.ndarray | None = None, n_tables: int = 96, n_rounds: int = 1
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
    if owners is not None and (owners != NO_OWNER).any():
        return _assign(counts, totals, owners, lengths)
    if largest is not counts:
        for _ in range(2):
            lengths, table_of = _reassign(counts, lengths)
    return lengths, table_of


def _assign(counts: np.ndarray, totals: np.ndarray, owners: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Give each context a table such that no owner has more than TABLES_OF_ONE_TENSOR of them, each worth its place, and
    rebuild the tables.

    Parameters
    ----------
    totals : int64 (n_contexts,), symbols of each context
    counts, owners : of `build_pool`
    lengths : uint8 (n_tables, 256)

    Returns
    -------
    (lengths, table_of) : as of `build_pool`
    """
    free = np.flatnonzero(owners == NO_OWNER)
    owned = np.flatnonzero(owners != NO_OWNER)
    names, owner_of = np.unique(owners[owned], return_inverse=True)
    owned = owned[np.lexsort((-totals[owned], owner_of))]  # the largest contexts of each owner first
    owner_of = np.sort(owner_of)
    first = np.searchsorted(owner_of, np.arange(len(names)))
    deciding = np.arange(len(owned)) - first[owner_of] < MAX_DECIDING
    sizes = _sizes(counts[owned[deciding]], lengths)
    best = sizes.argmin(axis=1)
    allowed = np.zeros((len(names), TABLES_OF_ONE_TENSOR), np.int64)
    bounds = np.concatenate([np.searchsorted(owner_of[deciding], np.arange(len(names))), [len(best)]])
    for k, (start, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        worth = TABLE_WORTH * float(sizes[start:end].min(axis=1).sum())
        _give_up(sizes[start:end], best[start:end], TABLES_OF_ONE_TENSOR, worth)
        mine = np.unique(best[start:end])
        allowed[k] = mine[np.arange(TABLES_OF_ONE_TENSOR) % mine.size]
    free_counts = counts[free]
    table_of = np.empty(len(counts), np.int64)
    lengths = lengths.copy()
    for _ in range(2):
        costs = _costs(lengths)
        table_of[free], sums = smallest_sizes(free_counts, costs)
        _choose_allowed(counts, totals, costs.astype(np.float32), owned, owner_of, allowed, table_of, sums)
        used = sums.any(axis=1)
        for t in np.flatnonzero(used):
            lengths[t] = code_lengths(sums[t])
    return lengths[used], (np.cumsum(used) - 1)[table_of]


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})  # sums of integers that are exact whatever their order
def _choose_allowed(
    counts: np.ndarray,
    totals: np.ndarray,
    costs: np.ndarray,
    owned: np.ndarray,
    owner_of: np.ndarray,
    allowed: np.ndarray,
    table_of: np.ndarray,
    sums: np.ndarray,
) -> None:
    """Give each context `owned[i]` the best of the tables ``allowed[owner_of[i]]`` and add its counts to those of the table.

    `costs` float32 (n_tables, 256), integers; `sums` int64 (n_tables, 256).
    """
    n_symbols = np.uint64(counts.shape[1])
    row = np.empty(counts.shape[1], np.float32)
    for i in range(owned.size):
        context = owned[i]
        for s in range(n_symbols):
            row[s] = counts[context, s]
        narrow = totals[context] < 1 << 18  # then sums are below 2**24, for no cost is above 64
        smallest = np.float64(np.inf)
        for k in range(allowed.shape[1]):
            t = allowed[owner_of[i], k]
            if narrow:
                narrow_size = np.float32(0)
                for s in range(n_symbols):
                    narrow_size += row[s] * costs[t, s]
                size = np.float64(narrow_size)
            else:
                size = np.float64(0)
                for s in range(n_symbols):
                    size += np.float64(counts[context, s]) * np.float64(costs[t, s])
            if size < smallest:
                smallest = size
                table_of[context] = t
        for s in range(n_symbols):
            sums[table_of[context], s] += np.int64(counts[context, s])


@njit(cache=True, nogil=True)
def _give_up(sizes: np.ndarray, table_of: np.ndarray, limit: int, worth: float) -> None:
    """Give up tables one by one, the one first that costs least, until at most `limit` are used and each saves `worth` bits.

    `sizes` float64 (n_contexts, n_tables), what each context takes; `table_of` int64 (n_contexts,), changed.
    """
    # Plain loops: np.unique, np.searchsorted and argmin take four times as long to compile as all of this.
    place = np.full(sizes.shape[1], -1)
    for i in range(table_of.size):
        place[table_of[i]] = 0
    used = np.empty(sizes.shape[1], np.int64)
    n_tables = 0
    for t in range(place.size):
        if place[t] == 0:
            place[t] = n_tables
            used[n_tables] = t
            n_tables += 1
    used = used[:n_tables]
    best = np.empty(table_of.size, np.int64)
    for i in range(best.size):
        best[i] = place[table_of[i]]
    second = np.full(table_of.size, -1)
    for n_used in range(used.size, 1, -1):
        lost = np.zeros(used.size)
        for i in range(best.size):
            if second[i] < 0 or used[second[i]] < 0:
                second[i] = -1
                for k in range(used.size):
                    if used[k] < 0 or k == best[i]:
                        continue
                    if second[i] < 0 or sizes[i, used[k]] < sizes[i, used[second[i]]]:
                        second[i] = k
            lost[best[i]] += sizes[i, used[second[i]]] - sizes[i, used[best[i]]]
        for k in range(used.size):
            if used[k] < 0:
                lost[k] = np.inf
        least = 0
        for k in range(1, used.size):
            least = k if lost[k] < lost[least] else least
        if n_used <= limit and lost[least] >= worth:
            break
        used[least] = -1
        for i in range(best.size):
            if best[i] == least:
                best[i] = second[i]
                second[i] = -1
    for i in range(best.size):
        table_of[i] = used[best[i]]


def _drop_small(counts: np.ndarray, lengths: np.ndarray, table_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Drop the tables that save less than they cost, the least useful first."""
    while True:
        kept = table_of.copy()
        _give_up(_sizes(counts, lengths), kept, MAX_TABLES, TABLE_COST_BITS)
        if np.array_equal(kept, table_of):
            return lengths, table_of
        lengths, table_of = _rebuild(counts, kept)
