"""Split codes: the high parts of two codes as one symbol, their low bits raw.

The low bits of codes of five bits and more are next to uniform, so a code table gains nothing on them; but they take a
look-up for each code. Here the four high bits of codes i and i + 16 of a cell of 32 are symbol i, code i in its low nibble:
half as many look-ups, and a symbol of twice as many bits loses less to the whole bits of codewords. The low bits, 1 or 4
(`low_bits`) of each code, stand in front of the stream: row phase by row phase, in it cell by cell, in it lane by lane, those
of codes i and i + 16 side by side as bits ``2 * low_bits * i`` and up of the ``32 * low_bits`` bits of a cell, little-endian.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types, uint32
from numba.extending import intrinsic

from lazyweights.codecs.byte_access import load_u64, store_u32

LAST_CONTEXT = 255
"""Context of the last symbol of a cell without its forced code: only its low nibble says something."""


_BYTES = ir.VectorType(ir.IntType(8), 16)
_HIGH_4, _HIGH_1, _LOW_4 = 0, 1, 2


@intrinsic(prefer_literal=True)
def _put_bytes(typingctx: Any, which: Any, codes: Any, at: Any, out: Any, to: Any) -> Any:
    """Write 16 bytes for the 32 codes from element `at` of a flat uint8 array on: their symbols, or their low nibbles."""
    kind = which.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        b = builder
        source, target = (context.make_array(signature.args[i])(context, b, args[i]).data for i in (1, 3))

        def place(pointer: Any, index: Any) -> Any:
            return b.bitcast(b.gep(pointer, [index]), _BYTES.as_pointer())

        def same(value: int) -> ir.Constant:
            return ir.Constant(_BYTES, [value] * 16)

        first = b.load(place(source, args[2]))
        second = b.load(place(source, b.add(args[2], ir.Constant(ir.IntType(64), 16))))
        first.align = second.align = 1
        if kind == _HIGH_4:
            found = b.or_(b.lshr(first, same(4)), b.and_(second, same(0xF0)))
        elif kind == _HIGH_1:
            found = b.or_(b.lshr(first, same(1)), b.and_(b.shl(second, same(3)), same(0xF0)))
        else:
            found = b.or_(b.and_(first, same(15)), b.shl(second, same(4)))
        b.store(found, place(target, args[4])).align = 1
        return context.get_dummy_value()

    return types.void(which, codes, types.int64, out, types.int64), codegen


@intrinsic
def _odd_codes(typingctx: Any, codes: Any, at: Any) -> Any:
    """Mark (bit i of a uint32) which of the 16 bytes from element `at` of a flat uint8 array on are odd."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        found = builder.load(builder.bitcast(builder.gep(data, [args[1]]), _BYTES.as_pointer()))
        found.align = 1
        marks = builder.trunc(found, ir.VectorType(ir.IntType(1), 16))
        return builder.zext(builder.bitcast(marks, ir.IntType(16)), ir.IntType(32))

    return types.uint32(codes, types.int64), codegen


@njit(inline="always")
def _spread(bits: Any) -> Any:
    """Return 16 bits with a zero above each of them."""
    bits = (bits | (bits << uint32(8))) & uint32(0x00FF00FF)
    bits = (bits | (bits << uint32(4))) & uint32(0x0F0F0F0F)
    bits = (bits | (bits << uint32(2))) & uint32(0x33333333)
    return (bits | (bits << uint32(1))) & uint32(0x55555555)


@njit(cache=True, nogil=True)
def split_high(codes: np.ndarray, low_bits: int, high: np.ndarray) -> None:
    """Fill the symbols of some rows, uint8 (rows, 16 * cells), from their codes, uint8 (rows, 32 * cells)."""
    source, target = codes.reshape(codes.size), high.reshape(high.size)
    for cell in range(target.size // 16):
        if low_bits == 4:
            _put_bytes(_HIGH_4, source, 32 * cell, target, 16 * cell)  # type: ignore[call-arg]
        else:
            _put_bytes(_HIGH_1, source, 32 * cell, target, 16 * cell)  # type: ignore[call-arg]


@njit(cache=True, nogil=True)
def pack_low(codes: np.ndarray, low_bits: int, out: np.ndarray, first_byte: int) -> None:
    """Write the low bits of up to 64 rows of codes, uint8 (rows, 32 * cells), to `out`, uint8, from `first_byte` on."""
    n_rows, width = codes.shape
    source = codes.reshape(codes.size)
    at = np.int64(first_byte)
    for phase in range(2):
        for cell in range(width // 32):
            for row in range(phase, n_rows, 2):
                place = row * width + 32 * cell
                if low_bits == 4:
                    _put_bytes(_LOW_4, source, place, out, at)  # type: ignore[call-arg]
                    at += 16
                else:
                    first = _spread(_odd_codes(source, place))  # type: ignore[call-arg]
                    second = _spread(_odd_codes(source, place + 16))
                    bits = first | (second << uint32(1))
                    store_u32(out, at, uint32(bits))
                    at += 4


@njit(cache=True, nogil=True)
def join_split(
    out: np.ndarray, first: int, lane_stride: int, n_lanes: int, n_cells: int, cell_stride: int, low_bits: int,
    low: np.ndarray, first_low: int,
) -> None:
    """Turn the symbols of the rows of one phase into codes, in place.

    Parameters
    ----------
    out : uint8, flat; cell c of lane l has its 16 symbols, and then its 32 codes, from
        ``first + l * lane_stride + c * cell_stride`` on
    low : uint8, flat; the low bits of the phase start at `first_low`, and four bytes more than they take are there
    """
    symbols = np.empty(16, np.uint8)
    lows = np.empty(16, np.uint8)
    for lane in range(np.uint64(n_lanes)):
        for cell in range(np.uint64(n_cells)):
            at = np.uint64(first) + lane * np.uint64(lane_stride) + cell * np.uint64(cell_stride)
            place = np.uint64(first_low) + (cell * np.uint64(n_lanes) + lane) * np.uint64(4 * low_bits)
            for i in range(np.uint64(16)):
                symbols[i] = out[at + i]
            if low_bits == 4:
                for i in range(np.uint64(16)):
                    lows[i] = low[place + i]
                for i in range(np.uint64(16)):
                    out[at + i] = (symbols[i] << np.uint8(4)) | (lows[i] & np.uint8(15))
                    out[at + i + np.uint64(16)] = (symbols[i] & np.uint8(0xF0)) | (lows[i] >> np.uint8(4))
            else:
                bits = uint32(load_u64(low, np.int64(place)) & np.uint64(0xFFFFFFFF))  # type: ignore[call-arg]
                for i in range(np.uint64(16)):
                    lows[i] = np.uint8((bits >> uint32(np.uint64(2) * i)) & uint32(3))
                for i in range(np.uint64(16)):
                    out[at + i] = ((symbols[i] << np.uint8(1)) & np.uint8(0x1E)) | (lows[i] & np.uint8(1))
                    out[at + i + np.uint64(16)] = ((symbols[i] >> np.uint8(3)) & np.uint8(0x1E)) | (lows[i] >> np.uint8(1))
