"""What the vector kernels are made of: LLVM IR for 32-lane decoders on CPUs with AVX-512.

LLVM's loop vectoriser cannot see that the words of the demand layout are an *expand load* (the i-th lane that needs a word
takes the i-th next word), so the kernels emit the vector instructions themselves, through `numba.extending.intrinsic`.

**State of a lane.** ``hi`` and ``lo`` are its two newest words; ``left`` is the number of bits of ``hi`` that are not decoded
yet, negative where some of ``lo`` are decoded too. Only the low six bits of `left` count (as a number of -32 .. 31): what is
above them, subtracting whole table entries leaves as it may. A table entry is ``symbol << 8 | length``. What one step of 16
lanes does for two symbols:

    need = left & 32                           to a mask
    hi = lo  where need
    lo = expand_load(words + pos, need)        vpexpandd
    pos += popcount(need)
    left = left & 31
    window = (hi:lo >> left) & 0xFFFFFFFF      vpshrdvd
    entry = gather(tables + (table:window << 11))
    window = rotate_left(window, entry & 31)   and the same again for the second symbol
    left -= both entries

Two codewords take at most 22 bits, so both are in the window.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils


def _cpu_has_avx512() -> bool:
    features = llvmlite.binding.get_host_cpu_features()
    needed = ("avx512f", "avx512vl", "avx512bw", "avx512vbmi", "avx512vbmi2")
    return all(features.get(name, False) for name in needed)


AVAILABLE = _cpu_has_avx512()

N = 16
"""Lanes of a vector."""

I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
VEC = ir.VectorType(I32, N)
VEC64 = ir.VectorType(I64, N)
VEC8 = ir.VectorType(I8, N)
MASK = ir.VectorType(ir.IntType(1), N)

State = list[Any]
"""Values of hi, lo and left of 16 lanes."""


def splat(value: int) -> ir.Constant:
    return ir.Constant(VEC, [value] * N)


def splat64(value: int) -> ir.Constant:
    return ir.Constant(VEC64, [value] * N)


class Emitter:
    """Emits LLVM IR for the steps of the decoders; one vector holds 16 lanes."""

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
        return ir.Constant(I64, value)

    def load(self, pointer: Any, at: Any, kind: Any = VEC) -> Any:
        value = self.b.load(self.b.bitcast(self.b.gep(pointer, [at]), kind.as_pointer()))
        value.align = 1
        return value

    def store(self, value: Any, pointer: Any, at: Any) -> None:
        self.b.store(value, self.b.bitcast(self.b.gep(pointer, [at]), value.type.as_pointer())).align = 1

    def broadcast(self, scalar: Any) -> Any:
        """Return an int32 (or a bit) in all lanes."""
        kind = MASK if scalar.type.width == 1 else VEC
        undefined = ir.Constant(kind, ir.Undefined)
        first = self.b.insert_element(undefined, scalar, ir.Constant(I32, 0))
        return self.b.shuffle_vector(first, undefined, ir.Constant(VEC, [0] * N))

    def gather(self, pointer: Any, offsets: Any, scale: int) -> Any:
        everywhere = ir.Constant(MASK, [1] * N)
        base = self.b.bitcast(pointer, I8.as_pointer())
        name = "llvm.x86.avx512.mask.gather.dpi.512"
        return self.call(name, VEC, splat(0), base, offsets, everywhere, ir.Constant(I32, scale))

    def shift_left_joined(self, high: Any, low: Any, amount: Any) -> Any:
        """Return the high 32 bits of ``high:low << (amount % 32)``."""
        return self.call("llvm.fshl.v16i32", VEC, high, low, amount)

    def look_up_32(self, table: list[Any], index: Any) -> Any:
        """Return entries of a table of 32 numbers held in two vectors."""
        return self.call("llvm.x86.avx512.vpermi2var.d.512", VEC, table[0], index, table[1])

    def clamp(self, value: Any, low: int, high: int) -> Any:
        value = self.call("llvm.smax.v16i32", VEC, value, splat(low))
        return self.call("llvm.smin.v16i32", VEC, value, splat(high))

    def refill(self, state: State, words: Any, pos: Any, last: Any, allowed: Any = None) -> tuple[State, Any]:
        """Return (state, pos) after lanes that hold fewer than 32 bits took their next word (where `allowed`, a mask)."""
        b = self.b
        hi, lo, left = state
        need = b.icmp_unsigned("!=", b.and_(left, splat(32)), splat(0))
        if allowed is not None:
            need = b.and_(need, allowed)
        hi = b.select(need, lo, hi)
        lo = self.call("llvm.masked.expandload.v16i32", VEC, b.gep(words, [pos]), need, lo)
        clean = b.and_(left, splat(31))
        # A lane that may not take a word keeps its state as it is; what it decodes meanwhile is not used.
        left = clean if allowed is None else b.select(allowed, clean, left)
        count = self.call("llvm.ctpop.i16", I16, b.bitcast(need, I16))
        pos = b.add(pos, b.zext(count, I64))
        pos = b.select(b.icmp_signed("<", pos, last), pos, last)
        return [hi, lo, left], pos

    def prefetch(self, pointer: Any, at: Any) -> None:
        """Ask for what lies at element `at` of a pointer; nothing happens where that is not mapped."""
        place = self.b.bitcast(self.b.gep(pointer, [at]), I8.as_pointer())
        read, keep, data = (ir.Constant(I32, value) for value in (0, 3, 1))
        self.call("llvm.prefetch.p0i8", ir.VoidType(), place, read, keep, data)

    def window(self, state: State) -> Any:
        """Return the next 32 bits of each lane."""
        hi, lo, left = state
        return self.call("llvm.fshr.v16i32", VEC, hi, lo, left)

    def decode(self, window: Any, tables: Any, table: Any) -> Any:
        """Return the table entry of the codeword at the front of each window."""
        return self.gather(tables, self.shift_left_joined(table, window, splat(11)), 2)

    def skip(self, window: Any, entry: Any) -> Any:
        """Return the window behind the codeword of `entry`."""
        return self.shift_left_joined(window, window, entry)

    def select_bits(self, mask: int, ones: Any, zeros: Any) -> Any:
        """Return ``(ones & mask) | (zeros & ~mask)`` as one instruction that LLVM does not turn into a shuffle."""
        lanes = ones.type.count
        masks = ir.Constant(ones.type, [mask] * lanes)
        name = f"llvm.x86.avx512.pternlog.d.{32 * lanes}"
        return self.call(name, ones.type, masks, ones, zeros, ir.Constant(I32, 0xCA))

    def pack_pair(self, first: Any, second: Any) -> Any:
        """Return the symbols of two entries as the low bytes of one word. What is above them is undefined."""
        return self.select_bits(0xFF, self.b.lshr(first, splat(8)), second)

    def join_pairs(self, low: Any, high: Any) -> Any:
        """Return the four symbols of two pairs as the bytes of one word.

        Shifts and bit selections: shuffles would have to share one port with those of the transposition.
        """
        return self.select_bits(0xFFFF, low, self.b.shl(high, splat(16)))

    def pack_symbols(self, entries: list[Any]) -> Any:
        """Return the symbols of four entries as the bytes of one word."""
        return self.join_pairs(self.pack_pair(*entries[:2]), self.pack_pair(*entries[2:]))

    def first_lanes(self, n_lanes: Any, n_vectors: int) -> list[Any]:
        """Return, for each vector, the mask of its lanes that are among the first `n_lanes` (int64)."""
        count = self.broadcast(self.b.trunc(n_lanes, I32))
        numbers = [ir.Constant(VEC, list(range(N * v, N * v + N))) for v in range(n_vectors)]
        return [self.b.icmp_signed("<", number, count) for number in numbers]

    def load_state(self, buf: Any, held: Any, n_vectors: int) -> list[list[Any]]:
        """Turn decoder states (`lane_kernels`) into variables of hi, lo and left (LLVM turns them into registers)."""
        b = self.b
        states = []
        for v in range(n_vectors):
            n = self.load(held, self.index(N * v))
            bits = self.load(buf, self.index(N * v), VEC64)
            both = b.lshr(b.lshr(bits, b.zext(b.sub(splat(63), n), VEC64)), splat64(1))
            state = (b.trunc(b.lshr(both, splat64(32)), VEC), b.trunc(both, VEC), b.sub(n, splat(32)))
            states.append([cgutils.alloca_once_value(b, value) for value in state])
        return states

    def store_state(self, variables: list[list[Any]], buf: Any, held: Any, active: list[Any] | None = None) -> None:
        """Inverse of `load_state`; lanes that are not `active` (masks, or None: all are) keep their states."""
        b = self.b
        for v, of_vector in enumerate(variables):
            hi, lo, left = self.get(of_vector)
            left = b.ashr(b.shl(left, splat(26)), splat(26))  # without what is above its six bits
            both = b.or_(b.shl(b.zext(hi, VEC64), splat64(32)), b.zext(lo, VEC64))
            bits = b.shl(b.shl(both, b.zext(b.sub(splat(31), left), VEC64)), splat64(1))
            n = b.add(left, splat(32))
            if active is not None:
                bits = b.select(active[v], bits, self.load(buf, self.index(N * v), VEC64))
                n = b.select(active[v], n, self.load(held, self.index(N * v)))
            self.store(bits, buf, self.index(N * v))
            self.store(n, held, self.index(N * v))

    def get(self, variables: list[Any]) -> State:
        return [self.b.load(v) for v in variables]

    def set(self, variables: list[Any], values: State) -> None:
        for variable, value in zip(variables, values, strict=True):
            self.b.store(value, variable)

    def transpose_quads(self, quads: list[Any]) -> list[Any]:
        """Turn four vectors (quad q of 16 lanes) into four others: 128-bit part p of vector k holds the quads of lane 4 p + k."""
        b = self.b

        def shuffle(x: Any, y: Any, mask: list[int], width: int = N) -> Any:
            return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, width), mask))

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
                at = 4 * part + 2 * high
                mask += [at, at + 1, 16 + at, 16 + at + 1]
            return shuffle(x, y, mask)

        ab = [unpack(quads[0], quads[1], h) for h in range(2)]
        cd = [unpack(quads[2], quads[3], h) for h in range(2)]
        return [join(ab[k // 2], cd[k // 2], k % 2) for k in range(4)]

    def store_rows(self, rows: list[Any], pointer: Any, at: Any, lane_stride: Any) -> None:
        """Store what `transpose_quads` returned, 16 bytes for each of 16 lanes."""
        for lane in range(N):
            order = ir.Constant(ir.VectorType(I32, 4), [4 * (lane // 4) + i for i in range(4)])
            self.store(self.b.shuffle_vector(rows[lane % 4], rows[lane % 4], order), pointer, at)
            at = self.b.add(at, lane_stride)
