"""Exit codes, help, and errors that concern no verb in particular."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import lazyweights
from lazyweights.cli import encode
from tests.cli.conftest import REPOSITORY, environment, run_process, start

VERBS = ("encode", "decode", "verify", "inspect", "perplexity", "run", "exec", "capture", "stock-quantize", "simulate")


def test_version_is_that_of_the_project(lw):
    declared = re.search(r'^version = "(.+)"$', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None
    assert lazyweights.__version__ == declared[1]
    assert lw("--version").text == f"lazyweights {declared[1]}\n"


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_examples(lw, verb):
    outcome = lw(verb, "--help")
    assert outcome.code == 0
    assert f"lazyweights {verb} " in outcome.text.split("examples:")[1]


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("explode",),
        ("encode",),
        ("encode", "--preset", "tiny", "m.gguf"),
        ("encode", "-T", "-1", "m.gguf"),
        ("encode", "-T", "many", "m.gguf"),
        ("encode", "-"),
        ("encode", "-o", "-", "m.gguf"),
        ("encode", "--rm", "--no-verify", "m.gguf"),
        ("encode", "-o", "x", "a.gguf", "b.gguf"),
        ("decode", "-o", "x", "a.lw", "b.lw"),
        ("decode", "-c", "-o", "x", "a.lw"),
        ("decode", "--rm", "-c", "a.lw"),
        ("decode", "--rm", "-"),
        ("verify", "-"),
        ("verify", "--against", "m.gguf", "a.lw", "b.lw"),
        ("verify", "--against", "m.gguf", "."),
        ("inspect", "-"),
        ("inspect", "--json", "--markdown", "m.gguf"),
        ("inspect", "--json-array", "--hash", "m.gguf"),
        ("run", "m.gguf"),
        ("run", "m.gguf", "-p", "x", "-f", "y"),
        ("run", "m.gguf", "-p", "x", "--seed", "-2"),
        ("run", "m.gguf", "-p", "x", "-c", "-1"),
        ("run", "m.gguf", "-p", "x", "--repeat-penalty", "0"),
        ("exec", "m.gguf"),
        ("exec", "m.gguf", "--", "ls"),
    ],
)
def test_usage_errors(lw, argv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = lw(*argv)
    assert outcome.code == 2
    assert outcome.stderr
    assert not outcome.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("flag", "verb"), [("-d", "decode"), ("-t", "verify"), ("-l", "inspect")])
def test_short_verbs(lw, flag, verb):
    assert lw(flag, "--help").text == lw(verb, "--help").text


def test_python_m_lazyweights_help_is_quick_to_load():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "lazyweights", "--help"],
        capture_output=True,
        env=environment(),
        check=True,
        text=True,
    )
    loaded = {line.split("|")[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "lazyweights" in loaded
    assert not loaded & {"numpy", "numba", "rich", "zstandard", "xxhash", "gguf", "llama_cpp"}
    assert done.stdout.startswith("usage: lazyweights")


def test_unexpected_exception_is_one_line(lw, model, monkeypatch):
    def fail(path: str) -> None:
        raise ZeroDivisionError("of all\nthings")

    monkeypatch.setattr(encode, "require_gguf", fail)
    outcome = lw("encode", model)
    assert outcome.code == 1
    assert outcome.stderr.count("\n") == 1
    assert "internal error: ZeroDivisionError: of all\\nthings" in outcome.stderr


def test_keyboard_interrupt_is_130(lw, model, monkeypatch):
    def interrupt(path: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(encode, "require_gguf", interrupt)
    outcome = lw("encode", model)
    assert (outcome.code, outcome.stderr) == (130, "lazyweights: interrupted\n")


def test_reader_that_goes_away_is_no_error(model):
    with start("inspect", "--json", *[model] * 100) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_control_characters_of_names_do_not_reach_the_terminal(lw, tmp_path):
    evil = tmp_path / "a\x1b[31m\nb.gguf"
    evil.write_bytes(b"no model")
    outcome = lw("inspect", evil)
    assert outcome.code == 1
    assert "a\\x1b[31m\\nb.gguf" in outcome.stderr
    assert outcome.stderr.count("\n") == 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /dev/full")
def test_full_standard_output(coded):
    with open("/dev/full", "wb") as full:
        for argv in (("inspect", coded), ("decode", "-c", coded)):
            outcome = run_process(*argv, stdout=full)
            assert outcome.code == 1
            assert outcome.stderr.count("\n") == 1
            assert "No space left on device" in outcome.stderr
