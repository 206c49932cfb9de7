"""Rows of symbols and side fields to packed blocks, in numba: the types that most files are made of.

`blocks.kernels` joins planes of codes; these kernels start from the coder's symbols (two codes to a symbol in Q4_K), so that a
few row groups at a time go from stream to blocks without leaving the cache. Types that are not here are joined by
`TensorCoder.join`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types, uint32, uint64
from numba.extending import intrinsic

from lazyweights.codecs.byte_access import load_u64, store_u16, store_u32, store_u64

NOT_COMPILED, DIRECT, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, WORDS, F32 = range(-1, 8)
"""How rows are joined; DIRECT: the symbols are bytes of the packed block as they stand."""

JOIN_OF_TYPE = {
    "Q4_0": DIRECT, "Q4_1": DIRECT, "IQ4_NL": DIRECT, "Q8_0": DIRECT, "MXFP4": DIRECT, "Q5_0": Q5_0, "Q5_1": Q5_1, "Q4_K": Q4_K,
    "Q5_K": Q5_K, "Q6_K": Q6_K, "F16": WORDS, "BF16": WORDS, "F32": F32,
}


@njit(inline="always")
def _u(n: int) -> np.uint64:
    """An index that needs no check for being negative."""
    return np.uint64(n)


@njit(inline="always")
def _low_nibbles(eight: int) -> int:
    return eight & uint64(0x0F0F0F0F0F0F0F0F)


@intrinsic
def _join_fives(typingctx: Any, symbols: Any, start: Any, out: Any, at: Any) -> Any:
    """Write the high bits and the nibbles of 32 five-bit codes to 20 bytes from `at` on; `symbols` and `out` are flat."""
    sixteen = ir.VectorType(ir.IntType(8), 16)
    i32 = ir.IntType(32)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, target = (context.make_array(signature.args[i])(context, builder, args[i]).data for i in (0, 2))

        def place(pointer: Any, first: Any, offset: int, kind: Any) -> Any:
            index = builder.add(first, ir.Constant(ir.IntType(64), offset))
            return builder.bitcast(builder.gep(pointer, [index]), kind.as_pointer())

        def same(value: int) -> ir.Constant:
            return ir.Constant(sixteen, [value] * 16)

        halves = []
        marks = []
        for offset in (0, 16):
            codes = builder.load(place(source, args[1], offset, sixteen))
            codes.align = 1
            is_high = builder.icmp_unsigned("!=", builder.and_(codes, same(16)), same(0))
            marks.append(builder.zext(builder.bitcast(is_high, ir.IntType(16)), i32))
            halves.append(builder.and_(codes, same(15)))
        high = builder.or_(marks[0], builder.shl(marks[1], ir.Constant(i32, 16)))
        builder.store(high, place(target, args[3], 0, i32)).align = 1
        nibbles = builder.or_(halves[0], builder.shl(halves[1], same(4)))
        builder.store(nibbles, place(target, args[3], 4, sixteen)).align = 1
        return context.get_dummy_value()

    return types.void(symbols, types.int64, out, types.int64), codegen


@njit(cache=True, nogil=True)
def _join_sub_scales(values: np.ndarray, scales: int, mins: int, out: np.ndarray, at: int) -> None:
    """Write eight 6-bit sub-scales and sub-mins to 12 bytes."""
    for i in range(4):
        low_scale, high_scale = uint32(values[_u(scales + i)]), uint32(values[_u(scales + 4 + i)])
        low_min, high_min = uint32(values[_u(mins + i)]), uint32(values[_u(mins + 4 + i)])
        out[_u(at + i)] = (low_scale & uint32(63)) | (((high_scale >> uint32(4)) & uint32(3)) << uint32(6))
        out[_u(at + 4 + i)] = (low_min & uint32(63)) | (((high_min >> uint32(4)) & uint32(3)) << uint32(6))
        out[_u(at + 8 + i)] = (high_scale & uint32(15)) | ((high_min & uint32(15)) << uint32(4))


@njit(cache=True, nogil=True)
def _join_q4_k(symbols: np.ndarray, start: int, out: np.ndarray, at: int) -> None:
    for pair in range(4):
        for i in range(0, 16, 8):
            low = load_u64(symbols, start + 32 * pair + i)
            high = load_u64(symbols, start + 32 * pair + 16 + i)
            store_u64(out, at + 32 * pair + i, _low_nibbles(low) | (_low_nibbles(high) << uint64(4)))
            high_nibbles = _low_nibbles(low >> uint64(4)) | (high & uint64(0xF0F0F0F0F0F0F0F0))
            store_u64(out, at + 32 * pair + 16 + i, high_nibbles)


@njit(cache=True, nogil=True)
def _join_q5_k(symbols: np.ndarray, start: int, out: np.ndarray, at: int) -> None:
    source, target = _u(start), _u(at)
    for i in range(_u(32)):
        high = uint32(0)
        for part in range(_u(8)):
            high |= ((uint32(symbols[source + i + _u(32) * part]) >> uint32(4)) & uint32(1)) << uint32(part)
        out[target + i] = high
    for pair in range(4):
        low, nibbles = _u(start + 64 * pair), _u(at + 32 + 32 * pair)
        for i in range(_u(32)):
            out[nibbles + i] = (symbols[low + i] & 15) | ((symbols[low + i + _u(32)] & 15) << 4)


@njit(cache=True, nogil=True)
def _join_q6_k(symbols: np.ndarray, start: int, out: np.ndarray, at: int) -> None:
    for half in range(2):
        source, target, high = _u(start + 128 * half), _u(at + 64 * half), _u(at + 128 + 32 * half)
        for i in range(_u(32)):
            a, b = symbols[source + i], symbols[source + i + _u(32)]
            c, d = symbols[source + i + _u(64)], symbols[source + i + _u(96)]
            out[target + i] = (a & 15) | ((c & 15) << 4)
            out[target + i + _u(32)] = (b & 15) | ((d & 15) << 4)
            out[high + i] = ((a >> 4) & 3) | (((b >> 4) & 3) << 2) | (((c >> 4) & 3) << 4) | (((d >> 4) & 3) << 6)


@njit(cache=True, nogil=True)
def join_rows(
    join: int,
    n_rows: int,
    n_blocks: int,
    half_values: np.ndarray,
    byte_values: np.ndarray,
    symbols: np.ndarray,
    raw_values: np.ndarray,
    packed: np.ndarray,
) -> None:
    """Pack the first `n_rows` rows of plane arrays (`group_decode.decode_groups`) into `packed`, uint8 (rows, row bytes).

    `join` : one of the constants above, not DIRECT or NOT_COMPILED
    n_blocks : blocks of a row; of floats, which have none, it does not matter
    symbols : uint8 (rows, bytes), rows of a multiple of 8 bytes
    """
    flat = symbols.reshape(symbols.size)
    out = packed.reshape(packed.size)
    fields = byte_values.reshape(byte_values.size)
    for row in range(n_rows):
        source = row * symbols.shape[1]
        at = row * packed.shape[1]
        if join == 6:
            for i in range(_u(raw_values.shape[1])):
                r = raw_values[_u(row), i]
                word = (uint32(flat[_u(source) + i]) << uint32(7)) | (r & uint32(127)) | ((r & uint32(128)) << uint32(8))
                out[_u(at) + _u(2) * i] = word & uint32(255)
                out[_u(at) + _u(2) * i + _u(1)] = word >> uint32(8)
            continue
        if join == 7:
            for i in range(_u(raw_values.shape[1])):
                r = raw_values[_u(row), i]
                word = (uint32(flat[_u(source) + i]) << uint32(23)) | (r & uint32(0x7FFFFF)) | ((r >> uint32(23)) << uint32(31))
                store_u32(out, np.int64(at + 4 * i), word)
            continue
        for block in range(n_blocks):
            scale = half_values[0, row, block]
            if join == 1:
                store_u16(out, at, scale)
                _join_fives(flat, source, out, at + 2)
                source += 32
                at += 22
            elif join == 2:
                store_u16(out, at, scale)
                store_u16(out, at + 2, half_values[1, row, block])
                _join_fives(flat, source, out, at + 4)
                source += 32
                at += 24
            elif join == 5:
                _join_q6_k(flat, source, out, at)
                k = _u(row * byte_values.shape[1] + 16 * block)
                for i in range(_u(16)):
                    out[_u(at + 192) + i] = fields[k + i]
                store_u16(out, at + 208, scale)
                source += 256
                at += 210
            else:
                store_u16(out, at, scale)
                store_u16(out, at + 2, half_values[1, row, block])
                k = row * byte_values.shape[1] + 8 * block
                _join_sub_scales(fields, k, k + 8 * n_blocks, out, at + 4)
                if join == 3:
                    _join_q4_k(flat, source, out, at + 16)
                    source += 128
                    at += 144
                else:
                    _join_q5_k(flat, source, out, at + 16)
                    source += 256
                    at += 176
