"""Lane streams in numba: the encoder.

The stream is defined in `lanes` (the plain Python reference); these kernels are bit-equal to it. A stream may hold several
*planes* one after the other: the lanes keep their state between planes, so a row group pays for one flush only.

Words are written where the decoder will take them. The encoder follows the decoder's refills: each lane that takes a word
gets the next *place* in the stream, and the word is written there when its bits are known, at most two words later. State:

- ``state`` uint32 (4, 32), a column a lane: its open bits from the most significant bit on, which are not in a written word
  yet; how many bits the decoder holds; the place of the word that the open bits belong to; the place of the word after it.
  From the bits held follows how many bits are open: ``-held % 32``;
- ``pos`` int64 (1,), the next place.

Kernels write no word behind the end of `words`, whatever the symbols: they stop before a plane for which there might not be
room. Symbols and contexts must lie within their arrays.
"""

from __future__ import annotations

import numpy as np
from numba import njit, uint32, uint64

from lazyweights.codecs import N_LANES
from lazyweights.codecs import vector_encode as _vector
from lazyweights.codecs.vector_kernels import AVAILABLE as _AVAILABLE

OK, NO_CODEWORD, OUTPUT_FULL = 0, 1, 2

NO_ENTRY = 16
"""Entry of a symbol without codeword."""

_BITS, _HELD, _FIRST, _SECOND = 0, 1, 2, 3


def encode_entries(codewords: np.ndarray) -> np.ndarray:
    """Return the entries of the lane encoder for those of `canonical.codewords`.

    Parameters
    ----------
    codewords : ndarray of uint32, shape (n_tables, 256)

    Returns
    -------
    ndarray of uint16, shape (n_tables * 256 + 2,)
        Codeword in the top bits, its length in the low four; `NO_ENTRY` where there is no codeword. Two entries of padding
        for wide loads.

    >>> [hex(e) for e in encode_entries(np.array([[0x10000, 0x20003, 0xFFFFFFFF]], np.uint32))[:3]]
    ['0x1', '0xc002', '0x10']
    """
    flat = codewords.ravel()
    lengths = flat >> np.uint32(16)
    known = flat != np.uint32(0xFFFFFFFF)
    lengths = np.where(known, lengths, 0)
    entries = ((flat & np.uint32(0x7FF)) << (np.uint32(16) - lengths) & np.uint32(0xFFFF)) | lengths
    return np.concatenate([np.where(known, entries, NO_ENTRY), [NO_ENTRY, NO_ENTRY]]).astype(np.uint16)


@njit(cache=True, nogil=True)
def side_contexts(symbols: np.ndarray, kind: int, base: int, other: np.ndarray, contexts: np.ndarray) -> None:
    """Fill the context of each symbol of a side plane (what `lane_kernels.decode_side_phase` finds while decoding).

    Parameters
    ----------
    symbols : uint8 (2, columns, 32)
    kind : `lane_kernels.NO_CONTEXT`, RUNNING_MEAN or OTHER_PLANE
    base : running mean that maps to context 1
    other : uint8 (2, columns, 32), the plane that OTHER_PLANE looks at
    contexts : uint8 (2, columns, 32), output, 0 .. 31
    """
    n_columns = symbols.shape[1]
    mean16 = np.zeros(32, np.int32)
    lanes = np.uint64(32)
    for phase in range(2):
        for column in range(n_columns):
            if kind == 2:
                for lane in range(lanes):
                    contexts[phase, column, lane] = other[phase, column, lane] >> 3
            elif kind == 0:
                for lane in range(lanes):
                    contexts[phase, column, lane] = 0
            elif column == 0:
                for lane in range(lanes):
                    contexts[phase, column, lane] = 0
                    mean16[lane] = np.int32(symbols[phase, column, lane]) << np.int32(4)
            else:
                for lane in range(lanes):
                    distance = ((mean16[lane] + np.int32(8)) >> np.int32(4)) - np.int32(base)
                    contexts[phase, column, lane] = np.int32(1) + min(max(distance, np.int32(0)), np.int32(30))
                    s16 = np.int32(symbols[phase, column, lane]) << np.int32(4)
                    mean16[lane] += (s16 - mean16[lane]) >> np.int32(2)


def new_encoder() -> tuple[np.ndarray, np.ndarray]:
    """Return arrays for an encoder's state; `start_lanes` makes them ready."""
    return np.zeros((4, N_LANES), np.uint32), np.zeros(1, np.int64)


@njit(cache=True, nogil=True)
def start_lanes(n_rows: int, state: np.ndarray, pos: np.ndarray) -> None:
    """Begin the stream of a tile of 1 .. 64 rows: all lanes take their first word. There must be a plane."""
    state[:] = 0
    for lane in range((n_rows + 1) // 2):
        state[1, lane] = 32
        state[2, lane] = lane
    pos[0] = (n_rows + 1) // 2


@njit(cache=True, nogil=True)
def _encode_cells_scalar(
    symbols: np.ndarray,
    at: int,
    lane_stride: int,
    position_stride: int,
    cell_stride: int,
    cell_length: int,
    last_table: int,
    contexts: np.ndarray,
    phase: int,
    n_lanes: int,
    offsets: np.ndarray,
    entries: np.ndarray,
    words: np.ndarray,
    state: np.ndarray,
    pos: np.ndarray,
) -> int:
    """Encode one phase of a plane, see `encode_cells`; return whether a symbol had no codeword. The symbols start at `at`."""
    p = np.uint32(pos[0])
    seen = np.uint16(0)
    lanes = np.uint64(n_lanes)
    n_positions = cell_length + (1 if last_table >= 0 else 0)
    for cell in range(contexts.shape[1]):
        for position in range(n_positions):
            if position % 2 == 0:
                for lane in range(lanes):
                    if state[1, lane] < uint32(32):
                        state[1, lane] += uint32(32)
                        state[3, lane] = p
                        p += uint32(1)
            start = np.uint64(at + cell * cell_stride + position * position_stride)
            for lane in range(lanes):
                symbol = symbols[start + lane * np.uint64(lane_stride)]
                table = np.uint64(offsets[contexts[phase, cell, lane]] if position < cell_length else last_table)
                entry = entries[table + np.uint64(symbol)]
                seen |= entry
                length = uint32(entry & 15)
                held = state[1, lane]
                n_open = uint32((uint64(0) - uint64(held)) & uint64(31))
                both = uint64(state[0, lane]) << uint64(32)
                both |= uint64(entry & 0xFFE0) << uint64(uint32(48) - n_open)
                if n_open + length >= uint32(32):
                    words[np.uint64(state[2, lane])] = uint32(both >> uint64(32))
                    state[2, lane] = state[3, lane]
                    both = both << uint64(32)
                state[0, lane] = uint32(both >> uint64(32))
                state[1, lane] = held - length
    pos[0] = p
    return seen & 16


@njit(cache=True, nogil=True)
def _no_room(words: np.ndarray, pos: np.ndarray, n_lanes: int, n_symbols: int) -> bool:
    """Whether `words` may be too short for `n_symbols` more symbols of each lane."""
    return pos[0] + n_lanes * (11 * n_symbols // 32 + 2) > words.size


@njit(cache=True, nogil=True)
def encode_cells(
    symbols: np.ndarray,
    strides: tuple,
    contexts: np.ndarray,
    offsets: np.ndarray,
    entries: np.ndarray,
    cell_length: int,
    last_table: int,
    n_rows: int,
    words: np.ndarray,
    state: np.ndarray,
    pos: np.ndarray,
) -> int:
    """Append a plane of cells to the stream of a tile; `finish_lanes` ends it.

    Parameters
    ----------
    symbols : uint8, flat
        Symbol of (phase, cell, position, lane) at the dot product with `strides`.
    strides : (phase, cell, position, lane) strides in elements
    contexts : int32 (2, cells, 32), context of each cell
    offsets : int32 (n_contexts,), where in `entries` the table of each context starts
    entries : uint16, of `encode_entries`
    cell_length : symbols in a cell
    last_table : where in `entries` the table of one symbol more in each cell starts, -1: there is none. Then `cell_length` is 3
        modulo 4
    n_rows : rows of the tile, 1 .. 64
    words : uint32, output, the stream
    state, pos : see the module

    Returns
    -------
    int : OK, NO_CODEWORD or OUTPUT_FULL; of a stream that is not OK no more than that can be said.
    """
    phase_stride, cell_stride, position_stride, lane_stride = strides
    n_cells = contexts.shape[1]
    n_symbols = cell_length + (1 if last_table >= 0 else 0)
    whole = (n_symbols + 3) // 4 * 4
    missing = 0
    for phase in range(2):
        n_lanes = (n_rows + 1 - phase) // 2
        if n_lanes == 0 or n_cells == 0:
            continue
        if _no_room(words, pos, n_lanes, n_cells * n_symbols):
            return 2
        at = phase * phase_stride
        last = at + 31 * lane_stride + (n_cells - 1) * cell_stride
        if (
            _AVAILABLE and n_lanes == 32 and position_stride == 1 and whole <= cell_stride
            and last + whole <= symbols.size and 16 * lane_stride < 1 << 31
        ):
            missing |= _vector.encode_cells_phase(
                symbols, at, lane_stride, cell_stride, cell_length, last_table, contexts, phase, offsets, entries, words, state,
                pos,
            )
        else:
            missing |= _encode_cells_scalar(
                symbols, at, lane_stride, position_stride, cell_stride, cell_length, last_table, contexts, phase, n_lanes,
                offsets, entries, words, state, pos,
            )
    return 1 if missing else 0


@njit(cache=True, nogil=True)
def encode_side(
    symbols: np.ndarray,
    contexts: np.ndarray,
    offsets: np.ndarray,
    entries: np.ndarray,
    n_rows: int,
    words: np.ndarray,
    state: np.ndarray,
    pos: np.ndarray,
) -> int:
    """Append a side plane to the stream of a tile: cells of one symbol.

    Parameters
    ----------
    symbols : uint8, flat, of (2 phases, columns, 32 lanes)
    contexts : uint8 (2, columns, 32), context of each symbol
    offsets, entries, n_rows, words, state, pos : as in `encode_cells`

    Returns
    -------
    int : OK, NO_CODEWORD or OUTPUT_FULL.
    """
    n_columns = contexts.shape[1]
    missing = 0
    for phase in range(2):
        n_lanes = (n_rows + 1 - phase) // 2
        if n_lanes == 0:
            continue
        if _no_room(words, pos, n_lanes, n_columns):
            return 2
        if _AVAILABLE and n_lanes == 32:
            missing |= _vector.encode_side_phase(symbols, contexts, phase, offsets, entries, words, state, pos)
        else:
            missing |= _encode_cells_scalar(
                symbols, phase * n_columns * 32, 1, 0, 32, 1, -1, contexts, phase, n_lanes, offsets, entries, words, state, pos
            )
    return 1 if missing else 0


@njit(cache=True, nogil=True)
def left_over(state: np.ndarray) -> int:
    """Bits that the words of all lanes have room for."""
    return np.int64(state[1].sum())


@njit(cache=True, nogil=True)
def finish_lanes(
    words: np.ndarray, state: np.ndarray, tail: np.ndarray, first_bit: int, n_bits: int
) -> None:
    """Write the words that are still open, filled with bits ``first_bit .. first_bit + n_bits`` of `tail`, then with zeros.

    `tail` is uint8, most significant bit first, with 8 bytes more than its bits need; lane 0 comes first.
    """
    bit = first_bit
    end = first_bit + n_bits
    for lane in range(32):
        held = np.int64(state[1, lane])
        word = uint64(state[0, lane])
        place = state[2, lane]
        while held > 0:
            room = (held - 1) % 32 + 1
            take = min(room, end - bit)
            if take > 0:
                k = bit >> 3
                chunk = uint64(0)
                for i in range(5):
                    chunk = chunk << uint64(8) | uint64(tail[k + i])
                chunk = (chunk >> uint64(40 - (bit & 7) - take)) & ((uint64(1) << uint64(take)) - uint64(1))
                word |= chunk << uint64(room - take)
                bit += take
            words[np.uint64(place)] = uint32(word)
            held -= room
            word = uint64(0)
            place = state[3, lane]
