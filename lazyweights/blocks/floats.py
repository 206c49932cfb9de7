"""The float types F32, F16 and BF16: the exponent, which compresses, apart from sign and mantissa, which do not.

One element is a block. With ``m`` mantissa and ``e`` exponent bits the stored little-endian word is, from the top,
sign (1), exponent (e), mantissa (m): F32 e = 8, m = 23; F16 e = 5, m = 10; BF16 e = 8, m = 7.

Planes, one value per element: ``exponent`` = the stored (biased) exponent, uint8, below ``1 << e``;
``sign_mantissa`` = the mantissa with the sign bit put on top of it, below ``1 << (m + 1)``: F32 uint32, F16 uint16,
BF16 uint8. The split is on bits, so NaN payloads and negative zeros survive.
"""

from __future__ import annotations

import numpy as np

from .layout import BlockLayout, PlaneDict, plane


def _float_layout(type_id: int, exponent_bits: int, mantissa_bits: int) -> BlockLayout:
    word = np.dtype(f"<u{(1 + exponent_bits + mantissa_bits) // 8}")
    mantissa_mask = (1 << mantissa_bits) - 1
    exponent_mask = (1 << exponent_bits) - 1
    sign_bit = 1 << mantissa_bits

    def split_blocks(blocks: np.ndarray, out: PlaneDict) -> None:
        values = blocks.view(word)
        out["exponent"][:] = values >> mantissa_bits & exponent_mask
        out["sign_mantissa"][:] = values & mantissa_mask | values >> exponent_bits & sign_bit

    def join_blocks(planes: PlaneDict, blocks: np.ndarray) -> None:
        rest = planes["sign_mantissa"].astype(word)
        values = rest & mantissa_mask | (rest & sign_bit) << exponent_bits
        values |= planes["exponent"].astype(word) << mantissa_bits
        blocks.view(word)[:] = values

    specs = (plane("exponent", 1, exponent_bits), plane("sign_mantissa", 1, mantissa_bits + 1))
    return BlockLayout(type_id, specs, split_blocks, join_blocks)


FLOAT_LAYOUTS = (_float_layout(0, 8, 23), _float_layout(1, 5, 10), _float_layout(30, 8, 7))
