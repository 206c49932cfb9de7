"""Bit strings against numpy's bits: any width, any start, arrays that end where the bits do."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyweights.container.bit_kernels import SLACK_BYTES, pack_bits, unpack_bits


def bits_of(values: np.ndarray, n_bits: int) -> np.ndarray:
    shifts = np.arange(n_bits - 1, -1, -1, dtype=np.uint64)
    return (values.astype(np.uint64)[:, None] >> shifts & np.uint64(1)).astype(np.uint8).reshape(-1)


@settings(deadline=None, max_examples=300)
@given(
    st.integers(0, 32), st.integers(0, 100), st.integers(0, 40), st.sampled_from([np.uint16, np.uint32]), st.integers(0, 1000)
)
def test_pack_and_unpack(n_bits, n_values, start, dtype, seed):
    rng = np.random.default_rng(seed)
    # Bits above the width are not packed.
    values = rng.integers(0, np.iinfo(dtype).max + 1, n_values, dtype=dtype)
    before = rng.integers(0, 2, start).astype(np.uint8)
    want = np.packbits(np.concatenate([before, bits_of(values, n_bits)]))
    out = np.zeros(len(want) + 1, np.uint8)
    out[: len(np.packbits(before))] = np.packbits(before)
    assert pack_bits(values, n_bits, out, start) == start + n_bits * n_values
    np.testing.assert_array_equal(out[:-1], want)
    assert out[-1] == 0

    padded = np.concatenate([out, np.full(SLACK_BYTES, 0xAA, np.uint8)])
    back = np.zeros(n_values, np.uint32)
    assert unpack_bits(padded, start, n_bits, back) == start + n_bits * n_values
    np.testing.assert_array_equal(back, values.astype(np.uint64) & np.uint64((1 << n_bits) - 1))
