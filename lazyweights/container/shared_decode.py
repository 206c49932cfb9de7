"""Shared rows in numba, decoding: words to plane arrays or straight to packed blocks (see `shared_groups`)."""

from __future__ import annotations

import numpy as np
from numba import njit, uint32

from lazyweights.codecs.rans import decode_rans_phase, decode_rows_phase
from lazyweights.codecs.trellis import from_indices
from lazyweights.container.group_decode import _finish_groups
from lazyweights.container.group_encode import side_offsets_of
from lazyweights.container.row_join import DIRECT, JOIN_OF_TYPE, join_rows
from lazyweights.container.shared_groups import shift_levels
from lazyweights.container.tensor_coder import TensorCoder, TensorPlan


@njit(cache=True, nogil=True)
def _decode_plane(
    half_words: np.ndarray,
    limit: int,
    tables: np.ndarray,
    offset: int,
    n_rows: int,
    states: np.ndarray,
    pos: np.ndarray,
    packed: np.ndarray,
    out: np.ndarray,
) -> None:
    """Decode a plane, uint8 (2 phases, columns, 32), flat, all by the table at `offset`; `packed` is scratch."""
    n_columns = out.size // 64
    first = tables[offset]
    if (first >> uint32(8)) & uint32(4095) == uint32(4095):  # one symbol, of frequency 4096: it leaves the states as they are
        out[:] = first & uint32(255)
        return
    offsets = np.full((1, 32), offset, np.int32)
    quads = packed[: (n_columns + 3) // 4 * 32].reshape((1, (n_columns + 3) // 4, 32))
    for phase in range(2):
        n_lanes = (n_rows + 1 - phase) // 2
        if n_lanes == 0:
            continue
        decode_rans_phase(half_words, limit, tables, offsets, n_columns, n_lanes, quads, states, pos)
        for column in range(n_columns):
            shift = uint32(8 * (column & 3))
            for lane in range(np.uint64(n_lanes)):
                value = (quads[0, column >> 2, lane] >> shift) & uint32(255)
                out[np.uint64((phase * n_columns + column) * 32) + lane] = value


@njit(cache=True, nogil=True)
def _add_references(
    differences: np.ndarray, side_at: np.ndarray, references: np.ndarray, row_symbols: np.ndarray
) -> None:
    """Turn the differences of a row group into its side symbols, in place."""
    last = references.shape[0] - 1
    for s in range(side_at.size - 1):
        n_columns = (side_at[s + 1] - side_at[s]) // 64
        first = side_at[s] // 64
        for phase in range(2):
            for column in range(n_columns):
                at = np.uint64(side_at[s] + (phase * n_columns + column) * 32)
                if last == 0:
                    reference = references[0, first + column]
                    for lane in range(np.uint64(32)):
                        differences[at + lane] += reference
                else:
                    for lane in range(np.uint64(32)):
                        differences[at + lane] += references[min(np.int64(row_symbols[phase, lane]) >> 4, last), first + column]


@njit(cache=True, nogil=True)
def decode_shared_groups(
    n_rows: int,
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
    side_offsets: np.ndarray,
    row_offset: int,
    cell_offsets: np.ndarray,
    references: np.ndarray,
    columns: np.ndarray,
    is_trellis: bool,
    rans_tables: np.ndarray,
    half_values: np.ndarray,
    byte_values: np.ndarray,
    symbols: np.ndarray,
    symbol_layout: tuple,
    raw_values: np.ndarray,
    status: np.ndarray,
) -> None:
    """Decode a run of row groups.

    Parameters
    ----------
    side_offsets : int32 (n_sides, 32), of which the first of each plane counts; row_offset : int, that of the row symbols; both
        in `rans_tables`
    references, columns, is_trellis : of `shared_rows.SharedRows`
    others : as for `group_decode.decode_groups`
    """
    n_blocks = meta[0]
    n_cells = meta[1]
    n_sides = sides.shape[0]
    stride, offset, _ = symbol_layout
    side_at = side_offsets_of(meta, sides)
    side = np.zeros((2, side_at[-1]), np.uint8)
    row_symbols = np.zeros((2, 64), np.uint8)
    cell_levels = np.zeros((2, 2, n_cells, 32), np.int32)  # phase, stream
    of_group = np.zeros((2, n_cells, 32), np.int32)
    packed = np.zeros((side_at[-1] // 64 + 3) // 4 * 32 + 32, np.uint32)
    low = np.zeros(64 * n_blocks, np.uint16)
    lane_values = np.zeros((halves.shape[0], 64 * n_blocks), np.uint16)
    raw = np.zeros(256, np.uint8)
    no_bits = np.zeros((1, 32), np.uint64)
    nothing_held = np.zeros((1, 32), np.int32)
    positions = np.zeros((1, 1), np.int32)
    states = np.zeros((2, 32), np.uint32)
    pos = np.zeros(2, np.int64)
    ends = np.zeros(1, np.int64)
    bases = np.zeros(2, np.int64)
    strides = np.zeros(2, np.int64)
    trellis_states = np.zeros((n_cells - 1) * stride + meta[2] if is_trellis else 0, np.uint8)
    half_words = words.view(np.uint16)
    limit = half_words.size
    row_bytes = symbols.shape[1]
    flat_symbols = symbols.reshape(symbols.size)
    last_column = offset + (n_cells - 1) * stride + meta[2] - 1
    strides[0] = 2 * row_bytes
    strides[1] = stride
    n_groups = kinds.size
    g = np.int64(0)
    while g < n_groups:
        if kinds[g] == 2:
            status[g] = 0
            g += 1
            continue
        # Full groups are decoded two at a time, which hides the latency of table look-ups.
        rows = min(64, n_rows - 64 * g)
        n_lanes = (rows + 1) // 2
        n_members = 1
        if g + 1 < n_groups and kinds[g + 1] != 2 and 64 * (g + 2) <= n_rows:
            n_members = 2
        for k in range(n_members):
            for lane in range(n_lanes):
                states[k, lane] = words[min(starts[g + k] + lane, words.size - 1)]
            pos[k] = 2 * min(starts[g + k] + n_lanes, words.size)
            _decode_plane(half_words, limit, rans_tables, row_offset, rows, states[k], pos[k : k + 1], packed, row_symbols[k])
            for s in range(n_sides):
                plane = side[k, side_at[s] : side_at[s + 1]]
                _decode_plane(
                    half_words, limit, rans_tables, np.int64(side_offsets[s, 0]), rows, states[k], pos[k : k + 1], packed, plane
                )
            both = row_symbols[k].reshape((2, 32))
            shift_levels(side[k], side_at, meta, levels, references, both, of_group)
            for phase in range(2):  # `cell_levels[:, k] = of_group` takes two seconds to compile
                for cell in range(n_cells):
                    for lane in range(32):
                        cell_levels[phase, k, cell, lane] = of_group[phase, cell, lane]
            _add_references(side[k], side_at, references, both)
        for phase in range(2):
            for k in range(n_members):
                bases[k] = (64 * (g + k) + phase) * row_bytes + offset
            of_phase = (rows + 1 - phase) // 2
            if of_phase:
                decode_rows_phase(
                    half_words, limit, rans_tables, cell_offsets, columns, cell_levels[phase, :n_members], meta[2],
                    columns.size - 1, of_phase, flat_symbols, bases[:n_members], strides, states[:n_members], pos[:n_members],
                )
        for k in range(n_members):
            first = 64 * (g + k) * row_bytes + last_column
            for row in range(rows):
                last = states[k, row >> 1] >> uint32(0 if row & 1 else 8)
                flat_symbols[first + row * row_bytes] = last & uint32(255)
            if is_trellis:
                # Bytes between the codes of packed blocks are taken along, so that a row is one run: they are written below.
                from_indices(flat_symbols, 64 * (g + k) * row_bytes + offset, row_bytes, rows, trellis_states)
            ends[0] = (pos[k] + 1) // 2
            # Plain numbers here would be types of their own, for which it compiles anew.
            _finish_groups(
                g + k, np.int64(1), rows, words, starts, sizes, ends, np.int64(0), np.bool_(False), positions, no_bits,
                nothing_held, states[k, :n_lanes], meta, sides, halves, byte_fields, raws, side[k], side_at, np.int64(1), raw,
                low, lane_values, half_values, byte_values, symbols, symbol_layout, (raw_values, symbols[:0]), status,
            )
        g += n_members


@njit(cache=True, nogil=True)
def _decode_joined(
    shape: tuple,
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
    side_offsets: np.ndarray,
    row_offset: int,
    cell_offsets: np.ndarray,
    references: np.ndarray,
    columns: np.ndarray,
    is_trellis: bool,
    rans_tables: np.ndarray,
    packed: np.ndarray,
    status: np.ndarray,
) -> None:
    """Decode row groups a few at a time and join them, see `decode_shared_rows`; `shape`: join, byte columns."""
    join, byte_width = shape
    n_rows = packed.shape[0]
    n_blocks = meta[0]
    half_values = np.empty((halves.shape[0], min(256, n_rows), n_blocks), np.uint16)
    byte_values = np.empty((min(256, n_rows), byte_width), np.uint8)
    raw_values = np.empty((min(256, n_rows), 0), np.uint32)
    # Rows a multiple of 4 KiB apart would fall into the same few places of the first cache: hence 64 bytes more.
    scratch = np.empty((min(256, n_rows), (columns.size + 7) // 8 * 8 + 64), np.uint8)
    for g in range(0, starts.size, 4):
        units = slice(g, min(g + 4, starts.size))
        rows = min(256, n_rows - 64 * g)
        decode_shared_groups(
            rows, words, starts[units], sizes[units], kinds[units], meta, sides, halves, byte_fields, raws, levels, side_offsets,
            row_offset, cell_offsets, references, columns, is_trellis, rans_tables, half_values, byte_values, scratch,
            (meta[2], 0, False), raw_values, status[units],
        )
        join_rows(join, rows, n_blocks, half_values, byte_values, scratch, raw_values, packed[64 * g : 64 * g + rows])


def decode_shared_rows(
    coder: TensorCoder,
    plan: TensorPlan,
    words: np.ndarray,
    starts: np.ndarray,
    sizes: np.ndarray,
    kinds: np.ndarray,
    rans_tables: np.ndarray,
    packed: np.ndarray,
    status: np.ndarray,
) -> None:
    """Decode row groups of a type that `batch_decode` knows into `packed`, uint8 (rows, row_bytes).

    Other arguments are those of `decode_shared_groups`; rows of groups that are not decoded are left undefined.
    """
    shared = plan.shared
    assert shared is not None
    p = coder.parameters(plan.modes, plan.bases)
    of_plan = (
        p.meta, p.sides, p.halves, p.byte_fields, p.raws, p.levels, plan.side_offsets, plan.row_offset, plan.cell_offsets,
        shared.references, shared.columns, shared.is_trellis, rans_tables,
    )
    join = JOIN_OF_TYPE[coder.layout.type_name]
    if join == DIRECT:
        layout = (coder.type.block_bytes, coder.direct_offset or 0, True)
        nothing = np.zeros((0, len(packed), coder.n_blocks), np.uint16), packed[:0], np.zeros((len(packed), 0), np.uint32)
        decode_shared_groups(
            len(packed), words, starts, sizes, kinds, *of_plan, nothing[0], nothing[1], packed, layout, nothing[2], status
        )
    else:
        byte_width = sum(coder.byte_columns(b.per_block) for b in coder.layout.bytes_)
        _decode_joined((join, byte_width), words, starts, sizes, kinds, *of_plan, packed, status)
