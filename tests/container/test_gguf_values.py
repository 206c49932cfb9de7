"""The start of a GGUF file: hostile headers one by one, metadata values, and files that are not GGUF."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from lazyweights.container import gguf_values
from lazyweights.container.gguf_scan import ElidedArray, Span, describe_bytes, read_metadata, scan_gguf
from lazyweights.errors import FormatError
from tests.container.test_gguf_scan import f32, scan_checked, spans_of
from tests.make_gguf import (
    ARRAY,
    STRING,
    U8,
    U32,
    U64,
    Typed,
    build_gguf,
    pack_header,
    pack_pair,
    pack_string,
    pack_tensor_info,
    plausible_metadata,
)


def assert_verbatim(data: bytes, problem: str) -> None:
    """The header cannot be followed: one span, no tensors, and this reason."""
    scan = scan_checked(data)
    assert scan.problem == problem
    assert scan.spans == (Span(0, len(data), None),)
    assert scan.tensors == ()
    assert scan.data_offset == len(data)
    read_metadata(data)


# Headers that cannot be followed


PAIR = pack_string("k")  # 9 bytes, so that a value type follows at offset 33


def one_pair(value: bytes) -> bytes:
    return pack_header(0, 1) + PAIR + value


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"GGUF", "offset 4: the version needs 4 bytes, 0 are left"),
        (b"GGUF\x03\x00", "offset 4: the version needs 4 bytes, 2 are left"),
        (b"GGUF\x04\x00\x00\x00" + bytes(100), "offset 4: GGUF version 4 is not known"),
        (b"GGUF\x00\x00\x00\x00" + bytes(100), "offset 4: GGUF version 0 is not known"),
        (b"GGUF\x03\x00\x01\x00" + bytes(100), "offset 4: GGUF version 65539 is not known"),
        (b"GGUF\x03\x00\x00\x00" + bytes(7), "offset 8: the tensor count needs 8 bytes, 7 are left"),
        (b"GGUF\x03\x00\x00\x00" + bytes(12), "offset 16: the pair count needs 8 bytes, 4 are left"),
        (
            pack_header(1 << 63, 0) + bytes(100),
            f"offset 24: a header of {1 << 63} tensors and 0 pairs needs {24 << 63} bytes, 100 are left",
        ),
        (
            pack_header(0, (1 << 64) - 1) + bytes(100),
            f"offset 24: a header of 0 tensors and {2**64 - 1} pairs needs {13 * (2**64 - 1)} bytes, 100 are left",
        ),
        (pack_header(0, 1) + bytes(8) + b"\x04" + bytes(4), "offset 36: the value of '' needs 4 bytes, 1 are left"),
        (one_pair(b"\x04"), "offset 24: a header of 0 tensors and 1 pairs needs 13 bytes, 10 are left"),
        (one_pair(struct.pack("<I", 7)), "offset 37: the value of 'k' needs 1 bytes, 0 are left"),
        (one_pair(struct.pack("<II", 13, 0)), "offset 37: the value of 'k' has the unknown value type 13"),
        (one_pair(struct.pack("<IQ", STRING, 5) + b"abcd"), "offset 45: the value of 'k' needs 5 bytes, 4 are left"),
        (
            one_pair(struct.pack("<IQ", STRING, 1 << 63) + b"abcd"),
            f"offset 45: the value of 'k' needs {1 << 63} bytes, 4 are left",
        ),
        (
            pack_header(0, 1) + struct.pack("<Q", (1 << 64) - 1) + bytes(50),
            f"offset 32: the key of pair 0 needs {2**64 - 1} bytes, 50 are left",
        ),
        (
            pack_header(0, 1) + pack_string(b"k" * 65536) + bytes(50),
            "offset 32: the key of pair 0 of 65536 bytes is longer than 65535",
        ),
        (
            one_pair(struct.pack("<IIQ", ARRAY, U8, 1 << 60) + bytes(99)),
            f"offset 49: the value of 'k' needs {1 << 60} bytes, 99 are left",
        ),
        (
            one_pair(struct.pack("<IIQ", ARRAY, STRING, 1 << 63) + bytes(99)),
            f"offset 49: the value of 'k' needs {8 << 63} bytes, 99 are left",
        ),
        (
            one_pair(struct.pack("<IIQ", ARRAY, ARRAY, 1 << 63) + bytes(99)),
            f"offset 49: the value of 'k' needs {12 << 63} bytes, 99 are left",
        ),
        (one_pair(struct.pack("<IIQ", ARRAY, 99, 0)), "offset 49: the value of 'k' has the unknown value type 99"),
        (
            one_pair(struct.pack("<IIQQQ", ARRAY, STRING, 2, 1 << 63, 0)),
            "offset 49: a string of the value of 'k' leaves the file",
        ),
        (
            one_pair(struct.pack("<IIQQQ", ARRAY, STRING, 2, 0, 1)),
            "offset 49: a string of the value of 'k' leaves the file",
        ),
        (
            one_pair(struct.pack("<IIQQQ", ARRAY, STRING, 2, 5, 1)),
            "offset 49: a string of the value of 'k' leaves the file",
        ),
        (
            one_pair(struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 9),
            "offset 133: the value of 'k' nests arrays deeper than 8",
        ),
        (
            pack_header(1, 0) + pack_tensor_info("t", 0, (1, 1, 1, 1, 1), 0),
            "offset 33: tensor 't' has 5 dimensions, more than 4",
        ),
        (
            pack_header(1, 0) + pack_string("t") + struct.pack("<I", (1 << 32) - 1) + bytes(99),
            "offset 33: tensor 't' has 4294967295 dimensions, more than 4",
        ),
        (
            pack_header(1, 0) + struct.pack("<Q", 1 << 63) + bytes(99),
            f"offset 32: the name of tensor 0 needs {1 << 63} bytes, 99 are left",
        ),
        (
            pack_header(1, 0) + pack_tensor_info("t", 0, (1, 1), 0)[:-1],
            "offset 57: the description of tensor 0 needs 8 bytes, 7 are left",
        ),
    ],
)
def test_header_that_cannot_be_followed(data: bytes, problem: str) -> None:
    assert_verbatim(data, problem)


@pytest.mark.parametrize(
    ("pairs", "problem"),
    [
        ([0], "offset 53: general.alignment is 0"),
        ([Typed(U64, 32)], "offset 53: general.alignment has the value type u64, not u32"),
        (["32"], "offset 53: general.alignment has the value type str, not u32"),
        ([Typed(ARRAY, [32], U32)], "offset 53: general.alignment has the value type arr, not u32"),
        ([32, 64], "offset 86: general.alignment is given twice, as 32 and as 64"),
    ],
)
def test_absurd_alignment(pairs: list[Any], problem: str) -> None:
    packed = b"".join(pack_pair("general.alignment", value) for value in pairs)
    info = pack_tensor_info("t", 0, (4,), 0)
    assert_verbatim(pack_header(1, len(pairs)) + packed + info + bytes(100), problem)


def test_huge_alignment_puts_tensors_beyond_the_end() -> None:
    data = pack_header(1, 1) + pack_pair("general.alignment", 1 << 31) + pack_tensor_info("t", 0, (4,), 0) + bytes(99)
    scan = scan_checked(data)
    assert scan.data_offset == 1 << 31
    assert spans_of(scan) == [(0, len(data), None)]
    assert scan.problem == ("tensor 't' at offset 2147483648 has 16 bytes, 16 of them are missing from the file")


@pytest.mark.parametrize(
    ("limit", "problem"),
    [
        ("MAX_PAIRS", "offset 8: 3 pairs are more than the 2 that are followed"),
        ("MAX_TENSORS", "offset 8: 3 tensors are more than the 2 that are followed"),
        ("MAX_ARRAY_STRINGS", "offset 49: the value of 's' has more items than are followed"),
        ("MAX_NESTED_ARRAYS", "offset 98: the value of 'n' has more items than are followed"),
    ],
)
def test_limits(limit: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = {"s": ["", "", ""], "n": Typed(ARRAY, [[], [], []], ARRAY), "k": 1}
    data = build_gguf([(name, 0, (1,), f32(1)) for name in "abc"], pairs)
    assert scan_checked(data).problem is None
    monkeypatch.setattr(gguf_values, limit, 2)
    assert_verbatim(data, problem)


def test_version_1_truncated_at_every_byte() -> None:
    data = build_gguf([("a", 0, (5,), f32(5))], {"k": ["x", "yz"], "n": Typed(ARRAY, [[1], [2]], ARRAY)}, version=1)
    for size in range(4, len(data)):
        assert scan_checked(data[:size]).version == (1 if size >= 8 else 0)
        read_metadata(data[:size])


# Metadata


def test_metadata_values() -> None:
    metadata = read_metadata(build_gguf([], plausible_metadata() | {"raw": b"a\xff", "nest": [[1, 2], [], [3]]}))
    assert list(metadata)[:2] == ["general.architecture", "general.name"]
    assert metadata["general.name"] == "Every type \u2713"
    assert metadata["llama.attention.layer_norm_rms_epsilon"] == float(np.float32(1e-5))
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    assert metadata["test.u64"] == (1 << 64) - 1
    assert metadata["test.i64"] == -(1 << 63)
    assert metadata["test.bools"] == [True, False]
    assert metadata["test.empty"] == []
    assert metadata["tokenizer.ggml.scores"] == [-float(i) for i in range(300)]
    assert metadata["raw"] == "a\udcff"
    assert metadata["nest"] == [[1, 2], [], [3]]


def test_metadata_elides_long_arrays() -> None:
    nested = Typed(ARRAY, [[1, 2, 3, 4], [5], ["a", "bb", "c", "d"]], ARRAY)
    pairs = {"s": ["a", "bb", "c", "d"], "i": [1, 2, 3], "n": nested, "m": Typed(ARRAY, [[1]] * 4, ARRAY), "end": 7}
    metadata = read_metadata(build_gguf([], pairs), max_array=3)
    assert metadata == {
        "s": ElidedArray("str", 4),
        "i": [1, 2, 3],
        "n": [ElidedArray("u32", 4), [5], ElidedArray("str", 4)],
        "m": ElidedArray("arr", 4),
        "end": 7,
    }
    assert str(metadata["s"]) == "arr[str,4]"
    assert read_metadata(build_gguf([], {"i": [1], "e": []}), max_array=0) == {"i": ElidedArray("u32", 1), "e": []}


def test_metadata_elides_long_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_values, "MAX_TEXT_BYTES", 4)
    metadata = read_metadata(build_gguf([], {"s": "abcde", "t": ["abcd", "abcde"]}))
    assert metadata == {"s": ElidedArray("byte", 5), "t": ["abcd", ElidedArray("byte", 5)]}


def test_metadata_keeps_the_first_of_repeated_keys_and_all_before_a_problem() -> None:
    good = pack_pair("k", 1) + pack_pair("k", 2) + pack_pair("z", "s")
    assert read_metadata(pack_header(0, 3) + good) == {"k": 1, "z": "s"}
    assert read_metadata(pack_header(0, 4) + good + pack_string("bad") + bytes([99, 0, 0, 0])) == {"k": 1, "z": "s"}


# What is not GGUF


@pytest.mark.parametrize(
    ("head", "what"),
    [
        (b"", "an empty file"),
        (b"GG", "the first bytes of a GGUF file, cut short"),
        (b"FUGG\x03\x00\x00\x00", "a GGUF file with swapped bytes"),
        (gguf_values.CODED_MAGIC + bytes(8), "a LazyWeights coded file"),
        (b"\x28\xb5\x2f\xfd\x04", "a zstd stream"),
        (b"\x1f\x8b\x08\x00", "a gzip stream"),
        (b"\xfd7zXZ\x00\x00", "an xz stream"),
        (b"BZh91AY", "a bzip2 stream"),
        (b"PK\x03\x04\x00\x00", "a zip archive (PyTorch checkpoint?)"),
        (struct.pack("<Q", 4000) + b'{"__metadata__"', "a safetensors file"),
        (struct.pack("<II", 0x67676A74, 3), "an old GGML/GGJT file"),
        (struct.pack("<II", 0x67676D6C, 3), "an old GGML/GGJT file"),
        (struct.pack("<II", 0x67676D66, 1), "an old GGML/GGJT file"),
        (b"\r\n <!DOCTYPE HTML><html>", "an HTML page (failed download?)"),
        (b"\xef\xbb\xbf<html lang='en'>", "an HTML page (failed download?)"),
        (b"<?xml version='1.0'?><Error>", "an XML document (failed download?)"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "a Git LFS pointer"),
        (b'{"error": "not found"}', "a JSON text"),
        (b"Entry not found", "a text file"),
        ("a caf\u00e9".encode()[:-1], "a text file"),
        (bytes(64), "nothing but zero bytes (unfinished download?)"),
        (b"\x00\x01\x02\x03\x04", "an unknown kind of file (first bytes 00 01 02 03)"),
        (b"\xff", "an unknown kind of file (first bytes ff)"),
        (b"a" * 257 + b"ustar\x00", "a tar archive"),
    ],
)
def test_what_is_not_gguf(head: bytes, what: str) -> None:
    assert describe_bytes(head) == what
    for function in (scan_gguf, read_metadata):
        with pytest.raises(FormatError, match="not a GGUF file: it looks like") as caught:
            function(head)
        assert caught.value.message.endswith(what)
