"""Where to decode: in DRAM after loading, inside the GEMV kernel, or in a unit between DRAM and L2. All of it modelled.

Producing a token reads every weight once and the KV cache once. Its *floor* is those bytes over the bandwidth; the *projected*
time is the floor over `KERNEL_EFFICIENCY`, what kernels reach of the bandwidth, and in the unit's case no less than the unit
takes to decode. The constants named DOCUMENT are those of the source document; the rest follows from the model at hand.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from lazyweights.hardware import area
from lazyweights.hardware.devices import Device

KERNEL_EFFICIENCY = 0.64
"""Share of the bandwidth that fixed-width kernels reach: the upper end of the 40 to 64 % of the source document, which is also
what its 53.0 ms for 3.5 GB at 102 GB/s come to."""

DOCUMENT_PENALTY = (2.5, 3.2)
"""How many times slower a token is where software decodes inside the kernel: measured by the source document's authors."""

SOFTWARE_PJ_PER_WEIGHT = 20.0
"""Assumption: energy of some 20 instructions a weight on a mobile GPU at about 1 pJ each beside their data."""


class Place(enum.Enum):
    """Where weights are decoded."""

    DRAM = "expanded in DRAM"
    KERNEL = "inside the kernel"
    UNIT = "unit before L2"


def required_rate(bandwidth: float, coded_bpw: float) -> float:
    """Weights per second that a unit has to decode to keep pace with DRAM: theta* = 8 beta / b_c.

    Parameters
    ----------
    bandwidth : float
        Bytes per second.
    coded_bpw : float
        Coded bits per weight, everything counted.

    >>> round(required_rate(102e9, 3.886) / 1e9)
    210
    """
    return 8 * bandwidth / coded_bpw


def peak_rate(n_engines: int, clock_hz: float, weights_per_symbol: int) -> float:
    """Weights per second of engines that never stall: 32 lanes, one symbol each in a cycle."""
    return 32 * n_engines * clock_hz * weights_per_symbol


def engines_needed(bandwidth: float, coded_bpw: float, weights_per_engine_cycle: float, clock_hz: float) -> int:
    """Engines that keep pace with DRAM, each decoding `weights_per_engine_cycle`."""
    return math.ceil(required_rate(bandwidth, coded_bpw) / (weights_per_engine_cycle * clock_hz) - 1e-9)


@dataclass(frozen=True)
class KvCache:
    """Shape of the KV cache of a model.

    Attributes
    ----------
    n_layers, n_heads, head_size : int
        Layers, KV heads of a layer, values of a head.
    value_bytes : float
        Bytes of a value: 2 in fp16.
    """

    n_layers: int
    n_heads: int
    head_size: int
    value_bytes: float = 2.0

    def n_bytes(self, n_tokens: int) -> float:
        """Bytes of keys and values of `n_tokens` tokens.

        >>> round(KvCache(32, 8, 128).n_bytes(4096) / 1e9, 2)  # Mistral-7B
        0.54
        """
        return 2 * self.n_layers * self.n_heads * self.head_size * self.value_bytes * n_tokens


@dataclass(frozen=True)
class ModelBytes:
    """What a token reads of a model.

    Attributes
    ----------
    n_weights : float
        Weights read for a token.
    fixed_bytes : float
        Their bytes at fixed width, as in the GGUF file.
    coded_bytes : float
        Their bytes in the coded file.
    resident_fixed, resident_coded : float
        Bytes of the whole model in memory.
    n_decoded_symbols : float
        Symbols that a unit decodes for a token.
    """

    n_weights: float
    fixed_bytes: float
    coded_bytes: float
    resident_fixed: float
    resident_coded: float
    n_decoded_symbols: float = 0.0


@dataclass(frozen=True)
class TokenCost:
    """What a token costs in one place; all figures are modelled.

    Attributes
    ----------
    place : Place
    bytes_per_token : float
        Bytes over the DRAM bus: weights and KV cache.
    floor_ms, projected_ms : float
        Milliseconds a token; `projected_high_ms` is the upper end where a range is known, else the same.
    energy_mj : float
        Millijoules of DRAM traffic and decoding; arithmetic and idle power are not in it.
    fits : bool
        Whether model and KV cache fit into the memory (all of it; what the system takes is not known here).
    """

    place: Place
    bytes_per_token: float
    floor_ms: float
    projected_ms: float
    projected_high_ms: float
    energy_mj: float
    fits: bool

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second at the projected time."""
        return 1000 / self.projected_ms if self.projected_ms else math.inf


def floor_ms(n_bytes: float, bandwidth: float) -> float:
    """Milliseconds to read some bytes at full bandwidth."""
    return 1000 * n_bytes / bandwidth


def software_decode_ms(fixed_width_ms: float) -> tuple[float, float]:
    """Milliseconds a token where the kernel decodes: the range of `DOCUMENT_PENALTY` times the same codes at fixed width."""
    return fixed_width_ms * DOCUMENT_PENALTY[0], fixed_width_ms * DOCUMENT_PENALTY[1]


def compare_places(
    model: ModelBytes,
    device: Device,
    *,
    kv: KvCache | None = None,
    context: int = 0,
    unit_weights_per_second: float = math.inf,
    tokens_per_pass: float = 1.0,
    efficiency: float = KERNEL_EFFICIENCY,
) -> list[TokenCost]:
    """Compare the three places (modelled).

    Parameters
    ----------
    model : ModelBytes
    device : Device
    kv : KvCache, optional
        No KV cache is counted where it is not given.
    context : int
        Tokens in the KV cache.
    unit_weights_per_second : float
        What the unit decodes (the cycle model says it).
    tokens_per_pass : float
        Tokens that one pass over the weights gives: above 1 with prompt-lookup speculation. Divides the reads of weights and
        what is done to decode them; the KV cache is counted for every token.
    efficiency : float
        See `KERNEL_EFFICIENCY`.

    Returns
    -------
    list of TokenCost
        In the order of `Place`.
    """
    if tokens_per_pass < 1 or not 0 < efficiency <= 1 or context < 0:
        raise ValueError("tokens_per_pass is at least 1, efficiency in (0, 1], context not negative")
    kv_bytes = kv.n_bytes(context) if kv else 0.0
    fixed, coded = model.fixed_bytes / tokens_per_pass, model.coded_bytes / tokens_per_pass
    fixed_ms = floor_ms(fixed, device.bandwidth) / efficiency
    kv_ms = floor_ms(kv_bytes, device.bandwidth) / efficiency
    low, high = software_decode_ms(fixed_ms)
    unit_ms = max(
        floor_ms(coded, device.bandwidth) / efficiency,
        1000 * model.n_weights / tokens_per_pass / unit_weights_per_second,
    )
    unit_pj = model.n_decoded_symbols / tokens_per_pass * area.huffman_symbol_pj()
    software_pj = model.n_weights / tokens_per_pass * SOFTWARE_PJ_PER_WEIGHT

    def cost(place: Place, n_bytes: float, ms: float, high_ms: float, decode_pj: float, resident: float) -> TokenCost:
        energy = ((n_bytes + kv_bytes) * device.dram_pj_per_byte + decode_pj) / 1e9
        fits = resident + kv_bytes <= device.memory_bytes
        floor = floor_ms(n_bytes + kv_bytes, device.bandwidth)
        return TokenCost(place, n_bytes + kv_bytes, floor, ms + kv_ms, high_ms + kv_ms, energy, fits)

    return [
        cost(Place.DRAM, fixed, fixed_ms, fixed_ms, 0.0, model.resident_fixed),
        cost(Place.KERNEL, coded, low, high, software_pj, model.resident_coded),
        cost(Place.UNIT, coded, unit_ms, unit_ms, unit_pj, model.resident_coded),
    ]


@dataclass(frozen=True)
class OperatingPoint:
    """A model at a quality budget, as the unit sees it.

    Attributes
    ----------
    coded_bpw : float
        Coded bits per weight.
    pairs : bool
        4-bit codes, two to a symbol; else 5-bit codes, one to a symbol.
    is_given : bool
        Whether the source document gives the number of bits.
    """

    coded_bpw: float
    pairs: bool
    is_given: bool


DOCUMENT_BANDWIDTH = 102e9
"""Bytes per second of the Jetson Orin Nano Super in the source document."""

DOCUMENT_RATES = (151e9, 229e9)
"""Smallest and largest rate that the source document asks of the unit, weights per second."""


def operating_points() -> list[OperatingPoint]:
    """Six operating points over the range of bits per weight of the source document, smallest first.

    The document has six and gives the two ends as rates (151 and 229 G weights/s at 102 GB/s) and one in its worked example
    (3.886 bits). Assumptions: the other three lie evenly between 3.886 and the 4.5 bits of uncoded 4-bit formats, so they have
    4-bit codes as the two below them; the widest, 5.4 bits, cannot be 4-bit codes, so it has 5-bit codes.
    """
    low, high = 8 * DOCUMENT_BANDWIDTH / DOCUMENT_RATES[1], 8 * DOCUMENT_BANDWIDTH / DOCUMENT_RATES[0]
    example = 3.886
    between = [example + (4.5 - example) * k / 4 for k in (1, 2, 3)]
    return [
        OperatingPoint(low, True, True),
        OperatingPoint(example, True, True),
        *(OperatingPoint(bits, True, False) for bits in between),
        OperatingPoint(high, False, True),
    ]


def points_covered(pair_rate: float, single_rate: float, bandwidth: float = DOCUMENT_BANDWIDTH) -> int:
    """How many of the six points a unit keeps pace with.

    Parameters
    ----------
    pair_rate, single_rate : float
        Weights per second of the unit on 4-bit codes in pairs and on 5-bit codes.
    bandwidth : float
        Bytes per second.

    >>> points_covered(peak_rate(4, 1e9, 2), peak_rate(4, 1e9, 1))
    5
    """
    return sum(
        (pair_rate if point.pairs else single_rate) >= required_rate(bandwidth, point.coded_bpw) for point in operating_points()
    )
