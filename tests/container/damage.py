"""What the tests of damaged and hostile files share: samples, ways to read them, and ways to spoil them."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lazyweights.blocks import TYPE_BY_NAME
from lazyweights.container.coded_file import HEADER, HEADER_BYTES, UNIT_DTYPE, Head, Layout
from lazyweights.container.decoder import decode_file, decode_stream, verify_file
from lazyweights.container.inspect import inspect_file
from lazyweights.container.reader import CodedFile
from lazyweights.errors import LazyWeightsError
from tests.container.coded_samples import HEADER_FIELDS, encode_bytes, layout_of, mixed_gguf

CountCases = Callable[[str, int], None]


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


def make_sample(folder: Path, preset: str) -> Sample:
    """Encode `mixed_gguf`."""
    source = mixed_gguf()
    coded = encode_bytes(source, folder, preset=preset)
    return Sample(source, coded, layout_of(coded), folder)


def error_of(call: Callable[[], Any]) -> LazyWeightsError | None:
    """Return the typed error of a call, None where it went well."""
    try:
        call()
    except LazyWeightsError as error:
        return error
    return None


def streamed(coded: bytes, source: bytes) -> LazyWeightsError | None:
    """Decode from a stream: return the error, or None for the right bytes. What came before an error must be right."""
    sink = io.BytesIO()
    error = error_of(lambda: decode_stream(io.BytesIO(coded), sink))
    if error is None:
        assert sink.getvalue() == source
    else:
        assert source.startswith(sink.getvalue())
        assert error.message
    return error


def from_file(sample: Sample, coded: bytes) -> list[LazyWeightsError | None]:
    """Decode, verify, inspect and read a file of these bytes: return the error of each, None for the right bytes."""
    path = sample.write(coded)
    output = sample.folder / "back.gguf"
    errors = [error_of(lambda: decode_file(path, output, threads=1))]
    assert output.exists() == (errors[0] is None)
    if output.exists():
        assert output.read_bytes() == sample.source
        output.unlink()
    assert not [name for name in os.listdir(sample.folder) if name.endswith(".part")]
    errors.append(error_of(lambda: verify_file(path, threads=1)))
    errors.append(error_of(lambda: inspect_file(path)))
    errors.append(error_of(lambda: read_everything(path, sample.source)))
    for error in errors:
        if error is not None:
            assert error.path == str(path)
            assert str(error).startswith(str(path))
    return errors


def read_everything(path: Path, source: bytes) -> None:
    """Read every tensor that a coded file names; what comes must be the bytes of the source at its place."""
    with CodedFile(path) as file:
        names = file.keys()
        for name in names:
            info = file.tensor_info(name)
            assert file.get_tensor(name).tobytes() == source[info.offset : info.offset + info.n_bytes]


def same_kind(errors: list[LazyWeightsError | None]) -> set[type]:
    return {type(error) for error in errors}


def flipped(data: bytes, bit: int) -> bytes:
    out = bytearray(data)
    out[bit // 8] ^= 1 << bit % 8
    return bytes(out)


def some_bits(first: int, last: int, n: int, seed: int) -> list[int]:
    """Choose at most `n` bits of the bytes ``first .. last - 1``."""
    bits = range(8 * first, 8 * last)
    return list(bits) if len(bits) <= n else random.Random(seed).sample(bits, n)


def unit_names(layout: Layout) -> list[tuple[str | None, int]]:
    """Return the tensor (None: verbatim bytes) and the number within its span of each unit."""
    return [(span.name or None, k) for span in layout.head.spans for k in range(span.n_units)]


def units_of_kind(layout: Layout, *kinds: int) -> list[int]:
    return np.flatnonzero(np.isin(layout.kinds, kinds)).tolist()


def nonsense(payload: bytes, rng: np.random.Generator, how: int) -> bytes:
    """Return another payload of the same length: noise, extremes, or a few changes."""
    n = len(payload)
    if how == 0:
        return rng.bytes(n)
    if how == 1:
        return bytes([(0x00, 0xFF, 0xAA)[int(rng.integers(3))]]) * n
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


def first_coded(head: Head, type_name: str = "Q4_K") -> int:
    """Return the number of the first coded span of a type."""
    return next(i for i, s in enumerate(head.spans) if s.is_coded and s.type_id == TYPE_BY_NAME[type_name].type_id)
