"""rANS with 32 lanes (Duda, arXiv 1311.2540): frequencies, reference coder and numba kernels.

States are 32-bit numbers in ``[2**16, 2**32)``; probabilities have 12 bits; renormalisation moves 16 bits at a time, at most
once a symbol. The order of symbols is that of `lanes`: row phase, cell, position, lane. A *stack*: the encoder runs from the
last symbol to the first and its output is reversed, so that the decoder runs forwards.

A stream is the state of each lane that has a row (one 32-bit word, lane order), then 16-bit words in the order in which the
decoder takes them: after each symbol, a lane whose state is below ``2**16`` takes the next one; two to a 32-bit word, the low
half first.

The encoder may start each lane in any state of ``[2**16, 2**17)``. That start is where the decoder ends, so its 16 low bits
carry *tail bits* of the caller: the flush of 32 states costs 16 bits a lane, not 32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit, uint32, uint64

from lazyweights.codecs import vector_kernels as _vector
from lazyweights.codecs import vector_rans as _vector_rows
from lazyweights.codecs import vector_rans_encode as _vector_encode
from lazyweights.codecs.lanes import Row, _visits
from lazyweights.errors import CodecError

_VECTOR = _vector.AVAILABLE

PROB_BITS = 12
PROB_SCALE = 1 << PROB_BITS
STATE_LOW = 1 << 16
TAIL_BITS = 16


def normalized_freqs(counts: np.ndarray) -> np.ndarray:
    """Return frequencies that sum to 4096, at least 1 for each symbol that occurs.

    Each count is scaled and rounded down (but to no less than 1); what is then missing goes to the symbols that gain most
    from one step more, what is too much comes from those that lose least. Gains are compared as exact fractions, ties go to
    the smaller symbol.

    Parameters
    ----------
    counts : ndarray of int, shape (256,)

    Returns
    -------
    ndarray of uint16, shape (256,)

    Raises
    ------
    CodecError
        If no symbol occurs.
    """
    values = [int(c) for c in counts]
    total = sum(values)
    if total == 0:
        raise CodecError("frequencies of no symbols")
    freqs = [max(c * PROB_SCALE // total, 1) if c else 0 for c in values]
    used = [s for s, c in enumerate(values) if c]
    # One step more for symbol s saves about counts[s] / freqs[s] (derivative of counts * log freqs).
    while (missing := PROB_SCALE - sum(freqs)) != 0:
        if missing > 0:
            order = sorted(used, key=lambda s: (-values[s] * PROB_SCALE // freqs[s], s))
            for s in order[:missing]:
                freqs[s] += 1
        else:
            order = sorted((s for s in used if freqs[s] > 1), key=lambda s: (values[s] * PROB_SCALE // (freqs[s] - 1), s))
            for s in order[:-missing]:
                freqs[s] -= 1
    return np.array(freqs, np.uint16)


def check_freqs(freqs: np.ndarray) -> None:
    """Raise CodecError unless the frequencies sum to 4096."""
    total = int(freqs.astype(np.int64).sum())
    if total != PROB_SCALE:
        raise CodecError("the frequencies do not sum to 4096", expected=PROB_SCALE, found=total)


def rans_tables(freqs: np.ndarray) -> np.ndarray:
    """Return decode entries ``symbol | (freq - 1) << 8 | (slot - cum_freq) << 20``, flat, uint32 (n_tables * 4096,).

    Parameters
    ----------
    freqs : ndarray of uint16, shape (n_tables, 256); a row of zeros gives a table of zeros
    """
    for row in freqs:
        if row.any():
            check_freqs(row)
    out = np.zeros(len(freqs) * PROB_SCALE, np.uint32)
    _fill_tables(np.ascontiguousarray(freqs), out)
    return out


@njit(cache=True, nogil=True)
def _fill_tables(freqs: np.ndarray, out: np.ndarray) -> None:
    """Fill the decode entries of tables whose frequencies sum to 4096 or 0."""
    for t in range(freqs.shape[0]):
        at = np.uint64(t * 4096)
        for s in range(freqs.shape[1]):
            freq = uint32(freqs[t, s])
            entry = uint32(s) | (freq - uint32(1)) << uint32(8)
            for bias in range(np.uint64(freq)):
                out[at] = entry | uint32(bias) << uint32(20)
                at += np.uint64(1)


def encode_rans_reference(
    rows: Sequence[Row], tables: Sequence[Sequence[int]], freqs: Sequence[Sequence[int]], tail: Sequence[int] = ()
) -> tuple[list[int], list[int], int]:
    """Encode a tile in plain Python; arguments as in `lanes.encode_lanes_reference`.

    Returns
    -------
    (states, words, n_tail) : final state of each lane with a row, 16-bit words in decoding order, tail bits carried.
    """
    n_lanes = (len(rows) + 1) // 2
    bits = list(tail[: TAIL_BITS * n_lanes])
    n_tail = len(bits)
    bits += [0] * (TAIL_BITS * n_lanes - n_tail)
    states = [STATE_LOW | int("".join(map(str, bits[TAIL_BITS * k : TAIL_BITS * (k + 1)])), 2) for k in range(n_lanes)]
    words: list[int] = []
    for working, cell, position in reversed(list(_visits(rows))):
        for row in reversed(working):
            table = freqs[tables[row][cell]]
            symbol = rows[row][cell][position]
            freq = int(table[symbol])
            if freq == 0:
                raise CodecError("a symbol has no frequency in its table", found=symbol)
            cum_freq = sum(int(f) for f in table[:symbol])
            x = states[row // 2]
            if x >= freq << 20:
                words.append(x & 0xFFFF)
                x >>= 16
            states[row // 2] = (x // freq << PROB_BITS) + x % freq + cum_freq
    return states, words[::-1], n_tail


def decode_rans_reference(
    states: Sequence[int],
    words: Sequence[int],
    cell_lengths: Sequence[int],
    tables: Sequence[Sequence[int]],
    freqs: Sequence[Sequence[int]],
) -> tuple[list[list[list[int]]], list[int], int]:
    """Inverse of `encode_rans_reference`; returns (rows, final states, words used).

    Raises
    ------
    CodecError
        If the words end too early.
    """
    rows = [[[0] * n for n in cell_lengths] for _ in tables]
    lanes = list(states)
    pointer = 0
    for working, cell, position in _visits(rows):
        for row in working:
            table = freqs[tables[row][cell]]
            x = lanes[row // 2]
            slot = x & PROB_SCALE - 1
            symbol = cum_freq = 0
            while cum_freq + int(table[symbol]) <= slot:
                cum_freq += int(table[symbol])
                symbol += 1
            rows[row][cell][position] = symbol
            x = int(table[symbol]) * (x >> PROB_BITS) + slot - cum_freq
            if x < STATE_LOW:
                if pointer >= len(words):
                    raise CodecError("the code stream ends too early", expected=pointer + 1, found=len(words))
                x = x << 16 | words[pointer]
                pointer += 1
            lanes[row // 2] = x
    return rows, lanes, pointer


@njit(cache=True, nogil=True)
def encode_rans(
    symbols: np.ndarray,
    strides: tuple,
    tables: np.ndarray,
    freqs: np.ndarray,
    cell_length: int,
    n_rows: int,
    states: np.ndarray,
    scratch: np.ndarray,
) -> int:
    """Encode one plane; return the number of 16-bit words, -1 where a symbol has no frequency, -2 where they do not fit.

    Parameters
    ----------
    symbols, strides, cell_length, n_rows : as in `lane_encode.encode_cells`
    tables : uint8 (2, cells, 32), table number of each cell
    freqs : uint32 (n_tables, 256), ``freq | cum_freq << 16``
    states : uint32 (32,), start of each lane in, final state out
    scratch : uint16, output: the words stand at its end, in decoding order
    """
    n_cells = tables.shape[1]
    at = scratch.size
    for phase in range(1, -1, -1):
        n_lanes = (n_rows + 1 - phase) // 2
        base = phase * strides[0]
        if (
            _VECTOR
            and n_lanes == 32
            and _vector_encode.can_encode(strides, cell_length, n_cells)
            and at >= 32 * n_cells * cell_length
        ):
            at = _vector_encode.encode_rans_full(symbols, base, strides, tables, phase, freqs, cell_length, states, scratch, at)
        else:
            at = _encode_phase_scalar(symbols, base, strides, tables, phase, freqs, cell_length, n_lanes, states, scratch, at)
        if at < 0:
            return at
    return scratch.size - at


@njit(cache=True, nogil=True)
def _encode_phase_scalar(
    symbols: np.ndarray,
    base: int,
    strides: tuple,
    tables: np.ndarray,
    phase: int,
    freqs: np.ndarray,
    cell_length: int,
    n_lanes: int,
    states: np.ndarray,
    scratch: np.ndarray,
    at: int,
) -> int:
    """Encode one phase of a plane whose symbols start at `base`, see `encode_rans`.

    Words go in front of place `at` of `scratch`; returns the place of the last one, or -1 or -2 as `encode_rans`.
    """
    _, cell_stride, position_stride, lane_stride = strides
    for cell in range(tables.shape[1] - 1, -1, -1):
        for position in range(cell_length - 1, -1, -1):
            first = base + cell * cell_stride + position * position_stride
            if at < n_lanes:
                return -2
            for lane in range(n_lanes - 1, -1, -1):
                entry = freqs[tables[phase, cell, lane], symbols[first + lane * lane_stride]]
                freq = entry & uint32(0xFFFF)
                if freq == 0:
                    return -1
                x = states[lane]
                if uint64(x) >= uint64(freq) << uint64(20):
                    at -= 1
                    scratch[at] = x & uint32(0xFFFF)
                    x = x >> uint32(16)
                q = x // freq
                states[lane] = (q << uint32(12)) + (x - q * freq) + (entry >> uint32(16))
    return at


@njit(cache=True, nogil=True)
def decode_rans_scalar(
    words: np.ndarray,
    limit: int,
    tables: np.ndarray,
    offsets: np.ndarray,
    cell_length: int,
    n_lanes: int,
    out: np.ndarray,
    states: np.ndarray,
    pos: np.ndarray,
) -> None:
    """Decode one phase of a plane.

    Parameters
    ----------
    words : uint16; words past `limit` read as zero
    tables : uint32 of `rans_tables`; `offsets` int32 (cells, 32), where the table of each cell starts
    out : uint32 (cells, quads, 32), four symbols to a word
    states : uint32 (32,); pos : int64 (1,), the next word to take
    """
    p = pos[0]
    for cell in range(offsets.shape[0]):
        for position in range(cell_length):
            quad = position >> 2
            shift = uint32((position & 3) * 8)
            for lane in range(n_lanes):
                x = states[lane]
                entry = tables[np.int64(offsets[cell, lane]) + np.int64(x & uint32(4095))]
                x = (((entry >> uint32(8)) & uint32(4095)) + uint32(1)) * (x >> uint32(12)) + (entry >> uint32(20))
                if x < uint32(65536):
                    word = uint32(0)
                    if p < limit:
                        word = uint32(words[p])
                    p += 1
                    x = (x << uint32(16)) | word
                states[lane] = x
                if shift == 0:
                    out[cell, quad, lane] = entry & uint32(255)
                else:
                    out[cell, quad, lane] |= (entry & uint32(255)) << shift
    pos[0] = p


@njit(cache=True, nogil=True)
def decode_rans_phase(
    words: np.ndarray,
    limit: int,
    tables: np.ndarray,
    offsets: np.ndarray,
    cell_length: int,
    n_lanes: int,
    out: np.ndarray,
    states: np.ndarray,
    pos: np.ndarray,
) -> None:
    """Decode one phase of a plane with the fastest kernel for it; arguments as for `decode_rans_scalar`."""
    if _VECTOR and n_lanes == 32 and limit >= 32:
        _vector.decode_rans_full(words, limit, tables, offsets, cell_length, out, states, pos)
    else:
        decode_rans_scalar(words, limit, tables, offsets, cell_length, n_lanes, out, states, pos)


@njit(cache=True, nogil=True)
def decode_rows_scalar(
    words: np.ndarray,
    limit: int,
    tables: np.ndarray,
    offsets: np.ndarray,
    columns: np.ndarray,
    levels: np.ndarray,
    cell_symbols: int,
    n_coded: int,
    n_lanes: int,
    out: np.ndarray,
    bases: np.ndarray,
    strides: np.ndarray,
    states: np.ndarray,
    pos: np.ndarray,
) -> None:
    """Decode one phase of row groups whose tables follow from the class of a column and the level of a row.

    Several groups (streams) are decoded for the same columns; `decode_rows_phase` takes one, or two full ones.

    Parameters
    ----------
    words, limit, tables : as for `decode_rans_scalar`
    offsets : int32 (32 * 16,), table offset of each column class and level
    columns : uint8 (n_symbols,), class of each column, 0 .. 31; a multiple of 16 columns
    levels : int32 (streams, cells, 32), level of each cell, 0 .. 15
    cell_symbols : columns of a cell, a multiple of 4
    n_coded : columns that are decoded, the first ones: all or all but one
    n_lanes : lanes that have a row, the first ones
    out : uint8, flat: symbol i of cell c of a lane goes to ``bases[stream] + lane * strides[0] + c * strides[1] + i``
    states : uint32 (streams, 32); pos : int64 (streams,), the next word of each stream
    """
    for stream in range(pos.size):
        p = pos[stream]
        for column in range(n_coded):
            cell = column // cell_symbols
            at = bases[stream] + cell * strides[1] + column % cell_symbols
            first = np.int64(columns[column]) * 16
            for lane in range(n_lanes):
                x = states[stream, lane]
                table = np.int64(offsets[first + levels[stream, cell, lane]])
                entry = tables[table + np.int64(x & uint32(4095))]
                x = (((entry >> uint32(8)) & uint32(4095)) + uint32(1)) * (x >> uint32(12)) + (entry >> uint32(20))
                if x < uint32(65536):
                    word = uint32(0)
                    if p < limit:
                        word = uint32(words[p])
                    p += 1
                    x = (x << uint32(16)) | word
                states[stream, lane] = x
                out[at + lane * strides[0]] = entry & uint32(255)
        pos[stream] = p


@njit(cache=True, nogil=True)
def decode_rows_phase(
    words: np.ndarray,
    limit: int,
    tables: np.ndarray,
    offsets: np.ndarray,
    columns: np.ndarray,
    levels: np.ndarray,
    cell_symbols: int,
    n_coded: int,
    n_lanes: int,
    out: np.ndarray,
    bases: np.ndarray,
    strides: np.ndarray,
    states: np.ndarray,
    pos: np.ndarray,
) -> None:
    """Decode one phase of rows with the fastest kernel for it; arguments as for `decode_rows_scalar`.

    Columns that are not decoded may be overwritten.
    """
    if _VECTOR and n_lanes == 32 and limit >= 32:
        _vector_rows.decode_rows_full(
            words, limit, tables, offsets, columns, levels, cell_symbols, n_coded, out, bases, strides, states, pos
        )
    else:
        decode_rows_scalar(
            words, limit, tables, offsets, columns, levels, cell_symbols, n_coded, n_lanes, out, bases, strides, states, pos
        )


def freq_entries(freqs: np.ndarray) -> np.ndarray:
    """Return encode entries ``freq | cum_freq << 16``, uint32, of frequencies uint16 (n_tables, 256)."""
    wide = freqs.astype(np.uint32)
    return wide | (np.cumsum(wide, axis=1, dtype=np.uint32) - wide) << np.uint32(16)
