"""Coded files in memory: make them, decode them, take them apart and put them together again with valid checksums.

`Parts` is for attacks that checksums do not stop: change a field, seal, and only the structural checks are left.
"""

from __future__ import annotations

import functools
import io
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numba import njit

from lazyweights.blocks import GGML_TYPES, TYPE_BY_NAME, Planes, join, split
from lazyweights.codecs import lane_kernels, rans
from lazyweights.container import batch_decode, bit_kernels, coded_file, group_decode, shared_decode
from lazyweights.container.coded_file import HEADER, HEADER_BYTES, UNIT_DTYPE, CodedSpan, Head, Layout
from lazyweights.container.decoder import decode_stream, read_layout
from lazyweights.container.encoder import encode_file
from lazyweights.container.stream_layout import STREAM_LAYOUTS
from lazyweights.container.tensor_coder import is_codable
from tests.make_gguf import SLOW_TYPES, build_gguf, quantized_tensor_bytes, random_tensor_bytes

HEADER_FIELDS = (
    "magic", "version", "flags", "source_size", "file_size", "sha256", "head_bytes", "head_raw_bytes", "head_checksum",
    "n_units", "payload_offset_words", "table_checksum", "reserved_a", "reserved_b", "reserved_bytes", "checksum",
)  # fmt: skip
"""The fields of `coded_file.HEADER` in order."""

CODABLE = tuple(t for t in GGML_TYPES if is_codable(t, (768, 64)))
"""Types that are coded rather than kept verbatim."""


def type_label(type_id: int) -> str:
    """Test id of a type."""
    return GGML_TYPES[type_id].name


def encode_bytes(data: bytes, folder: Path, **options: Any) -> bytes:
    """Return the coded file of `data`; options as for `encode_file`."""
    source, output = folder / "sample.gguf", folder / "sample.gguf.lw"
    source.write_bytes(data)
    encode_file(source, output, force=True, **{"threads": 1, **options})
    return output.read_bytes()


def decode_bytes(coded: bytes) -> bytes:
    """Return what a coded file holds."""
    sink = io.BytesIO()
    decode_stream(io.BytesIO(coded), sink)
    return sink.getvalue()


def layout_of(coded: bytes) -> Layout:
    """Return the layout of a coded file, checked."""
    return read_layout(io.BytesIO(coded), len(coded))


def coded_span(layout: Layout, name: str) -> tuple[CodedSpan, slice]:
    """Return the span of a coded tensor and its units."""
    for _, span, first, _ in layout.spans():
        if span.name == name and span.is_coded:
            return span, slice(first, first + span.n_units)
    raise AssertionError(f"{name} is not coded")


def tensor_bytes(type_id: int, shape: tuple[int, ...], rng: np.random.Generator) -> bytes:
    """Quantized weights where a quantizer is at hand and quick, else random bytes."""
    if GGML_TYPES[type_id].name not in SLOW_TYPES:
        data = quantized_tensor_bytes(type_id, shape, rng)
        if data is not None:
            return data
    return random_tensor_bytes(type_id, shape, rng)


def change_plane(type_id: int, data: bytes, shape: tuple[int, ...], **changed: Any) -> bytes:
    """Return packed bytes with planes replaced; a value may be a number, an array or a function of the old plane."""
    planes = split(type_id, data, shape)
    new = dict(planes.planes)
    for name, value in changed.items():
        old = new[name]
        new[name] = (value(old) if callable(value) else np.broadcast_to(value, old.shape)).astype(old.dtype)
    return join(Planes(type_id, planes.shape, new)).tobytes()


def shared_tensor(
    type_name: str,
    shape: tuple[int, ...],
    rng: np.random.Generator,
    *,
    n_references: int = 1,
    doubled: float = 0.0,
    width: float = 4.0,
    trellis: bool = False,
) -> bytes:
    """Return a tensor whose rows share their scales: bells of other widths in each column and row.

    `doubled`: share of the blocks (of sub-blocks, where there are sub-scales) whose scale is twice that of the reference.
    `trellis`: whether the codes are trellis codes, with indices that are bells of half the width.
    """
    type_id = TYPE_BY_NAME[type_name].type_id
    planes_of = split(type_id, random_tensor_bytes(type_id, shape, rng), shape)
    planes = planes_of.planes
    rows = int(np.prod(shape[1:]))
    of_row = rng.integers(0, n_references, rows)
    flat = {name: plane.reshape(rows, -1) for name, plane in planes.items()}
    narrow = "sub_scale" if "sub_scale" in flat else "scale"
    shift = np.where(rng.random(flat[narrow].shape) < doubled, 1, 0)
    for name, plane in flat.items():
        n = plane.shape[1]
        if name in ("scale", "min", "min_scale", "sum") and plane.dtype == np.uint16:
            new = (0x2800 + 0x91 * rng.integers(0, 16, (n_references, n)))[of_row]
            new = new + 0x400 * shift if name == narrow else new
        elif name in ("sub_scale", "sub_min"):
            new = rng.integers(4, 8, (n_references, n))[of_row]
            new = new << shift if name == narrow else new
        else:
            continue
        flat[name] = new.astype(plane.dtype)
    bits = STREAM_LAYOUTS[type_id].code_bits
    codes = flat["codes"]
    n = codes.shape[1]
    widths = width * 2.0 ** (rng.uniform(-1, 1, n) + rng.uniform(-0.5, 0.5, (rows, 1)) - np.repeat(shift, n // shift.shape[1], 1))
    bell = np.rint(rng.standard_normal(codes.shape) * widths).astype(np.int64)
    if trellis:
        n_indices = 1 << bits - 1
        lowest = -n_indices // 2 if bits == 8 else 0
        indices = np.clip((bell >> 1) + lowest + n_indices // 2, lowest, lowest + n_indices - 1)
        flat["codes"] = trellis_codes(indices, (*shape, 1)[1]).astype(np.uint8).view(codes.dtype)
    elif bits == 8:
        flat["codes"] = np.clip(bell, -127, 127).astype(np.int8).view(codes.dtype)
    else:
        flat["codes"] = np.clip(bell + (1 << bits - 1), 0, (1 << bits) - 1).astype(codes.dtype)
    new_planes = {name: flat[name].reshape(plane.shape) for name, plane in planes.items()}
    return join(Planes(type_id, planes_of.shape, new_planes)).tobytes()


def trellis_codes(indices: np.ndarray, n_rows: int) -> np.ndarray:
    """Return the trellis codes with these indices, int64 (rows, columns), in row groups of a tensor of `n_rows` rows."""
    codes = np.empty_like(indices)
    states = np.zeros(indices.shape[1], np.int64)
    for row, of_row in enumerate(indices):
        if row % n_rows % 64 == 0:
            states[:] = 0
        codes[row] = 2 * of_row + states % 2
        states = states // 2 ^ 18 * (states % 2) ^ 4 * (of_row % 2)
    return codes


def mixed_gguf(seed: int = 0) -> bytes:
    """A small file with every kind of unit and span: the sample that the damage tests work on."""
    rng = np.random.default_rng(seed)
    tensors = []

    def add(name: str, type_name: str, shape: tuple[int, ...], data: bytes | None = None) -> None:
        type_id = TYPE_BY_NAME[type_name].type_id
        tensors.append((name, type_id, shape, data or tensor_bytes(type_id, shape, rng)))

    def add_peaked(name: str, type_name: str, shape: tuple[int, ...], plane: str, middle: int) -> None:
        """A tensor of which most codes are `middle`: such a small one would stay verbatim else."""
        type_id = TYPE_BY_NAME[type_name].type_id
        data = tensor_bytes(type_id, shape, rng)

        def peaked(codes: np.ndarray) -> np.ndarray:
            return np.where(rng.random(codes.shape) < 0.6, middle, codes)

        tensors.append((name, type_id, shape, change_plane(type_id, data, shape, **{plane: peaked})))

    add_peaked("blk.0.attn_q.weight", "Q4_K", (256, 66), "codes", 8)
    q4_1 = TYPE_BY_NAME["Q4_1"].type_id
    data = tensor_bytes(q4_1, (64, 140), rng)
    # The second row group loses its forced codes.
    second = np.arange(140)[:, None] // 64 == 1
    unforced = change_plane(q4_1, data, (64, 140), codes=lambda codes: np.where(second, codes // 2, codes))
    add("blk.0.attn_k.weight", "Q4_1", (64, 140), unforced)
    add("blk.0.attn_v.weight", "Q8_0", (64, 193))
    add_peaked("blk.0.attn_output.weight", "Q6_K", (256, 10), "codes", 32)
    add_peaked("blk.0.ffn_up_exps.weight", "Q4_0", (64, 65, 2), "codes", 8)
    add_peaked("blk.0.ffn_gate.weight", "IQ2_XXS", (256, 9), "index", 3)
    add("blk.0.ffn_down.weight", "TQ1_0", (256, 3))
    add("blk.0.ffn_norm.weight", "F32", (33, 20))
    # Mostly zeros: of floats only such are coded by rANS.
    few = np.random.default_rng([seed, 1])
    values = np.where(few.random(576 * 3) < 0.9, 0, few.normal(size=576 * 3)).astype(np.float32)
    add("blk.0.attn_norm.weight", "BF16", (576, 3), (values.view(np.uint32) >> 16).astype("<u2").tobytes())
    add("blk.1.attn_q.weight", "Q8_0", (192, 128), shared_tensor("Q8_0", (192, 128), rng, n_references=3, doubled=0.1))
    add("blk.1.attn_k.weight", "Q4_K", (256, 128), shared_tensor("Q4_K", (256, 128), rng, doubled=0.1, width=1.0))
    add("blk.1.attn_v.weight", "Q8_0", (192, 133), shared_tensor("Q8_0", (192, 133), rng, doubled=0.1, trellis=True))
    tensors.append(("rope_freqs.weight", TYPE_BY_NAME["I32"].type_id, (176,), rng.bytes(704)))
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.tokens": [*(f"token{i}" for i in range(400)), "long " * 60, ""],
        "tokenizer.ggml.scores": -np.arange(402, dtype=np.float32),
    }
    return build_gguf(tensors, metadata, tail=b"tail" * 3000)


SCALAR_KERNELS = {
    "decode_cells_phase": lane_kernels._decode_cells_scalar,
    "decode_side_phase": lane_kernels._decode_side_scalar,
    "decode_cells_pair": lane_kernels._decode_cells_pair_scalar,
    "decode_side_streams": lane_kernels._decode_side_streams_scalar,
    "decode_rans_phase": rans.decode_rans_scalar,
    "decode_rows_phase": rans.decode_rows_scalar,
    "unpack_many": bit_kernels.unpack_bits,
    "VECTOR": False,
}
"""What runs where the CPU has no vector kernels."""


@functools.cache
def scalar_decode_groups() -> Any:
    """Return `group_decode.decode_groups` on the scalar kernels. Not cached on disk: that would mix up the two."""
    module = vars(group_decode)
    used = {name for name in module if name.startswith("decode_")} - {"decode_groups"}
    assert used <= set(SCALAR_KERNELS), "the kernels of decode_groups have other names now"
    assert set(SCALAR_KERNELS) <= {*module, *vars(shared_decode)}, "the kernels of decode_groups have other names now"
    replaced = {**module, **SCALAR_KERNELS}
    for name in ("_unpack_low", "_offsets_of_cells", "_finish_groups", "decode_groups"):
        code = module[name].py_func.__code__
        replaced[name] = njit(nogil=True)(types.FunctionType(code, replaced, name))
    return replaced["decode_groups"]


@functools.cache
def scalar_decode_batch() -> Any:
    """Return `batch_decode.decode_batch` on the scalar kernels."""
    code = batch_decode.decode_batch.py_func.__code__
    names = {**vars(batch_decode), "decode_groups": scalar_decode_groups(), "JOINS_WORDS": False}
    return njit(nogil=True)(types.FunctionType(code, names, "decode_batch"))


@functools.cache
def scalar_decode_shared() -> dict[str, Any]:
    """Return functions of `shared_decode` on the scalar kernels, by name."""
    replaced = {**vars(shared_decode), **SCALAR_KERNELS}
    names = ("_decode_plane", "decode_shared_groups", "_decode_joined")
    for name in names:
        code = vars(shared_decode)[name].py_func.__code__
        replaced[name] = njit(nogil=True)(types.FunctionType(code, replaced, name))
    return {name: replaced[name] for name in names}


@dataclass
class Parts:
    """A coded file taken apart. Change anything, then `seal`."""

    flags: int
    source_size: int
    sha256: bytes
    head: bytes
    """Before compression."""
    kinds: list[int]
    checksums: list[int]
    payloads: list[bytes]
    trailer: bytes

    @classmethod
    def of(cls, coded: bytes) -> Parts:
        """Take a whole coded file apart."""
        layout = layout_of(coded)
        fields = dict(zip(HEADER_FIELDS, HEADER.unpack(coded[:HEADER_BYTES]), strict=True))
        packed = coded[HEADER_BYTES : HEADER_BYTES + fields["head_bytes"]]
        head = zstandard.ZstdDecompressor().decompress(packed, max_output_size=fields["head_raw_bytes"])
        starts, sizes = layout.offsets().tolist(), layout.sizes.tolist()
        payloads = [coded[at : at + n] for at, n in zip(starts, sizes, strict=False)]
        return cls(
            layout.flags, layout.source_size, layout.sha256, head, layout.kinds.tolist(),
            layout.units["checksum"].tolist(), payloads, coded[starts[-1] :],
        )  # fmt: skip

    def unpack(self) -> Head:
        """Return the head as objects."""
        return coded_file.unpack_head(self.head, self.source_size)

    def table(self) -> np.ndarray:
        """Return the unit table that fits the payloads."""
        sizes = [len(p) | kind << 28 for p, kind in zip(self.payloads, self.kinds, strict=True)]
        return np.array(list(zip(sizes, self.checksums, strict=True)), UNIT_DTYPE)

    def seal(self, *, packed_head: bytes | None = None, table: np.ndarray | None = None, **fields: Any) -> bytes:
        """Return the file with all checksums right; `fields` of the header replace what would be right."""
        packed = zstandard.ZstdCompressor(level=3).compress(self.head) if packed_head is None else packed_head
        units = (self.table() if table is None else table).tobytes()
        body = b"".join(p + bytes(-len(p) % 4) for p in self.payloads) + self.trailer
        n_units = len(units) // UNIT_DTYPE.itemsize
        start = coded_file.payload_offset(len(packed), n_units)
        values = {
            "magic": coded_file.CODED_MAGIC, "version": coded_file.VERSION, "flags": self.flags,
            "source_size": self.source_size, "file_size": start + len(body), "sha256": self.sha256,
            "head_bytes": len(packed), "head_raw_bytes": len(self.head), "head_checksum": coded_file.checksum(packed),
            "n_units": n_units, "payload_offset_words": start // 4, "table_checksum": coded_file.checksum(units),
            "reserved_a": 0, "reserved_b": 0, "reserved_bytes": bytes(16), "checksum": 0,
        } | fields  # fmt: skip
        assert tuple(values) == HEADER_FIELDS
        header = HEADER.pack(*values.values())[:-8]
        header += coded_file.checksum(header).to_bytes(8, "little")
        prefix = header + packed + units
        return prefix + bytes(start - len(prefix)) + body


