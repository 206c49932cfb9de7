"""Split codes: the high parts of two codes as one symbol, their low bits raw.

The low bits of codes of five bits and more are next to uniform, so a code table gains nothing on them; but they take a
look-up for each code. Here the four high bits of codes i and i + 16 of a cell of 32 are symbol i, code i in its low nibble:
half as many look-ups, and a symbol of twice as many bits loses less to the whole bits of codewords. The low bits, 1 or 4
(`low_bits`) of each code, stand in front of the stream: row phase by row phase, in it cell by cell, in it lane by lane, those
of codes i and i + 16 side by side as bits ``2 * low_bits * i`` and up of the ``32 * low_bits`` bits of a cell, little-endian.
"""

from __future__ import annotations

import numpy as np
from numba import njit, uint32

from lazyweights.codecs.byte_access import load_u64, store_u32

LAST_CONTEXT = 255
"""Context of the last symbol of a cell without its forced code: only its low nibble says something."""


@njit(cache=True, nogil=True)
def split_high(codes: np.ndarray, low_bits: int, high: np.ndarray) -> None:
    """Fill the symbols of some rows, uint8 (rows, 16 * cells), from their codes, uint8 (rows, 32 * cells)."""
    shift = np.uint8(low_bits)
    for row in range(codes.shape[0]):
        for cell in range(np.uint64(high.shape[1] // 16)):
            at, to = np.uint64(32) * cell, np.uint64(16) * cell
            for i in range(np.uint64(16)):
                low_code, high_code = codes[row, at + i] >> shift, codes[row, at + i + np.uint64(16)] >> shift
                high[row, to + i] = low_code | (high_code << np.uint8(4))


@njit(cache=True, nogil=True)
def pack_low(codes: np.ndarray, low_bits: int, out: np.ndarray, first_byte: int) -> None:
    """Write the low bits of up to 64 rows of codes, uint8 (rows, 32 * cells), to `out`, uint8, from `first_byte` on."""
    n_rows = codes.shape[0]
    at = np.uint64(first_byte)
    for phase in range(2):
        for cell in range(np.uint64(codes.shape[1] // 32)):
            source = np.uint64(32) * cell
            for row in range(phase, n_rows, 2):
                if low_bits == 4:
                    for i in range(np.uint64(16)):
                        low = codes[row, source + i] & np.uint8(15)
                        out[at + i] = low | (codes[row, source + i + np.uint64(16)] << np.uint8(4))
                    at += np.uint64(16)
                else:
                    bits = uint32(0)
                    for i in range(np.uint64(16)):
                        low, high = uint32(codes[row, source + i]), uint32(codes[row, source + i + np.uint64(16)])
                        bits |= ((low & uint32(1)) | ((high & uint32(1)) << uint32(1))) << uint32(np.uint64(2) * i)
                    store_u32(out, np.int64(at), bits)
                    at += np.uint64(4)


@njit(cache=True, nogil=True)
def join_split(
    out: np.ndarray, first: int, lane_stride: int, n_lanes: int, n_cells: int, cell_stride: int, low_bits: int,
    low: np.ndarray, first_low: int,
) -> None:
    """Turn the symbols of the rows of one phase into codes, in place.

    Parameters
    ----------
    out : uint8, flat; cell c of lane l has its 16 symbols, and then its 32 codes, from
        ``first + l * lane_stride + c * cell_stride`` on
    low : uint8, flat; the low bits of the phase start at `first_low`, and four bytes more than they take are there
    """
    symbols = np.empty(16, np.uint8)
    lows = np.empty(16, np.uint8)
    for lane in range(np.uint64(n_lanes)):
        for cell in range(np.uint64(n_cells)):
            at = np.uint64(first) + lane * np.uint64(lane_stride) + cell * np.uint64(cell_stride)
            place = np.uint64(first_low) + (cell * np.uint64(n_lanes) + lane) * np.uint64(4 * low_bits)
            for i in range(np.uint64(16)):
                symbols[i] = out[at + i]
            if low_bits == 4:
                for i in range(np.uint64(16)):
                    lows[i] = low[place + i]
                for i in range(np.uint64(16)):
                    out[at + i] = (symbols[i] << np.uint8(4)) | (lows[i] & np.uint8(15))
                    out[at + i + np.uint64(16)] = (symbols[i] & np.uint8(0xF0)) | (lows[i] >> np.uint8(4))
            else:
                bits = uint32(load_u64(low, np.int64(place)) & np.uint64(0xFFFFFFFF))
                for i in range(np.uint64(16)):
                    lows[i] = np.uint8((bits >> uint32(np.uint64(2) * i)) & uint32(3))
                for i in range(np.uint64(16)):
                    out[at + i] = ((symbols[i] << np.uint8(1)) & np.uint8(0x1E)) | (lows[i] & np.uint8(1))
                    out[at + i + np.uint64(16)] = ((symbols[i] >> np.uint8(3)) & np.uint8(0x1E)) | (lows[i] >> np.uint8(1))
