"""``lazyweights encode``."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

import lazyweights
from lazyweights.cli import encode
from lazyweights.errors import FormatError, OutputExistsError
from tests.cli.conftest import model_bytes

SUMMARY = re.compile(
    r"^.*m\.gguf: [\d.]+ k?B -> [\d.]+ k?B \(\d+\.\d\d % saved\), "
    r"\d+\.\d{3} -> \d+\.\d{3} bits per weight, \d+(\.\d+)? s\n$"
)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_ends_with_one_line_on_stderr(lw, model):
    outcome = lw("encode", model)
    assert (outcome.code, outcome.stdout) == (0, b"")
    assert SUMMARY.match(outcome.stderr)
    assert names(model.parent) == ["m.gguf", "m.gguf.lw"]
    coded = model.with_name("m.gguf.lw").read_bytes()
    assert len(coded) < len(model.read_bytes())


def test_quiet_says_nothing(lw, model):
    outcome = lw("encode", "-q", model)
    assert (outcome.code, outcome.stdout, outcome.stderr) == (0, b"", "")


def test_verbose_prints_the_type_table_on_stderr(lw, model):
    outcome = lw("encode", "-v", model)
    assert (outcome.code, outcome.stdout) == (0, b"")
    assert "preset dense" in outcome.stderr
    assert "Q8_0" in outcome.stderr


def test_output_is_not_overwritten_without_force(lw, model):
    output = model.with_name("m.gguf.lw")
    output.write_bytes(b"precious")
    outcome = lw("encode", model)
    assert outcome.code == 1
    assert "exists already; use -f" in outcome.stderr
    assert output.read_bytes() == b"precious"
    assert lw("encode", "-f", model).code == 0
    assert output.read_bytes() != b"precious"
    assert names(model.parent) == ["m.gguf", "m.gguf.lw"]


@pytest.mark.parametrize("link", ["same", "hard", "soft"])
def test_input_as_output_is_refused_even_with_force(lw, model, link):
    output = model if link == "same" else model.with_name("other.gguf")
    if link == "hard":
        os.link(model, output)
    if link == "soft":
        output.symlink_to(model)
    before = model.read_bytes()
    outcome = lw("encode", "-f", "-o", output, model)
    assert outcome.code == 1
    assert "the output is the input itself" in outcome.stderr
    assert model.read_bytes() == before


def test_output_option_and_presets(lw, model):
    for preset in ("dense", "unit"):
        output = model.with_name(f"{preset}.lw")
        assert lw("encode", "--preset", preset, "-o", output, model).code == 0
        assert lw("verify", output, "--against", model).code == 0


def test_bytes_do_not_depend_on_threads_or_run(lw, model):
    outputs = []
    for threads in (1, 2, 0, 5):
        output = model.with_name(f"{threads}.lw")
        assert lw("encode", "-T", threads, "-o", output, model).code == 0
        outputs.append(output.read_bytes())
    assert len(set(outputs)) == 1


def test_output_directory_is_missing_or_a_directory(lw, model):
    outcome = lw("encode", "-o", model.parent / "none" / "x.lw", model)
    assert outcome.code == 1
    assert "does not exist" in outcome.stderr
    outcome = lw("encode", "-f", "-o", model.parent, model)
    assert outcome.code == 1
    assert "the output is a directory" in outcome.stderr
    assert names(model.parent) == ["m.gguf"]


def test_several_files_go_on_after_an_error(lw, model):
    second = model.with_name("n.gguf")
    second.write_bytes(model_bytes(seed=9))
    outcome = lw("encode", model, model.with_name("missing.gguf"), second)
    assert outcome.code == 1
    assert "missing.gguf: No such file or directory" in outcome.stderr
    assert names(model.parent) == ["m.gguf", "m.gguf.lw", "n.gguf", "n.gguf.lw"]


def test_directory_is_searched_in_order(lw, tmp_path):
    for name in ("b/y.gguf", "b/a/x.gguf", "a.gguf", "b/notes.txt"):
        path = tmp_path / "models" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(model_bytes(1))
    outcome = lw("encode", tmp_path / "models")
    assert outcome.code == 0
    order = [line.split(".gguf")[0].split("models/")[1] for line in outcome.stderr.splitlines()]
    assert order == ["a", "b/a/x", "b/y"]
    assert (tmp_path / "models/b/a/x.gguf.lw").is_file()
    assert not (tmp_path / "models/b/notes.txt.lw").exists()
    assert lw("verify", tmp_path / "models").stderr.count(": OK") == 3


def test_directory_without_models(lw, tmp_path):
    outcome = lw("encode", tmp_path)
    assert outcome.code == 1
    assert "no *.gguf file in this directory" in outcome.stderr


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "an empty file"),
        (b"PK\x03\x04rest", "a zip archive"),
        (b"<!DOCTYPE html><html>", "an HTML page"),
        (b"hello, world", "a text file"),
        (b"lmggrest", "an old GGML"),
    ],
)
def test_not_a_gguf_file(lw, tmp_path, content, said):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    outcome = lw("encode", path)
    assert outcome.code == 1
    assert "not a GGUF file: it looks like" in outcome.stderr
    assert said in outcome.stderr
    assert names(tmp_path) == ["x.gguf"]


def test_coded_file_is_not_coded_again(lw, coded):
    outcome = lw("encode", coded)
    assert outcome.code == 1
    assert "coded already" in outcome.stderr
    assert not coded.with_name("m.gguf.lw.lw").exists()


def test_pipes_and_devices_are_refused(lw, model):
    pipe = model.with_name("pipe.gguf")
    os.mkfifo(pipe)
    outcome = lw("encode", pipe)
    assert outcome.code == 1
    assert "not a regular file" in outcome.stderr
    outcome = lw("encode", "-f", "-o", "/dev/null", model)
    assert outcome.code == 1
    assert "not a regular file" in outcome.stderr


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read and write everything")
def test_no_permission(lw, model):
    model.chmod(0)
    outcome = lw("encode", model)
    assert outcome.code == 1
    assert "Permission denied" in outcome.stderr
    model.chmod(0o600)
    model.parent.chmod(0o500)
    try:
        outcome = lw("encode", model)
    finally:
        model.parent.chmod(0o700)
    assert outcome.code == 1
    assert "cannot write: Permission denied" in outcome.stderr


def test_remove_deletes_the_source_after_success_only(lw, model):
    before = model.read_bytes()
    model.with_name("m.gguf.lw").write_bytes(b"precious")
    assert lw("encode", "--rm", model).code == 1
    assert model.exists()
    assert lw("encode", "--rm", "-f", model).code == 0
    assert names(model.parent) == ["m.gguf.lw"]
    assert lw("decode", "--rm", model.with_name("m.gguf.lw")).code == 0
    assert names(model.parent) == ["m.gguf"]
    assert model.read_bytes() == before


def test_remove_keeps_a_source_that_changed(lw, model, monkeypatch):
    seen = encode.identity(str(model))
    monkeypatch.setattr(encode, "identity", lambda path: (*seen[:2], seen[2] + 1, seen[3]))
    outcome = lw("encode", "--rm", model)
    assert outcome.code == 1
    assert "changed while it was read" in outcome.stderr
    assert model.exists()


def test_odd_files_are_coded_with_a_warning(lw, tmp_path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(model_bytes()[:-5000])
    outcome = lw("encode", path)
    assert outcome.code == 0
    assert "WARNING" in outcome.stderr
    assert lw("decode", "-c", path.with_name("cut.gguf.lw")).stdout == path.read_bytes()


def test_python_functions_mirror_the_commands(model):
    shutil.copy(model, model.with_name("copy.gguf"))
    result = lazyweights.encode(model.with_name("copy.gguf"), threads=1)
    coded = model.with_name("copy.gguf.lw")
    assert result.coded_bytes == coded.stat().st_size
    with pytest.raises(OutputExistsError):
        lazyweights.decode(coded)
    lazyweights.decode(coded, force=True)
    lazyweights.decode(coded, model.with_name("again.gguf"))
    assert model.read_bytes() == model.with_name("copy.gguf").read_bytes() == model.with_name("again.gguf").read_bytes()
    assert lazyweights.verify(coded, against=model).source_bytes == len(model.read_bytes())
    with lazyweights.open(coded) as file:
        assert "output_norm.weight" in set(file.keys())
    with pytest.raises(FormatError):
        lazyweights.verify(model)
