"""The lazy reader gives the bytes of the source, whatever part of them is asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import lazyweights
from lazyweights.blocks import GGML_TYPES, TYPE_BY_NAME
from lazyweights.codecs import TILE_ROWS
from lazyweights.container.coded_file import CHUNK_BYTES
from lazyweights.container.gguf_scan import read_metadata, scan_gguf
from lazyweights.container.reader import CodedFile
from lazyweights.errors import BlockLayoutError, ChecksumError, FormatError, LazyWeightsError, NotCodedError
from tests.container.coded_samples import Parts, coded_span, encode_bytes, layout_of, mixed_gguf, tensor_bytes
from tests.make_gguf import Tensor, build_gguf, every_type_gguf, plausible_metadata

PRESETS = ("dense", "unit")


@dataclass(frozen=True)
class Sample:
    """A source, its coded file, and the packed bytes of each tensor as rows: uint8 (outer, rows, row bytes)."""

    source: bytes
    path: Path
    tensors: dict[str, np.ndarray]


def packed_rows(source: bytes) -> dict[str, np.ndarray]:
    """Cut the tensors that the scanner gives a place out of a source."""
    scan = scan_gguf(source)
    found = {}
    for span in scan.spans:
        if span.tensor is not None:
            info = scan.tensors[span.tensor]
            outer = int(np.prod(info.shape[2:], dtype=np.int64))
            rows = info.shape[1] if len(info.shape) > 1 else 1
            data = np.frombuffer(source, np.uint8, span.n_bytes, span.offset)
            found[info.name] = data.reshape(outer, rows, -1)
    return found


def make_sample(source: bytes, folder: Path, **options: Any) -> Sample:
    encode_bytes(source, folder, **options)
    return Sample(source, folder / "sample.gguf.lw", packed_rows(source))


@pytest.fixture(scope="module", params=PRESETS)
def every_type(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sample:
    source = every_type_gguf(np.random.default_rng(21), slow_types=False)
    return make_sample(source, tmp_path_factory.mktemp("every"), preset=request.param)


SHAPES = {"a": ("Q4_K", (256, 200)), "b": ("Q8_0", (64, 130, 3)), "c": ("Q4_0", (32, 64, 2, 2)), "d": ("F32", (33, 67)),
          "e": ("BF16", (5, 1)), "f": ("F16", (576,)), "g": ("I32", (16, 70, 2)), "h": ("I8", (100, 3))}  # fmt: skip


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    rng = np.random.default_rng(22)
    tensors: list[Tensor] = []
    for name, (type_name, shape) in SHAPES.items():
        type_id = TYPE_BY_NAME[type_name].type_id
        tensors.append((name, type_id, shape, tensor_bytes(type_id, shape, rng)))
    return make_sample(build_gguf(tensors, plausible_metadata()), tmp_path_factory.mktemp("shapes"))


@pytest.fixture
def opened(shapes: Sample) -> Iterator[CodedFile]:
    with CodedFile(shapes.path) as file:
        yield file


def test_keys_and_information(every_type: Sample) -> None:
    infos = {t.name: t for t in scan_gguf(every_type.source).tensors}
    with lazyweights.open(every_type.path) as file:
        assert file.keys() == list(every_type.tensors)
        assert len(file) == len(every_type.tensors)
        for name in every_type.tensors:
            info = file.tensor_info(name)
            assert name in file
            expected = infos[name]
            assert (info.name, info.type_id, info.shape, info.offset, info.n_bytes) == (
                name, expected.type_id, expected.shape, expected.offset, expected.n_bytes,
            )  # fmt: skip
        assert "no such tensor" not in file
        assert 7 not in file


def test_metadata(every_type: Sample) -> None:
    with CodedFile(every_type.path) as file:
        metadata = file.metadata
        assert metadata == read_metadata(every_type.source)
        assert metadata["general.name"] == plausible_metadata()["general.name"]
        assert metadata["tokenizer.ggml.tokens"] == plausible_metadata()["tokenizer.ggml.tokens"]
        assert file.metadata == metadata


@pytest.mark.parametrize(
    "source",
    [
        b"GGUF",
        b"GGUF\x03\x00\x00\x00",
        build_gguf([]),
        build_gguf([], plausible_metadata()),
        b"GGUF" + bytes(range(256)),
    ],
    ids=["magic", "version", "empty", "header", "nonsense"],
)
def test_file_without_tensors(source: bytes, tmp_path: Path) -> None:
    sample = make_sample(source, tmp_path)
    with CodedFile(sample.path) as file:
        assert file.keys() == []
        assert len(file) == 0
        assert file.metadata == read_metadata(source)


def test_every_tensor_is_that_of_the_source(every_type: Sample) -> None:
    with CodedFile(every_type.path) as file:
        for name, expected in every_type.tensors.items():
            shape = file.tensor_info(name).shape
            found = file.get_tensor(name)
            assert found.dtype == np.uint8
            assert found.shape == (*reversed(shape[1:]), expected.shape[2])
            assert np.array_equal(found.reshape(expected.shape), expected)


def test_rows_of_every_tensor(every_type: Sample) -> None:
    with CodedFile(every_type.path) as file:
        for name, expected in every_type.tensors.items():
            outer, rows, _ = expected.shape
            for start, stop in [(0, rows), (rows - 1, rows), (rows // 2, rows // 2 + 1), (rows // 3, rows)]:
                assert np.array_equal(file.get_rows(name, start, stop, outer - 1), expected[outer - 1, start:stop])


@pytest.mark.parametrize("name", SHAPES)
def test_rows_are_slices(shapes: Sample, opened: CodedFile, name: str) -> None:
    expected = shapes.tensors[name]
    outer, rows, row_bytes = expected.shape
    edges = sorted({0, 1, rows // 2, rows - 1, rows, *(r for r in (62, 63, 64, 65, 127, 128, 129) if r <= rows)})
    for k in range(outer):
        for start in edges:
            for stop in edges:
                if start <= stop:
                    found = opened.get_rows(name, start, stop, k)
                    assert found.shape == (stop - start, row_bytes)
                    assert np.array_equal(found, expected[k, start:stop]), (start, stop, k)
        assert np.array_equal(opened.get_expert(name, k), expected[k])
    assert np.array_equal(opened.get_tensor(name).reshape(expected.shape), expected)


def test_random_rows(shapes: Sample, opened: CodedFile) -> None:
    rng = np.random.default_rng(23)
    names = list(SHAPES)
    for _ in range(500):
        name = names[rng.integers(len(names))]
        outer, rows, _ = shapes.tensors[name].shape
        start = int(rng.integers(rows + 1))
        stop = int(rng.integers(start, rows + 1))
        k = int(rng.integers(outer))
        assert np.array_equal(opened.get_rows(name, start, stop, k), shapes.tensors[name][k, start:stop])


def test_what_is_returned_is_a_copy(shapes: Sample) -> None:
    with CodedFile(shapes.path) as file:
        first = file.get_tensor("a")
        kept = first.copy()
        again = file.get_tensor("a")
        assert np.array_equal(again, kept)
        if first.flags.writeable:
            first[:] = 0
        assert np.array_equal(again, kept)
        assert np.array_equal(file.get_tensor("a"), kept)
    assert np.array_equal(again, kept)


def test_verbatim_tensor_over_chunks(tmp_path: Path) -> None:
    """A tensor that is not coded may begin and end inside chunks of 4 MiB."""
    rng = np.random.default_rng(24)
    i32 = TYPE_BY_NAME["I32"].type_id
    first, second = rng.bytes(1000), rng.bytes(CHUNK_BYTES + CHUNK_BYTES // 2)
    row_bytes = len(second) // 3
    sample = make_sample(build_gguf([("a", i32, (250,), first), ("b", i32, (row_bytes // 4, 3), second)]), tmp_path)
    with CodedFile(sample.path) as file:
        assert file.get_tensor("a").tobytes() == first
        assert file.get_tensor("b").tobytes() == second
        for row in range(3):
            assert file.get_rows("b", row, row + 1).tobytes() == second[row_bytes * row : row_bytes * (row + 1)]


# Dequantized values.


def integers(values: np.ndarray) -> np.ndarray:
    assert values.dtype == np.float32
    return np.ascontiguousarray(values).view(np.uint32)


def test_dequantized_values(every_type: Sample) -> None:
    n = 0
    with CodedFile(every_type.path) as file:
        for name, packed in every_type.tensors.items():
            if name.startswith("random."):
                continue
            info = file.tensor_info(name)
            try:
                kind = gguf.GGMLQuantizationType(info.type_id)
                expected = gguf.quants.dequantize(packed.reshape(-1, packed.shape[2]), kind).astype(np.float32)
            except (NotImplementedError, ValueError):
                with pytest.raises(BlockLayoutError, match="cannot dequantize") as caught:
                    file.get_tensor(name, dequantize=True)
                assert (caught.value.tensor, caught.value.path) == (name, str(every_type.path))
                continue
            shape = tuple(reversed(info.shape))
            found = file.get_tensor(name, dequantize=True)
            assert found.shape == shape
            assert np.array_equal(integers(found), integers(expected.reshape(shape)))
            outer, rows, _ = packed.shape
            by_row = expected.reshape(outer, rows, -1)
            part = file.get_rows(name, rows // 3, rows, outer - 1, dequantize=True)
            assert np.array_equal(integers(part), integers(by_row[outer - 1, rows // 3 :]))
            assert np.array_equal(integers(file.get_expert(name, 0, dequantize=True)), integers(by_row[0]))
            n += 1
    assert n >= 20


# Refusals.


def test_unknown_names(opened: CodedFile) -> None:
    for call in (
        opened.get_tensor,
        opened.tensor_info,
        lambda name: opened.get_rows(name, 0, 1),
        lambda name: opened.get_expert(name, 0),
        lambda name: opened.payload_bytes(name, 0, 1),
    ):
        with pytest.raises(KeyError, match="nobody"):
            call("nobody")


@pytest.mark.parametrize(
    ("start", "stop", "outer"),
    [
        *((start, stop, 0) for start, stop in [(-1, 1), (0, 131), (5, 4), (131, 131), (-2, -1), (0, 1 << 70)]),
        *((0, 1, outer) for outer in (3, -1, 1 << 70)),
    ],
)
def test_rows_that_are_not_there(opened: CodedFile, start: int, stop: int, outer: int) -> None:
    with pytest.raises(IndexError, match="'b'"):
        opened.get_rows("b", start, stop, outer)


@pytest.mark.parametrize("expert", [-1, 3])
def test_experts_that_are_not_there(opened: CodedFile, expert: int) -> None:
    with pytest.raises(IndexError, match="'b'"):
        opened.get_expert("b", expert)


def test_closed_file(shapes: Sample) -> None:
    file = CodedFile(shapes.path)
    kept = file.get_tensor("a")
    file.close()
    file.close()
    assert np.array_equal(kept.reshape(shapes.tensors["a"].shape), shapes.tensors["a"])
    for name in SHAPES:
        with pytest.raises(LazyWeightsError, match="closed") as caught:
            file.get_tensor(name)
        assert caught.value.path == str(shapes.path)
    with pytest.raises(LazyWeightsError, match="closed"):
        _ = file.metadata
    assert file.keys() == list(SHAPES)


def test_not_a_coded_file(tmp_path: Path) -> None:
    cases = {"empty": b"", "gguf": mixed_gguf(), "zip": b"PK\x03\x04" + bytes(200), "short": b"LZ"}
    for name, data in cases.items():
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(NotCodedError) as caught:
            CodedFile(path)
        assert caught.value.path == str(path)
        assert str(path) in str(caught.value)
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(LazyWeightsError) as error:
            CodedFile(path)
        assert error.value.path == str(path)


def test_damage_is_found_where_it_is_read(shapes: Sample, tmp_path: Path) -> None:
    """A flipped bit spoils the row groups that hold it, by name, and no other."""
    coded = bytearray(shapes.path.read_bytes())
    layout = layout_of(bytes(coded))
    span, units = coded_span(layout, "b")
    group = 4  # outer index 1, rows 64 to 127
    at = int(layout.offsets()[units.start + group])
    coded[at + 5] ^= 0x10
    path = tmp_path / "damaged.lw"
    path.write_bytes(coded)
    with CodedFile(path) as file:
        for name in set(SHAPES) - {"b"}:
            assert np.array_equal(file.get_tensor(name).reshape(shapes.tensors[name].shape), shapes.tensors[name])
        for start, stop, outer in [(0, 130, 0), (0, 64, 1), (128, 130, 1), (0, 130, 2)]:
            assert np.array_equal(file.get_rows("b", start, stop, outer), shapes.tensors["b"][outer, start:stop])
        for read in (
            lambda: file.get_rows("b", 64, 65, 1),
            lambda: file.get_rows("b", 127, 130, 1),
            lambda: file.get_expert("b", 1),
            lambda: file.get_tensor("b"),
        ):
            with pytest.raises(LazyWeightsError) as caught:
                read()
            assert (caught.value.path, caught.value.tensor, caught.value.row_group) == (str(path), "b", group)
            assert all(text in str(caught.value) for text in (str(path), "'b'", "row group 4"))
    assert span.groups_per_outer == 3


def test_damaged_verbatim_bytes(shapes: Sample, tmp_path: Path) -> None:
    coded = shapes.path.read_bytes()
    layout = layout_of(coded)
    first = {i: unit for i, _, unit, _ in layout.spans()}
    info = next(t for t in layout.head.tensors if t.name == "h")
    assert not layout.head.spans[info.span].is_coded
    at = int(layout.offsets()[first[info.span]])
    damaged = coded[:at] + bytes([coded[at] ^ 1]) + coded[at + 1 :]
    path = tmp_path / "damaged.lw"
    path.write_bytes(damaged)
    with CodedFile(path) as file, pytest.raises(FormatError) as caught:
        file.get_tensor("h")
    assert caught.value.path == str(path)


def test_rows_come_with_their_checksum(shapes: Sample, tmp_path: Path) -> None:
    """A payload that decodes well but to other rows is found too."""
    parts = Parts.of(shapes.path.read_bytes())
    layout = layout_of(shapes.path.read_bytes())
    _, units = coded_span(layout, "a")
    first = units.start
    parts.payloads[first], parts.payloads[first + 1] = parts.payloads[first + 1], parts.payloads[first]
    parts.kinds[first], parts.kinds[first + 1] = parts.kinds[first + 1], parts.kinds[first]
    path = tmp_path / "swapped.lw"
    path.write_bytes(parts.seal())
    with CodedFile(path) as file:
        with pytest.raises(ChecksumError) as caught:
            file.get_rows("a", 70, 80)
        assert (caught.value.tensor, caught.value.row_group) == ("a", 1)
        assert np.array_equal(file.get_rows("a", 128, 200), shapes.tensors["a"][0, 128:200])


# Threads.


def test_concurrent_reads(every_type: Sample) -> None:
    """Eight threads on one open file, each in its own order."""
    names = list(every_type.tensors)
    start = threading.Barrier(8)

    with CodedFile(every_type.path) as file:

        def read(seed: int) -> list[str]:
            rng = np.random.default_rng([25, seed])
            start.wait()
            wrong = []
            for i in rng.permutation(len(names)).tolist():
                expected = every_type.tensors[names[i]]
                outer, rows, _ = expected.shape
                if seed % 2:
                    found = file.get_tensor(names[i]).reshape(expected.shape)
                    right = np.array_equal(found, expected)
                else:
                    row = int(rng.integers(rows))
                    right = np.array_equal(file.get_rows(names[i], row, rows, outer - 1), expected[outer - 1, row:])
                if not right:
                    wrong.append(names[i])
                assert file.metadata["general.architecture"] == "llama"
            return wrong

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(read, range(8))) == [[]] * 8


def test_close_while_others_read(shapes: Sample) -> None:
    """Whoever reads while another thread closes gets the rows or the error that says so, nothing else."""
    expected = shapes.tensors["a"][0]
    for _ in range(40):
        file = CodedFile(shapes.path)
        started = threading.Barrier(3)

        def read(file: CodedFile = file, started: threading.Barrier = started) -> int:
            started.wait()
            n = 0
            try:
                for _ in range(2000):
                    assert np.array_equal(file.get_rows("a", 0, 200), expected)
                    n += 1
            except LazyWeightsError as error:
                assert "closed" in str(error)  # noqa: PT017
            return n

        with ThreadPoolExecutor(2) as pool:
            readers = [pool.submit(read) for _ in range(2)]
            started.wait()
            while not any(r.done() for r in readers):
                file.close()
            for reader in readers:
                assert reader.result() < 2000


# What a read costs.


def test_payload_bytes_of_coded_tensors(every_type: Sample) -> None:
    layout = layout_of(every_type.path.read_bytes())
    with CodedFile(every_type.path) as file:
        for name, packed in every_type.tensors.items():
            info = file.tensor_info(name)
            if not layout.head.spans[info.span].is_coded:
                continue
            span, units = coded_span(layout, name)
            outer, rows, _ = packed.shape
            sizes = layout.sizes[units].reshape(outer, -1)
            for k in range(outer):
                assert file.payload_bytes(name, 0, rows, k) == sizes[k].sum()
                assert file.payload_bytes(name, 0, 1, k) == sizes[k, 0]
                assert file.payload_bytes(name, rows - 1, rows, k) == sizes[k, -1]
            assert span.groups_per_outer == -(-rows // TILE_ROWS)


def test_payload_bytes_of_row_groups(opened: CodedFile) -> None:
    _, units = coded_span(opened.layout, "a")
    sizes = opened.layout.sizes[units].tolist()
    assert len(sizes) == 4
    assert opened.payload_bytes("a", 63, 64) == sizes[0]
    assert opened.payload_bytes("a", 63, 65) == sizes[0] + sizes[1]
    assert opened.payload_bytes("a", 64, 192) == sizes[1] + sizes[2]
    assert opened.payload_bytes("a", 199, 200) == sizes[3]


@pytest.mark.parametrize("row", [0, 1, 64, 70, 200])
def test_no_rows_cost_no_payload(opened: CodedFile, row: int) -> None:
    assert opened.payload_bytes("a", row, row) == 0


def test_payload_bytes_of_verbatim_tensors(shapes: Sample, opened: CodedFile) -> None:
    """Rows that are kept verbatim cost at most themselves, or the chunks of 4 MiB around them."""
    n = 0
    for name, packed in shapes.tensors.items():
        index = opened.tensor_info(name).span
        if opened.layout.head.spans[index].is_coded:
            continue
        span, first = next((span, first) for i, span, first, _ in opened.layout.spans() if i == index)
        chunks = int(opened.layout.sizes[first : first + span.n_units].sum())
        outer, rows, row_bytes = packed.shape
        for k in range(outer):
            assert 0 < opened.payload_bytes(name, 0, rows, k) <= max(rows * row_bytes, chunks)
            assert 0 < opened.payload_bytes(name, 0, 1, k) <= max(row_bytes, chunks)
        n += rows > 1
    assert n > 0


@pytest.mark.parametrize(
    ("start", "stop", "outer"), [(0, 201, 0), (5, 4, 0), (-1, 1, 0), (201, 201, 0), (0, 1, 1), (0, 1, -1), (0, 1, 1 << 70)]
)
def test_payload_bytes_of_rows_that_are_not_there(opened: CodedFile, start: int, stop: int, outer: int) -> None:
    with pytest.raises(IndexError, match="of 'a'"):
        opened.payload_bytes("a", start, stop, outer)


# Files that were kept whole.


def unshrinkable() -> bytes:
    """A file that coding would make larger: noise, also in long names, which the head repeats."""
    rng = np.random.default_rng(23)
    names = [bytes(rng.integers(33, 127, 400, np.uint8)).decode() for _ in range(20)]
    return build_gguf([(name, 0, (4, 2), rng.bytes(32)) for name in names], {"general.name": "noise"})


@pytest.mark.parametrize("preset", PRESETS)
def test_a_file_that_coding_would_make_larger_is_kept_whole(preset: str, tmp_path: Path) -> None:
    sample = make_sample(unshrinkable(), tmp_path, preset=preset)
    coded = sample.path.read_bytes()
    head = layout_of(coded).head
    assert [span.n_bytes for span in head.spans] == [len(sample.source)]
    assert not head.tensors
    assert not head.table_sets
    assert len(coded) <= len(sample.source) + 1024
    assert lazyweights.verify(sample.path, against=tmp_path / "sample.gguf").source_bytes == len(sample.source)
    scanned = {t.name: t for t in scan_gguf(sample.source).tensors}
    with CodedFile(sample.path) as file:
        assert file.metadata["general.name"] == "noise"
        assert file.keys() == list(sample.tensors) == [t.name for t in file.tensors()]
        assert sample.source.startswith(file.header_bytes())
        assert len(file.header_bytes()) == file.tensors()[0].offset
        for name, packed in sample.tensors.items():
            info = file.tensor_info(name)
            assert (info.type_id, info.shape, info.offset) == (0, (4, 2), scanned[name].offset)
            assert (file.get_tensor(name) == packed[0]).all()
            assert (file.get_rows(name, 1, 2) == packed[0, 1:]).all()
            assert file.payload_bytes(name, 0, 1) == layout_of(coded).sizes[0]


def test_types_of_the_sample() -> None:
    assert {type_name for type_name, _ in SHAPES.values()} <= {t.name for t in GGML_TYPES.values()}
