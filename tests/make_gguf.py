"""Build GGUF files by hand, so that a test controls every byte, odd and hostile ones included.

`build_gguf` writes a whole file; `pack_header`, `pack_pair`, `pack_value` and `pack_tensor_info` write its pieces for
files that no writer would write.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lazyweights.blocks.types import GGML_TYPES, TYPE_BY_NAME

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}
_DTYPE_TYPES = {
    "u1": U8, "i1": I8, "u2": U16, "i2": I16, "u4": U32, "i4": I32, "f4": F32, "b1": BOOL, "u8": U64, "i8": I64,
    "f8": F64,
}  # fmt: skip
_PREFIX = {"little": "<", "big": ">"}
_STORED_DTYPES = {"F64": "<f8", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}

# libgguf builds the search tables of these once per process, in about 1, 2, 8 and 4 seconds (IQ1_M shares IQ1_S's).
SLOW_TYPES = frozenset({"IQ2_XXS", "IQ2_XS", "IQ1_S", "IQ1_M", "IQ2_S"})

Tensor = tuple[str | bytes, int, tuple[int, ...], bytes]


@dataclass(frozen=True)
class Typed:
    """A metadata value whose GGUF value type (and, for an array, element type) the test chooses."""

    value_type: int
    value: Any
    item_type: int | None = None


def _count_code(version: int) -> str:
    return "I" if version == 1 else "Q"


def pack_string(text: str | bytes, version: int = 3, byte_order: str = "little") -> bytes:
    """Length and bytes of a string."""
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
    return struct.pack(_PREFIX[byte_order] + _count_code(version), len(data)) + data


def type_value(value: Any) -> Typed:
    """Choose a GGUF value type for a Python or numpy value, as a model converter would."""
    if isinstance(value, Typed):
        return value
    if isinstance(value, bool | np.bool_):
        return Typed(BOOL, bool(value))
    if isinstance(value, str | bytes):
        return Typed(STRING, value)
    if isinstance(value, np.generic):
        return Typed(_DTYPE_TYPES[value.dtype.str[1:]], value.item())
    if isinstance(value, int):
        if value < 0:
            return Typed(I32 if value >= -(1 << 31) else I64, value)
        return Typed(U32 if value < 1 << 32 else U64, value)
    if isinstance(value, float):
        return Typed(F32, value)
    if isinstance(value, np.ndarray):
        return Typed(ARRAY, value.tolist(), _DTYPE_TYPES[value.dtype.str[1:]])
    if isinstance(value, list | tuple):
        item_types = [type_value(item).value_type for item in value]
        return Typed(ARRAY, list(value), max(item_types, default=I32))
    raise TypeError(f"no GGUF value type for {type(value).__name__}")


def pack_value(value: Any, version: int = 3, byte_order: str = "little") -> bytes:
    """Bytes of a value, without its type; an array starts with element type and length."""
    typed = type_value(value)
    prefix = _PREFIX[byte_order]
    if typed.value_type == STRING:
        return pack_string(typed.value, version, byte_order)
    if typed.value_type != ARRAY:
        return struct.pack(prefix + _CODES[typed.value_type], typed.value)
    item_type = type_value(list(typed.value)).item_type if typed.item_type is None else typed.item_type
    assert item_type is not None
    head = struct.pack(prefix + "I" + _count_code(version), item_type, len(typed.value))
    if item_type in _CODES:
        return head + struct.pack(f"{prefix}{len(typed.value)}{_CODES[item_type]}", *typed.value)
    return head + b"".join(pack_value(item, version, byte_order) for item in typed.value)


def pack_pair(key: str | bytes, value: Any, version: int = 3, byte_order: str = "little") -> bytes:
    """Bytes of a key/value pair."""
    typed = type_value(value)
    value_type = struct.pack(_PREFIX[byte_order] + "I", typed.value_type)
    return pack_string(key, version, byte_order) + value_type + pack_value(typed, version, byte_order)


def pack_header(n_tensors: int, n_pairs: int, version: int = 3, byte_order: str = "little") -> bytes:
    """Magic, version and counts."""
    code = _PREFIX[byte_order] + "I" + 2 * _count_code(version)
    return b"GGUF" + struct.pack(code, version, n_tensors, n_pairs)


def pack_tensor_info(
    name: str | bytes,
    type_id: int,
    shape: Iterable[int],
    offset: int,
    version: int = 3,
    byte_order: str = "little",
) -> bytes:
    """Bytes of a tensor description; `offset` counts from the start of the data section."""
    dims = tuple(shape)
    code = f"{_PREFIX[byte_order]}I{len(dims)}{_count_code(version)}"
    tail = struct.pack(_PREFIX[byte_order] + "IQ", type_id, offset)
    return pack_string(name, version, byte_order) + struct.pack(code, len(dims), *dims) + tail


def build_gguf(
    tensors: Iterable[Tensor],
    metadata: Mapping[str, Any] | None = None,
    version: int = 3,
    byte_order: str = "little",
    alignment: int = 32,
    tail: bytes = b"",
    gap_fill: int = 0x00,
) -> bytes:
    """Build a GGUF file.

    Parameters
    ----------
    tensors : iterable of (name, type_id, shape, data)
        In the order of the file; `shape` has columns first. The data goes into the file as it is, also where its size
        does not fit the shape; offsets are the running padded sum of the sizes given.
    metadata : mapping, optional
        Values as for `type_value`. An alignment other than 32 is added unless ``general.alignment`` is given.
    version, byte_order, alignment
        Of the header; `byte_order` does not touch the tensor data.
    tail : bytes
        Appended after the padding of the last tensor.
    gap_fill : int
        The byte that fills gaps.

    Returns
    -------
    bytes
        The file.
    """
    listed = list(tensors)
    pairs = dict(metadata or {})
    if alignment != 32:
        pairs.setdefault("general.alignment", Typed(U32, alignment))
    fill = bytes([gap_fill])
    head = [pack_header(len(listed), len(pairs), version, byte_order)]
    head += [pack_pair(key, value, version, byte_order) for key, value in pairs.items()]
    body = []
    offset = 0
    for name, type_id, shape, data in listed:
        head.append(pack_tensor_info(name, type_id, shape, offset, version, byte_order))
        body += [data, fill * (-len(data) % alignment)]
        offset += len(data) + -len(data) % alignment
    header = b"".join(head)
    return header + fill * (-len(header) % alignment if listed else 0) + b"".join(body) + tail


def tensor_size(type_id: int, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of a known type."""
    ggml_type = GGML_TYPES[type_id]
    assert shape[0] % ggml_type.block_size == 0
    return int(np.prod(shape)) // ggml_type.block_size * ggml_type.block_bytes


def random_tensor_bytes(type_id: int, shape: tuple[int, ...], rng: np.random.Generator) -> bytes:
    """Random bytes of the exact size of a tensor: what no quantizer writes occurs too."""
    return rng.bytes(tensor_size(type_id, shape))


def gaussian_weights(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """float32 weights of shape (rows of all other dimensions, columns): Gaussian rows of uneven scale, few outliers."""
    columns = shape[0]
    rows = int(np.prod(shape[1:]))
    weights = rng.standard_normal((rows, columns)) * rng.lognormal(-4.0, 0.4, (rows, 1))
    weights[rng.random((rows, columns)) < 0.002] *= 12.0
    return weights.astype(np.float32)


def quantized_tensor_bytes(type_id: int, shape: tuple[int, ...], rng: np.random.Generator) -> bytes | None:
    """Gaussian weights in a type, as a reference quantizer stores them.

    Quantized by libgguf; integers and F64, which it leaves out, are stored plainly (integers with a step that uses
    much of their range). None where no reference quantizer exists: Q8_1, Q8_K and Q2_0.
    """
    weights = gaussian_weights(shape, rng)
    name = GGML_TYPES[type_id].name
    if name in _STORED_DTYPES:
        dtype = np.dtype(_STORED_DTYPES[name])
        if dtype.kind == "i":
            weights = np.rint(weights / np.abs(weights).max() * min(100.0, 2.0 ** (8 * dtype.itemsize - 2)))
        return weights.astype(dtype).tobytes()

    import libgguf

    if not libgguf.row_size(type_id, shape[0]):
        return None
    data = libgguf.quantize_rows(weights, type_id).tobytes()
    assert len(data) == tensor_size(type_id, shape)
    return data


def plausible_metadata() -> dict[str, Any]:
    """Pairs as a small model has them, with every value type among them."""
    tokens = ["<unk>", "<s>", "</s>", *(f"\u2581token{i}" for i in range(297))]
    return {
        "general.architecture": "llama",
        "general.name": "Every type \u2713",
        "general.file_type": 15,
        "general.quantization_version": 2,
        "llama.block_count": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": np.float64(10000.0),
        "llama.expert_count": np.uint16(4),
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": -np.arange(300, dtype=np.float32),
        "tokenizer.ggml.token_type": np.ones(300, dtype=np.int32),
        "tokenizer.ggml.add_bos_token": True,
        "test.u8": np.uint8(200),
        "test.i8": np.int8(-100),
        "test.i16": np.int16(-30000),
        "test.i32": -5,
        "test.u64": (1 << 64) - 1,
        "test.i64": -(1 << 63),
        "test.bools": [True, False],
        "test.empty": Typed(ARRAY, [], STRING),
    }


def every_type_gguf(rng: np.random.Generator, columns: int = 512, rows: int = 70, *, slow_types: bool = True) -> bytes:
    """A file with every GGML type of the table, quantized and random, and a few odd tensors.

    Parameters
    ----------
    rng : numpy.random.Generator
        Decides every weight and byte.
    columns : int
        Columns of the matrices, a multiple of 256.
    rows : int
        Rows of the matrices; the expert tensors have four experts of a fourth of them.
    slow_types : bool
        Whether to quantize to the types of `SLOW_TYPES` too. Their random tensors are there in any case.

    Returns
    -------
    bytes
        The file. It holds ids that the `gguf` package does not know (Q2_0 and the removed 4).
    """
    tensors: list[Tensor] = []
    for type_id, ggml_type in GGML_TYPES.items():
        shape = (columns, rows)
        wanted = slow_types or ggml_type.name not in SLOW_TYPES
        quantized = quantized_tensor_bytes(type_id, shape, rng) if wanted else None
        if quantized is not None:
            tensors.append((f"quantized.{ggml_type.name}.weight", type_id, shape, quantized))
        tensors.append((f"random.{ggml_type.name}.weight", type_id, shape, random_tensor_bytes(type_id, shape, rng)))
    for name in ("Q4_K", "Q8_0"):
        type_id, shape3 = TYPE_BY_NAME[name].type_id, (columns, max(1, rows // 4), 4)
        data = quantized_tensor_bytes(type_id, shape3, rng)
        assert data is not None
        tensors.append((f"blk.0.ffn_down_exps.{name}.weight", type_id, shape3, data))
    for n in (1, 7, 513):
        data = rng.standard_normal(n).astype("<f4").tobytes()
        tensors.append((f"blk.0.norm{n}.weight", 0, (n,), data))
    tensors.append(("removed.Q4_2.weight", 4, (columns, 3), rng.bytes(777)))
    return build_gguf(tensors, plausible_metadata())
