"""The vector kernels of the lane encoder write the same words and leave the same state as the scalar ones."""

from __future__ import annotations

import numpy as np
import pytest

from lazyweights.codecs import lane_encode, vector_encode, vector_kernels
from tests.codecs.test_lanes import entries_of, make_pool

pytestmark = pytest.mark.skipif(not vector_kernels.AVAILABLE, reason="this CPU has no AVX-512 VBMI2")

Streams = list[tuple[np.ndarray, np.ndarray, np.ndarray, int]]


def twins(n_words: int) -> Streams:
    """Words, state, position and flags of two encoders of 64 rows."""
    streams = []
    for _ in range(2):
        state, pos = lane_encode.new_encoder()
        lane_encode.start_lanes(64, state, pos)
        streams.append((np.full(n_words, 0xABABABAB, np.uint32), state, pos, 0))
    return streams


def assert_equal(streams: Streams) -> None:
    for scalar, vector in zip(*(s[:3] for s in streams), strict=True):
        np.testing.assert_array_equal(scalar, vector)


@pytest.mark.parametrize(
    ("cell_length", "cell_stride", "last_table"),
    [
        (4, 4, -1), (8, 8, -1), (15, 16, -1), (16, 16, -1), (30, 32, -1), (31, 32, -1), (32, 32, -1), (1, 4, -1), (2, 4, -1),
        (3, 4, -1), (15, 16, 256), (3, 4, 0),
    ],
)  # fmt: skip
def test_cells(cell_length, cell_stride, last_table):
    rng = np.random.default_rng(cell_length)
    lengths = make_pool(rng, 4, 200)
    entries = lane_encode.encode_entries(entries_of(lengths))
    offsets = rng.integers(0, 4, 40).astype(np.int32) << 8
    n_cells = 7
    width = n_cells * cell_stride
    for alphabet in (200, 256):  # with 256 some symbols have no codeword
        symbols = rng.integers(0, alphabet, 64 * width).astype(np.uint8)
        contexts = rng.integers(0, 40, (2, n_cells, 32)).astype(np.int32)
        streams = twins(20000)
        for phase in range(2):
            scalar, vector = streams
            missing = lane_encode._encode_cells_scalar(
                symbols, phase * width, 2 * width, 1, cell_stride, cell_length, last_table, contexts, phase, 32, offsets,
                entries, *scalar[:3],
            )
            found = vector_encode.encode_cells_phase(
                symbols, phase * width, 2 * width, cell_stride, cell_length, last_table, contexts, phase, offsets, entries,
                *vector[:3],
            )
            assert (missing != 0) == (found != 0)
        assert_equal(streams)
    assert missing


def test_side_planes():
    rng = np.random.default_rng(1)
    lengths = make_pool(rng, 4, 256)[:-1]
    entries = lane_encode.encode_entries(entries_of(lengths))
    offsets = rng.integers(0, 3, 32).astype(np.int32) << 8
    streams = twins(20000)
    for n_columns in (1, 2, 37):
        symbols = rng.integers(0, 256, 64 * n_columns).astype(np.uint8)
        contexts = rng.integers(0, 32, (2, n_columns, 32)).astype(np.uint8)
        for phase in range(2):
            scalar, vector = streams
            missing = lane_encode._encode_cells_scalar(
                symbols, phase * n_columns * 32, 1, 0, 32, 1, -1, contexts, phase, 32, offsets, entries, *scalar[:3]
            )
            found = vector_encode.encode_side_phase(symbols, contexts, phase, offsets, entries, *vector[:3])
            assert not missing
            assert not found
    assert_equal(streams)


def test_constant_tables_take_no_bits():
    """Codewords of no bits: the lanes stand still, however many symbols come."""
    rng = np.random.default_rng(2)
    lengths = make_pool(rng, 2, 256)  # the last table has one symbol, 3
    entries = lane_encode.encode_entries(entries_of(lengths))
    symbols = np.full(64 * 64, 3, np.uint8)
    contexts = np.ones((2, 2, 32), np.int32)
    state, pos = lane_encode.new_encoder()
    lane_encode.start_lanes(64, state, pos)
    words = np.zeros(5000, np.uint32)
    offsets = np.array([0, 256], np.int32)
    assert lane_encode.encode_cells(symbols, (64, 32, 1, 128), contexts, offsets, entries, 32, -1, 64, words, state, pos) == 0
    assert pos[0] == 32
    assert lane_encode.left_over(state) == 32 * 32
