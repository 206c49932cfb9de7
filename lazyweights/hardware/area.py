"""Area and energy of a decode unit from a table of components, for a 7 nm-class node. Every figure is modelled.

What is fitted, and what follows. Two numbers of the source document are fitted with one constant each:

- `SRAM_EFFICIENCY`, the share of an SRAM macro that is bit cells, so that four 32-lane engines of the base design take
  0.206 mm2. The tables are most of that area, and the efficiency of small macros is the least known number here;
- `RANS_STEP_NS`, the time from one rANS symbol of a lane to its next, so that rANS in 4-bit formats takes 4.0 times the area at
  equal throughput.

All else follows: the shares of the parts, the area of every variant, the ratio for other alphabets, and what rANS would take if
several lanes shared one pipeline to hide its step (`RansDesign.interleaved`).
"""

from __future__ import annotations

from dataclasses import dataclass

from lazyweights.codecs import N_LANES


@dataclass(frozen=True)
class Component:
    """A part of a design.

    Attributes
    ----------
    nand2 : float
        Area in NAND2 gates; None where `um2` is given directly.
    um2 : float
        Area in square micrometres.
    source : str
        Where the number comes from; starts with ``assumption`` where it has no public source.
    """

    name: str
    nand2: float | None
    um2: float
    source: str


NAND2_UM2 = 0.162 * 0.27
"""Area of a NAND2 gate: three gate pitches of 54 nm by a cell of 270 nm (7.5 tracks), the ASAP7 predictive 7 nm kit
(Clark et al., Microelectronics Journal 53, 2016)."""

LOGIC_UTILISATION = 0.7
"""Assumption: share of the area of placed logic that is cells; the rest is wires, clock tree and filler."""

SRAM_BIT_UM2 = 0.027
"""Bit cell of a 7 nm process (Chang et al., ISSCC 2017, paper 12.1)."""

MACRO_NAND2 = 2000.0
"""Assumption: decoders, sense amplifiers and timing that an SRAM macro of any size needs beside its cells, in NAND2."""

DOCUMENT_AREA_MM2 = 0.206
"""Four 32-lane Huffman engines at 1 GHz, of the source document (pre-layout estimate, 7 nm class)."""

DOCUMENT_RANS_RATIO = 4.0
"""Largest ratio of the area of rANS to that of Huffman codes at equal throughput, of the source document."""

_GATES = {
    "flip-flop bit": (20 / 3, "assumption: 20 gate pitches, the size of a plain flip-flop of ASAP7"),
    "mux2 bit": (7 / 3, "assumption: 7 gate pitches, a transmission-gate multiplexer"),
    "full adder bit": (14 / 3, "assumption: 14 gate pitches, a mirror adder"),
    "comparator bit": (3.0, "assumption: a propagate and a generate gate a bit, and the tree"),
    "multiplier bit": (14 / 3 + 1.5, "assumption: an AND gate and a full adder for each bit of the partial products"),
    "control of a lane": (150.0, "assumption: valid bits, end of lane, FIFO pointers"),
    "control of an engine": (3000.0, "assumption: tile counters, credits, hand-over"),
}

COMPONENTS = {
    **{name: Component(name, gates, gates * NAND2_UM2, source) for name, (gates, source) in _GATES.items()},
    "SRAM bit": Component("SRAM bit", None, SRAM_BIT_UM2, "Chang et al., ISSCC 2017, paper 12.1: bit cell alone"),
    "SRAM macro": Component("SRAM macro", MACRO_NAND2, MACRO_NAND2 * NAND2_UM2, "assumption: periphery of any macro"),
}
"""The component table; areas of cells alone, before `LOGIC_UTILISATION` and `SRAM_EFFICIENCY`."""


def _gates(name: str, count: float) -> float:
    return (COMPONENTS[name].nand2 or 0.0) * count


def _shifter(width: int, n_places: int) -> float:
    """NAND2 of a barrel shifter by 0 .. n_places."""
    return _gates("mux2 bit", width * max(1, n_places).bit_length())


@dataclass(frozen=True)
class HuffmanDesign:
    """What the area of a Huffman unit depends on.

    Attributes
    ----------
    n_engines : int
    window_bits : int
        Longest codeword: the table of a lane has 2^window_bits entries.
    entry_bits : int
        Bits of a table entry: 8 of a symbol and 4 of a length; 16 for two symbols of up to 5 bits, their length and number.
    fifo_words : int
        Words of the FIFO of a lane.
    queue_steps : int
        Steps of 128 bytes that an engine may have asked for.
    output_buffer : int
        Symbols of 8 bits that an engine holds for L2.
    two_symbols : bool
        Two symbols a look-up: the path of the second symbol.
    demand : bool
        Demand layout: a pool of words and a routing network in place of the FIFOs.
    row_order : bool
        Balanced lanes: a stored order of 64 rows that moves the output.
    """

    n_engines: int = 4
    window_bits: int = 11
    entry_bits: int = 12
    fifo_words: int = 2
    queue_steps: int = 32
    output_buffer: int = 128
    two_symbols: bool = False
    demand: bool = False
    row_order: bool = False

    def table_bits(self) -> int:
        """SRAM bits of the table of one lane."""
        return self.entry_bits << self.window_bits

    def lane_gates(self) -> float:
        """NAND2 of the logic of one lane."""
        shift_register = _gates("flip-flop bit", 64 + 7) + _shifter(64, self.window_bits) + _shifter(64, 32)
        count = _gates("full adder bit", 2 * 7) + _gates("flip-flop bit", 11)
        fifo = 0.0 if self.demand else _gates("flip-flop bit", 32 * self.fifo_words)
        second = _gates("mux2 bit", 8) + _gates("full adder bit", 4) + _gates("flip-flop bit", 8) if self.two_symbols else 0.0
        return shift_register + count + fifo + second + _gates("control of a lane", 1)

    def engine_gates(self) -> float:
        """NAND2 of what the lanes of an engine share."""
        gates = _gates("control of an engine", 1) + _gates("flip-flop bit", 8 * self.output_buffer)
        if self.demand:
            # A pool, a rotation to its first word, and a network of 5 levels that gives the words to the lanes that ask.
            pool = _gates("flip-flop bit", 32 * N_LANES * max(2, self.fifo_words))
            gates += pool + 2 * 5 * _gates("mux2 bit", 32 * N_LANES) + _gates("full adder bit", N_LANES * 5)
        if self.row_order:
            gates += _gates("flip-flop bit", 64 * 6) + _gates("mux2 bit", N_LANES * 6)
        return gates

    def parts(self) -> dict[str, float]:
        """Area by part in mm2 (modelled)."""
        lanes = self.n_engines * N_LANES
        return {
            "tables": lanes * _sram_mm2(self.table_bits()),
            "lane logic": lanes * _logic_mm2(self.lane_gates()),
            "fetch queues": self.n_engines * _sram_mm2(self.queue_steps * 1024),
            "engine logic": self.n_engines * _logic_mm2(self.engine_gates()),
        }

    def area_mm2(self) -> float:
        """Area in mm2 (modelled)."""
        return sum(self.parts().values())


@dataclass(frozen=True)
class RansDesign:
    """rANS lanes: 12-bit probabilities, a table from slot to symbol, and one of frequencies.

    Attributes
    ----------
    alphabet : int
        Symbols: 256 in 4-bit formats (pairs), 32 in 5-bit formats.
    n_engines : float
        Engines of 32 lanes; not whole where two coders are compared at equal throughput.
    interleaved : bool
        Several lanes share one pipeline, so that a symbol leaves it every cycle; not what was fitted.
    """

    alphabet: int = 256
    n_engines: float = 4
    interleaved: bool = False

    def table_bits(self) -> int:
        """SRAM bits of the tables of one lane: 4096 symbols; frequency and cumulative frequency of each symbol."""
        symbol_bits = max(1, (self.alphabet - 1).bit_length())
        return 4096 * symbol_bits + self.alphabet * 24

    def lane_gates(self) -> float:
        """NAND2 of the logic of one lane: state, 20 x 12 multiplier, addition, renormalisation by 16-bit words."""
        state = _gates("flip-flop bit", 32 + 10)
        step = _gates("multiplier bit", 20 * 12) + _gates("full adder bit", 2 * 32) + _gates("comparator bit", 16)
        refill = _gates("mux2 bit", 32) + _gates("flip-flop bit", 2 * 32)
        return state + step + refill + _gates("control of a lane", 1)

    def area_mm2(self) -> float:
        """Area in mm2 (modelled)."""
        lanes = self.n_engines * N_LANES
        shared = HuffmanDesign()
        tables = lanes * (_sram_mm2(self.table_bits()) + _macro_mm2())
        logic = lanes * _logic_mm2(self.lane_gates())
        rest = self.n_engines * (_sram_mm2(shared.queue_steps * 1024) + _logic_mm2(shared.engine_gates()))
        return tables + logic + rest


def _logic_mm2(gates: float) -> float:
    return gates * NAND2_UM2 / LOGIC_UTILISATION / 1e6


def _macro_mm2() -> float:
    return MACRO_NAND2 * NAND2_UM2 / 1e6


def _sram_mm2(bits: float) -> float:
    return bits * SRAM_BIT_UM2 / SRAM_EFFICIENCY / 1e6 + _macro_mm2()


def _fit_efficiency() -> float:
    design = HuffmanDesign()
    lanes = design.n_engines * N_LANES
    bits = lanes * design.table_bits() + design.n_engines * design.queue_steps * 1024
    logic = lanes * _logic_mm2(design.lane_gates()) + design.n_engines * _logic_mm2(design.engine_gates())
    macros = (lanes + design.n_engines) * _macro_mm2()
    return bits * SRAM_BIT_UM2 / 1e6 / (DOCUMENT_AREA_MM2 - logic - macros)


SRAM_EFFICIENCY = _fit_efficiency()
"""Fitted, see the module: bit cells' share of an SRAM array, 0 to 1."""

RANS_STEP_NS = DOCUMENT_RANS_RATIO * HuffmanDesign().area_mm2() / RansDesign().area_mm2()
"""Fitted, see the module: nanoseconds from a rANS symbol to the next of its lane; a Huffman lane takes 1 at 1 GHz."""


def rans_area_ratio(alphabet: int = 256, interleaved: bool = False) -> float:
    """Area of rANS over that of Huffman codes for as many symbols a second (modelled).

    Parameters
    ----------
    alphabet : int
        As in `RansDesign`.
    interleaved : bool
        Lanes share pipelines, which hides the step; what the source document compares is not known to do that.
    """
    engines = 4 * (1.0 if interleaved else RANS_STEP_NS)
    return RansDesign(alphabet, engines, interleaved).area_mm2() / HuffmanDesign().area_mm2()


ENERGY_SCALE = 0.094
"""Assumption: 7 nm over 45 nm, (7 / 45) x (0.7 V / 0.9 V)^2, rule of thumb: energy goes with capacitance and voltage squared."""

SRAM_READ_PJ_PER_BIT = 10 / 64 * ENERGY_SCALE
"""Horowitz, ISSCC 2014: 10 pJ for 64 bits of an 8 KB memory at 45 nm, scaled by `ENERGY_SCALE`."""

ADD_PJ, MULTIPLY_PJ = 0.1 * ENERGY_SCALE, 3.1 * ENERGY_SCALE
"""Horowitz, ISSCC 2014: 32-bit integer addition and multiplication at 45 nm, scaled by `ENERGY_SCALE`."""

REGISTER_PJ_PER_BIT = 0.002
"""Assumption: clock and data of a flip-flop in a cycle."""


def huffman_symbol_pj(entry_bits: int = 12) -> float:
    """Energy of decoding one symbol in picojoules (modelled): look-up, shifts, counter, registers."""
    return entry_bits * SRAM_READ_PJ_PER_BIT + 3 * ADD_PJ + REGISTER_PJ_PER_BIT * (64 + 18 + 64)


def rans_symbol_pj() -> float:
    """Energy of one rANS symbol in picojoules (modelled): two look-ups, multiplication, addition, registers."""
    return (8 + 24) * SRAM_READ_PJ_PER_BIT + MULTIPLY_PJ + 2 * ADD_PJ + REGISTER_PJ_PER_BIT * (32 + 10 + 64)
