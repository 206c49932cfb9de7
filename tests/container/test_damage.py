"""Damaged and hostile coded files: every outcome is a typed error or the right bytes.

Three kinds of harm, from blunt to clever: bytes that changed on the way (the checksums find them); files whose checksums
were made right again (`Parts.seal`), which only the structural checks can refuse; and payloads under checksums of
nonsense, which may decode to nonsense but never crash or hang the kernels.
"""

from __future__ import annotations

import io
import os
import random
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from lazyweights.blocks import TYPE_BY_NAME
from lazyweights.container import coded_file, decoder
from lazyweights.container.coded_file import (
    CODED,
    CODED_UNFORCED,
    HEADER,
    HEADER_BYTES,
    LOCKSTEP,
    RAW,
    TRAILER_BYTES,
    UNIT_DTYPE,
    ZSTD,
    CodedSpan,
    Head,
    Layout,
    TensorEntry,
)
from lazyweights.container.decoder import decode_file, decode_stream, verify_file
from lazyweights.container.inspect import inspect_file
from lazyweights.container.reader import CodedFile
from lazyweights.container.tensor_coder import TensorPlan
from lazyweights.errors import (
    ChecksumError,
    CodecError,
    FormatError,
    LazyWeightsError,
    LimitError,
    NotCodedError,
    OffsetError,
    TruncatedError,
    VersionError,
)
from tests.container.coded_samples import (
    CODABLE,
    HEADER_FIELDS,
    Parts,
    coded_span,
    decode_bytes,
    encode_bytes,
    layout_of,
    mixed_gguf,
    scalar_decode_groups,
    tensor_bytes,
    type_label,
)
from tests.make_gguf import build_gguf

PRESETS = ("dense", "unit")
COUNT = Callable[[str, int], None]


@dataclass(frozen=True)
class Sample:
    """A source, its coded file, and the layout of that."""

    source: bytes
    coded: bytes
    layout: Layout
    folder: Path

    def write(self, coded: bytes) -> Path:
        path = self.folder / "damaged.gguf.lw"
        path.write_bytes(coded)
        return path

    def boundaries(self) -> list[int]:
        """Offsets where something of the file begins or ends."""
        fields = dict(zip(HEADER_FIELDS, HEADER.unpack(self.coded[:HEADER_BYTES]), strict=True))
        head_end = HEADER_BYTES + fields["head_bytes"]
        units = self.layout.offsets()
        ends = units[:-1] + self.layout.sizes
        table_end = head_end + len(self.layout.units) * UNIT_DTYPE.itemsize
        return sorted({0, HEADER_BYTES, head_end, table_end, *units.tolist(), *ends.tolist(), len(self.coded)})


@pytest.fixture(scope="module", params=PRESETS)
def sample(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sample:
    folder = tmp_path_factory.mktemp("sample")
    source = mixed_gguf()
    coded = encode_bytes(source, folder, preset=request.param)
    return Sample(source, coded, layout_of(coded), folder)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    folder = tmp_path_factory.mktemp("dense")
    source = mixed_gguf()
    coded = encode_bytes(source, folder)
    return Sample(source, coded, layout_of(coded), folder)


def streamed(coded: bytes, source: bytes) -> LazyWeightsError | None:
    """Decode from a stream: return the error, or None for the right bytes. What came before an error must be right."""
    sink = io.BytesIO()
    try:
        decode_stream(io.BytesIO(coded), sink)
    except LazyWeightsError as error:
        assert source.startswith(sink.getvalue())
        assert error.message
        return error
    assert sink.getvalue() == source
    return None


def from_file(sample: Sample, coded: bytes) -> list[LazyWeightsError | None]:
    """Decode, verify, inspect and read a file of these bytes: return the error of each, None for the right bytes."""
    path = sample.write(coded)
    output = sample.folder / "back.gguf"
    errors: list[LazyWeightsError | None] = []

    def attempt(call: Callable[[], Any]) -> None:
        try:
            call()
        except LazyWeightsError as error:
            assert error.path == str(path)
            assert str(error).startswith(str(path))
            errors.append(error)
        else:
            errors.append(None)

    attempt(lambda: decode_file(path, output, threads=1))
    if output.exists():
        assert output.read_bytes() == sample.source
        assert errors == [None]
        output.unlink()
    assert not [name for name in os.listdir(sample.folder) if name.endswith(".part")]
    attempt(lambda: verify_file(path, threads=1))
    attempt(lambda: inspect_file(path))
    attempt(lambda: read_everything(path, sample.source))
    return errors


def read_everything(path: Path, source: bytes) -> None:
    """Read every tensor that a coded file names; what comes must be the bytes of the source at its place."""
    with CodedFile(path) as file:
        for name in file.keys():
            info = file.tensor_info(name)
            assert file.get_tensor(name).tobytes() == source[info.offset : info.offset + info.n_bytes]


def same_kind(errors: list[LazyWeightsError | None]) -> set[type]:
    return {type(error) for error in errors}


# Not a coded file at all.


@pytest.mark.parametrize(
    ("data", "said"),
    [(b"", "empty"), (mixed_gguf(), "GGUF"), (b"PK\x03\x04" + bytes(60), "not a coded file"), (b"\x7fELF" * 40, "not a coded file"),
     (bytes(1000), "not a coded file")],
    ids=["empty", "gguf", "zip", "program", "zeros"],
)  # fmt: skip
def test_not_a_coded_file(dense: Sample, data: bytes, said: str) -> None:
    for error in [streamed(data, b""), *from_file(dense, data)[:2]]:
        assert isinstance(error, NotCodedError)
        assert said in str(error)


def test_nothing_to_read(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.lw"):
        for call in (
            lambda path=path: decode_file(path, tmp_path / "out"),
            lambda path=path: verify_file(path),
            lambda path=path: inspect_file(path),
            lambda path=path: CodedFile(path),
        ):
            with pytest.raises(LazyWeightsError) as caught:
                call()
            assert caught.value.path == str(path)
    assert os.listdir(tmp_path) == []


# Truncated.


def test_truncated_anywhere(sample: Sample, count_cases: COUNT) -> None:
    rng = np.random.default_rng(31)
    edges = {b + d for b in sample.boundaries() for d in (-4, -1, 0, 1, 4)}
    sizes = edges | set(rng.integers(0, len(sample.coded), 300).tolist()) | {0, 1, 3, 4, 5}
    sizes = {n for n in sizes if 0 <= n < len(sample.coded)}
    for n in sorted(sizes):
        error = streamed(sample.coded[:n], sample.source)
        assert isinstance(error, NotCodedError if n < 4 else TruncatedError), n
    for n in sorted(sizes)[:: max(1, len(sizes) // 60)]:
        errors = from_file(sample, sample.coded[:n])
        assert same_kind(errors[:2]) == {NotCodedError if n < 4 else TruncatedError}, n
        assert all(isinstance(error, FormatError) for error in errors)
    count_cases("truncations", len(sizes))


def test_longer_than_it_says(sample: Sample) -> None:
    for tail in (b"x", bytes(4), sample.coded):
        assert same_kind(from_file(sample, sample.coded + tail)) == {TruncatedError}


# Flipped bits.


def flipped(data: bytes, bit: int) -> bytes:
    out = bytearray(data)
    out[bit // 8] ^= 1 << bit % 8
    return bytes(out)


def some_bits(first: int, last: int, n: int, seed: int) -> list[int]:
    """Choose at most `n` bits of the bytes ``first .. last - 1``."""
    bits = range(8 * first, 8 * last)
    return list(bits) if len(bits) <= n else random.Random(seed).sample(bits, n)


def test_flipped_bits_of_the_header(sample: Sample, count_cases: COUNT) -> None:
    for bit in range(8 * HEADER_BYTES):
        error = streamed(flipped(sample.coded, bit), sample.source)
        if bit < 32:
            assert isinstance(error, NotCodedError)
        elif bit < 48:
            assert isinstance(error, VersionError)
        else:
            assert isinstance(error, ChecksumError)
            assert "header" in str(error)
    count_cases("flipped bits in headers", 8 * HEADER_BYTES)


def test_flipped_bits_of_head_and_unit_table(sample: Sample, count_cases: COUNT) -> None:
    edges = sample.boundaries()
    head_end, table_end = edges[2], edges[3]
    for first, last, what in [(HEADER_BYTES, head_end, "head"), (head_end, table_end, "unit table")]:
        bits = some_bits(first, last, 500, 32)
        for bit in bits:
            error = streamed(flipped(sample.coded, bit), sample.source)
            assert isinstance(error, ChecksumError), bit
            assert f"the {what} is damaged" in str(error)
        count_cases(f"flipped bits in {what}s", len(bits))


def test_flipped_bits_before_the_payload(sample: Sample) -> None:
    edges = sample.boundaries()
    for bit in some_bits(edges[3], sample.layout.payload_offset, 64, 33):
        error = streamed(flipped(sample.coded, bit), sample.source)
        assert isinstance(error, FormatError)


def unit_names(layout: Layout) -> list[tuple[str | None, int]]:
    """Return the tensor (None: verbatim bytes) and the number within its span of each unit."""
    return [(span.name or None, k) for span in layout.head.spans for k in range(span.n_units)]


def test_flipped_bits_of_the_payload(sample: Sample, count_cases: COUNT) -> None:
    """The error names the tensor and the row group whose payload was hit."""
    names = unit_names(sample.layout)
    offsets, sizes = sample.layout.offsets(), sample.layout.sizes
    bits = some_bits(sample.layout.payload_offset, len(sample.coded) - TRAILER_BYTES, 1500, 34)
    n_harmless = 0
    for bit in bits:
        error = streamed(flipped(sample.coded, bit), sample.source)
        unit = int(np.searchsorted(offsets, bit // 8, "right")) - 1
        if error is None:
            n_harmless += 1
            continue
        assert bit // 8 < offsets[unit] + sizes[unit]
        assert (error.tensor, error.row_group) == names[unit], error
        assert f"row group {error.row_group}" in str(error)
    assert n_harmless < len(bits) // 10
    count_cases("flipped bits in payloads", len(bits))


def test_flipped_bits_of_a_file(sample: Sample, count_cases: COUNT) -> None:
    """The same for the other ways to read a file; `read_everything` may miss what no tensor needs."""
    names = unit_names(sample.layout)
    offsets = sample.layout.offsets()
    bits = some_bits(0, len(sample.coded) - TRAILER_BYTES, 250, 35)
    for bit in bits:
        errors = from_file(sample, flipped(sample.coded, bit))
        assert type(errors[0]) is type(errors[1])
        if errors[1] is not None and bit // 8 >= sample.layout.payload_offset:
            unit = int(np.searchsorted(offsets, bit // 8, "right")) - 1
            assert (errors[1].tensor, errors[1].row_group) == names[unit]
    count_cases("flipped bits in files", len(bits))


def test_flipped_bits_of_the_trailer(sample: Sample, count_cases: COUNT) -> None:
    bits = some_bits(len(sample.coded) - TRAILER_BYTES, len(sample.coded), 200, 36)
    for bit in bits:
        streamed(flipped(sample.coded, bit), sample.source)
    for bit in bits[:10]:
        from_file(sample, flipped(sample.coded, bit))
    count_cases("flipped bits in trailers", len(bits))


def test_noise(sample: Sample, count_cases: COUNT) -> None:
    """Runs of bytes overwritten, zeroed, moved, repeated or taken out."""
    rng = np.random.default_rng(37)
    n_cases = 600
    for _ in range(n_cases):
        data = bytearray(sample.coded)
        at, other = rng.integers(0, len(data), 2).tolist()
        n = int(rng.integers(1, 200))
        how = int(rng.integers(6))
        if how == 0:
            data[at : at + n] = rng.bytes(len(data[at : at + n]))
        elif how == 1:
            data[at : at + n] = bytes(len(data[at : at + n]))
        elif how == 2:
            data[at : at + n] = data[other : other + n]
        elif how == 3:
            del data[at : at + n]
        elif how == 4:
            data[at:at] = data[other : other + n]
        else:
            data[at : at + n] = b"\xff" * len(data[at : at + n])
        streamed(bytes(data), sample.source)
    count_cases("overwritten runs", n_cases)


# Spliced.


def twins(folder: Path, type_name: str) -> tuple[bytes, bytes, bytes, bytes]:
    """Return two sources and their coded files: the same tensors, but the data of two of them exchanged."""
    rng = np.random.default_rng(38)
    type_id, shape = TYPE_BY_NAME[type_name].type_id, (256, 130)
    data = [tensor_bytes(type_id, shape, rng) for _ in range(2)]
    if type_name == "I8":
        data = [rng.bytes(256 * 130) for _ in range(2)]
    first, second = (build_gguf([("a", type_id, shape, x), ("b", type_id, shape, y)]) for x, y in (data, data[::-1]))
    return first, second, encode_bytes(first, folder), encode_bytes(second, folder)


@pytest.mark.parametrize("type_name", ["I8", "Q4_0", "Q4_1", "F32"])
def test_splices(type_name: str, tmp_path: Path, count_cases: COUNT) -> None:
    first, second, a, b = twins(tmp_path, type_name)
    if type_name == "I8":
        assert len(a) == len(b)
    cuts = set(np.random.default_rng(39).integers(0, min(len(a), len(b)), 60).tolist())
    for coded in (a, b):
        layout = layout_of(coded)
        cuts |= {HEADER_BYTES, layout.payload_offset, *layout.offsets().tolist()}
    n_whole = 0
    for cut in sorted(cuts):
        spliced = a[:cut] + b[cut:]
        sink = io.BytesIO()
        try:
            decode_stream(io.BytesIO(spliced), sink)
        except LazyWeightsError:
            continue
        assert sink.getvalue() in (first, second)
        n_whole += 1
    assert n_whole < len(cuts) // 2
    count_cases("spliced files", len(cuts))


def test_splices_of_units(dense: Sample, count_cases: COUNT) -> None:
    """The payload of one unit in the place of another, with a table that fits its size and kind."""
    n_cases = 0
    n = len(dense.layout.units)
    for i in range(n):
        for j in range(n):
            if i != j:
                parts = Parts.of(dense.coded)
                parts.payloads[i], parts.kinds[i] = parts.payloads[j], parts.kinds[j]
                assert isinstance(streamed(parts.seal(), dense.source), LazyWeightsError), (i, j)
                n_cases += 1
    count_cases("units in the place of others", n_cases)


def test_splices_of_heads(dense: Sample, tmp_path: Path) -> None:
    """The head and unit table of one preset with the payload of the other."""
    other = encode_bytes(dense.source, tmp_path, preset="unit")
    a, b = Parts.of(dense.coded), Parts.of(other)
    for ours, theirs in ((a, b), (b, a)):
        spliced = replace(ours, kinds=theirs.kinds, checksums=theirs.checksums, payloads=theirs.payloads)
        for table in (ours.table(), theirs.table()):
            assert isinstance(streamed(spliced.seal(table=table), dense.source), LazyWeightsError)


# Resealed: every checksum is right.


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
def test_resealed_header(sample: Sample, field: str, value: Any, expected: type[LazyWeightsError], count_cases: COUNT) -> None:
    coded = Parts.of(sample.coded).seal(**{field: value})
    assert isinstance(streamed(coded, sample.source), expected)
    assert all(isinstance(error, expected) for error in from_file(sample, coded))
    count_cases("resealed headers", 1)


@pytest.mark.parametrize("field", ["source_size", "file_size", "head_bytes", "head_raw_bytes", "n_units", "payload_offset_words"])
def test_resealed_header_off_by_little(sample: Sample, field: str, count_cases: COUNT) -> None:
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


def first_coded(head: Head, type_name: str = "Q4_K") -> int:
    return next(i for i, s in enumerate(head.spans) if s.is_coded and s.type_id == TYPE_BY_NAME[type_name].type_id)


def changed_span(head: Head, index: int, **fields: Any) -> Head:
    spans = list(head.spans)
    spans[index] = replace(spans[index], **fields)
    return Head(spans, head.tensors, head.table_sets)


def changed_plan(head: Head, **fields: Any) -> Head:
    return changed_span(head, first_coded(head), plan=replace(plan_of(head), **fields))


def changed_lengths(head: Head, lengths: Callable[[np.ndarray], np.ndarray]) -> Head:
    sets = [s.copy() for s in head.table_sets]
    sets[0][0] = lengths(sets[0][0])
    return Head(head.spans, head.tensors, sets)


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
    tensors[k] = replace(tensors[k], **fields)
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
    "an empty table set": (lambda h: Head(h.spans, h.tensors, [h.table_sets[0][:0]]), FormatError),
    "side table out of range": (lambda h: changed_plan(h, side_tables=full(255, plan_of(h).side_tables)), FormatError),
    "cell table out of range": (lambda h: changed_plan(h, cell_tables=full(len(h.table_sets[0]), plan_of(h).cell_tables)), FormatError),
    "lengths of no code": (lambda h: changed_lengths(h, lambda old: full(0, old)), FormatError),
    "lengths too short": (lambda h: changed_lengths(h, lambda _: lengths_of(_0=1, _1=1, _2=1)), FormatError),
    "lengths too long": (lambda h: changed_lengths(h, lambda _: lengths_of(_0=1, _1=3)), FormatError),
    "lengths of 12": (lambda h: changed_lengths(h, lambda _: lengths_of(_0=12, _1=12)), FormatError),
    "lengths of 255": (lambda h: changed_lengths(h, lambda old: full(255, old)), FormatError),
    "one symbol of length 2": (lambda h: changed_lengths(h, lambda _: lengths_of(_7=2)), FormatError),
    "span too long": (lambda h: changed_span(h, 0, n_bytes=h.spans[0].n_bytes + 1), FormatError),
    "span too short": (lambda h: changed_span(h, 0, n_bytes=h.spans[0].n_bytes - 1), FormatError),
    "empty span": (lambda h: changed_span(h, 0, n_bytes=0), FormatError),
    "span of 2**62": (lambda h: changed_span(h, 0, n_bytes=1 << 62), LimitError),
    "spans that do not add up": (lambda h: Head(h.spans[:-1], [t for t in h.tensors if t.span < len(h.spans) - 1], h.table_sets), FormatError),
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
    "a type of another size": (lambda h: changed_span(h, first_coded(h), type_id=TYPE_BY_NAME["Q5_K"].type_id), FormatError),
    "a type that is not coded": (lambda h: changed_span(h, first_coded(h), type_id=TYPE_BY_NAME["I8"].type_id), FormatError),
    "an unknown type": (lambda h: changed_span(h, first_coded(h), type_id=77), FormatError),
    "a type of 2**40": (lambda h: changed_span(h, first_coded(h), type_id=1 << 40), FormatError),
    "a verbatim tensor outside": (lambda h: verbatim_tensor(h, offset=1 << 40), FormatError),
    "a verbatim tensor at 2**63": (lambda h: verbatim_tensor(h, offset=1 << 63), FormatError),
    "a verbatim tensor of 2**63": (lambda h: verbatim_tensor(h, n_bytes=1 << 63), FormatError),
    "a verbatim tensor over a coded span": (lambda h: verbatim_tensor(h, offset=next(t.offset for t in h.tensors if h.spans[t.span].is_coded), n_bytes=8), OffsetError),
}  # fmt: skip


@pytest.mark.parametrize("name", HEAD_ATTACKS)
def test_resealed_head(dense: Sample, name: str, count_cases: COUNT) -> None:
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
    [{"shape": (701,)}, {"shape": (7, 99)}, {"shape": (0,)}, {"shape": (700, 0)}, {"shape": ()}, {"shape": (1 << 62, 4)},
     {"shape": (1 << 40, 1 << 40)}, {"n_bytes": 699}, {"n_bytes": 0}, {"type_id": 2}, {"type_id": 99}, {"type_id": 0},
     {"shape": (7, 0, 3)}, {"shape": (700, 1 << 32, 1 << 32, 0)}],
)  # fmt: skip
def test_verbatim_tensor_that_does_not_fit(dense: Sample, fields: dict[str, Any], count_cases: COUNT) -> None:
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
        try:
            with CodedFile(path) as file:
                call(file)
        except (LazyWeightsError, IndexError):
            pass
    for other in (lambda: inspect_file(path), lambda: verify_file(path, threads=1)):
        try:
            other()
        except LazyWeightsError:
            pass
    count_cases("resealed heads", 1)


def test_raw_head_that_ends_early(dense: Sample, count_cases: COUNT) -> None:
    whole = Parts.of(dense.coded).head
    for n in range(0, len(whole), max(1, len(whole) // 300)):
        parts = Parts.of(dense.coded)
        parts.head = whole[:n]
        assert isinstance(streamed(parts.seal(), dense.source), FormatError), n
        count_cases("resealed heads", 1)
    parts = Parts.of(dense.coded)
    parts.head = whole + b"\0"
    assert isinstance(streamed(parts.seal(), dense.source), FormatError)


def test_raw_head_with_changed_bytes(sample: Sample, count_cases: COUNT) -> None:
    """Random changes of the head before compression: every number, length and table of it, sealed."""
    rng = np.random.default_rng(40)
    whole = Parts.of(sample.coded).head
    parts = Parts.of(sample.coded)
    n_cases = 1500
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


def read_whatever(path: Path) -> None:
    """Read every tensor of a file whose head may lie: anything but an untyped error is right."""
    try:
        with CodedFile(path) as file:
            for name in file.keys():
                for call in (
                    lambda name=name, file=file: file.get_tensor(name),
                    lambda name=name, file=file: file.get_rows(name, 0, 1),
                    lambda name=name, file=file: file.get_expert(name, 0),
                    lambda name=name, file=file: file.payload_bytes(name, 0, 1),
                ):
                    try:
                        call()
                    except (LazyWeightsError, IndexError):
                        pass
        inspect_file(path)
    except LazyWeightsError:
        pass


# The unit table.


def units_of_kind(layout: Layout, *kinds: int) -> list[int]:
    return np.flatnonzero(np.isin(layout.kinds, kinds)).tolist()


def test_kinds_that_a_span_cannot_have(sample: Sample, count_cases: COUNT) -> None:
    first = 0
    for span in sample.layout.head.spans:
        # The header of the GGUF file may have a kind of its own, so verbatim spans are tried with the coded ones only.
        wrong = {ZSTD, 14, 15} if span.is_coded else {CODED, CODED_UNFORCED, LOCKSTEP, 14, 15}
        for unit in {first, first + span.n_units - 1}:
            for kind in wrong:
                parts = Parts.of(sample.coded)
                parts.kinds[unit] = kind
                assert isinstance(streamed(parts.seal(), sample.source), FormatError), (unit, kind)
                count_cases("resealed unit tables", 1)
        first += span.n_units


def test_kinds_exchanged(sample: Sample, count_cases: COUNT) -> None:
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
def test_unit_sizes_that_do_not_fit_the_file(sample: Sample, size: int, count_cases: COUNT) -> None:
    """A size in the table that is not that of the payload: the offsets no longer add up."""
    for unit in range(len(sample.layout.units)):
        if -(-int(sample.layout.sizes[unit]) // 4) == -(-size // 4):
            continue
        parts = Parts.of(sample.coded)
        table = parts.table()
        table["size"][unit] = size | parts.kinds[unit] << 28
        assert isinstance(streamed(parts.seal(table=table), sample.source), OffsetError)
        count_cases("resealed unit tables", 1)


def test_unit_sizes_with_payload(sample: Sample, count_cases: COUNT) -> None:
    """Payloads that are longer or shorter than they should be, with a table and offsets that agree.

    Bytes behind a zstd frame may do no harm; all else is an error or does not matter to what is decoded.
    """
    names = unit_names(sample.layout)
    for unit in range(len(sample.layout.units)):
        payload = Parts.of(sample.coded).payloads[unit]
        for other in (b"", payload[:-1], payload[:-4], payload[: len(payload) // 2], payload + b"\0", payload + bytes(4), payload * 2,
                      payload + bytes(1 << 16)):
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


def test_unit_tables_with_random_entries(sample: Sample, count_cases: COUNT) -> None:
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
    return b"\x28\xb5\x2f\xfd" + bytes([0xE0]) + content_size.to_bytes(8, "little") + (1 | 1 << 3).to_bytes(3, "little") + b"x"


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


@pytest.mark.parametrize("frame", [zstd_frame(1 << 28), zstd_frame(1 << 40), zstd_frame((1 << 62) + 1), zstd_bomb(1 << 28)],
                         ids=["2**28", "2**40", "2**62", "bomb"])  # fmt: skip
def test_memory_for_a_verbatim_chunk_that_declares_much(dense: Sample, frame: bytes) -> None:
    """The last span, not the first: the header of the GGUF file may have a kind of its own."""
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


# Payloads of nonsense.


@pytest.fixture(params=["default", "scalar"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run with the kernels of this CPU, and with the scalar ones."""
    if request.param == "scalar":
        module, function = scalar_decode_groups()
        monkeypatch.setattr(module, "decode_groups", function)
    return str(request.param)


@pytest.fixture
def no_checksums(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Row groups go through without a look at their checksums."""
    monkeypatch.setattr(decoder, "check_units", lambda *_: None)
    yield


def nonsense(payload: bytes, rng: np.random.Generator, how: int) -> bytes:
    """Return another payload of the same length: noise, extremes, or a few changes."""
    n = len(payload)
    if how == 0:
        return rng.bytes(n)
    if how == 1:
        return bytes([0x00, 0xFF, 0xAA][int(rng.integers(3))] for _ in range(1)) * n
    out = bytearray(payload)
    if not n:
        return payload
    if how == 2:
        at = int(rng.integers(n))
        out[at : at + 64] = rng.bytes(len(out[at : at + 64]))
    else:
        for _ in range(int(rng.integers(1, 4))):
            out[int(rng.integers(n))] ^= 1 << int(rng.integers(8))
    return bytes(out)


@pytest.mark.parametrize("type_id", CODABLE, ids=type_label)
@pytest.mark.usefixtures("no_checksums")
def test_nonsense_payloads(type_id: int, kernels: str, tmp_path: Path, count_cases: COUNT) -> None:
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
        for i in range(36):
            parts = Parts.of(coded) if i == 0 else replace(whole, payloads=list(whole.payloads))
            for unit in range(units.start, units.stop):
                if rng.random() < 0.7:
                    parts.payloads[unit] = nonsense(parts.payloads[unit], rng, i % 4)
            damaged = parts.seal()
            sink = io.BytesIO()
            try:
                decode_stream(io.BytesIO(damaged), sink)
            except LazyWeightsError as error:
                assert error.tensor == "a", error
                assert error.row_group is not None
            else:
                assert len(sink.getvalue()) == len(source)
            n_cases += 1
    count_cases(f"payloads of nonsense, {kernels} kernels", n_cases)


def test_planes_that_cannot_be_packed(tmp_path: Path) -> None:
    """TQ1_0 has bytes for some escapes only: a table that decodes another one for no bits gives a plane without bytes."""
    type_id, shape = TYPE_BY_NAME["TQ1_0"].type_id, (256, 140)
    source = build_gguf([("a", type_id, shape, tensor_bytes(type_id, shape, np.random.default_rng(45)))])
    parts = Parts.of(encode_bytes(source, tmp_path))
    head = parts.unpack()
    index = first_coded(head, "TQ1_0")
    plan = head.spans[index].plan
    assert plan is not None
    tables = head.table_sets[plan.table_set]
    side_tables = plan.side_tables.copy()
    side_tables[-1] = len(tables)
    changed = changed_span(head, index, plan=replace(plan, side_tables=side_tables))
    changed.table_sets[plan.table_set] = np.concatenate([tables, lengths_of(_2=1)[None]])
    parts.head = coded_file.pack_head(changed)
    error = streamed(parts.seal(), source)
    assert error is not None
    assert (error.tensor, error.row_group) == ("a", 0)
    path = tmp_path / "damaged.lw"
    path.write_bytes(parts.seal())
    with CodedFile(path) as file, pytest.raises(LazyWeightsError) as caught:
        file.get_rows("a", 64, 65)
    assert (caught.value.tensor, caught.value.row_group) == ("a", 1)


def test_nonsense_under_its_own_checksum(sample: Sample, monkeypatch: pytest.MonkeyPatch, count_cases: COUNT) -> None:
    """Who seals nonsense gets nonsense, and still the SHA-256 of the source tells."""
    rng = np.random.default_rng(43)
    n_decoded = 0
    for i in range(120):
        parts = Parts.of(sample.coded)
        unit = int(rng.choice(units_of_kind(sample.layout, CODED, CODED_UNFORCED, LOCKSTEP)))
        parts.payloads[unit] = nonsense(parts.payloads[unit], rng, 3)
        with monkeypatch.context() as patched:
            patched.setattr(decoder, "check_units", lambda *_: None)
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
    count_cases("nonsense under its own checksum", 120)


def test_row_groups_in_nonsense_tables(dense: Sample, kernels: str, monkeypatch: pytest.MonkeyPatch, count_cases: COUNT) -> None:
    """Valid plans that are not those of the payload: other tables, bases and field modes."""
    monkeypatch.setattr(decoder, "check_units", lambda *_: None)
    rng = np.random.default_rng(44)
    parts = Parts.of(dense.coded)
    head = parts.unpack()
    for _ in range(150):
        spans = []
        for span in head.spans:
            if span.plan is not None:
                n = len(head.table_sets[span.plan.table_set])
                plan = replace(
                    span.plan,
                    side_tables=rng.integers(0, n, span.plan.side_tables.shape).astype(np.uint8),
                    cell_tables=rng.integers(0, n, span.plan.cell_tables.shape).astype(np.uint8),
                    bases=tuple(rng.integers(0, 256, len(span.plan.bases)).tolist()),
                )
                spans.append(replace(span, plan=plan))
            else:
                spans.append(span)
        parts.head = coded_file.pack_head(Head(spans, head.tensors, head.table_sets))
        sink = io.BytesIO()
        try:
            decode_stream(io.BytesIO(parts.seal()), sink)
        except LazyWeightsError as error:
            assert isinstance(error, CodecError | FormatError) or error.tensor
        else:
            assert len(sink.getvalue()) == len(dense.source)
    count_cases(f"plans of nonsense, {kernels} kernels", 150)


def test_size_of_the_sample(sample: Sample) -> None:
    """The sample is large enough to hold every part, and small enough for thousands of cases."""
    assert 20_000 < len(sample.coded) < 200_000
    assert len(sample.layout.units) > 10
