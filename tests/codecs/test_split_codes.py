"""Split codes: symbols and low bits are what the module says, and joining them gives the codes back."""

from __future__ import annotations

import numpy as np
import pytest

from lazyweights.codecs.split_codes import join_split, pack_low, split_high


def low_number(cell: np.ndarray, low_bits: int) -> int:
    """The low bits of 32 codes as one number, those of code i + 16 above those of code i."""
    low = [int(code) & (1 << low_bits) - 1 for code in cell]
    return sum((low[i] | low[i + 16] << low_bits) << 2 * low_bits * i for i in range(16))


@pytest.mark.parametrize("low_bits", [1, 4])
@pytest.mark.parametrize(("n_rows", "n_cells"), [(1, 1), (2, 3), (7, 2), (64, 5)])
def test_split_and_join(low_bits: int, n_rows: int, n_cells: int) -> None:
    codes = np.random.default_rng(n_rows).integers(0, 16 << low_bits, (n_rows, n_cells, 32)).astype(np.uint8)
    rows = codes.reshape(n_rows, -1)
    symbols = np.zeros((n_rows, n_cells, 16), np.uint8)
    split_high(rows, low_bits, symbols.reshape(n_rows, -1))
    np.testing.assert_array_equal(symbols, codes[..., :16] >> low_bits | codes[..., 16:] >> low_bits << 4)

    first, cell_bytes = 3, 4 * low_bits
    packed = np.zeros(first + codes.size * low_bits // 8 + 4, np.uint8)
    pack_low(rows, low_bits, packed, first)
    places = [(row, cell) for phase in (0, 1) for cell in range(n_cells) for row in range(phase, n_rows, 2)]
    want = b"".join(low_number(codes[place], low_bits).to_bytes(cell_bytes, "little") for place in places)
    assert packed.tobytes() == bytes(first) + want + bytes(4)

    joined = np.full((n_rows, n_cells, 32), 0xA5, np.uint8)
    joined[..., :16] = symbols
    flat = joined.reshape(-1)
    for phase in (0, 1):
        n_lanes = (n_rows + 1 - phase) // 2
        first_low = first + phase * ((n_rows + 1) // 2) * n_cells * cell_bytes
        join_split(flat, 32 * phase * n_cells, 64 * n_cells, n_lanes, n_cells, 32, low_bits, packed, first_low)
    np.testing.assert_array_equal(joined, codes)
