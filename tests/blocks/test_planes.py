"""Shapes, dtypes, ranges and order of planes; experts alone; the kinds of input; the errors."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from lazyweights.blocks import GGML_TYPES, TYPE_BY_NAME, Planes, join, plane_names, plane_specs, split
from lazyweights.errors import BlockLayoutError

from .samples import ALL_TYPES, byte_count, random_bytes, type_label

Q4_0, Q4_K, Q5_0, TQ1_0 = (TYPE_BY_NAME[name].type_id for name in ("Q4_0", "Q4_K", "Q5_0", "TQ1_0"))

NAMES = {
    "F32 F16 BF16": ("exponent", "sign_mantissa"),
    "I8 I16 I32 I64 F64": ("values",),
    "Q4_0 Q5_0 Q8_0 IQ4_NL Q1_0 Q2_0 TQ2_0 MXFP4 NVFP4": ("scale", "codes"),
    "Q4_1 Q5_1": ("scale", "min", "codes"),
    "Q8_1": ("scale", "sum", "codes"),
    "Q2_K Q4_K Q5_K": ("scale", "min_scale", "sub_scale", "sub_min", "codes"),
    "Q3_K Q6_K IQ4_XS": ("scale", "sub_scale", "codes"),
    "Q8_K": ("scale", "block_sums", "codes"),
    "TQ1_0": ("scale", "codes", "escape"),
    "IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S": ("scale", "sub_scale", "index", "sign"),
}

# Exclusive upper end of the codes of each scalar-code type.
CODE_LIMITS = {
    "Q1_0": 2,
    "TQ1_0": 3,
    **dict.fromkeys(["Q2_K", "Q2_0", "TQ2_0"], 4),
    "Q3_K": 8,
    **dict.fromkeys(["Q4_0", "Q4_1", "Q4_K", "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4"], 16),
    **dict.fromkeys(["Q5_0", "Q5_1", "Q5_K"], 32),
    "Q6_K": 64,
    **dict.fromkeys(["Q8_0", "Q8_1", "Q8_K"], 256),
}


def test_plane_names_of_every_type() -> None:
    expected = {name: planes for names, planes in NAMES.items() for name in names.split()}
    assert {type_label(type_id): plane_names(type_id) for type_id in ALL_TYPES} == expected


@pytest.mark.parametrize("type_id", ALL_TYPES, ids=type_label)
def test_shapes_dtypes_order_and_ranges(type_id: int) -> None:
    known = GGML_TYPES[type_id]
    shape = (3 * known.block_size, 40, 2, 2)
    planes = split(type_id, random_bytes(type_id, shape), shape)
    assert planes.type_id == type_id
    assert planes.shape == (4, 40, 3 * known.block_size)
    assert tuple(planes.planes) == plane_names(type_id)
    for spec in plane_specs(type_id):
        plane = planes.planes[spec.name]
        assert plane.shape == (4, 40, 3 * spec.per_block)
        assert plane.dtype == spec.dtype
        assert plane.flags.c_contiguous
        assert int(plane.max()) < 1 << spec.bits


@pytest.mark.parametrize("name", sorted(CODE_LIMITS))
def test_random_bytes_reach_every_code_and_no_more(name: str) -> None:
    known = TYPE_BY_NAME[name]
    shape = (known.block_size, 400)
    codes = split(known.type_id, random_bytes(known.type_id, shape), shape).planes["codes"]
    assert codes.dtype == np.uint8
    assert codes.shape == (1, 400, known.block_size)
    np.testing.assert_array_equal(np.unique(codes), np.arange(CODE_LIMITS[name]))


@pytest.mark.parametrize("type_id", ALL_TYPES, ids=type_label)
def test_an_expert_of_the_planes_is_the_planes_of_the_expert(type_id: int) -> None:
    shape = (2 * GGML_TYPES[type_id].block_size, 3, 4)
    data = random_bytes(type_id, shape)
    whole = split(type_id, data, shape)
    for expert, part in enumerate(data.reshape(4, -1)):
        alone = split(type_id, part, shape[:2])
        for name, plane in alone.planes.items():
            np.testing.assert_array_equal(whole.planes[name][expert : expert + 1], plane, err_msg=name)
        rows = {name: plane[expert : expert + 1, 1:] for name, plane in whole.planes.items()}
        np.testing.assert_array_equal(join(Planes(type_id, (1, 2, shape[0]), rows)), part[part.size // 3 :])


def test_kinds_of_input(tmp_path: Path) -> None:
    data = random_bytes(Q4_0, (64, 4))
    raw = data.tobytes()
    path = tmp_path / "tensor"
    path.write_bytes(b"?" + raw)
    fortran = np.asfortranarray(data.reshape(4, -1))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = memoryview(mapped)
        inputs = [raw, bytearray(raw), memoryview(raw), view[1:], data.view("<u2"), data.reshape(2, -1), fortran]
        inputs += [memoryview(np.repeat(data, 2))[::2], np.repeat(data, 2)[::2]]
        for source in inputs:
            np.testing.assert_array_equal(join(split(Q4_0, source, (64, 4))), data)
        del inputs, source
        view.release()  # would fail if a plane still pointed into the file


def test_split_copies_and_leaves_its_input_writeable() -> None:
    for type_id in ALL_TYPES:
        shape = (GGML_TYPES[type_id].block_size, 2)
        data = random_bytes(type_id, shape)
        planes = split(type_id, data, shape)
        assert data.flags.writeable
        for plane in planes.planes.values():
            assert plane.flags.writeable
            assert not np.shares_memory(plane, data)
        joined = join(planes)
        assert joined.flags.writeable
        assert all(plane.flags.writeable for plane in planes.planes.values())


def test_join_takes_strided_unaligned_and_read_only_planes() -> None:
    data = random_bytes(Q4_K, (512, 6))
    planes = split(Q4_K, data, (512, 6))
    odd = {}
    for name, plane in planes.planes.items():
        buffer = np.zeros(plane.nbytes + 1, np.uint8)
        unaligned = buffer[1:].view(plane.dtype).reshape(plane.shape)
        unaligned[:] = plane
        odd[name] = unaligned
    np.testing.assert_array_equal(join(Planes(Q4_K, planes.shape, odd)), data)
    strided = {name: np.repeat(plane, 2, axis=2)[..., ::2] for name, plane in planes.planes.items()}
    for plane in strided.values():
        plane.flags.writeable = False
    np.testing.assert_array_equal(join(Planes(Q4_K, planes.shape, strided)), data)


def test_a_shape_without_dimensions_is_one_element() -> None:
    assert split(TYPE_BY_NAME["F32"].type_id, bytes(4), ()).shape == (1, 1, 1)


@pytest.mark.parametrize("type_id", [-1, 4, 5, 31, 32, 33, 36, 37, 38, 153])
def test_removed_and_unknown_types_stay_raw(type_id: int) -> None:
    calls = [
        lambda: split(type_id, b"", (0,)),
        lambda: join(Planes(type_id, (1, 1, 0), {})),
        lambda: plane_names(type_id),
        lambda: plane_specs(type_id),
    ]
    for call in calls:
        with pytest.raises(BlockLayoutError, match=rf"type {type_id} .*stays raw") as caught:
            call()
        assert caught.value.found == type_id


@pytest.mark.parametrize("type_id", ALL_TYPES, ids=type_label)
@pytest.mark.parametrize("difference", [-1, 1])
def test_a_wrong_byte_count_names_both_counts(type_id: int, difference: int) -> None:
    shape = (GGML_TYPES[type_id].block_size, 3)
    expected = byte_count(type_id, shape)
    with pytest.raises(BlockLayoutError, match="byte count") as caught:
        split(type_id, bytes(expected + difference), shape)
    assert (caught.value.expected, caught.value.found) == (expected, expected + difference)


def test_a_huge_shape_is_refused_without_allocating() -> None:
    with pytest.raises(BlockLayoutError, match="byte count") as caught:
        split(Q4_0, b"", (1 << 62, 1 << 62, 1 << 62, 1 << 62))
    assert caught.value.expected == (1 << 248) // 32 * 18
    with pytest.raises(BlockLayoutError, match="wrong shape"):
        join(Planes(Q4_0, (1 << 62, 1 << 62, 1 << 62), split(Q4_0, bytes(18), (32,)).planes))


@pytest.mark.parametrize("type_id", [t for t in ALL_TYPES if GGML_TYPES[t].block_size > 1], ids=type_label)
def test_columns_that_do_not_fill_blocks(type_id: int) -> None:
    block_size = GGML_TYPES[type_id].block_size
    with pytest.raises(BlockLayoutError, match="whole blocks") as caught:
        split(type_id, b"", (block_size + 1,))
    assert (caught.value.expected, caught.value.found) == (f"a multiple of {block_size}", block_size + 1)
    with pytest.raises(BlockLayoutError, match="whole blocks"):
        join(Planes(type_id, (1, 1, block_size - 1), {}))


@pytest.mark.parametrize(
    ("shape", "expected", "found"),
    [
        ((32, 1, 1, 1, 1), "at most 4", 5),
        ((-32,), "an integer >= 0", -32),
        ((32, 1.0), "an integer >= 0", 1.0),
    ],
)
def test_shapes_that_are_none(shape: tuple[int, ...], expected: str, found: object) -> None:
    with pytest.raises(BlockLayoutError) as caught:
        split(Q4_0, bytes(18), shape)
    assert (caught.value.expected, caught.value.found) == (expected, found)


def changed(type_id: int, **planes: np.ndarray | None) -> Planes:
    """The planes of one zero block with some planes replaced, added or (None) removed."""
    block = split(type_id, bytes(GGML_TYPES[type_id].block_bytes), (GGML_TYPES[type_id].block_size,))
    mixed = {**block.planes, **planes}
    return Planes(type_id, block.shape, {name: plane for name, plane in mixed.items() if plane is not None})


@pytest.mark.parametrize(
    ("planes", "match", "expected", "found"),
    [
        (changed(Q4_0, codes=None), "not the planes", ["scale", "codes"], ["scale"]),
        (changed(Q4_0, sign=np.zeros(1)), "not the planes", ["scale", "codes"], ["scale", "codes", "sign"]),
        (changed(Q4_0, codes=np.zeros((1, 1, 32), np.int8)), "wrong dtype", "uint8", "int8"),
        (changed(Q4_0, codes=np.zeros((1, 32), np.uint8)), "wrong shape", (1, 1, 32), (1, 32)),
        (changed(Q4_0, codes=np.full((1, 1, 32), 16, np.uint8)), "4 bits cannot store", "below 16", 16),
        (changed(Q5_0, codes=np.full((1, 1, 32), 32, np.uint8)), "5 bits cannot store", "below 32", 32),
        (changed(Q4_K, sub_min=np.full((1, 1, 8), 64, np.uint8)), "'sub_min' .* 6 bits", "below 64", 64),
        (changed(TQ1_0, codes=np.full((1, 1, 256), 3, np.uint8)), "no trit", "below 3", 3),
        (changed(TQ1_0, escape=np.full((1, 1, 52), 2, np.uint8)), "other trits", "an escape that split returns", 2),
        (Planes(Q4_0, (1, 32), {}), "shape", "3 dimensions", "2 dimensions"),  # type: ignore[arg-type]
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_planes_that_are_none(planes: Planes, match: str, expected: object, found: object) -> None:
    with pytest.raises(BlockLayoutError, match=match) as caught:
        join(planes)
    assert (caught.value.expected, caught.value.found) == (expected, found)


def test_every_limited_plane_is_checked() -> None:
    for type_id in ALL_TYPES:
        for spec in plane_specs(type_id):
            if spec.is_full:
                continue
            bad = np.zeros((1, 1, spec.per_block), spec.dtype)
            bad[0, 0, -1] = 1 << spec.bits
            with pytest.raises(BlockLayoutError) as caught:
                join(changed(type_id, **{spec.name: bad}))
            assert (caught.value.expected, caught.value.found) == (f"below {1 << spec.bits}", 1 << spec.bits)
