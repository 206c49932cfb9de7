"""Budgets, envelopes and savings, on points with known values."""

from __future__ import annotations

import math

import pytest

from lazyweights.reports.comparison import at_equal_kld, choose, envelope, saving, size_at
from tests.reports.hand_made import point

SOURCE = point("source", 2000, 1600, 0.0, None, kind="source")
STOCK = [
    point("Q8", 1000, 950, 0.004, 0.002),
    point("Q6", 800, 780, 0.009, 0.008),
    point("Q5", 700, 640, 0.021, 0.018),
    point("Q4a", 600, 560, 0.049, 0.04),
    point("Q4b", 590, 575, 0.045, 0.05),
    point("Q2", 400, 390, 0.30, 0.3),
]


def tuned(name, coded_bytes, increase, kld):
    return point(name, 1000, coded_bytes, increase, kld, kind="tuned")


def test_smallest_files_within_each_budget():
    points = [SOURCE, *STOCK, tuned("a", 600, 0.0099, 0.008), tuned("b", 500, 0.0199, 0.02), tuned("c", 480, 0.051, 0.05)]
    found = choose(points, [0.1, 1, 2.1, 5])
    assert [(c.stock and c.stock.name, c.coded_stock and c.coded_stock.name, c.tuned and c.tuned.name) for c in found] == [
        (None, None, None), ("Q6", "Q6", "a"), ("Q5", "Q5", "b"), ("Q4b", "Q4a", "b"),
    ]  # fmt: skip
    assert found[0].saving is found[0].saving_over_coded is found[0].saving_by_coding is None
    assert found[1].saving == pytest.approx(1 - 600 / 800)
    assert found[1].saving_over_coded == pytest.approx(1 - 600 / 780)
    assert found[1].saving_by_coding == pytest.approx(1 - 780 / 800)
    assert found[3].saving == pytest.approx(1 - 500 / 590)
    assert found[3].saving_over_coded == pytest.approx(1 - 500 / 560)


def test_a_budget_is_met_exactly_at_its_limit():
    at = point("at", 100, 90, 0.0, 0.01)
    (choice,) = choose([at], [1e-9])
    assert choice.stock is at


def test_a_perplexity_that_is_no_number_keeps_no_budget():
    (choice,) = choose([point("broken", 10, 9, math.nan, 0.01)], [1000])
    assert choice.stock is None


def test_source_is_no_stock_format():
    (choice,) = choose([SOURCE], [5])
    assert choice.stock is None


def test_envelope_keeps_what_nothing_beats():
    assert envelope([(3, 1.0), (1, 4.0), (2, 5.0), (3, 0.5), (4, 0.5), (5, 0.0), (6, math.inf)]) == [(1, 4.0), (3, 0.5)]
    assert envelope([]) == []


def test_sizes_on_an_envelope():
    frontier = [(400.0, 0.4), (600.0, 0.1), (1000.0, 0.001)]
    assert size_at(frontier, 0.4) == 400
    assert size_at(frontier, 0.1) == 600
    assert size_at(frontier, 0.2) == pytest.approx(500)  # half way in the logarithm
    assert size_at(frontier, 0.01) == pytest.approx(800)
    assert size_at(frontier, 0.001) == 1000
    for outside in (0.41, 0.0009, 0.0, -1.0, math.nan):
        assert size_at(frontier, outside) is None
    assert size_at([(400.0, 0.4)], 0.4) is None


def test_savings_at_equal_divergence():
    ours = [tuned("b", 500, 0.02, 0.04), tuned("a", 450, 0.02, math.sqrt(0.04 * 0.3)), tuned("out", 300, 0.5, 0.31)]
    found = at_equal_kld([SOURCE, *STOCK, *ours])
    assert [row.point.name for row in found] == ["out", "a", "b"]
    assert found[0].saving is None
    assert found[0].saving_over_coded is None
    # 600 bytes at 0.04, 590 at 0.05, 400 at 0.3: Q4b counts among GGUFs, but its coded file is larger than that of Q4a.
    expected = 400 + 190 * math.log(0.3 / found[1].point.kld.value) / math.log(0.3 / 0.05)
    assert found[1].stock_bytes == pytest.approx(expected)
    assert found[1].coded_stock_bytes == pytest.approx((390 + 560) / 2)
    assert found[1].saving_over_coded == pytest.approx(1 - 450 / 475)
    assert (found[2].stock_bytes, found[2].coded_stock_bytes) == (600, 560)
    assert found[2].saving == pytest.approx(1 / 6)


def test_saving_of_nothing():
    assert saving(0, 5) is None
    assert saving(None, 5) is None
    assert saving(50, 60) == pytest.approx(-0.2)
