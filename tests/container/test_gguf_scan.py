"""The GGUF scanner: what it understands agrees with the `gguf` package, and nothing hostile gets past it."""

from __future__ import annotations

import mmap
import struct
import tracemalloc
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyweights.blocks.types import GGML_TYPES, TYPE_BY_NAME
from lazyweights.container.gguf_scan import (
    Scan,
    TensorInfo,
    read_metadata,
    scan_gguf,
)
from lazyweights.errors import FormatError
from tests.make_gguf import (
    ARRAY,
    STRING,
    Tensor,
    Typed,
    build_gguf,
    every_type_gguf,
    pack_header,
    pack_string,
    pack_tensor_info,
    plausible_metadata,
    quantized_tensor_bytes,
    random_tensor_bytes,
    tensor_size,
)

Q4_K, Q8_0 = TYPE_BY_NAME["Q4_K"].type_id, TYPE_BY_NAME["Q8_0"].type_id
FUZZ = settings(max_examples=1500, deadline=5000, derandomize=True, database=None)


def check_partition(scan: Scan, size: int) -> None:
    """Every promise that holds for every scan."""
    pos = 0
    for span in scan.spans:
        assert span.offset == pos
        assert span.n_bytes > 0
        pos += span.n_bytes
        if span.tensor is not None:
            tensor = scan.tensors[span.tensor]
            ggml_type = GGML_TYPES[tensor.type_id]
            assert (span.offset, span.n_bytes) == (tensor.offset, tensor.n_bytes)
            assert 1 <= len(tensor.shape) <= 4
            assert min(tensor.shape) >= 1
            assert tensor.shape[0] % ggml_type.block_size == 0
            assert tensor.n_bytes == tensor_size(tensor.type_id, tensor.shape)
    assert pos == size
    coded = [span.tensor for span in scan.spans if span.tensor is not None]
    assert len(coded) == len(set(coded))


def scan_checked(data: bytes, file_size: int | None = None) -> Scan:
    scan = scan_gguf(data, file_size)
    check_partition(scan, len(data) if file_size is None else file_size)
    return scan


def spans_of(scan: Scan) -> list[tuple[int, int, int | None]]:
    return [(span.offset, span.n_bytes, span.tensor) for span in scan.spans]


def f32(n: int) -> bytes:
    return np.arange(n, dtype="<f4").tobytes()


@cache
def small_file() -> bytes:
    """A few tensors and all value types, small enough to mutate thousands of times."""
    rng = np.random.default_rng(7)
    metadata = plausible_metadata()
    for key in ("tokens", "scores", "token_type"):
        metadata[f"tokenizer.ggml.{key}"] = metadata[f"tokenizer.ggml.{key}"][:5]
    metadata["test.nested"] = Typed(ARRAY, [[1, 2], [], [3]], ARRAY)
    tensors: list[Tensor] = [
        ("norm.weight", 0, (5,), f32(5)),
        ("blk.0.attn_q.weight", Q4_K, (256, 3), random_tensor_bytes(Q4_K, (256, 3), rng)),
        ("old.weight", 4, (32, 2), rng.bytes(50)),
        ("blk.0.ffn_exps.weight", Q8_0, (32, 2, 2), random_tensor_bytes(Q8_0, (32, 2, 2), rng)),
    ]
    return build_gguf(tensors, metadata, tail=b"tail")


# Agreement with the gguf package


def readable_tensors(rng: np.random.Generator) -> list[Tensor]:
    """Tensors of the types the package knows; of Q8_1 it believes that a block has 40 bytes, ggml-common.h says 36."""
    tensors: list[Tensor] = []
    for type_id, ggml_type in GGML_TYPES.items():
        if ggml_type.name not in ("Q2_0", "Q8_1"):
            tensors.append((f"{ggml_type.name}.weight", type_id, (512, 3), rng.bytes(tensor_size(type_id, (512, 3)))))
    tensors.append(("exps.weight", Q4_K, (256, 2, 3), rng.bytes(tensor_size(Q4_K, (256, 2, 3)))))
    tensors.append(("four.weight", 1, (3, 5, 2, 7), rng.bytes(tensor_size(1, (3, 5, 2, 7)))))
    tensors.append(("odd.weight", 0, (7,), f32(7)))
    return tensors


def assert_same_as_reader(data: bytes, path: Path) -> None:
    path.write_bytes(data)
    reader = GGUFReader(path)
    scan = scan_checked(data)
    assert scan.problem is None
    assert scan.data_offset == reader.data_offset
    assert scan.alignment == reader.alignment
    assert len(scan.tensors) == len(reader.tensors)
    for ours, theirs in zip(scan.tensors, reader.tensors, strict=True):
        assert ours.name == theirs.name
        assert ours.type_id == theirs.tensor_type.value
        assert ours.shape == tuple(int(dim) for dim in theirs.shape)
        assert ours.offset == theirs.data_offset
        assert ours.n_bytes == theirs.n_bytes
    metadata = read_metadata(data)
    theirs_by_key = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    # The package gives None for an empty array of strings.
    assert {key: value or None for key, value in metadata.items()} == {
        key: value or None for key, value in theirs_by_key.items()
    }


@pytest.mark.parametrize("alignment", [1, 8, 32, 64, 4096])
def test_agrees_with_gguf_reader(alignment: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(alignment)
    data = build_gguf(readable_tensors(rng), plausible_metadata(), alignment=alignment)
    assert_same_as_reader(data, tmp_path / "a.gguf")
    scan = scan_gguf(data)
    assert {span.tensor for span in scan.spans} - {None} == set(range(len(scan.tensors)))


def test_agrees_with_gguf_reader_version_2(tmp_path: Path) -> None:
    data = build_gguf(readable_tensors(np.random.default_rng(2)), plausible_metadata(), version=2)
    assert_same_as_reader(data, tmp_path / "a.gguf")
    assert scan_gguf(data).version == 2


def test_agrees_with_gguf_reader_big_endian(tmp_path: Path) -> None:
    data = build_gguf(readable_tensors(np.random.default_rng(3)), plausible_metadata(), byte_order="big")
    assert_same_as_reader(data, tmp_path / "a.gguf")
    scan = scan_gguf(data)
    assert scan.byte_order == "big"
    assert spans_of(scan) == [
        (0, scan.data_offset, None),
        (scan.data_offset, len(data) - scan.data_offset, None),
    ]


def test_agrees_with_gguf_reader_without_tensors(tmp_path: Path) -> None:
    data = build_gguf([], plausible_metadata())
    assert_same_as_reader(data, tmp_path / "a.gguf")
    assert spans_of(scan_gguf(data)) == [(0, len(data), None)]


@pytest.mark.parametrize("byte_order", ["little", "big"])
def test_version_1_has_32_bit_counts(byte_order: str) -> None:
    tensors: list[Tensor] = [("a", 0, (5,), f32(5)), ("b", 1, (3, 2), f32(3))]
    data = build_gguf(tensors, plausible_metadata(), version=1, byte_order=byte_order)
    newer = build_gguf(tensors, plausible_metadata(), version=3, byte_order=byte_order)
    scan, scan3 = scan_checked(data), scan_checked(newer)
    assert (scan.version, scan.byte_order, scan.problem) == (1, byte_order, None)
    assert scan.data_offset < scan3.data_offset
    shift = scan3.data_offset - scan.data_offset
    assert scan3.tensors == tuple(
        TensorInfo(t.name, t.type_id, t.shape, t.offset + shift, t.n_bytes) for t in scan.tensors
    )
    assert read_metadata(data) == read_metadata(newer)


def test_spans_of_a_plain_file() -> None:
    data = build_gguf([("a", 0, (5,), f32(5)), ("b", 0, (2, 2), f32(4))], {"k": 1}, tail=b"xyz")
    scan = scan_checked(data)
    start = scan.data_offset
    assert (scan.problem, scan.version, scan.byte_order, scan.alignment) == (None, 3, "little", 32)
    assert scan.tensors == (TensorInfo("a", 0, (5,), start, 20), TensorInfo("b", 0, (2, 2), start + 32, 16))
    assert spans_of(scan) == [
        (0, start, None),
        (start, 20, 0),
        (start + 20, 12, None),
        (start + 32, 16, 1),
        (start + 48, 19, None),
    ]


def test_alignment_that_is_no_power_of_two() -> None:
    data = build_gguf([("a", 0, (5,), f32(5)), ("b", 0, (2,), f32(2))], alignment=24)
    scan = scan_checked(data)
    assert (scan.problem, scan.alignment, scan.data_offset % 24) == (None, 24, 0)
    assert scan.tensors[1].offset == scan.data_offset + 24


def test_every_type_file() -> None:
    data = every_type_gguf(np.random.default_rng(0), slow_types=False)
    scan = scan_checked(data)
    assert scan.problem == "tensor 'removed.Q4_2.weight' has the unknown type 4"
    assert {t.type_id for t in scan.tensors} == {*GGML_TYPES, 4}
    assert {span.tensor for span in scan.spans} - {None} == set(range(len(scan.tensors) - 1))
    assert read_metadata(data)["tokenizer.ggml.tokens"][3] == "\u2581token0"


def test_quantized_tensor_bytes_are_none_only_without_a_quantizer() -> None:
    rng = np.random.default_rng(0)
    quick = [t for t in GGML_TYPES.values() if not t.name.startswith(("IQ1", "IQ2"))]
    missing = {t.name for t in quick if quantized_tensor_bytes(t.type_id, (256, 2), rng) is None}
    assert missing == {"Q8_1", "Q8_K", "Q2_0"}


# The buffer


def test_header_only_buffer_with_file_size() -> None:
    data = small_file()
    scan = scan_gguf(data)
    assert scan_gguf(data[: scan.data_offset], len(data)) == scan
    assert scan_gguf(memoryview(bytearray(data)), len(data)) == scan
    assert scan_gguf(data + b"more", len(data)) == scan


def test_mmap_is_neither_copied_nor_kept(tmp_path: Path) -> None:
    n_columns = 1 << 26
    data = pack_header(1, 0) + pack_tensor_info("big.weight", 0, (n_columns,), 0)
    path = tmp_path / "sparse.gguf"
    with path.open("wb") as file:
        file.write(data)
        file.truncate(96 + 4 * n_columns)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        tracemalloc.start()
        scan = scan_gguf(mapped)
        read_metadata(mapped)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        mapped.close()  # raises BufferError if a view were still alive
    assert peak < 1 << 18
    assert spans_of(scan) == [(0, 96, None), (96, 4 * n_columns, 0)]


def test_mmap_closes_after_a_hostile_file(tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(pack_header(0, 1) + pack_string("k") + struct.pack("<IIQ", ARRAY, STRING, 1 << 63))
    for _ in range(2):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            assert scan_gguf(mapped).problem is not None
            assert read_metadata(mapped) == {}
        path.write_bytes(b"not a model")
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            pytest.raises(FormatError),
        ):
            scan_gguf(mapped)
        path.write_bytes(b"GGUF")


# Tensors that get no span


def raw_file(infos: list[bytes], n_data: int) -> tuple[bytes, int]:
    header = pack_header(len(infos), 0) + b"".join(infos)
    header += bytes(-len(header) % 32)
    return header + bytes(range(1, 256)) * (n_data // 255) + bytes(n_data % 255), len(header)


def test_unknown_types_stay_verbatim_up_to_the_next_known_tensor() -> None:
    infos = [
        pack_tensor_info("a", 0, (4,), 0),
        pack_tensor_info("x", 4, (32,), 32),
        pack_tensor_info("y", 153, (1 << 63, 1 << 63), 1 << 63),
        pack_tensor_info("b", 0, (4,), 96),
    ]
    data, start = raw_file(infos, 112)
    scan = scan_checked(data)
    assert scan.problem == "tensor 'x' has the unknown type 4 (and 1 more)"
    assert scan.tensors[1] == TensorInfo("x", 4, (32,), start + 32, 0)
    assert scan.tensors[2] == TensorInfo("y", 153, (1 << 63, 1 << 63), start + (1 << 63), 0)
    assert spans_of(scan) == [(0, start, None), (start, 16, 0), (start + 16, 80, None), (start + 96, 16, 3)]


def test_columns_that_are_no_whole_blocks() -> None:
    data, start = raw_file([pack_tensor_info("a", Q4_K, (100, 256), 0), pack_tensor_info("b", 0, (1,), 64)], 68)
    scan = scan_checked(data)
    assert scan.problem == "tensor 'a' has 100 columns, not a multiple of the 256 of a Q4_K block"
    assert scan.tensors[0].n_bytes == 0
    assert spans_of(scan) == [(0, start, None), (start, 64, None), (start + 64, 4, 1)]


def test_truncated_last_tensor() -> None:
    data = build_gguf([("a", 0, (4,), f32(4)), ("last", Q8_0, (32, 4), bytes(136))])
    start = scan_gguf(data).data_offset
    scan = scan_checked(data[: start + 32 + 100])
    assert scan.problem == f"tensor 'last' at offset {start + 32} has 136 bytes, 36 of them are missing from the file"
    assert spans_of(scan) == [(0, start, None), (start, 16, 0), (start + 16, 116, None)]
    assert scan.tensors[1].n_bytes == 136


def test_extent_beyond_the_end() -> None:
    data, start = raw_file([pack_tensor_info("far", 0, (4,), (1 << 64) - 32)], 10)
    scan = scan_checked(data)
    offset = start + (1 << 64) - 32
    assert scan.problem == f"tensor 'far' at offset {offset} has 16 bytes, 16 of them are missing from the file"
    assert spans_of(scan) == [(0, start, None), (start, 10, None)]


def test_absurd_dimensions_are_exact_integers() -> None:
    shape = (1 << 63, 1 << 63, (1 << 64) - 1, 3)
    data, start = raw_file([pack_tensor_info("big", 0, shape, 0)], 10)
    scan = scan_checked(data)
    n_bytes = 4 * 3 * (1 << 126) * ((1 << 64) - 1)
    assert scan.tensors == (TensorInfo("big", 0, shape, start, n_bytes),)
    assert scan.problem == (
        f"tensor 'big' at offset {start} has {n_bytes} bytes, {n_bytes - 10} of them are missing from the file"
    )
    # A product that is small only if it wraps at 64 bits.
    data, start = raw_file([pack_tensor_info("wrap", 0, (1 << 32, 1 << 32), 0)], 10)
    assert scan_checked(data).tensors[0].n_bytes == 1 << 66


def test_empty_tensors_have_no_span() -> None:
    infos = [
        pack_tensor_info("zero", Q4_K, (0, 5), 0),
        pack_tensor_info("zeros", 0, (1 << 63, 0), 1 << 40),
        pack_tensor_info("scalar", 0, (), 0),
        pack_tensor_info("a", 0, (4,), 0),
    ]
    data, start = raw_file(infos, 16)
    scan = scan_checked(data)
    assert scan.problem is None
    assert [t.n_bytes for t in scan.tensors] == [0, 0, 4, 16]
    assert spans_of(scan) == [(0, start, None), (start, 16, 3)]


def test_overlaps_keep_the_first_by_offset() -> None:
    infos = [
        pack_tensor_info("late", 0, (8,), 32),
        pack_tensor_info("early", 0, (9,), 0),
        pack_tensor_info("twin", 0, (2,), 0),
        pack_tensor_info("after", 0, (1,), 36),
        pack_tensor_info("cut", 0, (99,), 0),
    ]
    data, start = raw_file(infos, 64)
    scan = scan_checked(data)
    assert spans_of(scan) == [(0, start, None), (start, 36, 1), (start + 36, 4, 3), (start + 40, 24, None)]
    assert scan.problem == "tensor 'twin' overlaps tensor 'early' (and 2 more)"


def test_unsorted_offsets() -> None:
    infos = [pack_tensor_info("b", 0, (2,), 64), pack_tensor_info("a", 0, (3,), 1)]
    data, start = raw_file(infos, 72)
    scan = scan_checked(data)
    assert scan.problem is None
    assert spans_of(scan) == [
        (0, start, None),
        (start, 1, None),
        (start + 1, 12, 1),
        (start + 13, 51, None),
        (start + 64, 8, 0),
    ]


def test_names_may_be_repeated_empty_or_no_text() -> None:
    tensors: list[Tensor] = [(name, 0, (1,), f32(1)) for name in ("same", "", b"\xff\xfe", "same", "n" * 100)]
    scan = scan_checked(build_gguf(tensors))
    assert [t.name for t in scan.tensors] == ["same", "", "\udcff\udcfe", "same", "n" * 100]
    assert scan.tensors[2].name.encode("utf-8", "surrogateescape") == b"\xff\xfe"
    assert sum(span.tensor is not None for span in scan.spans) == 5
    assert scan.problem == "more than one tensor is named 'same'"


def test_messages_stay_short_and_printable() -> None:
    data = build_gguf([(b"\xff\n" + b"n" * 60000, 4, (1,), f32(1))])
    problem = scan_checked(data).problem
    assert problem == "tensor '\\udcff\\n" + "n" * 62 + "'... has the unknown type 4"
    assert problem.isprintable()


def test_big_endian_reports_what_does_not_fit() -> None:
    data = build_gguf([("a", 0, (5,), f32(5))], byte_order="big")
    start = scan_gguf(data).data_offset
    scan = scan_checked(data[: start + 8])
    assert scan.problem == f"tensor 'a' at offset {start} has 20 bytes, 12 of them are missing from the file"
    assert spans_of(scan) == [(0, start, None), (start, 8, None)]


# Fuzzing


HOSTILE = [0, 1, 4, 8, 9, 31, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 60, (1 << 63) - 1, 1 << 63]
HOSTILE += [(1 << 64) - 8, (1 << 64) - 1]


@FUZZ
@given(st.data())
def test_overwritten_fields(data: st.DataObject) -> None:
    mutated = bytearray(small_file())
    end = scan_gguf(small_file()).data_offset
    for _ in range(data.draw(st.integers(1, 4))):
        pos = data.draw(st.integers(4, end - 9))
        width = data.draw(st.sampled_from([1, 4, 8]))
        value = data.draw(st.sampled_from(HOSTILE) | st.integers(0, (1 << 64) - 1))
        mutated[pos : pos + width] = (value & ((1 << 8 * width) - 1)).to_bytes(width, "little")
    scan_checked(bytes(mutated))
    read_metadata(bytes(mutated), max_array=data.draw(st.sampled_from([None, 0, 3])))


@FUZZ
@given(cut=st.integers(4, len(small_file())), insert=st.binary(max_size=40), drop=st.integers(0, 60))
def test_truncated_and_shifted(cut: int, insert: bytes, drop: int) -> None:
    original = small_file()
    scan_checked(original[:cut])
    shifted = original[:cut] + insert + original[cut + drop :]
    scan_checked(shifted)
    scan_checked(shifted[:4] + shifted[7:3:-1] + shifted[8:])  # the version in the other byte order
    read_metadata(shifted)


@FUZZ
@given(st.binary(max_size=300), st.sampled_from([1, 2, 3]), st.integers(0, 3), st.integers(0, 5))
def test_noise_behind_a_valid_start(noise: bytes, version: int, n_tensors: int, n_pairs: int) -> None:
    data = pack_header(n_tensors, n_pairs, version) + noise
    scan_checked(data)
    read_metadata(data)


def test_many_random_mutations() -> None:
    rng = np.random.default_rng(11)
    original = np.frombuffer(small_file(), dtype=np.uint8)
    end = scan_gguf(small_file()).data_offset
    n_problems = 0
    for _ in range(4000):
        mutated = original.copy()
        mutated[rng.integers(4, end, size=rng.integers(1, 6))] = rng.integers(0, 256)
        data = mutated[: rng.integers(4, len(mutated) + 1) if rng.random() < 0.3 else None].tobytes()
        n_problems += scan_checked(data).problem != "tensor 'old.weight' has the unknown type 4"
        read_metadata(data)
    assert n_problems > 2000
