"""Forced codes are taken out and put back as `docs/format.md` says, whole row groups or not at all."""

from __future__ import annotations

import numpy as np
import pytest

from lazyweights.container.forced_codes import position_index, put_forced, take_forced
from lazyweights.container.stream_layout import FORCED_ABS_127, FORCED_MIN, FORCED_MIN_MAX

VARIANTS = [(FORCED_MIN, 32), (FORCED_MIN_MAX, 32), (FORCED_MIN_MAX, 16), (FORCED_ABS_127, 32)]
LOW_BITS = {FORCED_MIN: 1, FORCED_ABS_127: 4}
"""Of split codes, which leave the low bits of the position in the last code."""


def split_codes(block: np.ndarray) -> list[int]:
    """The 32 codes of a block: its bytes, or the low and then the high halves of 16 bytes."""
    codes = block.tolist()
    return codes if len(codes) == 32 else [c & 15 for c in codes] + [c >> 4 for c in codes]


def join_codes(codes: list[int], width: int) -> list[int]:
    return codes if width == 32 else [low | high << 4 for low, high in zip(codes[:16], codes[16:], strict=True)]


def take_reference(codes: list[int], forced: int, width: int) -> int | None:
    """Take the forced codes out of a list of 32; return the position, or None where one is missing."""
    if forced == FORCED_ABS_127:
        places = [i for i, c in enumerate(codes) if c in (127, 129)]
        if not places:
            return None
        negative = codes[places[0]] == 129
        codes[places[0]], codes[31] = codes[31], 0
        return 2 * places[0] + negative
    if 0 not in codes:
        return None
    p = codes.index(0)
    if forced == FORCED_MIN:
        codes[p], codes[31] = codes[31], 0
        return p
    end, largest = (30, 31) if width == 32 else (15, 15)
    codes[p], codes[end] = codes[end], 0
    if largest not in codes:
        return None
    q = codes.index(largest)
    codes[q], codes[31] = codes[31], largest
    return 32 * p + q


def make_rows(rng: np.random.Generator, forced: int, width: int, n_rows: int, n_blocks: int) -> np.ndarray:
    """Rows in which every block has its forced codes, at any places, once or more."""
    blocks = []
    for _ in range(n_rows * n_blocks):
        n_codes = {FORCED_ABS_127: 256, FORCED_MIN: 32}.get(forced, 32 if width == 32 else 16)
        codes = rng.integers(0, n_codes, 32)
        if forced == FORCED_ABS_127:
            codes[rng.integers(0, 32)] = rng.choice([127, 129])
        else:
            places = rng.permutation(32)[:2]
            codes[places[0]] = 0
            if forced == FORCED_MIN_MAX:
                codes[places[1]] = n_codes - 1
        blocks.append(join_codes(codes.tolist(), width))
    return np.array(blocks, np.uint8).reshape(n_rows, n_blocks * width)


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize(("forced", "width"), VARIANTS)
@pytest.mark.parametrize(("n_rows", "n_blocks"), [(1, 1), (2, 3), (5, 2), (33, 1), (64, 9)])
def test_take_equals_reference_and_put_undoes_it(forced, width, n_rows, n_blocks, is_split):
    rng = np.random.default_rng(100 * n_rows + forced)
    low_bits = LOW_BITS.get(forced, 0) if is_split else 0
    meta = np.zeros(13, np.int64)
    meta[0], meta[2], meta[4], meta[12] = n_blocks, width, forced, low_bits
    for _ in range(8):
        rows = make_rows(rng, forced, width, n_rows, n_blocks)
        taken, positions = rows.copy(), np.zeros(n_rows * n_blocks, np.uint32)
        assert take_forced(taken, meta, positions)
        for row in range(n_rows):
            for block in range(n_blocks):
                codes = split_codes(rows[row, block * width : (block + 1) * width])
                position = take_reference(codes, forced, width)
                if low_bits:
                    codes[31] = position & (1 << low_bits) - 1
                    position >>= low_bits
                assert positions[position_index(row, block, n_rows, n_blocks)] == position
                assert taken[row, block * width : (block + 1) * width].tolist() == join_codes(codes, width)
        flat = taken.reshape(-1)
        put_forced(flat, 0, taken.shape[1], n_rows, forced, n_blocks, width, width, low_bits, positions)
        np.testing.assert_array_equal(taken, rows)


@pytest.mark.parametrize(("forced", "width"), VARIANTS)
@pytest.mark.parametrize("row", [0, 40, 63])
def test_a_block_without_the_code_keeps_the_whole_group(forced, width, row):
    rng = np.random.default_rng(row)
    meta = np.zeros(13, np.int64)
    meta[0], meta[2], meta[4] = 3, width, forced
    rows = make_rows(rng, forced, width, 64, 3)
    block = rows[row, width : 2 * width]
    block[:] = join_codes([1] * 32, width)
    if forced == FORCED_MIN_MAX:
        # One of the two is there.
        block[5] = join_codes([0] * 32, width)[5]
    taken = rows.copy()
    assert not take_forced(taken, meta, np.zeros(64 * 3, np.uint32))
    np.testing.assert_array_equal(taken, rows)
