"""The vector kernels of raw bits and contexts against the scalar ones that define them."""

from __future__ import annotations

import numpy as np
import pytest

from lazyweights.codecs import vector_emit
from lazyweights.container import bit_kernels
from lazyweights.container.cell_contexts import cell_contexts

pytestmark = pytest.mark.skipif(not vector_emit.AVAILABLE, reason="this CPU has no AVX-512 VBMI2")


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.uint32])
@pytest.mark.parametrize("n_bits", [1, 5, 7, 8, 10, 16, 24, 25])
def test_unpack_aligned_equals_unpack_bits(n_bits, dtype):
    from lazyweights.codecs.vector_fields import unpack_aligned

    if n_bits > 8 * np.dtype(dtype).itemsize:
        pytest.skip("the numbers are wider than the array's")
    rng = np.random.default_rng(n_bits)
    packed = rng.integers(0, 256, 700, dtype=np.uint8)
    for start, n in ((0, 16), (24, 64), (40, 160)):
        want, got = np.zeros(n, dtype), np.zeros(n, dtype)
        assert bit_kernels.unpack_bits(packed, start, n_bits, want) == start + n * n_bits
        assert unpack_aligned(packed, start, n_bits, got)
        np.testing.assert_array_equal(got, want)


def test_unpack_aligned_declines_what_does_not_fit():
    from lazyweights.codecs.vector_fields import unpack_aligned

    packed = np.zeros(200, np.uint8)
    for start, n_bits, n in ((3, 8, 16), (0, 8, 15), (0, 26, 16), (0, 0, 16), (8 * 140, 8, 16)):
        out = np.full(n, 9, np.uint32)
        assert not unpack_aligned(packed, start, n_bits, out)
        assert out.tolist() == [9] * n
    got = np.zeros(15, np.uint16)
    packed[:] = 0xFF
    assert bit_kernels.unpack_many(packed, 3, 7, got) == 3 + 7 * 15
    assert got.tolist() == [127] * 15


@pytest.mark.parametrize(("n_bits", "base"), [(8, 0), (5, 0), (5, 97), (5, 255)])
def test_join_words_equals_its_definition(n_bits, base):
    from lazyweights.codecs.vector_fields import join_words

    rng = np.random.default_rng(base)
    n, at, byte, out_at = 160, 3, 7, 5
    symbols = rng.integers(0, 256, at + n, dtype=np.uint8)
    low = rng.integers(0, 1 << n_bits, n, dtype=np.uint32)
    raw = np.zeros(byte + n * n_bits // 8 + 64, np.uint8)
    bit_kernels.pack_bits(low, n_bits, raw, 8 * byte)
    out = np.full(out_at + 2 * n + 3, 0xAA, np.uint8)
    join_words(symbols, at, raw, byte, n_bits, base, out, out_at, n)
    code = symbols[at:].astype(np.uint32)
    if n_bits == 8:
        words = code << 7 | low & 127 | low >> 7 << 15
    else:
        code += 8 * base
        words = (code >> 3 & 255) << 7 | (code & 7) << 4 | low & 15 | low >> 4 << 15
    np.testing.assert_array_equal(out[out_at : out_at + 2 * n], words.astype("<u2").view(np.uint8))
    assert out[:out_at].tolist() == [0xAA] * out_at
    assert out[out_at + 2 * n :].tolist() == [0xAA] * 3


@pytest.mark.parametrize("base", [0, 256])
@pytest.mark.parametrize(
    ("by_zero", "with_sub", "per_scale", "steps"), [(0, 0, 1, 0), (0, 0, 2, 8), (0, 1, 8, 0), (1, 0, 1, 0), (1, 1, 8, 0)]
)
def test_cell_offsets_equal_contexts(by_zero, with_sub, per_scale, steps, base):
    from lazyweights.codecs.vector_fields import cell_offsets_of_phase

    rng = np.random.default_rng([by_zero, with_sub, per_scale])
    n_scales, n_streams = 5, 2
    n_cells = n_scales * per_scale
    columns = [n_scales] + [n_cells] * with_sub + [n_scales] * by_zero + [n_cells] * (by_zero * with_sub)
    side_at = np.concatenate([[0], np.cumsum(64 * np.array(columns))])
    side = rng.integers(0, 256, n_streams * side_at[-1], dtype=np.uint8)
    side[: n_streams * 64 * n_scales] = rng.integers(80, 96, n_streams * 64 * n_scales)
    meta = np.zeros(12, np.int64)
    meta[[0, 1, 5, 6, 7, 11]] = n_scales, n_cells, 1 + by_zero, -3, 0, steps
    meta[8] = 1 if with_sub else -1
    meta[9] = 1 + with_sub if by_zero else -1
    meta[10] = 3 if by_zero and with_sub else -1
    levels = rng.integers(-40, 60, (2, 256)).astype(np.int32)
    cell_offsets = rng.permutation(512).astype(np.int32) * 2048
    for stream in range(n_streams):
        contexts = np.zeros((2, n_cells, 32), np.int32)
        cell_contexts(side, side_at, meta, levels, base, n_streams, stream, contexts)
        assert len(np.unique(contexts)) > 8
        for phase in range(2):
            scratch = np.zeros(16 * n_cells, np.int32)
            out = np.zeros(32 * n_cells + 7, np.int32)
            plane = phase * n_streams + stream
            cell_offsets_of_phase(side, side_at, meta, levels, base, n_streams, plane, cell_offsets, scratch, out, 7)
            np.testing.assert_array_equal(out[7:].reshape(n_cells, 32), cell_offsets[contexts[phase]])
