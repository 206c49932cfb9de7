"""``lazyweights simulate``."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def unit(model, lw):
    """The model as a coded file of the preset `unit`."""
    path = model.with_name("m.unit.lw")
    assert lw("encode", "-q", "--preset", "unit", model, "-o", path).code == 0
    return path


def test_tables(lw, unit):
    done = lw("simulate", unit)
    assert done.code == 0, done.stderr
    for said in ("Jetson Orin Nano Super, 102 GB/s", "4 engines", "Q8_0", "cycles/weight", "unit before L2", "(modelled)"):
        assert said in done.text
    assert "not counted" in done.text  # the tiny model does not say the shape of its KV cache


def test_json(lw, unit):
    done = lw("simulate", unit, "--json", "--device", "jetson-nano", "--context", "100", "--engines", "2", "--clock", "0.5")
    report = json.loads(done.text)
    assert report["modelled"] is True
    assert report["device"]["key"] == "jetson-nano"
    assert report["n_engines"] == 2
    assert report["clock_hz"] == 5e8
    assert report["n_weights"] == 2 * 64 * 256
    assert [place["place"] for place in report["places"]] == ["expanded in DRAM", "inside the kernel", "unit before L2"]
    for row in report["types"]:
        assert sum(row["losses"].values()) == pytest.approx(1)
    assert report["places"][0]["bytes_per_token"] > report["places"][2]["bytes_per_token"]


def test_bandwidth_is_what_changes_the_times(lw, unit):
    slow, fast = (json.loads(lw("simulate", unit, "--json", "--bandwidth", b).text) for b in ("10", "100"))
    assert slow["places"][0]["floor_ms"] == pytest.approx(10 * fast["places"][0]["floor_ms"])
    assert slow["cycles"] > fast["cycles"]
    assert slow["device"]["label"] == "given bandwidth"


@pytest.mark.parametrize("options", [("--clock", "10", "--bandwidth", "1"), ("--engines", "1024"), ("--clock", "0.01"),
                                     ("--device", "rtx-5090", "--context", "0")])  # fmt: skip
def test_extreme_machines(lw, unit, options):
    done = lw("simulate", unit, *options)
    assert done.code == 0, done.stderr


def test_speculation_divides_the_passes(lw, unit):
    one, two = (json.loads(lw("simulate", unit, "--json", "--tokens-per-pass", x).text) for x in ("1", "2"))
    assert two["places"][2]["bytes_per_token"] == pytest.approx(one["places"][2]["bytes_per_token"] / 2)


def test_list_of_devices(lw):
    done = lw("simulate", "--list-devices")
    assert done.code == 0
    assert "orin-nano-super" in done.text


def test_dense_file_is_an_error_that_says_what_to_do(lw, coded):
    done = lw("simulate", coded)
    assert done.code == 1
    assert "--preset unit" in done.stderr


def test_gguf_file_is_an_error(lw, model):
    done = lw("simulate", model)
    assert done.code == 1
    assert "not a coded file" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "FILE is missing"),
        (["m.lw", "--device", "abacus"], "there is no device"),
        (["m.lw", "--plot", "x.txt"], "has to end in"),
        (["-"], "standard input"),
        (["m.lw", "--engines", "0"], "1 to 1024"),
        (["m.lw", "--clock", "fast"], "0.01 to 10"),
        (["m.lw", "--bandwidth", "nan"], "1 to 100000"),
        (["m.lw", "--tokens-per-pass", "0.5"], "at least 1"),
        (["m.lw", "--context", "-1"], "tokens"),
    ],
)
def test_arguments_that_make_no_sense(lw, arguments, said):
    done = lw("simulate", *arguments)
    assert done.code == 2
    assert said in done.stderr


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot(lw, unit, tmp_path, suffix):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra report)")
    out = tmp_path / f"plot.{suffix}"
    assert lw("simulate", "-q", unit, "--plot", out).code == 0
    assert out.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


def test_plot_without_matplotlib(lw, unit, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    done = lw("simulate", unit, "--plot", tmp_path / "x.png")
    assert done.code == 1
    assert "lazyweights[report]" in done.stderr
