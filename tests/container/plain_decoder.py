"""A decoder of coded files in plain Python, written from `docs/format.md` alone.

It shares nothing with the package but the planes of `lazyweights.blocks`, and takes the table of types from the document
itself. If the document is wrong or leaves something out, this decoder does not give the source back, and the golden tests
fail. It is slow and trusts its input; comments name the headings of the document.
"""

from __future__ import annotations

import functools
import hashlib
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
import zstandard
from gguf import quants

from lazyweights.blocks import Planes, join, plane_specs

FORMAT = Path(__file__).resolve().parents[2] / "docs" / "format.md"

RAW, ZSTD, CODED, CODED_UNFORCED, LOCKSTEP, FILTERED = range(6)

POSITION_BITS = {"min": 5, "min max": 10, "127": 6}
"""Bits that the positions of a block's forced codes take, by variant."""

Code = dict[tuple[int, int], int]
"""Codewords as (length, bits) to symbol."""


# The table of types, heading "Types".


@dataclass(frozen=True)
class ByteField:
    name: str
    per_block: int  # 0: one value a row
    context: str


@dataclass(frozen=True)
class TypeRow:
    """A row of the table of types."""

    name: str
    type_id: int
    block_size: int
    block_bytes: int
    halves: tuple[tuple[str, bool], ...]  # name, whether it is stored as a difference to the first
    byte_fields: tuple[ByteField, ...]
    codes: str
    code_bits: int
    codes_per_symbol: int
    cell_codes: int  # 0: the largest of 32, 16, 8, 4, 2, 1 that divides the row
    variant: str
    context: str
    zero_base: int
    level: str
    raws: tuple[tuple[str, int, int, int], ...]  # name, values per block (0: one a code), bits, bits if windowed
    low_bits: int = 0  # of split codes


def cells_of(line: str) -> list[str]:
    """Return the cells of a line of a Markdown table, without back quotes."""
    return [cell.strip().replace("`", "") for cell in line.strip().strip("|").split("|")]


def _items(cell: str) -> list[str]:
    return [] if cell == "-" else [item.strip() for item in cell.split(",")]


def _byte_field(item: str) -> ByteField:
    name, count, context = re.fullmatch(r"(\w+) x (\d+|row)(?: by (mean|previous))?", item).groups()  # type: ignore[union-attr]
    return ByteField(name, 0 if count == "row" else int(count), context or "none")


def _raw(item: str) -> tuple[str, int, int, int]:
    name, count, bits, windowed = re.fullmatch(r"(\w+) (\d+|code) x (\d+)(?: \((\d+)\))?", item).groups()  # type: ignore[union-attr]
    return name, 0 if count == "code" else int(count), int(bits), int(windowed or bits)


def parse_type_row(line: str) -> TypeRow:
    """Read a row of the table of types."""
    name, type_id, block, halves, fields, codes, bits, per_symbol, cell, variant, context, level, raws = cells_of(line)
    size, n_bytes = block.split(" / ")
    kind, _, base = context.partition(" ")
    bits, _, low_bits = bits.partition(" + ")
    return TypeRow(
        name, int(type_id), int(size), int(n_bytes),
        tuple((item.removesuffix(" - scale"), item.endswith(" - scale")) for item in _items(halves)),
        tuple(_byte_field(item) for item in _items(fields)),
        codes, int(bits), int(per_symbol), 0 if cell == "*" else int(cell), variant, kind, int(base or 0), level,
        tuple(_raw(item) for item in _items(raws)), int(low_bits or 0),
    )  # fmt: skip


Types = dict[tuple[int, int], TypeRow]
"""Rows of the tables of types by type id and form, 0 or 1."""


def read_types(text: str) -> Types:
    """Return the tables of types and of their second forms of the document."""
    types = {}
    for form, name in enumerate(("types", "second forms")):
        block = text.split(f"<!-- generated: {name} -->")[1].split("<!-- /generated -->")[0]
        for line in [line for line in block.splitlines() if line.startswith("|")][2:]:
            row = parse_type_row(line)
            types[row.type_id, form] = row
    return types


@functools.cache
def index_of_rank(type_name: str) -> list[int]:
    """Return the index of each rank, from the grids of the gguf package: "Second forms"."""
    made = {"IQ1_S": quants.IQ1_S, "IQ1_M": quants.IQ1_S, "IQ2_XS": quants.IQ2_XS, "IQ2_S": quants.IQ2_S, "IQ3_S": quants.IQ3_S}
    made[type_name].init_grid()
    grid = np.asarray(made[type_name].grid)
    sums = (grid.reshape(-1, grid.shape[-1]).astype(int) ** 2).sum(axis=1).tolist()
    return sorted(range(len(sums)), key=lambda index: (sums[index], index))


# Conventions.


class Numbers:
    """Reads LEB128 numbers and bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def number(self) -> int:
        value = shift = 0
        while True:
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def take(self, n: int) -> bytes:
        self.at += n
        assert self.at <= len(self.data)
        return self.data[self.at - n : self.at]


class Bits:
    """Reads values from a bit string, most significant bit first."""

    def __init__(self, bits: list[int]) -> None:
        self.bits = bits
        self.at = 0

    def value(self, n: int) -> int:
        out = 0
        for bit in self.bits[self.at : self.at + n]:
            out = out << 1 | bit
        self.at += n
        return out


def bits_of(data: bytes) -> list[int]:
    return [byte >> (7 - k) & 1 for byte in data for k in range(8)]


def clamp(value: int, low: int, high: int) -> int:
    return min(max(value, low), high)


# "Code tables".


def canonical_code(lengths: bytes) -> Code:
    """Return the codewords that the lengths stand for."""
    used = sorted((length, symbol) for symbol, length in enumerate(lengths) if length)
    if len(used) == 1:
        return {(0, 0): used[0][1]}
    code: Code = {}
    word = previous = 0
    for length, symbol in used:
        word <<= length - previous
        code[length, word] = symbol
        word += 1
        previous = length
    return code


# "Lanes".


class Lanes:
    """The 32 lanes of a coded row group."""

    def __init__(self, payload: bytes) -> None:
        self.words = [int.from_bytes(payload[i : i + 4], "little") for i in range(0, len(payload), 4)]
        self.n_taken = 0
        self.bits: list[list[int]] = [[] for _ in range(32)]

    def refill(self, lanes: range) -> None:
        for lane in lanes:
            if len(self.bits[lane]) < 32:
                word = self.words[self.n_taken]
                self.n_taken += 1
                self.bits[lane] += [word >> (31 - k) & 1 for k in range(32)]

    def symbol(self, lane: int, code: Code) -> int:
        return next_symbol(self.bits[lane], code)


class RansLanes:
    """The 32 states of "rANS cells"; their words follow those that the side planes took."""

    def __init__(self, lanes: Lanes, n_lanes: int) -> None:
        self.lanes = lanes
        self.states = lanes.words[lanes.n_taken : lanes.n_taken + n_lanes]
        lanes.n_taken += n_lanes
        self.high_half: int | None = None

    def symbol(self, lane: int, freqs: list[int]) -> int:
        state = self.states[lane]
        slot = state & 4095
        symbol = start = 0
        while start + freqs[symbol] <= slot:
            start += freqs[symbol]
            symbol += 1
        state = freqs[symbol] * (state >> 12) + slot - start
        if state < 1 << 16:
            state = state << 16 | self.next_half()
        self.states[lane] = state
        return symbol

    def next_half(self) -> int:
        if self.high_half is not None:
            half, self.high_half = self.high_half, None
            return half
        word = self.lanes.words[self.lanes.n_taken]
        self.lanes.n_taken += 1
        self.high_half = word >> 16
        return word & 0xFFFF

    def left_over_bits(self) -> list[int]:
        assert all(state >> 16 == 1 for state in self.states)
        return [state >> (15 - k) & 1 for state in self.states for k in range(16)]


def next_symbol(bits: list[int], code: Code) -> int:
    """Take a codeword from the front of some bits."""
    word = length = 0
    while (length, word) not in code:
        word = word << 1 | bits[length]
        length += 1
    del bits[:length]
    return code[length, word]


# "Head".


@dataclass
class Span:
    n_bytes: int
    name: bytes = b""
    shape: tuple[int, ...] = ()
    kind: TypeRow | None = None
    codes: tuple[Code, ...] = ()
    freqs: tuple[list[int], ...] = ()
    by_rans: bool = False
    modes: tuple[tuple[int, int], ...] = ()
    bases: tuple[int, ...] = ()
    side_tables: tuple[bytes, ...] = ()
    cell_tables: bytes = b""
    is_shared: bool = False
    is_trellis: bool = False
    row_table: int = 0
    references: tuple[bytes, ...] = ()
    classes: bytes = b""

    def units(self) -> Iterator[tuple[int, int]]:
        """Yield (rows, bytes) of each unit; rows is 0 for verbatim bytes."""
        if self.kind is None:
            for at in range(0, self.n_bytes, 1 << 22):
                yield 0, min(1 << 22, self.n_bytes - at)
            return
        row_bytes = self.shape[0] // self.kind.block_size * self.kind.block_bytes
        n_rows = self.shape[1] if len(self.shape) > 1 else 1
        for _ in range(int(np.prod(self.shape[2:], dtype=np.int64))):
            for row in range(0, n_rows, 64):
                rows = min(64, n_rows - row)
                yield rows, rows * row_bytes


def read_head(data: bytes, types: Types) -> tuple[list[Span], list[tuple[bytes, int, tuple[int, ...], int, int]]]:
    """Return the spans and the verbatim tensors."""
    r = Numbers(data)
    sets = []
    for _ in range(r.number()):
        codes = tuple(canonical_code(r.take(256)) for _ in range(r.number()))
        freqs: tuple[list[int], ...] = tuple([] for _ in codes)
        for _ in range(r.number()):
            table = r.number()
            freqs[table].extend(r.number() for _ in range(256))
        sets.append((codes, freqs))
    spans = []
    for _ in range(r.number()):
        span = Span(r.number())
        spans.append(span)
        if r.number() == 0:
            continue
        span.name, type_id, span.shape = read_tensor(r)
        r.number(), r.number()  # statistics
        span.codes, span.freqs = sets[r.number()]
        form, coder = divmod(r.number(), 4)
        span.kind = types[type_id, form]
        span.by_rans, span.is_shared, span.is_trellis = coder == 1, coder in (2, 3), coder == 3
        numbers = [r.number() for _ in span.kind.halves]
        span.modes = tuple((n & 1, n >> 1) for n in numbers)
        n_sides = len(numbers) + sum(low for low, _ in span.modes) + len(span.kind.byte_fields)
        span.bases = tuple(r.number() for _ in range(n_sides))
        span.side_tables = tuple(r.take(32) for _ in range(n_sides))
        span.cell_tables = r.take(512)
        if span.is_shared:
            read_shared_rows(r, span)
    tensors = []
    for _ in range(r.number()):
        tensors.append((*read_tensor(r), r.number(), r.number()))
    assert r.at == len(data)
    return spans, tensors


def read_shared_rows(r: Numbers, span: Span) -> None:
    """Read the end of a plan: "Shared rows"."""
    assert span.kind is not None
    r.number()  # base of the row levels
    span.row_table = r.number()
    n_references = r.number()
    n_blocks = span.shape[0] // span.kind.block_size
    n_values = n_blocks * (2 * len(span.kind.halves) + sum(field.per_block for field in span.kind.byte_fields))
    span.references = tuple(r.take(n_values) for _ in range(n_references))
    span.classes = r.take(span.shape[0] // span.kind.codes_per_symbol)


def read_tensor(r: Numbers) -> tuple[bytes, int, tuple[int, ...]]:
    name = r.take(r.number())
    type_id = r.number()
    return name, type_id, tuple(r.number() for _ in range(r.number()))


# "Row groups".


class RowGroup:
    """Decodes the planes of one row group."""

    def __init__(self, span: Span, n_rows: int) -> None:
        assert span.kind is not None
        self.span = span
        self.kind = span.kind
        self.n_rows = n_rows
        columns = span.shape[0]
        self.is_float = self.kind.cell_codes == 0
        if self.is_float:
            self.cell_codes = next(n for n in (32, 16, 8, 4, 2, 1) if columns % n == 0)
            self.n_blocks = columns // self.cell_codes
            codes_per_block = self.cell_codes
            if self.kind.codes == "bytes":  # each byte of the values in a cell of its own
                codes_per_block *= self.kind.block_bytes
        else:
            self.cell_codes = self.kind.cell_codes
            self.n_blocks = columns // self.kind.block_size
            specs = {s.name: s.per_block for s in plane_specs(self.kind.type_id)}
            codes_per_block = specs["index" if self.kind.codes == "rank" else self.kind.codes]
        self.n_cells = self.n_blocks * codes_per_block // self.cell_codes
        self.cell_symbols = self.cell_codes // self.kind.codes_per_symbol
        self.raws = [(name, count or codes_per_block, bits, windowed) for name, count, bits, windowed in self.kind.raws]
        # What is decoded: fields and raw planes by name, and the symbols, all by row.
        self.fields: dict[str, list[list[int]]] = {}
        self.raw: dict[str, list[list[int]]] = {}
        self.symbols: list[list[int]] = []

    def n_lanes(self, phase: int) -> int:
        return (self.n_rows + 1 - phase) // 2

    def rows_in_lane_order(self) -> list[tuple[int, int]]:
        """(row, block) of the values of a half field or of forced positions, in their order."""
        return [
            (2 * lane + phase, block)
            for phase in (0, 1)
            for block in range(self.n_blocks)
            for lane in range(self.n_lanes(phase))
        ]

    def n_raw_bits(self, windowed: bool) -> int:
        """Raw bits of the row group without the positions of forced codes."""
        per_block = sum(n * (w if windowed else bits) for _, n, bits, w in self.raws)
        per_block += sum(0 if low else 8 if sign == 2 else 7 for low, sign in self.span.modes)
        return self.n_rows * self.n_blocks * per_block

    def low_bits(self, data: bytes) -> dict[tuple[int, int], list[int]]:
        """Return the low bits of the codes of each (row, cell) at the start of some bytes: "Split codes"."""
        width = self.kind.low_bits
        found: dict[tuple[int, int], list[int]] = {}
        for phase in (0, 1):
            for cell in range(self.n_cells):
                for lane in range(self.n_lanes(phase) if width else 0):
                    at = 4 * width * len(found)
                    number = int.from_bytes(data[at : at + 4 * width], "little")
                    places = [2 * width * i + width * k for k in (0, 1) for i in range(16)]
                    found[2 * lane + phase, cell] = [number >> place & (1 << width) - 1 for place in places]
        return found

    # Kinds 2 and 3.

    def decode(self, payload: bytes, unforced: bool) -> None:
        if self.span.is_shared:
            self.decode_shared(payload)
            return
        variant = "-" if unforced else self.kind.variant
        windowed = variant == "window"
        # "Forced codes": where the positions stand.
        low_bits = self.kind.low_bits
        is_forced = variant in POSITION_BITS
        position_bits = POSITION_BITS.get(variant, 0) - low_bits * is_forced
        order = self.rows_in_lane_order()
        n_raw = self.n_raw_bits(windowed)
        n_front = 0
        if n_raw >= 2048:
            n_front = -(-len(order) * position_bits // 32)
        else:
            n_raw += len(order) * position_bits
        front = Bits(bits_of(payload[: 4 * n_front]))
        positions = {key: front.value(position_bits) for key in order} if n_front else {}
        split_off = self.low_bits(payload[4 * n_front :])
        n_front += low_bits * self.n_rows * self.n_cells
        assert len(payload) >= 4 * n_front
        lanes = Lanes(payload[4 * n_front :])

        # "Side planes".
        sides: dict[str, list[list[int]]] = {}
        index = 0
        previous: list[list[int]] = []
        for (name, is_delta), (low, _) in zip(self.kind.halves, self.span.modes, strict=True):
            by_mean = "mean" if name == "scale" and not is_delta else "none"
            sides[name] = self.side_plane(lanes, index, self.n_blocks, by_mean, previous)
            index += 1
            if low:
                sides[name + ".low"] = self.side_plane(lanes, index, self.n_blocks, "none", previous)
                index += 1
        for field in self.kind.byte_fields:
            columns = field.per_block * self.n_blocks or 1
            sides[field.name] = previous = self.side_plane(lanes, index, columns, field.context, previous)
            index += 1

        # "Cells".
        contexts = self.cell_contexts(sides, 256 if unforced else 0)
        removed = {"min": 1, "min max": 2, "127": 1}.get(variant, 0)
        n_symbols = self.cell_symbols - (0 if low_bits else removed // self.kind.codes_per_symbol)
        cells: list[list[list[int]]] = [[[] for _ in range(self.n_cells)] for _ in range(self.n_rows)]
        coder = RansLanes(lanes, self.n_lanes(0)) if self.span.by_rans else None
        for phase in (0, 1):
            for cell in range(self.n_cells):
                for position in range(n_symbols):
                    if position % 2 == 0 and coder is None:
                        lanes.refill(range(self.n_lanes(phase)))
                    for lane in range(self.n_lanes(phase)):
                        row = 2 * lane + phase
                        is_last = low_bits and is_forced and position == 15
                        table = self.span.cell_tables[255 if is_last else contexts[row][cell]]
                        if coder is None:
                            cells[row][cell].append(lanes.symbol(lane, self.span.codes[table]))
                        else:
                            cells[row][cell].append(coder.symbol(lane, self.span.freqs[table]))

        # "Raw bits".
        left_over = [bit for lane in lanes.bits for bit in lane]
        if coder is not None:
            left_over += coder.left_over_bits()
        n_body = n_raw - min(len(left_over), n_raw)
        body = payload[4 * (n_front + lanes.n_taken) :]
        assert len(body) == -(-n_body // 32) * 4
        raw = Bits(bits_of(body)[:n_body] + left_over)

        # "Half fields".
        for (name, is_delta), (low, sign) in zip(self.kind.halves, self.span.modes, strict=True):
            values = [[0] * self.n_blocks for _ in range(self.n_rows)]
            for row, block in order:
                if low:
                    rest = sides[name + ".low"][row][block]
                elif sign == 2:
                    rest = raw.value(8)
                else:
                    rest = raw.value(7) | sign << 7
                value = sides[name][row][block] << 7 | rest & 127
                if is_delta:
                    value = value + self.fields["scale"][row][block] & 0x7FFF
                values[row][block] = value | rest >> 7 << 15
            self.fields[name] = values
        for field in self.kind.byte_fields:
            self.fields[field.name] = sides[field.name]
        for name, n, bits, w in self.raws:
            width = w if windowed else bits
            self.raw[name] = [[raw.value(width) for _ in range(n * self.n_blocks)] for _ in range(self.n_rows)]
        if is_forced and not positions:
            positions = {key: raw.value(position_bits) for key in order}

        for row, cells_of_row in enumerate(cells):
            if low_bits:  # from here on these are codes
                for cell, coded in enumerate(cells_of_row):
                    coded[:] = [s & 15 for s in coded] + [s >> 4 for s in coded]
                    coded[:] = [high << low_bits | rest for high, rest in zip(coded, split_off[row, cell], strict=True)]
                    if is_forced:
                        positions[row, cell] = positions[row, cell] << low_bits | coded.pop() & (1 << low_bits) - 1
            if is_forced:
                for block, coded in enumerate(cells_of_row):
                    put_forced(coded, variant, positions[row, block], self.cell_symbols)
            self.symbols.append([symbol for coded in cells_of_row for symbol in coded])
        if windowed:
            self.put_window()

    def decode_shared(self, payload: bytes) -> None:
        """Decode all planes from one rANS stream: "Shared rows"."""
        span = self.span
        lanes = Lanes(payload)
        coder = RansLanes(lanes, self.n_lanes(0))

        def plane(columns: int, table: int) -> list[list[int]]:
            out: list[list[int]] = [[0] * columns for _ in range(self.n_rows)]
            for phase in (0, 1):
                for column in range(columns):
                    for lane in range(self.n_lanes(phase)):
                        out[2 * lane + phase][column] = coder.symbol(lane, span.freqs[table])
            return out

        row_symbols = [row[0] for row in plane(1, span.row_table)]
        references = [span.references[min(symbol >> 4, len(span.references) - 1)] for symbol in row_symbols]
        names = [name + part for name, _ in self.kind.halves for part in ("", ".low")]
        widths = [self.n_blocks] * len(names)
        names += [field.name for field in self.kind.byte_fields]
        widths += [field.per_block * self.n_blocks for field in self.kind.byte_fields]
        sides: dict[str, list[list[int]]] = {}
        coded: dict[str, list[list[int]]] = {}
        of_reference: dict[str, list[bytes]] = {}
        first = 0
        for index, (name, width) in enumerate(zip(names, widths, strict=True)):
            coded[name] = plane(width, span.side_tables[index][0])
            of_reference[name] = [reference[first : first + width] for reference in references]
            sides[name] = [
                [(a + b) % 256 for a, b in zip(row, reference, strict=True)]
                for row, reference in zip(coded[name], of_reference[name], strict=True)
            ]
            first += width
        for name, is_delta in self.kind.halves:
            self.fields[name] = values = [[0] * self.n_blocks for _ in range(self.n_rows)]
            for row, block in self.rows_in_lane_order():
                rest = sides[name + ".low"][row][block]
                value = sides[name][row][block] << 7 | rest & 127
                if is_delta:
                    value = value + self.fields["scale"][row][block] & 0x7FFF
                values[row][block] = value | rest >> 7 << 15
        for field in self.kind.byte_fields:
            self.fields[field.name] = sides[field.name]

        def level(row: int, cell: int) -> int:
            per_scale = self.n_cells // len(coded["scale"][row])
            d = coded["scale"][row][cell // per_scale]
            d = d - 256 if d > 127 else d
            if "sub_scale" in self.kind.level:
                d += sub_level(sides["sub_scale"][row][cell], self.kind.level)
                d -= sub_level(of_reference["sub_scale"][row][cell], self.kind.level)
            return clamp(row_symbols[row] % 16 - (d >> 1), 0, 15)

        n_symbols = self.n_cells * self.cell_symbols
        self.symbols = [[] for _ in range(self.n_rows)]
        for phase in (0, 1):
            for column in range(n_symbols - 1):
                for lane in range(self.n_lanes(phase)):
                    row = 2 * lane + phase
                    context = 16 * span.classes[column] + level(row, column // self.cell_symbols)
                    self.symbols[row].append(coder.symbol(lane, span.freqs[span.cell_tables[context]]))
        for row, symbols in enumerate(self.symbols):
            state = coder.states[row // 2]
            assert state >> 16 == 1
            symbols.append(state & 255 if row % 2 else state >> 8 & 255)
        assert lanes.n_taken == len(lanes.words)
        if span.is_trellis:
            self.restore_trellis_codes()

    def restore_trellis_codes(self) -> None:
        """Turn indices into codes: "Trellis codes"."""
        for column in range(len(self.symbols[0])):
            state = 0
            for row in self.symbols:
                index = row[column]
                row[column] = (2 * index + state % 2) % 256
                state = state // 2 ^ (18 if state % 2 else 0) ^ (4 if index % 2 else 0)

    def side_plane(
        self, lanes: Lanes, index: int, columns: int, context: str, previous: list[list[int]]
    ) -> list[list[int]]:
        """Decode a side plane; return its symbols by row."""
        out: list[list[int]] = [[0] * columns for _ in range(self.n_rows)]
        tables, base = self.span.side_tables[index], self.span.bases[index]
        for phase in (0, 1):
            means = [0] * 32
            for column in range(columns):
                lanes.refill(range(self.n_lanes(phase)))
                for lane in range(self.n_lanes(phase)):
                    row = 2 * lane + phase
                    number = 0
                    if context == "mean" and column > 0:
                        number = 1 + clamp((means[lane] + 8 >> 4) - base, 0, 30)
                    elif context == "previous":
                        number = previous[row][column] >> 3
                    symbol = lanes.symbol(lane, self.span.codes[tables[number]])
                    out[row][column] = symbol
                    if column == 0:
                        means[lane] = 16 * symbol
                    else:
                        means[lane] += 16 * symbol - means[lane] >> 2
        return out

    def cell_contexts(self, sides: dict[str, list[list[int]]], base: int) -> list[list[int]]:
        """Return the context of each cell, by row: "Contexts of cells"."""
        kind = self.kind
        out = []
        for row in range(self.n_rows):
            if kind.context == "none":
                out.append([base] * self.n_cells)
                continue
            if kind.context == "row":
                level = sides["row_level"][row][0]
                places = self.n_cells // self.n_blocks
                out.append([base + (level + cell % places & 255) for cell in range(self.n_cells)])
                continue
            scale = sides["scale"][row]
            per_scale = self.n_cells // len(scale)
            levels = []
            for cell in range(self.n_cells):
                level = scale[cell // per_scale]
                if kind.level == "8 scale":
                    level *= 8
                elif kind.level != "scale":
                    level += sub_level(sides["sub_scale"][row][cell], kind.level)
                levels.append(level)
            mean = 16 * sum(levels) // self.n_cells
            relative = [clamp((16 * level - mean + 8 >> 4) + 8, 0, 15) for level in levels]
            if kind.context == "level":
                spread = min(sum(abs(16 * level - mean) for level in levels) // (8 * self.n_cells), 15)
                out.append([base + 16 * spread + r for r in relative])
                continue
            zeros = []
            for cell in range(self.n_cells):
                symbol = sides[self.kind.halves[1][0]][row][cell // per_scale]
                zero = (symbol - 256 if symbol > 127 else symbol) - kind.zero_base
                if kind.level != "scale":
                    zero += log_level(sides["sub_min"][row][cell]) - sub_level(sides["sub_scale"][row][cell], kind.level)
                zeros.append(clamp(zero, 0, 15))
            out.append([base + 16 * z + r for z, r in zip(zeros, relative, strict=True)])
        return out

    def put_window(self) -> None:
        """Undo the window of bfloat16: "Windowed row groups"."""
        base = self.span.bases[0]
        for row in range(self.n_rows):
            for i, symbol in enumerate(self.symbols[row]):
                code = symbol + 8 * base
                rest = self.raw["low"][row][i]
                self.symbols[row][i] = code >> 3 & 255
                self.raw["low"][row][i] = rest >> 4 << 7 | (code & 7) << 4 | rest & 15

    # Kind 4.

    def decode_lockstep(self, payload: bytes) -> None:
        n_symbols = self.n_cells * self.cell_symbols
        width = 256 // self.kind.codes_per_symbol
        n_tiles = -(-n_symbols // width)
        lengths = struct.unpack_from(f"<{n_tiles}H", payload)
        at = 2 * (n_tiles + n_tiles % 2)
        code = self.span.codes[self.span.cell_tables[0]]
        self.symbols = [[] for _ in range(self.n_rows)]
        for tile, length in enumerate(lengths):
            n_words = int(length)
            words = struct.unpack_from(f"<{32 * n_words}I", payload, at)
            at += 128 * n_words
            columns = min(width, n_symbols - tile * width)
            for lane in range(self.n_lanes(0)):
                bits = [words[32 * k + lane] >> (31 - i) & 1 for k in range(n_words) for i in range(32)]
                for row in range(2 * lane, min(2 * lane + 2, self.n_rows)):
                    self.symbols[row] += [next_symbol(bits, code) for _ in range(columns)]
        rest = Bits(bits_of(payload[at:]))
        for name, _ in self.kind.halves:
            self.fields[name] = [[rest.value(16) for _ in range(self.n_blocks)] for _ in range(self.n_rows)]
        for field in self.kind.byte_fields:
            self.fields[field.name] = []
        for _ in range(self.n_rows):
            for field in self.kind.byte_fields:
                self.fields[field.name].append([rest.value(8) for _ in range(field.per_block * self.n_blocks or 1)])
        for name, n, width_bits, _ in self.raws:
            self.raw[name] = [[rest.value(width_bits) for _ in range(n * self.n_blocks)] for _ in range(self.n_rows)]
        assert len(payload) == at + -(-rest.at // 8)

    # Planes to bytes.

    def pack(self) -> bytes:
        """Return the packed rows: "Planes" and "Code symbols"."""
        kind = self.kind
        codes = []
        for symbols in self.symbols:
            if kind.low_bits:
                codes.append(symbols)
                continue
            row: list[int] = []
            for at in range(0, len(symbols), self.cell_symbols):
                cell = symbols[at : at + self.cell_symbols]
                for k in range(kind.codes_per_symbol):
                    row += [symbol >> k * kind.code_bits & (1 << kind.code_bits) - 1 if kind.codes_per_symbol > 1 else symbol
                            for symbol in cell]
            codes.append(row)
        if kind.codes == "words":
            words = [
                symbol << 7 | low & 127 | low >> 7 << 15
                for row, lows in zip(codes, self.raw["low"], strict=True)
                for symbol, low in zip(row, lows, strict=True)
            ]
            return struct.pack(f"<{len(words)}H", *words)
        if kind.codes == "bytes":
            return b"".join(self.integers(row) for row in codes)
        planes = dict(self.fields)
        for name, _, bits, _ in self.raws:
            if name == "low":
                codes = [
                    [code << bits | low for code, low in zip(row, lows, strict=True)]
                    for row, lows in zip(codes, self.raw["low"], strict=True)
                ]
            else:
                planes[name] = self.raw[name]
        if kind.codes == "rank":
            codes = [[index_of_rank(kind.name)[rank] for rank in row] for row in codes]
        planes["index" if kind.codes == "rank" else kind.codes] = codes
        if "sum_low" in planes:
            planes["block_sums"] = [
                [high << 8 | low for high, low in zip(*rows, strict=True)]
                for rows in zip(planes["sum_high"], planes["sum_low"], strict=True)
            ]
        arrays = {s.name: np.array(planes[s.name]).astype(s.dtype)[None] for s in plane_specs(kind.type_id)}
        return join(Planes(kind.type_id, (1, self.n_rows, self.span.shape[0]), arrays)).tobytes()

    def integers(self, row: list[int]) -> bytes:
        """Return the values of a row of I8 or I16, packed: "Code symbols"."""
        n = self.cell_codes
        if self.kind.block_bytes == 1:
            return bytes(row)
        out = []
        for at in range(0, len(row), 2 * n):
            for high, low in zip(row[at : at + n], row[at + n : at + 2 * n], strict=True):
                out.append(256 * high + (low if low < 128 else low - 256) & 0xFFFF)
        return struct.pack(f"<{len(out)}H", *out)


def log_level(value: int) -> int:
    """Level of a positive integer in 1/8 octaves: "Contexts of cells"."""
    if value == 0:
        return -40
    e = value.bit_length() - 1
    return 8 * e + (8 * value >> e) - 8


def sub_level(stored: int, how: str) -> int:
    if how == "scale + int8(sub_scale)":
        return log_level(stored if stored < 128 else 256 - stored)
    return log_level(abs(stored - (32 if how == "scale + (sub_scale - 32)" else 0)))


def put_forced(cell: list[int], variant: str, position: int, cell_symbols: int) -> None:
    """Put the forced codes back into a block: "Forced codes"."""
    if variant == "min max" and cell_symbols == 16:
        codes = [symbol & 15 for symbol in cell] + [0] + [symbol >> 4 for symbol in cell] + [15]
        swap_back(codes, 15, 31, 0, 15, position)
        cell[:] = [codes[i] | codes[i + 16] << 4 for i in range(16)]
    elif variant == "min max":
        cell += [0, 31]
        swap_back(cell, 30, 31, 0, 31, position)
    elif variant == "min":
        cell.append(cell[position] if position < 31 else 0)
        cell[position] = 0
    else:
        first = position >> 1
        cell.append(cell[first] if first < 31 else 0)
        cell[first] = 129 if position & 1 else 127


def swap_back(codes: list[int], last_min: int, last_max: int, low: int, high: int, position: int) -> None:
    second, first = position & 31, position >> 5
    codes[last_max] = codes[second]
    codes[second] = high
    codes[last_min] = codes[first]
    codes[first] = low


# "Verbatim units".


def decompress(frame: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(frame, max_output_size=1 << 24)


def decode_verbatim(kind: int, payload: bytes) -> bytes:
    if kind == RAW:
        return payload
    return decompress(payload) if kind == ZSTD else unfilter(payload)


def unfilter(payload: bytes) -> bytes:
    """Undo the regrouping of a chunk of the GGUF header: "Filtered chunks"."""
    r = Numbers(payload)
    sizes = [(r.number(), r.number()) for _ in range(6)]
    recipe, rest, lengths, long_lengths, characters, words = (Numbers(decompress(r.take(packed))) for _, packed in sizes)
    out = b""
    for _ in range(recipe.number()):
        gap, kind, n = recipe.number(), recipe.number(), recipe.number()
        out += rest.take(gap)
        if kind == 1:
            planes = [words.take(n) for _ in range(4)]
            value = 0
            for column in zip(*planes, strict=True):
                value = value + int.from_bytes(bytes(column), "little") & 0xFFFFFFFF
                out += value.to_bytes(4, "little")
            continue
        for size in lengths.take(n):
            if size == 255:
                size = int.from_bytes(long_lengths.take(4), "little")
            out += size.to_bytes(8, "little") + characters.take(size)
    return out + rest.data[rest.at :]


# "Layout of a file".


def decode(coded: bytes) -> bytes:
    """Return the source that a coded file holds; every checksum is checked."""
    types = read_types(FORMAT.read_text(encoding="utf-8"))
    fields = struct.unpack("<4sHHQQ32sIIQIIQQQ16sQ", coded[:128])
    magic, version, flags, source_size, file_size, sha256, head_bytes, head_raw_bytes, head_checksum, n_units = fields[:10]
    payload_offset, table_checksum, reserved_1, reserved_2, reserved, header_checksum = fields[10:]
    assert (magic, version, flags & ~1, reserved_1, reserved_2, reserved) == (b"LZWT", 1, 0, 0, 0, bytes(16))
    assert header_checksum == xxhash.xxh3_64_intdigest(coded[:120])
    assert file_size == len(coded)
    head_end = 128 + head_bytes
    table_end = head_end + 12 * n_units
    assert 4 * payload_offset == -(-table_end // 64) * 64
    assert not any(coded[table_end : 4 * payload_offset])
    assert head_checksum == xxhash.xxh3_64_intdigest(coded[128:head_end])
    assert table_checksum == xxhash.xxh3_64_intdigest(coded[head_end:table_end])
    head = decompress(coded[128:head_end])
    assert len(head) == head_raw_bytes
    spans, tensors = read_head(head, types)
    assert all(at >= 0 and at + n <= source_size for *_, at, n in tensors)

    out = bytearray()
    at = 4 * payload_offset
    unit = 0
    for span in spans:
        for rows, n_bytes in span.units():
            size, checksum = struct.unpack_from("<IQ", coded, head_end + 12 * unit)
            kind, size = size >> 28, size & (1 << 28) - 1
            payload = coded[at : at + size]
            if span.kind is None or kind == RAW:
                data = decode_verbatim(kind, payload)
            else:
                group = RowGroup(span, rows)
                if kind == LOCKSTEP:
                    group.decode_lockstep(payload)
                else:
                    group.decode(payload, kind == CODED_UNFORCED)
                data = group.pack()
            assert len(data) == n_bytes
            assert checksum == xxhash.xxh3_64_intdigest(data), (span.name, unit, kind)
            assert not any(coded[at + size : at + size + -size % 4])
            out += data
            at += size + -size % 4
            unit += 1
    assert unit == n_units
    assert coded[at:] == bytes(256)
    assert len(out) == source_size
    assert hashlib.sha256(out).digest() == sha256
    return bytes(out)
