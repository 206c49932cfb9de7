"""Streams for given symbols, as the preset `unit` writes them, and other ways to write them.

A variant changes the width of a tile, the order of its rows, or the layout of its words; the table stays the same, so what a
stream costs more or less is padding only. `docs/format.md`, "Lockstep row groups", knows the first way alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit, uint32, uint64

from lazyweights.codecs import N_LANES, TILE_ROWS, lane_kernels
from lazyweights.errors import CodecError
from lazyweights.hardware.unit_config import STEP_BYTES, Layout, TensorStream


@dataclass(frozen=True)
class StreamVariant:
    """How symbols become tiles.

    Attributes
    ----------
    tile_codes : int
        Columns of a tile in codes.
    layout : Layout
    balanced : bool
        Rows of a tile are paired to lanes long with short. The order is stored: 6 bits for each of 64 rows.
    """

    tile_codes: int = 256
    layout: Layout = Layout.LOCKSTEP
    balanced: bool = False


ORDER_BYTES = TILE_ROWS * 6 // 8
"""Bytes of the stored order of the rows of a balanced tile."""


@dataclass(frozen=True)
class WrittenStream:
    """A stream and what it is made of.

    Attributes
    ----------
    stream : TensorStream
    orders : list of ndarray
        Row of the tensor's row group at each row of each tile.
    codeword_bits : int
        Bits of all codewords.
    extra_bytes : int
        Stored orders.
    """

    stream: TensorStream
    orders: list[np.ndarray]
    codeword_bits: int
    extra_bytes: int

    @property
    def padding(self) -> float:
        """Share of what is read for the codes (words, orders) that is no codeword, 0 to 1."""
        total = 8 * (self.stream.stream_bytes + self.extra_bytes)
        return 1 - self.codeword_bits / total if total else 0.0


def balanced_order(row_bits: np.ndarray) -> np.ndarray:
    """Return rows in an order that pairs the longest with the shortest, the second longest with the second shortest ...

    >>> balanced_order(np.array([5, 9, 1, 7])).tolist()
    [1, 2, 3, 0]
    """
    by_length = np.argsort(-row_bits, kind="stable")
    order = np.empty_like(by_length)
    half = (len(order) + 1) // 2
    order[0::2] = by_length[:half]
    order[1::2] = by_length[half:][::-1]
    return order


def write_stream(
    symbols: np.ndarray,
    entries: np.ndarray,
    table: np.ndarray,
    weights_per_symbol: int,
    side_bytes: int = 0,
    variant: StreamVariant | None = None,
) -> WrittenStream:
    """Write the symbols of a tensor as tiles.

    Parameters
    ----------
    symbols : ndarray of uint8, shape (n_rows, n_columns)
    entries : ndarray of uint32, shape (256,)
        Encode entries of `canonical.codewords`.
    table : ndarray of uint32, shape (2048,)
        `unit_config.table_entries`.
    weights_per_symbol : int
    side_bytes : int
        Bytes of uncoded planes of 64 rows.
    variant : StreamVariant, optional

    Raises
    ------
    CodecError
        If a symbol has no codeword.
    """
    variant = variant or StreamVariant()
    width = variant.tile_codes // weights_per_symbol
    lengths = (entries >> 16).astype(np.int64)
    words, steps, rows, columns, sides, orders = [], [], [], [], [], []
    bits = extra = 0
    for top in range(0, len(symbols), TILE_ROWS):
        group = symbols[top : top + TILE_ROWS]
        n_tiles = -(-group.shape[1] // width)
        pending = side_bytes * len(group) // TILE_ROWS
        for k in range(n_tiles):
            tile = group[:, k * width : (k + 1) * width]
            row_bits = lengths[tile].sum(axis=1)
            bits += int(row_bits.sum())
            order = np.arange(len(tile))
            if variant.balanced:
                order = balanced_order(row_bits)
                extra += ORDER_BYTES
                pending += ORDER_BYTES
            tile = np.ascontiguousarray(tile[order])
            found = _encode_tile(tile, entries, table, variant.layout)
            words.append(found)
            steps.append(found.size // N_LANES)
            rows.append(len(tile))
            columns.append(tile.shape[1])
            orders.append(order)
            sides.append(0)
        sides[-1] = -(-pending // STEP_BYTES)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(steps, np.int64))])
    stream = TensorStream(
        np.concatenate(words) if words else np.zeros(0, np.uint32), starts, np.array(rows, np.int32),
        np.array(columns, np.int32), np.array(sides, np.int32), table, weights_per_symbol, variant.layout,
    )  # fmt: skip
    return WrittenStream(stream, orders, bits, extra)


def restore_symbols(written: WrittenStream, decoded: np.ndarray, n_rows: int) -> np.ndarray:
    """Put decoded symbols (tile after tile) back into `n_rows` rows: the inverse of what `write_stream` did to their order."""
    stream = written.stream
    n_groups = -(-n_rows // TILE_ROWS)
    per_group = len(stream.rows) // n_groups
    groups, at = [], 0
    for group in range(n_groups):
        tiles = []
        for t in range(group * per_group, (group + 1) * per_group):
            height, width = int(stream.rows[t]), int(stream.columns[t])
            tile = np.empty((height, width), np.uint8)
            tile[written.orders[t]] = decoded[at : at + height * width].reshape(height, width)
            at += height * width
            tiles.append(tile)
        groups.append(np.concatenate(tiles, axis=1))
    return np.concatenate(groups)


def _encode_tile(tile: np.ndarray, entries: np.ndarray, table: np.ndarray, layout: Layout) -> np.ndarray:
    room = np.zeros(N_LANES * (2 * tile.shape[1] * 11 // 32 + 3), np.uint32)
    if layout == Layout.LOCKSTEP:
        n = N_LANES * lane_kernels.encode_lockstep(tile, entries, room)
    else:
        n = encode_demand(tile, entries, table, room)
    if n < 0:
        raise CodecError("a symbol has no codeword in its table")
    return room[: -(-n // N_LANES) * N_LANES]


@njit(cache=True, nogil=True)
def encode_demand(tile: np.ndarray, entries: np.ndarray, table: np.ndarray, words: np.ndarray) -> int:
    """Encode a tile in the demand layout of the unit; return the number of words, or -1 where a symbol has no codeword.

    The order follows from the unit's rule (`unit_config`): look-up by look-up, lanes 0 to 31 that have symbols left and hold
    fewer than 11 bits take a word. How many symbols a look-up gives follows from the table.
    """
    n_rows, n_columns = tile.shape
    slots = 2 * n_columns * 11 // 32 + 3
    lanes = np.zeros((32, slots + 2), np.uint32)
    left = np.zeros(32, np.int64)
    for lane in range(32):
        b = uint64(0)
        n = 0
        k = 0
        for row in range(2 * lane, min(2 * lane + 2, n_rows)):
            left[lane] += n_columns
            for column in range(n_columns):
                entry = entries[tile[row, column]]
                if entry == uint32(0xFFFFFFFF):
                    return -1
                length = np.int64(entry >> uint32(16))
                b = (b << uint64(length)) | uint64(entry & uint32(0xFFFF))
                n += length
                if n >= 32:
                    n -= 32
                    lanes[lane, k] = uint32((b >> uint64(n)) & uint64(0xFFFFFFFF))
                    k += 1
        if n > 0:
            lanes[lane, k] = uint32((b << uint64(32 - n)) & uint64(0xFFFFFFFF))
    bits = np.zeros(32, np.uint64)
    held = np.zeros(32, np.int64)
    taken = np.zeros(32, np.int64)
    n_words = 0
    live = True
    while live:
        live = False
        for lane in range(32):
            if left[lane] == 0:
                continue
            if held[lane] < 11:
                word = lanes[lane, taken[lane]]
                taken[lane] += 1
                words[n_words] = word
                n_words += 1
                bits[lane] |= uint64(word) << uint64(32 - held[lane])
                held[lane] += 32
            entry = table[bits[lane] >> uint64(53)]
            length = np.int64((entry >> 16) & 15)
            bits[lane] <<= uint64(length)
            held[lane] -= length
            left[lane] -= min(np.int64(entry >> 20), left[lane])
            live |= left[lane] > 0
    return n_words
