"""Row groups of the preset `unit`: what the hardware decode unit reads (`docs/format.md`, "Lockstep row groups").

The codes of 64 rows are cut into tiles of 256 columns; each tile is 32 lane streams in the lockstep layout, all with one
table for the tensor. In front of them stands the length of each tile; behind them the other planes of the row group as
they are, uncoded: the unit passes them through.
"""

from __future__ import annotations

import numpy as np

from lazyweights.codecs import lane_kernels
from lazyweights.container.bit_kernels import SLACK_BYTES, pack_bits, unpack_bits
from lazyweights.container.tensor_coder import PlaneArrays, TensorCoder
from lazyweights.errors import CodecError

TILE_CODES = 256
"""Columns of a tile, in codes."""


def tile_columns(coder: TensorCoder) -> int:
    """Symbols of a row of a tile."""
    return TILE_CODES // coder.layout.codes_per_symbol


def encode_group(arrays: PlaneArrays, rows: slice, coder: TensorCoder, entries: np.ndarray) -> bytes | None:
    """Return the payload of one row group, or None where a symbol has no codeword.

    `entries` is uint32 (256,), the encode entries of the tensor's table.
    """
    symbols = arrays.symbols[rows]
    width = tile_columns(coder)
    lengths = []
    tiles = []
    for column in range(0, symbols.shape[1], width):
        tile = np.ascontiguousarray(symbols[:, column : column + width])
        words = np.zeros(32 * (2 * width * 11 // 32 + 2), np.uint32)
        longest = lane_kernels.encode_lockstep(tile, entries, words)
        if longest < 0:
            return None
        lengths.append(longest)
        tiles.append(words[: 32 * longest])
    header = np.array(lengths + [0] * (len(lengths) % 2), "<u2").tobytes()
    return header + b"".join(t.astype("<u4").tobytes() for t in tiles) + _pack_rest(arrays, rows, coder)


def decode_group(payload: np.ndarray, n_rows: int, coder: TensorCoder, table: np.ndarray) -> PlaneArrays:
    """Decode a payload, uint8; `table` is uint16, 2048 entries and padding.

    Raises
    ------
    CodecError
        If the payload is not as long as its tile lengths say.
    """
    n_symbols = coder.n_cells * coder.cell_symbols
    width = tile_columns(coder)
    n_tiles = -(-n_symbols // width)
    at = 2 * (n_tiles + n_tiles % 2)
    rest_bytes = _rest_bytes(n_rows, coder)
    lengths = payload[:at].view("<u2")[:n_tiles].astype(np.int64) if payload.size >= at else np.zeros(0, np.int64)
    expected = at + 128 * int(lengths.sum()) + rest_bytes
    if payload.size < at or payload.size != expected:
        raise CodecError("a lockstep row group has another length than its tiles", expected=expected, found=payload.size)
    symbols = np.empty((n_rows, n_symbols), np.uint8)
    for k, column in enumerate(range(0, n_symbols, width)):
        n_bytes = 128 * int(lengths[k])
        words = np.frombuffer(payload[at : at + n_bytes].tobytes(), np.uint32)
        at += n_bytes
        tile = np.empty((n_rows, min(width, n_symbols - column)), np.uint8)
        lane_kernels.decode_lockstep(words, table, tile)
        symbols[:, column : column + width] = tile
    return _unpack_rest(payload[at:], n_rows, coder, symbols)


def byte_columns(coder: TensorCoder) -> int:
    """Columns of all byte fields."""
    return sum(coder.byte_columns(b.per_block) for b in coder.layout.bytes_)


def _rest_bits(n_rows: int, coder: TensorCoder) -> int:
    per_block = 16 * len(coder.layout.halves) + sum(n * bits for _, n, bits in coder.raw_planes)
    return n_rows * (coder.n_blocks * per_block + 8 * byte_columns(coder))


def _rest_bytes(n_rows: int, coder: TensorCoder) -> int:
    return (_rest_bits(n_rows, coder) + 7) // 8


def _pack_rest(arrays: PlaneArrays, rows: slice, coder: TensorCoder) -> bytes:
    out = np.zeros(_rest_bytes(len(arrays.symbols[rows]), coder) + SLACK_BYTES, np.uint8)
    at = pack_bits(np.ascontiguousarray(arrays.half_values[:, rows]), 16, out, 0)
    at = pack_bits(np.ascontiguousarray(arrays.byte_values[rows]), 8, out, at)
    column = 0
    for _, per_block, bits in coder.raw_planes:
        n = per_block * coder.n_blocks
        at = pack_bits(np.ascontiguousarray(arrays.raw_values[rows, column : column + n]), bits, out, at)
        column += n
    return out[: (at + 7) // 8].tobytes()


def _unpack_rest(packed: np.ndarray, n_rows: int, coder: TensorCoder, symbols: np.ndarray) -> PlaneArrays:
    padded = np.concatenate([packed, np.zeros(SLACK_BYTES, np.uint8)])
    half_values = np.empty((len(coder.layout.halves), n_rows, coder.n_blocks), np.uint16)
    byte_values = np.empty((n_rows, byte_columns(coder)), np.uint8)
    raw_values = np.empty((n_rows, sum(n for _, n, _ in coder.raw_planes) * coder.n_blocks), np.uint32)
    at = unpack_bits(padded, 0, 16, half_values.reshape(-1))
    at = unpack_bits(padded, at, 8, byte_values.reshape(-1))
    column = 0
    for _, per_block, bits in coder.raw_planes:
        n = per_block * coder.n_blocks
        values = np.empty(n_rows * n, np.uint32)
        at = unpack_bits(padded, at, bits, values)
        raw_values[:, column : column + n] = values.reshape(n_rows, n)
        column += n
    return PlaneArrays(half_values, byte_values, symbols, raw_values)
