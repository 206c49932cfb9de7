"""The scalar-code types with one scale per short block: Q4_0 to Q8_1, IQ4_NL, Q1_0 and Q2_0.

Byte layouts (little-endian; ``h`` is an fp16, brackets are bytes):

=======  =====  =========================================================================================
type     block  bytes in file order
=======  =====  =========================================================================================
Q4_0        32  h d; qs[16]: element j in the low nibble of byte j, j + 16 in the high one
IQ4_NL      32  as Q4_0; a code is an index into a fixed table of 16 values
Q4_1        32  h d; h m; qs[16] as Q4_0
Q5_0        32  h d; qh[4]: bit j of the 32-bit word is bit 4 of element j; qs[16] as Q4_0: bits 0-3
Q5_1        32  h d; h m; qh[4]; qs[16] as Q5_0
Q8_0        32  h d; qs[32]: int8
Q8_1        32  h d; h s (d times the sum of the codes); qs[32]: int8
Q1_0       128  h d; qs[16]: element j is bit j % 8 of byte j // 8
Q2_0        64  h d; qs[16]: element j is bits 2 * (j % 4) and up of byte j // 4
=======  =====  =========================================================================================

Planes (values per block, range): ``scale`` = raw bits of d (1, uint16), ``min`` = raw bits of m (1, uint16),
``sum`` = raw bits of s (1, uint16), ``codes`` = the stored unsigned codes in column order (uint8; one per element).
Codes of Q8_0 and Q8_1 are the raw bytes: view them as int8 for the values. What a code means: Q4_0 ``d * (code - 8)``,
Q5_0 ``d * (code - 16)``, Q4_1 and Q5_1 ``d * code + m``, Q1_0 ``d * (2 * code - 1)``, Q2_0 ``d * (code - 1)``.
"""

from __future__ import annotations

import numpy as np

from .bits import pack_neighbours, pack_words, unpack_neighbours, unpack_words
from .layout import BlockLayout, PlaneDict, kernel_layout, plane


def _split_q8_1(blocks: np.ndarray, out: PlaneDict) -> None:
    words = unpack_words(blocks, 0, 4, "<u2")
    out["scale"][:] = words[:, :1]
    out["sum"][:] = words[:, 1:]
    out["codes"][:] = blocks[:, 4:]


def _join_q8_1(planes: PlaneDict, blocks: np.ndarray) -> None:
    blocks[:, 0:2] = pack_words(planes["scale"], "<u2")
    blocks[:, 2:4] = pack_words(planes["sum"], "<u2")
    blocks[:, 4:] = planes["codes"]


def _sequential_layout(type_id: int, per_block: int, width: int) -> BlockLayout:
    def split_blocks(blocks: np.ndarray, out: PlaneDict) -> None:
        out["scale"][:] = unpack_words(blocks, 0, 2, "<u2")
        out["codes"][:] = unpack_neighbours(blocks[:, 2:], width)

    def join_blocks(planes: PlaneDict, blocks: np.ndarray) -> None:
        blocks[:, :2] = pack_words(planes["scale"], "<u2")
        blocks[:, 2:] = pack_neighbours(planes["codes"], width)

    specs = (plane("scale", 1, 16), plane("codes", per_block, width))
    return BlockLayout(type_id, specs, split_blocks, join_blocks)


_SCALE = plane("scale", 1, 16)
_MIN = plane("min", 1, 16)

SIMPLE_LAYOUTS = (
    kernel_layout(2, (_SCALE, plane("codes", 32, 4)), "q4_0"),
    kernel_layout(3, (_SCALE, _MIN, plane("codes", 32, 4)), "q4_1"),
    kernel_layout(6, (_SCALE, plane("codes", 32, 5)), "q5_0"),
    kernel_layout(7, (_SCALE, _MIN, plane("codes", 32, 5)), "q5_1"),
    kernel_layout(8, (_SCALE, plane("codes", 32, 8)), "q8_0"),
    BlockLayout(9, (_SCALE, plane("sum", 1, 16), plane("codes", 32, 8)), _split_q8_1, _join_q8_1),
    kernel_layout(20, (_SCALE, plane("codes", 32, 4)), "q4_0"),
    _sequential_layout(41, 128, 1),
    _sequential_layout(42, 64, 2),
)
