"""A whole report on the tiny model: what is measured, what is taken from the folder, what is left behind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lazyweights.errors import LazyWeightsError, QuantizationError
from lazyweights.reports import calibration, judge, model_report
from lazyweights.reports.judge import Judge
from lazyweights.reports.model_report import SilentWatcher
from lazyweights.reports.points import PointStore
from tests.reports.conftest import BUDGETS, FORMATS, FakeQuantizer, Made

pytestmark = pytest.mark.usefixtures("tiny_report")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """What is called while a report is made."""
    found: dict[str, list[Any]] = {"quantize": [], "encode": [], "perplexity": [], "compare": [], "capture": [], "curvature": []}

    def counted(name: str, module: Any, attribute: str) -> None:
        original = getattr(module, attribute)

        def call(*arguments: Any, **options: Any) -> Any:
            found[name].append(arguments)
            return original(*arguments, **options)

        monkeypatch.setattr(module, attribute, call)

    counted("quantize", model_report, "stock_quantize")
    counted("encode", judge, "encode_file")
    counted("perplexity", judge.evaluator, "perplexity")
    counted("compare", judge.evaluator, "kl_divergence")
    counted("capture", calibration.passes, "capture")
    counted("curvature", calibration.curvatures, "measure_curvature")
    return found


def files(folder: Path) -> set[str]:
    return {str(Path(place, name).relative_to(folder)) for place, _, names in os.walk(folder) for name in names}


def test_document(tiny_report: Made) -> None:
    document = tiny_report.document
    kinds = [point["kind"] for point in document["points"]]
    assert kinds[:3] == ["source", "stock", "stock"]
    assert set(kinds[3:]) == {"tuned"}
    source, *others = document["points"]
    assert source["ratio"] == {"value": 1.0, "error": 0.0}
    assert source["kld"] is None
    for point in others:
        assert point["ratio"]["value"] == pytest.approx(point["ppl"]["value"] / source["ppl"]["value"], rel=1e-3)
        assert point["kld"]["value"] > 0
        assert 0 < point["same_top"]["value"] <= 1
        assert point["kld_quantiles"]["99.9%"] >= point["kld_quantiles"]["99.0%"] > 0
    assert document["points"][1]["kld"]["value"] < document["points"][2]["kld"]["value"]
    assert document["evaluation"]["n_scored"] == 4 * 31
    assert document["calibration"]["text"] == "calibration.txt"
    assert document["left_out"] == []


def test_sums(tiny_report: Made) -> None:
    for point in tiny_report.document["points"]:
        assert point["bpw"] == pytest.approx(8 * point["gguf_bytes"] / point["n_weights"])
        assert point["coded_bpw"] == pytest.approx(8 * point["coded_bytes"] / point["n_weights"])
        assert sum(tensor["n_weights"] for tensor in point["tensors"]) == point["n_weights"]
        for key in ("n_weights", "packed_bytes", "coded_bytes"):
            assert sum(kind[key] for kind in point["kinds"]) == sum(tensor[key] for tensor in point["tensors"])
        assert sum(tensor["packed_bytes"] for tensor in point["tensors"]) < point["gguf_bytes"]
        assert sum(tensor["coded_bytes"] for tensor in point["tensors"]) < point["coded_bytes"]
        for kind in point["kinds"]:
            if kind["counts"]:
                assert sum(kind["counts"]) == kind["n_weights"]


def test_searches_stay_within_their_measurements(tiny_report: Made) -> None:
    tuned = [point for point in tiny_report.document["points"] if point["kind"] == "tuned"]
    assert 1 <= len(tuned) <= 4 * len(BUDGETS)
    for choice in tiny_report.document["budgets"]:
        within = [point for point in tuned if point["ratio"]["value"] - 1 <= choice["percent"] / 100]
        best = min(within, key=lambda point: point["coded_bytes"], default=None)
        found = next((point for point in tuned if point["id"] == choice["tuned"]), None)
        assert (best is None) == (found is None)
        assert best is None or found is None or best["coded_bytes"] == found["coded_bytes"]
    assert FakeQuantizer.open == 0


def test_nothing_is_left_but_points(tiny_report: Made) -> None:
    found = files(tiny_report.folder)
    assert {"report.json", "report.md", "report.html"} < found
    assert all(name.startswith("points" + os.sep) for name in found - {"report.json", "report.md", "report.html"})
    assert sorted(os.listdir(tiny_report.folder)) == ["points", "report.html", "report.json", "report.md"]


def test_second_run_measures_nothing(tiny_report: Made, calls: dict[str, list[Any]]) -> None:
    names = ("report.json", "report.md", "report.html")
    before = {name: (tiny_report.folder / name).read_bytes() for name in names}
    n_quantized = len(FakeQuantizer.quantized)
    report = tiny_report.again(tiny_report.folder, page=True)
    assert not any(calls.values())
    assert len(FakeQuantizer.quantized) == n_quantized
    assert report.measurements.n_measured == 0
    assert report.measurements.n_reused == len(tiny_report.document["points"])
    assert {name: (tiny_report.folder / name).read_bytes() for name in names} == before


def test_second_run_adds_what_is_new(tiny_report: Made, calls: dict[str, list[Any]]) -> None:
    report = tiny_report.again(tiny_report.folder, options={"formats": (*FORMATS, "q5_0")})
    assert [len(calls[name]) for name in ("quantize", "encode", "compare")] == [1, 1, 1]
    assert len(calls["perplexity"]) == 1  # the base logits were deleted
    assert len(calls["capture"]) == 1  # and so were the Hessians
    assert calls["curvature"] == []  # that is for tuned points only
    assert [point["name"] for point in report.document["points"] if point["kind"] == "stock"] == [*FORMATS, "Q5_0"]


def test_other_text_or_context_is_measured_anew(tiny_report: Made, calls: dict[str, list[Any]]) -> None:
    tiny_report.again(tiny_report.folder, options={"n_chunks": 2, "formats": ("Q8_0",), "tuned": False})
    assert len(calls["compare"]) == 1
    assert tiny_report.again(tiny_report.folder).measurements.n_measured == 0


def test_same_inputs_give_the_same_bytes(tiny_report: Made, tmp_path: Path) -> None:
    again = tiny_report.again(tmp_path, page=True)
    for name in ("report.md", "report.html"):
        assert (tmp_path / name).read_bytes() == (tiny_report.folder / name).read_bytes()

    def without_times(path: Path) -> Any:
        document = json.loads(path.read_text(encoding="utf-8"))
        for point in document["points"]:
            del point["seconds"]
        return document

    assert without_times(tmp_path / "report.json") == without_times(tiny_report.folder / "report.json")
    assert again.measurements.n_reused == 0


def test_kept_files_serve_the_next_run(tiny_report: Made, tmp_path: Path, calls: dict[str, list[Any]]) -> None:
    options = {"formats": ("Q8_0",), "tuned": False, "keep": True, "keep_models": True}
    tiny_report.again(tmp_path, options=options)
    kept = files(tmp_path)
    assert sum(name.endswith(".logits") for name in kept) == 1
    assert sum(name.startswith("hessian-") for name in kept) == 1
    assert sum(name.endswith(".gguf") for name in kept) == 1
    assert sum(name.endswith(".lw") for name in kept) == 2
    tiny_report.again(tmp_path, options={**options, "formats": ("Q8_0", "Q4_1")})
    assert [len(calls[name]) for name in ("perplexity", "capture", "quantize")] == [1, 1, 2]
    tiny_report.again(tmp_path, options={**options, "keep": False})
    assert not any(name.endswith((".logits", ".safetensors")) for name in files(tmp_path))


def test_interrupted_run_leaves_whole_files_that_are_used(
    tiny_report: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: dict[str, list[Any]]
) -> None:
    measure = Judge.measure

    def stop(self: Judge, model: str, kind: str, name: str, *rest: Any) -> Any:
        if name == "Q4_0":
            raise KeyboardInterrupt
        return measure(self, model, kind, name, *rest)

    monkeypatch.setattr(Judge, "measure", stop)
    with pytest.raises(KeyboardInterrupt):
        tiny_report.again(tmp_path)
    left = files(tmp_path)
    assert sum(name.startswith("points") for name in left) == 2
    assert all(name.startswith(("points", "base-", "hessian-")) for name in left)
    monkeypatch.setattr(Judge, "measure", measure)
    report = tiny_report.again(tmp_path, options={"tuned": False})
    assert (report.measurements.n_reused, report.measurements.n_measured) == (2, 1)
    assert len(calls["perplexity"]) == len(calls["capture"]) == 1
    assert [len(calls[name]) for name in ("quantize", "compare")] == [3, 2]


def test_format_that_fails_is_left_out(tiny_report: Made, tmp_path: Path) -> None:
    said: list[str] = []

    class Watcher(SilentWatcher):
        def left_out(self, name: str, reason: str) -> None:
            said.append(name)

    options = {"formats": ("IQ2_XXS", "Q8_0"), "tuned": False}
    report = tiny_report.again(tmp_path, calibration=None, options=options, watcher=Watcher())
    assert said == ["IQ2_XXS"]
    assert "needs an imatrix" in report.document["left_out"][0]["reason"]
    assert [point["name"] for point in report.document["points"]] == ["source", "Q8_0"]
    assert report.document["points"][1]["tensors"][0]["error_kind"] == "plain"
    with pytest.raises(QuantizationError, match="there is no type 'Q9'"):
        tiny_report.again(tmp_path, options={"formats": ("Q9",)})


def test_without_hessians_or_quantizer_tuned_points_are_left_out(
    tiny_report: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tiny_report.again(tmp_path, calibration=None, options={"formats": ("Q8_0",)})
    assert [row["name"] for row in report.document["left_out"]] == ["tuned"]
    assert "needs to know the inputs" in report.document["left_out"][0]["reason"]
    monkeypatch.setattr("tests.reports.conftest.FakeQuantizer.quantize", _fail)
    report = tiny_report.again(tmp_path, options={"formats": ("Q8_0",)})
    assert report.document["left_out"] == [{"name": "tuned", "reason": "no such layer"}]
    assert all(name.startswith(("points", "report")) for name in files(tmp_path))


def _fail(*_: Any, **__: Any) -> None:
    raise QuantizationError("no such layer")


def test_files_take_the_place_of_measuring(tiny_report: Made, tmp_path: Path, calls: dict[str, list[Any]]) -> None:
    options = {"formats": (), "budgets": (50.0,), "keep": True}
    first = tiny_report.again(tmp_path / "a", options=options)
    assert [len(calls[name]) for name in ("capture", "curvature")] == [1, 1]
    known = {path.name.split("-")[0]: path for path in (tmp_path / "a").glob("*.safetensors")}
    assert set(known) == {"hessian", "curvature"}
    given = {"hessians": known["hessian"], "curvature": known["curvature"]}
    second = tiny_report.again(tmp_path / "b", calibration=None, options=options, **given)
    assert [len(calls[name]) for name in ("capture", "curvature")] == [1, 1]
    for one, other in zip(first.measurements.points, second.measurements.points, strict=True):
        assert (one.coded_bytes, one.ppl, one.tensors) == (other.coded_bytes, other.ppl, other.tensors)
    assert (first.document["tuned_calibration"]["kind"], second.document["tuned_calibration"]["kind"]) == ("curvature",) * 2
    only = tiny_report.again(tmp_path / "c", calibration=None, options=options, hessians=known["hessian"])
    assert only.document["tuned_calibration"]["kind"] == "hessian"
    with pytest.raises(LazyWeightsError, match="holds no curvature"):
        tiny_report.again(tmp_path / "d", calibration=None, options=options, curvature=known["hessian"])


def test_unknown_gradients_leave_the_hessians(
    tiny_report: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: dict[str, list[Any]]
) -> None:
    monkeypatch.setattr(calibration.curvatures, "measure_curvature", _fail)
    report = tiny_report.again(tmp_path, options={"formats": (), "budgets": (50.0,)})
    assert report.document["left_out"] == []
    assert len(calls["capture"]) == 1


def test_damaged_points_are_measured_again(tiny_report: Made, tmp_path: Path) -> None:
    options = {"formats": ("Q8_0",), "tuned": False}
    tiny_report.again(tmp_path, options=options)
    for path in (tmp_path / "points").iterdir():
        path.write_bytes(path.read_bytes()[:100] if path.name.startswith("stock") else b"[1, 2]")
    report = tiny_report.again(tmp_path, options=options)
    assert report.measurements.n_measured == 2
    assert list(PointStore(tmp_path / "points").of_family("x")) == []


def test_coded_source_gives_the_same_points(tiny_report: Made, tmp_path: Path) -> None:
    import lazyweights
    from lazyweights.reports.model_report import ReportOptions, measure_model

    coded = tmp_path / "tiny.gguf.lw"
    lazyweights.encode(tiny_report.model, coded)
    options = ReportOptions(n_ctx=64, n_chunks=4, formats=("Q8_0",), tuned=False)
    found = measure_model(coded, tiny_report.text, tmp_path / "a", options=options).points
    plain = measure_model(tiny_report.model, tiny_report.text, tmp_path / "b", options=options).points
    for one, other in zip(found, plain, strict=True):
        assert one.tensors == other.tensors
        assert (one.gguf_bytes, one.coded_bytes) == (other.gguf_bytes, other.coded_bytes)
        assert (one.ppl, one.kld) == (other.ppl, other.kld)


def test_wrong_inputs(tiny_report: Made, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one of them is enough"):
        tiny_report.again(tmp_path, hessians=tiny_report.text)
    with pytest.raises(LazyWeightsError):
        tiny_report.again(tmp_path, calibration=None, hessians=tiny_report.model)
    assert files(tmp_path) == set()
