"""Parameters of a decode unit, the streams it reads, and what a run of the cycle model counts.

The unit. A *fetcher* reads steps of 128 bytes (one 32-bit word for each of 32 lanes) from DRAM; a token bucket limits its
bytes per cycle, and a step arrives `latency_cycles` after it was asked for. Each of `n_engines` engines has room for
`queue_steps` steps, asked for or arrived (credits), and decodes the tiles t with ``t % n_engines`` its own number. An engine
has 32 lanes. A lane has a FIFO of `fifo_words` words and a shift register of 64 bits.

One cycle, in this order; every stage sees what the stages before it in the list left, and what the later ones left a cycle ago:

1. *Decode.* Each lane that has symbols left looks at the next 11 bits. If it holds the whole codeword (or has taken its last
   word), it shifts it out and emits what the table entry says: one symbol, or two. If the output buffer of the engine has no
   room for what all lanes could emit, no lane decodes.
2. *Refill.* Each lane that has symbols left, holds 32 bits or fewer and has a word in its FIFO takes it.
3. *Distribute.* If a step is in the queue and every lane that has symbols left has room in its FIFO, each of these lanes gets
   its word; lanes that are done drop theirs. One slow lane with a full FIFO so holds up all others.
4. *Output.* L2 takes up to `output_symbols` symbols from the buffer of each engine.
5. *Hand-over.* If no lane has symbols left and all steps of the tile are distributed, the next tile of this engine starts
   after `handover_cycles` cycles with empty lanes. Its steps may be in the queue already.
6. *Fetch.* Steps that are due arrive. The bucket fills by the bytes of a cycle, up to its size. The steps of the table come
   first; engines wait until all of it has arrived. Then the engines take turns, one step each at most in a cycle, as long as
   the bucket holds 128 bytes, the engine has a credit, and words are left. Behind the words of a tile the fetcher reads the
   uncoded planes that belong to it; they take bandwidth and go past the engines.

Layouts. In ``demand`` layout (`Layout.DEMAND`) the words lie in the order in which lanes take them: lane 0 to 31, each lane
that holds fewer than 11 bits, look-up by look-up. All lanes then work in step: a pool of `fifo_words` x 32 words (at least 64)
stands in for the FIFOs; in a cycle either every lane that needs a word has it and all decode, or none does.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from lazyweights.codecs import MAX_CODE_LENGTH, N_LANES, TABLE_SIZE
from lazyweights.errors import CodecError

STEP_BYTES = 4 * N_LANES
"""Bytes of one read: a word for each lane."""

TABLE_BYTES = 2 * TABLE_SIZE
"""Bytes of a decode table on the bus."""

TOKENS_PER_BYTE = 1024
"""The token bucket counts in these parts of a byte, so that it is exact."""


class Layout(enum.IntEnum):
    """Order of the words of a tile."""

    LOCKSTEP = 0
    DEMAND = 1


class Loss(enum.IntEnum):
    """What a lane did in a cycle; each lane of each engine does exactly one of these in every cycle."""

    DECODE = 0
    BANDWIDTH = 1
    LATENCY = 2
    IMBALANCE = 3
    TABLE = 4
    HANDOVER = 5
    OUTPUT = 6
    IDLE = 7
    DRAIN = 8


LOSS_TEXT = {
    Loss.DECODE: "decodes",
    Loss.BANDWIDTH: "waits for a step that the bus had no time for",
    Loss.LATENCY: "waits for a step that is on its way",
    Loss.IMBALANCE: "starves behind a full FIFO of another lane, or is done before it",
    Loss.TABLE: "waits for the table of the tensor",
    Loss.HANDOVER: "between two tiles, or fills its pipeline",
    Loss.OUTPUT: "waits for L2",
    Loss.IDLE: "has no row, or only one, in this tile",
    Loss.DRAIN: "has no tile left while other engines work",
}


@dataclass(frozen=True)
class UnitConfig:
    """A decode unit and the memory in front of it.

    Attributes
    ----------
    n_engines : int
        Engines of 32 lanes.
    bytes_per_cycle : float
        DRAM bandwidth in bytes per cycle of the unit.
    latency_cycles : int
        Cycles from the request of a step to its arrival, at least 1.
    queue_steps : int
        Steps that an engine may have asked for and not distributed yet.
    fifo_words : int
        Words of the FIFO of a lane.
    handover_cycles : int
        Cycles between the last symbol of a tile and the first cycle of the next.
    output_symbols : int
        Symbols that L2 takes from an engine in a cycle.
    output_buffer : int
        Symbols that an engine may hold for L2; at least what its lanes emit in a cycle.
    table_bytes : int
        Bytes that are read before the first tile of a tensor.
    """

    n_engines: int = 4
    bytes_per_cycle: float = 102.0
    latency_cycles: int = 100
    queue_steps: int = 32
    fifo_words: int = 2
    handover_cycles: int = 2
    output_symbols: int = 64
    output_buffer: int = 128
    table_bytes: int = TABLE_BYTES

    def __post_init__(self) -> None:
        limits = {
            "n_engines": (1, 1024), "latency_cycles": (1, 1 << 16), "queue_steps": (1, 1 << 16), "fifo_words": (1, 1024),
            "handover_cycles": (0, 1 << 16), "output_symbols": (1, 1 << 16), "output_buffer": (2 * N_LANES, 1 << 20),
            "table_bytes": (0, 1 << 20),
        }  # fmt: skip
        for name, (low, high) in limits.items():
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} has to be {low} to {high}, not {getattr(self, name)}")
        if not self.tokens_per_cycle > 0:
            raise ValueError(f"bytes_per_cycle has to be positive, not {self.bytes_per_cycle}")

    @property
    def tokens_per_cycle(self) -> int:
        """Bandwidth in `TOKENS_PER_BYTE` parts of a byte per cycle."""
        return round(self.bytes_per_cycle * TOKENS_PER_BYTE)

    @property
    def bucket_tokens(self) -> int:
        """Size of the token bucket: two steps, or what one cycle brings and one step."""
        return max(2 * STEP_BYTES * TOKENS_PER_BYTE, self.tokens_per_cycle + STEP_BYTES * TOKENS_PER_BYTE)


@dataclass(frozen=True)
class TensorStream:
    """The coded tiles of a tensor.

    Attributes
    ----------
    words : ndarray of uint32
        The words of all tiles. Lockstep: word k of lane l of tile t is ``words[32 * (starts[t] + k) + l]``. Demand: the words
        of a tile in the order in which the lanes take them, padded with zeros to a whole step.
    starts : ndarray of int64, shape (n_tiles + 1,)
        First step of each tile, and the end.
    rows, columns : ndarray of int32, shape (n_tiles,)
        Rows (1 to 64) and symbols of a row of each tile.
    side_steps : ndarray of int32, shape (n_tiles,)
        Reads of 128 bytes for the uncoded planes behind the words of each tile.
    table : ndarray of uint32, shape (2048,)
        Entry of each 11-bit window, see `table_entries`.
    weights_per_symbol : int
        Codes in a symbol.
    layout : Layout
        Order of the words.
    """

    words: np.ndarray
    starts: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    side_steps: np.ndarray
    table: np.ndarray
    weights_per_symbol: int = 1
    layout: Layout = Layout.LOCKSTEP

    def __post_init__(self) -> None:
        n = len(self.rows)
        if not len(self.starts) == n + 1 or not len(self.columns) == len(self.side_steps) == n:
            raise CodecError("the tiles of a stream have different numbers", expected=n, found=len(self.starts) - 1)
        if n and (self.rows.min() < 1 or self.rows.max() > 2 * N_LANES or self.columns.min() < 1):
            raise CodecError("a tile has 1 to 64 rows of at least one symbol")
        if (np.diff(self.starts) < 0).any() or self.words.size < N_LANES * int(self.starts[-1]) or int(self.starts[0]) < 0:
            raise CodecError("the words of a stream end before its tiles", expected=int(self.starts[-1]))
        if self.table.shape != (TABLE_SIZE,):
            raise CodecError("a decode table has one entry for each window", expected=TABLE_SIZE, found=self.table.size)

    @property
    def n_symbols(self) -> int:
        """Symbols of all tiles."""
        return int((self.rows.astype(np.int64) * self.columns).sum())

    @property
    def n_weights(self) -> int:
        """Codes of all tiles."""
        return self.n_symbols * self.weights_per_symbol

    @property
    def stream_bytes(self) -> int:
        """Bytes of the words, padding included."""
        return STEP_BYTES * int(self.starts[-1] - self.starts[0])

    @property
    def side_bytes(self) -> int:
        """Bytes that are read for the uncoded planes."""
        return STEP_BYTES * int(self.side_steps.sum())


@dataclass(frozen=True)
class UnitRun:
    """What a run of the cycle model found; all of it modelled, but for the symbols, which are decoded.

    Attributes
    ----------
    cycles : int
        From the first request to the last symbol taken by the output buffer and the last read.
    lane_cycles : ndarray of int64, shape (9,)
        Lane cycles by `Loss`; they sum to 32 x engines x cycles.
    bus_bytes : int
        Bytes read: table, words, uncoded planes.
    symbols : ndarray of uint8
        The decoded symbols, tile after tile, row after row.
    """

    cycles: int
    lane_cycles: np.ndarray
    bus_bytes: int
    symbols: np.ndarray = field(repr=False)

    def share(self, loss: Loss) -> float:
        """Share of the lane cycles, 0 to 1."""
        return float(self.lane_cycles[loss]) / max(1, int(self.lane_cycles.sum()))


def table_entries(
    decode_table: np.ndarray, symbol_bits: int = 8, pairs: bool = False, window_bits: int = MAX_CODE_LENGTH
) -> np.ndarray:
    """Return the entries of the unit's table from a decode table of `canonical.decode_tables`.

    An entry is ``first | second << 8 | bits << 16 | count << 20``: one or two symbols and the bits that they take.

    Parameters
    ----------
    decode_table : ndarray of uint16, at least 2048 entries
        ``symbol << 8 | length``.
    symbol_bits : int
        Bits of a symbol of this tensor.
    pairs : bool
        Two symbols per look-up where the window holds two whole codewords and both fit into an entry of 16 bits with the
        length (4 bits) and the number of symbols (1 bit): where a symbol has at most 5 bits.
    window_bits : int
        Bits that a look-up sees, at least the longest codeword. The table of a unit with fewer than 11 is the first entry of
        each run of equal ones here.

    Returns
    -------
    ndarray of uint32, shape (2048,)
    """
    single = decode_table[:TABLE_SIZE].astype(np.uint32)
    symbol, length = single >> 8, single & 15
    entries = symbol | length << 16 | np.uint32(1 << 20)
    if not pairs or 2 * symbol_bits + 5 > 16:
        return entries
    window = np.arange(TABLE_SIZE, dtype=np.uint32)
    behind = (window << length) & np.uint32(TABLE_SIZE - 1)
    total = length + length[behind]
    both = symbol | symbol[behind] << 8 | total << 16 | np.uint32(2 << 20)
    return np.where(total <= window_bits, both, entries)
