"""rANS: the kernels equal the reference, tail bits come back, sizes are near the entropy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyweights.codecs import rans, vector_kernels, vector_rans_encode
from lazyweights.errors import CodecError

BACKENDS = ["scalar", *(["vector"] if vector_kernels.AVAILABLE else [])]


def random_freqs(rng: np.random.Generator, n_tables: int) -> np.ndarray:
    rows = [rans.normalized_freqs((1e6 * rng.random(256) ** (1 + 3 * t)).astype(np.int64)) for t in range(n_tables - 1)]
    single = np.zeros(256, np.uint16)
    single[9] = rans.PROB_SCALE
    return np.stack([*rows, single])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("n_rows", "n_cells", "cell_length"), [(64, 4, 31), (63, 3, 16), (5, 2, 7), (1, 3, 2), (33, 2, 32)])
def test_kernels_equal_reference(backend, n_rows, n_cells, cell_length):
    rng = np.random.default_rng(n_rows)
    freqs = random_freqs(rng, 4)
    tables = rng.integers(0, 4, (2, n_cells, 32)).astype(np.uint8)
    symbols = np.zeros((64, n_cells, cell_length), np.uint8)
    for row in range(n_rows):
        for cell in range(n_cells):
            p = freqs[tables[row % 2, cell, row // 2]] / rans.PROB_SCALE
            symbols[row, cell] = rng.choice(256, cell_length, p=p)
    rows = [symbols[r].tolist() for r in range(n_rows)]
    row_tables = [tables[r % 2, :, r // 2].tolist() for r in range(n_rows)]
    tail = rng.integers(0, 2, 200).tolist()
    states, words, n_tail = rans.encode_rans_reference(rows, row_tables, freqs.tolist(), tail)
    n_lanes = (n_rows + 1) // 2
    assert n_tail == min(200, 16 * n_lanes)

    bits = np.zeros(16 * 32, np.uint8)
    bits[:n_tail] = tail[:n_tail]
    start = np.full(32, rans.STATE_LOW, np.uint32) | np.packbits(bits).view(">u2").astype(np.uint32)
    kernel_states = start.copy()
    scratch = np.zeros(2 * symbols.size + 64, np.uint16)
    strides = (n_cells * cell_length, cell_length, 1, 2 * n_cells * cell_length)
    n_words = rans.encode_rans(
        symbols.ravel(), strides, tables, rans.freq_entries(freqs), cell_length, n_rows, kernel_states, scratch
    )
    assert scratch[scratch.size - n_words :].tolist() == words
    assert kernel_states[:n_lanes].tolist() == states

    back, final, used = rans.decode_rans_reference(states, words, [cell_length] * n_cells, row_tables, freqs.tolist())
    assert back == rows
    assert used == len(words)
    assert final == start[:n_lanes].tolist()

    decode = rans.decode_rans_scalar if backend == "scalar" else rans.decode_rans_phase
    flat = rans.rans_tables(freqs)
    stream = np.concatenate([np.array(words, np.uint16), np.zeros(64, np.uint16)])
    pos = np.zeros(1, np.int64)
    lanes = kernel_states.copy()
    for phase in range(2):
        working = (n_rows + 1 - phase) // 2
        if working == 0:
            continue
        out = np.zeros((n_cells, (cell_length + 3) // 4, 32), np.uint32)
        offsets = tables[phase].astype(np.int32) * 4096
        offsets[:, working:] = 0
        decode(stream, stream.size, flat, offsets, cell_length, working, out, lanes, pos)
        for position in range(cell_length):
            got = (out[:, position // 4] >> np.uint32(8 * (position % 4)) & 255).T[:working]
            np.testing.assert_array_equal(got, symbols[phase::2, :, position][:working])
    assert pos[0] == len(words)
    np.testing.assert_array_equal(lanes[:n_lanes], start[:n_lanes])


@pytest.mark.skipif(not vector_kernels.AVAILABLE, reason="this CPU has no AVX-512")
@pytest.mark.parametrize(
    ("n_cells", "strides", "cell_length"),
    [
        (5, (160, 32, 1, 320), 32),
        (5, (150, 30, 1, 300), 30),
        (2, (8, 4, 1, 16), 4),
        (23, (23, 1, 1, 46), 1),
        (4, (4, 1, 1, 8), 1),
        (7, (224, 32, 1, 1), 1),
    ],
)
def test_vector_encoder_equals_scalar(n_cells, strides, cell_length):
    rng = np.random.default_rng(n_cells)
    freqs = np.zeros((5, 256), np.uint16)
    freqs[:3] = [rans.normalized_freqs(1 + (1e6 * rng.random(256) ** k).astype(np.int64)) for k in (1, 4, 16)]
    freqs[3, [7, 200]] = 1, 4095
    freqs[4, 9] = 4096
    symbols = rng.integers(0, 256, 64 * n_cells * cell_length).astype(np.uint8)
    symbols[rng.random(symbols.size) < 0.3] = 9
    tables = rng.integers(0, 3, (2, n_cells, 32)).astype(np.uint8)
    # Some cells have tables that cannot code all symbols.
    cells = np.lib.stride_tricks.as_strided(symbols, (2, n_cells, cell_length, 32), strides)
    cells[0, n_cells - 1, :, ::2], tables[0, n_cells - 1, ::2] = 9, 4
    cells[1, 0, :, ::3], tables[1, 0, ::3] = 200, 3
    cells[1, 0, :, 0] = 7
    entries = rans.freq_entries(freqs)
    assert vector_rans_encode.can_encode(strides, cell_length, n_cells)
    states = rng.integers(rans.STATE_LOW, 1 << 32, 32).astype(np.uint32)
    states[:3] = 0xFFFFFFFF, rans.STATE_LOW, 0xFFFFF000
    scalar, vector = states.copy(), states.copy()
    scratch, vector_scratch = np.zeros((2, symbols.size + 40), np.uint16)
    at = vector_at = scratch.size
    for phase in (1, 0):
        base = phase * strides[0]
        at = rans._encode_phase_scalar(symbols, base, strides, tables, phase, entries, cell_length, 32, scalar, scratch, at)
        vector_at = vector_rans_encode.encode_rans_full(
            symbols, base, strides, tables, phase, entries, cell_length, vector, vector_scratch, vector_at
        )
        assert vector_at == at > 0
    np.testing.assert_array_equal(vector, scalar)
    np.testing.assert_array_equal(vector_scratch, scratch)
    tables[0, n_cells - 1, 31], cells[0, n_cells - 1, 0, 31] = 3, 8  # a symbol without frequency
    found = vector_rans_encode.encode_rans_full(
        symbols, 0, strides, tables, 0, entries, cell_length, vector, vector_scratch, scratch.size
    )
    assert found == -1


@pytest.mark.skipif(not vector_kernels.AVAILABLE, reason="this CPU has no AVX-512")
@pytest.mark.parametrize("freq", [1, 2, 3, 5, 7, 11, 1023, 2047, 2731, 4093, 4095, 4096])
def test_vector_encoder_divides_exactly(freq):
    """States at both sides of multiples of a frequency, where a quotient in single precision may be wrong."""
    rng = np.random.default_rng(freq)
    freqs = np.zeros((1, 256), np.uint16)
    freqs[0, 0], freqs[0, 1] = rans.PROB_SCALE - freq, freq
    quotients = np.concatenate([np.arange((1 << 20) - 256, 1 << 20), rng.integers((1 << 16) // freq + 1, 1 << 20, 768)])
    for rest in (0, freq - 1):
        wanted = quotients * freq + rest
        for states in wanted[wanted >= rans.STATE_LOW].reshape(-1, 32).astype(np.uint32):
            found = states.copy()
            at = vector_rans_encode.encode_rans_full(
                np.ones(64, np.uint8),
                0,
                (32, 32, 1, 1),
                np.zeros((2, 1, 32), np.uint8),
                0,
                rans.freq_entries(freqs),
                1,
                found,
                np.zeros(64, np.uint16),
                64,
            )
            assert at == 64
            expected = (states.astype(np.int64) // freq << rans.PROB_BITS) + rest + rans.PROB_SCALE - freq
            np.testing.assert_array_equal(found, expected)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 10**9), min_size=256, max_size=256).filter(any))
def test_frequencies_sum_to_the_scale_and_cover_every_symbol(counts):
    freqs = rans.normalized_freqs(np.array(counts))
    assert int(freqs.sum()) == rans.PROB_SCALE
    assert ((freqs > 0) == (np.array(counts) > 0)).all()
    rans.check_freqs(freqs)


def test_size_is_near_the_entropy():
    rng = np.random.default_rng(2)
    symbols = np.clip(rng.standard_normal((64, 1, 4096)) * 20 + 128, 0, 255).astype(np.uint8)
    counts = np.bincount(symbols.ravel(), minlength=256)
    p = counts[counts > 0] / counts.sum()
    entropy_bits = -(p * np.log2(p)).sum() * symbols.size
    freqs = rans.normalized_freqs(counts)[None]
    states = np.full(32, rans.STATE_LOW, np.uint32)
    scratch = np.zeros(symbols.size, np.uint16)
    tables = np.zeros((2, 1, 32), np.uint8)
    n = rans.encode_rans(symbols.ravel(), (4096, 4096, 1, 8192), tables, rans.freq_entries(freqs), 4096, 64, states, scratch)
    assert 16 * n + 32 * 16 <= 1.002 * entropy_bits


def test_symbol_without_frequency_is_refused():
    freqs = np.zeros((1, 256), np.uint16)
    freqs[0, 0] = rans.PROB_SCALE
    with pytest.raises(CodecError, match="no frequency"):
        rans.encode_rans_reference([[[1]]], [[0]], freqs.tolist())
    status = rans.encode_rans(
        np.ones(64, np.uint8),
        (1, 1, 1, 2),
        np.zeros((2, 1, 32), np.uint8),
        rans.freq_entries(freqs),
        1,
        64,
        np.full(32, rans.STATE_LOW, np.uint32),
        np.zeros(100, np.uint16),
    )
    assert status == -1
    with pytest.raises(CodecError, match="4096"):
        rans.check_freqs(np.zeros(256, np.uint16))
    with pytest.raises(CodecError, match="no symbols"):
        rans.normalized_freqs(np.zeros(256, np.int64))
