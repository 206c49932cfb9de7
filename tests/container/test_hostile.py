"""Hostile coded files: every checksum is right (`Parts.seal`), so only the structural checks can refuse them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lazyweights.blocks import TYPE_BY_NAME
from lazyweights.container import coded_file
from lazyweights.container.coded_file import (
    CODED,
    CODED_UNFORCED,
    FILTERED,
    HEADER,
    HEADER_BYTES,
    LOCKSTEP,
    RAW,
    ZSTD,
    Head,
    TableSet,
)
from lazyweights.container.decoder import verify_file
from lazyweights.container.inspect import inspect_file
from lazyweights.container.reader import CodedFile
from lazyweights.container.tensor_coder import RANS, TensorPlan
from lazyweights.errors import (
    ChecksumError,
    FormatError,
    LazyWeightsError,
    LimitError,
    OffsetError,
    VersionError,
)
from tests.container.coded_samples import HEADER_FIELDS, Parts, encode_bytes, tensor_bytes
from tests.container.damage import (
    CountCases,
    Sample,
    error_of,
    first_coded,
    from_file,
    same_kind,
    streamed,
    unit_names,
    units_of_kind,
)
from tests.make_gguf import build_gguf


def test_seal_gives_the_file_back(sample: Sample) -> None:
    """What `Parts` does not change it does not spoil."""
    parts = Parts.of(sample.coded)
    assert coded_file.pack_head(parts.unpack()) == parts.head
    assert streamed(parts.seal(), sample.source) is None
    assert same_kind(from_file(sample, parts.seal())) == {type(None)}


BIG = (1 << 31, (1 << 32) - 1)
HUGE = (1 << 32, 1 << 62, 1 << 63, (1 << 64) - 1)

HEADER_ATTACKS: list[tuple[str, Any, type[LazyWeightsError]]] = [
    *(("version", v, VersionError) for v in (0, coded_file.VERSION + 1, 0xFFFF)),
    *(("flags", v, VersionError) for v in (2, 4, 0x8000, 0xFFFF)),
    *((name, v, VersionError) for name in ("reserved_a", "reserved_b") for v in (1, (1 << 64) - 1)),
    ("reserved_bytes", bytes(15) + b"\x01", VersionError),
    *(("source_size", v, FormatError) for v in (0, 1, *BIG, *HUGE)),
    *(("file_size", v, FormatError) for v in (0, 1, HEADER_BYTES, *BIG, *HUGE)),
    *(("head_bytes", v, FormatError) for v in (0, 1, *BIG)),
    *(("head_raw_bytes", v, FormatError) for v in (0, 1, 1 << 20, *BIG)),
    ("head_checksum", 1, ChecksumError),
    *(("n_units", v, FormatError) for v in (0, 1, *BIG)),
    *(("payload_offset_words", v, FormatError) for v in (0, 1, *BIG)),
    ("table_checksum", 1, ChecksumError),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value", "expected"), HEADER_ATTACKS)
def test_resealed_header(
    sample: Sample, field: str, value: Any, expected: type[LazyWeightsError], count_cases: CountCases
) -> None:
    coded = Parts.of(sample.coded).seal(**{field: value})
    assert isinstance(streamed(coded, sample.source), expected)
    assert all(isinstance(error, expected) for error in from_file(sample, coded))
    count_cases("resealed headers", 1)


@pytest.mark.parametrize(
    "field", ["source_size", "file_size", "head_bytes", "head_raw_bytes", "n_units", "payload_offset_words"]
)
def test_resealed_header_off_by_little(sample: Sample, field: str, count_cases: CountCases) -> None:
    parts = Parts.of(sample.coded)
    sealed = dict(zip(HEADER_FIELDS, HEADER.unpack(parts.seal()[:HEADER_BYTES]), strict=True))
    for delta in (-64, -16, -4, -1, 1, 4, 16, 64):
        if sealed[field] + delta < 0:
            continue
        coded = parts.seal(**{field: sealed[field] + delta})
        assert isinstance(streamed(coded, sample.source), FormatError), delta
        count_cases("resealed headers", 1)


def test_resealed_preset_flag(sample: Sample) -> None:
    """The flag only says how the file was made; the kinds of the units say how to read them."""
    parts = Parts.of(sample.coded)
    parts.flags ^= coded_file.FLAG_UNIT_PRESET
    streamed(parts.seal(), sample.source)


def test_resealed_sha256(sample: Sample) -> None:
    coded = Parts.of(sample.coded).seal(sha256=bytes(32))
    with pytest.raises(ChecksumError, match="SHA-256"):
        verify_file(sample.write(coded), threads=1)


# The head.


def changed_span(head: Head, index: int, **fields: Any) -> Head:
    spans = list(head.spans)
    spans[index] = replace(spans[index], **fields)
    return Head(spans, head.tensors, head.table_sets)


def changed_plan(head: Head, **fields: Any) -> Head:
    return changed_span(head, first_coded(head), plan=replace(plan_of(head), **fields))


def changed_lengths(head: Head, change: Callable[[np.ndarray], np.ndarray]) -> Head:
    """Change the code lengths of the first table."""
    lengths = head.table_sets[0].lengths.copy()
    lengths[0] = change(lengths[0])
    return Head(head.spans, head.tensors, [TableSet(lengths, head.table_sets[0].freqs), *head.table_sets[1:]])


def changed_freqs(head: Head, change: Callable[[np.ndarray], np.ndarray]) -> Head:
    """Change the frequencies of a table that has some."""
    freqs = head.table_sets[0].freqs.copy()
    table = int(np.argmax(freqs.any(axis=1)))
    assert freqs[table].any()
    freqs[table] = change(freqs[table])
    return Head(head.spans, head.tensors, [TableSet(head.table_sets[0].lengths, freqs), *head.table_sets[1:]])


def without_freqs(head: Head) -> Head:
    return Head(head.spans, head.tensors, [TableSet(s.lengths, np.zeros_like(s.freqs)) for s in head.table_sets])


def empty_sets(head: Head) -> Head:
    return Head(head.spans, head.tensors, [TableSet(s.lengths[:0], s.freqs[:0]) for s in head.table_sets])


def lengths_of(**of_symbols: int) -> np.ndarray:
    out = np.zeros(256, np.uint8)
    for symbol, length in of_symbols.items():
        out[int(symbol[1:])] = length
    return out


def full(value: int, like: np.ndarray) -> np.ndarray:
    return np.full_like(like, value)


def plan_of(head: Head) -> TensorPlan:
    plan = head.spans[first_coded(head)].plan
    assert plan is not None
    return plan


def verbatim_tensor(head: Head, **fields: Any) -> Head:
    """Change the description of the tensor that is kept verbatim."""
    k = next(i for i, t in enumerate(head.tensors) if t.name == "rope_freqs.weight")
    tensors = list(head.tensors)
    tensors[k] = tensors[k]._replace(**fields)
    return Head(head.spans, tensors, head.table_sets)


def moved_bytes(head: Head) -> Head:
    """Give a coded span 64 bytes of the verbatim span before it."""
    index = first_coded(head)
    spans = list(head.spans)
    spans[index - 1] = replace(spans[index - 1], n_bytes=spans[index - 1].n_bytes - 64)
    spans[index] = replace(spans[index], n_bytes=spans[index].n_bytes + 64)
    return Head(spans, head.tensors, head.table_sets)


HEAD_ATTACKS: dict[str, tuple[Callable[[Head], Head], type[LazyWeightsError]]] = {
    "table set 1": (lambda h: changed_plan(h, table_set=len(h.table_sets)), FormatError),
    "table set 2**62": (lambda h: changed_plan(h, table_set=1 << 62), FormatError),
    "no table sets": (lambda h: Head(h.spans, h.tensors, []), FormatError),
    "an empty table set": (empty_sets, FormatError),
    "side table out of range": (lambda h: changed_plan(h, side_tables=full(255, plan_of(h).side_tables)), FormatError),
    "cell table out of range": (
        lambda h: changed_plan(h, cell_tables=full(len(h.table_sets[0].lengths), plan_of(h).cell_tables)), FormatError
    ),
    "lengths of no code": (lambda h: changed_lengths(h, lambda old: full(0, old)), FormatError),
    "lengths too short": (lambda h: changed_lengths(h, lambda _: lengths_of(_0=1, _1=1, _2=1)), FormatError),
    "lengths too long": (lambda h: changed_lengths(h, lambda _: lengths_of(_0=1, _1=3)), FormatError),
    "lengths of 12": (lambda h: changed_lengths(h, lambda _: lengths_of(_0=12, _1=12)), FormatError),
    "lengths of 255": (lambda h: changed_lengths(h, lambda old: full(255, old)), FormatError),
    "one symbol of length 2": (lambda h: changed_lengths(h, lambda _: lengths_of(_7=2)), FormatError),
    "frequencies that sum to less": (lambda h: changed_freqs(h, lambda old: old - (old == old.max())), FormatError),
    "frequencies that sum to 8192": (lambda h: changed_freqs(h, lambda old: 2 * old), FormatError),
    "no frequencies": (without_freqs, FormatError),
    "an unknown coder": (lambda h: changed_plan(h, coder=3), FormatError),
    "split codes by rANS": (lambda h: changed_plan(h, coder=RANS, form=1), FormatError),
    "a coder without frequencies": (lambda h: changed_plan(without_freqs(h), coder=RANS), FormatError),
    "span too long": (lambda h: changed_span(h, 0, n_bytes=h.spans[0].n_bytes + 1), FormatError),
    "span too short": (lambda h: changed_span(h, 0, n_bytes=h.spans[0].n_bytes - 1), FormatError),
    "empty span": (lambda h: changed_span(h, 0, n_bytes=0), FormatError),
    "span of 2**62": (lambda h: changed_span(h, 0, n_bytes=1 << 62), LimitError),
    "spans that do not add up": (
        lambda h: Head(h.spans[:-1], [t for t in h.tensors if t.span < len(h.spans) - 1], h.table_sets), FormatError
    ),
    "a span twice": (lambda h: Head([*h.spans, h.spans[-1]], h.tensors, h.table_sets), FormatError),
    "no spans": (lambda h: Head([], [], h.table_sets), FormatError),
    "bytes moved to a coded span": (moved_bytes, FormatError),
    "one row more": (lambda h: changed_span(h, first_coded(h), shape=(256, 67)), FormatError),
    "more columns": (lambda h: changed_span(h, first_coded(h), shape=(512, 66)), FormatError),
    "columns not whole blocks": (lambda h: changed_span(h, first_coded(h), shape=(255, 66)), FormatError),
    "no columns": (lambda h: changed_span(h, first_coded(h), shape=(0, 66)), FormatError),
    "no rows": (lambda h: changed_span(h, first_coded(h), shape=(256, 0)), FormatError),
    "no dimensions": (lambda h: changed_span(h, first_coded(h), shape=()), FormatError),
    "five dimensions": (lambda h: changed_span(h, first_coded(h), shape=(256, 66, 1, 1, 1)), FormatError),
    "no dimensions of a float": (lambda h: changed_span(h, first_coded(h, "F32"), shape=()), FormatError),
    "one dimension of many": (lambda h: changed_span(h, first_coded(h), shape=(256,)), FormatError),
    "dimensions of 2**62": (lambda h: changed_span(h, first_coded(h), shape=(256, 1 << 62, 1 << 62)), FormatError),
    "columns of 2**62": (lambda h: changed_span(h, first_coded(h), shape=(1 << 62, 66)), FormatError),
    "a type of another size": (
        lambda h: changed_span(h, first_coded(h), type_id=TYPE_BY_NAME["Q5_K"].type_id), FormatError
    ),
    "a type that is not coded": (
        lambda h: changed_span(h, first_coded(h), type_id=TYPE_BY_NAME["I32"].type_id), FormatError
    ),
    "an unknown type": (lambda h: changed_span(h, first_coded(h), type_id=77), FormatError),
    "a type of 2**40": (lambda h: changed_span(h, first_coded(h), type_id=1 << 40), FormatError),
    "a verbatim tensor outside": (lambda h: verbatim_tensor(h, offset=1 << 40), FormatError),
    "a verbatim tensor at 2**63": (lambda h: verbatim_tensor(h, offset=1 << 63), FormatError),
    "a verbatim tensor of 2**63": (lambda h: verbatim_tensor(h, n_bytes=1 << 63), FormatError),
    "a verbatim tensor of a byte less": (lambda h: verbatim_tensor(h, n_bytes=703), FormatError),
    "a verbatim tensor without bytes": (lambda h: verbatim_tensor(h, shape=(0,), n_bytes=0), FormatError),
    "a verbatim tensor of 2**80 bytes": (lambda h: verbatim_tensor(h, shape=(176, 1 << 40, 1 << 40)), FormatError),
    "a verbatim tensor without dimensions": (lambda h: verbatim_tensor(h, shape=()), FormatError),
    "a verbatim tensor of an unknown type": (lambda h: verbatim_tensor(h, type_id=77), FormatError),
    "a verbatim tensor of half a block": (
        lambda h: verbatim_tensor(h, type_id=TYPE_BY_NAME["Q8_0"].type_id, shape=(16, 2), n_bytes=34), FormatError
    ),
    "a verbatim tensor over a coded span": (
        lambda h: verbatim_tensor(h, offset=next(t.offset for t in h.tensors if h.spans[t.span].is_coded), n_bytes=8),
        OffsetError,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEAD_ATTACKS)
def test_resealed_head(dense: Sample, name: str, count_cases: CountCases) -> None:
    change, expected = HEAD_ATTACKS[name]
    parts = Parts.of(dense.coded)
    parts.head = coded_file.pack_head(change(parts.unpack()))
    assert isinstance(streamed(parts.seal(), dense.source), expected)
    errors = from_file(dense, parts.seal())
    assert all(isinstance(error, expected) for error in errors)
    count_cases("resealed heads", 1)


def test_errors_of_the_head_name_the_tensor(dense: Sample) -> None:
    for name in ("one row more", "a type that is not coded", "a verbatim tensor over a coded span"):
        parts = Parts.of(dense.coded)
        parts.head = coded_file.pack_head(HEAD_ATTACKS[name][0](parts.unpack()))
        error = streamed(parts.seal(), dense.source)
        assert error is not None
        assert error.tensor
        assert repr(error.tensor) in str(error)


@pytest.mark.parametrize(
    "fields",
    [
        *({"shape": shape} for shape in [(701,), (7, 99), (0,), (700, 0), (), (1 << 62, 4), (1 << 40, 1 << 40)]),
        *({"shape": shape} for shape in [(7, 0, 3), (700, 1 << 32, 1 << 32, 0)]),
        *({"n_bytes": n} for n in (0, 699)),
        *({"type_id": type_id} for type_id in (0, 2, 99)),
    ],
    ids=str,
)
def test_verbatim_tensor_that_does_not_fit(dense: Sample, fields: dict[str, Any], count_cases: CountCases) -> None:
    """A verbatim tensor's shape is only described: reading it is a typed error or some bytes of the source."""
    parts = Parts.of(dense.coded)
    parts.head = coded_file.pack_head(verbatim_tensor(parts.unpack(), **fields))
    path = dense.write(parts.seal())
    for call in (
        lambda file: file.get_tensor("rope_freqs.weight"),
        lambda file: file.get_rows("rope_freqs.weight", 0, 1),
        lambda file: file.get_rows("rope_freqs.weight", 0, 0),
        lambda file: file.get_expert("rope_freqs.weight", 0),
        lambda file: file.payload_bytes("rope_freqs.weight", 0, 1),
    ):
        with suppress(LazyWeightsError, IndexError), CodedFile(path) as file:
            call(file)
    for other in (lambda: inspect_file(path), lambda: verify_file(path, threads=1)):
        error_of(other)
    count_cases("resealed heads", 1)


def test_planes_that_cannot_be_packed(tmp_path: Path) -> None:
    """TQ1_0 has bytes for some escapes only; here a table decodes another one, for no bits."""
    type_id, shape = TYPE_BY_NAME["TQ1_0"].type_id, (256, 140)
    source = build_gguf([("a", type_id, shape, tensor_bytes(type_id, shape, np.random.default_rng(45)))])
    parts = Parts.of(encode_bytes(source, tmp_path))
    head = parts.unpack()
    index = first_coded(head, "TQ1_0")
    plan = head.spans[index].plan
    assert plan is not None
    tables = head.table_sets[plan.table_set]
    side_tables = plan.side_tables.copy()
    side_tables[-1] = len(tables.lengths)
    changed = changed_span(head, index, plan=replace(plan, side_tables=side_tables))
    changed.table_sets[plan.table_set] = TableSet(
        np.concatenate([tables.lengths, lengths_of(_2=1)[None]]), np.pad(tables.freqs, ((0, 1), (0, 0)))
    )
    parts.head = coded_file.pack_head(changed)
    error = streamed(parts.seal(), source)
    assert error is not None
    assert (error.tensor, error.row_group) == ("a", 0)
    path = tmp_path / "damaged.lw"
    path.write_bytes(parts.seal())
    with CodedFile(path) as file, pytest.raises(LazyWeightsError) as caught:
        file.get_rows("a", 64, 65)
    assert (caught.value.tensor, caught.value.row_group) == ("a", 1)


def test_raw_head_that_ends_early(dense: Sample, count_cases: CountCases) -> None:
    whole = Parts.of(dense.coded).head
    for n in range(0, len(whole), max(1, len(whole) // 300)):
        parts = Parts.of(dense.coded)
        parts.head = whole[:n]
        assert isinstance(streamed(parts.seal(), dense.source), FormatError), n
        count_cases("resealed heads", 1)
    parts = Parts.of(dense.coded)
    parts.head = whole + b"\0"
    assert isinstance(streamed(parts.seal(), dense.source), FormatError)


def read_whatever(path: Path) -> None:
    """Read every tensor of a file whose head may lie: anything but an untyped error is right."""
    with suppress(LazyWeightsError), CodedFile(path) as file:
        names = file.keys()
        for name in names:
            for call in (
                lambda name=name, file=file: file.get_tensor(name),
                lambda name=name, file=file: file.get_rows(name, 0, 1),
                lambda name=name, file=file: file.get_expert(name, 0),
                lambda name=name, file=file: file.payload_bytes(name, 0, 1),
            ):
                with suppress(LazyWeightsError, IndexError):
                    call()
    with suppress(LazyWeightsError):
        inspect_file(path)


def test_raw_head_with_changed_bytes(sample: Sample, count_cases: CountCases) -> None:
    """Random changes of the head before compression: every number, length and table of it, sealed."""
    rng = np.random.default_rng(40)
    whole = Parts.of(sample.coded).head
    parts = Parts.of(sample.coded)
    n_cases = 1000
    for i in range(n_cases):
        data = bytearray(whole)
        for _ in range(1 + i % 3):
            at = int(rng.integers(len(data)))
            value = [int(rng.integers(256)), data[at] ^ 1 << int(rng.integers(8)), 0x80, 0xFF, 0][int(rng.integers(5))]
            data[at] = value
        if i % 10 == 0:
            at = int(rng.integers(len(data)))
            data[at:at] = b"\xff" * int(rng.integers(1, 12))
        parts.head = bytes(data)
        error = streamed(parts.seal(), sample.source)
        if i % 12 == 0:
            path = sample.write(parts.seal())
            read_whatever(path)
        assert error is None or isinstance(error, LazyWeightsError)
    count_cases("resealed heads with random changes", n_cases)


# The unit table.


def test_kinds_that_a_span_cannot_have(sample: Sample, count_cases: CountCases) -> None:
    first = 0
    for span in sample.layout.head.spans:
        wrong = {ZSTD, FILTERED, 14, 15} if span.is_coded else {CODED, CODED_UNFORCED, LOCKSTEP, 14, 15}
        for unit in {first, first + span.n_units - 1}:
            for kind in wrong:
                parts = Parts.of(sample.coded)
                parts.kinds[unit] = kind
                assert isinstance(streamed(parts.seal(), sample.source), FormatError), (unit, kind)
                count_cases("resealed unit tables", 1)
        first += span.n_units


def test_kinds_exchanged(sample: Sample, count_cases: CountCases) -> None:
    """Any kind on any unit: an error, or the right bytes where the kinds mean the same."""
    for unit in range(len(sample.layout.units)):
        for kind in range(16):
            parts = Parts.of(sample.coded)
            parts.kinds[unit] = kind
            error = streamed(parts.seal(), sample.source)
            if kind == sample.layout.kinds[unit]:
                assert error is None
            count_cases("resealed unit tables", 1)


@pytest.mark.parametrize("size", [0, 4, 1 << 20, (1 << 28) - 1])
def test_unit_sizes_that_do_not_fit_the_file(sample: Sample, size: int, count_cases: CountCases) -> None:
    """A size in the table that is not that of the payload: the offsets no longer add up."""
    for unit in range(len(sample.layout.units)):
        if -(-int(sample.layout.sizes[unit]) // 4) == -(-size // 4):
            continue
        parts = Parts.of(sample.coded)
        table = parts.table()
        table["size"][unit] = size | parts.kinds[unit] << 28
        assert isinstance(streamed(parts.seal(table=table), sample.source), OffsetError)
        count_cases("resealed unit tables", 1)


def test_unit_sizes_with_payload(sample: Sample, count_cases: CountCases) -> None:
    """Payloads that are longer or shorter than they should be, with a table and offsets that agree.

    Bytes behind a zstd frame may do no harm; all else is an error or does not matter to what is decoded.
    """
    names = unit_names(sample.layout)
    for unit in range(len(sample.layout.units)):
        payload = Parts.of(sample.coded).payloads[unit]
        shorter = [b"", payload[:-1], payload[:-4], payload[: len(payload) // 2]]
        longer = [payload + b"\0", payload + bytes(4), payload * 2, payload + bytes(1 << 16)]
        for other in shorter + longer:
            if other == payload:
                continue
            parts = Parts.of(sample.coded)
            parts.payloads[unit] = other
            error = streamed(parts.seal(), sample.source)
            if error is not None and unit_names(sample.layout)[unit][0]:
                assert (error.tensor, error.row_group) == names[unit], (unit, len(other), len(payload))
            count_cases("resealed unit tables", 1)


def test_a_raw_unit_has_the_size_of_its_source(sample: Sample) -> None:
    for unit in units_of_kind(sample.layout, RAW):
        for cut in (1, 4):
            parts = Parts.of(sample.coded)
            parts.payloads[unit] = parts.payloads[unit][:-cut]
            assert isinstance(streamed(parts.seal(), sample.source), LimitError)


def test_coded_unit_that_is_no_smaller_than_its_source(dense: Sample) -> None:
    for unit in units_of_kind(dense.layout, CODED, CODED_UNFORCED):
        parts = Parts.of(dense.coded)
        parts.payloads[unit] += bytes(1 << 16)
        error = streamed(parts.seal(), dense.source)
        assert isinstance(error, LimitError)
        assert (error.tensor, error.row_group) == unit_names(dense.layout)[unit]


def test_unit_tables_with_random_entries(sample: Sample, count_cases: CountCases) -> None:
    rng = np.random.default_rng(41)
    parts = Parts.of(sample.coded)
    n_cases = 500
    for i in range(n_cases):
        table = parts.table()
        for unit in rng.integers(0, len(table), 1 + i % 3).tolist():
            if i % 2:
                table["size"][unit] ^= np.uint32(1 << int(rng.integers(32)))
            else:
                table["size"][unit] = rng.integers(1 << 32, dtype=np.uint32)
        if i % 25 == 0:
            table["checksum"][0] ^= np.uint64(1)
        streamed(parts.seal(table=table), sample.source)
    count_cases("resealed unit tables", n_cases)


def test_wrong_unit_checksums(sample: Sample) -> None:
    for unit, (tensor, group) in enumerate(unit_names(sample.layout)):
        parts = Parts.of(sample.coded)
        parts.checksums[unit] ^= 1
        error = streamed(parts.seal(), sample.source)
        assert isinstance(error, ChecksumError)
        assert (error.tensor, error.row_group) == (tensor, group)
