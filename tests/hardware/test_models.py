"""Devices, areas and rANS lanes: sane, sourced, and in proportion."""

from __future__ import annotations

import numpy as np
import pytest

from lazyweights.errors import LazyWeightsError
from lazyweights.hardware import area, devices
from lazyweights.hardware.rans_engine import simulate_rans


@pytest.mark.parametrize("device", devices.DEVICES.values(), ids=devices.DEVICES)
def test_device_is_sane(device):
    assert device.source
    assert 10e9 < device.bandwidth < 4e12
    assert 1e9 < device.memory_bytes <= 512e9
    assert device.kind in {"board", "laptop", "phone", "desktop"}
    assert 10 < device.dram_pj_per_byte < 100


def test_devices_of_the_document():
    orin, nano = devices.find_device("orin-nano-super"), devices.find_device("jetson-nano")
    assert (orin.bandwidth, orin.memory_bytes) == (102e9, 8e9)
    assert (nano.bandwidth, nano.memory_bytes) == (25.6e9, 4e9)
    assert {d.kind for d in devices.DEVICES.values()} == {"board", "laptop", "phone", "desktop"}
    with pytest.raises(LazyWeightsError, match="orin-nano-super"):
        devices.find_device("abacus")


def test_every_component_has_a_source():
    for component in area.COMPONENTS.values():
        assert component.um2 > 0
        assert component.source


def test_areas_grow_with_what_is_in_them():
    base = area.HuffmanDesign()
    assert sum(base.parts().values()) == pytest.approx(base.area_mm2())
    assert area.HuffmanDesign(n_engines=8).area_mm2() == pytest.approx(2 * base.area_mm2())
    larger = [
        {"window_bits": 12}, {"entry_bits": 16}, {"fifo_words": 4}, {"queue_steps": 64}, {"output_buffer": 256},
        {"two_symbols": True}, {"row_order": True}, {"demand": True},
    ]  # fmt: skip
    for change in larger:
        assert area.HuffmanDesign(**change).area_mm2() > base.area_mm2(), change
    assert area.HuffmanDesign(window_bits=10).area_mm2() < base.area_mm2()
    assert area.rans_symbol_pj() > area.huffman_symbol_pj() > 0


@pytest.mark.parametrize(("rows", "columns"), [(64, 128), (70, 131), (1, 5), (63, 1)])
def test_rans_lanes_decode(rows, columns):
    rng = np.random.default_rng(rows)
    symbols = np.clip(rng.normal(128, 20, (rows, columns)), 0, 255).astype(np.uint8)
    run = simulate_rans(symbols, step_cycles=3)
    np.testing.assert_array_equal(run.symbols, symbols)
    slower = simulate_rans(symbols, step_cycles=5)
    scarce = simulate_rans(symbols, step_cycles=3, bytes_per_cycle=1)
    assert run.stream_bytes == slower.stream_bytes == scarce.stream_bytes
    assert run.cycles < slower.cycles
    assert scarce.wait_cycles > run.wait_cycles
    steps = sum(((min(64, rows - top) + 1) // 2 > 0) + (min(64, rows - top) > 1) for top in range(0, rows, 64)) * columns
    tiles = -(-rows // 64) * -(-columns // 128)
    assert run.cycles == 3 * steps + run.wait_cycles + 2 * tiles
