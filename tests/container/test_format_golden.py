"""`docs/format.md` is what the program does: goldens both ways, a second decoder, each rule broken once.

`tests/make_goldens.py` writes the goldens and the generated blocks of the document; nothing here does.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from lazyweights import errors
from lazyweights.blocks import GGML_TYPES, TYPE_BY_NAME, plane_specs
from lazyweights.container import coded_file
from lazyweights.container.coded_file import CODED, CODED_UNFORCED, FILTERED, LOCKSTEP, RAW, ZSTD, Head, TableSet
from lazyweights.container.decoder import verify_file
from lazyweights.container.numbers import pack_number, pack_numbers
from lazyweights.container.stream_layout import (
    BY_LEVEL,
    BY_POSITION,
    BY_ROW,
    BY_ZERO_AND_LEVEL,
    FORCED_ABS_127,
    FORCED_MIN,
    FORCED_MIN_MAX,
    FORCED_NONE,
    SECOND_LAYOUTS,
    STREAM_LAYOUTS,
    WINDOW_LOW_BITS,
    WINDOWED,
    StreamLayout,
    newest_form,
)
from lazyweights.container.tensor_coder import HalfMode, TensorPlan
from lazyweights.errors import LazyWeightsError
from tests import make_goldens
from tests.container import plain_decoder
from tests.container.coded_samples import Parts, decode_bytes, encode_bytes, layout_of, mixed_gguf
from tests.container.plain_decoder import TypeRow

NAMES = tuple(make_goldens.SOURCES)
TEXT = make_goldens.FORMAT.read_text(encoding="utf-8")
MAX_GOLDEN_BYTES = 180_000
EARLIER = make_goldens.GOLDENS / "earlier"
"""Goldens as writers before this one made them. Nothing makes them again: they only have to decode."""


@functools.cache
def golden(name: str) -> bytes:
    """Return a golden; a missing one is a failure, never a new golden."""
    return make_goldens.golden_path(name).read_bytes()


@functools.cache
def source(name: str) -> bytes:
    return make_goldens.SOURCES[name].make()


# Goldens.


def without_frames(coded: bytes) -> list[Any]:
    """Return what a coded file holds apart from the bytes of zstd frames, which depend on the version of zstd."""
    parts = Parts.of(coded)
    units = [
        (checksum, None if kind in (RAW, ZSTD, FILTERED) else (kind, payload))
        for kind, checksum, payload in zip(parts.kinds, parts.checksums, parts.payloads, strict=True)
    ]
    return [parts.flags, parts.source_size, parts.sha256, parts.head, units, parts.trailer]


@pytest.mark.parametrize("name", NAMES)
def test_encoding_gives_the_golden(name: str) -> None:
    coded = make_goldens.encode(name)
    if make_goldens.zstd_version() == json.loads(make_goldens.MANIFEST.read_text())["zstd"]:
        assert coded == golden(name)
    assert without_frames(coded) == without_frames(golden(name))


@pytest.mark.parametrize("name", NAMES)
def test_golden_decodes_to_its_source(name: str) -> None:
    assert decode_bytes(golden(name)) == source(name)
    assert verify_file(make_goldens.golden_path(name), threads=1).source_bytes == len(source(name))


@pytest.mark.parametrize("name", NAMES)
def test_plain_decoder_decodes_the_golden(name: str) -> None:
    """The decoder that was written from the document agrees with it."""
    assert plain_decoder.decode(golden(name)) == source(name)


@pytest.mark.parametrize("name", json.loads((EARLIER / "manifest.json").read_text()))
def test_files_of_earlier_writers_decode(name: str) -> None:
    """A type that was kept verbatim once, or coded in another way, comes back from files of that time."""
    entry = json.loads((EARLIER / "manifest.json").read_text())[name]
    coded = (EARLIER / f"{name}.lw").read_bytes()
    assert hashlib.sha256(coded).hexdigest() == entry["coded_sha256"]
    for decode in (decode_bytes, plain_decoder.decode):
        assert hashlib.sha256(decode(coded)).hexdigest() == entry["source_sha256"]


def test_every_earlier_golden_is_decoded() -> None:
    names = json.loads((EARLIER / "manifest.json").read_text())
    assert {path.name for path in EARLIER.iterdir()} == {"manifest.json", *(f"{name}.lw" for name in names)}


@pytest.mark.parametrize("preset", ["dense", "unit"])
def test_plain_decoder_decodes_quantized_weights(preset: str, tmp_path: Path) -> None:
    data = mixed_gguf()
    assert plain_decoder.decode(encode_bytes(data, tmp_path, preset=preset)) == data


def test_manifest_and_directory() -> None:
    manifest = json.loads(make_goldens.MANIFEST.read_text())
    names = {path.name for path in make_goldens.GOLDENS.iterdir()}
    assert names == {"earlier", "manifest.json", *(f"{name}.lw" for name in NAMES)}
    assert set(manifest["files"]) == set(NAMES)
    for name, entry in manifest["files"].items():
        assert entry["coded_sha256"] == hashlib.sha256(golden(name)).hexdigest()
        assert entry["source_sha256"] == hashlib.sha256(source(name)).hexdigest()
        assert (entry["coded_bytes"], entry["preset"]) == (len(golden(name)), make_goldens.SOURCES[name].preset)
    assert sum(len(golden(name)) for name in NAMES) < MAX_GOLDEN_BYTES


def test_goldens_hold_every_way_to_code() -> None:
    """Every type, kind of unit, variant, field mode and coder occurs in a golden."""
    seen: set[Any] = set()
    for name in NAMES:
        layout = layout_of(golden(name))
        for _, span, first, _ in layout.spans():
            kinds = set(layout.kinds[first : first + span.n_units].tolist())
            seen |= kinds
            if span.plan is None:
                continue
            forced = STREAM_LAYOUTS[span.type_id].forced
            assert span.plan.form in {newest_form(span.type_id, whole_codes) for whole_codes in (False, True)}
            seen |= {("type", span.type_id, kind == LOCKSTEP) for kind in kinds if kind in (CODED, LOCKSTEP)}
            seen |= {("forced", forced, kind) for kind in kinds}
            seen |= {("split", span.coder.layout.type_name, kind) for kind in kinds if span.coder.layout.low_bits}
            if layout.preset == "dense":
                seen |= {("mode", mode.low, mode.sign) for mode in span.plan.modes} | {("coder", span.plan.coder)}
    assert {RAW, ZSTD, CODED, CODED_UNFORCED, LOCKSTEP, FILTERED} <= seen
    assert {("type", type_id, False) for type_id in STREAM_LAYOUTS} <= seen
    assert {("coder", 0), ("coder", 1), ("coder", 2)} <= seen
    assert {("mode", 0, 0), ("mode", 0, 1), ("mode", 0, 2), ("mode", 1, 0)} <= seen
    variants = (FORCED_MIN, FORCED_MIN_MAX, FORCED_ABS_127, WINDOWED)
    assert {("forced", forced, kind) for forced in variants for kind in (CODED, CODED_UNFORCED)} <= seen
    assert {("split", name, kind) for name in ("Q8_0", "Q5_0") for kind in (CODED, CODED_UNFORCED)} <= seen
    assert ("split", "Q5_K", CODED) in seen
    in_front = {(group.kind.name, group.n_raw_bits(False) >= 2048) for group in forced_groups()}
    assert {(name, front) for name in ("Q4_1", "Q8_0") for front in (False, True)} <= in_front


def forced_groups() -> list[plain_decoder.RowGroup]:
    """Return the row groups with forced codes of the golden of all types."""
    layout = layout_of(golden("every_type"))
    spans, _ = plain_decoder.read_head(Parts.of(golden("every_type")).head, plain_decoder.read_types(TEXT))
    groups = []
    for (_, _, first, _), span in zip(layout.spans(), spans, strict=True):
        for k, (rows, _) in enumerate(span.units()):
            if span.kind is not None and span.kind.variant in plain_decoder.POSITION_BITS and layout.kinds[first + k] == CODED:
                groups.append(plain_decoder.RowGroup(span, rows))
    return groups


# The document.


def test_generated_blocks_are_current() -> None:
    """Else: python -m tests.make_goldens."""
    for path, blocks in make_goldens.GENERATED.items():
        text = path.read_text(encoding="utf-8")
        for name, make in blocks.items():
            assert make_goldens.generated_block(text, name) == make(), (path.name, name)


def type_row(layout: StreamLayout) -> TypeRow:
    """What the table should say of a type."""
    type_id = layout.type_id
    known = GGML_TYPES[type_id]
    assert all(half.delta_of in (-1, 0) for half in layout.halves)
    assert all(half.delta_of < 0 or layout.halves[0].name == "scale" for half in layout.halves)
    variant = {FORCED_NONE: "-", FORCED_MIN: "min", FORCED_MIN_MAX: "min max", FORCED_ABS_127: "127", WINDOWED: "window"}
    context = {BY_POSITION: "none", BY_LEVEL: "level", BY_ZERO_AND_LEVEL: "zero", BY_ROW: "row"}
    level = "-"
    if layout.mode in (BY_LEVEL, BY_ZERO_AND_LEVEL):
        level = {8: "8 scale", 1: "scale", 0: "scale"}[layout.level_steps]
        if layout.sub_scale:
            level += {0: " + sub_scale", 32: " + (sub_scale - 32)", -1: " + int8(sub_scale)"}[layout.sub_zero]
    is_float = layout.cell_codes == 0
    raws = [(name, 0 if is_float else n, bits, bits) for name, n, bits in layout.raw]
    if layout.code_bits > 8:
        n_codes = 0 if is_float else next(s.per_block for s in plane_specs(type_id) if s.name == layout.codes)
        wide = layout.code_bits - 8
        raws.append(("low", n_codes, wide, WINDOW_LOW_BITS if layout.forced == WINDOWED else wide))
    return TypeRow(
        layout.type_name, type_id, known.block_size, known.block_bytes,
        tuple((half.name, half.delta_of == 0) for half in layout.halves),
        tuple(plain_decoder.ByteField(b.name, b.per_block, b.context) for b in layout.bytes_),
        "rank" if layout.ranked else layout.codes,
        4 if layout.low_bits else layout.code_bits, 2 if layout.low_bits else layout.codes_per_symbol, layout.cell_codes,
        variant[layout.forced], context[layout.mode], layout.zero_base if layout.mode == BY_ZERO_AND_LEVEL else 0, level,
        tuple(raws), layout.low_bits,
    )  # fmt: skip


def test_table_of_types_is_that_of_the_program() -> None:
    forms = [(type_id, 0, layout) for type_id, layout in STREAM_LAYOUTS.items()]
    forms += [(type_id, 1, layout) for type_id, layout in SECOND_LAYOUTS.items()]
    assert plain_decoder.read_types(TEXT) == {(type_id, form): type_row(layout) for type_id, form, layout in forms}
    # What the columns "context" and "level" leave out holds for every type.
    for layout in STREAM_LAYOUTS.values():
        if layout.mode in (BY_LEVEL, BY_ZERO_AND_LEVEL):
            assert (layout.halves or layout.bytes_)[0].name == "scale"
        if layout.mode == BY_ZERO_AND_LEVEL:
            assert layout.halves[1].delta_of == 0
            assert layout.sub_min == ("sub_min" if layout.sub_scale else "")
        if layout.mode == BY_POSITION and layout.cell_codes:
            per_block = next(s.per_block for s in plane_specs(layout.type_id) if s.name == layout.codes)
            assert per_block == layout.cell_codes, "one cell a block, so that its position says nothing"


def test_worked_example_is_the_golden() -> None:
    dumps = re.findall(r"```hex\n(.*?)\n```", TEXT, re.DOTALL)
    assert [make_goldens.undump(dump) for dump in dumps] == [source("tiny"), golden("tiny"), Parts.of(golden("tiny")).head]


# The rules: each is broken in an otherwise valid file.

Attack = Callable[[], bytes]


def parts(name: str) -> Parts:
    return Parts.of(golden(name))


def with_head(name: str, change: Callable[[Head], Head]) -> bytes:
    """Return a golden with another head, every checksum right."""
    changed = parts(name)
    changed.head = coded_file.pack_head(change(changed.unpack()))
    return changed.seal()


def first_coded(head: Head, type_name: str = "Q8_0") -> int:
    type_id = TYPE_BY_NAME[type_name].type_id
    return next(i for i, span in enumerate(head.spans) if span.is_coded and span.type_id == type_id)


def with_span(name: str, index: int | str, **fields: Any) -> bytes:
    """Return a golden with a span changed: by number, or the first coded one of a type."""

    def change(head: Head) -> Head:
        i = index if isinstance(index, int) else first_coded(head, index)
        spans = list(head.spans)
        spans[i] = dataclasses.replace(spans[i], **fields)
        return Head(spans, head.tensors, head.table_sets)

    return with_head(name, change)


def with_plan(name: str, type_name: str, **fields: Any) -> bytes:
    """Return a golden with the plan of the first coded tensor of a type changed; a value may be a function of the old one."""

    def change(head: Head) -> Head:
        i = first_coded(head, type_name)
        plan = head.spans[i].plan
        assert isinstance(plan, TensorPlan)
        new = {key: value(getattr(plan, key)) if callable(value) else value for key, value in fields.items()}
        spans = list(head.spans)
        spans[i] = dataclasses.replace(spans[i], plan=dataclasses.replace(plan, **new))
        return Head(spans, head.tensors, head.table_sets)

    return with_head(name, change)


def with_tables(name: str, change: Callable[[TableSet], TableSet]) -> bytes:
    """Return a golden with its first table set changed."""
    return with_head(name, lambda head: Head(head.spans, head.tensors, [change(head.table_sets[0]), *head.table_sets[1:]]))


def with_raw_head(name: str, change: Callable[[bytes], bytes]) -> bytes:
    """Return a golden with other bytes in its head, every checksum right."""
    changed = parts(name)
    changed.head = change(changed.head)
    return changed.seal()


def with_table(name: str, change: Callable[[np.ndarray], np.ndarray]) -> bytes:
    """Return a golden with another unit table."""
    changed = parts(name)
    return changed.seal(table=change(changed.table()))


def unit_of(name: str, kind: int, type_name: str | None = None) -> int:
    """Return the first unit of a kind (of a tensor of a type)."""
    layout = layout_of(golden(name))
    for _, span, first, _ in layout.spans():
        if type_name is None or (span.is_coded and span.type_id == TYPE_BY_NAME[type_name].type_id):
            for unit in range(first, first + span.n_units):
                if layout.kinds[unit] == kind:
                    return unit
    raise AssertionError("no such unit")


def with_unit(name: str, unit: int, payload: Callable[[bytes], bytes] | None = None, **fields: Any) -> bytes:
    """Return a golden with another payload, kind or checksum of a unit."""
    changed = parts(name)
    if payload is not None:
        changed.payloads[unit] = payload(changed.payloads[unit])
    if "kind" in fields:
        changed.kinds[unit] = fields["kind"]
    if "checksum" in fields:
        changed.checksums[unit] = fields["checksum"]
    return changed.seal()


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def frame(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def too_large_head() -> bytes:
    changed = parts("tiny")
    packed = frame(changed.head)
    return changed.seal(packed_head=packed, head_raw_bytes=4096 * len(packed) + 65537)


def another_size_of_head() -> bytes:
    changed = parts("tiny")
    return changed.seal(packed_head=frame(changed.head + b"\0"), head_raw_bytes=len(changed.head))


def head_that_declares_another_size() -> bytes:
    """The frame is right but for the size that it declares."""
    changed = parts("tiny")
    packed = frame(changed.head)
    assert zstandard.frame_content_size(flip(packed, 5)) != len(changed.head)
    return changed.seal(packed_head=flip(packed, 5), head_raw_bytes=len(changed.head))


def ends_with_a_coded_span(head: Head) -> Head:
    return Head(head.spans[:-1], [t for t in head.tensors if t.span < len(head.spans) - 1], head.table_sets)


def moved_verbatim_tensor(head: Head) -> Head:
    """A verbatim tensor over a coded one."""
    at = next(t.offset for t in head.tensors if head.spans[t.span].is_coded)
    tensors = [t if head.spans[t.span].is_coded else t._replace(offset=at, n_bytes=8) for t in head.tensors]
    return Head(head.spans, tensors, head.table_sets)


def with_verbatim(**fields: Any) -> bytes:
    """Return the golden of all types with its first verbatim tensor changed, 96 bytes of I32, 8 x 3."""

    def change(head: Head) -> Head:
        i = next(i for i, t in enumerate(head.tensors) if not head.spans[t.span].is_coded)
        assert (head.tensors[i].shape, head.tensors[i].n_bytes) == ((8, 3), 96)
        tensors = list(head.tensors)
        tensors[i] = tensors[i]._replace(**fields)
        return Head(head.spans, tensors, head.table_sets)

    return with_head(EVERY, change)


def with_lengths(table_set: TableSet) -> TableSet:
    lengths = table_set.lengths.copy()
    lengths[0, np.flatnonzero(lengths[0])[0]] += 1
    return TableSet(lengths, table_set.freqs)


def with_freqs(table_set: TableSet) -> TableSet:
    freqs = table_set.freqs.copy()
    freqs[freqs > 0] -= 1
    return TableSet(table_set.lengths, freqs)


def without_freqs(table_set: TableSet) -> TableSet:
    return TableSet(table_set.lengths, np.zeros_like(table_set.freqs))


def with_shared(type_name: str = "Q8_0", **fields: Any) -> bytes:
    """Return the golden of shared rows with what the rows of its tensor of a type share changed."""
    head = parts("shared_rows").unpack()
    plan = head.spans[first_coded(head, type_name)].plan
    assert plan is not None
    assert plan.shared is not None
    return with_plan("shared_rows", type_name, shared=dataclasses.replace(plan.shared, **fields))


def unpackable_planes() -> bytes:
    """TQ1_0 knows the escape 2 in few bytes only: here every byte has it, for no bits."""

    def change(head: Head) -> Head:
        i = first_coded(head, "TQ1_0")
        plan = head.spans[i].plan
        assert isinstance(plan, TensorPlan)
        table_set = head.table_sets[plan.table_set]
        side_tables = plan.side_tables.copy()
        side_tables[-1] = len(table_set.lengths)
        one_symbol = np.zeros((1, 256), np.uint8)
        one_symbol[0, 2] = 1
        sets = list(head.table_sets)
        sets[plan.table_set] = TableSet(
            np.concatenate([table_set.lengths, one_symbol]), np.concatenate([table_set.freqs, np.zeros((1, 256), np.uint16)])
        )
        spans = list(head.spans)
        spans[i] = dataclasses.replace(spans[i], plan=dataclasses.replace(plan, side_tables=side_tables))
        return Head(spans, head.tensors, sets)

    changed = parts("every_type")
    changed.head = coded_file.pack_head(change(changed.unpack()))
    # As long as the streams need now: tried out, since the escapes took bits before.
    unit = unit_of("every_type", CODED, "TQ1_0")
    payload = changed.payloads[unit]
    for n_bytes in range(len(payload), 0, -4):
        changed.payloads[unit] = payload[:n_bytes]
        if not isinstance(error_of(changed.seal()), errors.CodecError):
            return changed.seal()
    raise AssertionError("no length fits the streams")


def filtered(recipe: list[int], *streams: bytes) -> bytes:
    """Return the payload of a filtered chunk; streams that are left out are empty."""
    raw = [pack_numbers(recipe), *streams, *[b""] * (5 - len(streams))]
    packed = [frame(s) for s in raw]
    return pack_numbers(n for r, p in zip(raw, packed, strict=True) for n in (len(r), len(p))) + b"".join(packed)


def zeros(n_less: int) -> bytes:
    """As many zeros as the chunk of the vocabulary has bytes, less `n_less`."""
    return bytes(parts("filtered_header").unpack().spans[0].n_bytes - n_less)


def with_vocabulary(recipe: list[int], *streams: bytes) -> bytes:
    """Return the golden with a filtered chunk, the chunk replaced."""
    assert parts("filtered_header").kinds[0] == FILTERED
    return with_unit("filtered_header", 0, lambda _: filtered(recipe, *streams))


def out_of_range(tables: np.ndarray) -> np.ndarray:
    return np.full_like(tables, 254)


def resized(table: np.ndarray, n_bytes: int) -> np.ndarray:
    """Return a unit table in which the last unit has more bytes than it has."""
    changed = table.copy()
    changed["size"][-1] = int(changed["size"][-1]) + n_bytes
    return changed


TINY = "tiny"
EVERY = "every_type"
FIRST_Q8 = 1  # its unit in the tiny golden
FLOATS = 3

RULES: dict[str, list[Attack]] = {
    "H1": [lambda: b"GGUF" + golden(TINY)[4:], lambda: golden(TINY)[1:], lambda: b""],
    "H2": [lambda: golden(TINY)[:127], lambda: golden(TINY)[:4]],
    "H3": [lambda: parts(TINY).seal(version=2), lambda: parts(TINY).seal(version=0)],
    "H4": [lambda: flip(golden(TINY), 30), lambda: flip(golden(TINY), 127)],
    "H5": [
        lambda: parts(TINY).seal(flags=2),
        lambda: parts(TINY).seal(reserved_a=1),
        lambda: parts(TINY).seal(reserved_b=1),
        lambda: parts(TINY).seal(reserved_bytes=bytes(15) + b"\1"),
    ],
    "H6": [lambda: golden(TINY) + b"\0", lambda: golden(TINY)[:-1], lambda: parts(TINY).seal(file_size=10_000)],
    "H7": [too_large_head],
    "H8": [lambda: parts(TINY).seal(n_units=1000), lambda: parts(TINY).seal(head_bytes=10_000)],
    "H9": [lambda: parts(TINY).seal(payload_offset_words=96), lambda: parts(TINY).seal(n_units=9)],
    "H10": [lambda: flip(golden(TINY), layout_of(golden(TINY)).payload_offset - 1)],
    "D1": [lambda: flip(golden(TINY), 128 + 20)],
    "D2": [another_size_of_head, head_that_declares_another_size, lambda: parts(TINY).seal(packed_head=bytes(100))],
    "D3": [lambda: with_raw_head(TINY, lambda head: head[:-1]), lambda: with_raw_head(TINY, lambda _: b"\x80")],
    "D4": [
        lambda: with_raw_head(TINY, lambda head: b"\x80" * 10 + b"\0" + head[1:]),
        lambda: with_span(TINY, 0, n_bytes=1 << 62),
        lambda: with_plan(TINY, "Q8_0", coder=6),
        lambda: with_plan(EVERY, "IQ1_S", coder=2),
        lambda: with_shared(row_base=256),
        lambda: with_shared(row_table=254),
        lambda: with_shared(references=np.zeros((17, 4), np.uint8)),
        lambda: with_span(TINY, "Q8_0", type_id=1 << 32),
        lambda: with_verbatim(type_id=1 << 32),
    ],
    "D5": [lambda: with_raw_head(TINY, lambda head: head + b"\0")],
    "D6": [lambda: with_raw_head(TINY, lambda head: b"\1" + pack_number(256) + head[2:])],
    "D7": [lambda: with_tables(TINY, with_lengths)],
    "D8": [lambda: with_span(TINY, 0, n_bytes=0)],
    "D9": [lambda: with_head(TINY, ends_with_a_coded_span)],
    "D10": [
        lambda: with_span(TINY, "Q8_0", type_id=TYPE_BY_NAME["I32"].type_id),
        lambda: with_span(TINY, "Q8_0", type_id=4),
        lambda: with_span(TINY, "Q8_0", shape=(33, 3)),
        lambda: with_span(TINY, "Q8_0", shape=(32, 0)),
        lambda: with_span(TINY, "F16", shape=()),
        lambda: with_span(TINY, "F16", shape=((1 << 19) + 8,)),
        lambda: with_span(TINY, "F16", shape=(4097,)),
        lambda: with_span(TINY, "Q8_0", type_id=(1 << 32) - 1),
    ],
    "D11": [lambda: with_span(TINY, "Q8_0", shape=(32, 4)), lambda: with_span(TINY, "F16", shape=(95,))],
    "D12": [lambda: with_plan(TINY, "Q8_0", table_set=1)],
    "D13": [
        lambda: with_plan(TINY, "Q8_0", side_tables=out_of_range),
        lambda: with_plan(TINY, "Q8_0", cell_tables=out_of_range),
        lambda: with_plan(EVERY, "Q4_K", coder=1),
        lambda: with_tables("shared_rows", without_freqs),
    ],
    "D14": [
        lambda: with_plan(TINY, "Q8_0", modes=(HalfMode(0, 3),)),
        lambda: with_plan(TINY, "Q8_0", bases=(256, 0)),
    ],
    "D15": [lambda: with_head(EVERY, moved_verbatim_tensor)],
    "D16": [lambda: with_tables(TINY, with_freqs)],
    "D17": [
        lambda: with_verbatim(n_bytes=95),
        lambda: with_verbatim(n_bytes=0),
        lambda: with_verbatim(shape=(8, 2)),
        lambda: with_verbatim(shape=(8, 3, 1 << 62)),
        lambda: with_verbatim(shape=(0, 3), n_bytes=0),
        lambda: with_verbatim(shape=()),
        lambda: with_verbatim(type_id=TYPE_BY_NAME["Q8_0"].type_id),
        lambda: with_verbatim(type_id=77),
    ],
    "D18": [
        lambda: with_plan(TINY, "F16", coder=2),
        lambda: with_plan(TINY, "F16", coder=3),
        lambda: with_plan("shared_rows", "Q8_0", modes=(HalfMode(0, 0),), bases=(0,)),
        lambda: with_shared(references=np.zeros((0, 4), np.uint8)),
        lambda: with_shared(columns=np.full(64, 32, np.uint8)),
    ],
    "D19": [lambda: with_shared("Q4_K", is_trellis=True)],
    "D20": [lambda: with_plan("split_codes", "Q8_0", coder=1)],
    "U1": [lambda: flip(golden(TINY), golden(TINY).index(parts(TINY).table().tobytes()) + 5)],
    "U2": [
        lambda: with_table(TINY, lambda table: np.concatenate([table, table[-1:]])),
        lambda: with_table(TINY, lambda table: table[:-1]),
    ],
    "U3": [lambda: with_table(TINY, lambda table: resized(table, 4)), lambda: with_table(TINY, lambda table: resized(table, -4))],
    "U4": [
        lambda: with_unit(TINY, FIRST_Q8, kind=6),
        lambda: with_unit(TINY, FIRST_Q8, kind=ZSTD),
        lambda: with_unit(TINY, 0, kind=CODED),
    ],
    "U5": [
        lambda: with_unit(EVERY, unit_of(EVERY, RAW), lambda payload: payload[:-1]),
        lambda: with_unit(TINY, FIRST_Q8, lambda payload: payload + bytes(1000)),
    ],
    "U6": [
        lambda: with_unit(TINY, FIRST_Q8, checksum=1),
        lambda: with_unit(TINY, 0, checksum=1),
        lambda: with_unit(TINY, FLOATS, lambda payload: flip(payload, len(payload) // 2)),  # raw bits
    ],
    "U7": [lambda: parts(TINY).seal(sha256=bytes(32))],
    "V1": [
        lambda: with_unit(TINY, 0, lambda _: frame(bytes(127))),
        lambda: with_unit(TINY, 0, lambda payload: flip(payload, 5)),  # the size that it declares
        lambda: with_unit(TINY, 0, lambda _: b"no frame"),
    ],
    "V2": [
        lambda: with_vocabulary([0], bytes(100)),
        lambda: with_vocabulary([0], zeros(0), b"\1"),
        lambda: with_vocabulary([1, 0, 1, 50]),
        lambda: with_vocabulary([1, 0, 0, 15], zeros(8 * 15), bytes(15)),
        lambda: with_vocabulary([1, 0, 1, 15], zeros(4 * 15), b"", b"", b"", bytes(4 * 15)),
    ],
    "G1": [lambda: with_unit(TINY, FIRST_Q8, lambda payload: payload + b"\0")],
    "G2": [
        lambda: with_unit(TINY, FIRST_Q8, lambda payload: payload + bytes(4)),
        lambda: with_unit(TINY, FIRST_Q8, lambda payload: payload[:-4]),
        lambda: with_unit(TINY, FIRST_Q8, lambda _: b""),
        lambda: with_unit(TINY, FLOATS, lambda payload: flip(payload, 10)),  # rANS words
        lambda: with_unit(EVERY, unit_of(EVERY, CODED, "Q8_0"), lambda _: b""),
    ],
    "G3": [unpackable_planes],
    "L1": [
        lambda: with_unit("unit_preset", unit_of("unit_preset", LOCKSTEP), lambda payload: payload[:-1]),
        lambda: with_unit("unit_preset", unit_of("unit_preset", LOCKSTEP), lambda _: b"\1\0"),
    ],
}


RULE_ROW = re.compile(r"^\| ([A-Z]\d+) \| (.+) \| (\w+) \| (.+) \|$", re.MULTILINE)


def rules() -> dict[str, tuple[str, str]]:
    """Error and tests of each rule, from the document."""
    section = TEXT.split("\n## Rules\n")[1].split("\n## ")[0]
    return {rule: (error, tests) for rule, _, error, tests in RULE_ROW.findall(section)}


def error_of(coded: bytes) -> LazyWeightsError | None:
    """Verify a file of these bytes; return the error."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "broken.lw"
        path.write_bytes(coded)
        try:
            verify_file(path, threads=1)
        except LazyWeightsError as error:
            return error
    return None


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule: str) -> None:
    """A file that breaks the rule is refused with the error that the document names."""
    expected, _ = rules()[rule]
    for k, attack in enumerate(RULES[rule]):
        error = error_of(attack())
        assert error is not None, k
        assert type(error) is getattr(errors, expected), (k, error)


def test_sixteen_elements_can_be_filtered() -> None:
    """The attacks of V2 on arrays of 15 elements fail for that alone."""
    for coded in (
        with_vocabulary([1, 0, 0, 16], zeros(8 * 16), bytes(16)),
        with_vocabulary([1, 0, 1, 16], zeros(4 * 16), b"", b"", b"", bytes(4 * 16)),
    ):
        error = error_of(coded)
        assert type(error) is errors.ChecksumError, error


def test_frames_may_declare_no_size() -> None:
    compressor = zstandard.ZstdCompressor(write_content_size=False)
    changed = parts(TINY)
    changed.payloads[0] = compressor.compress(source(TINY)[:128])
    coded = changed.seal(packed_head=compressor.compress(changed.head))
    assert decode_bytes(coded) == source(TINY)
    assert plain_decoder.decode(coded) == source(TINY)


def test_every_rule_is_listed_and_referred_to() -> None:
    listed = rules()
    assert list(listed) == list(RULES)
    assert set(re.findall(r"\[([A-Z]\d+)\]\(#rules\)", TEXT)) == set(RULES)
    for start in re.finditer("MUST refuse", TEXT.split("\n## Rules\n")[0]):
        sentence = TEXT[start.start() :].split(".\n")[0]
        assert re.search(r"\[[A-Z]\d+\]\(#rules\)", sentence), sentence


def test_named_tests_exist() -> None:
    here = Path(__file__).parent
    for _, tests in rules().values():
        for file, name in re.findall(r"`([\w./]+\.py)::(\w+)`", tests):
            assert f"\ndef {name}(" in (here / file).read_text(encoding="utf-8"), (file, name)
        assert "::" in tests
