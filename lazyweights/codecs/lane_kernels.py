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

NO_CONTEXT, RUNNING_MEAN, OTHER_PLANE = 0, 1, 2
"""How a side plane selects its table: not at all; by the running mean of the row so far; by another plane."""


@njit(cache=True, nogil=True)
def left_over_bits(buf: np.ndarray, held: np.ndarray, out: np.ndarray, first_bit: int) -> int:
    """Write the decoder's left-over bits of lanes 0 .. 31 to `out` from bit `first_bit` on; return their number.

    `out` is uint8, zero where it is written to, most significant bit first.
    """
    at = first_bit
    for lane in range(32):
        n = held[lane]
        if n <= 0:
            continue
        b = buf[lane] & ~((uint64(1) << uint64(64 - n)) - uint64(1))
        left = n
        while left > 0:
            k = at >> 3
            shift = at & 7
            if k < out.size:
                out[k] |= np.uint8((b >> uint64(56 + shift)) & uint64(0xFF))
            step = min(8 - shift, left)
            b = b << uint64(step)
            at += step
            left -= step
    return at - first_bit


@njit(cache=True, nogil=True)
def _decode_cells_scalar(
    words: np.ndarray,
    limit: int,
    tables: np.ndarray,
    offsets: np.ndarray,
    cell_length: int,
    n_lanes: int,
    out: np.ndarray,
    buf: np.ndarray,
    held: np.ndarray,
    pos: np.ndarray,
) -> None:
    """Decode one phase of a plane: see `decode_cells`."""
    p = pos[0]
    for cell in range(offsets.shape[0]):
        for position in range(cell_length):
            quad = position >> 2
            shift = uint32((position & 3) * 8)
            if position % 2 == 0:
                for lane in range(n_lanes):
                    if held[lane] < 32:
                        if p < limit:
                            buf[lane] |= uint64(words[p]) << uint64(32 - held[lane])
                        p += 1
                        held[lane] += 32
            for lane in range(n_lanes):
                b = buf[lane]
                entry = tables[offsets[cell, lane] + np.int64(b >> uint64(53))]
                length = entry >> 8
                buf[lane] = b << uint64(length)
                held[lane] -= length
                if shift == 0:
                    out[cell, quad, lane] = uint32(entry & 255)
                else:
                    out[cell, quad, lane] |= uint32(entry & 255) << shift
    pos[0] = p


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
    p = pos[0]
    mean16 = np.zeros(32, np.int32)
    for column in range(out.shape[0]):
        for lane in range(n_lanes):
            if held[lane] < 32:
                if p < limit:
                    buf[lane] |= uint64(words[p]) << uint64(32 - held[lane])
                p += 1
                held[lane] += 32
            context = 0
            if kind == 1 and column > 0:
                context = 1 + min(max(((mean16[lane] + 8) >> 4) - base, 0), 30)
            elif kind == 2:
                context = np.int64(other[column, lane] >> 3)
            b = buf[lane]
            entry = tables[offsets[context] + np.int64(b >> uint64(53))]
            length = entry >> 8
            buf[lane] = b << uint64(length)
            held[lane] -= length
            symbol = np.int32(entry & 255)
            out[column, lane] = symbol
            if kind == 1:
                if column == 0:
                    mean16[lane] = symbol << 4
                else:
                    mean16[lane] += ((symbol << 4) - mean16[lane]) >> 2
    pos[0] = p


@njit(inline="always")
def _nibble(cell: np.ndarray, i: int) -> int:
    return (cell[i & 15] >> ((i >> 4) << 2)) & 15


@njit(inline="always")
def _set_nibble(cell: np.ndarray, i: int, value: int) -> None:
    shift = (i >> 4) << 2
    cell[i & 15] = (cell[i & 15] & ~(15 << shift) & 255) | (value << shift)


@njit(cache=True, nogil=True)
def put_forced_nibbles(cell: np.ndarray, position: int) -> None:
    """Undo what `container.forced_codes.take_forced` does to a cell of 16 bytes; byte 15 of `cell` need not be filled."""
    second = position & 31
    first = (position >> 5) & 31
    cell[15] = 0xF0
    _set_nibble(cell, 31, _nibble(cell, second))
    _set_nibble(cell, second, 15)
    _set_nibble(cell, 15, _nibble(cell, first))
    _set_nibble(cell, first, 0)


@njit(cache=True, nogil=True)
def _decode_cells_pair_scalar(
    words: np.ndarray,
    limit: int,
    tables: np.ndarray,
    offsets: np.ndarray,
    cell_length: int,
    out: np.ndarray,
    bases: np.ndarray,
    strides: np.ndarray,
    nibbles: bool,
    positions: np.ndarray,
    buf: np.ndarray,
    held: np.ndarray,
    pos: np.ndarray,
) -> None:
    """Scalar twin of `vector_kernels.decode_cells_pair`; same arguments."""
    packed = np.empty((offsets.shape[1], (cell_length + 3) // 4, 32), np.uint32)
    for s in range(2):
        _decode_cells_scalar(
            words, limit, tables, offsets[s], cell_length, 32, packed, buf[s], held[s], pos[s : s + 1]
        )
        for cell in range(packed.shape[0]):
            for position in range(cell_length):
                at = bases[s] + cell * strides[1] + position
                shift = uint32(8 * (position & 3))
                for lane in range(32):
                    out[at + lane * strides[0]] = (packed[cell, position >> 2, lane] >> shift) & uint32(255)
            if nibbles:
                for lane in range(32):
                    at = bases[s] + cell * strides[1] + lane * strides[0]
                    put_forced_nibbles(out[at : at + 16], np.int64(positions[s, cell, lane]))


@njit(cache=True, nogil=True)
def _decode_side_pair_scalar(
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
    """Scalar twin of `vector_kernels.decode_side_pair`; same arguments."""
    for s in range(2):
        _decode_side_scalar(
            words, limit, tables, offsets, kind, base, other[s], 32, out[s], buf[s], held[s], pos[s : s + 1]
        )


if _vector.AVAILABLE:
    decode_cells_phase = _vector.decode_cells_phase
    decode_side_phase = _vector.decode_side_phase
    decode_cells_pair = _vector.decode_cells_pair
    decode_side_pair = _vector.decode_side_pair
else:
    decode_cells_phase = _decode_cells_scalar
    decode_side_phase = _decode_side_scalar
    decode_cells_pair = _decode_cells_pair_scalar
    decode_side_pair = _decode_side_pair_scalar


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
                length = entry >> 8
                b = b << uint64(length)
                n -= length
                out[row, column] = entry & 255


def new_state() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a fresh decoder state (buf, held, pos)."""
    return np.zeros(N_LANES, np.uint64), np.zeros(N_LANES, np.int32), np.zeros(1, np.int64)
