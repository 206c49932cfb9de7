"""Codes that a quantizer cannot avoid: taken out of their blocks, so that only their position is stored.

The largest value of a Q8_0 block is always coded as 127 or -127; a Q4_1 or Q5_1 block always holds its smallest and its
largest code, a Q5_0 block its smallest. An entropy coder pays for each such code as if it could be missing. Here it is
swapped to the end of the block (a swap is undone exactly) and left out of the stream; its position, and for 127 its sign,
become raw bits. This holds for a whole row group or not at all: a group with a block that lacks the code is coded as it is.

Where codes are split (`split_codes`) the place of the code that is taken out is not left out but used: it has low bits of its
own, which take the low bits of the position.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types, uint32
from numba.extending import intrinsic

from lazyweights.codecs.lane_kernels import put_forced_nibbles


@njit(cache=True, nogil=True)
def forced_bits(forced: int, low_bits: int) -> int:
    """Bits of the positions of a block; of a block with split codes, those that do not stand in its last code."""
    if forced == 1:
        return 5 - low_bits
    if forced == 2:
        return 10
    if forced == 3:
        return 6 - low_bits
    return 0


@njit(inline="always")
def position_index(row: int, block: int, n_rows: int, n_blocks: int) -> int:
    """Place of a value among those of a row group in lane order: by row phase, block, lane."""
    phase = row & 1
    even_lanes = (n_rows + 1) // 2
    return phase * n_blocks * even_lanes + block * (even_lanes - phase * (n_rows & 1)) + (row >> 1)


@intrinsic
def _trailing_zeros(typingctx: Any, x: Any) -> Any:
    """Number of zero bits below the lowest one bit of a uint32; 32 for 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.uint32(types.uint32), codegen


def _load(context: Any, builder: Any, signature: Any, args: Any, n: int) -> Any:
    """Return the `n` bytes from element `args[1]` of the array `args[0]` on as a vector."""
    array = context.make_array(signature.args[0])(context, builder, args[0])
    kind = ir.VectorType(ir.IntType(8), n)
    value = builder.load(builder.bitcast(builder.gep(array.data, [args[1]]), kind.as_pointer()))
    value.align = 1
    return value


@intrinsic(prefer_literal=True)
def _equal_bytes(typingctx: Any, symbols: Any, at: Any, value: Any) -> Any:
    """Mark (bit i of a uint32) which of the 32 bytes from element `at` of a flat uint8 array on are `value`, a constant."""
    wanted = value.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = _load(context, builder, signature, args, 32)
        return builder.bitcast(builder.icmp_unsigned("==", found, ir.Constant(found.type, [wanted] * 32)), ir.IntType(32))

    return types.uint32(symbols, at, value), codegen


@intrinsic(prefer_literal=True)
def _equal_nibbles(typingctx: Any, symbols: Any, at: Any, value: Any) -> Any:
    """Mark which of 32 nibbles (the low ones of the 16 bytes from element `at` on, then the high ones) are `value`."""
    wanted = value.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = _load(context, builder, signature, args, 16)
        low = builder.and_(found, ir.Constant(found.type, [15] * 16))
        high = builder.lshr(found, ir.Constant(found.type, [4] * 16))
        order = ir.Constant(ir.VectorType(ir.IntType(32), 32), list(range(32)))
        nibbles = builder.shuffle_vector(low, high, order)
        return builder.bitcast(builder.icmp_unsigned("==", nibbles, ir.Constant(nibbles.type, [wanted] * 32)), ir.IntType(32))

    return types.uint32(symbols, at, value), codegen


@njit(inline="always")
def _second(marks: int, first: int, end: int) -> int:
    """First of the marked places after place `first` was swapped with place `end`, which is then no match."""
    moved = (marks >> uint32(end)) & uint32(1)
    return _trailing_zeros(uint32((marks & ~(uint32(1) << uint32(end))) | (moved << first)))


@njit(cache=True, nogil=True)
def _find_forced(symbols: np.ndarray, forced: int, n_rows: int, n_blocks: int, width: int, positions: np.ndarray) -> bool:
    """Fill the positions of the forced codes of all blocks, as they go into the file; return whether every block has them."""
    missing = uint32(0)
    for row in range(n_rows):
        at = np.uint64(row * n_blocks * width)
        k = np.uint64(position_index(row, 0, n_rows, n_blocks))
        step = np.uint64(position_index(row, 1, n_rows, n_blocks)) - k
        for _ in range(n_blocks):
            # Where a code is missing its place is 32, the others make no sense then.
            if forced == 3:
                first = _trailing_zeros(uint32(_equal_bytes(symbols, at, 127) | _equal_bytes(symbols, at, 129)))
                positions[k] = first << uint32(1) | uint32(symbols[at + np.uint64(first & uint32(31))] >> 7)
                missing |= first
            elif forced == 1:
                first = _trailing_zeros(_equal_bytes(symbols, at, 0))
                positions[k] = first
                missing |= first
            else:
                if width == 32:
                    first = _trailing_zeros(_equal_bytes(symbols, at, 0))
                    second = _second(_equal_bytes(symbols, at, 31), first & uint32(31), 30)
                else:
                    first = _trailing_zeros(_equal_nibbles(symbols, at, 0))
                    second = _second(_equal_nibbles(symbols, at, 15), first & uint32(31), 15)
                positions[k] = first << uint32(5) | second
                missing |= first | second
            at += np.uint64(width)
            k += step
    return missing < uint32(32)


@njit(inline="always")
def _put_nibble(symbols: np.ndarray, cell: int, place: int, value: int) -> None:
    k = cell + np.uint64(place & uint32(15))
    shift = place >> uint32(4) << uint32(2)
    symbols[k] = (uint32(symbols[k]) & ~(uint32(15) << shift)) | (value << shift)


@njit(cache=True, nogil=True)
def take_forced(symbols: np.ndarray, meta: np.ndarray, positions: np.ndarray) -> bool:
    """Move the forced codes of each block to its end, in place; return False (nothing changed) where one is missing.

    `symbols` uint8 (rows, blocks * cell symbols); `positions` uint32 (rows * blocks,), what goes into the file, in lane
    order. A cell has 32 symbols, or 16 of two codes each. Where codes are split the last code of a block becomes the low bits
    of its position, and `positions` are what is above these.
    """
    forced = meta[4]
    n_rows = symbols.shape[0]
    n_blocks = meta[0]
    width = meta[2]
    low_bits = uint32(meta[12])
    flat = symbols.reshape(symbols.size)
    if not _find_forced(flat, forced, n_rows, n_blocks, width, positions):
        return False
    for row in range(n_rows):
        at = np.uint64(row * n_blocks * width)
        k = np.uint64(position_index(row, 0, n_rows, n_blocks))
        step = np.uint64(position_index(row, 1, n_rows, n_blocks)) - k
        for _ in range(n_blocks):
            position = positions[k]
            if width == 32:
                last = at + np.uint64(31)
                if forced == 2:
                    before = at + np.uint64(30)
                    flat[at + np.uint64(position >> uint32(5))] = flat[before]
                    flat[before] = 0
                    flat[at + np.uint64(position & uint32(31))] = flat[last]
                    flat[last] = 31
                else:
                    first = position >> uint32(1) if forced == 3 else position
                    flat[at + np.uint64(first)] = flat[last]
                    flat[last] = position & ((uint32(1) << low_bits) - uint32(1))
                    positions[k] = position >> low_bits
            else:
                last = at + np.uint64(15)
                _put_nibble(flat, at, position >> uint32(5), uint32(flat[last]) & uint32(15))
                _put_nibble(flat, at, position & uint32(31), uint32(flat[last]) >> uint32(4))
                flat[last] = 0xF0
            at += np.uint64(width)
            k += step
    return True


@njit(cache=True, nogil=True)
def put_forced(
    out: np.ndarray, first: int, row_bytes: int, n_rows: int, forced: int, n_blocks: int, width: int, stride: int,
    low_bits: int, positions: np.ndarray,
) -> None:
    """Undo `take_forced`: symbol i of block b of row r is byte ``first + r * row_bytes + b * stride + i`` of `out`."""
    even_lanes = (n_rows + 1) // 2
    put_forced_phase(out, first, 2 * row_bytes, even_lanes, forced, n_blocks, width, stride, low_bits, positions, 0)
    put_forced_phase(
        out, first + row_bytes, 2 * row_bytes, n_rows // 2, forced, n_blocks, width, stride, low_bits, positions,
        n_blocks * even_lanes,
    )


@njit(cache=True, nogil=True)
def put_forced_phase(
    out: np.ndarray, first: int, lane_stride: int, n_lanes: int, forced: int, n_blocks: int, width: int, stride: int,
    low_bits: int, positions: np.ndarray, first_position: int,
) -> None:
    """`put_forced` for the rows of one phase, `lane_stride` bytes apart, whose positions start at `first_position`."""
    last = np.uint64(31)
    lanes, step, shift = np.uint64(n_lanes), np.uint64(stride), np.uint64(low_bits)
    low_mask = (np.uint64(1) << shift) - np.uint64(1)
    for lane in range(lanes):
        at = np.uint64(first) + lane * np.uint64(lane_stride)
        k = np.uint64(first_position) + lane
        if forced == 3:
            for _ in range(n_blocks):
                position = (np.uint64(positions[k]) << shift) | (np.uint64(out[at + last]) & low_mask)
                place = at + ((position >> np.uint64(1)) & last)
                out[at + last] = out[place]
                out[place] = np.uint64(127) + np.uint64(2) * (position & np.uint64(1))
                at += step
                k += lanes
        elif forced == 1:
            for _ in range(n_blocks):
                position = (np.uint64(positions[k]) << shift) | (np.uint64(out[at + last]) & low_mask)
                place = at + (position & last)
                out[at + last] = out[place]
                out[place] = 0
                at += step
                k += lanes
        elif width == 32:
            for _ in range(n_blocks):
                position = np.uint64(positions[k])
                second = at + (position & last)
                first_place = at + ((position >> np.uint64(5)) & last)
                out[at + np.uint64(30)] = 0
                out[at + last] = out[second]
                out[second] = 31
                out[at + np.uint64(30)] = out[first_place]
                out[first_place] = 0
                at += step
                k += lanes
        else:
            for _ in range(n_blocks):
                put_forced_nibbles(out, np.int64(at), np.int64(positions[k]))
                at += step
                k += lanes


@njit(cache=True, nogil=True)
def take_window(symbols: np.ndarray, low: np.ndarray, base: int) -> bool:
    """Replace the exponents of a bfloat16 row group by windowed codes, in place; return False (nothing changed) if not all fit.

    A windowed code is the exponent and the three highest mantissa bits as one number, less ``8 * base``; it fits where it is
    below 256. `symbols` uint8: exponent in, code out. `low` uint32: sign over seven mantissa bits in, over four out.
    """
    for row in range(symbols.shape[0]):
        for i in range(symbols.shape[1]):
            code = ((np.int32(symbols[row, i]) - np.int32(base)) << 3) | (np.int32(low[row, i] & 127) >> 4)
            if code < 0 or code > 255:
                return False
    for row in range(symbols.shape[0]):
        for i in range(symbols.shape[1]):
            rest = np.int32(low[row, i])
            symbols[row, i] = ((np.int32(symbols[row, i]) - np.int32(base)) << 3) | ((rest & 127) >> 4)
            low[row, i] = ((rest >> 7) << 4) | (rest & 15)
    return True


@njit(cache=True, nogil=True)
def put_window(symbols: np.ndarray, low: np.ndarray, base: int) -> None:
    """Undo `take_window`; `symbols` may have columns behind those of `low`."""
    for row in range(symbols.shape[0]):
        for i in range(low.shape[1]):
            code = np.int32(symbols[row, i]) + (np.int32(base) << 3)
            rest = np.int32(low[row, i])
            symbols[row, i] = (code >> 3) & 255
            low[row, i] = ((rest >> 4) << 7) | ((code & 7) << 4) | (rest & 15)
