"""A whole model through the decode unit of a machine, and what a token costs there. Every figure is modelled."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lazyweights.container.reader import CodedFile
from lazyweights.errors import CodecError
from lazyweights.hardware import area, placement
from lazyweights.hardware.devices import Device
from lazyweights.hardware.engine_kernels import simulate_unit
from lazyweights.hardware.unit_config import STEP_BYTES, Loss, UnitConfig
from lazyweights.reports.unit_streams import PlainTensor, golden_symbols, read_tensors, require_unit_preset

DRAM_LATENCY_S = 100e-9
"""Assumption: seconds from a request to its data, whatever the clock of the unit."""

EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"


@dataclass(frozen=True)
class TypeRow:
    """The tensors of one type in the unit.

    Attributes
    ----------
    type_name : str
    n_tensors, n_weights : int
        Decoded by the unit.
    coded_bpw : float
        Bits per weight on the bus, everything counted.
    cycles_per_weight : float
    losses : dict of str to float
        Share of the lane cycles by `Loss` name, 0 to 1.
    """

    type_name: str
    n_tensors: int
    n_weights: int
    coded_bpw: float
    cycles_per_weight: float
    losses: dict[str, float]


@dataclass(frozen=True)
class UnitReport:
    """What ``lazyweights simulate`` says of a file; all figures modelled.

    Attributes
    ----------
    device : Device
    clock_hz : float
    n_engines : int
    types : list of TypeRow
    cycles : int
        Of all decoded tensors, one after the other.
    n_weights : int
        Weights that the unit decodes.
    plain_bytes : int
        Bytes of tensors that pass the unit by.
    required_rate, unit_rate : float
        Weights per second that keep pace with DRAM (theta*), and that the unit reaches on this file with that DRAM.
    capacity : float
        Weights per second of the engines where bandwidth is ample.
    area_mm2 : float
    context : int
    kv_bytes : float or None
        None where the file does not say the shape of the KV cache.
    places : list of TokenCost
    by_context : list of (int, list of float)
        Tokens of context, and the projected milliseconds of each place.
    """

    path: str
    device: Device
    clock_hz: float
    n_engines: int
    types: list[TypeRow]
    cycles: int
    n_weights: int
    plain_bytes: int
    coded_bpw: float
    required_rate: float
    unit_rate: float
    capacity: float
    area_mm2: float
    context: int
    tokens_per_pass: float
    kv_bytes: float | None
    model: placement.ModelBytes
    places: list[placement.TokenCost]
    by_context: list[tuple[int, list[float]]]

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON takes it."""
        places = [
            {**asdict(cost), "place": cost.place.value, "tokens_per_second": cost.tokens_per_second} for cost in self.places
        ]
        return {**asdict(self), "modelled": True, "places": places, "device_source": self.device.source}


def kv_cache_of(metadata: dict[str, Any]) -> placement.KvCache | None:
    """The shape of the KV cache from the metadata of a GGUF header; None where it is not said."""
    name = metadata.get("general.architecture")

    def number(key: str) -> int:
        value = metadata.get(f"{name}.{key}")
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0

    layers, heads, embedding = number("block_count"), number("attention.head_count"), number("embedding_length")
    kv_heads = number("attention.head_count_kv") or heads
    head_size = number("attention.key_length") or (embedding // heads if heads else 0)
    return placement.KvCache(layers, kv_heads, head_size) if layers and kv_heads and head_size else None


def simulate_file(
    file: CodedFile,
    device: Device,
    *,
    n_engines: int = 4,
    clock_hz: float = 1e9,
    context: int = 4096,
    tokens_per_pass: float = 1.0,
    verify: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> UnitReport:
    """Run every tensor of a coded file through the cycle model of a unit in a machine.

    Parameters
    ----------
    file : CodedFile
        Of the preset `unit`.
    device : Device
    n_engines : int
    clock_hz : float
        Of the unit.
    context : int
        Tokens in the KV cache.
    tokens_per_pass : float
        See `placement.compare_places`.
    verify : bool
        Compare what the model decodes with the decoder of the file.
    progress : callable, optional
        Called with weights done and weights in all.

    Raises
    ------
    LazyWeightsError
        If the file has no streams for the unit, is damaged, or the model decodes other symbols (a bug).
    """
    require_unit_preset(file)
    latency = max(1, round(DRAM_LATENCY_S * clock_hz))
    config = UnitConfig(n_engines=n_engines, bytes_per_cycle=device.bandwidth / clock_hz, latency_cycles=latency)
    ample = UnitConfig(n_engines=1, bytes_per_cycle=STEP_BYTES, latency_cycles=latency)
    has_output = OUTPUT in file
    total = sum(math.prod(info.shape) for info in file.tensors())
    done = cycles = n_weights = plain = 0
    alone_cycles = 0
    read = dict.fromkeys(("weights", "fixed", "coded", "symbols"), 0.0)
    resident_fixed = resident_coded = 0
    types: dict[str, dict[str, Any]] = {}
    for tensor in read_tensors(file):
        is_read = not (tensor.name == EMBEDDING and has_output)
        fixed = tensor.n_bytes if isinstance(tensor, PlainTensor) else tensor.source_bytes
        coded = tensor.n_bytes if isinstance(tensor, PlainTensor) else tensor.coded_bytes
        resident_fixed += fixed
        resident_coded += coded
        if is_read:
            read["weights"] += tensor.n_weights
            read["fixed"] += fixed
            read["coded"] += coded
        if isinstance(tensor, PlainTensor):
            plain += tensor.n_bytes
        else:
            run = simulate_unit(tensor.stream, config)
            if verify and not np.array_equal(run.symbols, golden_symbols(tensor.stream, tensor.decode_table)):
                raise CodecError("the model of the unit decodes other symbols; please report this", tensor=tensor.name)
            alone_cycles += simulate_unit(tensor.stream, ample).cycles
            n = tensor.stream.n_weights
            cycles += run.cycles
            n_weights += n
            plain += tensor.raw_bytes
            read["symbols"] += tensor.stream.n_symbols if is_read else 0
            row = types.setdefault(tensor.type_name, {"tensors": 0, "n": 0, "bytes": 0, "cycles": 0, "lanes": np.zeros(9)})
            row["tensors"] += 1
            row["n"] += n
            row["bytes"] += tensor.coded_bytes - tensor.raw_bytes
            row["cycles"] += run.cycles
            row["lanes"] += run.lane_cycles
        done += tensor.n_weights
        if progress is not None:
            progress(done, total)
    rows = [
        TypeRow(
            name, row["tensors"], row["n"], 8 * row["bytes"] / row["n"], row["cycles"] / row["n"],
            {loss.name.lower(): float(row["lanes"][loss] / row["lanes"].sum()) for loss in Loss},
        )
        for name, row in types.items()
    ]  # fmt: skip
    coded_bpw = 8 * sum(row["bytes"] for row in types.values()) / n_weights
    model = placement.ModelBytes(
        read["weights"], read["fixed"], read["coded"], resident_fixed, resident_coded, read["symbols"]
    )
    kv = kv_cache_of(file.metadata)
    capacity = n_engines * n_weights / alone_cycles * clock_hz

    def places(tokens: int) -> list[placement.TokenCost]:
        return placement.compare_places(
            model, device, kv=kv, context=tokens, unit_weights_per_second=capacity, tokens_per_pass=tokens_per_pass
        )

    steps = sorted({0, context, *(1 << k for k in range(9, 18))})
    return UnitReport(
        file.path, device, clock_hz, n_engines, rows, cycles, n_weights, plain, coded_bpw,
        placement.required_rate(device.bandwidth, coded_bpw), n_weights / cycles * clock_hz, capacity,
        area.HuffmanDesign(n_engines=n_engines).area_mm2(), context, tokens_per_pass, kv.n_bytes(context) if kv else None,
        model, places(context), [(tokens, [cost.projected_ms for cost in places(tokens)]) for tokens in steps],
    )  # fmt: skip
