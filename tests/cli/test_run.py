"""``lazyweights run``: text on standard output, measures on standard error, no file."""

from __future__ import annotations

import io
import json
import os
import sys
from types import SimpleNamespace

import pytest

import lazyweights
from lazyweights.cli.run import _print_text
from tests.cli.conftest import run_process
from tests.llama.tiny_model import write_tiny_model

PROMPT = "the rain in an inn"

WITHOUT_LLAMA = """
import sys
sys.modules["llama_cpp"] = None
from lazyweights.cli.main import main
sys.exit(main())
"""

WATCHED = """
import os, sys
opened = []
def watch(event, values):
    if event == "open" and values[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and "__pycache__" not in str(values[0]):
        opened.append(str(values[0]))
sys.addaudithook(watch)
from lazyweights.cli.main import main
code = main()
print("written:", [name for name in opened if not name.startswith("/dev/")], file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("run") / "tiny.gguf", file_type="Q8_0")


@pytest.fixture(scope="module")
def tiny_coded(tiny):
    lazyweights.encode(tiny)
    return tiny.with_name("tiny.gguf.lw")


@pytest.fixture
def llama():
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: pip install 'lazyweights[llama]'")
    if not hasattr(os, "memfd_create"):
        pytest.skip("only Linux has anonymous memory files")


@pytest.mark.usefixtures("llama")
@pytest.mark.parametrize("options", [("--temp", 0), ("--temp", 0.8), ("--repeat-penalty", 1.2, "--top-k", 5)], ids=str)
def test_same_text(lw, tiny, tiny_coded, options):
    outcomes = [lw("run", path, "-p", PROMPT, "-n", 12, "--seed", 3, "-T", 1, *options) for path in (tiny, tiny_coded)]
    assert [outcome.code for outcome in outcomes] == [0, 0]
    assert outcomes[0].stdout == outcomes[1].stdout
    assert "GGUF file" in outcomes[0].stderr
    assert "coded file" in outcomes[1].stderr
    for word in ("load", "of it decoding", "prompt", "generation", "peak memory", "seed 3"):
        assert word in outcomes[1].stderr


@pytest.mark.usefixtures("llama")
def test_compare(lw, tiny, tiny_coded, tmp_path):
    outcome = lw("run", tiny_coded, "-p", PROMPT, "-n", 8, "-T", 1, "--compare", tiny)
    assert outcome.code == 0
    assert "the same " in outcome.stderr
    assert "ratio" in outcome.stderr
    other = write_tiny_model(tmp_path / "other.gguf", seed=1)
    outcome = lw("run", tiny_coded, "-p", PROMPT, "-n", 8, "--temp", 0, "-T", 1, "--compare", other)
    assert outcome.code == 1
    assert "the tokens differ after the first 0" in outcome.stderr


@pytest.mark.usefixtures("llama")
def test_json_and_prompts(lw, tiny_coded, tmp_path, monkeypatch):
    report = json.loads(lw("run", tiny_coded, "-p", PROMPT, "-n", 5, "-s", 1, "-T", 1, "--json").text)
    assert report["is_coded"]
    assert len(report["tokens"]) <= 5
    assert report["load_seconds"] > 0
    assert report["model_bytes"] == tiny_coded.with_suffix("").stat().st_size
    (tmp_path / "prompt").write_text(PROMPT + "\n")
    from_file = json.loads(lw("run", tiny_coded, "-f", tmp_path / "prompt", "-n", 5, "-s", 1, "-T", 1, "--json").text)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(PROMPT.encode())))
    from_stdin = json.loads(lw("run", tiny_coded, "-p", "-", "-n", 5, "-s", 1, "-T", 1, "--json").text)
    assert report["tokens"] == from_file["tokens"] == from_stdin["tokens"]
    assert report["n_prompt"] == from_stdin["n_prompt"]


@pytest.mark.usefixtures("llama")
def test_quiet(lw, tiny_coded):
    outcome = lw("run", "-q", tiny_coded, "-p", PROMPT, "-n", 5, "-T", 1)
    assert (outcome.code, outcome.stderr) == (0, "")
    assert outcome.stdout.endswith(b"\n")


@pytest.mark.usefixtures("llama")
def test_interrupted(lw, tiny_coded, monkeypatch):
    from lazyweights.llama.model import Context

    decode, calls = Context.decode, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        decode(*args)

    monkeypatch.setattr(Context, "decode", interrupted)
    outcome = lw("run", tiny_coded, "-p", PROMPT, "-n", 100, "--temp", 0, "-T", 1)
    assert outcome.code == 130
    assert outcome.stdout.endswith(b"\n")
    assert "4 tokens" in outcome.stderr
    assert "interrupted" in outcome.stderr


@pytest.mark.usefixtures("llama")
def test_no_file_is_written(tiny_coded, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    outcome = run_process("run", tiny_coded, "-p", PROMPT, "-n", 5, "-T", 1, driver=WATCHED, cwd=tmp_path)
    assert outcome.code == 0
    assert "written: []" in outcome.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("llama")
def test_damaged_file(lw, tiny_coded, tmp_path):
    data = bytearray(tiny_coded.read_bytes())
    data[-2000] ^= 1
    damaged = tmp_path / "damaged.lw"
    damaged.write_bytes(data)
    outcome = lw("run", damaged, "-p", PROMPT)
    assert outcome.code == 1
    assert not outcome.stdout
    assert f"ERROR {damaged}: tensor " in outcome.stderr
    assert outcome.stderr.count("\n") == 1


def test_what_is_no_model(lw, tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"\x89PNG....")
    for name in (path, tmp_path / "none.gguf"):
        outcome = lw("run", name, "-p", "x")
        assert outcome.code == 1
        assert str(name) in outcome.stderr
        assert outcome.stderr.count("\n") == 1


def test_characters_may_span_tokens(capsys):
    pieces = [b"a", b"\xc3", b"\xa9", b"\xf0\x9f", b"\x98\x80", b"\xe2\x82"]
    model = SimpleNamespace(piece=lambda token: pieces[token])
    written: list[str] = []

    class Tokens:
        stop = "length"

        def __iter__(self):
            return iter(range(len(pieces)))

    assert _print_text(model, Tokens(), written.append) == ("aé\U0001f600\ufffd", "length")
    assert written == ["a", "é", "\U0001f600", "\ufffd", "\n"]


@pytest.mark.parametrize("verb", ["run"])
def test_without_llama_cpp(model, tmp_path, verb):
    def run(*argv):
        return run_process(*argv, driver=WITHOUT_LLAMA, cwd=tmp_path)

    coded = tmp_path / "m.gguf.lw"
    for argv in (("encode", model), ("verify", coded), ("inspect", coded), ("decode", coded, "-o", "copy.gguf")):
        assert run(*argv).code == 0
    for path in (model, coded):
        outcome = run(verb, path, "-p", "x")
        assert outcome.code == 1
        assert outcome.stderr.count("\n") == 1
        assert "pip install 'lazyweights[llama]'" in outcome.stderr
