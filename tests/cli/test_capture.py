"""``lazyweights capture`` and ``lazyweights stock-quantize``: what they print and refuse."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lazyweights.cli.capture import byte_count
from tests.cli.conftest import Outcome, run_process, start

Run = Callable[..., Outcome]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A tiny model, and ``text.txt`` beside it."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from tests.llama.tiny_model import write_tiny_model

    (tmp_path / "text.txt").write_bytes(b"The rain in there went on; the hens ran to their den. " * 20)
    return write_tiny_model(tmp_path / "tiny.gguf", n_embedding=256)


def test_capture_prints_what_it_did(lw: Run, tiny: Path) -> None:
    out, text = tiny.with_name("out"), tiny.with_name("text.txt")
    outcome = lw("capture", tiny, "-f", text, "-o", out, "-c", 64, "--chunks", 2)
    assert outcome.code == 0, outcome.stderr
    lines = outcome.stderr.splitlines()
    assert lines[0].startswith(f"{out}: Hessians of 15 weights with 9 inputs, ")
    assert lines[1].startswith("128 tokens (2 chunks of 64, with BOS); llama-cpp-python ")
    assert re.fullmatch(
        r"1 pass, [\d.]+ MB of sums, peak resident set [\d.]+ [MG]B, [\d.]+ s; 0 rows dropped \(not finite\)", lines[2]
    )
    again = lw("capture", tiny, "-f", text, "-o", out)
    assert again.code == 1
    assert "the output exists already" in again.stderr


def test_capture_in_passes(lw: Run, tiny: Path) -> None:
    outcome = lw(
        "capture", tiny, "-f", tiny.with_name("text.txt"), "-o", tiny.with_name("out"), "-c", 64, "--chunks", 1,
        "--max-memory", "3M", "--dtype", "f32",
    )  # fmt: skip
    assert outcome.code == 0, outcome.stderr
    assert re.search(r"^\d+ passes, ", outcome.stderr, re.MULTILINE)


@pytest.mark.parametrize(("name", "kind"), [("i.gguf", "gguf"), ("i.dat", "dat")])
def test_suffix_chooses_an_imatrix(lw: Run, tiny: Path, name: str, kind: str) -> None:
    outcome = lw("capture", tiny, "-f", tiny.with_name("text.txt"), "-o", tiny.with_name(name), "-c", 64)
    assert outcome.code == 0, outcome.stderr
    assert f"{name}: imatrix ({kind}) of 14 weights with 8 inputs, " in outcome.stderr
    used = lw("stock-quantize", tiny, tiny.with_name("q.gguf"), "q4_k_m", "--imatrix", tiny.with_name(name))
    assert used.code == 0, used.stderr
    assert re.search(
        r"q\.gguf: Q4_K_M, [\d.]+ [kM]B -> [\d.]+ [kM]B, [\d.]+ -> [\d.]+ bits per weight, imatrix of 14 weights, [\d.]+ s\n$",
        used.stderr,
    )


def test_verbose_shows_what_llama_cpp_says(tiny: Path) -> None:
    outcome = run_process("stock-quantize", "-v", tiny, tiny.with_name("q.gguf"), "Q8_0")
    assert outcome.code == 0
    assert "blk.0.attn_q.weight" in outcome.stderr
    assert "converting to q8_0" in outcome.stderr


def test_quiet_says_nothing(lw: Run, tiny: Path) -> None:
    text = tiny.with_name("text.txt")
    assert lw("capture", "-q", tiny, "-f", text, "-o", tiny.with_name("i.gguf"), "-c", 64) == Outcome(0, b"", "")
    assert lw("stock-quantize", "-q", tiny, tiny.with_name("q.gguf"), "Q8_0") == Outcome(0, b"", "")


@pytest.mark.parametrize(
    "argv",
    [
        ("capture", "m.gguf", "-o", "out"),
        ("capture", "m.gguf", "-f", "t"),
        ("capture", "m.gguf", "-f", "t", "-o", "i.gguf", "--kind", "hessian"),
        ("capture", "m.gguf", "-f", "t", "-o", "out", "--imatrix-format", "dat", "--kind", "samples"),
        ("capture", "m.gguf", "-f", "t", "-o", "out", "--process-output"),
        ("capture", "m.gguf", "-f", "t", "-o", "out", "--max-memory", "lots"),
        ("capture", "m.gguf", "-f", "t", "-o", "out", "--chunks", "0"),
        ("stock-quantize", "m.gguf", "out.gguf"),
    ],
)
def test_usage_errors(lw: Run, argv: tuple[str, ...]) -> None:
    assert lw(*argv).code == 2


def test_errors_are_one_line(lw: Run, tiny: Path, tmp_path: Path) -> None:
    for argv, reason in (
        (("capture", tmp_path / "no.gguf", "-f", tiny.with_name("text.txt"), "-o", tmp_path / "out"), "No such file"),
        (("capture", tiny, "-f", tmp_path / "no.txt", "-o", tmp_path / "out"), "cannot read"),
        (("stock-quantize", tiny, tmp_path / "out", "Q4_9"), "no type 'Q4_9'"),
        (("stock-quantize", tiny, tmp_path / "out", "iq1_s"), "needs an imatrix"),
    ):
        outcome = lw(*argv)
        assert outcome.code == 1
        assert reason in outcome.stderr
        assert outcome.stderr.startswith("lazyweights: ERROR ")
        assert outcome.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_without_llama_cpp_one_sentence_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"text")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    blocked = "import sys; sys.modules['llama_cpp'] = None; from lazyweights.cli.main import main; sys.exit(main())"
    for argv in (("capture", "m.gguf", "-f", "t", "-o", "out"), ("stock-quantize", "m.gguf", "out", "Q4_0")):
        outcome = run_process(*argv, driver=blocked, cwd=tmp_path)
        assert outcome.code == 1
        assert "pip install 'lazyweights[llama]'" in outcome.stderr
        assert outcome.stderr.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == ["m.gguf", "t"]


SLOW = """
import contextlib, sys, time
from lazyweights.cli import capture, stock_quantize
from lazyweights.cli.main import main

@contextlib.contextmanager
def slow_bar(name, enabled):
    def update(n_done, n_total, stage):
        print("busy", flush=True)
        time.sleep(0.5)
    yield update

capture.step_bar = stock_quantize.step_bar = slow_bar
sys.exit(main())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("verb", ["capture", "stock-quantize"])
def test_signals_leave_nothing(tiny: Path, verb: str, number: int, code: int) -> None:
    before = sorted(os.listdir(tiny.parent))
    argv = ("tiny.gguf", "-f", "text.txt", "-o", "out", "-c", "64") if verb == "capture" else ("tiny.gguf", "out", "Q4_K_M")
    with start(verb, *argv, driver=SLOW, cwd=tiny.parent) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"busy\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert b"Traceback" not in err
    assert sorted(os.listdir(tiny.parent)) == before


def test_sizes() -> None:
    assert byte_count("2.5G") == 2_500_000_000
    assert byte_count("1024") == 1024
