"""The streams of a coded file of the preset `unit`, as the model of the decode unit takes them.

`lazyweights.hardware` knows no files; this module reads the lockstep row groups (`docs/format.md`, "Lockstep row groups").
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lazyweights.blocks.types import type_name
from lazyweights.codecs import N_LANES, TABLE_SIZE
from lazyweights.container.coded_file import LOCKSTEP, RAW, CodedSpan
from lazyweights.container.reader import CodedFile
from lazyweights.container.unit_codec import Tables
from lazyweights.container.unit_stream import tile_columns
from lazyweights.errors import CodecError, LazyWeightsError
from lazyweights.hardware.unit_config import STEP_BYTES, TensorStream, table_entries


@dataclass(frozen=True)
class UnitTensor:
    """A tensor whose codes the unit decodes.

    Attributes
    ----------
    name, type_name : str
    n_weights : int
        Weights of the whole tensor.
    source_bytes, coded_bytes : int
        Packed bytes in the GGUF file, payload bytes in the coded file (row groups that are kept raw included).
    stream : TensorStream
        All row groups that are coded.
    lengths : ndarray of uint8, shape (256,)
        Code lengths of the table.
    decode_table : ndarray of uint16, shape (2064,)
        Of `canonical.decode_tables`.
    symbol_bits : int
        Bits of a symbol: those of a code times the codes in it, at most 8.
    n_raw_groups : int
        Row groups that are kept raw; they pass the unit by and are in `raw_bytes`.
    raw_bytes : int
    """

    name: str
    type_name: str
    n_weights: int
    source_bytes: int
    coded_bytes: int
    stream: TensorStream
    lengths: np.ndarray
    decode_table: np.ndarray
    symbol_bits: int
    n_raw_groups: int
    raw_bytes: int


@dataclass(frozen=True)
class PlainTensor:
    """A tensor that is kept verbatim or whose row groups are all raw: its bytes pass the unit by."""

    name: str
    type_name: str
    n_weights: int
    n_bytes: int


def require_unit_preset(file: CodedFile) -> None:
    """Raise LazyWeightsError unless a coded file has lockstep row groups.

    Raises
    ------
    LazyWeightsError
        That says how to make such a file.
    """
    if LOCKSTEP not in file.layout.kinds:
        raise LazyWeightsError(
            "the decode unit reads no stream of this file: make one with `lazyweights encode --preset unit MODEL.gguf`",
            path=file.path,
        )


def read_tensors(file: CodedFile) -> Iterator[UnitTensor | PlainTensor]:
    """Yield the tensors of a coded file in the order of the file.

    Parameters
    ----------
    file : CodedFile

    Raises
    ------
    FormatError, CodecError
        If the file is damaged.
    """
    coded = {span.name: (span, first) for _, span, first, _ in file.layout.spans() if span.is_coded}
    words = np.memmap(file.path, "<u4", "r", shape=(os.path.getsize(file.path) // 4,))
    offsets = file.layout.offsets()
    tables = [Tables(table_set) for table_set in file.layout.head.table_sets]
    for info in file.tensors():
        n_weights = int(np.prod(info.shape, dtype=np.int64))
        span, first = coded.get(info.name, (None, 0))
        tensor = None if span is None else _read_coded(file, words, offsets, tables, span, first, n_weights)
        yield tensor or PlainTensor(info.name, type_name(info.type_id), n_weights, info.n_bytes)


def _read_coded(
    file: CodedFile, all_words: np.ndarray, offsets: np.ndarray, tables: list[Tables], span: CodedSpan, first: int, n_weights: int
) -> UnitTensor | None:
    """Read the row groups of a tensor; None where none of them is lockstep."""
    assert span.plan is not None
    coder = span.coder
    n_symbols = coder.n_cells * coder.cell_symbols
    width = tile_columns(coder)
    widths = [min(width, n_symbols - column) for column in range(0, n_symbols, width)]
    n_header = len(widths) + len(widths) % 2
    words, steps, rows, sides = [], [], [], []
    coded_bytes = raw_bytes = n_raw = 0
    for unit in range(span.n_units):
        kind, size = int(file.layout.kinds[first + unit]), int(file.layout.sizes[first + unit])
        coded_bytes += size
        if kind == RAW:
            raw_bytes += size
            n_raw += 1
            continue
        if kind != LOCKSTEP:
            return None
        begin = int(offsets[first + unit]) // 4
        payload = all_words[begin : begin + -(-size // 4)]
        lengths = payload[: n_header // 2].view("<u2")[: len(widths)].astype(np.int64)
        n_words = N_LANES * int(lengths.sum())
        rest = size - 2 * n_header - 4 * n_words
        if len(payload) < n_header // 2 + n_words or rest < 0:
            raise CodecError("a lockstep row group has another length than its tiles", tensor=span.name, row_group=unit)
        words.append(payload[n_header // 2 : n_header // 2 + n_words])
        steps.append(lengths)
        rows.append(np.full(len(widths), span.unit_rows(unit)))
        sides.append([0] * (len(widths) - 1) + [-(-(rest + 2 * n_header) // STEP_BYTES)])
    if not words:
        return None
    table_set = tables[span.plan.table_set]
    number = int(span.plan.cell_tables[0])
    decode_table = table_set.flat[number * TABLE_SIZE : (number + 1) * TABLE_SIZE + 16]
    symbol_bits = min(8, coder.layout.code_bits * coder.layout.codes_per_symbol)
    stream = TensorStream(
        np.concatenate(words).astype(np.uint32, copy=False),
        np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(steps))]),
        np.concatenate(rows).astype(np.int32),
        np.tile(np.array(widths, np.int32), len(words)),
        np.concatenate(sides).astype(np.int32),
        table_entries(decode_table, symbol_bits),
        coder.layout.codes_per_symbol,
    )
    return UnitTensor(
        span.name, coder.layout.type_name, n_weights, span.n_bytes, coded_bytes, stream, table_set.lengths[number], decode_table,
        symbol_bits, n_raw, raw_bytes,
    )  # fmt: skip


def golden_symbols(stream: TensorStream, decode_table: np.ndarray) -> np.ndarray:
    """Decode a stream with the decoder of the coded file (`codecs.lane_kernels`), tile after tile."""
    from lazyweights.codecs import lane_kernels

    out = np.empty(stream.n_symbols, np.uint8)
    at = 0
    for t in range(len(stream.rows)):
        height, width = int(stream.rows[t]), int(stream.columns[t])
        tile = out[at : at + height * width].reshape(height, width)
        words = np.ascontiguousarray(stream.words[N_LANES * stream.starts[t] : N_LANES * stream.starts[t + 1]])
        lane_kernels.decode_lockstep(words, decode_table, tile)
        at += height * width
    return out


def tensor_symbols(tensor: UnitTensor) -> np.ndarray:
    """The symbols of the coded row groups of a tensor as rows, uint8 (rows, symbols of a row)."""
    stream = tensor.stream
    decoded = golden_symbols(stream, tensor.decode_table)
    groups = []
    at = 0
    row_symbols = _row_symbols(tensor)
    tile = 0
    while tile < len(stream.rows):
        height, done, parts = int(stream.rows[tile]), 0, []
        while done < row_symbols:
            width = int(stream.columns[tile])
            parts.append(decoded[at : at + height * width].reshape(height, width))
            at += height * width
            done += width
            tile += 1
        groups.append(np.concatenate(parts, axis=1))
    return np.concatenate(groups)


def _row_symbols(tensor: UnitTensor) -> int:
    """Symbols of a row: the uncoded planes stand behind the last tile of each row group."""
    ends = np.flatnonzero(tensor.stream.side_steps)
    return int(tensor.stream.columns[: int(ends[0]) + 1].sum()) if ends.size else int(tensor.stream.columns.sum())

