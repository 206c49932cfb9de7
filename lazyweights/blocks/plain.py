"""The types whose elements are kept whole: I8, I16, I32, I64 and F64.

One element is a block. One plane: ``values``, the raw bits of the little-endian element as an unsigned integer of the
same width (uint8, uint16, uint32, uint64); view it as the signed or float type for the numbers.
"""

from __future__ import annotations

import numpy as np

from .layout import BlockLayout, PlaneDict, plane


def _plain_layout(type_id: int, n_bytes: int) -> BlockLayout:
    word = np.dtype(f"<u{n_bytes}")

    def split_blocks(blocks: np.ndarray, out: PlaneDict) -> None:
        out["values"][:] = blocks.view(word)

    def join_blocks(planes: PlaneDict, blocks: np.ndarray) -> None:
        blocks.view(word)[:] = planes["values"]

    return BlockLayout(type_id, (plane("values", 1, 8 * n_bytes),), split_blocks, join_blocks)


PLAIN_LAYOUTS = tuple(_plain_layout(type_id, n) for type_id, n in ((24, 1), (25, 2), (26, 4), (27, 8), (28, 8)))
