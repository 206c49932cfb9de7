"""Hostile payloads under right checksums: what they declare costs no memory, and nonsense never crashes the kernels."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from lazyweights.blocks import TYPE_BY_NAME
from lazyweights.container import batch_decode, coded_file, group_decode, shared_decode, unit_checksums, unit_codec
from lazyweights.container.coded_file import (
    CODED,
    CODED_UNFORCED,
    FILTERED,
    LOCKSTEP,
    ZSTD,
    CodedSpan,
    Head,
    TableSet,
    TensorEntry,
)
from lazyweights.container.decoder import decode_stream, verify_file
from lazyweights.container.numbers import NumberReader, pack_numbers
from lazyweights.container.tensor_coder import HUFFMAN, RANS, SHARED, TensorPlan
from lazyweights.errors import ChecksumError, FormatError, LazyWeightsError
from tests.container.coded_samples import (
    CODABLE,
    Parts,
    coded_span,
    decode_bytes,
    encode_bytes,
    layout_of,
    scalar_decode_batch,
    scalar_decode_groups,
    scalar_decode_shared,
    shared_tensor,
    tensor_bytes,
    type_label,
)
from tests.container.damage import (
    CountCases,
    Sample,
    error_of,
    first_coded,
    from_file,
    nonsense,
    streamed,
    units_of_kind,
)
from tests.make_gguf import build_gguf

PRESETS = ("dense", "unit")


# Memory: nothing is allocated that the file does not justify.


def peak_bytes(call: Callable[[], Any]) -> int:
    """Return the most that Python and numpy held at a time while `call` ran."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def zstd_frame(content_size: int) -> bytes:
    """Return a frame that declares a content size and holds one raw block of a byte."""
    block = (1 | 1 << 3).to_bytes(3, "little") + b"x"
    return b"\x28\xb5\x2f\xfd\xe0" + content_size.to_bytes(8, "little") + block


def zstd_bomb(n_bytes: int) -> bytes:
    """Return a frame without content size that decompresses to zeros."""
    packer = zstandard.ZstdCompressor(level=1, write_content_size=False).compressobj()
    part = bytes(1 << 20)
    return b"".join(packer.compress(part) for _ in range(n_bytes >> 20)) + packer.flush()


MEMORY_LIMIT = 32 << 20
"""Well above what decoding the sample takes, far below what the attacks ask for."""


@pytest.mark.parametrize("declared", [1 << 20, 1 << 28, 1 << 30, (1 << 32) - 1])
def test_memory_for_a_head_that_declares_much(dense: Sample, declared: int) -> None:
    parts = Parts.of(dense.coded)
    honest = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    without_size = honest.compress(parts.head) + honest.flush()
    for packed in (None, without_size, zstd_frame(declared), zstd_frame(1 << 40), zstd_frame((1 << 62) + 1)):
        coded = parts.seal(packed_head=packed, head_raw_bytes=declared)
        errors: list[LazyWeightsError | None] = []
        peak = peak_bytes(lambda coded=coded, errors=errors: errors.append(streamed(coded, dense.source)))
        assert isinstance(errors[0], FormatError)
        assert peak < MEMORY_LIMIT


def test_memory_for_a_head_that_is_a_bomb(dense: Sample) -> None:
    """A small frame of many zeros: the head of so small a file cannot be so large."""
    bomb = zstd_bomb(1 << 28)
    assert len(bomb) < 1 << 16
    coded = Parts.of(dense.coded).seal(packed_head=bomb, head_raw_bytes=1 << 28)
    errors: list[LazyWeightsError | None] = []
    peak = peak_bytes(lambda: errors.append(streamed(coded, dense.source)))
    assert isinstance(errors[0], FormatError)
    assert peak < MEMORY_LIMIT


@pytest.mark.parametrize(
    "frame",
    [zstd_frame(1 << 28), zstd_frame(1 << 40), zstd_frame((1 << 62) + 1), zstd_bomb(1 << 28)],
    ids=["2**28", "2**40", "2**62", "bomb"],
)
def test_memory_for_a_verbatim_chunk_that_declares_much(dense: Sample, frame: bytes) -> None:
    parts = Parts.of(dense.coded)
    span = dense.layout.head.spans[-1]
    assert not span.is_coded
    assert len(frame) < span.n_bytes
    parts.kinds[-1], parts.payloads[-1] = ZSTD, frame
    errors: list[LazyWeightsError | None] = []
    coded = parts.seal()
    peak = peak_bytes(lambda: errors.append(streamed(coded, dense.source)))
    assert isinstance(errors[0], FormatError)
    assert peak < MEMORY_LIMIT


def head_of(spans: list[CodedSpan], tensors: list[TensorEntry], like: Head) -> bytes:
    return coded_file.pack_head(Head(spans, tensors, like.table_sets))


@pytest.mark.parametrize("size", [1 << 40, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_memory_for_a_source_that_is_huge(dense: Sample, size: int) -> None:
    """A source of 2**62 bytes in one span, coded or verbatim: it would need more units than the file has."""
    parts = Parts.of(dense.coded)
    head = parts.unpack()
    coded = head.spans[first_coded(head)]
    rows = size // coded.row_bytes
    whole = rows * coded.row_bytes
    spans = [
        [CodedSpan(size)],
        [replace(coded, n_bytes=whole, shape=(256, rows)), CodedSpan(size - whole)],
        [replace(coded, n_bytes=whole, shape=(256, 1, rows)), CodedSpan(size - whole)],
    ]
    for listed in spans:
        tensors = [TensorEntry(coded.name, coded.type_id, s.shape, 0, s.n_bytes, 0) for s in listed if s.is_coded]
        if not tensors:
            tensors = [TensorEntry("v", 24, (size - 1,), size - 1, 1, 0)]
        parts.head = head_of(listed, tensors, head)
        errors: list[LazyWeightsError | None] = []
        sealed = parts.seal(source_size=size)
        peak = peak_bytes(lambda sealed=sealed, errors=errors: errors.append(streamed(sealed, dense.source)))
        assert isinstance(errors[0], FormatError)
        assert peak < MEMORY_LIMIT
        assert all(isinstance(error, FormatError) for error in from_file(dense, sealed))


# The GGUF header, filtered.


def filtered_payload(recipe: list[int], *streams: bytes) -> bytes:
    """Return a payload as `header_filter` describes it; streams that are left out are empty."""
    raw = [pack_numbers(recipe), *streams, *[b""] * (5 - len(streams))]
    packed = [zstandard.ZstdCompressor(level=3).compress(s) for s in raw]
    sizes = [n for r, p in zip(raw, packed, strict=True) for n in (len(r), len(p))]
    return pack_numbers(sizes) + b"".join(packed)


def with_first_payload(sample: Sample, payload: bytes) -> bytes:
    parts = Parts.of(sample.coded)
    assert parts.kinds[0] == FILTERED
    parts.payloads[0] = payload
    return parts.seal()


STRINGS, WORDS = 0, 1

FILTERED_ATTACKS = {
    "nothing": b"",
    "one byte": b"\x00",
    "sizes of 2**63": pack_numbers([1 << 62] * 12),
    "no arrays": filtered_payload([0]),
    "no recipe": filtered_payload([]),
    "2**62 arrays": filtered_payload([1 << 62]),
    "more arrays than there are": filtered_payload([3, 0, WORDS, 1], b"", b"", b"", b"", bytes(4)),
    "an unknown kind of array": filtered_payload([1, 0, 2, 1]),
    "no strings": filtered_payload([1, 0, STRINGS, 0]),
    "no words": filtered_payload([1, 0, WORDS, 0]),
    "strings that are not there": filtered_payload([1, 0, STRINGS, 5]),
    "words that are not there": filtered_payload([1, 0, WORDS, 5]),
    "2**20 strings": filtered_payload([1, 0, STRINGS, 1 << 20], b"", bytes(1 << 20)),
    "long lengths that are not there": filtered_payload([1, 0, STRINGS, 2], b"", b"\xff\xff"),
    "strings of 2**32": filtered_payload([1, 0, STRINGS, 2], b"", b"\xff\xff", b"\xff" * 8),
    "characters that are not there": filtered_payload([1, 0, STRINGS, 2], b"", b"\x05\x05"),
    "a gap of 2**62": filtered_payload([1, 1 << 62, WORDS, 1], b"", b"", b"", b"", bytes(4)),
    "a gap that is not there": filtered_payload([1, 7, WORDS, 1], b"", b"", b"", b"", bytes(4)),
    "streams left over": filtered_payload([0], b"", b"\x05", b"", b"abc"),
    "a recipe left over": filtered_payload([0, 0, 0, 0]),
    "too many bytes": filtered_payload([0], bytes(1 << 20)),
}


@pytest.mark.parametrize("name", FILTERED_ATTACKS)
def test_filtered_header(dense: Sample, name: str, count_cases: CountCases) -> None:
    coded = with_first_payload(dense, FILTERED_ATTACKS[name])
    for error in [streamed(coded, dense.source), *from_file(dense, coded)[:2]]:
        assert isinstance(error, FormatError)
    count_cases("filtered headers", 1)


def test_filtered_header_with_changed_streams(dense: Sample, count_cases: CountCases) -> None:
    """Random changes of the streams before compression."""
    rng = np.random.default_rng(46)
    reader = NumberReader(Parts.of(dense.coded).payloads[0])
    sizes = [(reader.number(), reader.number()) for _ in range(6)]
    streams = [zstandard.ZstdDecompressor().decompress(reader.take(n), max_output_size=max(raw, 1)) for raw, n in sizes]
    reader.finish()
    n_cases = 400
    for _ in range(n_cases):
        changed = [bytearray(s) for s in streams]
        for _ in range(int(rng.integers(1, 4))):
            stream = changed[int(rng.choice([i for i, s in enumerate(changed) if s]))]
            at = int(rng.integers(len(stream)))
            how = int(rng.integers(4))
            if how == 0:
                stream[at] = int(rng.integers(256))
            elif how == 1:
                del stream[at : at + 3]
            elif how == 2:
                stream[at:at] = rng.bytes(int(rng.integers(1, 9)))
            elif stream:
                stream[at] ^= 1 << int(rng.integers(8))
        packed = [zstandard.ZstdCompressor(level=1).compress(bytes(s)) for s in changed]
        numbers = [n for s, p in zip(changed, packed, strict=True) for n in (len(s), len(p))]
        streamed(with_first_payload(dense, pack_numbers(numbers) + b"".join(packed)), dense.source)
    count_cases("filtered headers", n_cases)


def test_memory_for_a_filtered_header_that_declares_much(dense: Sample) -> None:
    for frame in (zstd_frame(1 << 28), zstd_frame(1 << 40), zstd_frame((1 << 62) + 1), zstd_bomb(1 << 28)[: 1 << 13]):
        for k in range(6):
            packed = [zstandard.ZstdCompressor().compress(b"") for _ in range(6)]
            packed[k] = frame
            payload = pack_numbers([n for p in packed for n in (1, len(p))]) + b"".join(packed)
            errors: list[LazyWeightsError | None] = []
            coded = with_first_payload(dense, payload)
            peak = peak_bytes(lambda coded=coded, errors=errors: errors.append(streamed(coded, dense.source)))
            assert isinstance(errors[0], FormatError)
            assert peak < MEMORY_LIMIT


# Payloads of nonsense.


@pytest.fixture(params=["default", "scalar"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run with the kernels of this CPU, and with the scalar ones."""
    if request.param == "scalar":
        monkeypatch.setattr(group_decode, "decode_groups", scalar_decode_groups())
        monkeypatch.setattr(batch_decode, "decode_batch", scalar_decode_batch())
        for name, function in scalar_decode_shared().items():
            monkeypatch.setattr(shared_decode, name, function)
    return str(request.param)


@pytest.fixture
def no_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups go through without a look at their checksums."""
    monkeypatch.setattr(unit_checksums, "HASH_ADDRESS", 0)  # no kernel compares them then
    monkeypatch.setattr(unit_codec, "_compare_checksums", lambda *_: None)


@pytest.mark.parametrize("type_id", CODABLE, ids=type_label)
@pytest.mark.usefixtures("no_checksums")
def test_nonsense_payloads(type_id: int, kernels: str, tmp_path: Path, count_cases: CountCases) -> None:
    """The kernels end, inside their arrays, with a typed error or as many bytes as there should be."""
    rng = np.random.default_rng([42, type_id])
    columns = 64 if type_id in (0, 1, 30) else 256
    shape = (columns, 70)
    source = build_gguf([("a", type_id, shape, tensor_bytes(type_id, shape, rng))])
    n_cases = 0
    for preset in PRESETS:
        coded = encode_bytes(source, tmp_path, preset=preset)
        layout = layout_of(coded)
        if not any(span.is_coded for span in layout.head.spans):
            continue
        _, units = coded_span(layout, "a")
        whole = Parts.of(coded)
        for i in range(24):
            parts = Parts.of(coded) if i == 0 else replace(whole, payloads=list(whole.payloads))
            for unit in range(units.start, units.stop):
                if rng.random() < 0.7:
                    parts.payloads[unit] = nonsense(parts.payloads[unit], rng, i % 4)
            sink = io.BytesIO()
            error = error_of(lambda parts=parts, sink=sink: decode_stream(io.BytesIO(parts.seal()), sink))
            if error is None:
                assert len(sink.getvalue()) == len(source)
            else:
                assert error.tensor == "a", error
                assert error.row_group is not None
            n_cases += 1
    count_cases(f"payloads of nonsense, {kernels} kernels", n_cases)


def test_nonsense_under_its_own_checksum(
    sample: Sample, monkeypatch: pytest.MonkeyPatch, count_cases: CountCases
) -> None:
    """Who seals nonsense gets nonsense, and still the SHA-256 of the source tells."""
    rng = np.random.default_rng(43)
    n_decoded = 0
    for _ in range(80):
        parts = Parts.of(sample.coded)
        unit = int(rng.choice(units_of_kind(sample.layout, CODED, CODED_UNFORCED, LOCKSTEP)))
        parts.payloads[unit] = nonsense(parts.payloads[unit], rng, 3)
        with monkeypatch.context() as patched:
            patched.setattr(unit_checksums, "HASH_ADDRESS", 0)  # no kernel compares them then
            patched.setattr(unit_codec, "_compare_checksums", lambda *_: None)
            try:
                found = decode_bytes(parts.seal())
            except LazyWeightsError:
                continue
        first = 0
        offset = 0
        for span in sample.layout.head.spans:
            for k in range(span.n_units):
                if first + k == unit:
                    parts.checksums[unit] = coded_file.checksum(found[offset : offset + span.unit_bytes(k)])
                offset += span.unit_bytes(k)
            first += span.n_units
        sealed = parts.seal()
        assert decode_bytes(sealed) == found
        if found != sample.source:
            n_decoded += 1
            with pytest.raises(ChecksumError, match="SHA-256"):
                verify_file(sample.write(sealed), threads=1)
    assert n_decoded > 10
    count_cases("nonsense under its own checksum", 80)


def nonsense_plan(plan: TensorPlan, tables: TableSet, rng: np.random.Generator) -> TensorPlan:
    """Return a valid plan with random tables and bases, and any coder that these allow."""
    with_freqs = np.flatnonzero(tables.freqs.any(axis=1))
    if plan.shared is not None:
        references = rng.integers(0, 256, (int(rng.integers(1, 17)), plan.shared.references.shape[1])).astype(np.uint8)
        columns = rng.integers(0, 32, plan.shared.columns.shape).astype(np.uint8)
        shared = replace(plan.shared, references=references, columns=columns, row_table=int(rng.choice(with_freqs)))
        return replace(
            plan, shared=shared, side_tables=rng.choice(with_freqs, plan.side_tables.shape).astype(np.uint8),
            cell_tables=rng.choice(with_freqs, plan.cell_tables.shape).astype(np.uint8),
        )
    coder = RANS if with_freqs.size and rng.random() < 0.5 else HUFFMAN
    cell_tables = with_freqs if coder == RANS else np.arange(len(tables.lengths))
    return replace(
        plan,
        side_tables=rng.integers(0, len(tables.lengths), plan.side_tables.shape).astype(np.uint8),
        cell_tables=rng.choice(cell_tables, plan.cell_tables.shape).astype(np.uint8),
        bases=tuple(rng.integers(0, 256, len(plan.bases)).tolist()),
        coder=coder,
    )


@pytest.mark.parametrize("type_name", ["Q4_K", "Q4_1", "Q8_0", "Q6_K", "Q4_0", "F32", "BF16", "F16"])
@pytest.mark.usefixtures("no_checksums")
def test_nonsense_plans(type_name: str, kernels: str, tmp_path: Path, count_cases: CountCases) -> None:
    """Valid plans that are not those of the payload: other tables, bases and coders."""
    type_id, shape = TYPE_BY_NAME[type_name].type_id, (256, 140)
    rng = np.random.default_rng([44, type_id])
    bf16 = TYPE_BY_NAME["BF16"].type_id
    source = build_gguf([(f"{i}", i, shape, tensor_bytes(i, shape, rng)) for i in {type_id, bf16}])
    parts = Parts.of(encode_bytes(source, tmp_path))
    head = parts.unpack()
    for _ in range(40):
        spans = [
            span if span.plan is None
            else replace(span, plan=nonsense_plan(span.plan, head.table_sets[span.plan.table_set], rng))
            for span in head.spans
        ]
        parts.head = coded_file.pack_head(Head(spans, head.tensors, head.table_sets))
        sink = io.BytesIO()
        error = error_of(lambda sink=sink: decode_stream(io.BytesIO(parts.seal()), sink))
        assert error is not None or len(sink.getvalue()) == len(source)
    count_cases(f"plans of nonsense, {kernels} kernels", 40)


@pytest.mark.parametrize(
    ("type_name", "trellis"),
    [*((name, False) for name in ("Q8_0", "Q4_K", "Q3_K", "Q5_0", "Q6_K")), *((name, True) for name in ("Q8_0", "Q5_1", "Q6_K"))],
)
@pytest.mark.usefixtures("no_checksums")
def test_nonsense_with_shared_rows(
    type_name: str, trellis: bool, kernels: str, tmp_path: Path, count_cases: CountCases
) -> None:
    """Payloads and plans of nonsense of tensors whose rows share their scales, with and without trellis codes."""
    type_id, shape = TYPE_BY_NAME[type_name].type_id, (256, 201)
    rng = np.random.default_rng([48, type_id])
    width = 1.0 if trellis else 0.5
    data = shared_tensor(type_name, shape, rng, n_references=2, doubled=0.1, width=width, trellis=trellis)
    source = build_gguf([("a", type_id, shape, data)])
    whole = Parts.of(encode_bytes(source, tmp_path))
    head = whole.unpack()
    i = first_coded(head, type_name)
    plan = head.spans[i].plan
    assert plan is not None
    assert plan.coder == SHARED
    assert plan.shared is not None
    assert plan.shared.is_trellis == trellis
    layout = layout_of(whole.seal())
    _, units = coded_span(layout, "a")
    for k in range(60):
        parts = replace(whole, payloads=list(whole.payloads))
        if k % 3 != 1:
            for unit in range(units.start, units.stop):
                if rng.random() < 0.7:
                    parts.payloads[unit] = nonsense(parts.payloads[unit], rng, k % 4)
        if k % 3:
            spans = list(head.spans)
            spans[i] = replace(spans[i], plan=nonsense_plan(plan, head.table_sets[plan.table_set], rng))
            parts.head = coded_file.pack_head(Head(spans, head.tensors, head.table_sets))
        sink = io.BytesIO()
        error = error_of(lambda parts=parts, sink=sink: decode_stream(io.BytesIO(parts.seal()), sink))
        assert error is not None or len(sink.getvalue()) == len(source)
    count_cases(f"nonsense with shared rows, {kernels} kernels", 60)
