"""One tensor's coder: packed rows to plane arrays to coded row groups, and back.

Encoding takes two passes over a tensor: `count` collects the counts of its contexts, from which a `TensorPlan` (field
modes and table numbers) is made; `encode` then writes row groups. Decoding needs the plan and the tables only.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lazyweights.blocks.codebook_ranks import indices_by_rank, ranks_of_indices
from lazyweights.blocks.planes import _LAYOUTS as _BLOCK_LAYOUTS
from lazyweights.blocks.types import GGML_TYPES
from lazyweights.codecs import TABLE_SIZE, TILE_ROWS, trellis
from lazyweights.container.shared_rows import SharedRows
from lazyweights.container.stream_layout import (
    FORCED_NONE,
    N_CELL_CONTEXTS,
    ROW_LEVEL,
    STREAM_LAYOUTS,
    SUM_HIGH,
    SUM_LOW,
    WINDOW_LOW_BITS,
    WINDOWED,
    StreamLayout,
    level_table,
    newest_form,
    stream_layout,
)
from lazyweights.container.zstd_frames import VERBATIM_LEVEL, compress

N_SIDE_CONTEXTS = 32

LOW_RAW, LOW_CODED = 0, 1
HUFFMAN, RANS, SHARED, SHARED_TRELLIS = 0, 1, 2, 3
"""Coders of a plan. SHARED_TRELLIS stands in files only: in memory it is SHARED, and `SharedRows.is_trellis` is set."""

PROB_SCALE = 4096
SIGN_CLEAR, SIGN_SET, SIGN_STORED = 0, 1, 2

MAX_GROUP_BYTES = 1 << 26
"""A tensor whose row groups would be larger than this stays verbatim."""

MAX_ODD_COLUMNS = 4096
"""Tensors of types without blocks stay verbatim where rows are longer and no multiple of 8: their cells would be too small."""

_DIRECT_OFFSETS = {"Q4_0": 2, "Q4_1": 4, "IQ4_NL": 2, "Q8_0": 2, "MXFP4": 1}
"""Types whose symbols are the bytes of the packed block as they stand, and where they start in the block."""


class HalfMode(NamedTuple):
    """How the low part of a half field is stored (LOW_RAW or LOW_CODED) and its sign (a SIGN constant)."""

    low: int
    sign: int


@dataclass(frozen=True)
class TensorPlan:
    """What the decoder must know of a tensor beside its type and shape.

    Attributes
    ----------
    modes : tuple of HalfMode
        One a half field.
    bases : tuple of int
        Base of the running-mean context of each side plane (0 where it has none).
    side_tables : ndarray of uint8, shape (n_sides, 32)
    cell_tables : ndarray of uint8, shape (512,)
    table_set : int
        Pool of tables the numbers refer to.
    coder : int
        HUFFMAN or RANS, for the cells: side symbols are then coded by Huffman codes. SHARED: all by rANS, with `shared`.
    shared : SharedRows or None
        What the rows share.
    form : int
        Of the type's layout (`stream_layout.stream_layout`).
    """

    modes: tuple[HalfMode, ...]
    bases: tuple[int, ...]
    side_tables: np.ndarray
    cell_tables: np.ndarray
    table_set: int = 0
    coder: int = 0
    shared: SharedRows | None = None
    form: int = 0

    @functools.cached_property
    def side_offsets(self) -> np.ndarray:
        """Table offset of each side context, int32 (n_sides, 32)."""
        return self.side_tables.astype(np.int32) * (PROB_SCALE if self.coder == SHARED else TABLE_SIZE)

    @functools.cached_property
    def cell_offsets(self) -> np.ndarray:
        """Table offset of each cell context, int32 (512,)."""
        return self.cell_tables.astype(np.int32) * (TABLE_SIZE if self.coder == HUFFMAN else PROB_SCALE)

    @property
    def row_offset(self) -> int:
        """Table offset of the row symbols of SHARED."""
        return self.shared.row_table * PROB_SCALE if self.shared else 0


@dataclass
class PlaneArrays:
    """The plane arrays of a run of row groups (`group_encode` describes them)."""

    half_values: np.ndarray
    byte_values: np.ndarray
    symbols: np.ndarray
    raw_values: np.ndarray


@dataclass(frozen=True)
class _Parameters:
    """Integer tables for the kernels."""

    meta: np.ndarray
    sides: np.ndarray
    halves: np.ndarray
    byte_fields: np.ndarray
    raws: np.ndarray
    levels: np.ndarray


@dataclass
class SharedCounts:
    """Symbol counts of a tensor whose rows share their scales.

    Attributes
    ----------
    shared : SharedRows
    sides : ndarray of int64, shape (n_sides + 2, 256)
        Of the side planes, the row symbols and the last codes of the rows.
    cells : ndarray of uint32, shape (512, 256)
    raw_rows : int
        Rows that are not counted, since their row groups break the trellis of the others and are kept as they are.
    """

    shared: SharedRows
    sides: np.ndarray
    cells: np.ndarray
    raw_rows: int = 0

    def add(self, other: SharedCounts) -> None:
        """Add the counts of other rows of the same tensor."""
        self.sides += other.sides
        self.cells += other.cells
        self.raw_rows += other.raw_rows


@dataclass
class Counts:
    """Symbol counts of a tensor's contexts.

    Attributes
    ----------
    sides : ndarray of uint32, shape (n_sides, 32, 256)
    cells : ndarray of uint32, shape (512, 256)
    forced : ndarray of int64, shape (2,)
        Blocks with forced codes, and how many of these are negative.
    bases : tuple of int
        As in `TensorPlan`.
    codes : ndarray of int64, shape (256,)
        Of whole codes, where codes are split; else zeros.
    zstd_bytes : int
        What the rows would take as verbatim bytes, of types that zstd may compress better; 0 of others.
    """

    sides: np.ndarray
    cells: np.ndarray
    forced: np.ndarray
    bases: tuple[int, ...]
    codes: np.ndarray
    zstd_bytes: int = 0

    def add(self, other: Counts) -> None:
        """Add the counts of other rows of the same tensor."""
        self.sides += other.sides
        self.cells += other.cells
        self.forced += other.forced
        self.codes += other.codes
        self.zstd_bytes += other.zstd_bytes


@functools.lru_cache(maxsize=1024)
def is_codable(type_id: int, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor of this type and shape (GGUF order) is coded rather than kept verbatim."""
    if type_id not in STREAM_LAYOUTS or not shape or any(n <= 0 for n in shape):
        return False
    known = GGML_TYPES[type_id]
    columns = shape[0]
    if STREAM_LAYOUTS[type_id].cell_codes == 0 and columns % 8 and columns > MAX_ODD_COLUMNS:
        return False
    return columns % known.block_size == 0 and columns // known.block_size * known.block_bytes * TILE_ROWS <= MAX_GROUP_BYTES


class TensorCoder:
    """Codes row groups of tensors of one type and row length.

    Parameters
    ----------
    type_id : int
        A key of `STREAM_LAYOUTS`.
    columns : int
        Elements of a row.
    form : int
        Of the type's layout (`stream_layout.stream_layout`).
    """

    def __init__(self, type_id: int, columns: int, form: int) -> None:
        self.form = form
        self.layout: StreamLayout = stream_layout(type_id, form)
        self.type = GGML_TYPES[type_id]
        self.columns = columns
        self.row_bytes = columns // self.type.block_size * self.type.block_bytes
        layout = self.layout
        self.is_blockless = layout.cell_codes == 0  # floats and integers: cells are cut from the row
        self.bytes_per_code = self.type.block_bytes if layout.codes == "bytes" else 1
        if self.is_blockless:
            self.cell_codes = next(n for n in (32, 16, 8, 4, 2, 1) if columns % n == 0)
            self.n_blocks = columns // self.cell_codes
            self.n_cells = self.n_blocks * self.bytes_per_code
        else:
            self.cell_codes = layout.cell_codes
            self.n_blocks = columns // self.type.block_size
            self.n_codes = columns if layout.codes == "codes" else self.n_blocks * self._index_count()
            self.n_cells = self.n_codes // self.cell_codes
        self.cell_symbols = self.cell_codes // layout.codes_per_symbol
        removed = layout.cell_symbols - layout.forced_cell_symbols if not self.is_blockless else 0
        self.forced_cell_symbols = self.cell_symbols - removed
        self.wide_bits = max(layout.code_bits - 8, 0)
        self.direct_offset = _DIRECT_OFFSETS.get(layout.type_name)
        self.raw_planes = self._raw_planes()
        self._parameters: dict[tuple[tuple[HalfMode, ...], tuple[int, ...]], _Parameters] = {}

    def byte_columns(self, per_block: int) -> int:
        """Columns of a byte field with this many values a block; 0 stands for one value a row."""
        return per_block * self.n_blocks if per_block else 1

    def _index_count(self) -> int:
        specs = _BLOCK_LAYOUTS[self.type.type_id].specs
        return next(s.per_block for s in specs if s.name == self.layout.codes)

    def _raw_planes(self) -> tuple[tuple[str, int, int], ...]:
        """(name, values per block, bits) of each raw plane; low bits of wide codes are the plane ``"low"``."""
        raw = self.layout.raw
        if self.is_blockless:
            raw = tuple((name, self.cell_codes, bits) for name, _, bits in raw)
        if self.wide_bits:
            per_block = self.cell_codes if self.is_blockless else self._index_count()
            raw = (*raw, ("low", per_block, self.wide_bits))
        return raw

    @functools.cached_property
    def _levels(self) -> np.ndarray:
        levels = np.zeros((2, 256), np.int32)
        if self.layout.sub_scale:
            levels[0] = level_table(self.layout.sub_zero)
        if self.layout.sub_min:
            levels[1] = level_table(0)
        return levels

    @functools.lru_cache(maxsize=256)  # noqa: B019 (coders live as long as the process)
    def side_names(self, modes: tuple[HalfMode, ...]) -> list[str]:
        """Names of the side planes in stream order; not to be changed."""
        names = []
        for half, mode in zip(self.layout.halves, modes, strict=True):
            names.append(half.name)
            if mode.low == LOW_CODED:
                names.append(half.name + ".low")
        return names + [b.name for b in self.layout.bytes_]

    def parameters(self, modes: tuple[HalfMode, ...], bases: tuple[int, ...]) -> _Parameters:
        """Return the integer tables of the kernels for these field modes."""
        found = self._parameters.get((modes, bases))
        if found is None:
            found = self._parameters[modes, bases] = self._make_parameters(modes, bases)
        return found

    def _make_parameters(self, modes: tuple[HalfMode, ...], bases: tuple[int, ...]) -> _Parameters:
        layout = self.layout
        sides: list[tuple[int, int, int, int]] = []
        halves: list[tuple[int, int, int, int, int]] = []
        byte_fields: list[tuple[int, int, int]] = []
        side_of: dict[str, int] = {}

        def add(name: str, per_block: int, kind: int, other: int) -> int:
            index = len(sides)
            side_of[name] = index
            sides.append((per_block, kind, bases[index], other))
            return index

        for half, mode in zip(layout.halves, modes, strict=True):
            kind = 1 if half.delta_of < 0 and half.name == "scale" else 0
            hi = add(half.name, 1, kind, 0)
            lo = add(half.name + ".low", 1, 0, 0) if mode.low == LOW_CODED else -1
            raw_bits = 0 if mode.low == LOW_CODED else (8 if mode.sign == SIGN_STORED else 7)
            constant = 1 if mode.low == LOW_RAW and mode.sign == SIGN_SET else 0
            halves.append((hi, lo, raw_bits, constant, half.delta_of))
        column = 0
        for byte in layout.bytes_:
            kind = {"none": 0, "mean": 1, "previous": 2}[byte.context]
            index = add(byte.name, byte.per_block, kind, len(sides) - 1 if byte.context == "previous" else 0)
            byte_fields.append((index, byte.per_block, column))
            column += self.byte_columns(byte.per_block)
        raws = []
        column = 0
        for name, per_block, bits in self.raw_planes:
            raws.append((per_block, bits, column, WINDOW_LOW_BITS if name == "low" else bits))
            column += per_block * self.n_blocks
        meta = np.array(
            [
                self.n_blocks,
                self.n_cells,
                self.cell_symbols,
                self.forced_cell_symbols,
                layout.forced,
                layout.mode,
                bases[0] if layout.forced == WINDOWED else layout.zero_base,
                side_of.get("row_level", side_of.get("scale", -1)),
                side_of.get(layout.sub_scale, -1),
                side_of.get("min", side_of.get("min_scale", -1)),
                side_of.get(layout.sub_min, -1),
                layout.level_steps,
                layout.low_bits,
            ],
            np.int64,
        )
        return _Parameters(
            meta,
            np.array(sides, np.int64).reshape(-1, 4),
            np.array(halves, np.int64).reshape(-1, 5),
            np.array(byte_fields, np.int64).reshape(-1, 3),
            np.array(raws, np.int64).reshape(-1, 4),
            self._levels,
        )

    # Packed rows <-> plane arrays.

    def split(self, packed: np.ndarray, base: int = 0) -> PlaneArrays:
        """Split packed rows, uint8 (rows, row_bytes), into plane arrays; `base` is the window's (see `forced_codes`)."""
        from lazyweights.container import symbol_kernels

        n_rows = len(packed)
        layout = self.layout
        if layout.codes == "words":
            symbols, raw = symbol_kernels.split_words(packed.reshape(-1).view("<u2").reshape(n_rows, -1))
            levels = symbol_kernels.row_levels(symbols, raw, base, layout.forced == WINDOWED)
            return PlaneArrays(_no_halves(n_rows, self.n_blocks), levels.reshape(-1, 1), symbols, raw)
        if layout.codes == "bytes":
            values = self._integers(packed)
            symbols = packed if self.bytes_per_code == 1 else symbol_kernels.split_int16(values, self.cell_codes)
            levels = symbol_kernels.magnitude_levels(values)
            raw = np.zeros((n_rows, 0), np.uint32)
            return PlaneArrays(_no_halves(n_rows, self.n_blocks), levels.reshape(-1, 1), symbols, raw)
        if self.direct_offset is not None:
            arrays = PlaneArrays(
                np.empty((len(layout.halves), n_rows, self.n_blocks), np.uint16),
                np.empty((n_rows, len(layout.bytes_) * self.n_blocks), np.uint8),
                np.empty((n_rows, self.n_cells * self.cell_symbols), np.uint8),
                np.zeros((n_rows, 0), np.uint32),
            )
            symbol_kernels.split_direct(
                packed, self.type.block_bytes, self.direct_offset, self.cell_symbols, arrays.half_values,
                arrays.byte_values, arrays.symbols,
            )
            return arrays
        n = n_rows * (self.columns // self.type.block_size)
        blocks = packed.reshape(n, self.type.block_bytes)
        block_layout = _BLOCK_LAYOUTS[self.type.type_id]
        planes = {s.name: np.empty((n, s.per_block), s.dtype) for s in block_layout.specs}
        blocks.flags.writeable = False
        block_layout.split_blocks(blocks, planes)
        self._derive(planes, n_rows)
        halves = [planes[h.name].reshape(n_rows, -1) for h in layout.halves]
        half_values = np.stack(halves) if halves else _no_halves(n_rows, self.n_blocks)
        fields = [planes[b.name].reshape(n_rows, -1) for b in layout.bytes_]
        byte_values = np.concatenate(fields, axis=1) if fields else _no_bytes(n_rows)
        codes = planes[layout.codes].reshape(n_rows, -1)
        raws = [planes[name].reshape(n_rows, -1).astype(np.uint32) for name, _, _ in self.layout.raw]
        if self.wide_bits:
            raws.append((codes & ((1 << self.wide_bits) - 1)).astype(np.uint32))
            codes = (codes >> self.wide_bits).astype(np.uint8)
        raw_values = np.concatenate(raws, axis=1) if raws else np.zeros((n_rows, 0), np.uint32)
        if layout.codes_per_symbol > 1:
            codes = symbol_kernels.pack_codes(codes, self.cell_codes, layout.codes_per_symbol, self.layout.code_bits)
        return PlaneArrays(half_values, byte_values, codes, raw_values)

    def _derive(self, planes: dict[str, np.ndarray], n_rows: int) -> None:
        """Add to the planes of some rows what the second form of the type makes of them."""
        if self.layout.ranked:
            planes[self.layout.codes] = ranks_of_indices(self.layout.type_name)[planes[self.layout.codes]]
        if self.form and self.layout.codes == "exponent":
            mean4 = 4 * planes["exponent"].reshape(n_rows, -1).sum(axis=1, dtype=np.int64) // self.columns
            planes[ROW_LEVEL.name] = (mean4 & 255).astype(np.uint8)
        if any(byte.name == SUM_HIGH for byte in self.layout.bytes_):
            sums = planes["block_sums"]
            planes[SUM_HIGH], planes[SUM_LOW] = (sums >> 8).astype(np.uint8), sums & 255

    def join(self, arrays: PlaneArrays, packed: np.ndarray) -> None:
        """Pack plane arrays into rows, uint8 (rows, row_bytes); inverse of `split`."""
        from lazyweights.container import symbol_kernels

        layout = self.layout
        n_rows = len(packed)
        if layout.codes == "words":
            symbol_kernels.join_words(
                arrays.symbols, arrays.raw_values, packed.reshape(-1).view("<u2").reshape(n_rows, -1)
            )
            return
        if layout.codes == "bytes":
            if self.bytes_per_code == 1:
                packed[:] = arrays.symbols
            else:
                symbol_kernels.join_int16(arrays.symbols, self.cell_codes, self._integers(packed))
            return
        n = n_rows * (self.columns // self.type.block_size)
        codes = arrays.symbols
        if layout.codes_per_symbol > 1:
            codes = symbol_kernels.unpack_codes(codes, self.cell_codes, layout.codes_per_symbol, self.layout.code_bits)
        planes: dict[str, np.ndarray] = {}
        for i, half in enumerate(layout.halves):
            planes[half.name] = arrays.half_values[i].reshape(n, -1)
        column = 0
        for byte in layout.bytes_:
            width = self.byte_columns(byte.per_block)
            if byte.per_block:  # else it is no plane of the type
                planes[byte.name] = np.ascontiguousarray(arrays.byte_values[:, column : column + width]).reshape(n, -1)
            column += width
        specs = {s.name: s for s in _BLOCK_LAYOUTS[self.type.type_id].specs}
        column = 0
        for name, per_block, _ in self.raw_planes:
            width = per_block * self.n_blocks
            values = arrays.raw_values[:, column : column + width]
            column += width
            if name == "low":
                codes = (codes.astype(np.uint32) << self.wide_bits | values).astype(specs[layout.codes].dtype)
            elif name == SUM_LOW:
                high = planes.pop(SUM_HIGH).astype(np.uint32)
                planes["block_sums"] = (high << 8 | values.reshape(n, -1)).astype(specs["block_sums"].dtype)
            else:
                planes[name] = np.ascontiguousarray(values.astype(specs[name].dtype)).reshape(n, -1)
        if layout.ranked:
            codes = indices_by_rank(layout.type_name)[codes]
        planes[layout.codes] = np.ascontiguousarray(codes).reshape(n, -1)
        for plane in planes.values():
            plane.flags.writeable = False
        _BLOCK_LAYOUTS[self.type.type_id].join_blocks(planes, packed.reshape(n, self.type.block_bytes))

    def _integers(self, packed: np.ndarray) -> np.ndarray:
        """View packed rows of I8 or I16 as their values, int8 or int16 (rows, columns)."""
        return packed.reshape(-1).view(f"<i{self.bytes_per_code}").reshape(len(packed), self.columns)

    # Counting and encoding.

    def count_modes(self) -> tuple[HalfMode, ...]:
        """Field modes of the counting pass: the low parts are counted too."""
        return tuple(HalfMode(LOW_CODED, SIGN_STORED) for _ in self.layout.halves)

    def context_bases(self, arrays: PlaneArrays) -> tuple[int, ...]:
        """Return the bases of the running-mean contexts of all side planes that are counted; they follow from the first rows."""
        bases = []
        for name in self.side_names(self.count_modes()):
            base = 0
            if name == "row_level" and self.layout.forced == WINDOWED:
                # The window covers 32 octaves; two of them stay free above the largest value seen.
                base = min(max(int(arrays.symbols.max()) + 2 - 31, 0), 255 - 31)
            elif name == "scale":
                high = (arrays.half_values[0] & 0x7FFF) >> 7 if self.layout.halves else arrays.byte_values
                base = min(max(int(high.astype(np.int64).sum()) // high.size - 15, 0), 225)
            bases.append(base)
        return tuple(bases)

    def new_counts(self, bases: tuple[int, ...]) -> Counts:
        """Return empty counts, for these bases of running-mean contexts."""
        return Counts(
            np.zeros((len(bases), N_SIDE_CONTEXTS, 256), np.uint32),
            np.zeros((2 * N_CELL_CONTEXTS, 256), np.uint32),
            np.zeros(2, np.int64),
            bases,
            np.zeros(256, np.int64),
        )

    def count(self, packed: np.ndarray, counts: Counts, plain: bool = False) -> None:
        """Add the symbols of packed rows (whole row groups, the last may be short) to `counts`.

        `plain`: count all codes as they are, without taking out forced ones or windowing floats.
        """
        from lazyweights.container import group_encode
        from lazyweights.container.cell_contexts import CELL_SYMBOLS, FORCED, FORCED_CELL_SYMBOLS

        if self.layout.may_repeat:
            counts.zstd_bytes += len(compress(packed.tobytes(), VERBATIM_LEVEL))
        arrays = self.split(packed, counts.bases[0] if counts.bases else 0)
        p = self.parameters(self.count_modes(), counts.bases)
        meta = p.meta
        if plain:
            meta = meta.copy()
            meta[FORCED], meta[FORCED_CELL_SYMBOLS] = FORCED_NONE, meta[CELL_SYMBOLS]
        group_encode.count_groups(
            len(packed), arrays.half_values, arrays.byte_values, arrays.symbols, arrays.raw_values, meta, p.sides, p.halves,
            p.byte_fields, p.levels, counts.sides, counts.cells, counts.forced, counts.codes,
        )

    def shared_modes(self) -> tuple[HalfMode, ...]:
        """Field modes of a tensor whose rows share their scales: all is coded."""
        return tuple(HalfMode(LOW_CODED, SIGN_CLEAR) for _ in self.layout.halves)

    def _shared_parameters(self) -> _Parameters:
        modes = self.shared_modes()
        return self.parameters(modes, (0,) * len(self.side_names(modes)))

    @property
    def has_signed_codes(self) -> bool:
        """Whether the codes of a type with scales are two's complement."""
        return self.layout.code_bits == 8 and self.layout.codes_per_symbol == 1

    @functools.cached_property
    def _code_shape(self) -> np.ndarray:
        return np.array([self.has_signed_codes, self.layout.codes_per_symbol, self.layout.code_bits], np.int64)

    def _split_shared(self, packed: np.ndarray, shared: SharedRows) -> tuple[PlaneArrays, np.ndarray]:
        """Split packed rows (as for `count`) into what shared rows code of them, and say of which row groups that is.

        Trellis codes become their indices; row groups that break the trellis are left out.
        """
        arrays = self.split(packed)
        if not shared.is_trellis:
            return arrays, np.ones(-(-len(packed) // TILE_ROWS), np.bool_)
        coded = trellis.to_indices(arrays.symbols, self.has_signed_codes)
        if not coded.all():
            rows = np.repeat(coded, TILE_ROWS)[: len(packed)]
            arrays = PlaneArrays(
                np.ascontiguousarray(arrays.half_values[:, rows]), arrays.byte_values[rows], arrays.symbols[rows],
                arrays.raw_values[rows],
            )
        return arrays, coded

    def new_shared_counts(self, shared: SharedRows) -> SharedCounts:
        """Return empty counts of a tensor whose rows share their scales."""
        n_sides = len(self.side_names(self.shared_modes()))
        return SharedCounts(shared, np.zeros((n_sides + 2, 256), np.int64), np.zeros((2 * N_CELL_CONTEXTS, 256), np.uint32))

    def count_shared(self, packed: np.ndarray, counts: SharedCounts) -> None:
        """Add the symbols of packed rows (as for `count`) to `counts`."""
        self._count_shared(packed, counts)

    def row_widths(self, packed: np.ndarray, shared: SharedRows) -> np.ndarray:
        """Return how wide the codes of each of some packed rows spread, int64 (rows,), in 1/8 octaves."""
        return self._count_shared(packed, SharedCounts(shared, np.zeros((0, 256), np.int64), np.zeros((0, 256), np.uint32)))

    def _count_shared(self, packed: np.ndarray, counts: SharedCounts) -> np.ndarray:
        from lazyweights.container import shared_groups

        shared = counts.shared
        arrays, _ = self._split_shared(packed, shared)
        p = self._shared_parameters()
        n_rows = len(arrays.symbols)
        counts.raw_rows += len(packed) - n_rows
        widths = np.zeros(n_rows, np.int64)
        shared_groups.count_shared_groups(
            n_rows, arrays.half_values, arrays.byte_values, arrays.symbols, p.meta, p.sides, p.halves, p.byte_fields,
            p.levels, shared.references, shared.columns, shared.row_base, self._code_shape, counts.sides, counts.cells, widths,
        )
        return widths

    def symbol_counts(self, packed: np.ndarray) -> np.ndarray:
        """Return the counts of the codes of some packed rows, int64 (bytes, 256); of wide codes, their high 8 bits."""
        symbols = self.split(packed).symbols.reshape(-1, self.bytes_per_code, self.cell_symbols)
        return np.stack(
            [self.code_counts(np.bincount(symbols[:, k].ravel(), minlength=256)) for k in range(self.bytes_per_code)]
        )

    def code_counts(self, symbols: np.ndarray) -> np.ndarray:
        """Counts of codes from counts of symbols (several codes to a symbol), int64 (256,)."""
        layout = self.layout
        if layout.codes_per_symbol == 1:
            return symbols.astype(np.int64)
        codes = np.zeros(256, np.int64)
        for k in range(layout.codes_per_symbol):
            np.add.at(codes, np.arange(256) >> (k * layout.code_bits) & ((1 << layout.code_bits) - 1), symbols)
        return codes

    def encode(
        self, packed: np.ndarray, plan: TensorPlan, entries: np.ndarray, freqs: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Encode packed rows; return (words, words of each group or -1, whether each group is not forced).

        The groups that have words stand one after the other; at least 64 words follow.

        `entries` (of `lane_encode.encode_entries`) and `freqs` (uint32 (n_tables, 256), they matter for RANS only) are the
        encode entries of the table set.
        """
        from lazyweights.container import group_encode, shared_groups

        p = self.parameters(plan.modes, plan.bases)
        n_groups = -(-len(packed) // TILE_ROWS)
        sizes = np.zeros(n_groups, np.int64)
        unforced = np.zeros(n_groups, np.bool_)
        if plan.shared is not None:
            shared = plan.shared
            arrays, coded = self._split_shared(packed, shared)
            out = np.empty(len(packed) * self.row_bytes // 4 + 64, np.uint32)
            coded_sizes = np.zeros(np.count_nonzero(coded), np.int64)
            shared_groups.encode_shared_groups(
                len(arrays.symbols), arrays.half_values, arrays.byte_values, arrays.symbols, p.meta, p.sides, p.halves,
                p.byte_fields, p.levels, shared.references, shared.columns, shared.row_base, self._code_shape, plan.side_tables,
                shared.row_table, plan.cell_tables, freqs, self.row_bytes, out, coded_sizes,
            )
            sizes[:] = -1
            sizes[coded] = coded_sizes
            return out, sizes, unforced
        arrays = self.split(packed, plan.bases[0] if plan.bases else 0)
        n_symbols = self.n_cells * self.cell_symbols + sum(self.n_blocks * max(int(n), 1) for n in p.sides[:, 0])
        out = np.empty(group_encode.words_for(len(packed), self.row_bytes, n_symbols, len(p.sides)), np.uint32)
        group_encode.encode_groups(
            len(packed), arrays.half_values, arrays.byte_values, arrays.symbols, arrays.raw_values, p.meta, p.sides,
            p.halves, p.byte_fields, p.raws, p.levels, entries, plan.side_tables, plan.cell_tables,
            freqs if plan.coder == RANS else freqs[:0], self.row_bytes, out, sizes, unforced,
        )
        return out, sizes, unforced

    # Decoding.

    def decode(
        self,
        n_rows: int,
        words: np.ndarray,
        starts: np.ndarray,
        sizes: np.ndarray,
        kinds: np.ndarray,
        plan: TensorPlan,
        flat_tables: np.ndarray,
        rans_tables: np.ndarray,
        packed: np.ndarray,
    ) -> np.ndarray:
        """Decode row groups into `packed`, uint8 (n_rows, row_bytes), by way of planes; return the status of each group.

        For types that `batch_decode` does not know.

        `words`, `starts`, `sizes` and `kinds` are those of `group_decode.decode_groups`; rows of skipped groups are
        left undefined.
        """
        from lazyweights.container import group_decode, shared_decode

        p = self.parameters(plan.modes, plan.bases)
        status = np.zeros(len(starts), np.uint8)
        arrays = PlaneArrays(
            np.empty((len(self.layout.halves), n_rows, self.n_blocks), np.uint16),
            np.empty((n_rows, sum(self.byte_columns(b.per_block) for b in self.layout.bytes_)), np.uint8),
            np.empty((n_rows, self.n_cells * self.cell_symbols), np.uint8),
            np.empty((n_rows, sum(per_block for _, per_block, _ in self.raw_planes) * self.n_blocks), np.uint32),
        )
        if plan.shared is not None:
            shared_decode.decode_shared_groups(
                n_rows, words, starts, sizes, kinds, p.meta, p.sides, p.halves, p.byte_fields, p.raws, p.levels,
                plan.side_offsets, plan.row_offset, plan.cell_offsets, plan.shared.references, plan.shared.columns,
                plan.shared.is_trellis, rans_tables, arrays.half_values, arrays.byte_values, arrays.symbols,
                (self.cell_symbols, 0, False), arrays.raw_values, status,
            )
            self._mask_skipped(arrays, kinds, status)
            self.join(arrays, packed)
            return status
        group_decode.decode_groups(
            n_rows, words, starts, sizes, kinds, p.meta, p.sides, p.halves, p.byte_fields, p.raws, p.levels, flat_tables,
            plan.side_offsets, plan.cell_offsets, rans_tables if plan.coder == RANS else rans_tables[:0], arrays.half_values,
            arrays.byte_values, arrays.symbols, (self.cell_symbols, 0, False), arrays.raw_values, packed[:0], status,
        )
        self._mask_skipped(arrays, kinds, status)
        self.join(arrays, packed)
        return status

    def _mask_skipped(self, arrays: PlaneArrays, kinds: np.ndarray, status: np.ndarray) -> None:
        """Give rows that were not decoded harmless values, so that `join` accepts them, and bound the codes."""
        for g in np.flatnonzero((kinds == 2) | (status != 0)):
            rows = slice(TILE_ROWS * int(g), TILE_ROWS * (int(g) + 1))
            arrays.half_values[:, rows] = 0
            arrays.byte_values[rows] = 0
            arrays.symbols[rows] = 0
            arrays.raw_values[rows] = 0


@functools.lru_cache(maxsize=256)
def tensor_coder(type_id: int, columns: int, form: int | None = None) -> TensorCoder:
    """Return the (shared, stateless) coder of a type and row length; of the form in which it is written, where none is given."""
    return TensorCoder(type_id, columns, newest_form(type_id) if form is None else form)


def _no_halves(n_rows: int, n_blocks: int) -> np.ndarray:
    return np.zeros((0, n_rows, n_blocks), np.uint16)


def _no_bytes(n_rows: int) -> np.ndarray:
    return np.zeros((n_rows, 0), np.uint8)
