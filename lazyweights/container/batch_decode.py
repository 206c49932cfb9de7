"""A batch: row groups of one or more tensors that one compiled call decodes, from their streams to packed blocks."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numba import njit

from lazyweights.codecs.vector_emit import AVAILABLE as JOINS_WORDS
from lazyweights.container.group_decode import decode_groups
from lazyweights.container.row_join import DIRECT, JOIN_OF_TYPE, NOT_COMPILED, join_rows
from lazyweights.container.tensor_coder import RANS, HalfMode, TensorCoder, TensorPlan
from lazyweights.container.unit_checksums import hash_bytes

DIRECT_BYTES = 1 << 19
"""Packed bytes of a tensor that are decoded before their checksums are taken: they fit the second cache."""

def is_compiled(coder: TensorCoder) -> bool:
    """Return whether `decode_batch` knows the type."""
    return JOIN_OF_TYPE.get(coder.layout.type_name, NOT_COMPILED) != NOT_COMPILED


class TypeArrays(NamedTuple):
    """What the kernels need of a type, row length and field modes: integer tables, and the last numbers of a row of `parts`
    in `decode_batch`, of which the last four are the rows of `sides`, `halves`, `byte_fields` and `raws`."""

    meta: np.ndarray
    sides: np.ndarray
    halves: np.ndarray
    byte_fields: np.ndarray
    raws: np.ndarray
    levels: np.ndarray
    numbers: list[int]


class PlanArrays(NamedTuple):
    """What the kernels need of a tensor: `TypeArrays`, and table numbers uint8 (n_sides, 32) and (1, 512)."""

    of_type: TypeArrays
    side_tables: np.ndarray
    cell_tables: np.ndarray


def plan_arrays(coder: TensorCoder, plan: TensorPlan) -> PlanArrays:
    """Return the arrays of a tensor's plan."""
    return PlanArrays(_type_arrays(coder, plan.modes, plan.bases, plan.coder), plan.side_tables, plan.cell_tables[None])


@functools.lru_cache(maxsize=1024)
def _type_arrays(coder: TensorCoder, modes: tuple[HalfMode, ...], bases: tuple[int, ...], cell_coder: int) -> TypeArrays:
    p = coder.parameters(modes, bases)
    join = JOIN_OF_TYPE[coder.layout.type_name]
    direct = join == DIRECT
    numbers = [
        coder.row_bytes,
        join,
        coder.type.block_bytes if direct else coder.cell_symbols,
        coder.direct_offset or 0,
        coder.n_cells * coder.cell_symbols,
        sum(coder.byte_columns(b.per_block) for b in coder.layout.bytes_),
        sum(per_block for _, per_block, _ in coder.raw_planes) * coder.n_blocks,
        int(cell_coder == RANS),
        len(p.sides),
        len(p.halves),
        len(p.byte_fields),
        len(p.raws),
    ]
    return TypeArrays(p.meta[None], p.sides, p.halves, p.byte_fields, p.raws, p.levels[None], numbers)


class Batch:
    """Parts of tensors, any number of neighbours of which one compiled call decodes.

    Parameters
    ----------
    rows : for each part: rows, first unit (among those handed to `decode`), units, first byte in the output
    plans : of each part's tensor
    """

    def __init__(self, rows: list[list[int]], plans: list[PlanArrays]) -> None:
        columns = [*zip(*(p.of_type[:6] for p in plans), strict=True)]
        columns += [tuple(p.side_tables for p in plans), tuple(p.cell_tables for p in plans)]
        self._tables = [np.concatenate(column) if len(column) > 1 else column[0] for column in columns]
        parts = []
        first_rows = [0] * 4
        for i, (row, plan) in enumerate(zip(rows, plans, strict=True)):
            numbers = plan.of_type.numbers
            parts.append([*row, i, *first_rows, *numbers])
            first_rows = [first + n for first, n in zip(first_rows, numbers[-4:], strict=True)]
        self._parts = np.array(parts, np.int64)

    def decode(
        self,
        part: slice,
        words: np.ndarray,
        starts: np.ndarray,
        sizes: np.ndarray,
        kinds: np.ndarray,
        flat_tables: np.ndarray,
        rans_tables: np.ndarray,
        out: np.ndarray,
        status: np.ndarray,
        hash_address: int,
        checksums: np.ndarray,
    ) -> None:
        """Decode some of the parts; the other arguments are those of `decode_batch`."""
        decode_batch(
            self._parts[part], words, starts, sizes, kinds, *self._tables, flat_tables, rans_tables, out, status, hash_address,
            checksums,
        )


@njit(cache=True, nogil=True)
def decode_batch(
    parts: np.ndarray,
    words: np.ndarray,
    starts: np.ndarray,
    sizes: np.ndarray,
    kinds: np.ndarray,
    meta: np.ndarray,
    sides: np.ndarray,
    halves: np.ndarray,
    byte_fields: np.ndarray,
    raws: np.ndarray,
    levels: np.ndarray,
    side_tables: np.ndarray,
    cell_tables: np.ndarray,
    flat_tables: np.ndarray,
    rans_tables: np.ndarray,
    out: np.ndarray,
    status: np.ndarray,
    hash_address: int,
    checksums: np.ndarray,
) -> None:
    """Decode the parts of a batch and compare the checksums of their row groups, which are still in the cache then.

    Parameters
    ----------
    parts : int64 (n_parts, 21): rows, first unit, units, first byte in `out`; its row in `meta`, `levels` and `cell_tables`;
        its first row in `sides`, `halves`, `byte_fields` and `raws`; then `TypeArrays.numbers`
    words, starts, sizes, kinds, status : as for `decode_groups`, of the units of all parts
    meta .. cell_tables : `TypeArrays` and `PlanArrays` of at least these parts, one behind the other
    flat_tables, rans_tables : of the table set of all parts
    out : uint8, flat, output; rows of row groups that are not decoded are left undefined
    hash_address : `unit_checksums.HASH_ADDRESS`, or 0: compare no checksums
    checksums : uint64, one for each unit, or empty: compare none; a row group whose bytes have another one gets the status 4
    """
    for number in range(parts.shape[0]):
        n_rows, first, n_units, at, i, s, h, f, r = parts[number, :9]
        row_bytes, join, stride, offset, width, byte_width, raw_width, by_rans = parts[number, 9:17]
        n_sides, n_halves, n_fields, n_raws = parts[number, 17:]
        part_sides, part_halves = sides[s : s + n_sides], halves[h : h + n_halves]
        part_fields, part_raws = byte_fields[f : f + n_fields], raws[r : r + n_raws]
        part_rans = rans_tables if by_rans else rans_tables[:0]
        side_offsets = side_tables[s : s + n_sides].astype(np.int32) * np.int32(2048)
        cell_offsets = cell_tables[i].astype(np.int32) * np.int32(4096 if by_rans else 2048)
        packed = out[at : at + n_rows * row_bytes].reshape((n_rows, row_bytes))
        direct = join == 0
        floats = JOINS_WORDS and join == 6 and width % 32 == 0
        if floats:
            raw_width = 0
        # Row groups that are decoded before they are joined, and before their checksums are taken.
        chunk = max(DIRECT_BYTES // (256 * row_bytes), 1) * 4 if direct else 4
        chunk_rows = 0 if direct else min(64 * chunk, n_rows)
        n_blocks = meta[i, 0]
        half_values = np.empty((n_halves, chunk_rows, n_blocks), np.uint16)
        byte_values = np.empty((chunk_rows, byte_width), np.uint8)
        raw_values = np.empty((chunk_rows, raw_width), np.uint32)
        # Rows a multiple of 4 KiB apart would fall into the same few places of the first cache: hence 64 bytes more.
        scratch = np.empty((chunk_rows, (width + 7) // 8 * 8 + 64), np.uint8)
        for g in range(0, n_units, chunk):
            units = slice(first + g, first + min(g + chunk, n_units))
            rows = min(64 * chunk, n_rows - 64 * g)
            decode_groups(
                rows, words, starts[units], sizes[units], kinds[units], meta[i], part_sides, part_halves, part_fields, part_raws,
                levels[i], flat_tables, side_offsets, cell_offsets, part_rans, half_values, byte_values,
                packed[64 * g : 64 * g + rows] if direct else scratch, (stride, offset, direct), raw_values,
                packed[64 * g : 64 * g + rows] if floats else packed[:0], status[units],
            )
            if not direct and not floats:
                join_rows(
                    join, rows, n_blocks, half_values, byte_values, scratch, raw_values, packed[64 * g : 64 * g + rows]
                )
            if hash_address != 0 and checksums.size > 0:
                first_byte = at + 64 * g * row_bytes
                for k in range(units.start, units.stop):
                    n_bytes = min(64 * row_bytes, at + n_rows * row_bytes - first_byte)
                    if kinds[k] != 2 and status[k] == 0 and hash_bytes(hash_address, out, first_byte, n_bytes) != checksums[k]:
                        status[k] = 4
                    first_byte += n_bytes

