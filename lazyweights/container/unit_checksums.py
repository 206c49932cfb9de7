"""Checksums of many units by one call that does not hold the interpreter lock.

The hash is that of the xxhash library: of the C function inside the Python package, called from compiled code. Where the
package does not show that function, its Python function is called unit by unit, which is slower and right as well.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_C_NAMES = ("XXH3_64bits_dispatch", "XXH3_64bits")


def _find_function() -> int:
    """Return the address of the C function, 0 where there is none that does what the Python function does."""
    try:
        library = ctypes.CDLL(xxhash._xxhash.__file__)  # type: ignore[attr-defined]
    except (OSError, AttributeError):
        return 0
    sample = bytes(range(256)) * 5
    for name in _C_NAMES:
        function = getattr(library, name, None)
        if function is None:
            continue
        function.argtypes, function.restype = (ctypes.c_char_p, ctypes.c_size_t), ctypes.c_uint64
        if all(function(sample, n) == xxhash.xxh3_64_intdigest(sample[:n]) for n in (0, 3, 100, 200, len(sample))):
            return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0


HASH_ADDRESS = _find_function()


def _hash_bytes(typingctx: Any, address: Any, data: Any, at: Any, size: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, data, at, size = args
        start = builder.gep(context.make_array(signature.args[1])(context, builder, data).data, [at])
        kind = ir.FunctionType(ir.IntType(64), [start.type, ir.IntType(64)])
        return builder.call(builder.inttoptr(address, kind.as_pointer()), [start, size])

    return types.uint64(types.int64, data, types.int64, types.int64), codegen


hash_bytes: Callable[..., Any] = intrinsic(_hash_bytes)
"""``hash_bytes(address, data, at, size)``: call the C function at `address` for bytes of a flat uint8 array from `at` on."""


@njit(cache=True, nogil=True)
def _fill(address: int, data: np.ndarray, runs: np.ndarray, out: np.ndarray) -> None:
    at = np.int64(0)
    unit = 0
    for i in range(runs.shape[0]):
        end = at + runs[i, 2]
        for _ in range(runs[i, 0]):
            size = min(runs[i, 1], end - at)
            out[unit] = hash_bytes(address, data, at, size)
            at += size
            unit += 1


def fill_checksums(data: np.ndarray, runs: np.ndarray, out: np.ndarray) -> None:
    """Take the checksums of units that lie one behind the other.

    Parameters
    ----------
    data : uint8, flat
    runs : int64 (n, 3): units, bytes of a unit, and bytes of all of them, of which the last unit has what is left
    out : uint64 (n_units,), output
    """
    if int(runs[:, 2].sum()) > data.size or int(runs[:, 0].sum()) != len(out):
        raise ValueError("the units are not those of the data")
    if HASH_ADDRESS:
        data = data.view()
        data.flags.writeable = False  # so that one compiled function serves all
        _fill(HASH_ADDRESS, data, runs, out)
        return
    view = memoryview(data)
    at = unit = 0
    for n_units, size, total in runs.tolist():
        end = at + total
        for _ in range(n_units):
            out[unit] = xxhash.xxh3_64_intdigest(view[at : min(at + size, end)])
            at = min(at + size, end)
            unit += 1
