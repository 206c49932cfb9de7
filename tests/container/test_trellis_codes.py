"""Shared rows with trellis codes: found, coded by their indices, decoded in every way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lazyweights.blocks import TYPE_BY_NAME, split
from lazyweights.container import coded_file, shared_rows
from lazyweights.container.coded_file import CODED, LOCKSTEP, RAW, CodedSpan, Head
from lazyweights.container.inspect import TensorReport, inspect_file
from lazyweights.container.reader import CodedFile
from lazyweights.container.stream_layout import STREAM_LAYOUTS
from lazyweights.container.tensor_coder import HUFFMAN, SHARED, SharedCounts, tensor_coder
from lazyweights.errors import FormatError, LazyWeightsError
from lazyweights.reports.tensor_facts import TensorExaminer, count_entropy
from tests.container.coded_samples import (
    Parts,
    change_plane,
    coded_span,
    decode_bytes,
    encode_bytes,
    layout_of,
    shared_tensor,
    trellis_codes,
    type_label,
)
from tests.container.test_shared_rows import check_all_ways, gguf_of, payload_bytes, plan_of, span_of

TYPES = tuple(type_id for type_id, layout in STREAM_LAYOUTS.items() if layout.may_have_trellis)


def has_trellis(span: CodedSpan) -> bool:
    plan = span.plan
    return plan is not None and plan.coder == SHARED and plan.shared is not None and plan.shared.is_trellis


@pytest.fixture
def without_trellis() -> Iterator[pytest.MonkeyPatch]:
    """Undo it, and trellis codes are found again."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shared_rows, "trellis_indices", lambda *_: None)
        yield patched


def test_types() -> None:
    assert {type_label(i) for i in TYPES} == {"Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q5_K", "Q6_K"}


@pytest.mark.parametrize("type_id", TYPES, ids=type_label)
def test_every_type_with_one_code_a_symbol(type_id: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = type_label(type_id)
    shape = (256, 133)
    rng = np.random.default_rng([80, type_id])
    source = gguf_of(name, shape, shared_tensor(name, shape, rng, n_references=2, doubled=0.05, width=3.0, trellis=True))
    coded = encode_bytes(source, tmp_path)
    assert has_trellis(span_of(coded))
    check_all_ways(source, coded, tmp_path, monkeypatch)


@pytest.mark.parametrize("type_id", sorted(set(STREAM_LAYOUTS) - set(TYPES)), ids=type_label)
def test_other_types_have_none(type_id: int) -> None:
    coder = tensor_coder(type_id, 256)
    packed = np.zeros((128, coder.row_bytes), np.uint8)
    assert shared_rows.trellis_indices(coder, coder.split(packed)) is None


@pytest.mark.parametrize("columns", [32, 96])
@pytest.mark.parametrize("n_rows", [128, 129, 191, 192, 255, 320])
def test_rows(columns: int, n_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row counts that are no multiple of 64, one block."""
    shape = (columns, n_rows)
    data = shared_tensor("Q8_0", shape, np.random.default_rng([81, columns, n_rows]), doubled=0.05, width=6.0, trellis=True)
    source = gguf_of("Q8_0", shape, data)
    coded = encode_bytes(source, tmp_path)
    assert has_trellis(span_of(coded))
    check_all_ways(source, coded, tmp_path, monkeypatch)


@pytest.mark.parametrize("n_rows", [64, 70, 128])
def test_experts(n_rows: int, tmp_path: Path) -> None:
    """A trellis starts anew with each row group of each outer index. Samples have such row groups only if none is short."""
    shape = (96, n_rows, 3)
    source = gguf_of("Q8_0", shape, shared_tensor("Q8_0", shape, np.random.default_rng([82, n_rows]), trellis=True))
    coded = encode_bytes(source, tmp_path)
    assert has_trellis(span_of(coded)) == (n_rows != 70)
    assert decode_bytes(coded) == source


def test_trellis_through_experts_is_none(tmp_path: Path) -> None:
    """A trellis that runs on from one outer index to the next one, as row groups do not, breaks the rule."""
    data = shared_tensor("Q8_0", (96, 140), np.random.default_rng(83), trellis=True)
    coded = encode_bytes(gguf_of("Q8_0", (96, 140), data), tmp_path)
    assert has_trellis(span_of(coded))
    source = gguf_of("Q8_0", (96, 70, 2), data)
    coded = encode_bytes(source, tmp_path)
    assert not has_trellis(span_of(coded))
    layout = layout_of(coded)
    assert set(layout.kinds[coded_span(layout, "a")[1]].tolist()) == {CODED}
    assert decode_bytes(coded) == source


@pytest.mark.parametrize("type_name", ["Q8_0", "Q6_K"])
def test_a_bit_less(type_name: str, tmp_path: Path, without_trellis: pytest.MonkeyPatch) -> None:
    """Trellis codes take about a bit a weight less than the same codes coded as they are."""
    shape = (512, 1024)
    source = gguf_of(type_name, shape, shared_tensor(type_name, shape, np.random.default_rng(84), width=6.0, trellis=True))
    plain = encode_bytes(source, tmp_path)
    assert plan_of(plain).coder == SHARED
    assert not has_trellis(span_of(plain))
    without_trellis.undo()
    coded = encode_bytes(source, tmp_path)
    assert has_trellis(span_of(coded))
    saved_bits = 8 * (payload_bytes(plain) - payload_bytes(coded)) / (shape[0] * shape[1])
    assert 0.97 < saved_bits < 1.03
    assert decode_bytes(coded) == source


def test_reports(tmp_path: Path, without_trellis: pytest.MonkeyPatch) -> None:
    """The entropy is that of the indices, in a file, an estimate and a sample."""
    shape = (576, 512)
    data = shared_tensor("Q8_0", shape, np.random.default_rng(85), width=8.0, trellis=True)
    codes = split(TYPE_BY_NAME["Q8_0"].type_id, data, shape).planes["codes"].reshape(512, 576).view(np.int8)

    def entropy(symbols: np.ndarray) -> float:
        p = np.unique(symbols, return_counts=True)[1] / symbols.size
        return -float((p * np.log2(p)).sum())

    def reports() -> list[TensorReport]:
        encode_bytes(gguf_of("Q8_0", shape, data), tmp_path)
        estimated = inspect_file(tmp_path / "sample.gguf", estimate=True, threads=1)
        found = [inspect_file(tmp_path / "sample.gguf.lw"), estimated, inspect_file(tmp_path / "sample.gguf")]
        return [report.tensors[0] for report in found]

    plain = reports()
    assert [r.is_trellis for r in plain] == [False, False, False]
    assert plain[0].entropy_bits == pytest.approx(entropy(codes), abs=0.002)
    without_trellis.undo()
    measured, estimated, _ = reports()
    assert (measured.is_trellis, estimated.is_trellis) == (True, True)
    assert measured.entropy_bits == estimated.entropy_bits == pytest.approx(entropy(codes >> 1), abs=0.002)
    assert measured.payload_bpw == estimated.payload_bpw
    assert measured.payload_bpw is not None
    assert measured.payload_bpw < measured.entropy_bits
    assert measured.coded_bytes is not None
    assert estimated.coded_bytes is not None
    assert abs(measured.coded_bytes - estimated.coded_bytes) < measured.coded_bytes // 50


def test_facts_of_a_report(tmp_path: Path) -> None:
    """Histograms are those of the codes, entropies those of what is coded."""
    shape = (256, 192)
    type_id = TYPE_BY_NAME["Q6_K"].type_id
    data = shared_tensor("Q6_K", shape, np.random.default_rng(96), width=6.0, trellis=True)
    encode_bytes(gguf_of("Q6_K", shape, data), tmp_path)
    with TensorExaminer(tmp_path / "sample.gguf", None) as examiner:
        (facts,) = examiner.examine(tmp_path / "sample.gguf.lw", with_errors=False)
    codes = split(type_id, data, shape).planes["codes"].ravel()
    assert facts.first_code == codes.min()
    assert facts.counts == np.bincount(codes)[codes.min() :].tolist()
    assert facts.entropy_bits == inspect_file(tmp_path / "sample.gguf.lw").tensors[0].entropy_bits
    assert facts.entropy_bits == pytest.approx(count_entropy(np.bincount(codes >> 1)), abs=0.002)


def test_entropy_of_a_sample(tmp_path: Path) -> None:
    """Where only the first rows are looked at, the entropy is that of the indices if the tensor would be coded by them."""
    rng = np.random.default_rng(86)
    data = shared_tensor("Q8_0", (256, 128), rng, width=8.0, trellis=True)
    row_bytes = len(data) // 128
    for n_rows, expected in [(128, 1), (127, 0)]:
        (tmp_path / "sample.gguf").write_bytes(gguf_of("Q8_0", (256, n_rows), data[: n_rows * row_bytes]))
        found = inspect_file(tmp_path / "sample.gguf").tensors[0].entropy_bits
        codes = split(TYPE_BY_NAME["Q8_0"].type_id, data[: 64 * row_bytes], (256, 64)).planes["codes"].ravel()
        p = np.unique(codes.view(np.int8) >> expected, return_counts=True)[1] / codes.size
        assert found == pytest.approx(-float((p * np.log2(p)).sum()), abs=0.002)


@pytest.mark.parametrize("name", ["zeros", "even", "too few odd codes"])
def test_codes_that_obey_by_chance(name: str, tmp_path: Path) -> None:
    """Zeros obey the trellis, and so do multiples of four; nothing is gained by calling them trellis codes."""
    shape = (64, 256)
    rng = np.random.default_rng(87)
    data = shared_tensor("Q8_0", shape, rng, trellis=True)
    blocks = np.frombuffer(data, np.uint8).reshape(256, 2, 34).copy()
    if name == "zeros":
        blocks[:, :, 2:] = 0
    elif name == "even":
        blocks[:, :, 2:] = 4 * rng.integers(-3, 4, (256, 2, 32)).astype(np.int8).view(np.uint8)
    else:
        blocks[:, :, 18:] = 0
    coder = tensor_coder(TYPE_BY_NAME["Q8_0"].type_id, 64)
    assert shared_rows.trellis_indices(coder, coder.split(blocks.reshape(256, -1))) is None
    source = gguf_of("Q8_0", shape, blocks.tobytes())
    coded = encode_bytes(source, tmp_path)
    assert not has_trellis(span_of(coded))
    assert decode_bytes(coded) == source


@pytest.mark.parametrize("type_name", ["Q8_0", "Q6_K"])
@pytest.mark.parametrize("broken", [[2], [1, 2, 5], [6]])
def test_row_groups_that_break_the_rule(
    type_name: str, broken: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the sample obeys the trellis, row groups that do not are stored as they are, and not counted."""
    shape = (256, 64 * 6 + 17)
    type_id = TYPE_BY_NAME[type_name].type_id
    data = shared_tensor(type_name, shape, np.random.default_rng(88), width=4.0, trellis=True)

    def flip(codes: np.ndarray) -> np.ndarray:
        rows = codes.reshape(shape[1], -1).copy()
        for g in broken:
            rows[64 * g + 11, 30] ^= 1
        return rows.reshape(codes.shape)

    source = gguf_of(type_name, shape, change_plane(type_id, data, shape, codes=flip))
    coded = encode_bytes(source, tmp_path)
    assert plan_of(coded).coder == SHARED
    assert not has_trellis(span_of(coded))  # all of so small a tensor is the sample
    row_bytes = len(data) // shape[1]
    monkeypatch.setattr(shared_rows, "SAMPLE_BYTES", 2 * 64 * row_bytes)
    assert shared_rows.sample_groups(shape[1], row_bytes) == [0, 192]
    coded = encode_bytes(source, tmp_path)
    assert has_trellis(span_of(coded))
    layout = layout_of(coded)
    expected = [RAW if g in broken else CODED for g in range(7)]
    assert layout.kinds[coded_span(layout, "a")[1]].tolist() == expected
    check_all_ways(source, coded, tmp_path, monkeypatch)
    estimated = inspect_file(tmp_path / "sample.gguf", estimate=True, threads=1)
    assert estimated.coded_bytes is not None
    assert abs(estimated.coded_bytes - len(coded)) < len(coded) // 25
    assert estimated.tensors[0].entropy_bits == pytest.approx(inspect_file(tmp_path / "sample.gguf.lw").tensors[0].entropy_bits)


def test_nothing_is_counted_of_row_groups_that_break_the_rule() -> None:
    data = np.frombuffer(shared_tensor("Q8_0", (96, 200), np.random.default_rng(89), trellis=True), np.uint8).reshape(200, -1)
    coder = tensor_coder(TYPE_BY_NAME["Q8_0"].type_id, 96, form=0)  # of whole codes
    shared = shared_rows.find_shared_rows(coder, data)
    assert shared is not None
    assert shared.is_trellis
    broken = data.copy()
    broken[70, 5] ^= 1

    def counts_of(packed: np.ndarray) -> SharedCounts:
        counts = coder.new_shared_counts(shared)
        coder.count_shared(packed, counts)
        return counts

    found, expected = counts_of(broken), counts_of(np.concatenate([data[:64], data[128:]]))
    assert (found.raw_rows, expected.raw_rows) == (64, 0)
    assert np.array_equal(found.cells, expected.cells)
    assert np.array_equal(found.sides, expected.sides)
    found.add(found)
    assert found.raw_rows == 128
    nothing = counts_of(broken[64:128])
    assert (nothing.raw_rows, nothing.cells.sum(), nothing.sides.sum()) == (64, 0, 0)


@pytest.mark.parametrize("type_name", ["Q8_0", "Q6_K"])
def test_row_groups_decode_alone(type_name: str, tmp_path: Path) -> None:
    shape = (256, 300)
    data = shared_tensor(type_name, shape, np.random.default_rng(90), n_references=3, doubled=0.1, trellis=True)
    coded = encode_bytes(gguf_of(type_name, shape, data), tmp_path)
    assert has_trellis(span_of(coded))
    row_bytes = len(data) // 300
    with CodedFile(tmp_path / "sample.gguf.lw") as file:
        for first, last in [(0, 1), (63, 65), (64, 128), (130, 131), (256, 300), (299, 300), (10, 290)]:
            assert file.get_rows("a", first, last).tobytes() == data[first * row_bytes : last * row_bytes]


def test_preset_unit_has_no_trellis(tmp_path: Path) -> None:
    """Lockstep row groups hold the codes as they are."""
    shape = (256, 192)
    source = gguf_of("Q8_0", shape, shared_tensor("Q8_0", shape, np.random.default_rng(91), trellis=True))
    coded = encode_bytes(source, tmp_path, preset="unit")
    assert plan_of(coded).coder == HUFFMAN
    layout = layout_of(coded)
    assert set(layout.kinds[coded_span(layout, "a")[1]].tolist()) == {LOCKSTEP}
    assert decode_bytes(coded) == source


def test_other_tensors_keep_their_plans(tmp_path: Path, without_trellis: pytest.MonkeyPatch) -> None:
    """Shared rows without trellis codes are coded as they were before there were any."""
    shape = (256, 192)
    source = gguf_of("Q8_0", shape, shared_tensor("Q8_0", shape, np.random.default_rng(92), doubled=0.1))
    before = encode_bytes(source, tmp_path)
    without_trellis.undo()
    assert encode_bytes(source, tmp_path) == before


# Hostile files.


def changed_plan(head: Head, is_trellis: bool) -> Head:
    i = next(i for i, s in enumerate(head.spans) if s.plan is not None)
    plan = head.spans[i].plan
    assert plan is not None
    assert plan.shared is not None
    spans = list(head.spans)
    spans[i] = replace(spans[i], plan=replace(plan, shared=replace(plan.shared, is_trellis=is_trellis)))
    return Head(spans, head.tensors, head.table_sets)


def test_resealed_head(tmp_path: Path) -> None:
    """Trellis codes of a type with several codes to a symbol are refused."""
    shape = (256, 192)
    source = gguf_of("Q4_K", shape, shared_tensor("Q4_K", shape, np.random.default_rng(93), width=1.0))
    parts = Parts.of(encode_bytes(source, tmp_path))
    parts.head = coded_file.pack_head(changed_plan(parts.unpack(), True))
    with pytest.raises(FormatError, match="trellis codes of a type with several codes"):
        decode_bytes(parts.seal())


@pytest.mark.parametrize("trellis", [False, True])
def test_the_other_coder(trellis: bool, tmp_path: Path) -> None:
    """Codes taken for indices, and the other way round: the checksum tells."""
    shape = (64, 192)
    source = gguf_of("Q8_0", shape, shared_tensor("Q8_0", shape, np.random.default_rng(94), trellis=trellis))
    parts = Parts.of(encode_bytes(source, tmp_path))
    head = parts.unpack()
    parts.head = coded_file.pack_head(changed_plan(head, not trellis))
    assert parts.head != coded_file.pack_head(head)
    with pytest.raises(LazyWeightsError) as caught:
        decode_bytes(parts.seal())
    assert (caught.value.tensor, caught.value.row_group) == ("a", 0)


def test_made_up_codes_obey() -> None:
    """The helper of these tests starts anew where row groups do."""
    indices = np.random.default_rng(95).integers(-5, 6, (280, 7))
    codes = trellis_codes(indices, 140)
    for first in (0, 64, 128, 140, 204, 268):
        assert not (codes[first] & 1).any()
    assert np.array_equal(codes >> 1, indices)
