"""Unaligned little-endian numbers in arrays of bytes, for numba: one instruction each, no bounds are checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic


def _store_intrinsic(kind: ir.IntType, numba_type: Any) -> Callable[..., Any]:
    @intrinsic
    def store(typingctx, out, at, value):  # type: ignore[no-untyped-def]
        signature = types.void(out, types.int64, numba_type)

        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            pointer = builder.bitcast(builder.gep(data, [args[1]]), kind.as_pointer())
            builder.store(args[2], pointer).align = 1
            return context.get_dummy_value()

        return signature, codegen

    return store


store_u16 = _store_intrinsic(ir.IntType(16), types.uint16)
"""``store_u16(out, at, value)``: write two bytes, little-endian, to byte `at` of a uint8 array; no bounds are checked."""

store_u32 = _store_intrinsic(ir.IntType(32), types.uint32)
"""``store_u32(out, at, value)``: the same with four bytes."""

store_u64 = _store_intrinsic(ir.IntType(64), types.uint64)
"""``store_u64(out, at, value)``: the same with eight bytes."""


@intrinsic
def load_u64(typingctx: Any, source: Any, at: Any) -> Any:
    """``load_u64(source, at)``: eight bytes of a uint8 array from byte `at` on, little-endian; no bounds are checked."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        value = builder.load(builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(64).as_pointer()))
        value.align = 1
        return value

    return types.uint64(source, types.int64), codegen


@intrinsic
def swap_bytes(typingctx: Any, value: Any) -> Any:
    """``swap_bytes(value)``: a uint64 with its bytes in the opposite order."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bswap(args[0])

    return types.uint64(types.uint64), codegen


@njit(cache=True, nogil=True)
def equal_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two flat uint8 arrays of the same size are equal, in one pass and without an array of results."""
    different = np.uint8(0)
    for i in range(np.uint64(a.size)):
        different |= a[i] ^ b[i]
    return different == 0
