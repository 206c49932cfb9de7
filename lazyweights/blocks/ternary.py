"""The ternary types, in super-blocks of 256: TQ1_0 (five trits a byte) and TQ2_0 (two bits a code).

Byte layouts (brackets are bytes, ``h`` is an fp16):

=====  ======================================================================================================
type   bytes in file order
=====  ======================================================================================================
TQ1_0  qs[48]: trit n of byte i is element ``32 n + i`` for i < 32, else ``160 + 16 n + i - 32`` (n < 5);
       qh[4]: trit n of byte i is element ``240 + 4 n + i`` (n < 4); h d
TQ2_0  qs[64]: element ``128 a + 32 f + i`` is field f (2 bits) of byte ``32 a + i``; h d
=====  ======================================================================================================

A TQ1_0 byte is read as the base-3 fraction ``byte / 256``: its first five (in qh four) digits are the trits, digit 0
first. The digits as one number are ``v = byte * 243 // 256`` (in qh ``byte * 81 // 256``), and the quantizer writes the
smallest byte with these digits, ``ceil(v * 256 / 243)``. 256 bytes share 243 numbers, so 13 bytes of qs (in qh 175) are
one of the others; ``escape`` is the byte minus the smallest byte with its digits. It is 0 throughout in files that a
quantizer wrote, at most 1 in qs and at most 3 in qh.

Planes (values per block, range):

``scale``
    Raw bits of d (1, uint16).
``codes``
    In column order (256, uint8): TQ1_0 the trits a decoder sees, < 3; TQ2_0 the stored 2 bits, < 4 (a quantizer never
    writes 3). The value is ``d * (code - 1)``.
``escape``
    TQ1_0 only (52, uint8, < 4), in the order of the bytes: qs, then qh.
"""

from __future__ import annotations

import numpy as np

from ..errors import BlockLayoutError
from .bits import pack_fields_first, pack_words, unpack_fields_first, unpack_words
from .layout import BlockLayout, PlaneDict, plane


def _smallest_byte(n_trits: int) -> np.ndarray:
    """Return for each number of `n_trits` digits the smallest byte that has them, uint8."""
    return (-(-np.arange(3**n_trits) * 256 // 3**n_trits)).astype(np.uint8)


def _escapes(n_trits: int) -> np.ndarray:
    """Return each byte value minus the smallest byte with its digits, ``(256,)`` uint8."""
    byte = np.arange(256)
    return (byte - _smallest_byte(n_trits)[byte * 3**n_trits // 256]).astype(np.uint8)


# The three runs of bytes of a block: first byte, bytes, trits per byte, first element.
_RUNS = ((0, 32, 5, 0), (32, 16, 5, 160), (48, 4, 4, 240))
_SMALLEST_BYTE = {n: _smallest_byte(n) for n in (4, 5)}
_ESCAPES = {n: _escapes(n) for n in (4, 5)}


def _split_tq1_0(blocks: np.ndarray, out: PlaneDict) -> None:
    out["scale"][:] = unpack_words(blocks, 52, 54, "<u2")
    for at, size, n_trits, element in _RUNS:
        packed = blocks[:, at : at + size]
        codes = out["codes"][:, element : element + size * n_trits].reshape(-1, n_trits, size)
        out["escape"][:, at : at + size] = _ESCAPES[n_trits][packed]
        fraction = packed.copy()
        for trit in range(n_trits):
            # fraction * 3 // 256 without leaving uint8, then the fraction of fraction * 3.
            codes[:, trit] = (fraction > 85).view(np.uint8) + (fraction > 170).view(np.uint8)
            fraction *= np.uint8(3)


def _join_tq1_0(planes: PlaneDict, blocks: np.ndarray) -> None:
    if planes["codes"].max() > 2:
        raise BlockLayoutError(
            "plane 'codes' of TQ1_0 holds a value that is no trit", expected="below 3", found=int(planes["codes"].max())
        )
    blocks[:, 52:54] = pack_words(planes["scale"], "<u2")
    for at, size, n_trits, element in _RUNS:
        trits = planes["codes"][:, element : element + size * n_trits].reshape(-1, n_trits, size)
        number = trits[:, 0].copy()
        for trit in range(1, n_trits):
            number *= np.uint8(3)
            number += trits[:, trit]
        escape = planes["escape"][:, at : at + size]
        packed = _SMALLEST_BYTE[n_trits][number] + escape
        if np.any(_ESCAPES[n_trits][packed] != escape):
            raise BlockLayoutError(
                "plane 'escape' of TQ1_0 leads to a byte with other trits",
                expected="an escape that split returns",
                found=int(escape[_ESCAPES[n_trits][packed] != escape][0]),
            )
        blocks[:, at : at + size] = packed


def _split_tq2_0(blocks: np.ndarray, out: PlaneDict) -> None:
    out["scale"][:] = unpack_words(blocks, 64, 66, "<u2")
    out["codes"][:] = unpack_fields_first(blocks[:, :64].reshape(-1, 2, 32), 2).reshape(-1, 256)


def _join_tq2_0(planes: PlaneDict, blocks: np.ndarray) -> None:
    blocks[:, :64] = pack_fields_first(planes["codes"].reshape(-1, 2, 4, 32), 2).reshape(-1, 64)
    blocks[:, 64:66] = pack_words(planes["scale"], "<u2")


TERNARY_LAYOUTS = (
    BlockLayout(34, (plane("scale", 1, 16), plane("codes", 256, 2), plane("escape", 52, 2)), _split_tq1_0, _join_tq1_0),
    BlockLayout(35, (plane("scale", 1, 16), plane("codes", 256, 2)), _split_tq2_0, _join_tq2_0),
)
