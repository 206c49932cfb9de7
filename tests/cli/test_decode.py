"""``lazyweights decode`` and ``lazyweights verify``."""

from __future__ import annotations

import os

import pytest

from lazyweights.cli.messages import describe_error
from lazyweights.errors import LazyWeightsError
from tests.cli.conftest import run_process


def flip_last_quarter(path):
    """Damage one byte of the payload."""
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 0x10
    path.write_bytes(data)


def test_decode_strips_the_suffix(lw, model, coded):
    before = model.read_bytes()
    model.unlink()
    outcome = lw("decode", coded)
    assert (outcome.code, outcome.stdout) == (0, b"")
    assert outcome.stderr.count("\n") == 1
    assert " -> " in outcome.stderr
    assert model.read_bytes() == before


def test_decode_does_not_overwrite_without_force(lw, model, coded):
    model.write_bytes(b"precious")
    outcome = lw("decode", coded)
    assert outcome.code == 1
    assert "exists already" in outcome.stderr
    assert model.read_bytes() == b"precious"
    assert lw("decode", "-f", coded).code == 0
    outcome = lw("decode", "-f", "-o", coded, coded)
    assert outcome.code == 1
    assert "the output is the input itself" in outcome.stderr


@pytest.mark.parametrize("option", [["-c"], ["--stdout"], ["-o", "-"]])
def test_decode_to_standard_output(lw, model, coded, option):
    outcome = lw("decode", "-q", *option, coded)
    assert (outcome.code, outcome.stderr) == (0, "")
    assert outcome.stdout == model.read_bytes()


def test_decode_from_a_pipe_to_a_pipe(model, coded):
    outcome = run_process("decode", "-", data=coded.read_bytes())
    assert outcome.code == 0
    assert outcome.stdout == model.read_bytes()


def test_decode_from_a_pipe_to_a_file(model, coded):
    output = model.with_name("out.gguf")
    outcome = run_process("decode", "-", "-o", output, data=coded.read_bytes())
    assert (outcome.code, outcome.stdout) == (0, b"")
    assert output.read_bytes() == model.read_bytes()
    outcome = run_process("decode", "-", "-o", output, data=coded.read_bytes())
    assert outcome.code == 1
    assert "exists already" in outcome.stderr


def test_damaged_pipe_leaves_no_output(model, coded):
    flip_last_quarter(coded)
    output = model.with_name("out.gguf")
    for data in (coded.read_bytes(), coded.read_bytes()[:-100], b"", b"GGUF", b"rubbish"):
        outcome = run_process("decode", "-", "-o", output, data=data)
        assert outcome.code == 1
        assert outcome.stderr.startswith("lazyweights: ERROR ")
        assert outcome.stderr.count("\n") == 1
    assert sorted(os.listdir(model.parent)) == ["m.gguf", "m.gguf.lw"]


def test_terminal_is_refused(coded):
    pty = pytest.importorskip("pty")
    master, slave = pty.openpty()
    try:
        outcome = run_process("decode", "-c", coded, stdout=slave)
        assert outcome.code == 1
        assert "standard output is a terminal" in outcome.stderr
        os.set_blocking(master, False)
        with pytest.raises(BlockingIOError):
            os.read(master, 1)
    finally:
        os.close(master)
        os.close(slave)


def test_progress_bar_is_drawn_on_a_terminal_only(model):
    pty = pytest.importorskip("pty")
    master, slave = pty.openpty()
    drawn = {}
    try:
        for flag in ("--force", "--no-progress", "-q"):
            outcome_code = run_with_terminal("encode", "-f", flag, model, slave=slave)
            os.set_blocking(master, False)
            drawn[flag] = os.read(master, 1 << 20) if flag != "-q" else read_nothing(master)
            assert outcome_code == 0
    finally:
        os.close(master)
        os.close(slave)
    assert b"m.gguf" in drawn["--force"]
    assert b"\x1b[" in drawn["--force"]
    assert b"\x1b[" not in drawn["--no-progress"]
    assert drawn["-q"] == b""


def run_with_terminal(*argv, slave):
    from tests.cli.conftest import start

    with start(*argv, stderr=slave) as process:
        process.communicate(timeout=300)
    return process.returncode


def read_nothing(master):
    try:
        return os.read(master, 1)
    except BlockingIOError:
        return b""


@pytest.mark.parametrize("verb", ["decode", "verify"])
@pytest.mark.parametrize(
    ("content", "said"),
    [(b"GGUF\3\0\0\0", "it is a GGUF file"), (b"", "an empty file"), (b"\x1f\x8b\x08", "a gzip stream")],
)
def test_not_a_coded_file(lw, tmp_path, verb, content, said):
    path = tmp_path / "x.lw"
    path.write_bytes(content)
    outcome = lw(verb, path)
    assert outcome.code == 1
    assert "not a coded file" in outcome.stderr
    assert said in outcome.stderr
    assert os.listdir(tmp_path) == ["x.lw"]


def test_output_has_to_be_named_where_no_name_follows(lw, model, coded):
    other = coded.rename(coded.with_name("model.bin"))
    outcome = lw("decode", other)
    assert outcome.code == 1
    assert "does not end in .lw" in outcome.stderr
    assert lw("decode", other, "-o", model.with_name("new.gguf")).code == 0


def test_damage_is_an_error_and_leaves_no_output(lw, model, coded):
    flip_last_quarter(coded)
    model.unlink()
    for verb in ("decode", "verify"):
        outcome = lw(verb, coded)
        assert outcome.code == 1
        assert outcome.stderr.count("\n") == 1
    assert os.listdir(coded.parent) == ["m.gguf.lw"]


def test_several_files_go_on_after_damage(lw, model, coded):
    damaged = coded.with_name("a.gguf.lw")
    damaged.write_bytes(coded.read_bytes())
    flip_last_quarter(damaged)
    outcome = lw("verify", coded.parent)
    assert outcome.code == 1
    assert outcome.stderr.count("ERROR") == 1
    assert "m.gguf.lw: OK" in outcome.stderr


def test_verify_against_the_source(lw, model, coded):
    outcome = lw("verify", coded, "--against", model)
    assert outcome.code == 0
    assert "OK, equal to" in outcome.stderr
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    model.write_bytes(data)
    outcome = lw("verify", coded, "--against", model)
    assert outcome.code == 1
    model.unlink()
    outcome = lw("verify", coded, "--against", model)
    assert outcome.code == 1
    assert "m.gguf: No such file or directory" in outcome.stderr


def test_verify_is_quiet_or_verbose(lw, coded):
    assert lw("verify", "-q", coded).stderr == ""
    assert "SHA-256 of the source" in lw("verify", "-v", coded).stderr


def test_errors_name_the_file_once():
    assert describe_error(LazyWeightsError("broken", path="a"), "a") == "a: broken"
    assert describe_error(LazyWeightsError("broken"), "a") == "a: broken"
    assert describe_error(MemoryError(), "a") == "a: out of memory"
