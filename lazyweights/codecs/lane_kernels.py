"""Lane streams in numba: the decoder, and the choice of the fastest one for this CPU (`lane_encode` is the encoder).

The stream is defined in `lanes` (the plain Python reference); these kernels are bit-equal to it. A
stream may hold several *planes* one after the other: the lanes keep their state between planes, so
a row group pays for one flush only. State of 32 lanes:

- decoder: ``buf`` uint64 (32,), bits left-aligned; ``held`` int32 (32,), how many of them are valid;
  ``pos`` int64 (1,), the next word to take;
- encoder: the words of each lane, ``consumed`` bits, and how many words the decoder takes by each step; after
  c bits it holds at least 32 more, so it has taken ``(c + 31) // 32 + 1`` words.

No kernel reads or writes outside its arrays, whatever the input: words past `limit` read as zero,
and the caller compares ``pos`` with the length of the stream.
"""

from __future__ import annotations

import numpy as np
from numba import njit, uint32, uint64

from lazyweights.codecs import N_LANES
from lazyweights.codecs import vector_kernels as _vector
from lazyweights.codecs.byte_access import load_u64, store_u16, store_u64, swap_bytes
from lazyweights.codecs.split_codes import join_split
from lazyweights.codecs.vector_kernels import FORCED_NIBBLES, PLAIN_CELLS, SPLIT_1, SPLIT_4

__all__ = [
    "FORCED_NIBBLES",
    "NO_CONTEXT",
    "OTHER_PLANE",
    "PLAIN_CELLS",
    "RUNNING_MEAN",
    "SPLIT_1",
    "SPLIT_4",
    "decode_cells_pair",
    "decode_cells_phase",
    "decode_lockstep",
    "decode_side_phase",
    "decode_side_streams",
    "encode_lockstep",
    "left_over_bits",
    "new_state",
    "put_forced_nibbles",
]

NO_CONTEXT, RUNNING_MEAN, OTHER_PLANE = 0, 1, 2
"""How a side plane selects its table: not at all; by the running mean of the row so far; by another plane."""


@njit(cache=True, nogil=True)
def left_over_bits(buf: np.ndarray, held: np.ndarray, out: np.ndarray, first_bit: int) -> int:
    """Write the decoder's left-over bits of lanes 0 .. 31 to `out` from bit `first_bit` on; return their number.

    `out` is uint8, most significant bit first; up to eight bytes behind the bits are written too. Where `out` is too short
    for 32 lanes, nothing is written.
    """
    total = 0
    for lane in range(32):
        total += max(held[lane], 0)
    if first_bit + total + 128 > 8 * out.size:
        return total
    byte = np.int64(first_bit >> 3)
    n_pending = uint64(first_bit & 7)
    pending = uint64(out[byte]) >> (uint64(8) - n_pending)
    for lane in range(32):
        b = buf[lane]
        n = uint64(max(held[lane], 0))
        for _ in range(2):  # up to 32 bits at a time; nothing branches on how many there are
            step = min(n, uint64(32))
            pending = (pending << step) | ((b >> uint64(1)) >> (uint64(63) - step))
            b = b << step
            n -= step
            n_pending += step
            store_u64(out, byte, swap_bytes((pending << (uint64(63) - n_pending)) << uint64(1)))
            byte += np.int64((n_pending >> uint64(5)) << uint64(2))
            n_pending &= uint64(31)
    return total


@njit(inline="always")
def _refill(b: int, n: int, words: np.ndarray, p: int, last: int) -> tuple:
    """Return (bits, how many, next word) after a lane took a word if it held fewer than 32 bits; no branch on data."""
    need = uint64(1) if n < uint64(32) else uint64(0)
    word = uint64(words[min(p, last)]) << ((uint64(32) - n) & uint64(63))
    return b | (word if need else uint64(0)), n + (need << uint64(5)), p + need


@njit(cache=True, nogil=True)
def _decode_cells_scalar(
    words: np.ndarray,
    limit: int,
    tables: np.ndarray,
    offsets: np.ndarray,
    cell_length: int,
    last_table: int,
    n_lanes: int,
    out: np.ndarray,
    buf: np.ndarray,
    held: np.ndarray,
    pos: np.ndarray,
) -> None:
    """Decode one phase of a plane into `out`, uint32 (cells, quads, 32): four symbols each, the first one lowest.

    `offsets` int32 (cells, 32), table of each cell; `cell_length`, `last_table` as in `vector_kernels.decode_cells_pair`.
    """
    p = uint64(pos[0])
    last = uint64(limit - 1)
    lanes = uint64(n_lanes)
    n_symbols = cell_length + (1 if last_table >= 0 else 0)
    for cell in range(offsets.shape[0]):
        for position in range(n_symbols):
            quad = position >> 2
            shift = uint32((position & 3) * 8)
            for lane in range(lanes):
                b, n = buf[lane], uint64(held[lane])
                if position % 2 == 0:
                    b, n, p = _refill(b, n, words, p, last)
                table = uint64(offsets[cell, lane] if position < cell_length else last_table)
                entry = uint64(tables[table + (b >> uint64(53))])
                buf[lane] = b << (entry & uint64(15))
                held[lane] = np.int32(n - (entry & uint64(15)))
                symbol = uint32(entry >> uint64(8)) << shift
                out[cell, quad, lane] = symbol if shift == 0 else out[cell, quad, lane] | symbol
    pos[0] = np.int64(p)


@njit(cache=True, nogil=True)
def _decode_side_scalar(
    words: np.ndarray,
    limit: int,
    tables: np.ndarray,
    offsets: np.ndarray,
    kind: int,
    base: int,
    other: np.ndarray,
    n_lanes: int,
    out: np.ndarray,
    buf: np.ndarray,
    held: np.ndarray,
    pos: np.ndarray,
) -> None:
    """Decode one phase of a side plane: see `decode_side`."""
    p = uint64(pos[0])
    last = uint64(limit - 1)
    mean16 = np.zeros(32, np.int32)
    lanes = uint64(n_lanes)
    for column in range(out.shape[0]):
        for lane in range(lanes):
            b, n, p = _refill(buf[lane], uint64(held[lane]), words, p, last)
            context = np.int32(0)
            if kind == 1 and column > 0:
                distance = ((mean16[lane] + np.int32(8)) >> np.int32(4)) - np.int32(base)
                context = np.int32(1) + min(max(distance, np.int32(0)), np.int32(30))
            elif kind == 2:
                context = np.int32(other[column, lane] >> 3)
            entry = uint64(tables[uint64(offsets[uint64(context)]) + (b >> uint64(53))])
            buf[lane] = b << (entry & uint64(15))
            held[lane] = np.int32(n - (entry & uint64(15)))
            symbol = np.int32(entry >> uint64(8))
            out[column, lane] = symbol
            if kind == 1:
                scaled = symbol << np.int32(4)
                mean16[lane] = scaled if column == 0 else mean16[lane] + ((scaled - mean16[lane]) >> np.int32(2))
    pos[0] = np.int64(p)


@njit(inline="always")
def _nibble_shift(i: int) -> int:
    """Where nibble i is in its eight bytes."""
    return ((uint64(i) & uint64(7)) << uint64(3)) | ((uint64(i) >> uint64(2)) & uint64(4))


@njit(cache=True, nogil=True)
def put_forced_nibbles(out: np.ndarray, at: int, position: int) -> None:
    """Undo what `container.forced_codes.take_forced` does to the 16 bytes of `out`, uint8, from byte `at` on.

    The last of them need not be filled.
    """
    low, high = load_u64(out, at), load_u64(out, at + 8)
    # Codes 15 and 31 are the nibbles of byte 15: 0 and 15 before the swaps are undone, the last swap first.
    high = (high & uint64(0x00FFFFFFFFFFFFFF)) | uint64(0xF000000000000000)
    shift, behind = _nibble_shift(position), position & 8
    value = ((high if behind else low) >> shift) & uint64(15)
    mask = uint64(15) << shift
    high = (high & uint64(0x0FFFFFFFFFFFFFFF)) | (value << uint64(60))
    high |= mask if behind else uint64(0)
    low |= uint64(0) if behind else mask
    position = position >> 5
    shift, behind = _nibble_shift(position), position & 8
    value = ((high if behind else low) >> shift) & uint64(15)
    mask = uint64(15) << shift
    high = (high & uint64(0xF0FFFFFFFFFFFFFF)) | (value << uint64(56))
    high &= ~(mask if behind else uint64(0))
    low &= ~(uint64(0) if behind else mask)
    store_u64(out, at, low)
    store_u64(out, at + 8, high)


@njit(cache=True, nogil=True)
def _decode_cells_pair_scalar(
    words: np.ndarray,
    limit: int,
    tables: np.ndarray,
    offsets: np.ndarray,
    cell_length: int,
    last_table: int,
    out: np.ndarray,
    bases: np.ndarray,
    strides: np.ndarray,
    kind: int,
    positions: np.ndarray,
    buf: np.ndarray,
    held: np.ndarray,
    pos: np.ndarray,
) -> None:
    """Scalar twin of `vector_kernels.decode_cells_pair`; same arguments."""
    last = uint64(limit - 1)
    step = uint64(strides[0])
    lanes = uint64(32)
    bits = np.empty(32, np.uint64)
    counts = np.empty(32, np.uint64)
    for s in range(2):
        p = uint64(pos[s])
        for lane in range(lanes):
            bits[lane] = buf[s, lane]
            counts[lane] = uint64(held[s, lane])
        for cell in range(offsets.shape[1]):
            start = bases[s] + cell * strides[1]
            n_pairs = (cell_length + (1 if last_table >= 0 else 0)) // 2
            for pair in range(n_pairs):
                at = uint64(start + 2 * pair)
                for lane in range(lanes):
                    b, n, p = _refill(bits[lane], counts[lane], words, p, last)
                    table = uint64(offsets[s, cell, lane])
                    first = uint64(tables[table + (b >> uint64(53))])
                    b = b << (first & uint64(15))
                    if last_table >= 0 and pair + 1 == n_pairs:
                        table = uint64(last_table)
                    second = uint64(tables[table + (b >> uint64(53))])
                    bits[lane] = b << (second & uint64(15))
                    counts[lane] = n - (first & uint64(15)) - (second & uint64(15))
                    store_u16(out, np.int64(at), np.uint16((first >> uint64(8)) | (second & uint64(0xFF00))))
                    at += step
            if cell_length & 1 and last_table < 0:
                at = uint64(start + cell_length - 1)
                for lane in range(lanes):
                    b, n, p = _refill(bits[lane], counts[lane], words, p, last)
                    first = uint64(tables[uint64(offsets[s, cell, lane]) + (b >> uint64(53))])
                    bits[lane] = b << (first & uint64(15))
                    counts[lane] = n - (first & uint64(15))
                    out[at] = first >> uint64(8)
                    at += step
            if kind == FORCED_NIBBLES:
                for lane in range(32):
                    position = positions[bases[2 + s] + 32 * cell + lane]
                    put_forced_nibbles(out, start + lane * strides[0], np.int64(position))
        if kind in (SPLIT_1, SPLIT_4):
            n_low = 1 if kind == SPLIT_1 else 4
            join_split(
                out, bases[s], strides[0], 32, offsets.shape[1], strides[1], n_low, words.view(np.uint8), 4 * bases[4 + s]
            )
        pos[s] = np.int64(p)
        for lane in range(lanes):
            buf[s, lane] = bits[lane]
            held[s, lane] = np.int32(counts[lane])


@njit(cache=True, nogil=True)
def _decode_side_streams_scalar(
    words: np.ndarray,
    limit: int,
    tables: np.ndarray,
    offsets: np.ndarray,
    kind: int,
    base: int,
    other: np.ndarray,
    out: np.ndarray,
    buf: np.ndarray,
    held: np.ndarray,
    pos: np.ndarray,
) -> None:
    """Scalar twin of `vector_kernels.decode_side_streams`; same arguments."""
    for s in range(buf.shape[0]):
        _decode_side_scalar(
            words, limit, tables, offsets, kind, base, other[s], 32, out[s], buf[s], held[s], pos[s : s + 1]
        )


if _vector.AVAILABLE:
    decode_cells_phase = _vector.decode_cells_phase
    decode_side_phase = _vector.decode_side_phase
    decode_cells_pair = _vector.decode_cells_pair
    decode_side_streams = _vector.decode_side_streams
else:
    decode_cells_phase = _decode_cells_scalar
    decode_side_phase = _decode_side_scalar
    decode_cells_pair = _decode_cells_pair_scalar
    decode_side_streams = _decode_side_streams_scalar


@njit(cache=True, nogil=True)
def encode_lockstep(
    symbols: np.ndarray, entries: np.ndarray, words: np.ndarray
) -> int:
    """Encode one tile in the lockstep layout with one table; return the words per lane, or -1 or -2.

    Parameters
    ----------
    symbols : uint8 (n_rows, n_columns)
    entries : uint32 (256,) of `canonical.codewords`
    words : uint32, output, all zero; 32 x words per lane of it are written
    """
    n_rows, n_columns = symbols.shape
    longest = 0
    for lane in range(32):
        b = uint64(0)
        n = 0
        k = 0
        for row in range(2 * lane, min(2 * lane + 2, n_rows)):
            for column in range(n_columns):
                entry = entries[symbols[row, column]]
                if entry == uint32(0xFFFFFFFF):
                    return -1
                length = np.int32(entry >> uint32(16))
                b = (b << uint64(length)) | uint64(entry & uint32(0xFFFF))
                n += length
                if n >= 32:
                    n -= 32
                    if 32 * k + lane >= words.size:
                        return -2
                    words[32 * k + lane] = uint32((b >> uint64(n)) & uint64(0xFFFFFFFF))
                    k += 1
        if n > 0:
            if 32 * k + lane >= words.size:
                return -2
            words[32 * k + lane] = uint32((b << uint64(32 - n)) & uint64(0xFFFFFFFF))
            k += 1
        longest = max(longest, k)
    return longest


@njit(cache=True, nogil=True)
def decode_lockstep(words: np.ndarray, tables: np.ndarray, out: np.ndarray) -> None:
    """Decode one lockstep tile with one table (uint16, 2048 entries and padding) into `out` (rows, columns)."""
    n_rows, n_columns = out.shape
    for lane in range((n_rows + 1) // 2):
        b = uint64(0)
        n = 0
        k = lane
        for row in range(2 * lane, min(2 * lane + 2, n_rows)):
            for column in range(n_columns):
                if n < 32:
                    if k < words.size:
                        b |= uint64(words[k]) << uint64(32 - n)
                    k += 32
                    n += 32
                entry = tables[np.int64(b >> uint64(53))]
                length = entry & 15
                b = b << uint64(length)
                n -= length
                out[row, column] = entry >> 8


def new_state() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a fresh decoder state (buf, held, pos)."""
    return np.zeros(N_LANES, np.uint64), np.zeros(N_LANES, np.int32), np.zeros(1, np.int64)
