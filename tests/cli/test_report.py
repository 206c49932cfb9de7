"""``lazyweights report``: what it prints, writes and refuses."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Outcome

Run = Callable[..., Outcome]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A tiny model, and ``text.txt`` beside it."""
    for name in ("llama_cpp", "matplotlib", "jinja2"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    from tests.llama.tiny_model import write_tiny_model

    (tmp_path / "text.txt").write_bytes(b"The rain in there went on; the hens ran to their den. " * 20)
    return write_tiny_model(tmp_path / "tiny.gguf")


def test_report(lw: Run, tiny: Path) -> None:
    folder, text = tiny.with_name("report"), tiny.with_name("text.txt")
    command = ("report", tiny, "-f", text, "-o", folder, "-c", 64, "--chunks", 2, "--formats", "Q8_0,q4_0", "--budgets", "1,50",
               "--no-tuned", "--calibration", text, "--calibration-chunks", 1)  # fmt: skip
    outcome = lw(*command)
    assert outcome.code == 0, outcome.stderr
    lines = outcome.stderr.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == ["source", "Q8_0", "Q4_0"]
    assert re.fullmatch(
        r"Q8_0: [\d.]+ kB, coded [\d.]+ kB, PPL [\d.]+ \([+-][\d.]+ %\), KLD 0\.\d{5}; [\d.]+ s", lines[1]
    )
    assert lines[-1].endswith(f"report.html: 3 points measured, 0 taken from {folder}")
    assert sorted(os.listdir(folder)) == ["points", "report.html", "report.json", "report.md"]
    document = json.loads((folder / "report.json").read_bytes())
    assert [choice["percent"] for choice in document["budgets"]] == [1, 50]
    assert document["calibration"]["n_chunks"] == 1
    again = lw(*command)
    assert again.stderr.splitlines()[1].endswith("taken from the folder")
    assert again.stderr.splitlines()[-1].endswith(f"0 points measured, 3 taken from {folder}")
    assert lw(*command, "-q") == Outcome(0, b"", "")


def test_format_that_fails_makes_the_command_fail(lw: Run, tiny: Path) -> None:
    folder = tiny.with_name("report")
    outcome = lw(
        "report", tiny, "-f", tiny.with_name("text.txt"), "-o", folder, "-c", 64, "--formats", "IQ1_S", "--no-tuned"
    )
    assert outcome.code == 1
    assert "ERROR IQ1_S is left out: IQ1_S needs an imatrix" in outcome.stderr
    assert (folder / "report.md").is_file()


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--formats", "Q9"), 1, "there is no type 'Q9'"),
        (("--formats", "Q8_0,,Q4_0"), 2, "is no list of formats"),
        (("--budgets", "1,x"), 2, "is no list of budgets"),
        (("--budgets", "0"), 2, "is no list of budgets"),
        (("--hessians", "a", "--calibration", "b"), 2, "not allowed with"),
        (("--hessians", "none.safetensors"), 1, "No such file"),
        (("-c", "3"), 2, "even and at least 4"),
    ],
)
def test_refused(lw: Run, tiny: Path, options: tuple[str, ...], code: int, said: str) -> None:
    folder = tiny.with_name("report")
    outcome = lw("report", tiny, "-f", tiny.with_name("text.txt"), "-o", folder, *options)
    assert outcome.code == code
    assert said in outcome.stderr
    assert not folder.exists()


def test_missing_files(lw: Run, tiny: Path) -> None:
    folder = tiny.with_name("report")
    outcome = lw("report", tiny, "-f", "missing.txt", "-o", folder)
    assert (outcome.code, outcome.stderr.count("\n")) == (1, 1)
    assert "cannot read the text" in outcome.stderr
    outcome = lw("report", "missing.gguf", "-f", tiny.with_name("text.txt"), "-o", folder)
    assert (outcome.code, outcome.stderr.count("\n")) == (1, 1)
    assert "missing.gguf: No such file" in outcome.stderr
    assert not folder.exists()


def test_without_extras(lw: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import util

    find_spec = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == "jinja2" else find_spec(name))
    outcome = lw("report", tiny, "-f", tiny.with_name("text.txt"), "-o", tiny.with_name("report"))
    assert outcome.code == 1
    assert "a report needs jinja2: pip install 'lazyweights[report]'" in outcome.stderr
