"""Codes are split where that takes hardly more bytes, and only there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lazyweights.blocks import TYPE_BY_NAME
from lazyweights.container import batch_decode, group_decode
from lazyweights.container.decoder import verify_file
from lazyweights.container.planning import is_worth_splitting
from tests.container import plain_decoder
from tests.container.coded_samples import (
    change_plane,
    decode_bytes,
    encode_bytes,
    scalar_decode_batch,
    scalar_decode_groups,
)
from tests.container.test_shared_rows import gguf_of, payload_bytes, span_of
from tests.make_gguf import random_tensor_bytes


def quantized(type_name: str, shape: tuple[int, int], width: float) -> bytes:
    """Tensor bytes with bell-shaped codes of a standard deviation, a forced one in each block of the first two types."""
    type_id = TYPE_BY_NAME[type_name].type_id
    rng = np.random.default_rng(3)
    top, middle = {"Q8_0": (126, 0), "Q5_0": (15, 16), "Q5_K": (15, 16)}[type_name]

    def codes(plane: np.ndarray) -> np.ndarray:
        blocks = np.clip(np.rint(rng.normal(0, width, (plane.size // 32, 32))), -top, top).astype(int) + middle
        if type_name != "Q5_K":
            blocks[np.arange(len(blocks)), rng.integers(0, 32, len(blocks))] = 127 if type_name == "Q8_0" else 0
        return (blocks & 255).astype(plane.dtype).reshape(plane.shape)

    def scales(plane: np.ndarray) -> np.ndarray:
        return 0x2000 + rng.integers(0, 0x200, plane.shape)

    return change_plane(type_id, random_tensor_bytes(type_id, shape, rng), shape, codes=codes, scale=scales)


@pytest.mark.parametrize(
    ("type_name", "width", "is_split"),
    [("Q8_0", 40, True), ("Q8_0", 3, False), ("Q5_0", 6, True), ("Q5_0", 0.7, False), ("Q5_K", 6, True), ("Q5_K", 0.7, False)],
)
def test_wide_codes_are_split(
    type_name: str, width: float, is_split: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = (256, 600)
    source = gguf_of(type_name, shape, quantized(type_name, shape, width))
    coded = encode_bytes(source, tmp_path)
    span = span_of(coded)
    assert bool(span.coder.layout.low_bits) == is_split
    assert decode_bytes(coded) == source
    assert plain_decoder.decode(coded) == source
    verify_file(tmp_path / "sample.gguf.lw", against=tmp_path / "sample.gguf", threads=2)
    with monkeypatch.context() as patched:
        patched.setattr(group_decode, "decode_groups", scalar_decode_groups())
        patched.setattr(batch_decode, "decode_batch", scalar_decode_batch())
        assert decode_bytes(coded) == source
    # The other way is no smaller, by more than the threshold costs.
    monkeypatch.setattr("lazyweights.container.planning.is_worth_splitting", lambda *_: not is_split)
    other = encode_bytes(source, tmp_path)
    assert bool(span_of(other).coder.layout.low_bits) != is_split
    assert payload_bytes(coded) <= payload_bytes(other) * (1 + 1 / 512)


def test_preset_unit_splits_nothing(tmp_path: Path) -> None:
    source = gguf_of("Q8_0", (256, 600), quantized("Q8_0", (256, 600), 40))
    coded = encode_bytes(source, tmp_path, preset="unit")
    assert span_of(coded).coder.layout.low_bits == 0


def test_split_counts_what_the_low_bits_cost() -> None:
    """Fifteen pairs of equal counts lose nothing, a lonely odd code its low bit; few codes look more alike than they are."""
    even = np.zeros(256, np.int64)
    even[:30] = 1000
    assert is_worth_splitting(even, 1)
    uneven = even.copy()
    uneven[1::2] = 0
    assert not is_worth_splitting(uneven, 1)
    # 16 of 32 pairs differ by a factor: 0.03 bits a code are lost, which a sample of 400 codes does not tell from chance.
    tilted = np.zeros(256, np.int64)
    tilted[0:32:2], tilted[1:32:2] = 15, 10
    assert is_worth_splitting(tilted, 1)
    assert not is_worth_splitting(100 * tilted, 1)
