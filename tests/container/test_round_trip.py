"""What is encoded decodes to the same bytes: every type, shape and odd file; and it is hardly ever longer."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lazyweights.blocks import GGML_TYPES, TYPE_BY_NAME
from lazyweights.codecs import TILE_ROWS
from lazyweights.container import batch_decode, decoder, encoder, group_decode
from lazyweights.container.coded_file import CHUNK_BYTES, CODED, CODED_UNFORCED, FILTERED, LOCKSTEP, RAW, ZSTD
from lazyweights.container.decoder import decode_file, decode_stream, verify_file
from lazyweights.container.encoder import encode_file
from lazyweights.container.jobs import Progress
from lazyweights.container.tensor_coder import HUFFMAN, RANS
from lazyweights.errors import FormatError, LazyWeightsError
from tests.container.coded_samples import (
    change_plane,
    coded_span,
    decode_bytes,
    encode_bytes,
    layout_of,
    mixed_gguf,
    scalar_decode_batch,
    scalar_decode_groups,
    tensor_bytes,
    type_label,
)
from tests.make_gguf import (
    Tensor,
    Typed,
    build_gguf,
    every_type_gguf,
    plausible_metadata,
    random_tensor_bytes,
    tensor_size,
)

PRESETS = ("dense", "unit")
ROWS = (1, 2, 63, 64, 65, 130)
FLOAT_COLUMNS = (1, 5, 33, 576)

OVERHEAD_BYTES = 1024
"""How much longer than its source a coded file may be, whatever it holds ..."""

OVERHEAD_BYTES_PER_MIB = 4
"""... and for each MiB: an index entry of 12 bytes for a chunk of 4 MiB, rounded up."""

LANE_FLUSH_BYTES = 32 * 8
"""What the lanes of a row group may hold at its end that nothing else fills."""

TABLES_BYTES = 300
"""What the tables of a tensor's own constant scales may cost: three of 800 bits (`table_pool.TABLE_COST_BITS`)."""


def longest_coded(n_bytes: int) -> int:
    return n_bytes + OVERHEAD_BYTES + OVERHEAD_BYTES_PER_MIB * n_bytes // (1 << 20)


def check_round_trip(data: bytes, folder: Path, preset: str = "dense") -> bytes:
    """Encode, verify, decode in every way; return the coded file."""
    coded = encode_bytes(data, folder, preset=preset)
    source, output, back = folder / "sample.gguf", folder / "sample.gguf.lw", folder / "back.gguf"
    verify_file(output, against=source, threads=1)
    decode_file(output, back, threads=1, force=True)
    assert back.read_bytes() == data
    assert decode_bytes(coded) == data
    return coded


def columns_of(type_id: int) -> tuple[int, ...]:
    block = GGML_TYPES[type_id].block_size
    return FLOAT_COLUMNS if block == 1 else (block, 3 * block)


@pytest.fixture(scope="module")
def every_type() -> bytes:
    return every_type_gguf(np.random.default_rng(1), slow_types=False)


@pytest.mark.parametrize("preset", PRESETS)
def test_file_with_every_type(every_type: bytes, tmp_path: Path, preset: str) -> None:
    coded = check_round_trip(every_type, tmp_path, preset)
    assert len(coded) < len(every_type)


@pytest.mark.parametrize("type_id", GGML_TYPES, ids=type_label)
def test_shapes_of_a_type(type_id: int, tmp_path: Path) -> None:
    rng = np.random.default_rng([2, type_id])
    tensors: list[Tensor] = []
    for columns in columns_of(type_id):
        flat = [(columns,), *((columns, rows) for rows in ROWS)]
        for shape in [*flat, (columns, 3, 5), (columns, 65, 2)]:
            tensors.append((f"quantized{shape}", type_id, shape, tensor_bytes(type_id, shape, rng)))
        for shape in [(columns, 65), (columns, 64, 2, 3)]:
            tensors.append((f"random{shape}", type_id, shape, random_tensor_bytes(type_id, shape, rng)))
    data = build_gguf(tensors)
    for preset in PRESETS:
        check_round_trip(data, tmp_path, preset)


@pytest.mark.parametrize("type_id", GGML_TYPES, ids=type_label)
def test_a_type_alone_in_its_file(type_id: int, tmp_path: Path) -> None:
    """Tables, contexts and modes then follow from this tensor alone."""
    rng = np.random.default_rng([3, type_id])
    shape = (columns_of(type_id)[-1], 70)
    for make in (tensor_bytes, random_tensor_bytes):
        check_round_trip(build_gguf([("a", type_id, shape, make(type_id, shape, rng))]), tmp_path)


@pytest.mark.parametrize("type_id", GGML_TYPES, ids=type_label)
def test_constant_tensor(type_id: int, tmp_path: Path) -> None:
    shape = (columns_of(type_id)[-1], 130)
    for fill, preset in [(0x00, "dense"), (0xFF, "dense"), (0x00, "unit")]:
        data = build_gguf([("a", type_id, shape, bytes([fill]) * tensor_size(type_id, shape))])
        check_round_trip(data, tmp_path, preset)


@pytest.mark.parametrize(("name", "dtype"), [("I8", np.int8), ("I16", np.int16)])
def test_integers(name: str, dtype: type, tmp_path: Path) -> None:
    """Integers are coded where that is smaller than zstd, and kept verbatim where zstd finds what no context tells."""
    rng = np.random.default_rng(4)
    type_id, shape = TYPE_BY_NAME[name].type_id, (320, 200)
    weights = rng.standard_normal((200, 320)) * np.exp(rng.standard_normal((200, 1)))
    values = np.rint(weights * np.iinfo(dtype).max / 64).clip(np.iinfo(dtype).min, np.iinfo(dtype).max).astype(dtype)
    values[0, :4] = np.iinfo(dtype).min, np.iinfo(dtype).max, -1, 0
    repeated = np.tile(values[3], (200, 1))
    data = build_gguf([("weights", type_id, shape, values.tobytes()), ("repeated", type_id, shape, repeated.tobytes())])
    layout = layout_of(check_round_trip(data, tmp_path))
    assert [span.name for span in layout.head.spans if span.is_coded] == ["weights"]
    _, units = coded_span(layout, "weights")
    planes = [values] if dtype is np.int8 else [values & 255, (values.astype(np.int32) + 128) >> 8 & 255]
    entropy_bits = 0.0
    for plane in planes:
        counts = np.unique(plane, return_counts=True)[1]
        entropy_bits -= float((counts * np.log2(counts / counts.sum())).sum())
    assert int(layout.sizes[units].sum()) < entropy_bits / 8


def test_all_constant_tensors_in_one_file(tmp_path: Path) -> None:
    tensors = [
        (f"{fill}.{t.name}", type_id, (768, 65), bytes([fill]) * tensor_size(type_id, (768, 65)))
        for type_id, t in GGML_TYPES.items()
        for fill in (0x00, 0x55, 0xFF)
    ]
    for preset in PRESETS:
        check_round_trip(build_gguf(tensors), tmp_path, preset)


SHARED_STEP = {
    "Q4_0": {"scale": 0x2C11},
    "Q4_1": {"scale": 0x2C11, "min": 0xB011},
    "Q5_0": {"scale": 0x2C11},
    "Q5_1": {"scale": 0x2C11, "min": 0xB011},
    "Q8_0": {"scale": 0xAC11},
    "IQ4_NL": {"scale": 0x2C11},
    "Q2_K": {"scale": 0x2C11, "min_scale": 0x2011, "sub_scale": 9, "sub_min": 7},
    "Q3_K": {"scale": 0x2C11, "sub_scale": 40},
    "Q4_K": {"scale": 0x2C11, "min_scale": 0x2011, "sub_scale": 63, "sub_min": 31},
    "Q5_K": {"scale": 0x2C11, "min_scale": 0x2011, "sub_scale": 63, "sub_min": 31},
    "Q6_K": {"scale": 0x2C11, "sub_scale": 100},
    "IQ4_XS": {"scale": 0x2C11, "sub_scale": 50},
    "MXFP4": {"scale": 120},
    "NVFP4": {"scale": 70},
    "TQ2_0": {"scale": 0x2C11},
    "Q1_0": {"scale": 0x2C11},
    "Q2_0": {"scale": 0x2C11},
}
CODE_BITS = {"Q8_0": 8, "Q6_K": 6, "Q5_0": 5, "Q5_1": 5, "Q5_K": 5, "Q3_K": 3, "Q2_K": 2, "TQ2_0": 2, "Q2_0": 2}
CODE_BITS["Q1_0"] = 1


@pytest.mark.parametrize("name", SHARED_STEP)
def test_shared_step_costs_nothing(name: str, tmp_path: Path) -> None:
    """Constant side planes: the file is its codes (uniform ones: no saving there) and what any file costs."""
    type_id, shape = TYPE_BY_NAME[name].type_id, (2048, 192)
    rng = np.random.default_rng([4, type_id])
    random = random_tensor_bytes(type_id, shape, rng)
    data = build_gguf([("a", type_id, shape, change_plane(type_id, random, shape, **SHARED_STEP[name]))])
    coded = check_round_trip(data, tmp_path)
    code_bytes = 2048 * 192 * CODE_BITS.get(name, 4) // 8
    assert len(coded) <= code_bytes + 3 * LANE_FLUSH_BYTES + 2 * OVERHEAD_BYTES


def test_every_tensor_has_its_own_shared_step(tmp_path: Path) -> None:
    type_id, shape = TYPE_BY_NAME["Q8_0"].type_id, (512, 64)
    rng = np.random.default_rng(5)
    tensors: list[Tensor] = []
    for i in range(20):
        random = random_tensor_bytes(type_id, shape, rng)
        tensors.append((f"{i}", type_id, shape, change_plane(type_id, random, shape, scale=0x2000 + 97 * i)))
    coded = check_round_trip(build_gguf(tensors), tmp_path)
    assert len(coded) <= 20 * (512 * 64 + LANE_FLUSH_BYTES + TABLES_BYTES) + 4 * OVERHEAD_BYTES


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    ("name", "codes"),
    [
        *(("Q4_0", 0), ("Q4_0", 15), ("Q4_1", 0), ("Q4_1", 7), ("Q5_0", 0), ("Q5_1", 31), ("Q8_0", 127), ("Q8_0", 5)),
        *(("Q6_K", 63), ("Q4_K", 8), ("TQ2_0", 3), ("Q1_0", 1)),
    ],
)
def test_one_symbol(name: str, codes: int, preset: str, tmp_path: Path) -> None:
    """All codes equal, scales not: the codes take no bits."""
    type_id, shape = TYPE_BY_NAME[name].type_id, (512, 130)
    random = random_tensor_bytes(type_id, shape, np.random.default_rng([6, type_id]))
    data = build_gguf([("a", type_id, shape, change_plane(type_id, random, shape, codes=codes))])
    coded = check_round_trip(data, tmp_path, preset)
    code_bytes = 512 * 130 * CODE_BITS.get(name, 4) // 8
    forced_bytes = 512 * 130 // 32 * 10 // 8 if name in ("Q5_0", "Q8_0") else 0
    side_bytes = tensor_size(type_id, shape) - code_bytes
    assert len(coded) <= side_bytes + forced_bytes + 3 * LANE_FLUSH_BYTES + 2 * OVERHEAD_BYTES


def without_forced(name: str) -> Callable[[np.ndarray], np.ndarray]:
    """Return what takes the codes that every quantized block has out of a plane of codes."""
    if name == "Q8_0":
        return lambda codes: np.where((codes == 127) | (codes == 129), codes ^ 1, codes)
    return lambda codes: np.maximum(codes, 1)


@pytest.mark.parametrize("where", ["all", "some", "none", "one block", "last block"])
@pytest.mark.parametrize("name", ["Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_forced_codes(name: str, where: str, tmp_path: Path) -> None:
    type_id, shape = TYPE_BY_NAME[name].type_id, (256, 202)
    quantized = tensor_bytes(type_id, shape, np.random.default_rng([7, type_id]))
    mask = np.zeros((1, 202, 256), np.bool_)
    if where == "some":
        mask[:, 64:128] = mask[:, 192:] = True
    elif where == "none":
        mask[:] = True
    elif where == "one block":
        mask[:, 70, 32:64] = True
    elif where == "last block":
        mask[:, 201, 224:] = True
    changed = change_plane(
        type_id, quantized, shape, codes=lambda codes: np.where(mask, without_forced(name)(codes), codes)
    )
    coded = check_round_trip(build_gguf([("a", type_id, shape, changed)]), tmp_path)
    layout = layout_of(coded)
    _, units = coded_span(layout, "a")
    groups = [mask[:, first : first + TILE_ROWS] for first in range(0, 202, TILE_ROWS)]
    assert layout.kinds[units].tolist() == [CODED_UNFORCED if group.any() else CODED for group in groups]


def test_kinds_of_units(tmp_path: Path) -> None:
    """The sample of the damage tests holds the kinds of units that they want to damage."""
    dense = layout_of(encode_bytes(mixed_gguf(), tmp_path))
    assert {RAW, ZSTD, CODED, CODED_UNFORCED, FILTERED} <= set(dense.kinds.tolist())
    assert dense.preset == "dense"
    unit = layout_of(encode_bytes(mixed_gguf(), tmp_path, preset="unit"))
    assert {RAW, ZSTD, LOCKSTEP, FILTERED} <= set(unit.kinds.tolist())
    assert unit.preset == "unit"


# Odd files.


def odd_files() -> dict[str, bytes]:
    rng = np.random.default_rng(8)
    q4_0, q8_0 = TYPE_BY_NAME["Q4_0"].type_id, TYPE_BY_NAME["Q8_0"].type_id
    tensors: list[Tensor] = [
        ("a", q4_0, (64, 70), tensor_bytes(q4_0, (64, 70), rng)),
        ("b", q8_0, (64, 65), tensor_bytes(q8_0, (64, 65), rng)),
        ("norm", 0, (33,), tensor_bytes(0, (33,), rng)),
    ]
    a, b = tensors[0][3], tensors[1][3]
    whole = build_gguf(tensors, plausible_metadata())
    files = {
        "magic only": b"GGUF",
        "magic and version": b"GGUF\x03\x00\x00\x00",
        "header only": build_gguf([], plausible_metadata()),
        "empty": build_gguf([]),
        "header and bytes": build_gguf([], plausible_metadata(), tail=rng.bytes(1000)),
        "trailing bytes": whole + rng.bytes(333),
        "trailing zeros": whole + bytes(100_000),
        "big-endian": build_gguf(tensors, plausible_metadata(), byte_order="big"),
        "version 1": build_gguf(tensors, version=1),
        "version 2": build_gguf(tensors, version=2),
        "version 9": build_gguf(tensors, version=9),
        "alignment 1": build_gguf(tensors, alignment=1),
        "alignment 4096": build_gguf(tensors, alignment=4096),
        "gaps": build_gguf(tensors, gap_fill=0xA5),
        "no name": build_gguf([("", q4_0, (64, 70), a)]),
        "odd names": build_gguf([(b"\xff\x00\xed\xa0\x80", q4_0, (64, 70), a), ("\u2713" * 50, q8_0, (64, 65), b)]),
        "one name twice": build_gguf([("a", q4_0, (64, 70), a), ("a", q8_0, (64, 65), b)]),
        "too little data": build_gguf([("a", q4_0, (64, 70), a), ("b", q8_0, (64, 65), b[:-100])]),
        "too much data": build_gguf([("a", q4_0, (64, 70), a + bytes(50)), ("b", q8_0, (64, 65), b)]),
        "columns not whole blocks": build_gguf([("a", q4_0, (63, 70), a)]),
        "unknown type": build_gguf([("a", 99, (64, 70), a), ("b", q8_0, (64, 65), b)]),
        "no rows": build_gguf([("a", q4_0, (64, 0), b""), ("b", q8_0, (64, 65), b)]),
        "no dimensions": build_gguf([("a", 0, (), b"abcd"), ("b", q8_0, (64, 65), b)]),
        "huge dimensions": build_gguf([("a", q4_0, (1 << 62, 1 << 62), a), ("b", q8_0, (64, 65), b)]),
        "odd alignment value": build_gguf(tensors, {"general.alignment": Typed(8, "x")}),
        "random after magic": b"GGUF" + rng.bytes(5000),
        "random after version": b"GGUF\x03\x00\x00\x00" + rng.bytes(5000),
        "text after magic": b"GGUF" + b"all work and no play " * 500,
    }
    assert whole.startswith(b"GGUF")
    return files


ODD_FILES = odd_files()


@pytest.mark.parametrize("name", ODD_FILES)
def test_odd_file(name: str, tmp_path: Path) -> None:
    for preset in PRESETS:
        coded = check_round_trip(ODD_FILES[name], tmp_path, preset)
        assert len(coded) <= longest_coded(len(ODD_FILES[name]))


def vocabulary(n_tokens: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    words = [rng.bytes(int(n)) for n in rng.integers(0, 40, 500)]
    tokens = [words[i] + words[j] for i, j in rng.integers(0, 500, (n_tokens, 2)).tolist()]
    return {
        "tokenizer.ggml.tokens": Typed(9, tokens, 8),
        "tokenizer.ggml.scores": rng.standard_normal(n_tokens).astype(np.float32),
        "tokenizer.ggml.token_type": rng.integers(1, 4, n_tokens).astype(np.int32),
        "test.longs": Typed(9, [b"x" * n for n in (0, 254, 255, 256, 70_000) * 5], 8),
        "test.u32": np.arange(100, dtype=np.uint32)[::-1].copy(),
        "test.u64": np.arange(100, dtype=np.uint64),
        "test.few": [1, 2, 3],
    }


@pytest.mark.parametrize("version", [1, 2, 3])
def test_vocabulary(version: int, tmp_path: Path) -> None:
    data = build_gguf([("a", 0, (8,), bytes(32))], vocabulary(1000, 13), version=version)
    check_round_trip(data, tmp_path)


@pytest.mark.parametrize("shift", [0, 3, 5, 8])
def test_header_over_chunks(shift: int, tmp_path: Path) -> None:
    """Arrays that chunks of 4 MiB cut anywhere: inside a length, a string, a number."""
    size = CHUNK_BYTES // 3
    metadata = {"pad": "p" * shift, **vocabulary(40, 14)}
    for i in range(4):
        metadata[f"test.words{i}"] = np.full(size // 8 - 1, i, np.int32)
        metadata[f"test.strings{i}"] = Typed(9, [bytes([i]) * (size // 16)] * 8 + [b"abc"] * 20, 8)
    data = build_gguf([("a", 0, (8,), bytes(32))], metadata)
    coded = check_round_trip(data, tmp_path)
    assert layout_of(coded).kinds.tolist().count(FILTERED) > 0


def test_overlapping_tensors(tmp_path: Path) -> None:
    data = bytearray(build_gguf([(n, 2, (64, 70), tensor_bytes(2, (64, 70), np.random.default_rng(9))) for n in "ab"]))
    padded = -(-70 * 36 // 32) * 32
    at = data.index(padded.to_bytes(8, "little"))
    data[at : at + 8] = (padded - 32).to_bytes(8, "little")
    check_round_trip(bytes(data), tmp_path)


def test_source_cut_anywhere(tmp_path: Path) -> None:
    whole = mixed_gguf()
    rng = np.random.default_rng(10)
    for size in [*range(4, 64, 5), *rng.integers(64, len(whole), 15).tolist(), len(whole) - 1]:
        data = whole[:size]
        coded = encode_bytes(data, tmp_path)
        assert decode_bytes(coded) == data
        assert len(coded) <= longest_coded(size)


def test_source_with_flipped_bits(tmp_path: Path) -> None:
    """Also a damaged source comes back as it was."""
    whole = mixed_gguf()
    header_bits = 8 * 1200
    rng = np.random.default_rng(11)
    for bit in rng.integers(32, header_bits, 30).tolist():
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        assert decode_bytes(encode_bytes(bytes(data), tmp_path)) == data


# Never worse.


def incompressible(kind: str) -> bytes:
    """Return a file that coding shrinks little or not at all."""
    rng = np.random.default_rng(12)
    q4_0 = TYPE_BY_NAME["Q4_0"].type_id
    if kind == "random bytes":
        return b"GGUF" + rng.bytes(CHUNK_BYTES + 12345)
    if kind == "every type":
        return build_gguf(
            [(t.name, i, (256, 130), random_tensor_bytes(i, (256, 130), rng)) for i, t in GGML_TYPES.items()]
        )
    if kind == "many small tensors":
        return build_gguf([(f"blk.{i}.norm", 0, (n,), rng.bytes(4 * n)) for i, n in enumerate([1, 2, 3, 8] * 250)])
    if kind == "random names":
        return build_gguf([(rng.bytes(64), 0, (8,), rng.bytes(32)) for _ in range(500)])
    if kind == "small odd shapes":
        shapes = [(64,), (64, 1), (64, 3), (64, 65), (64, 3, 5), (192, 2, 2, 2)]
        return build_gguf(
            [(f"{i}{s}{k}", i, s, tensor_bytes(i, s, rng)) for i in (2, 3, 8, 20, 41) for s in shapes for k in range(3)
             if s[0] % GGML_TYPES[i].block_size == 0]
        )  # fmt: skip
    if kind == "narrow Q4_0":
        return build_gguf([("a", q4_0, (32, 20_000), random_tensor_bytes(q4_0, (32, 20_000), rng))])
    # One column, values that save less than the index of their row groups costs.
    dtype, fill, share = ("<u4", 0x3F000000, 0.1) if kind == "one column F32" else ("<u2", 0x3C00, 0.3)
    values = rng.integers(0, np.iinfo(dtype).max, 100_000, dtype=np.dtype(dtype), endpoint=True)
    alike = rng.random(values.size) < share
    values[alike] = values[alike] & (0x807FFFFF if dtype == "<u4" else 0x807F) | fill
    return build_gguf([("a", TYPE_BY_NAME[kind.split()[-1]].type_id, (1, values.size), values.tobytes())])


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    "kind",
    [
        *("random bytes", "every type", "many small tensors", "random names", "small odd shapes", "narrow Q4_0"),
        *("one column F32", "one column BF16"),
    ],
)
def test_never_worse(kind: str, preset: str, tmp_path: Path) -> None:
    data = incompressible(kind)
    assert len(check_round_trip(data, tmp_path, preset)) <= longest_coded(len(data))


# The same bytes whatever runs them.


@pytest.mark.parametrize("preset", PRESETS)
def test_bytes_do_not_depend_on_threads_or_run(every_type: bytes, tmp_path: Path, preset: str) -> None:
    coded, back = tmp_path / "sample.gguf.lw", tmp_path / "back.gguf"
    first = encode_bytes(every_type, tmp_path, preset=preset, threads=1)
    for threads in (2, 3):
        assert encode_bytes(every_type, tmp_path, preset=preset, threads=threads) == first
        decode_file(coded, back, threads=threads, force=True)
        assert back.read_bytes() == every_type
    small = mixed_gguf()
    first = encode_bytes(small, tmp_path, preset=preset)
    assert encode_bytes(small, tmp_path, preset=preset) == first
    assert encode_bytes(small, tmp_path, preset=preset, verify=False) == first


def test_bytes_do_not_depend_on_the_size_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = mixed_gguf()
    first = encode_bytes(data, tmp_path)
    for name in ("ENCODE_RUN_BYTES", "COUNT_RUN_BYTES"):
        monkeypatch.setattr(encoder, name, 1)
    assert encode_bytes(data, tmp_path) == first
    monkeypatch.setattr(decoder, "RUN_BYTES", 1)
    assert decode_bytes(first) == data


class Dribble(io.RawIOBase):
    """A source that cannot seek and returns fewer bytes than were asked for."""

    def __init__(self, data: bytes) -> None:
        self.data = io.BytesIO(data)
        self.n = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        self.n = self.n * 7 % 1000 + 1
        return self.data.read(min(size, self.n) if size >= 0 else -1)


@pytest.mark.parametrize("preset", PRESETS)
def test_stream_from_a_pipe(every_type: bytes, tmp_path: Path, preset: str) -> None:
    coded = encode_bytes(every_type, tmp_path, preset=preset)
    reading, writing = os.pipe()

    def feed() -> None:
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(coded)

    feeder = threading.Thread(target=feed)
    feeder.start()
    sink = io.BytesIO()
    with os.fdopen(reading, "rb") as pipe:
        result = decode_stream(pipe, sink)
    feeder.join()
    assert sink.getvalue() == every_type
    assert (result.coded_bytes, result.source_bytes) == (len(coded), len(every_type))


def test_stream_that_dribbles(tmp_path: Path) -> None:
    data = mixed_gguf()
    sink = io.BytesIO()
    decode_stream(Dribble(encode_bytes(data, tmp_path)), sink)  # type: ignore[arg-type]
    assert sink.getvalue() == data


def test_scalar_kernels_decode_the_same(every_type: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [(data, encode_bytes(data, tmp_path)) for data in (every_type, mixed_gguf(), ODD_FILES["version 2"])]
    monkeypatch.setattr(group_decode, "decode_groups", scalar_decode_groups())
    monkeypatch.setattr(batch_decode, "decode_batch", scalar_decode_batch())
    for data, coded in files:
        assert decode_bytes(coded) == data
        assert encode_bytes(data, tmp_path) == coded


# Results and refusals.


def test_results(every_type: bytes, tmp_path: Path) -> None:
    source, output = tmp_path / "a.gguf", tmp_path / "a.lw"
    source.write_bytes(every_type)
    encoded = encode_file(source, output, threads=1)
    assert (encoded.source_bytes, encoded.coded_bytes) == (len(every_type), output.stat().st_size)
    assert encoded.saving == pytest.approx(1 - output.stat().st_size / len(every_type))
    verified = verify_file(output, threads=1)
    assert verified.source_bytes == len(every_type)
    assert verified.n_row_groups == len(layout_of(output.read_bytes()).units)


def test_progress(tmp_path: Path) -> None:
    """Bytes go up to those of the source in each stage; names are those of the tensors."""
    data = mixed_gguf()
    seen: list[Progress] = []
    encode_bytes(data, tmp_path, progress=seen.append)
    coded = tmp_path / "sample.gguf.lw"
    decode_file(coded, tmp_path / "back.gguf", threads=2, progress=seen.append)
    verify_file(coded, threads=1, progress=seen.append)
    for stage in ("analyse", "encode", "decode", "verify"):
        steps = [p for p in seen if p.stage == stage]
        done = [p.n_bytes for p in steps]
        assert done == sorted(done)
        assert done[-1] == len(data)
        assert {p.total_bytes for p in steps} == {len(data)}
        assert "blk.0.attn_q.weight" in {p.name for p in steps}
    assert [p.coded_bytes for p in seen if p.stage == "encode"][-1] < coded.stat().st_size


@pytest.mark.parametrize("data", [b"", b"GGU", b"PK\x03\x04" + bytes(100)], ids=["empty", "short", "zip"])
def test_not_a_gguf(data: bytes, tmp_path: Path) -> None:
    source = tmp_path / "a.gguf"
    source.write_bytes(data)
    with pytest.raises(FormatError) as caught:
        encode_file(source, tmp_path / "a.lw")
    assert caught.value.path == str(source)
    assert os.listdir(tmp_path) == ["a.gguf"]


def test_unknown_preset(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(mixed_gguf())
    with pytest.raises(LazyWeightsError, match="preset"):
        encode_file(tmp_path / "a.gguf", tmp_path / "a.lw", preset="best")


def test_verify_against_another_file(tmp_path: Path) -> None:
    data = mixed_gguf()
    encode_bytes(data, tmp_path)
    other = tmp_path / "other.gguf"
    for changed, said in [
        (data[:-1], "differ"),
        (data + b"x", "size"),
        (b"", "differ"),
        (data[:9000] + bytes([data[9000] ^ 1]) + data[9001:], "offset 9000"),
    ]:
        other.write_bytes(changed)
        with pytest.raises(FormatError, match=said) as caught:
            verify_file(tmp_path / "sample.gguf.lw", against=other, threads=1)
        assert caught.value.path == str(other)


def _halves(type_name: str, kind: str, rows: int, columns: int) -> bytes:
    """Rows of F16 or BF16: a bell, a bell with one large value in row groups 5 and 10, mostly zeros, or any bits."""
    n = rows * columns
    rng = np.random.default_rng([len(type_name), len(kind)])
    if kind == "any":
        return rng.integers(0, 1 << 16, n, dtype=np.uint16).astype("<u2").tobytes()
    values = rng.normal(0, 0.02, n).astype(np.float32)
    if kind == "zeros":
        values[rng.random(n) < 0.95] = 0
    words = (values.view(np.uint32) >> 16).astype("<u2") if type_name == "BF16" else values.astype("<f2").view("<u2")
    if kind == "wide":
        step = 5 * TILE_ROWS * columns
        words[step::step] = 0x7F00
    return words.tobytes()


@pytest.mark.parametrize(("kind", "coder"), [("bells", HUFFMAN), ("wide", HUFFMAN), ("zeros", RANS), ("any", HUFFMAN)])
@pytest.mark.parametrize("type_name", ["F16", "BF16"])
@pytest.mark.parametrize("columns", [96, 40])
def test_halves(columns, type_name, kind, coder, tmp_path):
    rows = 11 * TILE_ROWS + 13
    data = build_gguf([("t", TYPE_BY_NAME[type_name].type_id, (columns, rows), _halves(type_name, kind, rows, columns))])
    layout = layout_of(check_round_trip(data, tmp_path))
    plans = [span.plan for span in layout.head.spans if span.plan is not None]
    assert [plan.coder for plan in plans] == ([] if kind == "any" else [coder])
    if type_name == "BF16" and plans:
        span, units = coded_span(layout, "t")
        expected = [CODED] * span.n_units
        if kind == "wide":
            expected = [CODED_UNFORCED if g in (5, 10) else CODED for g in range(span.n_units)]
        if kind != "zeros":
            assert layout.kinds[units].tolist() == expected


def test_a_job_spans_tensors_and_verbatim_bytes(tmp_path):
    """Norms stay verbatim between tensors that are coded; all behind the header are decoded at once, in their order."""
    rng = np.random.default_rng(4)
    q4_1 = TYPE_BY_NAME["Q4_1"].type_id
    tensors: list[Tensor] = []
    for k in range(4):
        tensors.append((f"blk.{k}.w", q4_1, (64, 200), tensor_bytes(q4_1, (64, 200), rng)))
        tensors.append((f"blk.{k}.norm", TYPE_BY_NAME["F32"].type_id, (64,), rng.bytes(4 * 64)))
    data = build_gguf(tensors)
    layout = layout_of(check_round_trip(data, tmp_path))
    header, job = decoder._jobs(layout)
    assert [part.span.is_coded for part in header.parts] == [False]
    assert header.table_set == -1
    assert [part.span.is_coded for part in job.parts] == 4 * [True, False]
    assert [part.place for part in job.parts] == [sum(p.n_units for p in job.parts[:i]) for i in range(8)]
    assert (job.first_byte, job.n_bytes) == (header.n_bytes, len(data) - header.n_bytes)
    assert (header.name, job.name) == ("", "blk.0.w")
