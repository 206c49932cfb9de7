"""The tables of the documentation: `benchmarks/tables.py`, and that it has been run."""

from __future__ import annotations

import doctest
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

ENVIRONMENT = {
    "date": "2026-01-02", "commit": "0123456789abcdef", "modified": False, "machine": {"processor": "CPU", "cores": 2},
}  # fmt: skip
SIZES = {
    **ENVIRONMENT,
    "rows": [
        {"label": "model", "bytes": 2_000_000, "sizes": {"dense": 1_500_000, "zstd -3": 1_900_000}, "bpw_before": 4.5,
         "bpw_after": 3.375, "saving": 0.25},
    ],
}  # fmt: skip
DOCUMENT = "before\n<!-- table: sizes -->\n<!-- /table -->\nbetween\n<!-- table: speed -->\nold\n<!-- /table -->\nafter\n"


def load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


tables = load("benchmark_tables", REPOSITORY / "benchmarks" / "tables.py")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "sizes.json").write_text(json.dumps(SIZES))
    (tmp_path / "README.md").write_text(DOCUMENT, encoding="utf-8")
    (tmp_path / "docs" / "plain.md").write_text("no table\n")
    return tmp_path


def test_filling_twice_changes_nothing(repository: Path) -> None:
    readme = repository / "README.md"
    stale = tables.stale_documents(repository)
    assert list(stale) == [readme]
    readme.write_text(stale[readme], encoding="utf-8")
    assert tables.stale_documents(repository) == {}


def test_fills_what_has_results_and_leaves_the_rest(repository: Path) -> None:
    filled = tables.stale_documents(repository)[repository / "README.md"]
    assert "| model | 2.00 | **1.50** | – | 1.90 | – | – | 4.500 → 3.375 | 25.00 % |\n" in filled
    assert "CPU, 2 cores; commit 01234567, 2026-01-02" in filled
    head, tail = DOCUMENT.split("<!-- table: sizes -->\n")
    assert filled.startswith(head + "<!-- table: sizes -->\n| model |")
    assert filled.endswith(tail)


def test_changed_figure_makes_a_document_stale(repository: Path) -> None:
    readme = repository / "README.md"
    readme.write_text(tables.stale_documents(repository)[readme].replace("1.50", "1.40"), encoding="utf-8")
    assert list(tables.stale_documents(repository)) == [readme]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<!-- table: sises -->\n<!-- /table -->", "there is no table sises"),
        ("<!-- table: sizes -->\n", "lacks its other end"),
        ("<!-- /table -->\n", "lacks its other end"),
        ("<!-- table: sizes -->\n<!-- table: sizes -->\n<!-- /table -->", "lacks its other end"),
        ("<!-- table: sizes --> <!-- /table -->", "on a line of its own"),
    ],
)
def test_wrong_markers(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tables.fill(text, {"sizes": "new\n"})


def test_doctests() -> None:
    found = doctest.testmod(tables)
    assert found.attempted > 0
    assert found.failed == 0


def test_documents_show_the_committed_results() -> None:
    stale = [str(path.relative_to(REPOSITORY)) for path in tables.stale_documents(REPOSITORY)]
    assert not stale, "run benchmarks/tables.py"
