"""Tensors whose rows share their scales: found, coded near what an ideal coder takes, decoded in every way."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lazyweights.blocks import TYPE_BY_NAME, split
from lazyweights.container import coded_file, shared_decode, shared_groups, shared_rows
from lazyweights.container.coded_file import CodedSpan, Head
from lazyweights.container.decoder import verify_file
from lazyweights.container.inspect import inspect_file
from lazyweights.container.reader import CodedFile
from lazyweights.container.stream_layout import STREAM_LAYOUTS
from lazyweights.container.tensor_coder import HUFFMAN, RANS, SHARED, HalfMode, tensor_coder
from lazyweights.errors import FormatError, LazyWeightsError
from tests.container import plain_decoder
from tests.container.coded_samples import (
    Parts,
    coded_span,
    decode_bytes,
    encode_bytes,
    layout_of,
    scalar_decode_shared,
    shared_tensor,
    tensor_bytes,
    type_label,
)
from tests.make_gguf import build_gguf

SHARING = tuple(type_id for type_id, layout in STREAM_LAYOUTS.items() if layout.may_share_rows)
UNIT_BYTES = 16  # entry of the unit table, padding


def gguf_of(type_name: str, shape: tuple[int, ...], data: bytes) -> bytes:
    return build_gguf([("a", TYPE_BY_NAME[type_name].type_id, shape, data)])


def span_of(coded: bytes) -> CodedSpan:
    return coded_span(layout_of(coded), "a")[0]


def plan_of(coded: bytes) -> Any:
    plan = span_of(coded).plan
    assert plan is not None
    return plan


def payload_bytes(coded: bytes) -> int:
    layout = layout_of(coded)
    return int(layout.sizes[coded_span(layout, "a")[1]].sum())


def check_all_ways(source: bytes, coded: bytes, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode from a stream, by the scalar kernels, and by the decoder that was written from the document."""
    assert decode_bytes(coded) == source
    verify_file(folder / "sample.gguf.lw", against=folder / "sample.gguf", threads=2)
    with monkeypatch.context() as patched:
        for name, function in scalar_decode_shared().items():
            patched.setattr(shared_decode, name, function)
        assert decode_bytes(coded) == source
    assert plain_decoder.decode(coded) == source


@pytest.mark.parametrize("type_id", SHARING, ids=type_label)
def test_every_type_with_scales(type_id: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng([50, type_id])
    name = type_label(type_id)
    shape = (256, 133)
    source = gguf_of(name, shape, shared_tensor(name, shape, rng, n_references=2, doubled=0.05, width=1.0))
    coded = encode_bytes(source, tmp_path)
    plan = plan_of(coded)
    assert plan.coder == SHARED
    assert len(plan.shared.references) == 2
    check_all_ways(source, coded, tmp_path, monkeypatch)


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_K"])
@pytest.mark.parametrize("n_rows", [1, 2, 63, 64, 127, 128, 129, 191, 192, 257])
@pytest.mark.parametrize(("n_references", "doubled"), [(1, 0.0), (1, 0.28), (5, 0.01)])
def test_rows(
    type_name: str, n_rows: int, n_references: int, doubled: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row counts that are no multiple of 64, one row, one block; few rows do not pay for what they share."""
    rng = np.random.default_rng([51, n_rows, n_references])
    shape = (TYPE_BY_NAME[type_name].block_size, n_rows)
    data = shared_tensor(type_name, shape, rng, n_references=n_references, doubled=doubled, width=1.0)
    source = gguf_of(type_name, shape, data)
    coded = encode_bytes(source, tmp_path)
    coders = {s.plan.coder for s in layout_of(coded).head.spans if s.plan is not None}
    assert coders <= ({SHARED} if n_rows >= shared_rows.MIN_ROWS else {HUFFMAN})
    check_all_ways(source, coded, tmp_path, monkeypatch)


@pytest.mark.parametrize("columns", [32, 96, 576])
def test_experts(columns: int, tmp_path: Path) -> None:
    """Row groups end with each outer index, which the rows of a sample do not."""
    shape = (columns, 70, 3)
    source = gguf_of("Q8_0", shape, shared_tensor("Q8_0", shape, np.random.default_rng(52), doubled=0.1))
    coded = encode_bytes(source, tmp_path)
    assert decode_bytes(coded) == source
    assert {s.plan.coder for s in layout_of(coded).head.spans if s.plan} <= {HUFFMAN, SHARED}


def test_sixteen_references_and_more(tmp_path: Path) -> None:
    for n in (16, 40):
        shape = (256, 640)
        source = gguf_of("Q8_0", shape, shared_tensor("Q8_0", shape, np.random.default_rng([53, n]), n_references=n))
        coded = encode_bytes(source, tmp_path)
        plan = plan_of(coded)
        assert (plan.coder == SHARED) == (n == 16)
        if n == 16:
            assert len(plan.shared.references) == 16
        assert decode_bytes(coded) == source


def ideal_bytes(doubled: np.ndarray, codes: np.ndarray, widths: np.ndarray) -> float:
    """What a coder takes that knows how wide each code spreads, and how often a scale is doubled."""
    edges = np.arange(-127, 127) + 0.5
    bits = 0.0
    for width in np.unique(widths):
        of_width = codes[widths == width]
        cdf = [0.0, *(0.5 * (1 + math.erf(edge / (width * math.sqrt(2)))) for edge in edges.tolist()), 1.0]
        p = np.maximum(np.diff(cdf), 1e-9)
        bits -= float(np.log2(p[of_width + 127]).sum())
    share = doubled.mean()
    if 0 < share < 1:
        bits -= doubled.size * float(share * np.log2(share) + (1 - share) * np.log2(1 - share))
    return bits / 8


@pytest.mark.parametrize("share", [0.0, 0.28])
def test_size_is_near_the_ideal(share: float, tmp_path: Path) -> None:
    rng = np.random.default_rng(54)
    rows, columns = 2048, 576
    of_column = 4 * 2.0 ** (rng.integers(0, 24, columns) / 8)
    of_row = 2.0 ** (rng.integers(-4, 5, (rows, 1)) / 4)
    doubled = rng.random((rows, columns // 32)) < share
    widths = of_column * of_row / 2.0 ** np.repeat(doubled, 32, axis=1)
    codes = np.clip(np.rint(rng.standard_normal((rows, columns)) * widths), -127, 127).astype(np.int64)
    blocks = np.zeros((rows, columns // 32, 34), np.uint8)
    scales = (0x2000 + 0x80 * np.arange(columns // 32) + 0x400 * doubled).astype("<u2")
    blocks[:, :, :2] = scales[:, :, None].view(np.uint8)
    blocks[:, :, 2:] = codes.astype(np.int8).view(np.uint8).reshape(rows, -1, 32)
    source = gguf_of("Q8_0", (columns, rows), blocks.tobytes())
    coded = encode_bytes(source, tmp_path)
    assert decode_bytes(coded) == source
    ideal = ideal_bytes(doubled, codes, widths)
    groups = rows // 64
    # Three bytes of each lane's state are lost, some of which the last codes fill; a row's level takes half a byte. That all
    # widths within a third of an octave have one table is most of the rest.
    assert payload_bytes(coded) < 1.008 * ideal + groups * 96 + rows // 2
    assert len(coded) < payload_bytes(coded) + groups * UNIT_BYTES + 6000


def test_scales_cost_next_to_nothing(tmp_path: Path) -> None:
    """A tensor with shared sub-scales and mins takes what its codes take."""
    rng = np.random.default_rng(55)
    shape = (1024, 512)
    data = shared_tensor("Q4_K", shape, rng, width=2.0)
    coded = encode_bytes(gguf_of("Q4_K", shape, data), tmp_path)
    codes = split(TYPE_BY_NAME["Q4_K"].type_id, data, shape).planes["codes"]
    counts = np.bincount(codes.ravel(), minlength=16)
    p = counts[counts > 0] / counts.sum()
    order_0 = -float((p * np.log2(p)).sum()) * codes.size / 8
    assert payload_bytes(coded) < order_0  # the contexts of codes save more than all scales and states take


def test_row_groups_decode_alone(tmp_path: Path) -> None:
    shape = (96, 300)
    data = shared_tensor("Q8_0", shape, np.random.default_rng(56), n_references=3, doubled=0.1)
    encode_bytes(gguf_of("Q8_0", shape, data), tmp_path)
    row_bytes = len(data) // 300
    with CodedFile(tmp_path / "sample.gguf.lw") as file:
        for first, last in [(0, 1), (63, 65), (64, 128), (130, 131), (256, 300), (299, 300), (10, 290)]:
            assert file.get_rows("a", first, last).tobytes() == data[first * row_bytes : last * row_bytes]


def test_quantizers_of_blocks_are_left_alone(tmp_path: Path) -> None:
    """Scales that are fitted to each block are not shared, whatever the type."""
    rng = np.random.default_rng(57)
    for type_id in STREAM_LAYOUTS:
        shape = (256, 192)
        name = type_label(type_id)
        coded = encode_bytes(gguf_of(name, shape, tensor_bytes(type_id, shape, rng)), tmp_path)
        assert all(s.plan is None or s.plan.coder in (HUFFMAN, RANS) for s in layout_of(coded).head.spans), name


def test_preset_unit_shares_nothing(tmp_path: Path) -> None:
    shape = (256, 192)
    source = gguf_of("Q8_0", shape, shared_tensor("Q8_0", shape, np.random.default_rng(58)))
    coded = encode_bytes(source, tmp_path, preset="unit")
    assert plan_of(coded).coder == HUFFMAN
    assert decode_bytes(coded) == source


def test_raw_row_groups(tmp_path: Path) -> None:
    """Row groups that do not get smaller are stored raw: here those whose codes are noise."""
    rng = np.random.default_rng(59)
    shape = (64, 640)
    data = bytearray(shared_tensor("Q8_0", shape, rng, width=1.0))
    blocks = np.frombuffer(data, np.uint8).reshape(640, 2, 34)
    blocks[64:128] = rng.integers(0, 256, (64, 2, 34))
    source = gguf_of("Q8_0", shape, bytes(data))
    coded = encode_bytes(source, tmp_path)
    layout = layout_of(coded)
    assert layout.kinds[coded_span(layout, "a")[1]].tolist() == [2, 0, *8 * [2]]
    assert decode_bytes(coded) == source


def test_estimate_is_near_the_size(tmp_path: Path) -> None:
    shape = (576, 512)
    source = gguf_of("Q8_0", shape, shared_tensor("Q8_0", shape, np.random.default_rng(60), n_references=2, doubled=0.05))
    coded = encode_bytes(source, tmp_path)
    estimated = inspect_file(tmp_path / "sample.gguf", estimate=True, threads=1)
    measured = inspect_file(tmp_path / "sample.gguf.lw")
    assert estimated.coded_bytes is not None
    assert abs(estimated.coded_bytes - len(coded)) < len(coded) // 50
    assert measured.tensors[0].entropy_bits == estimated.tensors[0].entropy_bits
    assert measured.tensors[0].payload_bpw == estimated.tensors[0].payload_bpw


def test_files_do_not_depend_on_threads(tmp_path: Path) -> None:
    rng = np.random.default_rng(61)
    tensors = [
        (f"{k}", TYPE_BY_NAME["Q8_0"].type_id, (576, 700), shared_tensor("Q8_0", (576, 700), rng, doubled=0.02 * k))
        for k in range(3)
    ]
    source = build_gguf(tensors)
    assert encode_bytes(source, tmp_path, threads=1) == encode_bytes(source, tmp_path, threads=3)


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_references(share: float) -> None:
    """As many references are found as there are, whichever blocks are doubled."""
    rng = np.random.default_rng(62)
    coder = tensor_coder(TYPE_BY_NAME["Q8_0"].type_id, 576)
    for n in (1, 4, 16):
        data = shared_tensor("Q8_0", (576, 1024), rng, n_references=n, doubled=share)
        found = shared_rows.find_shared_rows(coder, np.frombuffer(data, np.uint8).reshape(1024, -1))
        assert found is not None
        assert len(found.references) == n
        sides = shared_rows.side_rows(coder, coder.split(np.frombuffer(data, np.uint8).reshape(1024, -1)))
        different = np.min([(sides != row).sum(axis=1) for row in found.references], axis=0)
        assert different.sum() <= (share + 0.05) * sides.size // 2


def test_kernels_that_look_for_references() -> None:
    rng = np.random.default_rng(63)
    rows = rng.integers(0, 3, (20, 31)).astype(np.uint8)
    different = (rows[:, None] != rows[None]).sum(axis=2)
    found = np.empty((20, 20), np.int64)
    shared_groups.count_different(rows, rows, found)
    np.testing.assert_array_equal(found, different)
    assert shared_groups.least_different(rows) == int((different + 99 * np.eye(20, dtype=np.int64)).min(axis=1).sum())
    labels = rng.integers(0, 3, 20)
    modes = np.empty((3, 31), np.uint8)
    shared_groups.fill_modes(rows, labels, modes)
    expected = [[np.bincount(rows[labels == k, column]).argmax() for column in range(31)] for k in range(3)]
    assert modes.tolist() == expected


# Hostile plans.


def with_shared(head: Head, **fields: Any) -> Head:
    i = next(i for i, s in enumerate(head.spans) if s.plan is not None and s.plan.coder == SHARED)
    plan = head.spans[i].plan
    assert plan is not None
    assert plan.shared is not None
    shared = {k: v for k, v in fields.items() if k in ("references", "columns", "row_base", "row_table")}
    others = {k: v for k, v in fields.items() if k not in shared}
    spans = list(head.spans)
    spans[i] = replace(spans[i], plan=replace(plan, shared=replace(plan.shared, **shared), **others))
    return Head(spans, head.tensors, head.table_sets)


ATTACKS: dict[str, Any] = {
    "no references": lambda plan: {"references": plan.shared.references[:0]},
    "seventeen references": lambda plan: {"references": np.repeat(plan.shared.references[:1], 17, axis=0)},
    "references too short": lambda plan: {"references": plan.shared.references[:, :-1]},
    "a class of 32": lambda plan: {"columns": np.full_like(plan.shared.columns, 32)},
    "columns too few": lambda plan: {"columns": plan.shared.columns[:-1]},
    "a base of 256": lambda _: {"row_base": 256},
    "a row table that is not there": lambda _: {"row_table": 254},
    "raw low parts": lambda plan: {"modes": (HalfMode(0, 0),), "side_tables": plan.side_tables[:1], "bases": (0,)},
    "nothing shared": lambda _: {"coder": RANS},
}


@pytest.mark.parametrize("name", ATTACKS)
def test_resealed_head(name: str, tmp_path: Path) -> None:
    shape = (64, 192)
    source = gguf_of("Q8_0", shape, shared_tensor("Q8_0", shape, np.random.default_rng(63)))
    parts = Parts.of(encode_bytes(source, tmp_path))
    head = parts.unpack()
    plan = next(s.plan for s in head.spans if s.plan is not None)
    parts.head = coded_file.pack_head(with_shared(head, **ATTACKS[name](plan)))
    with pytest.raises(FormatError):
        decode_bytes(parts.seal())


def test_flipped_bits_of_what_is_shared(tmp_path: Path) -> None:
    """Every bit of the plan, under a right checksum: a typed error or the right bytes."""
    shape = (32, 128)
    source = gguf_of("Q8_0", shape, shared_tensor("Q8_0", shape, np.random.default_rng(64), n_references=2, doubled=0.1))
    whole = Parts.of(encode_bytes(source, tmp_path))
    rng = np.random.default_rng(65)
    n_errors = 0
    for bit in rng.choice(8 * len(whole.head), 600, replace=False).tolist():
        head = bytearray(whole.head)
        head[bit >> 3] ^= 1 << (bit & 7)
        parts = replace(whole, head=bytes(head))
        try:
            assert decode_bytes(parts.seal()) == source
        except LazyWeightsError:
            n_errors += 1
    assert n_errors > 100
