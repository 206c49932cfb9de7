"""The lane decoder for CPUs with AVX-512: 32 lanes in two registers, tables read by gathers.

LLVM's loop vectoriser cannot see that the words of the demand layout are an *expand load* (the i-th
lane that needs a word takes the i-th next word), so this module emits the vector instructions
itself, through `numba.extending.intrinsic`. What one step of 16 lanes does:

    need  = held < 32                          compare to a mask
    word  = expand_load(words + pos, need)     vpexpandd
    pos  += popcount(need)
    hi:lo |= word placed `held` bits from the top
    entry = gather(tables + offset + (hi >> 21))
    hi:lo <<= length of entry                  vpshldvd, vpsllvd

It is bit-equal to the scalar kernels in `lane_kernels` and to the reference in `lanes`; where the
CPU lacks AVX-512 VBMI2 (`AVAILABLE` is False) the scalar kernels run instead.

An expand load reads only the words that lanes need, at most 16 from `pos`; `pos` is clamped to
`limit - 16`, so that nothing past `limit` is read. A caller makes `limit` at least 32 words larger
than the stream and then compares `pos` with the stream's length: a damaged stream that runs on is
found there.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import njit, types, uint64
from numba.core import cgutils
from numba.extending import intrinsic


def _cpu_has_avx512() -> bool:
    features = llvmlite.binding.get_host_cpu_features()
    return all(features.get(name, False) for name in ("avx512f", "avx512vl", "avx512bw", "avx512vbmi2"))


AVAILABLE = _cpu_has_avx512()

_N = 16
_I8, _I16, _I32, _I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
_VEC = ir.VectorType(_I32, _N)
_VEC8 = ir.VectorType(_I8, _N)
_MASK = ir.VectorType(ir.IntType(1), _N)


def _splat(value: int) -> ir.Constant:
    return ir.Constant(_VEC, [value] * _N)


class _Emitter:
    """Emits LLVM IR for the steps of the lane decoder; one register group holds 16 lanes."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        self.b = builder
        self._context = context
        self._signature = signature
        self._args = args

    def data(self, i: int) -> Any:
        """Return the data pointer of array argument i."""
        return self._context.make_array(self._signature.args[i])(self._context, self.b, self._args[i]).data

    def call(self, name: str, result: Any, *args: Any) -> Any:
        kind = ir.FunctionType(result, [a.type for a in args])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), args)

    def index(self, value: int) -> Any:
        return ir.Constant(_I64, value)

    def load(self, pointer: Any, at: Any, kind: Any = _VEC) -> Any:
        value = self.b.load(self.b.bitcast(self.b.gep(pointer, [at]), kind.as_pointer()))
        value.align = 1
        return value

    def store(self, value: Any, pointer: Any, at: Any) -> None:
        self.b.store(value, self.b.bitcast(self.b.gep(pointer, [at]), value.type.as_pointer())).align = 1

    def gather(self, pointer: Any, offsets: Any, scale: int) -> Any:
        everywhere = ir.Constant(_MASK, [1] * _N)
        base = self.b.bitcast(pointer, _I8.as_pointer())
        name = "llvm.x86.avx512.mask.gather.dpi.512"
        return self.call(name, _VEC, _splat(0), base, offsets, everywhere, ir.Constant(_I32, scale))

    def clamp(self, value: Any, low: int, high: int) -> Any:
        value = self.call("llvm.smax.v16i32", _VEC, value, _splat(low))
        return self.call("llvm.smin.v16i32", _VEC, value, _splat(high))

    def refill(self, state: list[Any], words: Any, pos: Any, last: Any) -> tuple[list[Any], Any]:
        """Return (state, pos) after lanes that hold fewer than 32 bits took their next word."""
        b = self.b
        hi, lo, held = state
        need = b.icmp_unsigned("<", held, _splat(32))
        word = self.call("llvm.masked.expandload.v16i32", _VEC, b.gep(words, [pos]), need, _splat(0))
        count = self.call("llvm.ctpop.i16", _I16, b.bitcast(need, _I16))
        pos = b.add(pos, b.zext(count, _I64))
        pos = b.select(b.icmp_signed("<", pos, last), pos, last)
        amount = b.and_(held, _splat(31))
        hi = b.or_(hi, b.lshr(word, amount))
        # Bits that do not fit into hi: word << (32 - held), in two shifts so that held = 0 gives 0.
        rest = b.shl(b.shl(word, _splat(1)), b.xor(amount, _splat(31)))
        lo = b.select(need, rest, lo)
        held = b.select(need, b.add(held, _splat(32)), held)
        return [hi, lo, held], pos

    def symbol(self, state: list[Any], tables: Any, offsets: Any) -> tuple[list[Any], Any]:
        """Return (state, symbols) after each lane decoded one symbol with the table at its offset."""
        b = self.b
        hi, lo, held = state
        entry = self.gather(tables, b.add(b.lshr(hi, _splat(21)), offsets), 2)
        length = b.and_(b.lshr(entry, _splat(8)), _splat(15))
        hi = self.call("llvm.fshl.v16i32", _VEC, hi, lo, length)
        lo = b.shl(lo, length)
        held = b.sub(held, length)
        return [hi, lo, held], b.and_(entry, _splat(255))

    def state_variables(self, arrays: list[Any], n_groups: int = 2) -> list[list[Any]]:
        """Load hi, lo, held of all groups into variables (LLVM turns them into registers)."""
        return [
            [cgutils.alloca_once_value(self.b, self.load(array, self.index(_N * group))) for array in arrays]
            for group in range(n_groups)
        ]

    def store_state(self, variables: list[list[Any]], arrays: list[Any]) -> None:
        for group in range(len(variables)):
            for variable, array in zip(variables[group], arrays, strict=True):
                self.store(self.b.load(variable), array, self.index(_N * group))


def _get(e: _Emitter, variables: list[Any]) -> list[Any]:
    return [e.b.load(v) for v in variables]


def _set(e: _Emitter, variables: list[Any], values: list[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        e.b.store(value, variable)


@intrinsic
def _cells(typingctx, words, pos, last, tables, offsets, n_cells, cell_length, null, out, hi, lo, held):  # type: ignore[no-untyped-def]
    """Decode `n_cells` cells for 32 lanes; return the new pos."""
    signature = types.int64(words, pos, last, tables, offsets, n_cells, cell_length, null, out, hi, lo, held)

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        e = _Emitter(context, builder, signature, args)
        b = builder
        _, pos, last, _, _, n_cells, cell_length, null, _, _, _, _ = args
        words_p, tables_p, offsets_p, out_p = (e.data(i) for i in (0, 3, 4, 8))
        arrays = [e.data(i) for i in (9, 10, 11)]
        groups = e.state_variables(arrays)
        pos_v = cgutils.alloca_once_value(b, pos)
        out_v = cgutils.alloca_once_value(b, e.index(0))
        quads = b.lshr(b.add(cell_length, e.index(3)), e.index(2))
        null_vector = _broadcast(e, b.trunc(null, _I32))
        with cgutils.for_range(b, n_cells) as cell:
            at = b.mul(cell.index, e.index(32))
            tables_of = [e.load(offsets_p, b.add(at, e.index(_N * g))) for g in range(2)]
            with cgutils.for_range(b, quads) as quad:
                left = b.sub(cell_length, b.mul(quad.index, e.index(4)))
                packed: list[Any] = [None, None]
                for position in range(4):
                    if position == 2:
                        # A quad with one or two symbols takes no third refill: skip it as the encoder does.
                        more = b.icmp_signed(">", left, e.index(2))
                    if position % 2 == 0:
                        for g in range(2):
                            state = _get(e, groups[g])
                            if position == 2:
                                full = state[2]
                                state[2] = b.select(_broadcast_bit(e, more), full, _splat(1 << 30))
                                state, p = e.refill(state, words_p, b.load(pos_v), last)
                                state[2] = b.select(_broadcast_bit(e, more), state[2], full)
                            else:
                                state, p = e.refill(state, words_p, b.load(pos_v), last)
                            b.store(p, pos_v)
                            _set(e, groups[g], state)
                    present = b.icmp_signed(">", left, e.index(position))
                    for g in range(2):
                        offset = tables_of[g]
                        if position:
                            offset = b.select(_broadcast_bit(e, present), offset, null_vector)
                        state, symbols = e.symbol(_get(e, groups[g]), tables_p, offset)
                        _set(e, groups[g], state)
                        shifted = b.shl(symbols, _splat(8 * position)) if position else symbols
                        packed[g] = b.or_(packed[g], shifted) if position else shifted
                o = b.load(out_v)
                for g in range(2):
                    e.store(packed[g], out_p, b.add(o, e.index(_N * g)))
                b.store(b.add(o, e.index(32)), out_v)
        e.store_state(groups, arrays)
        return b.load(pos_v)

    return signature, codegen


def _broadcast(e: _Emitter, scalar: Any) -> Any:
    undefined = ir.Constant(_VEC, ir.Undefined)
    first = e.b.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return e.b.shuffle_vector(first, undefined, ir.Constant(_VEC, [0] * _N))


def _broadcast_bit(e: _Emitter, bit: Any) -> Any:
    undefined = ir.Constant(_MASK, ir.Undefined)
    first = e.b.insert_element(undefined, bit, ir.Constant(_I32, 0))
    return e.b.shuffle_vector(first, undefined, ir.Constant(_VEC, [0] * _N))


@intrinsic
def _side(typingctx, words, pos, last, tables, offsets, kind, base, other, n_columns, out, hi, lo, held):  # type: ignore[no-untyped-def]
    """Decode one phase of a side plane for the 32 lanes of each stream.

    The number of streams is that of the state: 2 where `hi` has two dimensions, else 1. `other` and `out` are
    (streams, columns, 32) or (columns, 32).
    """
    signature = types.void(words, pos, last, tables, offsets, kind, base, other, n_columns, out, hi, lo, held)
    n_streams = hi.ndim

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        e = _Emitter(context, builder, signature, args)
        b = builder
        last, kind, base, n_columns = args[2], args[5], args[6], args[8]
        words_p, pos_p, tables_p, offsets_p, other_p, out_p = (e.data(i) for i in (0, 1, 3, 4, 7, 9))
        arrays = [e.data(i) for i in (10, 11, 12)]
        n_groups = 2 * n_streams
        groups = e.state_variables(arrays, n_groups)
        pos_v = [cgutils.alloca_once_value(b, b.load(b.gep(pos_p, [e.index(s)]))) for s in range(n_streams)]
        means = [cgutils.alloca_once_value(b, _splat(0)) for _ in range(n_groups)]
        stream_size = b.mul(n_columns, e.index(32))
        base_vector = _broadcast(e, b.trunc(base, _I32))
        by_mean = _broadcast_bit(e, b.icmp_signed("==", kind, e.index(1)))
        by_other = _broadcast_bit(e, b.icmp_signed("==", kind, e.index(2)))
        with cgutils.for_range(b, n_columns) as column:
            at = b.mul(column.index, e.index(32))
            first = b.icmp_signed("==", column.index, e.index(0))
            for g in range(n_groups):
                state, p = e.refill(_get(e, groups[g]), words_p, b.load(pos_v[g // 2]), last)
                b.store(p, pos_v[g // 2])
                mean = b.load(means[g])
                place = b.add(at, e.index(_N * (g % 2)))
                if g > 1:
                    place = b.add(place, stream_size)
                context_mean = b.ashr(b.add(mean, _splat(8)), _splat(4))
                context_mean = b.add(e.clamp(b.sub(context_mean, base_vector), 0, 30), _splat(1))
                context_mean = b.select(_broadcast_bit(e, first), _splat(0), context_mean)
                context_other = b.lshr(b.zext(e.load(other_p, place, _VEC8), _VEC), _splat(3))
                index = b.select(by_other, context_other, _splat(0))
                index = b.select(by_mean, context_mean, index)
                state, symbols = e.symbol(state, tables_p, e.gather(offsets_p, index, 4))
                _set(e, groups[g], state)
                e.store(b.trunc(symbols, _VEC8), out_p, place)
                scaled = b.shl(symbols, _splat(4))
                moved = b.add(mean, b.ashr(b.sub(scaled, mean), _splat(2)))
                b.store(b.select(_broadcast_bit(e, first), scaled, moved), means[g])
        e.store_state(groups, arrays)
        for s in range(n_streams):
            b.store(b.load(pos_v[s]), b.gep(pos_p, [e.index(s)]))
        return context.get_dummy_value()

    return signature, codegen


def _transpose_quads(e: _Emitter, quads: list[Any]) -> list[Any]:
    """Turn four vectors (quad q of 16 lanes) into sixteen 128-bit vectors (the four quads of each lane)."""
    b = e.b

    def shuffle(x: Any, y: Any, mask: list[int], width: int = _N) -> Any:
        return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(_I32, width), mask))

    # Within each 128-bit part: lanes 4p .. 4p + 3.
    def unpack(x: Any, y: Any, high: int) -> Any:
        mask = []
        for part in range(4):
            for k in (0, 1):
                mask += [4 * part + 2 * high + k, 16 + 4 * part + 2 * high + k]
        return shuffle(x, y, mask)

    def join(x: Any, y: Any, high: int) -> Any:
        mask = []
        for part in range(4):
            mask += [4 * part + 2 * high, 4 * part + 2 * high + 1, 16 + 4 * part + 2 * high, 16 + 4 * part + 2 * high + 1]
        return shuffle(x, y, mask)

    ab = [unpack(quads[0], quads[1], h) for h in range(2)]
    cd = [unpack(quads[2], quads[3], h) for h in range(2)]
    # rows[k]: in each 128-bit part p the quads of lane 4 p + k.
    rows = [join(ab[k // 2], cd[k // 2], k % 2) for k in range(4)]
    return [shuffle(rows[lane % 4], rows[lane % 4], [4 * (lane // 4) + i for i in range(4)], 4) for lane in range(_N)]


def _put_forced_nibbles(e: _Emitter, quads: list[Any], positions: Any) -> list[Any]:
    """Undo the swaps of forced codes (`container.forced_codes`) in the 32 nibbles that 16 lanes hold in four vectors."""
    b = e.b
    quads = list(quads)

    def place(index: Any) -> tuple[Any, list[Any]]:
        """Shift of a nibble in its vector, and for each vector whether it holds the nibble."""
        word = b.and_(b.lshr(index, _splat(2)), _splat(3))
        shift = b.shl(b.and_(index, _splat(3)), _splat(3))
        shift = b.or_(shift, b.shl(b.lshr(index, _splat(4)), _splat(2)))
        return shift, [b.icmp_unsigned("==", word, _splat(k)) for k in range(4)]

    def get(shift: Any, here: list[Any]) -> Any:
        value = quads[0]
        for k in range(1, 4):
            value = b.select(here[k], quads[k], value)
        return b.and_(b.lshr(value, shift), _splat(15))

    def put(shift: Any, here: list[Any], value: int) -> None:
        mask = b.xor(b.shl(_splat(15), shift), _splat(0xFFFFFFFF))
        for k in range(4):
            changed = b.and_(quads[k], mask)
            if value:
                changed = b.or_(changed, b.shl(_splat(value), shift))
            quads[k] = b.select(here[k], changed, quads[k])

    # Codes 15 and 31 are the nibbles of byte 15: 0 and 15 before the swaps are undone, the last swap first.
    quads[3] = b.or_(b.and_(quads[3], _splat(0x00FFFFFF)), _splat(0xF0000000))
    shift, here = place(b.and_(positions, _splat(31)))
    value = get(shift, here)
    quads[3] = b.or_(b.and_(quads[3], _splat(0x0FFFFFFF)), b.shl(value, _splat(28)))
    put(shift, here, 15)
    shift, here = place(b.and_(b.lshr(positions, _splat(5)), _splat(31)))
    value = get(shift, here)
    quads[3] = b.or_(b.and_(quads[3], _splat(0xF0FFFFFF)), b.shl(value, _splat(24)))
    put(shift, here, 0)
    return quads


def _emit_cells_pair(forced_nibbles: bool) -> Any:
    """Return the code generator of `_cells_pair` (or, with forced nibbles, of `_cells_pair_forced`)."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        e = _Emitter(context, builder, signature, args)
        b = builder
        last, n_cells, cell_length, null = args[2], args[5], args[6], args[7]
        words_p, pos_p, tables_p, offsets_p, out_p, bases_p, strides_p = (e.data(i) for i in (0, 1, 3, 4, 8, 9, 10))
        positions_p = e.data(11)
        arrays = [e.data(i) for i in (12, 13, 14)]
        groups = e.state_variables(arrays, 4)
        pos_v = [cgutils.alloca_once_value(b, b.load(b.gep(pos_p, [e.index(s)]))) for s in range(2)]
        base_v = [cgutils.alloca_once_value(b, b.load(b.gep(bases_p, [e.index(s)]))) for s in range(2)]
        lane_stride, cell_stride = (b.load(b.gep(strides_p, [e.index(i)])) for i in range(2))
        chunks = b.lshr(b.add(cell_length, e.index(15)), e.index(4))
        null_vector = _broadcast(e, b.trunc(null, _I32))
        stream_offsets = b.mul(n_cells, e.index(32))
        with cgutils.for_range(b, n_cells) as cell:
            at = b.mul(cell.index, e.index(32))
            tables_of = [
                e.load(offsets_p, b.add(b.add(at, e.index(_N * (g % 2))), stream_offsets if g > 1 else e.index(0)))
                for g in range(4)
            ]
            with cgutils.for_range(b, chunks) as chunk:
                left = b.sub(cell_length, b.mul(chunk.index, e.index(16)))
                present = {k: _broadcast_bit(e, b.icmp_signed(">", left, e.index(k))) for k in (14, 15)}
                quads: list[list[Any]] = [[], [], [], []]
                packed: list[Any] = [None] * 4
                for position in range(16):
                    if position % 2 == 0:
                        for g in range(4):
                            state = _get(e, groups[g])
                            p = b.load(pos_v[g // 2])
                            if position == 14:
                                full = state[2]
                                state[2] = b.select(present[14], full, _splat(1 << 30))
                                state, p = e.refill(state, words_p, p, last)
                                state[2] = b.select(present[14], state[2], full)
                            else:
                                state, p = e.refill(state, words_p, p, last)
                            b.store(p, pos_v[g // 2])
                            _set(e, groups[g], state)
                    for g in range(4):
                        offset = tables_of[g]
                        if position >= 14:
                            offset = b.select(present[position], offset, null_vector)
                        state, symbols = e.symbol(_get(e, groups[g]), tables_p, offset)
                        _set(e, groups[g], state)
                        shift = 8 * (position % 4)
                        shifted = b.shl(symbols, _splat(shift)) if shift else symbols
                        packed[g] = b.or_(packed[g], shifted) if shift else shifted
                        if position % 4 == 3:
                            quads[g].append(packed[g])
                for g in range(4):
                    target = b.add(b.load(base_v[g // 2]), b.mul(chunk.index, e.index(16)))
                    target = b.add(target, b.mul(cell.index, cell_stride))
                    if g % 2:
                        target = b.add(target, b.mul(lane_stride, e.index(_N)))
                    if forced_nibbles:
                        place = b.add(b.add(at, e.index(_N * (g % 2))), stream_offsets if g > 1 else e.index(0))
                        quads[g] = _put_forced_nibbles(e, quads[g], e.load(positions_p, place))
                    for row in _transpose_quads(e, quads[g]):
                        e.store(row, out_p, target)
                        target = b.add(target, lane_stride)
        e.store_state(groups, arrays)
        for s in range(2):
            b.store(b.load(pos_v[s]), b.gep(pos_p, [e.index(s)]))
        return context.get_dummy_value()

    return codegen


@intrinsic
def _cells_pair(typingctx, words, pos, last, tables, offsets, n_cells, cell_length, null, out, bases, strides, positions, hi, lo, held):  # type: ignore[no-untyped-def]  # noqa: E501
    """Decode `n_cells` cells of two streams at a time, 32 lanes each, and store the symbols as rows.

    Two streams are two independent chains of dependent instructions, which hides the latency of the gathers.
    """
    signature = types.void(
        words, pos, last, tables, offsets, n_cells, cell_length, null, out, bases, strides, positions, hi, lo, held
    )
    return signature, _emit_cells_pair(False)


@intrinsic
def _cells_pair_forced(typingctx, words, pos, last, tables, offsets, n_cells, cell_length, null, out, bases, strides, positions, hi, lo, held):  # type: ignore[no-untyped-def]  # noqa: E501
    """`_cells_pair` for cells of 15 symbols whose forced nibbles are put back before they are stored."""
    signature = types.void(
        words, pos, last, tables, offsets, n_cells, cell_length, null, out, bases, strides, positions, hi, lo, held
    )
    return signature, _emit_cells_pair(True)


@njit(cache=True, nogil=True)
def _spread(buf, held, n_lanes, hi, lo, held32):  # type: ignore[no-untyped-def]
    for lane in range(32):
        hi[lane] = np.uint32(buf[lane] >> uint64(32))
        lo[lane] = np.uint32(buf[lane] & uint64(0xFFFFFFFF))
        held32[lane] = held[lane] if lane < n_lanes else 1 << 30


@njit(cache=True, nogil=True)
def _collect(buf, held, n_lanes, hi, lo, held32):  # type: ignore[no-untyped-def]
    for lane in range(n_lanes):
        buf[lane] = (uint64(hi[lane]) << uint64(32)) | uint64(lo[lane])
        held[lane] = held32[lane]


@njit(cache=True, nogil=True)
def decode_cells_phase(words, limit, tables, offsets, cell_length, n_lanes, out, buf, held, pos):  # type: ignore[no-untyped-def]
    """Vector twin of `lane_kernels._decode_cells_scalar`; same arguments."""
    hi = np.empty(32, np.uint32)
    lo = np.empty(32, np.uint32)
    held32 = np.empty(32, np.int32)
    _spread(buf, held, n_lanes, hi, lo, held32)
    null = tables.size - 16 - 2048
    pos[0] = _cells(
        words,
        np.int64(pos[0]),
        np.int64(limit - 16),
        tables,
        offsets,
        np.int64(offsets.shape[0]),
        np.int64(cell_length),
        np.int64(null),
        out,
        hi,
        lo,
        held32,
    )
    _collect(buf, held, n_lanes, hi, lo, held32)


@njit(cache=True, nogil=True)
def decode_side_phase(words, limit, tables, offsets, kind, base, other, n_lanes, out, buf, held, pos):  # type: ignore[no-untyped-def]
    """Vector twin of `lane_kernels._decode_side_scalar`; same arguments."""
    hi = np.empty(32, np.uint32)
    lo = np.empty(32, np.uint32)
    held32 = np.empty(32, np.int32)
    _spread(buf, held, n_lanes, hi, lo, held32)
    _side(
        words,
        pos,
        np.int64(limit - 16),
        tables,
        offsets,
        np.int64(kind),
        np.int64(base),
        other,
        np.int64(out.shape[0]),
        out,
        hi,
        lo,
        held32,
    )
    _collect(buf, held, n_lanes, hi, lo, held32)


@njit(cache=True, nogil=True)
def decode_cells_pair(words, limit, tables, offsets, cell_length, out, bases, strides, nibbles, positions, buf, held, pos):  # type: ignore[no-untyped-def]
    """Decode one phase of a plane of two full row groups and store the symbols as rows of bytes.

    Parameters
    ----------
    words : uint32, both streams; `limit` as in the module
    tables : uint16 of `canonical.decode_tables`
    offsets : int32 (2, cells, 32), table offset of each cell
    cell_length : symbols of a cell: 14, 15 or 16 modulo 16
    out : uint8, flat
    bases : int64 (2,), where in `out` the first cell of lane 0 goes
    strides : int64 (2,), bytes from lane to lane and from cell to cell; a cell is written in whole 16-byte pieces
    nibbles : whether to put back forced nibbles (cells of 15 symbols of two codes each)
    positions : int32 (2, cells, 32), the positions of forced nibbles
    buf : uint64 (2, 32), held : int32 (2, 32), pos : int64 (2,), decoder states; `pos` counts in `words`
    """
    hi = np.empty((2, 32), np.uint32)
    lo = np.empty((2, 32), np.uint32)
    for s in range(2):
        for lane in range(32):
            hi[s, lane] = np.uint32(buf[s, lane] >> uint64(32))
            lo[s, lane] = np.uint32(buf[s, lane] & uint64(0xFFFFFFFF))
    null = tables.size - 16 - 2048
    if nibbles:
        _cells_pair_forced(
            words, pos, np.int64(limit - 16), tables, offsets, np.int64(offsets.shape[1]), np.int64(cell_length),
            np.int64(null), out, bases, strides, positions, hi, lo, held,
        )
    else:
        _cells_pair(
            words, pos, np.int64(limit - 16), tables, offsets, np.int64(offsets.shape[1]), np.int64(cell_length),
            np.int64(null), out, bases, strides, positions, hi, lo, held,
        )
    for s in range(2):
        for lane in range(32):
            buf[s, lane] = (uint64(hi[s, lane]) << uint64(32)) | uint64(lo[s, lane])


@njit(cache=True, nogil=True)
def decode_side_pair(words, limit, tables, offsets, kind, base, other, out, buf, held, pos):  # type: ignore[no-untyped-def]
    """Decode one phase of a side plane of two full row groups; `other` and `out` are uint8 (2, columns, 32)."""
    hi = np.empty((2, 32), np.uint32)
    lo = np.empty((2, 32), np.uint32)
    for s in range(2):
        for lane in range(32):
            hi[s, lane] = np.uint32(buf[s, lane] >> uint64(32))
            lo[s, lane] = np.uint32(buf[s, lane] & uint64(0xFFFFFFFF))
    _side(
        words, pos, np.int64(limit - 16), tables, offsets, np.int64(kind), np.int64(base), other,
        np.int64(out.shape[1]), out, hi, lo, held,
    )
    for s in range(2):
        for lane in range(32):
            buf[s, lane] = (uint64(hi[s, lane]) << uint64(32)) | uint64(lo[s, lane])


@intrinsic
def _rans_cells(typingctx, words, pos, last, tables, offsets, n_cells, cell_length, out, states):  # type: ignore[no-untyped-def]
    """Decode `n_cells` cells of a rANS stream for 32 lanes."""
    signature = types.void(words, pos, last, tables, offsets, n_cells, cell_length, out, states)

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        e = _Emitter(context, builder, signature, args)
        b = builder
        last, n_cells, cell_length = args[2], args[5], args[6]
        words_p, pos_p, tables_p, offsets_p, out_p, states_p = (e.data(i) for i in (0, 1, 3, 4, 7, 8))
        state_v = [cgutils.alloca_once_value(b, e.load(states_p, e.index(_N * g))) for g in range(2)]
        pos_v = cgutils.alloca_once_value(b, b.load(pos_p))
        out_v = cgutils.alloca_once_value(b, e.index(0))
        packed_v = [cgutils.alloca_once_value(b, _splat(0)) for _ in range(2)]
        words16 = ir.VectorType(_I16, _N)
        with cgutils.for_range(b, n_cells) as cell:
            at = b.mul(cell.index, e.index(32))
            tables_of = [e.load(offsets_p, b.add(at, e.index(_N * g))) for g in range(2)]
            with cgutils.for_range(b, cell_length) as position:
                place = b.trunc(b.and_(position.index, e.index(3)), _I32)
                shift = _broadcast(e, b.shl(place, ir.Constant(_I32, 3)))
                fresh = _broadcast_bit(e, b.icmp_signed("==", place, ir.Constant(_I32, 0)))
                for g in range(2):
                    x = b.load(state_v[g])
                    entry = e.gather(tables_p, b.add(b.and_(x, _splat(4095)), tables_of[g]), 4)
                    freq = b.add(b.and_(b.lshr(entry, _splat(8)), _splat(4095)), _splat(1))
                    x = b.add(b.mul(freq, b.lshr(x, _splat(12))), b.lshr(entry, _splat(20)))
                    need = b.icmp_unsigned("<", x, _splat(65536))
                    p = b.load(pos_v)
                    zero = ir.Constant(words16, [0] * _N)
                    word = e.call("llvm.masked.expandload.v16i16", words16, b.gep(words_p, [p]), need, zero)
                    count = e.call("llvm.ctpop.i16", _I16, b.bitcast(need, _I16))
                    p = b.add(p, b.zext(count, _I64))
                    b.store(b.select(b.icmp_signed("<", p, last), p, last), pos_v)
                    b.store(b.select(need, b.or_(b.shl(x, _splat(16)), b.zext(word, _VEC)), x), state_v[g])
                    packed = b.select(fresh, _splat(0), b.load(packed_v[g]))
                    packed = b.or_(packed, b.shl(b.and_(entry, _splat(255)), shift))
                    b.store(packed, packed_v[g])
                    quad = b.add(b.load(out_v), b.mul(b.lshr(position.index, e.index(2)), e.index(32)))
                    e.store(packed, out_p, b.add(quad, e.index(_N * g)))
            quads = b.lshr(b.add(cell_length, e.index(3)), e.index(2))
            b.store(b.add(b.load(out_v), b.mul(quads, e.index(32))), out_v)
        for g in range(2):
            e.store(b.load(state_v[g]), states_p, e.index(_N * g))
        b.store(b.load(pos_v), pos_p)
        return context.get_dummy_value()

    return signature, codegen


@njit(cache=True, nogil=True)
def decode_rans_full(words, limit, tables, offsets, cell_length, out, states, pos):  # type: ignore[no-untyped-def]
    """Vector twin of `rans.decode_rans_scalar` for a phase in which all 32 lanes have a row."""
    _rans_cells(
        words, pos, np.int64(limit - 16), tables, offsets, np.int64(offsets.shape[0]), np.int64(cell_length), out, states
    )
