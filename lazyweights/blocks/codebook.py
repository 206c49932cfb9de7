"""The vector-codebook types in super-blocks of 256: IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS and IQ3_S.

Elements come in groups (8 in the IQ1 and IQ2 types, 4 in the IQ3 types); each group is one entry of a fixed codebook.

Byte layouts (little-endian; ``h`` is an fp16, ``u16`` and ``u32`` are words, brackets are counts; bits count from the
least significant):

=======  ====================================================================================================
type     fields in file order
=======  ====================================================================================================
IQ2_XXS  h d; per 32 elements: index bytes[4]; u32: signs of group g in bits ``7 g`` to ``7 g + 6``, scale in 28-31
IQ2_XS   h d; u16[32]: per group index in bits 0-8, signs in 9-15; scales[8]: nibble j is the scale of 16 elements
IQ2_S    h d; index bytes[32]; sign bytes[32]; qh[8]: field g (2 bits) of the run is bits 8-9 of index g; scales[8]
         as IQ2_XS
IQ3_XXS  h d; index bytes[64]; u32[8]: per 32 elements as in IQ2_XXS (signs of 8 elements each, scale)
IQ3_S    h d; index bytes[64]; qh[8]: bit g of the run is bit 8 of index g; sign bytes[32]; scales[4]: nibble j is the
         scale of 32 elements
IQ1_S    h d; index bytes[32]; u16[8]: per 32 elements bits 8-10 of index g in bits ``3 g`` to ``3 g + 2``, scale in
         bits 12-14, sign of the shift in bit 15
IQ1_M    index bytes[32]; qh[16]: nibble g holds bits 8-10 of index g in bits 0-2, the sign of the shift in bit 3;
         u16[4]: scale of 16 elements in three bits each, ``3 j`` to ``3 j + 2``, and in bits 12-15 one nibble of d,
         the low nibble first
=======  ====================================================================================================

Planes, with high bits merged into the index (values per block, range):

``scale``
    Raw bits of d (1, uint16).
``sub_scale``
    The stored scale of each sub-block, uint8. Of 32 elements (8): IQ2_XXS, IQ3_XXS, IQ3_S < 16, IQ1_S < 8; of 16
    elements (16): IQ2_XS, IQ2_S < 16, IQ1_M < 8.
``index``
    Codebook entry of each group. IQ2_XXS (32, uint8), IQ2_XS (32, uint16 < 512), IQ2_S (32, uint16 < 1024),
    IQ3_XXS (64, uint8), IQ3_S (64, uint16 < 512), IQ1_S and IQ1_M (32, uint16 < 2048).
``sign``
    uint8. IQ2_S, IQ3_S (32): bit i set means that element i of 8 is negative. IQ2_XXS, IQ2_XS, IQ3_XXS (32, < 128):
    the first 7 of these bits; the eighth makes their number even. IQ1_S (8, < 2) and IQ1_M (32, < 2): 1 means that the
    constant shift of the 32 or 8 elements is negative.
"""

from __future__ import annotations

import numpy as np

from .bits import pack_neighbours, pack_words, unpack_neighbours, unpack_words
from .layout import BlockLayout, PlaneDict, PlaneSpec, plane

_SEVENS = np.arange(0, 28, 7, dtype=np.uint32)
_THREES = np.arange(0, 12, 3, dtype=np.uint16)
_D_NIBBLES = np.arange(0, 16, 4, dtype=np.uint16)


def _low_byte(index: np.ndarray) -> np.ndarray:
    return (index & 0xFF).astype(np.uint8)


def _high_byte(index: np.ndarray) -> np.ndarray:
    return (index >> 8).astype(np.uint8)


def _with_high(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low | high.astype(np.uint16) << 8


def _pack_shifted(fields: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    """Return ``(n, words * len(shifts))`` integers as ``(n, words)`` words of the dtype of `shifts`."""
    grouped = fields.reshape(len(fields), -1, len(shifts)).astype(shifts.dtype)
    return np.bitwise_or.reduce(grouped << shifts, axis=-1)


def _get_signs_and_scale(words: np.ndarray, out: PlaneDict) -> None:
    out["sub_scale"][:] = words >> 28
    out["sign"][:] = (words[..., None] >> _SEVENS & 0x7F).reshape(-1, 32)


def _put_signs_and_scale(planes: PlaneDict) -> np.ndarray:
    return _pack_shifted(planes["sign"], _SEVENS) | planes["sub_scale"].astype(np.uint32) << 28


def _split_iq2_xxs(blocks: np.ndarray, out: PlaneDict) -> None:
    out["scale"][:] = unpack_words(blocks, 0, 2, "<u2")
    groups = blocks[:, 2:].reshape(-1, 8, 8)
    out["index"][:] = groups[..., :4].reshape(-1, 32)
    _get_signs_and_scale(np.ascontiguousarray(groups[..., 4:]).view("<u4")[..., 0], out)


def _join_iq2_xxs(planes: PlaneDict, blocks: np.ndarray) -> None:
    words = pack_words(_put_signs_and_scale(planes), "<u4").reshape(-1, 8, 4)
    blocks[:, :2] = pack_words(planes["scale"], "<u2")
    blocks[:, 2:] = np.concatenate([planes["index"].reshape(-1, 8, 4), words], axis=-1).reshape(-1, 64)


def _split_iq2_xs(blocks: np.ndarray, out: PlaneDict) -> None:
    out["scale"][:] = unpack_words(blocks, 0, 2, "<u2")
    words = unpack_words(blocks, 2, 66, "<u2")
    out["sub_scale"][:] = unpack_neighbours(blocks[:, 66:], 4)
    out["index"][:] = words & 0x1FF
    out["sign"][:] = words >> 9


def _join_iq2_xs(planes: PlaneDict, blocks: np.ndarray) -> None:
    blocks[:, :2] = pack_words(planes["scale"], "<u2")
    blocks[:, 2:66] = pack_words(planes["index"] | planes["sign"].astype(np.uint16) << 9, "<u2")
    blocks[:, 66:] = pack_neighbours(planes["sub_scale"], 4)


def _split_iq2_s(blocks: np.ndarray, out: PlaneDict) -> None:
    out["scale"][:] = unpack_words(blocks, 0, 2, "<u2")
    out["sub_scale"][:] = unpack_neighbours(blocks[:, 74:], 4)
    out["index"][:] = _with_high(blocks[:, 2:34], unpack_neighbours(blocks[:, 66:74], 2))
    out["sign"][:] = blocks[:, 34:66]


def _join_iq2_s(planes: PlaneDict, blocks: np.ndarray) -> None:
    blocks[:, :2] = pack_words(planes["scale"], "<u2")
    blocks[:, 2:34] = _low_byte(planes["index"])
    blocks[:, 34:66] = planes["sign"]
    blocks[:, 66:74] = pack_neighbours(_high_byte(planes["index"]), 2)
    blocks[:, 74:] = pack_neighbours(planes["sub_scale"], 4)


def _split_iq3_xxs(blocks: np.ndarray, out: PlaneDict) -> None:
    out["scale"][:] = unpack_words(blocks, 0, 2, "<u2")
    out["index"][:] = blocks[:, 2:66]
    _get_signs_and_scale(unpack_words(blocks, 66, 98, "<u4"), out)


def _join_iq3_xxs(planes: PlaneDict, blocks: np.ndarray) -> None:
    blocks[:, :2] = pack_words(planes["scale"], "<u2")
    blocks[:, 2:66] = planes["index"]
    blocks[:, 66:] = pack_words(_put_signs_and_scale(planes), "<u4")


def _split_iq3_s(blocks: np.ndarray, out: PlaneDict) -> None:
    out["scale"][:] = unpack_words(blocks, 0, 2, "<u2")
    out["sub_scale"][:] = unpack_neighbours(blocks[:, 106:], 4)
    out["index"][:] = _with_high(blocks[:, 2:66], unpack_neighbours(blocks[:, 66:74], 1))
    out["sign"][:] = blocks[:, 74:106]


def _join_iq3_s(planes: PlaneDict, blocks: np.ndarray) -> None:
    blocks[:, :2] = pack_words(planes["scale"], "<u2")
    blocks[:, 2:66] = _low_byte(planes["index"])
    blocks[:, 66:74] = pack_neighbours(_high_byte(planes["index"]), 1)
    blocks[:, 74:106] = planes["sign"]
    blocks[:, 106:] = pack_neighbours(planes["sub_scale"], 4)


def _split_iq1_s(blocks: np.ndarray, out: PlaneDict) -> None:
    out["scale"][:] = unpack_words(blocks, 0, 2, "<u2")
    words = unpack_words(blocks, 34, 50, "<u2")
    out["sub_scale"][:] = words >> 12 & 7
    out["index"][:] = _with_high(blocks[:, 2:34], (words[..., None] >> _THREES & 7).reshape(-1, 32))
    out["sign"][:] = words >> 15


def _join_iq1_s(planes: PlaneDict, blocks: np.ndarray) -> None:
    words = _pack_shifted(planes["index"] >> 8, _THREES)
    words |= planes["sub_scale"].astype(np.uint16) << 12 | planes["sign"].astype(np.uint16) << 15
    blocks[:, :2] = pack_words(planes["scale"], "<u2")
    blocks[:, 2:34] = _low_byte(planes["index"])
    blocks[:, 34:] = pack_words(words, "<u2")


def _split_iq1_m(blocks: np.ndarray, out: PlaneDict) -> None:
    words = unpack_words(blocks, 48, 56, "<u2")
    out["scale"][:] = _pack_shifted(words >> 12, _D_NIBBLES)
    out["sub_scale"][:] = (words[..., None] >> _THREES & 7).reshape(-1, 16)
    high = unpack_neighbours(blocks[:, 32:48], 4)
    out["index"][:] = _with_high(blocks[:, :32], high & 7)
    out["sign"][:] = high >> 3


def _join_iq1_m(planes: PlaneDict, blocks: np.ndarray) -> None:
    words = _pack_shifted(planes["sub_scale"], _THREES)
    words |= (planes["scale"] >> _D_NIBBLES & 0xF) << 12
    blocks[:, :32] = _low_byte(planes["index"])
    blocks[:, 32:48] = pack_neighbours(_high_byte(planes["index"]) | planes["sign"] << 3, 4)
    blocks[:, 48:] = pack_words(words, "<u2")


def _specs(sub_scale: tuple[int, int], index: tuple[int, int], sign: tuple[int, int]) -> tuple[PlaneSpec, ...]:
    return plane("scale", 1, 16), plane("sub_scale", *sub_scale), plane("index", *index), plane("sign", *sign)


CODEBOOK_LAYOUTS = (
    BlockLayout(16, _specs((8, 4), (32, 8), (32, 7)), _split_iq2_xxs, _join_iq2_xxs),
    BlockLayout(17, _specs((16, 4), (32, 9), (32, 7)), _split_iq2_xs, _join_iq2_xs),
    BlockLayout(18, _specs((8, 4), (64, 8), (32, 7)), _split_iq3_xxs, _join_iq3_xxs),
    BlockLayout(19, _specs((8, 3), (32, 11), (8, 1)), _split_iq1_s, _join_iq1_s),
    BlockLayout(21, _specs((8, 4), (64, 9), (32, 8)), _split_iq3_s, _join_iq3_s),
    BlockLayout(22, _specs((16, 4), (32, 10), (32, 8)), _split_iq2_s, _join_iq2_s),
    BlockLayout(29, _specs((16, 3), (32, 11), (32, 1)), _split_iq1_m, _join_iq1_m),
)
