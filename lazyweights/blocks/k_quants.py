"""The scalar-code types with super-blocks of 256: Q2_K to Q6_K, Q8_K and IQ4_XS.

Byte layouts (little-endian; ``h`` is an fp16, brackets are bytes; bits count from the least significant):

======  =====================================================================================================
type    bytes in file order
======  =====================================================================================================
Q2_K    scales[16]: sub-block j's scale in the low nibble, its min in the high one; qs[64]: element
        ``128 a + 32 f + i`` is field f (2 bits) of byte ``32 a + i``; h d; h dmin
Q3_K    hmask[32]: bit f of byte i is bit 2 of element ``32 f + i`` (set: nothing is subtracted); qs[64] as Q2_K:
        bits 0-1; scales[12]: bits 0-3 of sub-block j are nibble ``j // 8`` of byte ``j % 8``, its bits 4-5 are
        field ``j // 4`` of byte ``8 + j % 4``; h d
Q4_K    h d; h dmin; scales[12]: for j < 4 bits 0-5 of byte j are scale j, of byte 4 + j min j, and byte 8 + j
        holds bits 0-3 of scale 4 + j (low) and of min 4 + j (high), whose bits 4-5 are bits 6-7 of byte j and
        byte 4 + j; qs[128]: element ``64 a + i`` is the low nibble, ``64 a + 32 + i`` the high one of byte
        ``32 a + i`` (i < 32)
Q5_K    h d; h dmin; scales[12] as Q4_K; qh[32]: bit f of byte i is bit 4 of element ``32 f + i``; qs[128] as Q4_K
Q6_K    ql[128]: in half a (128 elements, 64 bytes) element e < 64 is the low nibble of byte e, 64 + e the high one;
        qh[64]: bits 4-5 of element ``128 a + 32 f + i`` are field f of byte ``32 a + i``; scales[16]: int8; h d
Q8_K    float32 d; qs[256]: int8; bsums[16]: int16 sums of 16 codes each
IQ4_XS  h d; scales_h: 16-bit word, field j (2 bits) is bits 4-5 of scale j; scales_l[4]: nibble j is bits 0-3;
        qs[128]: element ``32 a + i`` is the low nibble, ``32 a + 16 + i`` the high one of byte ``16 a + i``
======  =====================================================================================================

Planes (values per block, range):

``scale``
    Raw bits of d (1; uint16, Q8_K uint32).
``min_scale``
    Raw bits of dmin (1, uint16): Q2_K, Q4_K, Q5_K.
``sub_scale``, ``sub_min``
    The stored unsigned integers of each sub-block, uint8: Q2_K 16 values < 16 each; Q4_K and Q5_K 8 < 64 each; only
    ``sub_scale``: Q3_K 16 < 64; Q6_K 16, the raw bytes of the int8; IQ4_XS 8 < 64.
``block_sums``
    Raw bits of the int16 (16, uint16): Q8_K.
``codes``
    The stored unsigned codes in column order (256, uint8): Q2_K < 4, Q3_K < 8, Q4_K < 16, Q5_K < 32, Q6_K < 64,
    Q8_K raw bytes of the int8, IQ4_XS < 16.

What a code means: Q2_K, Q4_K, Q5_K ``d * sub_scale * code - dmin * sub_min``; Q3_K
``d * (sub_scale - 32) * (code - 4)``; Q6_K ``d * int8(sub_scale) * (code - 32)``; Q8_K ``d * int8(code)``; IQ4_XS
``d * (sub_scale - 32) * table[code]`` with the table of IQ4_NL.
"""

from __future__ import annotations

import numpy as np

from .bits import pack_fields_first, pack_neighbours, pack_words, unpack_fields_first, unpack_neighbours, unpack_words
from .layout import BlockLayout, PlaneDict, kernel_layout, plane


def _get_twos(qs: np.ndarray) -> np.ndarray:
    return unpack_fields_first(qs.reshape(-1, 2, 32), 2).reshape(-1, 256)


def _put_twos(codes: np.ndarray) -> np.ndarray:
    return pack_fields_first(codes.reshape(-1, 2, 4, 32), 2).reshape(-1, 64)


def _split_q2_k(blocks: np.ndarray, out: PlaneDict) -> None:
    out["scale"][:] = unpack_words(blocks, 80, 82, "<u2")
    out["min_scale"][:] = unpack_words(blocks, 82, 84, "<u2")
    out["sub_scale"][:] = blocks[:, :16] & 0xF
    out["sub_min"][:] = blocks[:, :16] >> 4
    out["codes"][:] = _get_twos(blocks[:, 16:80])


def _join_q2_k(planes: PlaneDict, blocks: np.ndarray) -> None:
    blocks[:, :16] = planes["sub_scale"] | planes["sub_min"] << 4
    blocks[:, 16:80] = _put_twos(planes["codes"])
    blocks[:, 80:82] = pack_words(planes["scale"], "<u2")
    blocks[:, 82:84] = pack_words(planes["min_scale"], "<u2")


def _split_q3_k(blocks: np.ndarray, out: PlaneDict) -> None:
    out["scale"][:] = unpack_words(blocks, 108, 110, "<u2")
    low = unpack_fields_first(blocks[:, 96:104], 4).reshape(-1, 16)
    high = unpack_fields_first(blocks[:, 104:108], 2).reshape(-1, 16)
    out["sub_scale"][:] = low | high << 4
    high_bit = unpack_fields_first(blocks[:, :32], 1).reshape(-1, 256)
    out["codes"][:] = _get_twos(blocks[:, 32:96]) | high_bit << 2


def _join_q3_k(planes: PlaneDict, blocks: np.ndarray) -> None:
    codes, sub_scale = planes["codes"], planes["sub_scale"]
    blocks[:, :32] = pack_fields_first((codes >> 2).reshape(-1, 8, 32), 1)
    blocks[:, 32:96] = _put_twos(codes & 3)
    blocks[:, 96:104] = pack_fields_first((sub_scale & 0xF).reshape(-1, 2, 8), 4)
    blocks[:, 104:108] = pack_fields_first((sub_scale >> 4).reshape(-1, 4, 4), 2)
    blocks[:, 108:110] = pack_words(planes["scale"], "<u2")


def _split_q8_k(blocks: np.ndarray, out: PlaneDict) -> None:
    out["scale"][:] = unpack_words(blocks, 0, 4, "<u4")
    out["block_sums"][:] = unpack_words(blocks, 260, 292, "<u2")
    out["codes"][:] = blocks[:, 4:260]


def _join_q8_k(planes: PlaneDict, blocks: np.ndarray) -> None:
    blocks[:, :4] = pack_words(planes["scale"], "<u4")
    blocks[:, 4:260] = planes["codes"]
    blocks[:, 260:292] = pack_words(planes["block_sums"], "<u2")


def _split_iq4_xs(blocks: np.ndarray, out: PlaneDict) -> None:
    out["scale"][:] = unpack_words(blocks, 0, 2, "<u2")
    # The fields of a little-endian word are those of its bytes, one byte after the other.
    out["sub_scale"][:] = unpack_neighbours(blocks[:, 4:8], 4) | unpack_neighbours(blocks[:, 2:4], 2) << 4
    out["codes"][:] = unpack_fields_first(blocks[:, 8:].reshape(-1, 8, 16), 4).reshape(-1, 256)


def _join_iq4_xs(planes: PlaneDict, blocks: np.ndarray) -> None:
    sub_scale = planes["sub_scale"]
    blocks[:, :2] = pack_words(planes["scale"], "<u2")
    blocks[:, 2:4] = pack_neighbours(sub_scale >> 4, 2)
    blocks[:, 4:8] = pack_neighbours(sub_scale & 0xF, 4)
    blocks[:, 8:] = pack_fields_first(planes["codes"].reshape(-1, 8, 2, 16), 4).reshape(-1, 128)


_SCALE = plane("scale", 1, 16)
_MIN_SCALE = plane("min_scale", 1, 16)
_SIX_BIT_PAIR = (plane("sub_scale", 8, 6), plane("sub_min", 8, 6))

K_QUANT_LAYOUTS = (
    BlockLayout(
        10,
        (_SCALE, _MIN_SCALE, plane("sub_scale", 16, 4), plane("sub_min", 16, 4), plane("codes", 256, 2)),
        _split_q2_k,
        _join_q2_k,
    ),
    BlockLayout(11, (_SCALE, plane("sub_scale", 16, 6), plane("codes", 256, 3)), _split_q3_k, _join_q3_k),
    kernel_layout(12, (_SCALE, _MIN_SCALE, *_SIX_BIT_PAIR, plane("codes", 256, 4)), "q4_k"),
    kernel_layout(13, (_SCALE, _MIN_SCALE, *_SIX_BIT_PAIR, plane("codes", 256, 5)), "q5_k"),
    kernel_layout(14, (_SCALE, plane("sub_scale", 16, 8), plane("codes", 256, 6)), "q6_k"),
    BlockLayout(
        15, (plane("scale", 1, 32), plane("block_sums", 16, 16), plane("codes", 256, 8)), _split_q8_k, _join_q8_k
    ),
    BlockLayout(23, (_SCALE, plane("sub_scale", 8, 6), plane("codes", 256, 4)), _split_iq4_xs, _join_iq4_xs),
)
