"""``lazyweights perplexity`` on a tiny model: what it prints, and how it refuses."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from lazyweights.cli import perplexity_report
from lazyweights.cli.main import main
from tests.cli.conftest import run_process
from tests.llama.texts import english

WITHOUT_LLAMA = """\
import sys
sys.modules["llama_cpp"] = None
from lazyweights.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("llama_cpp", reason="needs the extra lazyweights[llama]")
    from tests.llama.tiny_model import write_tiny_model

    folder = tmp_path_factory.mktemp("perplexity")
    model = write_tiny_model(folder / "tiny.gguf")
    write_tiny_model(folder / "other.gguf", seed=1)
    (folder / "text").write_bytes(english())
    assert main(["encode", "-q", str(model)]) == 0
    return model


@pytest.fixture
def text(tiny: Path) -> Path:
    return tiny.with_name("text")


def final(printed: str) -> tuple[float, float]:
    found = re.fullmatch(r"Final estimate: PPL = (\d+\.\d{4}) \+/- (\d+\.\d{5})\n", printed)
    assert found, printed
    return float(found[1]), float(found[2])


def test_result_and_running_estimate(lw, tiny, text):
    outcome = lw("perplexity", tiny, "-f", text, "-c", "32", "--chunks", "4", "-b", "64")
    assert outcome.code == 0
    ppl, error = final(outcome.text)
    assert 100 < ppl < 10_000
    assert 0 < error < ppl
    what, counts, estimates, seconds = outcome.stderr.splitlines()
    assert re.search(r"llama .*, vocabulary of \d+ tokens; llama-cpp-python [\d.]+ \(ggml ", what)
    assert re.search(
        r"\d,\d\d\d tokens, 4 chunks, n_ctx = 32, BOS starts each chunk; 60 tokens are scored; batches of 64, 2 chunks at a time",
        counts,
    )
    assert re.fullmatch(r"\[1\][\d.]+,\[2\][\d.]+,\[3\][\d.]+,\[4\]([\d.]+),", estimates)
    assert estimates.endswith(f"[4]{ppl:.4f},")
    assert re.search(r"tiny.gguf: [\d.]+ s, and [\d.]+ s to load the model$", seconds)


def test_quiet(lw, tiny, text):
    outcome = lw("perplexity", "-q", tiny, "-f", text, "-c", "32", "--chunks", "2")
    assert final(outcome.text)
    assert outcome.stderr == ""


def test_coded_file_prints_the_same(lw, tiny, text):
    options = ("-f", text, "-c", "32", "-q")
    plain, coded = lw("perplexity", tiny, *options), lw("perplexity", f"{tiny}.lw", *options)
    assert coded.code == 0
    assert coded.stdout == plain.stdout


@pytest.mark.parametrize("threads", ["-t", "-T", "--threads"])
def test_json(lw, tiny, text, threads):
    outcome = lw("perplexity", tiny, "--file", text, "--ctx-size", "32", "--chunks", "3", threads, "1", "--json")
    found = json.loads(outcome.text)
    assert set(found) == {"ppl", "nll", "running", "evaluation", "load_seconds", "seconds"}
    assert found["ppl"]["value"] == pytest.approx(found["running"][2])
    assert found["evaluation"]["model"] == str(tiny)
    assert found["evaluation"]["n_scored"] == 45
    assert found["evaluation"]["adds_bos"] is True


def test_divergence(lw, tiny, text, tmp_path):
    base, other = tmp_path / "base", tiny.with_name("other.gguf")
    written = lw("perplexity", tiny, "-f", text, "-c", "32", "--chunks", "4", "--kl-divergence-base", base)
    assert written.code == 0
    assert f"{base}: the base logits will take {base.stat().st_size / 1000:.2f} kB" in written.stderr
    again = lw("perplexity", tiny, "-f", text, "-c", "32", "--kl-divergence-base", base)
    assert (again.code, again.text) == (1, "")
    assert "exist already: read them with --kl-divergence, or replace them with --force" in again.stderr
    forced = lw("perplexity", tiny, "-f", text, "-c", "32", "--chunks", "4", "--kl-divergence-base", base, "--force")
    assert forced.stdout == written.stdout

    same = lw("perplexity", f"{tiny}.lw", "--kl-divergence-base", base, "--kl-divergence", "-q")
    assert (same.code, same.stderr) == (0, "")
    assert re.search(r"^Mean KLD +: -?0\.0000\d\d \+/- ", same.text, re.MULTILINE)
    ppl, _ = final(written.text)
    assert re.search(rf"^Mean PPL\(Q\) +: {ppl:.1f}", same.text, re.MULTILINE)

    different = lw("perplexity", other, "-f", text, "--kl-divergence-base", base, "--kl-divergence")
    assert different.code == 0
    names = [line.split(" : ")[0].strip() for line in different.text.splitlines()]
    assert {"Mean KLD", "Maximum KLD", "99.0% KLD", "Median KLD", "RMS delta p", "Same top p", "Mean PPL(base)"} <= set(names)
    lines = different.stderr.splitlines()
    assert lines[2].startswith("chunk  PPL(Q)")
    assert [line.split()[0] for line in lines[3:7]] == ["1", "2", "3", "4"]

    found = json.loads(lw("perplexity", other, "--kl-divergence-base", base, "--kl-divergence", "--json", "-q").text)
    kld = found["statistics"]["kld"]
    assert f"{kld['value']:.6f} +/- {kld['error']:.6f}" in different.text
    assert found["statistics"]["kld_quantiles"]["maximum"] > kld["value"]
    one = json.loads(lw("perplexity", other, "--kl-divergence-base", base, "--kl-divergence", "--chunks", "1", "--json").text)
    assert one["statistics"]["n_positions"] == 15


def test_text_of_a_base_is_compared(lw, tiny, text, tmp_path):
    base = tmp_path / "base"
    assert lw("perplexity", tiny, "-f", text, "-c", "32", "--chunks", "2", "--kl-divergence-base", base).code == 0
    another = tmp_path / "another"
    another.write_bytes(english(seed=1))
    outcome = lw("perplexity", tiny, "-f", another, "--kl-divergence-base", base, "--kl-divergence")
    assert outcome.code == 1
    assert "computed on another text" in outcome.stderr
    outcome = lw("perplexity", tiny, "-c", "64", "--kl-divergence-base", base, "--kl-divergence")
    assert outcome.code == 1
    assert "computed with -c 32, not 64" in outcome.stderr


def test_number_that_is_none_is_null():
    assert perplexity_report._plain({"a": (float("nan"), 1.5, None)}) == {"a": [None, 1.5, None]}


def test_warns_of_a_context_beyond_training(lw, tiny, text):
    outcome = lw("perplexity", tiny, "-f", text, "-c", "300", "-q")
    assert outcome.code == 0
    assert "WARNING" in outcome.stderr
    assert "trained with a context of 256 tokens, not 300" in outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "-f TEXT is missing"),
        (("-f", "text", "-c", "33"), "-c 33: the context has to be even"),
        (("-f", "text", "-c", "2"), "the context has to be even and at least 4"),
        (("-f", "text", "--kl-divergence"), "--kl-divergence needs --kl-divergence-base"),
        (("-f", "text", "--chunks", "0"), "'0' is not a number of at least 1"),
        (("-f", "text", "-b", "x"), "'x' is not a number of at least 1"),
    ],
)
def test_usage(lw, model, arguments, said):
    outcome = lw("perplexity", model, *arguments)
    assert outcome.code == 2
    assert said in outcome.stderr


@pytest.mark.parametrize("name", ["-", "."])
def test_one_file_only(lw, name):
    outcome = lw("perplexity", name, "-f", "text")
    assert outcome.code == 2
    assert "one model file" in outcome.stderr


def test_what_cannot_be_read(lw, tiny, text, tmp_path):
    short = tmp_path / "short"
    short.write_bytes(b"the thing")
    for arguments, said in (
        ((tiny, "-f", tmp_path / "missing"), "missing: cannot read the text: No such file or directory"),
        ((tmp_path / "missing.gguf", "-f", text), "missing.gguf: No such file or directory"),
        ((text, "-f", text), "neither a GGUF file nor a coded file"),
        ((tiny, "-f", short), "tokens, but two chunks of 512 need 1024: take a longer text, or a smaller context with -c"),
        ((tiny, "--kl-divergence", "--kl-divergence-base", text), "not a base logits file"),
        ((tiny, "-f", text, "-c", "32", "--kl-divergence-base", tmp_path / "no" / "base"), "cannot write"),
    ):
        outcome = lw("perplexity", *arguments)
        assert (outcome.code, outcome.text) == (1, "")
        assert said in outcome.stderr
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(tiny.read_bytes()[:1000])
    outcome = lw("perplexity", damaged, "-f", text)
    assert outcome.code == 1
    assert "llama.cpp cannot load this model" in outcome.stderr


def test_without_the_extra(model, tmp_path):
    (tmp_path / "text").write_bytes(b"a")
    outcome = run_process("perplexity", model, "-f", tmp_path / "text", driver=WITHOUT_LLAMA)
    assert outcome.code == 1
    assert "pip install 'lazyweights[llama]'" in outcome.stderr
    assert outcome.stderr.count("\n") == 1


def test_bar_on_a_terminal(lw, tiny, text, monkeypatch):
    monkeypatch.setattr(perplexity_report, "show_progress", lambda args: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    outcome = lw("perplexity", f"{tiny}.lw", "-f", text, "-c", "32", "--chunks", "2")
    assert outcome.code == 0
    assert final(outcome.text)
    assert "[1]" not in outcome.stderr


def test_help_has_examples(lw):
    outcome = lw("perplexity", "--help")
    assert outcome.code == 0
    assert outcome.text.count("  lazyweights perplexity ") >= 4
