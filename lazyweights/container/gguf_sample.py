"""Small GGUF files that make the encoder compile the kernels that a large one needs: some rows of each of its tensor types."""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass

import numpy as np

from lazyweights.blocks.types import GGML_TYPES, TYPE_BY_NAME
from lazyweights.container.gguf_scan import DEFAULT_ALIGNMENT, TensorInfo, scan_gguf
from lazyweights.container.gguf_values import ARRAY, GGUF_MAGIC, STRING
from lazyweights.errors import FormatError

SAMPLE_ROWS = 512
SAMPLE_BYTES = 1 << 20
TENSORS_OF_A_TYPE = 3
COMMON_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q5_K", "Q6_K")
COMMON_SHAPE = (256, 128)
_N_TOKENS = 64
_I32, _F32 = 5, 6


@dataclass(frozen=True)
class Piece:
    """The first rows of a tensor: type, shape (columns first) and bytes."""

    type_id: int
    shape: tuple[int, ...]
    data: bytes


def sample_file(source: str | os.PathLike[str]) -> list[Piece]:
    """Return the first rows of up to three tensors of each type of a GGUF file.

    Raises
    ------
    FormatError
        If the source is not a GGUF file.
    OSError
        If it cannot be read.
    """
    size = os.stat(source).st_size
    if not size:
        raise FormatError("this is an empty file, not a GGUF file", path=os.fspath(source))
    pieces = []
    with open(source, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        scan = scan_gguf(mapped, size)
        of_type: dict[int, list[TensorInfo]] = {}
        for span in scan.spans:
            if span.tensor is not None:
                tensor = scan.tensors[span.tensor]
                of_type.setdefault(tensor.type_id, []).append(tensor)
        for type_id, tensors in of_type.items():
            known = GGML_TYPES[type_id]
            # One type may be coded in more than one way, and the first layers often differ from the others.
            for i in sorted({len(tensors) * k // TENSORS_OF_A_TYPE for k in range(TENSORS_OF_A_TYPE)}):
                tensor = tensors[i]
                row_bytes = tensor.shape[0] // known.block_size * known.block_bytes
                rows = min(tensor.n_bytes // row_bytes, SAMPLE_ROWS, max(SAMPLE_BYTES // row_bytes, 1))
                data = mapped[tensor.offset : tensor.offset + rows * row_bytes]
                pieces.append(Piece(type_id, (tensor.shape[0], rows), data))
    return pieces


def sample_common_types() -> list[Piece]:
    """Return tensors of the types that most files are made of, of bytes that compress."""
    rng = np.random.default_rng(1)
    pieces = []
    for name in COMMON_TYPES:
        known = TYPE_BY_NAME[name]
        n_bytes = COMMON_SHAPE[0] // known.block_size * known.block_bytes * COMMON_SHAPE[1]
        pieces.append(Piece(known.type_id, COMMON_SHAPE, rng.binomial(15, 0.5, n_bytes).astype(np.uint8).tobytes()))
    return pieces


def write_sample(pieces: list[Piece], output: str | os.PathLike[str]) -> None:
    """Write a GGUF file of pieces, with arrays like those of a vocabulary in its header."""
    with open(output, "wb") as sink:
        sink.write(_header(pieces))
        for piece in pieces:
            sink.write(piece.data)
            sink.write(bytes(_padding(len(piece.data))))


def _padding(n_bytes: int) -> int:
    return -n_bytes % DEFAULT_ALIGNMENT


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _array(key: str, item_type: int, items: list[bytes]) -> bytes:
    return _text(key) + struct.pack("<IIQ", ARRAY, item_type, len(items)) + b"".join(items)


def _header(pieces: list[Piece]) -> bytes:
    pairs = [
        _array("tokenizer.ggml.tokens", STRING, [_text(f"token {i}") for i in range(_N_TOKENS)]),
        _array("tokenizer.ggml.scores", _F32, [struct.pack("<f", -i) for i in range(_N_TOKENS)]),
        _array("tokenizer.ggml.token_type", _I32, [struct.pack("<i", 1)] * _N_TOKENS),
    ]
    infos = []
    offset = 0
    for i, piece in enumerate(pieces):
        dims = struct.pack(f"<I{len(piece.shape)}Q", len(piece.shape), *piece.shape)
        infos.append(_text(f"tensor.{i}") + dims + struct.pack("<IQ", piece.type_id, offset))
        offset += len(piece.data) + _padding(len(piece.data))
    header = GGUF_MAGIC + struct.pack("<IQQ", 3, len(pieces), len(pairs)) + b"".join(pairs + infos)
    return header + bytes(_padding(len(header)))
