"""Strings behind 64-bit lengths: followed, taken apart and joined; never past the end, whatever the lengths say."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from lazyweights.container.gguf_scan import scan_gguf
from lazyweights.container.string_kernels import fill_starts, follow_strings, join_strings, take_characters


def pack(strings: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(struct.pack("<Q", len(s)) + s for s in strings), np.uint8)


def test_strings():
    rng = np.random.default_rng(0)
    strings = [rng.bytes(int(n)) for n in rng.integers(0, 30, 200)] + [b"", rng.bytes(1000), rng.bytes(254), rng.bytes(255)]
    strings += [b"abc", b""]
    data = pack(strings)
    sizes = np.array([len(s) for s in strings])
    starts = np.zeros(len(strings) + 1, np.int64)
    assert fill_starts(data, 0, starts)
    np.testing.assert_array_equal(np.diff(starts), sizes + 8)
    assert follow_strings(data, 0, len(strings)) == data.size
    assert follow_strings(data, int(starts[7]), 5) == starts[12]
    assert follow_strings(data, 0, len(strings) + 1) == -1
    characters = take_characters(data, sizes)
    assert characters.tobytes() == b"".join(strings)
    region = np.zeros(data.size, np.uint8)
    join_strings(characters, np.minimum(sizes, 255).astype(np.uint8), sizes[sizes >= 255].astype("<u4"), region)
    np.testing.assert_array_equal(region, data)


@pytest.mark.parametrize("length", [4, 2**31, 2**63 - 1, 2**63, 2**64 - 9, 2**64 - 8, 2**64 - 1])
def test_lengths_that_leave_the_data(length):
    data = np.concatenate([pack([b"abc"]), np.frombuffer(struct.pack("<Q", length) + b"xyz", np.uint8)])
    assert follow_strings(data, 0, 2) == -1
    assert not fill_starts(data, 0, np.zeros(3, np.int64))
    for n in range(8):
        assert follow_strings(data[: 11 + n], 0, 2) == -1


@pytest.mark.parametrize("cut", [0, 1, 9])
def test_scan_with_and_without_kernel(cut):
    """A vocabulary is stepped over by Python or by the kernel, whole or truncated."""
    array = struct.pack("<IQ", 8, 50) + pack([b"t" * (i % 7) for i in range(50)]).tobytes()
    key = b"tokenizer.ggml.tokens"
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key + struct.pack("<I", 9) + array
    header = header[: len(header) - cut]

    def follow(view: memoryview, at: int, n: int) -> int:
        return follow_strings(np.frombuffer(view, np.uint8), at, n)

    assert scan_gguf(header) == scan_gguf(header, follow=follow)
