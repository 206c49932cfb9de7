"""Write the golden files, and what the documents show of them.

Usage: python -m tests.make_goldens

The goldens are coded files of sources that this module makes (`SOURCES`). Tests compare both ways: encoding a source must
give the bytes of its golden, decoding a golden must give its source; a golden that is missing is a failure. This script is
the only thing that writes them, and a change of theirs needs a reason: files of version 1 decode forever.

It also fills the blocks between ``<!-- generated: ... -->`` and ``<!-- /generated -->`` in `docs/`: the tables of types and
planes, and the worked example. Tests fail where they are not what this script would write.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from lazyweights.blocks import GGML_TYPES, TYPE_BY_NAME, Planes, join, plane_specs, type_name
from lazyweights.container import coded_file
from lazyweights.container.coded_file import HEADER_BYTES, CodedSpan, Layout
from lazyweights.container.decoder import read_layout
from lazyweights.container.encoder import encode_file
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
)
from tests.make_gguf import Tensor, Typed, build_gguf

REPOSITORY = Path(__file__).resolve().parents[1]
GOLDENS = REPOSITORY / "tests" / "goldens"
MANIFEST = GOLDENS / "manifest.json"
FORMAT = REPOSITORY / "docs" / "format.md"


# Sources: the same bytes on every machine, in every version of Python and numpy.


class Numbers:
    """Pseudo-random integers from SHAKE-256, which no library version changes."""

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._n_calls = 0

    def bytes(self, n: int) -> bytes:
        self._n_calls += 1
        return hashlib.shake_256(f"{self._seed}/{self._n_calls}".encode()).digest(n)

    def below(self, n: int, limit: int) -> np.ndarray:
        """`n` integers, 0 .. limit - 1, int64."""
        words = np.frombuffer(self.bytes(4 * n), "<u4").astype(np.int64)
        return words * limit >> 32

    def bits(self, n: int, width: int) -> np.ndarray:
        """`n` integers of `width` bits, uint64."""
        return np.frombuffer(self.bytes(8 * n), "<u8") >> np.uint64(64 - width)

    def bell(self, n: int, width: int) -> np.ndarray:
        """`n` integers around 0 with a standard deviation of about `width`, int64."""
        total = np.frombuffer(self.bytes(8 * n), np.uint8).reshape(n, 8).astype(np.int64).sum(axis=1)
        return (total - 1020) * width // 209


SCALES = {"scale": 0x2C00, "min": 0xB000, "min_scale": 0x2800, "sum": 0x3400}
"""Where the half floats of made-up blocks lie."""


def made_up_planes(type_id: int, n_blocks: int, numbers: Numbers) -> dict[str, np.ndarray]:
    """Return planes as a quantizer might write them: bell-shaped codes, scales of one or two octaves."""
    planes = {}
    for spec in plane_specs(type_id):
        n = n_blocks * spec.per_block
        top = (1 << spec.bits) - 1
        if spec.name in SCALES and spec.bits == 16:
            values = SCALES[spec.name] + numbers.bell(n, 300)
        elif spec.name == "escape":
            values = np.zeros(n, np.int64)
        elif spec.name in ("sub_scale", "sub_min", "scale"):
            values = np.clip((top + 1) // 2 + numbers.bell(n, max(top // 20, 1)), 0, top)
        elif spec.name == "codes" and spec.bits == 8:
            values = numbers.bell(n, 20) & 255
        elif spec.name == "codes":
            limit = 2 if type_name(type_id) == "TQ1_0" else top
            values = np.clip(limit // 2 + numbers.bell(n, max(top // 8, 1)), 0, limit)
            values = np.where(numbers.below(n, 4) == 0, values, np.minimum(values, limit // 2)) if top < 8 else values
        elif spec.name == "index":
            values = np.min([numbers.below(n, top + 1) for _ in range(5)], axis=0)
        elif spec.name == "values" and spec.bits <= 16:
            values = numbers.bell(n, 8 if spec.bits == 8 else 100) & top
        elif spec.name == "exponent":
            values = 120 + np.clip(numbers.bell(n, 1), -2, 2) if top == 255 else 10 + numbers.bell(n, 1)
        else:
            values = numbers.bits(n, spec.bits)
        planes[spec.name] = values.reshape(n_blocks, spec.per_block)
    return planes


def force(type_id: int, codes: np.ndarray, numbers: Numbers) -> None:
    """Give each block the codes that a quantizer cannot avoid, somewhere, in place."""
    name = type_name(type_id)
    rows = np.arange(len(codes))
    if name == "Q8_0":
        codes[rows, numbers.below(len(codes), 32)] = np.where(numbers.below(len(codes), 2), 127, 129)
    elif name in ("Q4_1", "Q5_0", "Q5_1"):
        at = numbers.below(len(codes), 32)
        codes[rows, at] = 0
        if name != "Q5_0":
            codes[rows, (at + 1 + numbers.below(len(codes), 31)) % 32] = 15 if name == "Q4_1" else 31


def made_up_tensor(
    name: str, type_: str, shape: tuple[int, ...], change: Callable[[dict[str, np.ndarray]], None] | None = None
) -> Tensor:
    """Return a tensor of made-up planes; `change` may change them, (blocks, values per block), in place."""
    type_id = TYPE_BY_NAME[type_].type_id
    known = GGML_TYPES[type_id]
    numbers = Numbers(name)
    n_rows = int(np.prod(shape[1:], dtype=np.int64))
    n_blocks = n_rows * shape[0] // known.block_size
    planes = made_up_planes(type_id, n_blocks, numbers)
    if "codes" in planes:
        force(type_id, planes["codes"], numbers)
    if change is not None:
        change(planes)
    arrays = {
        spec.name: planes[spec.name].astype(spec.dtype).reshape(1, n_rows, shape[0] // known.block_size * spec.per_block)
        for spec in plane_specs(type_id)
    }
    return name, type_id, shape, join(Planes(type_id, (1, n_rows, shape[0]), arrays)).tobytes()


def tiny() -> bytes:
    """The file of the worked example: five rows of Q8_0, 96 numbers of F16; about the smallest tensors that coding shrinks."""

    def few_codes(planes: dict[str, np.ndarray]) -> None:
        planes["codes"][:] = (Numbers("tiny").bell(160, 1) & 255).reshape(5, 32)
        for row, (at, code) in enumerate([(5, 127), (30, 129), (17, 127), (0, 129), (31, 127)]):
            planes["codes"][row, at] = code
        planes["scale"][:] = [[0x2C10], [0x2C10], [0x2D01], [0x2C10], [0x2C10]]

    q8_0 = made_up_tensor("a", "Q8_0", (32, 5), few_codes)
    # 1.0 to 1.125, and in one of eight numbers 1.125 to 1.25; of any sign.
    words = 0x3C00 + Numbers("tiny b").bits(96, 7).astype(np.int64) + 0x80 * (Numbers("tiny c").below(96, 8) == 0)
    words += Numbers("tiny d").below(96, 2) << 15
    f16 = ("b", TYPE_BY_NAME["F16"].type_id, (96,), words.astype("<u2").tobytes())
    return build_gguf([q8_0, f16])


def every_type() -> bytes:
    """Every type of `GGML_TYPES`, and the ways to code it: field modes, forced and unforced row groups, experts."""

    def constant_scale(planes: dict[str, np.ndarray]) -> None:
        planes["scale"][:] = 0x2C11

    def signs_of_scale(planes: dict[str, np.ndarray]) -> None:
        planes["scale"] |= (np.arange(planes["scale"].size) % 3 == 0).reshape(planes["scale"].shape) << 15

    def first_block_unforced(planes: dict[str, np.ndarray]) -> None:
        codes = planes["codes"]
        codes[0] = np.where((codes[0] == 127) | (codes[0] == 129), 5, np.maximum(codes[0], 1))

    def uneven_rows(planes: dict[str, np.ndarray]) -> None:
        """Values of every second row are small; the first are the outermost ones."""
        values = planes["values"].reshape(66, -1)
        values[::2] = Numbers("uneven").bell(values[::2].size, 1).reshape(33, -1) & 255
        values[1, :4] = 0x7F, 0x80, 0, 0xFF

    def skewed(planes: dict[str, np.ndarray]) -> None:
        """Mostly 0, as rANS codes it best."""
        values = planes["values"]
        values[:] = np.where(Numbers("skewed").below(values.size, 8).reshape(values.shape), 0, values)

    def outermost(planes: dict[str, np.ndarray]) -> None:
        planes["values"][:6, 0] = 0x7FFF, 0x8000, 0x7F80, 0xFF7F, 0x80, 0xFFFF

    def narrow_codes(planes: dict[str, np.ndarray]) -> None:
        codes = planes["codes"].astype(np.int8).astype(np.int64)
        planes["codes"][:] = np.where(np.abs(codes) == 127, codes, codes // 4) & 255

    tensors = []
    shape: tuple[int, ...]
    for type_id, known in GGML_TYPES.items():
        if type_id not in STREAM_LAYOUTS:
            shape = (8, 3)
        elif known.name == "I8":
            shape = (160, 66)
        elif known.block_size == 1:
            shape = (40, 66 if known.name == "BF16" else 17)
        else:
            shape = (96 if known.block_size == 32 else known.block_size, 40 if known.name.startswith("IQ1") else 17)
        change = {"I8": uneven_rows, "I16": outermost}.get(known.name)
        tensors.append(made_up_tensor(f"{known.name}.weight", known.name, shape, change))
    tensors += [
        made_up_tensor("long.Q4_K.weight", "Q4_K", (256, 66)),
        made_up_tensor("raw_low.Q4_0.weight", "Q4_0", (224, 64)),
        made_up_tensor("front.Q4_1.weight", "Q4_1", (160, 66)),
        made_up_tensor("front.Q8_0.weight", "Q8_0", (160, 64), narrow_codes),
        made_up_tensor("one_scale.Q8_0.weight", "Q8_0", (32, 64), constant_scale),
        made_up_tensor("signs.IQ4_NL.weight", "IQ4_NL", (128, 64), signs_of_scale),
        made_up_tensor("experts.Q4_0.weight", "Q4_0", (32, 33, 2)),
        made_up_tensor("skewed.I16.weight", "I16", (192, 66), skewed),
        *(made_up_tensor(f"unforced.{t}.weight", t, (96, 17), first_block_unforced) for t in ("Q4_1", "Q5_0", "Q5_1", "Q8_0")),
    ]
    listed = {t[0]: i for i, t in enumerate(tensors)}
    # Bytes that no quantizer writes: 1 and 20 stand for the same trits as 0 and 19 do.
    i = listed["TQ1_0.weight"]
    name, type_id, shape, data = tensors[i]
    tensors[i] = (name, type_id, shape, bytes([1, 20]) + data[2:])
    # An exponent outside the window leaves its row group as it is.
    i = listed["BF16.weight"]
    name, type_id, shape, data = tensors[i]
    tensors[i] = (name, type_id, shape, data[:-2] + b"\x00\x00")
    return build_gguf(tensors)


def few_values(columns: int) -> Callable[[dict[str, np.ndarray]], None]:
    """Return a change of planes that leaves codes of very low entropy, which even lockstep streams shrink."""

    def change(planes: dict[str, np.ndarray]) -> None:
        for name in ("codes", "index"):
            if name in planes:
                planes[name][:] = np.where(planes[name] & 7 == columns & 7, planes[name], 3)

    return change


def unit_preset() -> bytes:
    """Types whose lockstep streams differ: codes packed or not, wide codes, floats, short last groups and tiles."""
    shapes = {"Q4_0": (288, 66), "Q8_0": (32, 64), "Q4_K": (512, 64), "IQ2_XS": (256, 64), "TQ2_0": (256, 64), "MXFP4": (64, 64)}
    tensors = [made_up_tensor(f"{t}.weight", t, shape, few_values(5)) for t, shape in shapes.items()]
    words = (0x3F80 + Numbers("BF16").below(64 * 40, 3) + (Numbers("signs").below(64 * 40, 2) << 15)).astype("<u2")
    tensors.append(("BF16.weight", TYPE_BY_NAME["BF16"].type_id, (40, 64), words.tobytes()))
    return build_gguf(tensors)


def filtered_header() -> bytes:
    """A vocabulary: strings short and long, scores, types, counters."""
    numbers = Numbers("vocabulary")
    pieces = ["the", "in", "er", "\u2581a", "tion", "s", "\u4e2d", "x"]
    tokens: list[str] = []
    for k in range(60):
        tokens.append("".join(pieces[i] for i in numbers.below(1 + k % 4, len(pieces)).tolist()))
    tokens += ["", "y" * 254, "y" * 255, "y" * 300]
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.tokens": Typed(9, tokens, 8),
        "tokenizer.ggml.scores": -np.arange(64, dtype=np.float32),
        "tokenizer.ggml.token_type": np.ones(64, np.int32),
        "test.few": Typed(9, ["too", "few"], 8),
    }
    return build_gguf([("b", 0, (4,), np.ones(4, "<f4").tobytes())], metadata)


def shared_rows() -> bytes:
    """Tensors whose rows share their scales: two references, doubled scales and sub-scales, a last row group of odd rows."""

    def two_references(planes: dict[str, np.ndarray]) -> None:
        numbers = Numbers("references")
        n = 137
        doubled = (numbers.below(2 * n, 9) == 0).reshape(n, 2)
        scale = np.where((np.arange(n) % 5 == 0)[:, None], [0x2C40, 0x2DC0], [0x2C00, 0x2D80]) + 0x400 * doubled
        planes["scale"] = scale.reshape(planes["scale"].shape).astype(np.uint16)
        widths = 16 * (1 + np.arange(64) % 3)
        codes = numbers.bell(64 * n, 32).reshape(n, 2, 32) * widths.reshape(2, 32) >> 8
        planes["codes"] = ((codes >> doubled[:, :, None]) & 255).reshape(planes["codes"].shape).astype(np.uint8)

    def one_reference(planes: dict[str, np.ndarray]) -> None:
        numbers = Numbers("sub-scales")
        n = 128
        planes["scale"][:] = 0x1C00
        planes["min_scale"][:] = 0x1B21
        doubled = (numbers.below(8 * n, 20) == 0).reshape(n, 8)
        planes["sub_scale"] = ((10 + np.arange(8)) << doubled).reshape(planes["sub_scale"].shape).astype(np.uint8)
        planes["sub_min"] = np.broadcast_to(20 + np.arange(8), (n, 8)).reshape(planes["sub_min"].shape).astype(np.uint8)
        codes = np.where(numbers.below(256 * n, 3) == 0, numbers.bell(256 * n, 1), 0).reshape(n, 8, 32) >> doubled[:, :, None]
        planes["codes"] = np.clip(codes + 7 + np.arange(8)[:, None] // 4, 0, 15).reshape(planes["codes"].shape).astype(np.uint8)

    return build_gguf([
        made_up_tensor("a.weight", "Q8_0", (64, 137), two_references),
        made_up_tensor("b.weight", "Q4_K", (256, 128), one_reference),
    ])  # fmt: skip


def trellis_codes() -> bytes:
    """Tensors of trellis codes whose rows share their scales: signed and unsigned codes, a last row group of odd rows."""

    def with_trellis(indices: np.ndarray) -> np.ndarray:
        """Codes of these indices, (rows, columns)."""
        codes = np.empty_like(indices)
        for first in range(0, len(indices), 64):
            states = np.zeros(indices.shape[1], np.int64)
            for row in range(first, min(first + 64, len(indices))):
                codes[row] = 2 * indices[row] + (states & 1)
                states = states >> 1 ^ 18 * (states & 1) ^ 4 * (indices[row] & 1)
        return codes

    def signed(planes: dict[str, np.ndarray]) -> None:
        planes["scale"][:] = 0x2C00
        indices = Numbers("signed").bell(32 * 137, 32).reshape(137, 32) * (1 + np.arange(32) % 3) >> 5
        planes["codes"] = (with_trellis(indices) & 255).reshape(planes["codes"].shape).astype(np.uint8)

    def unsigned(planes: dict[str, np.ndarray]) -> None:
        planes["scale"][:] = 0x2D80
        indices = 8 + (Numbers("unsigned").bell(32 * 130, 32).reshape(130, 32) * (1 + np.arange(32) % 2) >> 5)
        planes["codes"] = with_trellis(np.clip(indices, 0, 15)).reshape(planes["codes"].shape).astype(np.uint8)

    return build_gguf([
        made_up_tensor("a.weight", "Q8_0", (32, 137), signed),
        made_up_tensor("b.weight", "Q5_0", (32, 130), unsigned),
    ])  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A source and the preset of its golden."""

    make: Callable[[], bytes]
    preset: str = "dense"


def split_codes() -> bytes:
    """Codes spread so far that their low bits are split off: forced and unforced, long and short row groups, experts."""

    def wide(planes: dict[str, np.ndarray]) -> None:
        codes, numbers = planes["codes"], Numbers("wide")
        blocks = np.arange(len(codes))
        if codes.max() > 31:
            values = numbers.below(codes.size, 127) + numbers.below(codes.size, 127) - 126
            codes[:] = values.reshape(codes.shape) & 255
            codes[blocks, blocks % 32] = np.where(blocks % 3, 127, -127 & 255)
        else:
            codes[:] = (numbers.below(codes.size, 16) + numbers.below(codes.size, 17)).reshape(codes.shape)
            codes[blocks, blocks % 32] = 0

    def wide_but_one(planes: dict[str, np.ndarray]) -> None:
        wide(planes)
        planes["codes"][-1] = 5

    return build_gguf(
        [
            made_up_tensor("long.Q8_0.weight", "Q8_0", (256, 70), wide),
            made_up_tensor("short.Q8_0.weight", "Q8_0", (96, 37), wide),
            made_up_tensor("unforced.Q8_0.weight", "Q8_0", (96, 66), wide_but_one),
            made_up_tensor("experts.Q5_0.weight", "Q5_0", (64, 65, 2), wide),
            made_up_tensor("unforced.Q5_0.weight", "Q5_0", (96, 66), wide_but_one),
            made_up_tensor("Q5_K.weight", "Q5_K", (256, 66), wide),
        ],
    )  # fmt: skip


SOURCES = {
    "tiny": Source(tiny),
    "every_type": Source(every_type),
    "unit_preset": Source(unit_preset, "unit"),
    "filtered_header": Source(filtered_header),
    "shared_rows": Source(shared_rows),
    "trellis_codes": Source(trellis_codes),
    "split_codes": Source(split_codes),
}


def golden_path(name: str) -> Path:
    """Where a golden lies. The name does not end in ``.gguf.lw``, which git is told to ignore."""
    return GOLDENS / f"{name}.lw"


def encode(name: str) -> bytes:
    """Return the coded file of a source."""
    with tempfile.TemporaryDirectory() as folder:
        path, output = Path(folder) / "source.gguf", Path(folder) / "source.gguf.lw"
        path.write_bytes(SOURCES[name].make())
        encode_file(path, output, preset=SOURCES[name].preset, threads=1)
        return output.read_bytes()


def zstd_version() -> str:
    """Version of the zstd library: other versions may compress the head and verbatim bytes to other bytes."""
    return ".".join(map(str, zstandard.ZSTD_VERSION))


# The table of types in docs/format.md.

_VARIANTS = {FORCED_NONE: "-", FORCED_MIN: "min", FORCED_MIN_MAX: "min max", FORCED_ABS_127: "127", WINDOWED: "window"}
_CONTEXTS = {BY_POSITION: "none", BY_LEVEL: "level", BY_ZERO_AND_LEVEL: "zero", BY_ROW: "row"}

TYPE_COLUMNS = (
    "type", "id", "block", "half fields", "byte fields", "codes", "bits", "per symbol", "cell", "variant", "context", "level",
    "raw planes",
)  # fmt: skip


def level_text(layout: StreamLayout) -> str:
    """Say what the level of a cell is."""
    if layout.mode not in (BY_LEVEL, BY_ZERO_AND_LEVEL):
        return "-"
    if layout.level_steps:
        return "scale" if layout.level_steps == 1 else f"{layout.level_steps} scale"
    if not layout.sub_scale:
        return "scale"
    if layout.sub_zero < 0:
        return "scale + int8(sub_scale)"
    return f"scale + (sub_scale - {layout.sub_zero})" if layout.sub_zero else "scale + sub_scale"


def raw_texts(layout: StreamLayout) -> list[str]:
    """Describe the raw planes of a type in stream order."""
    is_float = layout.cell_codes == 0
    texts = [f"{name} {'code' if is_float else n} x {bits}" for name, n, bits in layout.raw]
    wide_bits = layout.code_bits - 8
    if wide_bits > 0:
        n_codes = "code" if is_float else next(s.per_block for s in plane_specs(layout.type_id) if s.name == layout.codes)
        windowed = f" ({WINDOW_LOW_BITS})" if layout.forced == WINDOWED else ""
        texts.append(f"low {n_codes} x {wide_bits}{windowed}")
    return texts


def type_cells(layout: StreamLayout) -> list[str]:
    """Return the cells of a type's row."""
    known = GGML_TYPES[layout.type_id]
    fields = []
    for byte in layout.bytes_:
        count = byte.per_block or "row"
        fields.append(f"{byte.name} x {count}" + (f" by {byte.context}" if byte.context != "none" else ""))
    context = _CONTEXTS[layout.mode]
    return [
        layout.type_name,
        str(layout.type_id),
        f"{known.block_size} / {known.block_bytes}",
        ", ".join(f"{half.name} - scale" if half.delta_of == 0 else half.name for half in layout.halves) or "-",
        ", ".join(fields) or "-",
        "rank" if layout.ranked else layout.codes,
        f"4 + {layout.low_bits}" if layout.low_bits else str(layout.code_bits),
        "2" if layout.low_bits else str(layout.codes_per_symbol),
        str(layout.cell_codes or "*"),
        _VARIANTS[layout.forced],
        f"{context} {layout.zero_base}" if layout.mode == BY_ZERO_AND_LEVEL else context,
        level_text(layout),
        ", ".join(raw_texts(layout)) or "-",
    ]


def type_table(layouts: dict[int, StreamLayout] = STREAM_LAYOUTS) -> str:
    """Return the table of types, or of their second forms, as Markdown."""
    lines = [f"| {' | '.join(TYPE_COLUMNS)} |", "|" + "---|" * len(TYPE_COLUMNS)]
    lines += [f"| {' | '.join(type_cells(layout))} |" for _, layout in sorted(layouts.items())]
    return "\n".join(lines)


# The worked example.

_WIDTH = 16
Piece = tuple[bytes, str]
"""Bytes and what they are."""


def dump(pieces: list[Piece], at: int) -> str:
    """Return a hex dump, each piece on lines of its own; runs of more than one line of zeros are written in words."""
    lines = []
    for data, note in pieces:
        k = 0
        while k < len(data):
            n_zeros = len(data[k:]) - len(data[k:].lstrip(b"\0"))
            if n_zeros == len(data) - k > _WIDTH or n_zeros >= 2 * _WIDTH:
                part = data[k : k + n_zeros - (n_zeros % _WIDTH if k + n_zeros < len(data) else 0)]
                shown = f"00 ({len(part)} times)"
            else:
                part = data[k : k + _WIDTH]
                shown = part.hex(" ")
            lines.append(f"{at:04x}  {shown:<{3 * _WIDTH - 1}}  {note if k == 0 else ''}".rstrip())
            k += len(part)
            at += len(part)
    return "\n".join(lines)


def undump(text: str) -> bytes:
    """Return the bytes of a hex dump that `dump` wrote."""
    out = b""
    for line in text.splitlines():
        offset, hexes = int(line[:4], 16), line[6 : 6 + 3 * _WIDTH].strip()
        assert offset == len(out), line
        if hexes.endswith("times)"):
            out += bytes(int(hexes.split("(")[1].split()[0]))
        else:
            out += bytes.fromhex(hexes)
    return out


def _fields(data: bytes, sizes: list[tuple[int, str]]) -> list[Piece]:
    """Cut `data` into fields."""
    pieces = []
    at = 0
    for n, note in sizes:
        pieces.append((data[at : at + n], note))
        at += n
    assert at == len(data)
    return pieces


def _header_pieces(data: bytes) -> list[Piece]:
    u = coded_file.HEADER.unpack(data)
    return _fields(data, [
        (4, "magic `LZWT`"), (2, "version 1"), (2, f"flags {u[2]}"), (8, f"source size {u[3]}"), (8, f"file size {u[4]}"),
        (32, "SHA-256 of the source"), (4, f"head: {u[6]} bytes"), (4, f"head before compression: {u[7]} bytes"),
        (8, "checksum of the head"), (4, f"{u[9]} units"), (4, f"payload at 4 x {u[10]} = {4 * u[10]:#06x}"),
        (8, "checksum of the unit table"), (32, "reserved"), (8, "checksum of the 120 bytes above"),
    ])  # fmt: skip


def head_pieces(layout: Layout) -> list[Piece]:
    """Cut the head, before compression, into its fields."""
    head = layout.head
    pieces: list[Piece] = []

    def number(value: int, note: str) -> None:
        pieces.append((coded_file.pack_number(value), note.format(value)))

    number(len(head.table_sets), "{} table set")
    for table_set in head.table_sets:
        number(len(table_set.lengths), "{} table")
        for t, row in enumerate(table_set.lengths):
            used = ", ".join(f"{s}: {row[s]}" for s in np.flatnonzero(row))
            pieces.append((row.tobytes(), f"table {t}: code lengths ({used})"))
        with_freqs = np.flatnonzero(table_set.freqs.any(axis=1))
        number(len(with_freqs), "{} table with frequencies")
        for t in with_freqs.tolist():
            number(t, "table {}")
            used = ", ".join(f"{s}: {table_set.freqs[t, s]}" for s in np.flatnonzero(table_set.freqs[t]))
            pieces.append((coded_file.pack_numbers(table_set.freqs[t].tolist()), f"frequencies of 256 symbols ({used})"))
    number(len(head.spans), "{} spans")
    for i, span in enumerate(head.spans):
        number(span.n_bytes, f"span {i}: {{}} bytes")
        number(int(span.is_coded), "coded" if span.is_coded else "verbatim")
        if span.plan is None:
            continue
        pieces += _tensor_pieces(span)
        number(span.entropy_millibits, "statistics: entropy, thousandths of a bit per weight")
        number(span.code_bits, "statistics: bits of the coded codes")
        plan = span.plan
        number(plan.table_set, "table set {}")
        coder = ("codewords", "rANS for the cells")[plan.coder] + (", second form of the type" if plan.form else "")
        number(plan.coder + coded_file.SECOND_FORM * plan.form, f"coder {{}}: {coder}")
        for mode in plan.modes:
            number(mode.low | mode.sign << 1, f"field mode: low part {('raw', 'coded')[mode.low]}")
        for base in plan.bases:
            number(base, "base of a side plane: {}")
        for k, tables in enumerate(plan.side_tables):
            pieces.append((tables.tobytes(), f"table of each context of side plane {k}"))
        pieces.append((plan.cell_tables.tobytes(), "table of each context of cells"))
    verbatim = [t for t in head.tensors if not head.spans[t.span].is_coded]
    number(len(verbatim), "{} verbatim tensors")
    for tensor in verbatim:
        pieces += _tensor_pieces(tensor)
        number(tensor.offset, "offset")
        number(tensor.n_bytes, "bytes")
    assert b"".join(data for data, _ in pieces) == coded_file.pack_head(head)
    return pieces


def _tensor_pieces(tensor: Any) -> list[Piece]:
    name = tensor.name.encode()
    shape = b"".join(coded_file.pack_number(n) for n in tensor.shape)
    return [
        (coded_file.pack_number(len(name)) + name, f"name {tensor.name}"),
        (coded_file.pack_number(tensor.type_id), f"type {tensor.type_id}, {type_name(tensor.type_id)}"),
        (coded_file.pack_number(len(tensor.shape)), f"{len(tensor.shape)} dimensions"),
        (shape, f"shape {' x '.join(map(str, tensor.shape))}"),
    ]


KIND_NAMES = ("raw", "zstd", "coded", "coded unforced", "lockstep", "filtered")


def unit_places(layout: Layout) -> Iterator[tuple[int, str, CodedSpan]]:
    """Yield (unit, where its bytes come from, span)."""
    for i, span, first, _ in layout.spans():
        for k in range(span.n_units):
            yield first + k, f"span {i}" + (f", row group {k} of {span.name}" if span.is_coded else ""), span


def file_pieces(coded: bytes) -> list[Piece]:
    """Cut the coded file of the worked example into its fields."""
    layout = read_layout(io.BytesIO(coded), len(coded))
    head_bytes = struct.unpack_from("<I", coded, 56)[0]
    head_end = HEADER_BYTES + head_bytes
    pieces = _header_pieces(coded[:HEADER_BYTES])
    pieces.append((coded[HEADER_BYTES:head_end], "the head, one zstd frame"))
    kinds, sizes, offsets = layout.kinds.tolist(), layout.sizes.tolist(), layout.offsets().tolist()
    at = head_end
    for unit, place, _ in unit_places(layout):
        kind = f"kind {kinds[unit]}, {KIND_NAMES[kinds[unit]]}"
        pieces.append((coded[at : at + 4], f"unit {unit} ({place}): {sizes[unit]} bytes, {kind}"))
        pieces.append((coded[at + 4 : at + 12], "checksum of its source bytes"))
        at += 12
    if layout.payload_offset > at:
        pieces.append((coded[at : layout.payload_offset], "zeros up to a multiple of 64"))
    for unit, _, span in unit_places(layout):
        payload = coded[offsets[unit] : offsets[unit] + sizes[unit]]
        if span.is_coded and kinds[unit] != coded_file.RAW:
            notes = watch(span, payload, layout).words
            n_words = len(notes) - notes.count("raw bits")  # the raw bits, the body, are the end
            pieces += [(payload[4 * k : 4 * k + 4], f"unit {unit}: {note}") for k, note in enumerate(notes[:n_words])]
            pieces.append((payload[4 * n_words :], f"unit {unit}: raw bits"))
        else:
            pieces.append((payload, f"unit {unit}: {KIND_NAMES[kinds[unit]]}"))
        padding = coded[offsets[unit] + sizes[unit] : offsets[unit + 1]]
        if padding:
            pieces.append((padding, "zeros up to a multiple of 4"))
    pieces.append((coded[offsets[-1] :], "trailer"))
    assert b"".join(data for data, _ in pieces) == coded
    return pieces


@dataclass
class Watch:
    """What the plain decoder did with the payload of a row group: words taken, symbols decoded."""

    words: list[str]
    """What each word of the payload is."""

    steps: list[str]
    """The first steps, as text."""

    group: Any


def watch(span: CodedSpan, payload: bytes, layout: Layout) -> Watch:
    """Decode a row group of the worked example with the plain decoder, and note what it does."""
    from tests.container import plain_decoder

    types = plain_decoder.read_types(FORMAT.read_text(encoding="utf-8"))
    spans, _ = plain_decoder.read_head(coded_file.pack_head(layout.head), types)
    plain = next(s for s in spans if s.name.decode() == span.name)
    group = plain_decoder.RowGroup(plain, span.unit_rows(0))
    assert group.n_raw_bits(False) < 2048  # no positions in front
    low_words = [(phase, cell, lane) for phase in (0, 1) for cell in range(group.n_cells) for lane in range(group.n_lanes(phase))]
    low_words = [place for place in low_words for _ in range(plain.kind.low_bits)]
    seen = Watch([f"low bits of codes, row {2 * lane + phase}, cell {cell}" for phase, cell, lane in low_words], [], group)

    class Watched(plain_decoder.Lanes):
        def refill(self, lanes: range) -> None:
            for lane in lanes:
                before = self.n_taken
                super().refill(range(lane, lane + 1))
                if self.n_taken > before:
                    seen.words.append(f"word of lane {lane}")
                    seen.steps.append(f"lane {lane} takes word {self.words[before]:08x}")

        def symbol(self, lane: int, code: dict[tuple[int, int], int]) -> int:
            before = list(self.bits[lane])
            symbol = super().symbol(lane, code)
            n = len(before) - len(self.bits[lane])
            seen.steps.append(f"lane {lane}: {''.join(map(str, before[:n])) or '(no bits)'} is {symbol}")
            return symbol

    class WatchedRans(plain_decoder.RansLanes):
        def __init__(self, lanes: Any, n_lanes: int) -> None:
            super().__init__(lanes, n_lanes)
            seen.words.extend(f"rANS state of lane {lane}" for lane in range(n_lanes))

        def next_half(self) -> int:
            before = self.lanes.n_taken
            half = super().next_half()
            if self.lanes.n_taken > before:
                seen.words.append("two 16-bit words of rANS")
            return half

    original = plain_decoder.Lanes, plain_decoder.RansLanes
    plain_decoder.Lanes, plain_decoder.RansLanes = Watched, WatchedRans  # type: ignore[misc]
    try:
        group.decode(payload, False)
    finally:
        plain_decoder.Lanes, plain_decoder.RansLanes = original  # type: ignore[misc]
    seen.words += ["raw bits"] * (len(payload) // 4 - len(seen.words))
    return seen


def first_steps(layout: Layout, coded: bytes) -> str:
    """Return the start of the decoding of unit 1 as text."""
    offsets, sizes = layout.offsets().tolist(), layout.sizes.tolist()
    span = layout.head.spans[1]
    seen = watch(span, coded[offsets[1] : offsets[1] + sizes[1]], layout)
    group = seen.group
    lines = []
    steps = iter(seen.steps)

    def show(title: str, n_symbols: int) -> None:
        lines.append(title)
        while n_symbols:
            step = next(steps)
            lines.append(f"  {step}")
            n_symbols -= "takes" not in step

    for plane in ("high parts of scale", "low parts of scale"):
        for phase in (0, 1):
            show(f"side plane, {plane}, phase {phase}", group.n_lanes(phase))
    for position in range(3):
        show(f"cells, phase 0, cell 0, symbol {position}", group.n_lanes(0))
    lines.append("and so on")
    return "\n".join(lines)


def worked_example() -> str:
    """Return the dumps of the worked example as Markdown."""
    coded = golden_path("tiny").read_bytes()
    layout = read_layout(io.BytesIO(coded), len(coded))
    return "\n\n".join([
        f"The source, {layout.source_size} bytes:",
        f"```hex\n{dump([(tiny(), '')], 0)}\n```",
        f"The coded file, {layout.file_size} bytes (the golden `tests/goldens/tiny.lw`):",
        f"```hex\n{dump(file_pieces(coded), 0)}\n```",
        "The head before compression:",
        f"```hex\n{dump(head_pieces(layout), 0)}\n```",
        "How the decoding of unit 1 begins:",
        f"```text\n{first_steps(layout, coded)}\n```",
    ])  # fmt: skip


def plane_table() -> str:
    """Return the table of planes as Markdown."""
    lines = ["| type | id | elements | bytes | planes: name, values per block, bits of a value |", "|---|---|---|---|---|"]
    for type_id, known in GGML_TYPES.items():
        planes = ", ".join(f"{spec.name} {spec.per_block} x {spec.bits}" for spec in plane_specs(type_id))
        lines.append(f"| {known.name} | {type_id} | {known.block_size} | {known.block_bytes} | {planes} |")
    return "\n".join(lines)


GENERATED: dict[Path, dict[str, Callable[[], str]]] = {
    FORMAT: {"types": type_table, "second forms": lambda: type_table(SECOND_LAYOUTS), "example": worked_example},
    REPOSITORY / "docs" / "blocks.md": {"planes": plane_table},
}
"""The generated blocks of the documents, in the order in which they are made: the example is decoded with the types."""


def generated_block(text: str, name: str) -> str:
    """Return what stands in a generated block."""
    return text.split(f"<!-- generated: {name} -->\n")[1].split("\n<!-- /generated -->")[0]


def fill_generated(text: str, name: str, new: str) -> str:
    """Return a document with a generated block filled."""
    start, end = f"<!-- generated: {name} -->\n", "\n<!-- /generated -->"
    assert text.count(start) == 1, f"the document has no block {name}"
    return text.replace(start + generated_block(text, name) + end, start + new + end)


def main() -> None:
    """Write the goldens and the generated blocks."""
    GOLDENS.mkdir(exist_ok=True)
    files = {}
    for name, source in SOURCES.items():
        coded = encode(name)
        golden_path(name).write_bytes(coded)
        files[name] = {
            "preset": source.preset,
            "source_sha256": hashlib.sha256(source.make()).hexdigest(),
            "coded_sha256": hashlib.sha256(coded).hexdigest(),
            "coded_bytes": len(coded),
        }
        print(f"{golden_path(name).relative_to(REPOSITORY)}: {len(coded)} bytes")
    MANIFEST.write_text(json.dumps({"zstd": zstd_version(), "files": files}, indent=2) + "\n")
    for path, blocks in GENERATED.items():
        for name, make in blocks.items():
            # Read anew: the example is decoded with the table of types that has just been written.
            path.write_text(fill_generated(path.read_text(encoding="utf-8"), name, make()), encoding="utf-8")
        print(f"{path.relative_to(REPOSITORY)}: generated blocks written")


if __name__ == "__main__":
    main()
