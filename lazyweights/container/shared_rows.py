"""Rows that share their scales: found in the rows of a tensor, by the encoder.

A quantizer with shared step sizes gives every row the same side values (scales, sub-scales, mins), or one of a few sets of
them, except where an outlier did not fit. Such a tensor has *reference rows*; a row is coded as the number of its reference
and what differs from it, which is nearly nothing. Its codes have no scale that would tell how they spread; so the columns
get *classes* and each row a *level*, which together select the table of a code (`docs/format.md`, "Shared rows").
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from lazyweights.codecs import TILE_ROWS, trellis
from lazyweights.codecs.rans_pool import cluster, own_bits, seed_tables

if TYPE_CHECKING:
    from lazyweights.container.tensor_coder import PlaneArrays, TensorCoder

MAX_REFERENCES = 16
N_COLUMN_CLASSES = 32
N_ROW_LEVELS = 16
MIDDLE_LEVEL = 8
"""Level of the middle row of a tensor."""

MIN_ROWS = 128
"""A tensor of fewer rows would not pay for its references and column classes."""

MAX_DIFFERENT = 0.25
"""Share of the side values that may differ from the references of their rows."""

MAX_DIFFERENT_AT_FIRST = 0.5
"""Share of the side values in the first row group that may differ from those of the row that is most alike: a quick test."""

SAMPLE_BYTES = 1 << 22
"""Packed bytes of the row groups, evenly spaced, in which references and column classes are looked for."""

MATCHED_BYTES = 1 << 19
"""Side values of the rows that are compared with each other at most."""

N_CANDIDATES = 32
"""Rows that are tried as a further reference: so many that are farthest from those so far, and as many of all."""

N_ROUNDS = 3

MIN_ODD = 0.25
"""Share of the codes that are odd, at least, for trellis codes; half of them are where the state takes turns. It tells them from
zeros, which obey the trellis too."""

CLASS_COST_BITS = 64
"""What a class of columns must save to be made."""


@dataclass(frozen=True)
class SharedRows:
    """What the rows of a tensor share; part of its plan.

    Attributes
    ----------
    references : ndarray of uint8, shape (1 .. 16, side columns)
        Side symbols of the reference rows, plane after plane.
    columns : ndarray of uint8, shape (symbols of a row,)
        Class of each column of symbols, 0 .. 31.
    row_base : int
        Level of a row's codes (in 1/8 octaves) that is stored as 0; for the encoder only.
    row_table : int
        Table of the row symbols.
    is_trellis : bool
        Whether the symbols that are coded are indices of trellis codes (`lazyweights.codecs.trellis`).
    """

    references: np.ndarray
    columns: np.ndarray
    row_base: int
    row_table: int = 0
    is_trellis: bool = False


def may_share(coder: TensorCoder, n_rows: int) -> bool:
    """Return whether a tensor is one whose rows may share their scales: its type has some, and it has enough rows."""
    return coder.layout.may_share_rows and n_rows >= MIN_ROWS


def first_rows_share(coder: TensorCoder, arrays: PlaneArrays) -> bool:
    """Return whether the first row group, split, looks like one of a tensor with shared rows."""
    from lazyweights.container import shared_groups

    sides = side_rows(coder, arrays)
    if sides.size > MATCHED_BYTES:
        sides = sides[:, : MATCHED_BYTES // len(sides)]
    return shared_groups.least_different(np.ascontiguousarray(sides)) <= MAX_DIFFERENT_AT_FIRST * sides.size


def find_shared_rows(coder: TensorCoder, packed: np.ndarray, may_have_trellis: bool = True) -> SharedRows | None:
    """Return what the rows of a sample, uint8 (rows, row_bytes), share; None where they do not.

    `may_have_trellis`: whether the sample is made of whole row groups of the tensor, as a trellis runs through them.
    """
    from lazyweights.container import shared_groups

    arrays = coder.split(packed)
    sides = side_rows(coder, arrays)
    references = _references(sides)
    if int(_distances(sides, references).min(axis=1).sum()) > MAX_DIFFERENT * sides.size:
        return None
    indices = trellis_indices(coder, arrays) if may_have_trellis else None
    symbols = arrays.symbols if indices is None else indices
    counts = np.zeros((symbols.shape[1], 256), np.int64)
    shared_groups.count_columns(symbols, counts)
    found = SharedRows(references, _column_classes(counts), 0, is_trellis=indices is not None)
    widths = np.sort(coder.row_widths(packed, found))
    return replace(found, row_base=max(int(widths[len(widths) // 2]) - 2 * MIDDLE_LEVEL, 0))


def trellis_indices(coder: TensorCoder, arrays: PlaneArrays) -> np.ndarray | None:
    """Return the indices of the codes of split row groups, uint8 (rows, columns); None where these are no trellis codes."""
    if not coder.layout.may_have_trellis:
        return None
    symbols = arrays.symbols.copy()
    if np.count_nonzero(symbols & 1) < MIN_ODD * symbols.size:
        return None
    return symbols if trellis.to_indices(symbols, coder.has_signed_codes).all() else None


def sample_groups(n_rows: int, row_bytes: int) -> list[int]:
    """Return the first rows of the row groups of a sample, evenly spaced."""
    n_groups = -(-n_rows // TILE_ROWS)
    wanted = min(max(SAMPLE_BYTES // (TILE_ROWS * row_bytes), 1), n_groups)
    return [TILE_ROWS * (k * n_groups // wanted) for k in range(wanted)]


def side_rows(coder: TensorCoder, arrays: PlaneArrays) -> np.ndarray:
    """Return the side symbols of split rows, uint8 (rows, side columns): plane after plane, in stream order."""
    from lazyweights.container import shared_groups

    n_rows = arrays.byte_values.shape[0]
    n_blocks = arrays.half_values.shape[2]
    sides = np.empty((n_rows, 2 * len(coder.layout.halves) * n_blocks + arrays.byte_values.shape[1]), np.uint8)
    delta_of = np.array([half.delta_of for half in coder.layout.halves], np.int64)
    shared_groups.fill_side_rows(arrays.half_values, arrays.byte_values, delta_of, sides)
    return sides


def _references(sides: np.ndarray) -> np.ndarray:
    """Return up to 16 rows such that few side values differ from the one of them that is most alike, most frequent first.

    A reference costs its own values, and its number in each row that takes it: a few values that differ are cheaper there.
    """
    step = -(-sides.size // MATCHED_BYTES)
    sample = sides[::step]
    n_columns = sides.shape[1]
    few = n_columns // 24 + 1
    references = _modes(sample, np.zeros(len(sample), np.int64), 1)
    for _ in range(MAX_REFERENCES + 4):  # what the first of them mixed comes apart
        references = _settled(sample, references)
        best = _distances(sample, references).min(axis=1)
        farthest_first = np.argsort(-best, kind="stable")
        tried = np.union1d(farthest_first[:N_CANDIDATES], farthest_first[:: -(-len(sample) // N_CANDIDATES)])
        candidates = sample[tried]
        gains = np.maximum(best[:, None] - _distances(sample, candidates) - few, 0).sum(axis=0)
        k = int(gains.argmax())
        if int(gains[k]) * step < 2 * n_columns:
            break
        references = np.concatenate([references, candidates[k][None]])
    return _settled(sample, references)[:MAX_REFERENCES]


def _settled(sample: np.ndarray, references: np.ndarray) -> np.ndarray:
    """Return references that are the most frequent values of the rows nearest to them; those without any are left out."""
    for _ in range(N_ROUNDS):
        nearest = _distances(sample, references).argmin(axis=1)
        used = np.bincount(nearest, minlength=len(references))
        order = np.argsort(-used, kind="stable")[: np.count_nonzero(used)]
        before, references = references, _modes(sample, nearest, len(references))[order]
        if np.array_equal(references, before):
            break  # and so it would be in every further round
    return references


def _distances(rows: np.ndarray, references: np.ndarray) -> np.ndarray:
    """Return how many side values of each row differ from each reference, int64 (rows, references)."""
    from lazyweights.container import shared_groups

    out = np.empty((len(rows), len(references)), np.int64)
    shared_groups.count_different(np.ascontiguousarray(rows), np.ascontiguousarray(references), out)
    return out


def _modes(rows: np.ndarray, labels: np.ndarray, n_labels: int) -> np.ndarray:
    """Return the most frequent value of each column in the rows of each label, the smallest of equally frequent ones."""
    from lazyweights.container import shared_groups

    out = np.empty((n_labels, rows.shape[1]), np.uint8)
    shared_groups.fill_modes(np.ascontiguousarray(rows), labels, out)
    return out


def _column_classes(counts: np.ndarray) -> np.ndarray:
    """Return the class of each column of symbols with these counts, int64 (columns, 256)."""
    seeds = seed_tables(counts, N_COLUMN_CLASSES, CLASS_COST_BITS)
    found = [cluster(counts, seeds[:n]) for n in (N_COLUMN_CLASSES, N_COLUMN_CLASSES // 2, N_COLUMN_CLASSES // 4)]
    bits = [bits + own_bits(np.bincount(labels)[None]) for labels, bits in found]
    return found[int(np.argmin(bits))][0].astype(np.uint8)
