"""Codes to coder symbols and back: several narrow codes packed into one byte; 16-bit words and integers split in bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic


@njit(cache=True, nogil=True)
def pack_codes(codes: np.ndarray, cell_codes: int, per_symbol: int, code_bits: int) -> np.ndarray:
    """Pack `per_symbol` codes of each cell into a byte.

    Symbol i of a cell of n symbols holds the codes i, i + n, i + 2 n, ... from the low bits up.

    Parameters
    ----------
    codes : uint8 (rows, columns)
    cell_codes : codes of a cell
    per_symbol : codes of a symbol
    code_bits : bits of a code inside the symbol

    Returns
    -------
    uint8 (rows, columns // per_symbol)
    """
    n_rows, columns = codes.shape
    n = cell_codes // per_symbol
    out = np.zeros((n_rows, columns // per_symbol), np.uint8)
    for row in range(n_rows):
        for cell in range(columns // cell_codes):
            target = out[row, cell * n : (cell + 1) * n]
            for k in range(per_symbol):
                source = codes[row, cell * cell_codes + k * n : cell * cell_codes + (k + 1) * n]
                shift = k * code_bits
                for i in range(n):
                    target[i] |= source[i] << shift
    return out


@njit(cache=True, nogil=True)
def unpack_codes(symbols: np.ndarray, cell_codes: int, per_symbol: int, code_bits: int) -> np.ndarray:
    """Inverse of `pack_codes`; bits above the codes are dropped."""
    n_rows, width = symbols.shape
    n = cell_codes // per_symbol
    out = np.empty((n_rows, width * per_symbol), np.uint8)
    mask = np.uint8((1 << code_bits) - 1)
    for row in range(n_rows):
        for cell in range(width // n):
            source = symbols[row, cell * n : (cell + 1) * n]
            for k in range(per_symbol):
                target = out[row, cell * cell_codes + k * n : cell * cell_codes + (k + 1) * n]
                shift = k * code_bits
                for i in range(n):
                    target[i] = (source[i] >> shift) & mask
    return out


@njit(cache=True, nogil=True)
def split_words(words: np.ndarray) -> tuple:
    """Split uint16 (rows, columns) into symbols (bits 14..7, uint8) and the rest (sign over bits 6..0, uint32)."""
    symbols = np.empty(words.shape, np.uint8)
    rest = np.empty(words.shape, np.uint32)
    for row in range(words.shape[0]):
        for column in range(words.shape[1]):
            w = np.uint32(words[row, column])
            symbols[row, column] = (w >> np.uint32(7)) & np.uint32(255)
            rest[row, column] = (w & np.uint32(127)) | ((w >> np.uint32(8)) & np.uint32(128))
    return symbols, rest


@njit(cache=True, nogil=True)
def join_words(symbols: np.ndarray, rest: np.ndarray, words: np.ndarray) -> None:
    """Inverse of `split_words`, into uint16 `words`."""
    for row in range(words.shape[0]):
        for column in range(words.shape[1]):
            r = rest[row, column]
            words[row, column] = (
                (np.uint32(symbols[row, column]) << np.uint32(7))
                | (r & np.uint32(127))
                | ((r & np.uint32(128)) << np.uint32(8))
            )


@njit(cache=True, nogil=True)
def row_levels(symbols: np.ndarray, low: np.ndarray, base: int, windowed: bool) -> np.ndarray:
    """Return the mean symbol of each row, uint8 (rows,): of the plain symbols, or of the windowed codes, clipped."""
    out = np.zeros(symbols.shape[0], np.uint8)
    for row in range(symbols.shape[0]):
        total = 0
        for i in range(symbols.shape[1]):
            if windowed:
                code = ((np.int64(symbols[row, i]) - base) << 3) + (np.int64(low[row, i] & 127) >> 4)
                total += min(max(code, 0), 255)
            else:
                total += np.int64(symbols[row, i])
        out[row] = total // max(symbols.shape[1], 1)
    return out


@intrinsic
def _copy16(typingctx: Any, source: Any, at: Any, target: Any, to: Any) -> Any:
    """Copy 16 bytes between flat uint8 arrays, which a loop over bytes does slowly."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(ir.IntType(8), 16).as_pointer()
        pointers = []
        for i in (0, 2):
            data = context.make_array(signature.args[i])(context, builder, args[i]).data
            pointers.append(builder.bitcast(builder.gep(data, [args[i + 1]]), kind))
        value = builder.load(pointers[0])
        value.align = 1
        builder.store(value, pointers[1]).align = 1
        return context.get_dummy_value()

    return types.void(source, at, target, to), codegen


@njit(cache=True, nogil=True)
def split_int16(values: np.ndarray, cell_codes: int) -> np.ndarray:
    """Split int16 (rows, columns) into symbols, uint8 (rows, 2 * columns): a cell of high bytes, then one of low bytes.

    The high byte is that of ``value + 128``, which is 0 where the value fits into the low byte with its sign.
    """
    n_rows, columns = values.shape
    symbols = np.empty((n_rows, 2 * columns), np.uint8)
    for row in range(n_rows):
        for first in range(0, columns, cell_codes):
            for i in range(cell_codes):
                value = np.int32(values[row, first + i])
                symbols[row, 2 * first + i] = ((value + 128) >> 8) & 255
                symbols[row, 2 * first + cell_codes + i] = value & 255
    return symbols


@njit(cache=True, nogil=True)
def join_int16(symbols: np.ndarray, cell_codes: int, values: np.ndarray) -> None:
    """Inverse of `split_int16`, into int16 `values`."""
    for row in range(values.shape[0]):
        for first in range(0, values.shape[1], cell_codes):
            for i in range(cell_codes):
                high = np.int32(symbols[row, 2 * first + i])
                low = np.int32(np.int8(symbols[row, 2 * first + cell_codes + i]))
                values[row, first + i] = np.int16(((high << 8) + low) & 0xFFFF)


@njit(cache=True, nogil=True)
def magnitude_levels(values: np.ndarray) -> np.ndarray:
    """Return the level of each row of int8 or int16, uint8 (rows,): of 16 times its mean magnitude, in quarter octaves.

    Levels are those of `stream_layout.level_table` with the lowest bit cleared, which leaves room for contexts of low bytes.
    """
    out = np.zeros(values.shape[0], np.uint8)
    for row in range(values.shape[0]):
        total = np.int64(0)
        for i in range(values.shape[1]):
            total += abs(np.int64(values[row, i]))
        out[row] = log_level(16 * total // max(values.shape[1], 1)) & 254
    return out


@njit(cache=True, nogil=True)
def log_level(value: int) -> int:
    """Return the logarithm of an integer in 1/8 octaves as in `stream_layout.level_table`, but 0 for 0."""
    if value <= 0:
        return 0
    exponent = np.int64(0)
    while value >> (exponent + 1):
        exponent += 1
    return 8 * exponent + ((value << 3) >> exponent) - 8


@njit(cache=True, nogil=True)
def split_direct(
    packed: np.ndarray,
    block_bytes: int,
    offset: int,
    width: int,
    half_values: np.ndarray,
    byte_values: np.ndarray,
    symbols: np.ndarray,
) -> None:
    """Split rows of blocks whose symbols are bytes of the block as they stand.

    Parameters
    ----------
    packed : uint8 (rows, blocks * block_bytes): each block starts with its halves (or with one byte, where there are none)
    offset, width : first symbol byte of a block, and how many there are, a multiple of 16
    half_values : uint16 (n_halves, rows, blocks), output
    byte_values : uint8 (rows, blocks) or (rows, 0), output
    symbols : uint8 (rows, blocks * width), output
    """
    n_blocks = packed.shape[1] // block_bytes
    n = np.uint64(packed.shape[0] * n_blocks)
    step = np.uint64(block_bytes)
    source = packed.reshape(packed.size)
    target = symbols.reshape(symbols.size)
    for f in range(half_values.shape[0]):
        values = half_values[f].reshape(half_values[f].size)
        at = np.uint64(2 * f)
        for k in range(n):
            values[k] = np.uint16(source[at]) | (np.uint16(source[at + np.uint64(1)]) << 8)
            at += step
    if byte_values.shape[1]:
        values8 = byte_values.reshape(byte_values.size)
        for k in range(n):
            values8[k] = source[k * step]
    at = np.uint64(offset)
    to = np.uint64(0)
    for _ in range(n):
        for part in range(width // 16):
            k = np.uint64(16 * part)
            _copy16(source, at + k, target, to + k)
        at += step
        to += np.uint64(width)
