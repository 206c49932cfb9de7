"""How the planes of each GGML type are coded: which plane holds the codes, what surrounds them, which contexts.

`blocks` says what the bytes of a type mean; this table says how the coder treats them (`docs/format.md`, "Streams").
A row group is 64 rows. It holds, in this order:

1. *side symbols*: scales, mins, sub-scales; one byte each, decoded first;
2. *code symbols* in *cells* (the codes that share one scale): one byte each, 1, 2 or 4 codes to a symbol; the table of
   a cell follows from the side symbols;
3. *raw bits*: what coding does not shrink (low mantissa bits of scales, signs, positions of forced codes).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from lazyweights.blocks.types import TYPE_BY_NAME

# How a cell selects its table.
BY_POSITION, BY_LEVEL, BY_ZERO_AND_LEVEL, BY_ROW = 0, 1, 2, 3

# Codes that a quantizer cannot avoid in a block, so that only their position need be stored.
FORCED_NONE, FORCED_MIN, FORCED_MIN_MAX, FORCED_ABS_127, WINDOWED = 0, 1, 2, 3, 4
"""WINDOWED is no forced code, but like them a way to code a row group that its values must allow: see `forced_codes`."""

FORCED_BITS = (0, 5, 10, 6, 0)
"""Raw bits per block that the positions (and, for 127, the sign) of forced codes take."""

N_LEVELS = 16
N_ZEROS = 16
N_CELL_CONTEXTS = 256
"""Contexts of cells in a row group; those of row groups without forced codes follow as 256 .. 511."""


@dataclass(frozen=True)
class HalfField:
    """A 16-bit float of each block: bits 14..7 are a side symbol, the sign and bits 6..0 are raw or a second symbol.

    Attributes
    ----------
    name : str
        Plane of `blocks`.
    delta_of : int
        Index of the field whose 15 low bits are subtracted first (modulo 2**15), or -1.
    """

    name: str
    delta_of: int = -1


@dataclass(frozen=True)
class ByteField:
    """A byte plane, one side symbol a value.

    Attributes
    ----------
    name : str
        Plane of `blocks`.
    per_block : int
        Values in a block.
    context : str
        ``"none"``, ``"mean"`` (running mean of the row) or ``"previous"`` (the byte field before this one).
    """

    name: str
    per_block: int
    context: str = "none"


@dataclass(frozen=True)
class StreamLayout:
    """How a type is coded.

    Attributes
    ----------
    type_name : str
    halves : tuple of HalfField
        In stream order, before `bytes_`.
    bytes_ : tuple of ByteField
    codes : str
        Plane of `blocks` with the codes; ``"words"`` for F16 and BF16, whose 16-bit words are split like a HalfField;
        ``"bytes"`` for I8 and I16, whose values are split into bytes, each byte of a value in a cell of its own.
    code_bits : int
        Bits of one code: 1, 2 and 4 (and 3) are packed several to a symbol.
    codes_per_symbol : int
    cell_codes : int
        Codes in a cell. 0: the largest of 32, 16, 8, 4, 2, 1 that divides the row.
    forced : int
        One of the FORCED constants.
    mode : int
        BY_POSITION, BY_LEVEL, BY_ZERO_AND_LEVEL or BY_ROW.
    zero_base : int
        Zero level (in 1/8 octaves) of context 0 of BY_ZERO_AND_LEVEL.
    sub_scale : str
        Byte field that multiplies the scale, or "".
    sub_min : str
        Byte field that multiplies the min, or "".
    sub_zero : int
        The stored sub-scale that stands for 0 (32 where they are stored with an offset), or -1 for a signed byte.
    raw : tuple of (name, per_block, bits)
        Planes stored as raw bits.
    level_steps : int
        1/8 octaves that one step of a byte scale is worth (MXFP4: 8, NVFP4: 1), 0 where the scale is a half.
    ranked : bool
        Whether indices are replaced by their ranks (`blocks.codebook_ranks`).
    low_bits : int
        Bits of each code that are split off and stored raw, 0, 1 or 4: the four bits above them, of two codes half a cell
        apart, are a symbol (`split_codes`).
    """

    type_name: str
    halves: tuple[HalfField, ...] = ()
    bytes_: tuple[ByteField, ...] = ()
    codes: str = "codes"
    code_bits: int = 8
    codes_per_symbol: int = 1
    cell_codes: int = 32
    forced: int = FORCED_NONE
    mode: int = BY_POSITION
    zero_base: int = 0
    sub_scale: str = ""
    sub_min: str = ""
    sub_zero: int = 0
    raw: tuple[tuple[str, int, int], ...] = ()
    level_steps: int = 0
    ranked: bool = False
    low_bits: int = 0

    @property
    def type_id(self) -> int:
        return TYPE_BY_NAME[self.type_name].type_id

    @property
    def prefers_size(self) -> bool:
        """Whether rANS may code the cells: no scale tells them apart, so a finer code is all that there is to gain."""
        return self.mode in (BY_POSITION, BY_ROW)

    @property
    def may_share_rows(self) -> bool:
        """Whether cells have scales that are halves: rows may share these, and blocks hold codes and side values only."""
        return self.mode in (BY_LEVEL, BY_ZERO_AND_LEVEL) and self.level_steps == 0 and self.low_bits == 0

    @property
    def may_have_trellis(self) -> bool:
        """Whether rows may share scales and each symbol is one code: such codes may be trellis codes."""
        return self.may_share_rows and self.codes_per_symbol == 1

    @property
    def may_repeat(self) -> bool:
        """Whether zstd is asked too: F32 may hold values of fewer bits (norms, mostly), integers may hold anything."""
        return self.codes in ("exponent", "bytes")

    @property
    def cell_symbols(self) -> int:
        """Symbols of a cell before forced codes are taken out."""
        return self.cell_codes // self.codes_per_symbol

    @property
    def forced_cell_symbols(self) -> int:
        """Symbols of a cell after forced codes are taken out."""
        removed = (0, 1, 2, 1, 0)[self.forced]
        return self.cell_symbols - removed // self.codes_per_symbol


ROW_LEVEL = ByteField("row_level", 0)
"""One value a row, made by the encoder for the contexts: how large the values of the row are."""

WINDOW_LOW_BITS = 5
"""Raw bits of a code in a windowed row group: sign and four mantissa bits."""

_D = (HalfField("scale"),)
_D_M = (HalfField("scale"), HalfField("min", delta_of=0))
_K = (HalfField("scale"), HalfField("min_scale", delta_of=0))
_SUBS8 = (ByteField("sub_scale", 8), ByteField("sub_min", 8, "previous"))
_SUBS16 = (ByteField("sub_scale", 16), ByteField("sub_min", 16, "previous"))

_LAYOUTS = (
    StreamLayout("Q4_0", _D, code_bits=4, codes_per_symbol=2, mode=BY_LEVEL),
    StreamLayout(
        "Q4_1", _D_M, code_bits=4, codes_per_symbol=2, forced=FORCED_MIN_MAX, mode=BY_ZERO_AND_LEVEL, zero_base=16
    ),
    StreamLayout("Q5_0", _D, code_bits=5, forced=FORCED_MIN, mode=BY_LEVEL),
    StreamLayout("Q5_1", _D_M, code_bits=5, forced=FORCED_MIN_MAX, mode=BY_ZERO_AND_LEVEL, zero_base=24),
    StreamLayout("Q8_0", _D, forced=FORCED_ABS_127, mode=BY_LEVEL),
    StreamLayout("Q8_1", (HalfField("scale"), HalfField("sum")), mode=BY_LEVEL),
    StreamLayout("Q8_K", codes="codes", mode=BY_POSITION, cell_codes=256, raw=(("scale", 1, 32), ("block_sums", 16, 16))),
    StreamLayout(
        "Q2_K", _K, _SUBS16, code_bits=2, codes_per_symbol=4, cell_codes=16, mode=BY_ZERO_AND_LEVEL, zero_base=-3,
        sub_scale="sub_scale", sub_min="sub_min",
    ),
    StreamLayout(
        "Q3_K", _D, (ByteField("sub_scale", 16),), code_bits=3, codes_per_symbol=2, cell_codes=16, mode=BY_LEVEL,
        sub_scale="sub_scale", sub_zero=32,
    ),
    StreamLayout(
        "Q4_K", _K, _SUBS8, code_bits=4, codes_per_symbol=2, mode=BY_ZERO_AND_LEVEL, zero_base=16,
        sub_scale="sub_scale", sub_min="sub_min",
    ),
    StreamLayout(
        "Q5_K", _K, _SUBS8, code_bits=5, mode=BY_ZERO_AND_LEVEL, zero_base=24, sub_scale="sub_scale", sub_min="sub_min"
    ),
    StreamLayout(
        "Q6_K", _D, (ByteField("sub_scale", 16),), code_bits=6, cell_codes=16, mode=BY_LEVEL, sub_scale="sub_scale",
        sub_zero=-1,
    ),
    StreamLayout("IQ4_NL", _D, code_bits=4, codes_per_symbol=2, mode=BY_LEVEL),
    StreamLayout(
        "IQ4_XS", _D, (ByteField("sub_scale", 8),), code_bits=4, codes_per_symbol=2, mode=BY_LEVEL,
        sub_scale="sub_scale", sub_zero=32,
    ),
    StreamLayout(
        "MXFP4", (), (ByteField("scale", 1, "mean"),), code_bits=4, codes_per_symbol=2, mode=BY_LEVEL, level_steps=8
    ),
    StreamLayout(
        "NVFP4", (), (ByteField("scale", 4, "mean"),), code_bits=4, codes_per_symbol=2, cell_codes=16, mode=BY_LEVEL,
        level_steps=1,
    ),
    StreamLayout("TQ1_0", _D, (ByteField("escape", 52),), code_bits=2, codes_per_symbol=4, cell_codes=256),
    StreamLayout("TQ2_0", _D, code_bits=2, codes_per_symbol=4, cell_codes=256),
    StreamLayout("Q1_0", _D, code_bits=1, codes_per_symbol=8, cell_codes=128),
    StreamLayout("Q2_0", _D, code_bits=2, codes_per_symbol=4, cell_codes=64),
    StreamLayout("IQ2_XXS", _D, (ByteField("sub_scale", 8),), codes="index", raw=(("sign", 32, 7),)),
    StreamLayout("IQ2_XS", _D, (ByteField("sub_scale", 16),), codes="index", code_bits=9, raw=(("sign", 32, 7),)),
    StreamLayout("IQ2_S", _D, (ByteField("sub_scale", 16),), codes="index", code_bits=10, raw=(("sign", 32, 8),)),
    StreamLayout("IQ3_XXS", _D, (ByteField("sub_scale", 8),), codes="index", cell_codes=64, raw=(("sign", 32, 7),)),
    StreamLayout(
        "IQ3_S", _D, (ByteField("sub_scale", 8),), codes="index", code_bits=9, cell_codes=64, raw=(("sign", 32, 8),)
    ),
    StreamLayout(
        "IQ1_S", _D, (ByteField("sub_scale", 8), ByteField("sign", 8)), codes="index", code_bits=11
    ),
    StreamLayout(
        "IQ1_M", _D, (ByteField("sub_scale", 16), ByteField("sign", 32)), codes="index", code_bits=11
    ),
    StreamLayout("F16", (), (ROW_LEVEL,), codes="words", code_bits=16, cell_codes=0, mode=BY_ROW),
    StreamLayout("BF16", (), (ROW_LEVEL,), codes="words", code_bits=16, cell_codes=0, mode=BY_ROW, forced=WINDOWED),
    StreamLayout("F32", codes="exponent", cell_codes=0, raw=(("sign_mantissa", 1, 24),)),
    StreamLayout("I8", (), (ROW_LEVEL,), codes="bytes", cell_codes=0, mode=BY_ROW),
    StreamLayout("I16", (), (ROW_LEVEL,), codes="bytes", cell_codes=0, mode=BY_ROW),
)

STREAM_LAYOUTS: dict[int, StreamLayout] = {layout.type_id: layout for layout in _LAYOUTS}
"""By type id. Types without a layout (I32, I64, F64, removed and unknown ids) stay verbatim."""

SUM_HIGH, SUM_LOW = "sum_high", "sum_low"
"""The bytes of the plane `block_sums` of Q8_K."""

SECOND_LAYOUTS: dict[int, StreamLayout] = {
    layout.type_id: layout
    for layout in (
        StreamLayout("F32", (), (ROW_LEVEL,), codes="exponent", cell_codes=0, mode=BY_ROW, raw=(("sign_mantissa", 1, 24),)),
        StreamLayout("Q8_K", (), (ByteField(SUM_HIGH, 16),), cell_codes=256, raw=(("scale", 1, 32), (SUM_LOW, 16, 8))),
        *(
            replace(STREAM_LAYOUTS[TYPE_BY_NAME[name].type_id], ranked=True)
            for name in ("IQ1_S", "IQ1_M", "IQ2_XS", "IQ2_S", "IQ3_S")
        ),
        *(
            replace(STREAM_LAYOUTS[TYPE_BY_NAME[name].type_id], low_bits=low_bits)
            for name, low_bits in (("Q8_0", 4), ("Q5_0", 1), ("Q5_K", 1))
        ),
    )
}
"""Second forms of some types: what writers use. The first forms are those of files from before there were second ones."""


def stream_layout(type_id: int, form: int) -> StreamLayout:
    """Return the layout of a form (0 or 1) of a type."""
    return SECOND_LAYOUTS[type_id] if form else STREAM_LAYOUTS[type_id]


def newest_form(type_id: int, whole_codes: bool = False) -> int:
    """Return the form in which a type is written; `whole_codes`: where its codes must not be split."""
    layout = SECOND_LAYOUTS.get(type_id)
    return int(layout is not None and not (whole_codes and layout.low_bits))


def level_table(sub_zero: int) -> np.ndarray:
    """Return the level of each stored sub-scale: its base-2 logarithm in 1/8 octaves, int32 (256,).

    Piecewise linear, in integers only, so that every machine finds the same: with ``e = floor(log2 s)``,
    ``8 e + floor(8 (s / 2**e - 1))``; -40 for 0.

    >>> level_table(0)[[0, 1, 2, 3, 63]].tolist()
    [-40, 0, 8, 12, 47]
    """
    table = np.zeros(256, np.int32)
    for stored in range(256):
        value = (stored if stored < 128 else 256 - stored) if sub_zero < 0 else abs(stored - sub_zero)
        if value == 0:
            table[stored] = -40
        else:
            exponent = value.bit_length() - 1
            table[stored] = 8 * exponent + ((value << 3) >> exponent) - 8
    return table
