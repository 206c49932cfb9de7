"""split and join are inverse on all byte strings, and join and split on all planes."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from lazyweights.blocks import GGML_TYPES, TYPE_BY_NAME, Planes, join, plane_specs, split
from lazyweights.blocks.planes import RUN_BYTES

from .samples import ALL_TYPES, byte_count, random_bytes, type_label


def assert_round_trip(type_id: int, data: np.ndarray | bytes, shape: tuple[int, ...]) -> Planes:
    planes = split(type_id, data, shape)
    joined = join(planes)
    assert joined.dtype == np.uint8
    assert joined.ndim == 1
    np.testing.assert_array_equal(joined, np.frombuffer(data, np.uint8))
    return planes


@pytest.mark.parametrize("type_id", ALL_TYPES, ids=type_label)
@pytest.mark.parametrize("blocks_and_rest", [(1,), (1, 1), (2, 3), (3, 2, 2), (1, 3, 2, 2), (2, 0), (0, 2)], ids=str)
def test_random_bytes(type_id: int, blocks_and_rest: tuple[int, ...]) -> None:
    shape = (blocks_and_rest[0] * GGML_TYPES[type_id].block_size, *blocks_and_rest[1:])
    assert_round_trip(type_id, random_bytes(type_id, shape), shape)


@pytest.mark.parametrize("type_id", ALL_TYPES, ids=type_label)
def test_many_runs_and_a_short_one(type_id: int) -> None:
    known = GGML_TYPES[type_id]
    shape = (known.block_size, 2 * (RUN_BYTES // known.block_bytes) + 1)
    assert_round_trip(type_id, random_bytes(type_id, shape, seed=1), shape)


@pytest.mark.parametrize("type_id", ALL_TYPES, ids=type_label)
def test_every_byte_value_in_every_position(type_id: int) -> None:
    known = GGML_TYPES[type_id]
    blocks = np.empty((known.block_bytes, 256, known.block_bytes), np.uint8)
    blocks[:] = random_bytes(type_id, (known.block_size,))
    for position in range(known.block_bytes):
        blocks[position, :, position] = np.arange(256)
    assert_round_trip(type_id, blocks.reshape(-1), (known.block_size, 256, known.block_bytes))


@pytest.mark.parametrize("type_id", ALL_TYPES, ids=type_label)
@pytest.mark.parametrize("value", [0x00, 0x7C, 0x7F, 0x80, 0xFF])
def test_constant_bytes(type_id: int, value: int) -> None:
    # 0x7C7C and up are infinities and NaNs as fp16 scales, 0x80 is the int8 -128.
    shape = (GGML_TYPES[type_id].block_size * 2, 3)
    assert_round_trip(type_id, bytes([value]) * byte_count(type_id, shape), shape)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_arbitrary_bytes(data: st.DataObject) -> None:
    type_id = data.draw(st.sampled_from(ALL_TYPES))
    known = GGML_TYPES[type_id]
    n_blocks, rows, outer = (data.draw(st.integers(0, 3)) for _ in range(3))
    shape = (n_blocks * known.block_size, rows, outer)
    n_bytes = byte_count(type_id, shape)
    assert_round_trip(type_id, data.draw(st.binary(min_size=n_bytes, max_size=n_bytes)), shape)


@pytest.mark.parametrize("type_id", [t for t in ALL_TYPES if type_label(t) != "TQ1_0"], ids=type_label)
def test_every_set_of_plane_values_is_that_of_some_bytes(type_id: int) -> None:
    known = GGML_TYPES[type_id]
    rng = np.random.default_rng(type_id)
    values = {
        spec.name: rng.integers(0, 1 << spec.bits, (2, 5, 3 * spec.per_block), dtype=np.uint64).astype(spec.dtype)
        for spec in plane_specs(type_id)
    }
    again = split(type_id, join(Planes(type_id, (2, 5, 3 * known.block_size), values)), (3 * known.block_size, 5, 2))
    assert list(again.planes) == list(values)
    for name, plane in values.items():
        np.testing.assert_array_equal(again.planes[name], plane, err_msg=name)


@pytest.mark.parametrize("type_id", ALL_TYPES, ids=type_label)
def test_plane_bits_count_the_block_bytes(type_id: int) -> None:
    bits = {spec.name: spec.bits * spec.per_block for spec in plane_specs(type_id)}
    if type_label(type_id) == "TQ1_0":  # 52 bytes hold 256 trits and an escape each
        bits["codes"], bits["escape"] = 52 * 8, 0
    assert sum(bits.values()) == 8 * GGML_TYPES[type_id].block_bytes


NEVER_QUANTIZED = [1, 20, 40, 60, 79, 99, 119, 138, 158, 178, 197, 217, 237]


def test_tq1_0_escapes_exactly_the_bytes_that_no_quantizer_writes() -> None:
    blocks = np.zeros((256, 54), np.uint8)
    blocks[:, :52] = np.arange(256)[:, None]
    planes = assert_round_trip(TYPE_BY_NAME["TQ1_0"].type_id, blocks.reshape(-1), (256, 256)).planes
    escape = planes["escape"].reshape(256, 52)
    assert np.unique(escape[:, :48], axis=1).shape == (256, 1)
    assert np.flatnonzero(escape[:, 0]).tolist() == NEVER_QUANTIZED
    assert escape[:, 0].max() == 1
    written = {-(-(v * 3 * 256) // 243) for v in range(81)}
    assert set(np.flatnonzero(escape[:, 48] == 0).tolist()) == written
    assert escape[:, 48:].max() == 3
    assert planes["codes"].max() == 2


@pytest.mark.parametrize(
    ("name", "code", "block"),
    [
        ("TQ2_0", 3, bytes([0xFF] * 64 + [0, 0x3C])),
        ("Q2_0", 3, bytes([0, 0x3C] + [0xFF] * 16)),
        ("MXFP4", 8, bytes([127] + [0x88] * 16)),
        ("NVFP4", 8, bytes([56] * 4 + [0x88] * 32)),
        ("Q8_0", 0x80, bytes([0, 0x3C] + [0x80] * 32)),
    ],
)
def test_codes_that_quantizers_avoid_survive(name: str, code: int, block: bytes) -> None:
    known = TYPE_BY_NAME[name]
    planes = assert_round_trip(known.type_id, block, (known.block_size,))
    assert set(planes.planes["codes"].ravel().tolist()) == {code}
