"""Lane streams in plain Python: the reference that every kernel must equal bit for bit.

A tile has up to 64 rows and 32 lanes; lane ``r // 2`` decodes row ``r``, its even row first. A row is
a list of *cells*; all symbols of one cell use one code table. All lanes work in step: for each of
the two row phases, for each cell, for each symbol position of the cell, lane 0 to 31.

Bits of a lane are read from the most significant bit of 32-bit words. **Refill rule**: before each
symbol with an even index in its cell, each lane that works in this phase and holds fewer than 32
bits takes its next word. After a refill a lane holds at least 32 bits, enough for two codewords.

- ``demand`` layout: the words lie in the order in which the rule takes them.
- ``lockstep`` layout: word k of lane l is at ``32 * k + l``; every lane is padded with zero words to
  the longest one.

At the end each lane still holds bits that no codeword used (*left-over bits*, at most 63). In the
demand layout they are not wasted: `tail` bits, given by the caller, fill them from lane 0 on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lazyweights.codecs import N_LANES
from lazyweights.errors import CodecError

Row = Sequence[Sequence[int]]
"""One row: cells, each a sequence of symbols."""


def _visits(rows: Sequence[Row]) -> Iterator[tuple[list[int], int, int]]:
    """Yield (rows that work, cell, position) in decoding order."""
    for phase in range(2):
        working = list(range(phase, len(rows), 2))
        if not working:
            continue
        for cell in range(len(rows[0])):
            for position in range(len(rows[0][cell])):
                yield working, cell, position


def encode_lanes_reference(
    rows: Sequence[Row],
    tables: Sequence[Sequence[int]],
    entries: Sequence[Sequence[int]],
    layout: str,
    tail: Sequence[int] = (),
) -> tuple[list[int], int]:
    """Encode a tile.

    Parameters
    ----------
    rows : symbols of each row by cell; all rows have the same cell lengths.
    tables : table number of each row's cells.
    entries : per table the encode entries of `canonical.codewords`.
    layout : ``"demand"`` or ``"lockstep"``.
    tail : bits (0 or 1) to carry in left-over bits (demand layout only).

    Returns
    -------
    (words, n_tail) : the 32-bit words and how many of the tail bits they carry.
    """
    bits: list[list[int]] = [[] for _ in range(N_LANES)]
    held = [0] * N_LANES
    order: list[int] = []  # the lane that takes each demanded word
    for working, cell, position in _visits(rows):
        if position % 2 == 0:
            for row in working:
                if held[row // 2] < 32:
                    held[row // 2] += 32
                    order.append(row // 2)
        for row in working:
            entry = int(entries[tables[row][cell]][rows[row][cell][position]])
            if entry == 0xFFFFFFFF:
                raise CodecError("a symbol has no codeword in its table", found=rows[row][cell][position])
            length = entry >> 16
            bits[row // 2].extend(entry >> (length - 1 - k) & 1 for k in range(length))
            held[row // 2] -= length
    if layout == "lockstep":
        n_words = max((len(b) + 31) // 32 for b in bits)
        words = [[int("".join(map(str, b[32 * k : 32 * k + 32])).ljust(32, "0") or "0", 2) for k in range(n_words)] for b in bits]
        return [words[lane][k] for k in range(n_words) for lane in range(N_LANES)], 0
    n_tail = min(len(tail), sum(held))
    queue = list(tail[:n_tail]) + [0] * (sum(held) - n_tail)
    for lane in range(N_LANES):
        bits[lane].extend(queue[: held[lane]])
        del queue[: held[lane]]
    taken = [0] * N_LANES
    out = []
    for lane in order:
        chunk = bits[lane][32 * taken[lane] : 32 * taken[lane] + 32]
        taken[lane] += 1
        out.append(int("".join(map(str, chunk)), 2))
    return out, n_tail


def decode_lanes_reference(
    words: Sequence[int],
    cell_lengths: Sequence[int],
    tables: Sequence[Sequence[int]],
    decode: Sequence[int],
    layout: str,
) -> tuple[list[list[list[int]]], list[int], int]:
    """Decode a tile that `encode_lanes_reference` wrote.

    Parameters
    ----------
    words : the 32-bit words.
    cell_lengths : number of symbols in each cell of a row.
    tables : table number of each row's cells (this gives the number of rows too).
    decode : flat decode tables of `canonical.decode_tables`.
    layout : ``"demand"`` or ``"lockstep"``.

    Returns
    -------
    (rows, left_over, n_words) : symbols, the left-over bits of all lanes in order, words used.

    Raises
    ------
    CodecError
        If the words end too early.
    """
    rows = [[[0] * n for n in cell_lengths] for _ in tables]
    held: list[list[int]] = [[] for _ in range(N_LANES)]
    taken = [0] * N_LANES
    pointer = 0
    for working, cell, position in _visits(rows):
        if position % 2 == 0:
            for row in working:
                lane = row // 2
                if len(held[lane]) < 32:
                    if layout == "lockstep":
                        at = 32 * taken[lane] + lane
                        word = words[at] if at < len(words) else 0
                    else:
                        if pointer >= len(words):
                            raise CodecError("the code stream ends too early", expected=pointer + 1, found=len(words))
                        word = words[pointer]
                        pointer += 1
                    taken[lane] += 1
                    held[lane].extend(word >> (31 - k) & 1 for k in range(32))
        for row in working:
            lane = row // 2
            window = int("".join(map(str, held[lane][:11])), 2)
            entry = int(decode[2048 * tables[row][cell] + window])
            rows[row][cell][position] = entry >> 8
            del held[lane][: entry & 255]
    left_over = [bit for lane in held for bit in lane]
    return rows, left_over, len(words) if layout == "lockstep" else pointer
