"""The 4-bit float types MXFP4 and NVFP4: E2M1 codes under an 8-bit float scale.

Byte layouts (brackets are bytes):

=====  =====  ====================================================================================================
type   block  bytes in file order
=====  =====  ====================================================================================================
MXFP4     32  e: E8M0 scale; qs[16]: element j in the low nibble of byte j, j + 16 in the high one
NVFP4     64  d[4]: UE4M3 scale of each sub-block of 16; qs[32]: in sub-block a (bytes ``8 a`` to ``8 a + 7``) element
              ``16 a + j`` is the low nibble of byte ``8 a + j``, ``16 a + 8 + j`` the high one
=====  =====  ====================================================================================================

Planes (values per block, range): ``scale`` = the raw scale bytes (MXFP4 1, NVFP4 4; uint8), ``codes`` = the stored E2M1
nibbles in column order, sign in bit 3 (32 or 64; uint8, < 16). Minus zero (code 8) is kept apart from zero.
"""

from __future__ import annotations

import numpy as np

from .bits import pack_fields_first, unpack_fields_first
from .layout import BlockLayout, PlaneDict, kernel_layout, plane


def _split_nvfp4(blocks: np.ndarray, out: PlaneDict) -> None:
    out["scale"][:] = blocks[:, :4]
    out["codes"][:] = unpack_fields_first(blocks[:, 4:].reshape(-1, 4, 8), 4).reshape(-1, 64)


def _join_nvfp4(planes: PlaneDict, blocks: np.ndarray) -> None:
    blocks[:, :4] = planes["scale"]
    blocks[:, 4:] = pack_fields_first(planes["codes"].reshape(-1, 4, 2, 8), 4).reshape(-1, 32)


FP4_LAYOUTS = (
    kernel_layout(39, (plane("scale", 1, 8), plane("codes", 32, 4)), "mxfp4"),
    BlockLayout(40, (plane("scale", 4, 8), plane("codes", 64, 4)), _split_nvfp4, _join_nvfp4),
)
