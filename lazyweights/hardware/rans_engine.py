"""rANS lanes in the frame of the decode unit: the same rows and lanes, a multiplication in every step.

A lane holds a 32-bit state. A step reads the symbol of the slot (12 low bits), then its frequency and cumulative frequency,
multiplies, adds, and takes a 16-bit word where the state fell below 2^16 (`codecs.rans`). The next step needs the new state, so
a lane gives a symbol every `step_cycles` cycles; a Huffman lane every cycle. All lanes work in step, words in demand order; the
bus brings `bytes_per_cycle`. What is counted is modelled, what is decoded is checked against `codecs.rans`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit, uint32, uint64

from lazyweights.codecs import N_LANES, TILE_ROWS, rans
from lazyweights.errors import CodecError


@dataclass(frozen=True)
class RansRun:
    """A tensor through one rANS engine (modelled).

    Attributes
    ----------
    cycles : int
    wait_cycles : int
        Cycles in which the lanes waited for words.
    stream_bytes : int
        States and words.
    symbols : ndarray of uint8, shape of the input
        Decoded.
    """

    cycles: int
    wait_cycles: int
    stream_bytes: int
    symbols: np.ndarray


def simulate_rans(
    symbols: np.ndarray,
    *,
    step_cycles: int = 3,
    bytes_per_cycle: float = 128.0,
    tile_symbols: int = 128,
    handover_cycles: int = 2,
) -> RansRun:
    """Encode a tensor with one table of its own counts, then decode it in one engine of 32 lanes.

    Parameters
    ----------
    symbols : ndarray of uint8, shape (n_rows, n_columns)
    step_cycles : int
        Cycles from a symbol of a lane to its next: `area.RANS_STEP_NS` at 1 GHz, rounded up.
    bytes_per_cycle : float
        Bandwidth.
    tile_symbols : int
        Columns of a tile in symbols.
    handover_cycles : int
        Cycles between two tiles.
    """
    freqs = rans.normalized_freqs(np.bincount(symbols.ravel(), minlength=256))[None]
    table = rans.rans_tables(freqs)
    entries = rans.freq_entries(freqs)
    cycles = waits = n_bytes = 0
    decoded = np.empty_like(symbols)
    for top in range(0, len(symbols), TILE_ROWS):
        for left in range(0, symbols.shape[1], tile_symbols):
            place = np.s_[top : top + TILE_ROWS, left : left + tile_symbols]
            tile = np.ascontiguousarray(symbols[place])
            n_rows, width = tile.shape
            states = np.full(N_LANES, rans.STATE_LOW, np.uint32)
            scratch = np.zeros(tile.size + 64, np.uint16)
            padded = np.zeros((TILE_ROWS, width), np.uint8)
            padded[:n_rows] = tile
            n = rans.encode_rans(
                padded.ravel(), (width, width, 1, 2 * width), np.zeros((2, 1, N_LANES), np.uint8), entries, width, n_rows, states,
                scratch,
            )  # fmt: skip
            if n < 0:
                raise CodecError("a symbol has no frequency in its table")
            words = scratch[scratch.size - n :]
            out = np.zeros((n_rows, width), np.uint8)
            spent, waited = _decode_tile(words, states, table, step_cycles, round(1024 * bytes_per_cycle), out)
            decoded[place] = out
            cycles += spent + handover_cycles
            waits += waited
            n_bytes += 4 * ((n_rows + 1) // 2) + 2 * n
    return RansRun(cycles, waits, n_bytes, decoded)


@njit(cache=True, nogil=True)
def _decode_tile(
    words: np.ndarray, states: np.ndarray, table: np.ndarray, step_cycles: int, tokens: int, out: np.ndarray
) -> tuple[int, int]:
    """Decode a tile; return its cycles and those spent waiting. `tokens`: bandwidth in 1/1024 byte a cycle."""
    n_rows, n_columns = out.shape
    lanes = states.copy()
    cycles = 0
    waits = 0
    needed = np.int64(128 * 1024)  # the states come first
    taken = 0
    for phase in range(2):
        n_lanes = (n_rows + 1 - phase) // 2
        for column in range(n_columns):
            if n_lanes == 0:
                break
            while cycles * tokens < needed:
                cycles += 1
                waits += 1
            for lane in range(n_lanes):
                x = lanes[lane]
                entry = table[x & uint32(4095)]
                out[2 * lane + phase, column] = entry & uint32(255)
                freq = uint64((entry >> uint32(8)) & uint32(4095)) + uint64(1)
                x = uint32(freq * uint64(x >> uint32(12)) + uint64(entry >> uint32(20)))
                if x < uint32(65536):
                    x = uint32(uint32(x << uint32(16)) | uint32(words[taken]))
                    taken += 1
                    needed += 2 * 1024
                lanes[lane] = x
            cycles += step_cycles
    return cycles, waits
