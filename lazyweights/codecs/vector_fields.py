"""What surrounds the codes, for CPUs with AVX-512: raw bits to numbers, side symbols to the tables of cells.

Bit-equal to `container.bit_kernels.unpack_bits` and `container.cell_contexts.cell_contexts`, which run where the CPU lacks the
instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from lazyweights.codecs.vector_emit import I32, VEC, VEC8, Emitter, N, splat

UNPACK_BITS_MAX = 25
"""Widest number that four bytes hold wherever it starts in the first of them."""


@intrinsic
def _unpack(typingctx, packed, byte, n_bits, out, n_vectors):  # type: ignore[no-untyped-def]
    """Read ``16 * n_vectors`` numbers of `n_bits` bits, the first one at a byte's top, into a flat array."""
    signature = types.void(packed, byte, n_bits, out, n_vectors)
    width = out.dtype.bitwidth

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        e = Emitter(context, builder, signature, args)
        b = builder
        packed_p, out_p = e.data(0), e.data(3)
        bits = e.broadcast(b.trunc(args[2], I32))
        # Number i starts in byte ``i * n_bits // 8``; its four bytes, the first one on top, make one 32-bit element.
        start = b.mul(ir.Constant(VEC, list(range(N))), bits)
        bytes_of = b.add(b.mul(b.lshr(start, splat(3)), splat(0x01010101)), splat(0x00010203))
        bytes_of = b.bitcast(bytes_of, ir.VectorType(ir.IntType(8), 64))
        down = b.sub(b.sub(splat(32), bits), b.and_(start, splat(7)))
        mask = b.sub(b.shl(splat(1), bits), splat(1))
        at = cgutils.alloca_once_value(b, args[1])
        step = b.mul(args[2], e.index(2))
        bytes64 = ir.VectorType(ir.IntType(8), 64)
        with cgutils.for_range(b, args[4]) as vector:
            source = e.load(packed_p, b.load(at), bytes64)
            four = e.call("llvm.x86.avx512.permvar.qi.512", bytes64, source, bytes_of)
            value = b.and_(b.lshr(b.bitcast(four, VEC), down), mask)
            if width < 32:
                value = b.trunc(value, ir.VectorType(ir.IntType(width), N))
            e.store(value, out_p, b.mul(vector.index, e.index(N)))
            b.store(b.add(b.load(at), step), at)
        return context.get_dummy_value()

    return signature, codegen


@njit(cache=True, nogil=True)
def unpack_aligned(packed, at, n_bits, out):  # type: ignore[no-untyped-def]
    """`bit_kernels.unpack_bits` for what fits whole vectors: returns False, and does nothing, where it does not fit.

    Reads up to 64 bytes from where the last 16 numbers start.
    """
    n = out.size
    end = (at >> 3) + 2 * n_bits * (n // 16) + 64
    if at & 7 or n % 16 or n_bits < 1 or n_bits > UNPACK_BITS_MAX or end > packed.size:
        return False
    _unpack(packed, np.int64(at >> 3), np.int64(n_bits), out, np.int64(n // 16))
    return True


@intrinsic
def _join_words(typingctx, symbols, at, raw, byte, n_bits, base, out, out_at, n_vectors):  # type: ignore[no-untyped-def]
    """Join ``32 * n_vectors`` symbols and raw low parts of 16-bit floats, see `join_words`; all arrays are flat."""
    signature = types.void(symbols, at, raw, byte, n_bits, base, out, out_at, n_vectors)
    i16 = ir.IntType(16)
    words = ir.VectorType(i16, 32)
    bytes32, bytes64 = (ir.VectorType(ir.IntType(8), n) for n in (32, 64))

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        e = Emitter(context, builder, signature, args)
        b = builder
        symbols_p, raw_p, out_p = (e.data(i) for i in (0, 2, 6))
        at, byte, n_bits, base, out_at, n_vectors = (args[i] for i in (1, 3, 4, 5, 7, 8))

        def constant(values: list[int]) -> ir.Constant:
            return ir.Constant(words, values)

        def same(value: int) -> ir.Constant:
            return constant([value] * 32)

        first = b.shl(b.trunc(base, i16), ir.Constant(i16, 7))
        one = b.insert_element(ir.Constant(words, ir.Undefined), first, ir.Constant(I32, 0))
        window = b.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, 32), [0] * 32))
        # Value i of five bits starts in byte ``5 i // 8``; that byte on top of the next one holds all of it.
        starts = [5 * i for i in range(32)]
        bytes_of = ir.Constant(bytes64, [k for start in starts for k in ((start >> 3) + 1, start >> 3)])
        down = constant([11 - (start & 7) for start in starts])

        def join(windowed: bool) -> None:
            with cgutils.for_range(b, n_vectors) as vector:
                place = b.mul(vector.index, e.index(32))
                symbol = b.zext(e.load(symbols_p, b.add(at, place), bytes32), words)
                if windowed:
                    source = e.load(raw_p, b.add(byte, b.mul(vector.index, e.index(20))), bytes64)
                    two = e.call("llvm.x86.avx512.permvar.qi.512", bytes64, source, bytes_of)
                    low = b.lshr(b.bitcast(two, words), down)
                    word = b.and_(b.add(b.shl(symbol, same(4)), window), same(0x7FF0))
                    word = b.or_(word, b.and_(low, same(15)))
                    word = b.or_(word, b.shl(b.lshr(low, same(4)), same(15)))
                else:
                    low = b.zext(e.load(raw_p, b.add(byte, place), bytes32), words)
                    word = b.or_(b.shl(symbol, same(7)), b.and_(low, same(127)))
                    word = b.or_(word, b.shl(b.lshr(low, same(7)), same(15)))
                e.store(word, out_p, b.add(out_at, b.mul(place, e.index(2))))

        with b.if_else(b.icmp_signed("==", n_bits, e.index(5))) as (then, otherwise):
            with then:
                join(True)
            with otherwise:
                join(False)
        return context.get_dummy_value()

    return signature, codegen


@njit(cache=True, nogil=True)
def join_words(symbols, at, raw, byte, n_bits, base, out, out_at, n):  # type: ignore[no-untyped-def]
    """Write `n` 16-bit floats, a multiple of 32, as bytes to `out` from `out_at` on.

    Parameters
    ----------
    symbols, raw, out : uint8, flat; the symbols start at `at`, the low parts at byte `byte` of `raw`, of which up to 64 bytes
        behind them are read
    n_bits : 8, or 5 where the symbols are windowed codes
    base : of the window; 0 where there is none
    """
    _join_words(
        symbols, np.int64(at), raw, np.int64(byte), np.int64(n_bits), np.int64(base), out, np.int64(out_at), np.int64(n // 32)
    )


def _floor_divide(e: Emitter, value: Any, divisor: Any) -> Any:
    """Return ``value // divisor`` for int32 lanes and one positive double; exact: doubles hold the quotients well enough."""
    b = e.b
    half = ir.VectorType(I32, 8)
    doubles = ir.VectorType(ir.DoubleType(), 8)
    undefined = ir.Constant(VEC, ir.Undefined)
    one = b.insert_element(ir.Constant(doubles, ir.Undefined), divisor, ir.Constant(I32, 0))
    divisors = b.shuffle_vector(one, one, ir.Constant(half, [0] * 8))
    parts = []
    for k in range(2):
        part = b.shuffle_vector(value, undefined, ir.Constant(half, list(range(8 * k, 8 * k + 8))))
        quotient = b.fdiv(b.sitofp(part, doubles), divisors)
        parts.append(b.fptosi(e.call("llvm.floor.v8f64", doubles, quotient), half))
    return b.shuffle_vector(parts[0], parts[1], ir.Constant(VEC, list(range(N))))


def _contexts_intrinsic(by_zero: bool, with_sub: bool) -> Callable[..., Any]:
    """Return the intrinsic for types with or without a min, with or without sub-scales."""

    @intrinsic
    def contexts(typingctx, side, scale_at, sub_at, min_at, sub_min_at, n_scales, per_scale, factor, zero_base, base, levels, cell_offsets, scratch, out, out_at):  # type: ignore[no-untyped-def]  # noqa: E501
        """Table offsets of the cells of one row phase of one stream.

        `scale_at`, `sub_at`, `min_at`, `sub_min_at`: where in `side` the planes of this phase start; `n_scales`, `per_scale`:
        scales of a row, cells of a scale; `factor` of the scale; `base` of contexts.
        """
        signature = types.void(
            side, scale_at, sub_at, min_at, sub_min_at, n_scales, per_scale, factor, zero_base, base, levels, cell_offsets,
            scratch, out, out_at,
        )

        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            e = Emitter(context, builder, signature, args)
            b = builder
            side_p, levels_p, tables_p, scratch_p, out_p = (e.data(i) for i in (0, 10, 11, 12, 13))
            scale_at, sub_at, min_at, sub_min_at, n_scales, per_scale, factor, zero_base, base = args[1:10]
            out_at = args[14]
            n_cells = b.mul(n_scales, per_scale)
            factors, zero_bases, bases = (e.broadcast(b.trunc(x, I32)) for x in (factor, zero_base, base))
            n_double = b.sitofp(n_cells, ir.DoubleType())
            levels_of_min = b.gep(levels_p, [e.index(256)])

            def symbols(at: Any, row: Any, lane: Any) -> Any:
                place = b.add(b.add(at, b.mul(row, e.index(32))), lane)
                return e.load(side_p, place, VEC8)

            def level_of(pointer: Any, at: Any, cell: Any, lane: Any) -> Any:
                return e.gather(pointer, b.zext(symbols(at, cell, lane), VEC), 4)

            with cgutils.for_range(b, e.index(2)) as half:
                lane = b.mul(half.index, e.index(N))
                total = cgutils.alloca_once_value(b, splat(0))
                b.store(splat(0), total)
                with cgutils.for_range(b, n_scales) as scale:
                    of_scale = b.mul(b.zext(symbols(scale_at, scale.index, lane), VEC), factors)
                    with cgutils.for_range(b, per_scale) as k:
                        cell = b.add(b.mul(scale.index, per_scale), k.index)
                        level = b.add(of_scale, level_of(levels_p, sub_at, cell, lane)) if with_sub else of_scale
                        b.store(b.add(b.load(total), level), total)
                        e.store(level, scratch_p, b.mul(cell, e.index(N)))
                mean = _floor_divide(e, b.shl(b.load(total), splat(4)), n_double)
                b.store(splat(0), total)
                with cgutils.for_range(b, n_scales) as scale:
                    if by_zero:
                        of_min = b.sub(b.sext(symbols(min_at, scale.index, lane), VEC), zero_bases)
                    with cgutils.for_range(b, per_scale) as k:
                        cell = b.add(b.mul(scale.index, per_scale), k.index)
                        distance = b.sub(b.shl(e.load(scratch_p, b.mul(cell, e.index(N))), splat(4)), mean)
                        relative = b.add(b.ashr(b.add(distance, splat(8)), splat(4)), splat(8))
                        found = b.add(e.clamp(relative, 0, 15), bases)
                        if by_zero:
                            zero = of_min
                            if with_sub:
                                zero = b.add(zero, level_of(levels_of_min, sub_min_at, cell, lane))
                                zero = b.sub(zero, level_of(levels_p, sub_at, cell, lane))
                            found = b.add(found, b.shl(e.clamp(zero, 0, 15), splat(4)))
                            place = b.add(b.add(out_at, b.mul(cell, e.index(32))), lane)
                            e.store(e.gather(tables_p, found, 4), out_p, place)
                        else:
                            size = b.select(b.icmp_signed("<", distance, splat(0)), b.neg(distance), distance)
                            b.store(b.add(b.load(total), size), total)
                            e.store(found, scratch_p, b.mul(cell, e.index(N)))
                if not by_zero:
                    spread = _floor_divide(e, b.load(total), b.fmul(n_double, ir.Constant(ir.DoubleType(), 8.0)))
                    spread = b.shl(e.clamp(spread, 0, 15), splat(4))
                    with cgutils.for_range(b, n_cells) as cell_loop:
                        found = b.add(e.load(scratch_p, b.mul(cell_loop.index, e.index(N))), spread)
                        place = b.add(b.add(out_at, b.mul(cell_loop.index, e.index(32))), lane)
                        e.store(e.gather(tables_p, found, 4), out_p, place)
            return context.get_dummy_value()

        return signature, codegen

    return contexts  # type: ignore[no-any-return]


_by_level = _contexts_intrinsic(by_zero=False, with_sub=False)
_by_level_sub = _contexts_intrinsic(by_zero=False, with_sub=True)
_by_zero = _contexts_intrinsic(by_zero=True, with_sub=False)
_by_zero_sub = _contexts_intrinsic(by_zero=True, with_sub=True)


@njit(cache=True, nogil=True)
def cell_offsets_of_phase(side, side_at, meta, levels, base, n_streams, plane, cell_offsets, scratch, out, out_at):  # type: ignore[no-untyped-def]
    """Fill the table offsets of one row phase of a row group whose cells have contexts by level, or by zero and level.

    Parameters
    ----------
    side, side_at, meta, levels, base : as for `cell_contexts.cell_contexts`
    n_streams, plane : how many groups are interleaved; ``phase * n_streams + stream``
    cell_offsets : int32 (512,), table offset of each context
    scratch : int32, at least 16 a cell
    out, out_at : int32, flat; table offset of (cell, lane) goes to ``out_at + 32 * cell + lane``
    """
    n_scales = np.int64((side_at[meta[7] + 1] - side_at[meta[7]]) // 64)
    n_cells = meta[1]
    per_scale = np.int64(n_cells // n_scales)
    scale_at = np.int64(n_streams * side_at[meta[7]] + plane * n_scales * 32)
    sub_at = np.int64(n_streams * side_at[meta[8]] + plane * n_cells * 32) if meta[8] >= 0 else np.int64(0)
    min_at = np.int64(n_streams * side_at[meta[9]] + plane * n_scales * 32) if meta[9] >= 0 else np.int64(0)
    sub_min_at = np.int64(n_streams * side_at[meta[10]] + plane * n_cells * 32) if meta[10] >= 0 else np.int64(0)
    factor = np.int64(max(meta[11], 1))
    zero_base = np.int64(meta[6])
    first = np.int64(base)
    at = np.int64(out_at)
    if meta[5] == 1 and meta[8] >= 0:
        _by_level_sub(
            side, scale_at, sub_at, min_at, sub_min_at, n_scales, per_scale, factor, zero_base, first, levels, cell_offsets,
            scratch, out, at,
        )
    elif meta[5] == 1:
        _by_level(
            side, scale_at, sub_at, min_at, sub_min_at, n_scales, per_scale, factor, zero_base, first, levels, cell_offsets,
            scratch, out, at,
        )
    elif meta[10] >= 0:
        _by_zero_sub(
            side, scale_at, sub_at, min_at, sub_min_at, n_scales, per_scale, factor, zero_base, first, levels, cell_offsets,
            scratch, out, at,
        )
    else:
        _by_zero(
            side, scale_at, sub_at, min_at, sub_min_at, n_scales, per_scale, factor, zero_base, first, levels, cell_offsets,
            scratch, out, at,
        )
