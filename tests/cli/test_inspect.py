"""``lazyweights inspect``."""

from __future__ import annotations

import hashlib
import json

import pytest

from lazyweights.blocks.types import TYPE_BY_NAME
from tests.cli.conftest import model_bytes, skewed_q8_0
from tests.make_gguf import build_gguf

FILE_KEYS = [
    "path", "kind", "version", "preset", "n_tensors", "n_weights", "source_bytes", "coded_bytes", "overhead_bytes",
    "source_bpw", "coded_bpw", "saving", "estimated", "sha256", "data_offset", "alignment", "problem", "metadata",
    "types", "tensors",
]  # fmt: skip
TYPE_KEYS = [
    "type_name", "n_tensors", "n_weights", "source_bytes", "coded_bytes", "entropy_bits", "payload_bpw", "source_bpw",
    "coded_bpw",
]  # fmt: skip
TENSOR_KEYS = [
    "name", "type_name", "shape", "n_weights", "source_bytes", "coded_bytes", "entropy_bits", "payload_bpw", "bpw",
]  # fmt: skip


def parse(text):
    """Parse strict JSON: NaN and Infinity are errors."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("which", ["model", "coded"])
def test_json_keys_are_stable(lw, which, request):
    request.getfixturevalue("coded")
    path = request.getfixturevalue(which)
    outcome = lw("inspect", "--json", path)
    assert (outcome.code, outcome.stderr) == (0, "")
    report = parse(outcome.text)
    assert list(report) == FILE_KEYS
    assert list(report["types"][0]) == TYPE_KEYS
    assert list(report["tensors"][0]) == TENSOR_KEYS
    assert report["kind"] == ("gguf" if which == "model" else "coded")
    assert report["n_tensors"] == len(report["tensors"]) == 3
    assert report["n_weights"] == 2 * 256 * 64 + 256
    assert report["metadata"]["general.name"] == "tiny"
    assert report["metadata"]["test.infinity"] == "inf"
    assert report["metadata"]["tokenizer.ggml.tokens"] == {"elided": "str", "length": 40}
    assert "tensors" not in parse(lw("inspect", "--json", "--no-tensors", path).text)


def test_json_array_gives_whole_arrays(lw, model, coded):
    for path in (model, coded):
        metadata = parse(lw("inspect", "--json-array", path).text)["metadata"]
        assert metadata["tokenizer.ggml.tokens"] == [f"t{i}" for i in range(40)]


def test_reports_of_source_and_coded_file_agree(lw, model, coded):
    source = parse(lw("inspect", "--json", model).text)
    report = parse(lw("inspect", "--json", coded).text)
    for key in ("n_tensors", "n_weights", "source_bytes", "source_bpw", "data_offset", "alignment", "metadata"):
        assert source[key] == report[key], key
    for ours, theirs in zip(source["tensors"], report["tensors"], strict=True):
        for key in ("name", "type_name", "shape", "n_weights", "source_bytes"):
            assert ours[key] == theirs[key]
    assert source["coded_bytes"] is None
    assert report["coded_bytes"] == coded.stat().st_size
    assert report["sha256"] == hashlib.sha256(model.read_bytes()).hexdigest()
    # Honest bits: no part is reported smaller than what it holds, and the parts are no more than the file.
    assert sum(tensor["coded_bytes"] for tensor in report["tensors"]) <= report["coded_bytes"]
    for tensor in report["tensors"]:
        assert tensor["bpw"] >= (tensor["payload_bpw"] or 0)
        assert tensor["bpw"] * tensor["n_weights"] == pytest.approx(8 * tensor["coded_bytes"])


def test_estimate_is_close_to_the_coded_size(lw, model):
    model.write_bytes(model_bytes(columns=1024, rows=512))
    coded = model.with_name("m.gguf.lw")
    assert lw("encode", model).code == 0
    estimate = parse(lw("inspect", "--json", "--estimate", model).text)
    assert estimate["estimated"] is True
    assert estimate["coded_bytes"] == pytest.approx(coded.stat().st_size, rel=0.02)
    assert parse(lw("inspect", "--json", "--estimate", coded).text)["estimated"] is False


def test_several_files_are_lines_of_json(lw, model, coded):
    lines = lw("inspect", "--json", model, coded).text.splitlines()
    assert [parse(line)["kind"] for line in lines] == ["gguf", "coded"]
    lines = lw("inspect", "--json", model.parent).text.splitlines()
    assert [parse(line)["kind"] for line in lines] == ["gguf", "coded"]


def test_table_by_type(lw, model, coded):
    text = lw("inspect", model).text
    assert "GGUF version 3" in text
    assert "Q8_0" in text
    assert "F32" in text
    assert "entropy (sample)" in text
    assert "coded bytes" not in text  # columns without a figure are left out
    assert "blk.0" not in text
    text = lw("inspect", "--estimate", model).text
    assert "(sample)" not in text
    assert "coded size (estimate)" in text
    text = lw("inspect", coded).text
    assert "coded file of GGUF version 3, preset dense" in text
    assert "payload bpw" in text


def test_table_of_tensors(lw, model, coded):
    for path in (model, coded):
        text = lw("inspect", "--tensors", path).text
        assert "blk.1.ffn_up.weight" in text
        assert "256 x 64" in text


def test_verbose_prints_all_metadata(lw, model):
    assert "arr[str,40]" not in lw("inspect", model).text
    assert "arr[str,40]" in lw("inspect", "-v", model).text


def test_markdown(lw, coded):
    lines = lw("inspect", "--markdown", "--tensors", coded).text.splitlines()
    tables = [line for line in lines if line.startswith("|")]
    assert tables[0].startswith("| type | tensors |")
    assert any(line.startswith("| blk.0.ffn_up.weight | Q8_0 | 256 x 64 |") for line in tables)
    assert lines[0] == "## m.gguf.lw"


def test_hash_lines_of_source_and_coded_file_are_the_same(lw, model, coded):
    outcome = lw("inspect", "--hash", model)
    lines = [line.split("  ") for line in outcome.text.splitlines()]
    type_id, _, data = skewed_q8_0(256, 64, 1)
    assert type_id == TYPE_BY_NAME["Q8_0"].type_id
    assert lines[0] == ["sha256", hashlib.sha256(data).hexdigest(), f"{model}:blk.0.ffn_up.weight"]
    assert lines[-1] == ["sha256", hashlib.sha256(model.read_bytes()).hexdigest(), str(model)]
    assert len(lines) == 4
    assert lw("inspect", "--hash", coded).text == outcome.text


def test_hash_says_what_it_leaves_out(lw, tmp_path):
    path = tmp_path / "odd.gguf"
    path.write_bytes(build_gguf([("a", 0, (4,), bytes(16)), ("b", 4, (4,), bytes(16))]))
    outcome = lw("inspect", "--hash", path)
    assert outcome.code == 0
    assert outcome.text.count("\n") == 2
    assert "no line for 1 tensors" in outcome.stderr


def test_single_figures(lw, model):
    report = parse(lw("inspect", "--json", model).text)
    assert lw("inspect", "--data-offset", model).text == f"{report['data_offset']}\n"
    assert lw("inspect", "--data-alignment", model).text == "32\n"


def test_neither_gguf_nor_coded(lw, tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"\x28\xb5\x2f\xfd")
    outcome = lw("inspect", path)
    assert outcome.code == 1
    assert "neither a GGUF file nor a coded file: it looks like a zstd stream" in outcome.stderr


def test_hostile_names_do_not_reach_the_terminal(lw, tmp_path):
    path = tmp_path / "evil.gguf"
    evil = "a\x1b]0;owned\x07[red]|\n"
    path.write_bytes(build_gguf([(evil, 0, (4,), bytes(16)), (b"\xff", 0, (4,), bytes(16))], {"general.name": evil}))
    for argv in (["--tensors"], ["--tensors", "--markdown"], ["-v"], ["--hash"], ["--json"]):
        outcome = lw("inspect", *argv, path)
        assert outcome.code == 0, outcome.stderr
        assert "\x1b" not in outcome.text
        assert "\x07" not in outcome.text
    assert "a\\x1b]0;owned\\x07[red]" in lw("inspect", "--tensors", path).text
    assert parse(lw("inspect", "--json", path).text)["tensors"][0]["name"] == evil


def test_file_without_weights(lw, tmp_path):
    path = tmp_path / "vocab.gguf"
    path.write_bytes(build_gguf([], {"general.architecture": "llama"}))
    for argv in ([], ["--json"], ["--markdown"], ["--tensors"], ["--hash"]):
        assert lw("inspect", *argv, path).code == 0
    assert parse(lw("inspect", "--json", path).text)["source_bpw"] is None
    assert lw("encode", path).code == 0
    assert lw("inspect", path.with_name("vocab.gguf.lw")).code == 0


def test_truncated_model_says_its_problem(lw, tmp_path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(model_bytes()[:-5000])
    assert "missing from the file" in lw("inspect", path).text
