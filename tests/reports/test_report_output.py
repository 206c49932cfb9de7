"""What is written: JSON, Markdown and page say the same, and the page is whole and loads nothing."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lazyweights.reports import inline_svg, report_plots
from lazyweights.reports.comparison import at_equal_kld, choose
from lazyweights.reports.model_report import Measurements, ReportOptions
from lazyweights.reports.points import Point, PointStore, point_key
from lazyweights.reports.report_data import build_document, document_json, shown_points, split_name
from lazyweights.reports.report_markdown import document_markdown
from lazyweights.reports.report_page import document_page
from lazyweights.reports.report_tables import budget_table, file_table, headline, percent, with_error
from tests.reports.conftest import Made
from tests.reports.hand_made import point, tensor

VOID = {"area", "base", "br", "col", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


class Page(HTMLParser):
    """Elements of a page; complains where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, attrs)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page(tiny_report: Made) -> str:
    return (tiny_report.folder / "report.html").read_text(encoding="utf-8")


def test_page_is_well_formed(page: str) -> None:
    assert page.startswith("<!doctype html>")
    parsed = Page(page)
    identifiers = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))
    links = [str(attributes["href"]) for _, attributes in parsed.elements if "href" in attributes]
    targets = {link[1:] for link in links if link.startswith("#")}
    targets |= set(re.findall(r"url\(#([^)]+)\)", page))
    assert targets <= set(identifiers)


def test_page_loads_nothing(page: str) -> None:
    parsed = Page(page)
    for tag, attributes in parsed.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        for name in ("src", "srcset", "data", "action", "poster"):
            assert name not in attributes, (tag, attributes)
        assert str(attributes.get("href") or attributes.get("xlink:href") or "#").startswith("#")
    assert "http://" not in page
    assert "https://" not in page
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)


def test_page_follows_the_theme(page: str) -> None:
    defined = set(re.findall(r"(--[\w-]+):", page))
    assert set(re.findall(r"var\((--[\w-]+)\)", page)) <= defined
    assert "prefers-color-scheme: dark" in page
    assert not re.search(r"#000[01f][0-9a-f]{2}\b", page.split("</style>", 1)[1])


def test_page_has_all_files(tiny_report: Made, page: str) -> None:
    for row in tiny_report.document["points"]:
        assert len(re.findall(f'<tr data-point="{row["id"]}" data-kind="{row["kind"]}"', page)) >= 2
    marks = set(re.findall(r'class="mark" data-point="([^"]+)" data-part="(\w+)"><title>[^<]+</title>', page))
    for row in tiny_report.document["points"][1:]:
        assert (row["id"], "coded") in marks
    assert page.count('<div class="wide"><svg') == page.count('<div class="narrow"><svg') >= 4


def markdown_rows(text: str, heading: str) -> list[dict[str, str]]:
    """Rows of the table below a heading; headings that occur twice get a number."""
    lines = text.split(f"\n## {heading}\n")[1].split("\n#")[0].strip().splitlines()
    lines = [line for line in lines if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    names = [f"{name}{cells[0][:k].count(name) or ''}" for k, name in enumerate(cells[0])]
    return [dict(zip(names, row, strict=True)) for row in cells[2:]]


def numbers(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"[+-]?\d+(?:\.\d+)?", text.replace("−", "-"))]


def test_markdown_numbers_are_those_of_the_json(tiny_report: Made) -> None:
    document = json.loads((tiny_report.folder / "report.json").read_text(encoding="utf-8"))
    text = (tiny_report.folder / "report.md").read_text(encoding="utf-8")
    rows = markdown_rows(text, "All files")
    assert len(rows) == 2 * len(document["points"])
    for k, row in enumerate(rows):
        found = document["points"][k // 2]
        size, bpw = ("coded_bytes", "coded_bpw") if k % 2 else ("gguf_bytes", "bpw")
        assert row["model"] == found["name"]
        assert numbers(row["size"])[0] == pytest.approx(found[size] / 1e3, abs=0.051)
        assert numbers(row["bpw"])[0] == pytest.approx(found[bpw], abs=0.00051)
        assert numbers(row["perplexity"]) == pytest.approx([found["ppl"]["value"], found["ppl"]["error"]], abs=0.00051)
        if found["kind"] == "source":
            continue
        over = [100 * (found["ratio"]["value"] - 1), 100 * found["ratio"]["error"]]
        assert numbers(row["over source"]) == pytest.approx(over, abs=0.0051)
        assert over[0] == pytest.approx(found["increase_percent"])
        assert numbers(row["KLD"]) == pytest.approx([found["kld"]["value"], found["kld"]["error"]], abs=0.0000051)
        assert numbers(row["KLD 99 %"])[0] == pytest.approx(found["kld_quantiles"]["99.0%"], abs=0.00051)
        top = [100 * found["same_top"]["value"], 100 * found["same_top"]["error"]]
        assert numbers(row["same top"]) == pytest.approx(top, abs=0.051)
    points = {found["id"]: found for found in document["points"]}
    for row, choice in zip(markdown_rows(text, "Within a budget of perplexity"), document["budgets"], strict=True):
        assert numbers(row["budget"]) == [choice["percent"]]
        for name, size, role, key in (
            ("smallest stock GGUF", "size", "stock", "gguf_bytes"),
            ("smallest coded stock file", "size1", "coded_stock", "coded_bytes"),
            ("smallest tuned file", "size2", "tuned", "coded_bytes"),
        ):
            if choice[role] is None:
                assert (row[name], row[size]) == ("none", "–")
                continue
            assert row[name].startswith(points[choice[role]]["name"] + " (")
            assert numbers(row[size])[0] == pytest.approx(points[choice[role]][key] / 1e3, abs=0.051)
        if choice["saving"] is not None:
            assert numbers(row["saved over stock"])[0] == pytest.approx(100 * choice["saving"], abs=0.051)
            assert numbers(row["saved over coded stock"])[0] == pytest.approx(100 * choice["saving_over_coded"], abs=0.051)


def test_json_has_no_path_and_says_its_version(tiny_report: Made) -> None:
    text = (tiny_report.folder / "report.json").read_text(encoding="utf-8")
    document = json.loads(text)
    assert (document["schema"], document["schema_version"]) == ("lazyweights.report", 1)
    assert document == tiny_report.document
    for name in ("report.json", "report.md", "report.html"):
        assert str(tiny_report.model.parent) not in (tiny_report.folder / name).read_text(encoding="utf-8")
    assert {"processor", "cores", "system", "python"} == set(document["machine"])


# Hand-made points.

TENSORS = (
    *(tensor(f"blk.{layer}.{kind}.weight", counts=[layer + 1, 5, 2]) for layer in range(3) for kind in ("attn_q", "ffn_up")),
    tensor("token_embd.weight"), tensor("output_norm.weight", kind="F32", counts=[], error=None),
)  # fmt: skip
SOURCE = point("source", 4_000_000, 3_000_000, 0.0, None, kind="source", tensors=TENSORS)


def made_document(points: list[Point], tmp_path: Path, **options: Any) -> dict[str, Any]:
    from tests.make_gguf import build_gguf

    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    model = tmp_path / "m.gguf"
    model.write_bytes(build_gguf([], {"general.architecture": "llama", "general.name": 'A <b>"model"</b> | & more'}))
    measured = Measurements(points, [("Q9|<i>", "no <such>")], None, None, 1, 1)
    return build_document(measured, model, "t.txt", ReportOptions(**options))


def test_points_without_numbers(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    broken = point("broken", 1_000_000, 900_000, math.nan, math.nan, tensors=TENSORS)
    lucky = point("lucky", 2_000_000, 1_900_000, -0.01, 0.02, tensors=TENSORS)
    document = made_document([SOURCE, broken, lucky], tmp_path)
    text = document_json(document)
    assert json.loads(text) == document
    markdown = document_markdown(document)
    assert "lucky (−1.00 ± 0.20 %)" in markdown
    assert "nan" not in markdown
    html = document_page(document)
    Page(html)
    assert "<b>" not in html
    assert "<i>" not in html
    assert "At equal KLD" not in html
    assert "the smallest stock file is lucky" in headline(document)


def test_nothing_but_the_source(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    document = made_document([SOURCE], tmp_path)
    Page(document_page(document))
    assert headline(document) == "No stock format keeps any of the budgets."
    assert report_plots.perplexity_plot(document) is report_plots.kld_plot(document) is report_plots.budget_plot(document) is None


def test_tuned_columns_come_with_tuned_points(tmp_path: Path) -> None:
    stock = point("Q8_0", 2_000_000, 1_900_000, 0.004)
    ours = point("tuned 1", 2_000_000, 1_000_000, 0.009, kind="tuned")
    without, with_tuned = (made_document(points, tmp_path) for points in ([SOURCE, stock], [SOURCE, stock, ours]))
    assert len(budget_table(with_tuned).columns) == len(budget_table(without).columns) + 4
    assert headline(with_tuned).endswith("50.0 % less than the stock file and 47.4 % less than the coded one.")
    assert [row.is_coded for row in file_table(with_tuned).rows] == [False, True] * 3
    assert with_tuned["shown"] == ["tuned-1", "stock-Q8_0"]


def test_shown_points_are_few() -> None:
    points = [SOURCE, *(point(f"Q{k}", 100 - k, 90 - k, 0.01 * k) for k in range(1, 12))]
    found = shown_points(points, choose(points, [float(k) for k in range(1, 12)]))
    assert [shown.name for shown in found] == [f"Q{k}" for k in range(1, 9)]
    assert [shown.name for shown in shown_points(points, choose(points, [0.1]))] == [f"Q{k}" for k in range(1, 9)]


def test_one_budget_table_row_is_all_that_equal_kld_needs() -> None:
    assert at_equal_kld([SOURCE]) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [("blk.12.ffn_down.weight", (12, "ffn_down")), ("token_embd.weight", (None, "token_embd")), ("blk.x.a", (None, "blk.x.a")),
     ("blk.0.attn_q.bias", (0, "attn_q.bias"))],
)  # fmt: skip
def test_names_of_tensors(name: str, expected: tuple[int | None, str]) -> None:
    assert split_name(name) == expected


def test_figures_are_the_same_each_time() -> None:
    pytest.importorskip("matplotlib")

    def paint(figure: Any) -> None:
        axes = figure.subplots()
        axes.plot([1, 2], [3, 4], "o", color=inline_svg.TUNED, gid=inline_svg.mark_gid("step-1.2345", "b"))
        axes.set_title('x < "y" & z 0.00123')

    first, second = (inline_svg.draw(paint, (3, 2), "f", 'a "label"', {"step-1.2345:b": "<title>"}) for _ in range(2))
    assert first == second
    Page(first)
    assert "var(--tuned)" in first
    assert 'data-point="step-1.2345"' in first
    assert "0.00123" in first
    assert not re.search(r' d="[^"]*\.\d\d\d', first)
    assert "<title>&lt;title&gt;</title>" in first
    assert "font-family" not in first
    assert not re.search(r"\d{4}-\d\d-\d\d", first)


# Points on disk.


def test_points_come_back(tmp_path: Path) -> None:
    store = PointStore(tmp_path / "points")
    saved = point("Q8_0", 2_000_000, 1_900_000, 0.004, tensors=TENSORS)
    broken = point("Q2", 1, 1, math.nan)
    assert store.load(saved.key) is None
    assert list(store.of_family("f")) == []
    for one in (SOURCE, saved, broken):
        store.save(one)
    assert store.load(SOURCE.key) == SOURCE
    assert store.load(saved.key) == saved
    found = store.load(broken.key)
    assert found is not None
    assert math.isnan(found.ppl.value)
    assert not store.search_ended("s")
    store.end_search("s", {"budget": 1})
    assert store.search_ended("s")


def test_key_depends_on_everything() -> None:
    facts = {"a": 1, "b": {"c": [1, 2]}}
    keys = {point_key(f) for f in (facts, {**facts, "a": 2}, {**facts, "b": {"c": [2, 1]}}, {**facts, "d": None})}
    assert len(keys) == 4


def test_wording() -> None:
    assert with_error({"value": 0.1, "error": 0.01}, 2) == "0.10 ± 0.01"
    assert with_error(None, 2) == "–"
    assert percent(-0.123) == "−12.3 %"
