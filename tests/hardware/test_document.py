"""The figures of the source document that the model reproduces, one test each."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from lazyweights.hardware import area, placement
from lazyweights.hardware.devices import find_device
from lazyweights.hardware.placement import KvCache, ModelBytes, Place

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "decode_unit.json"
BANDWIDTH = 102e9
MISTRAL_WEIGHTS = 7.2417e9
MISTRAL_KV = KvCache(n_layers=32, n_heads=8, head_size=128)


def test_required_rate_spans_151_to_229_g_weights():
    rates = [placement.required_rate(BANDWIDTH, point.coded_bpw) / 1e9 for point in placement.operating_points()]
    assert [round(rates[0]), round(rates[-1])] == [229, 151]
    assert rates == sorted(rates, reverse=True)
    assert placement.required_rate(BANDWIDTH, 3.886) == 8 * BANDWIDTH / 3.886


def test_the_points_are_six_and_those_of_the_document_are_marked():
    points = placement.operating_points()
    assert len(points) == 6
    assert [round(p.coded_bpw, 3) for p in points if p.is_given] == [3.563, 3.886, 5.404]


def test_four_engines_cover_five_of_six_points_with_pairs_and_none_without():
    pairs, singles = placement.peak_rate(4, 1e9, 2), placement.peak_rate(4, 1e9, 1)
    assert (pairs, singles) == (256e9, 128e9)
    assert placement.points_covered(pairs, singles) == 5
    assert placement.points_covered(singles, singles) == 0


def test_bytes_per_token_of_the_worked_example():
    coded, fixed = MISTRAL_WEIGHTS * 3.886 / 8 / 1e9, MISTRAL_WEIGHTS * 5.668 / 8 / 1e9
    assert coded == pytest.approx(3.5, abs=0.05)
    assert fixed == pytest.approx(5.1, abs=0.05)
    assert 1 - coded / fixed == pytest.approx(0.31, abs=0.005)


def test_floors_of_the_worked_example():
    assert placement.floor_ms(5.1e9, BANDWIDTH) == pytest.approx(50, abs=0.5)
    assert placement.floor_ms(3.5e9, BANDWIDTH) == pytest.approx(34, abs=0.5)


def test_projected_time_of_the_worked_example():
    """The document's 53.0 ms; its llama.cpp baseline, other kernels, takes 83.3 ms."""
    assert placement.floor_ms(3.5e9, BANDWIDTH) / placement.KERNEL_EFFICIENCY == pytest.approx(53.0, rel=0.02)


def test_penalty_of_software_decoding():
    low, high = placement.software_decode_ms(53.0)
    assert placement.DOCUMENT_PENALTY == (2.5, 3.2)
    assert (round(low, -1), round(high, -1)) == (130, 170)


def test_kv_cache_of_the_worked_example():
    assert MISTRAL_KV.n_bytes(4096) / 1e9 == pytest.approx(0.54, abs=0.005)


def test_area_of_four_engines():
    assert area.HuffmanDesign().area_mm2() == pytest.approx(0.206, abs=1e-6)
    assert 0.3 < area.SRAM_EFFICIENCY < 0.8  # what was fitted is a number that macros have


def test_rans_takes_up_to_four_times_the_area():
    ratios = [area.rans_area_ratio(alphabet) for alphabet in (256, 64, 32, 16)]
    assert max(ratios) == ratios[0] == pytest.approx(4.0, abs=1e-6)
    assert min(ratios) > 1
    assert 1.5 < area.RANS_STEP_NS < 4  # two look-ups, a multiplication and an addition
    assert area.rans_area_ratio(256, interleaved=True) == pytest.approx(4.0 / area.RANS_STEP_NS)


def mistral() -> ModelBytes:
    fixed, coded = MISTRAL_WEIGHTS * 5.668 / 8, MISTRAL_WEIGHTS * 3.886 / 8
    return ModelBytes(MISTRAL_WEIGHTS, fixed, coded, fixed, coded, MISTRAL_WEIGHTS / 2)


def test_only_the_coded_model_fits_a_jetson_nano():
    costs = placement.compare_places(mistral(), find_device("jetson-nano"))
    assert [cost.fits for cost in costs] == [False, True, True]


def test_where_to_decode_decides():
    dram, kernel, unit = placement.compare_places(mistral(), find_device("orin-nano-super"), kv=MISTRAL_KV, context=512)
    assert unit.projected_ms < dram.projected_ms < kernel.projected_ms < kernel.projected_high_ms
    assert unit.bytes_per_token == kernel.bytes_per_token < dram.bytes_per_token
    assert unit.energy_mj < dram.energy_mj
    assert [cost.place for cost in (dram, kernel, unit)] == list(Place)


def test_the_saving_shrinks_with_the_context_and_grows_with_speculation():
    device = find_device("orin-nano-super")

    def saving(context: int, tokens_per_pass: float = 1.0) -> float:
        dram, _, unit = placement.compare_places(
            mistral(), device, kv=MISTRAL_KV, context=context, tokens_per_pass=tokens_per_pass
        )
        return 1 - unit.projected_ms / dram.projected_ms

    assert saving(0) > saving(4096) > saving(65536) > 0
    plain = placement.compare_places(mistral(), device)[0].projected_ms
    assert 1 - placement.compare_places(mistral(), device, tokens_per_pass=2)[2].projected_ms / plain > saving(0)


def test_a_slow_unit_is_what_limits():
    device = find_device("orin-nano-super")
    slow = placement.compare_places(mistral(), device, unit_weights_per_second=50e9)[2]
    assert slow.projected_ms == pytest.approx(1000 * MISTRAL_WEIGHTS / 50e9)
    assert placement.compare_places(mistral(), device, unit_weights_per_second=math.inf)[2].projected_ms < slow.projected_ms


@pytest.mark.parametrize("change", [{"tokens_per_pass": 0.5}, {"efficiency": 0}, {"context": -1}])
def test_senseless_numbers_are_refused(change):
    with pytest.raises(ValueError, match="at least 1"):
        placement.compare_places(mistral(), find_device("orin-nano-super"), **change)


def test_engines_needed():
    assert placement.engines_needed(BANDWIDTH, 5.404, 32, 1e9) == 5
    assert placement.engines_needed(BANDWIDTH, 3.563, 64, 1e9) == 4
    assert placement.engines_needed(BANDWIDTH, 3.563, 32, 1e9) == 8


def test_committed_study_covers_all_six_points_at_less_area():
    rows = {row["key"]: row for row in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]}
    base, adopted = rows["baseline"], rows["two-narrow"]
    assert (base["points_covered"], adopted["points_covered"]) == (5, 6)
    assert base["area_mm2"] == pytest.approx(area.HuffmanDesign().area_mm2())
    assert adopted["area_mm2"] == pytest.approx(area.HuffmanDesign(window_bits=10, entry_bits=16, two_symbols=True).area_mm2())
    assert adopted["area_mm2"] < base["area_mm2"]
    for row in rows.values():
        assert placement.points_covered(row["pairs"]["rate"], row["singles"]["rate"]) == row["points_covered"]
