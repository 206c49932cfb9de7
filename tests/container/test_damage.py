"""Damaged coded files: bytes that changed on the way. Every outcome is a typed error or the right bytes."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lazyweights.blocks import TYPE_BY_NAME
from lazyweights.container.coded_file import HEADER_BYTES, TRAILER_BYTES
from lazyweights.container.decoder import decode_file, decode_stream, verify_file
from lazyweights.container.inspect import inspect_file
from lazyweights.container.reader import CodedFile
from lazyweights.errors import (
    ChecksumError,
    FormatError,
    LazyWeightsError,
    NotCodedError,
    TruncatedError,
    VersionError,
)
from tests.container.coded_samples import Parts, encode_bytes, layout_of, mixed_gguf, tensor_bytes
from tests.container.damage import (
    CountCases,
    Sample,
    error_of,
    flipped,
    from_file,
    same_kind,
    some_bits,
    streamed,
    unit_names,
)
from tests.make_gguf import build_gguf


def test_size_of_the_sample(sample: Sample) -> None:
    """The sample is large enough to hold every part, and small enough for thousands of cases."""
    assert 20_000 < len(sample.coded) < 200_000
    assert len(sample.layout.units) > 10


# Not a coded file at all.


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "empty"),
        (mixed_gguf(), "GGUF"),
        (b"PK\x03\x04" + bytes(60), "not a coded file"),
        (b"\x7fELF" * 40, "not a coded file"),
        (bytes(1000), "not a coded file"),
    ],
    ids=["empty", "gguf", "zip", "program", "zeros"],
)
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


def test_truncated_anywhere(sample: Sample, count_cases: CountCases) -> None:
    rng = np.random.default_rng(31)
    edges = {b + d for b in sample.boundaries() for d in (-4, -1, 0, 1, 4)}
    sizes = edges | set(rng.integers(0, len(sample.coded), 200).tolist()) | {0, 1, 3, 4, 5}
    sizes = {n for n in sizes if 0 <= n < len(sample.coded)}
    for n in sorted(sizes):
        error = streamed(sample.coded[:n], sample.source)
        assert isinstance(error, NotCodedError if n < 4 else TruncatedError), n
    for n in sorted(sizes)[:: max(1, len(sizes) // 40)]:
        errors = from_file(sample, sample.coded[:n])
        assert same_kind(errors[:2]) == {NotCodedError if n < 4 else TruncatedError}, n
        assert all(isinstance(error, FormatError) for error in errors)
    count_cases("truncations", len(sizes))


def test_longer_than_it_says(sample: Sample) -> None:
    for tail in (b"x", bytes(4), sample.coded):
        assert same_kind(from_file(sample, sample.coded + tail)) == {TruncatedError}


# Flipped bits.


def test_flipped_bits_of_the_header(sample: Sample, count_cases: CountCases) -> None:
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


def test_flipped_bits_of_head_and_unit_table(sample: Sample, count_cases: CountCases) -> None:
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


def test_flipped_bits_of_the_payload(sample: Sample, count_cases: CountCases) -> None:
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


def test_flipped_bits_of_a_file(sample: Sample, count_cases: CountCases) -> None:
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


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_report_the_same_damage(sample: Sample, threads: int) -> None:
    """Several threads decode ahead, but the first damage in the file is what is told, and no output is left."""
    output = sample.folder / "back.gguf"
    for bit in some_bits(sample.layout.payload_offset, len(sample.coded) - TRAILER_BYTES, 25, 47):
        path = sample.write(flipped(sample.coded, bit))
        expected = from_file(sample, flipped(sample.coded, bit))[0]
        error = error_of(lambda path=path: decode_file(path, output, threads=threads))
        assert str(error) == str(expected)
        assert output.exists() == (error is None)
        output.unlink(missing_ok=True)


def test_flipped_bits_of_the_trailer(sample: Sample, count_cases: CountCases) -> None:
    bits = some_bits(len(sample.coded) - TRAILER_BYTES, len(sample.coded), 80, 36)
    for bit in bits:
        streamed(flipped(sample.coded, bit), sample.source)
    for bit in bits[:10]:
        from_file(sample, flipped(sample.coded, bit))
    count_cases("flipped bits in trailers", len(bits))


def test_noise(sample: Sample, count_cases: CountCases) -> None:
    """Runs of bytes overwritten, zeroed, moved, repeated or taken out."""
    rng = np.random.default_rng(37)
    n_cases = 400
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
    if type_name == "I32":
        data = [rng.bytes(4 * 256 * 130) for _ in range(2)]
    first, second = (build_gguf([("a", type_id, shape, x), ("b", type_id, shape, y)]) for x, y in (data, data[::-1]))
    return first, second, encode_bytes(first, folder), encode_bytes(second, folder)


@pytest.mark.parametrize("type_name", ["I32", "Q4_0", "Q4_1", "F32"])
def test_splices(type_name: str, tmp_path: Path, count_cases: CountCases) -> None:
    first, second, a, b = twins(tmp_path, type_name)
    if type_name == "I32":
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


def test_splices_of_units(dense: Sample, count_cases: CountCases) -> None:
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


@pytest.mark.skipif(not os.path.isdir("/dev/fd"), reason="the system does not list open files")
@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_that_is_kept_keeps_no_file_open(tmp_path: Path, threads: int) -> None:
    coded = bytearray(encode_bytes(mixed_gguf(), tmp_path))
    coded[-TRAILER_BYTES - 200] ^= 255
    path = tmp_path / "damaged.lw"
    path.write_bytes(coded)
    before = len(os.listdir("/dev/fd"))
    for work in (lambda: verify_file(path, threads=threads), lambda: decode_file(path, tmp_path / "out", threads=threads)):
        with pytest.raises(LazyWeightsError) as caught:
            work()
        assert caught.value.path == str(path)
        assert len(os.listdir("/dev/fd")) == before
