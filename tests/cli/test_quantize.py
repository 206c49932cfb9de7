"""``lazyweights quantize``: steps, sizes, budgets; what it says, what it leaves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp")

import lazyweights
from lazyweights.cli.main import main
from lazyweights.llama.perplexity import perplexity
from lazyweights.quant.curvature import Curvature
from tests.llama.texts import english
from tests.llama.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a text, and its curvature."""
    folder = tmp_path_factory.mktemp("quantize")
    write_tiny_model(folder / "tiny.gguf")
    (folder / "text").write_bytes(english(900))
    assert main(["quantize", str(folder / "tiny.gguf"), "-o", str(folder / "first.gguf"), "--calibration", str(folder / "text"),
                 "-c", "64", "--chunks", "8", "--save-hessians", str(folder / "c"), "-q"]) == 0  # fmt: skip
    return folder


def run(folder: Path, out: Path, *options: str) -> int:
    return main(["quantize", str(folder / "tiny.gguf"), "-o", str(out), "--hessians", str(folder / "c"), *options])


def test_calibration_is_saved_and_gives_the_same_model(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert Curvature(folder / "c").info.n_chunks == 8
    assert run(folder, tmp_path / "x.gguf") == 0
    assert (tmp_path / "x.gguf").read_bytes() == (folder / "first.gguf").read_bytes()
    said = capfd.readouterr().err
    assert re.search(r"x\.gguf: step 1, [\d.]+ kB, [\d.]+ bits per weight, codes [\d.]+ bits a weight, divergence 0\.0", said)
    assert [p.name for p in tmp_path.iterdir()] == ["x.gguf"]


def test_coded_output(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(folder, tmp_path / "x.gguf.lw", "-v") == 0
    lazyweights.decode(tmp_path / "x.gguf.lw", tmp_path / "x.gguf")
    assert (tmp_path / "x.gguf").read_bytes() == (folder / "first.gguf").read_bytes()
    said = capfd.readouterr().err
    assert "blk.1.attn_v.weight: " in said
    assert " -> " in said


def test_size_and_bits_per_weight(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(folder, tmp_path / "a.lw") == 0
    limit = (tmp_path / "a.lw").stat().st_size - 3000
    assert run(folder, tmp_path / "b.lw", "--target-size", str(limit)) == 0
    assert 0.9 * limit < (tmp_path / "b.lw").stat().st_size <= limit
    said = capfd.readouterr().err
    assert re.search(r"step [\d.]+ for \d+\.\d+ kB; tried were ", said)
    n_weights = 2 * (64 * 64 * 2 + 2 * 32 * 64 + 3 * 64 * 96) + 2 * 331 * 64 + 5 * 64
    assert run(folder, tmp_path / "c.lw", "--bpw", "5.5", "-q") == 0
    assert 5.2 < 8 * (tmp_path / "c.lw").stat().st_size / n_weights <= 5.5
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.lw", "b.lw", "c.lw"]


def test_budget_of_perplexity(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "x.gguf"
    assert run(folder, out, "--budget-ppl", "5%", "--evaluation", str(folder / "text")) == 0
    text = english(900).removesuffix(b"\n")
    base, found = (perplexity(p, text, n_ctx=512, n_chunks=40).ppl.value for p in (folder / "tiny.gguf", out))
    assert found / base <= 1.05
    assert "for perplexity within 5 %; tried were" in capfd.readouterr().err


def test_containers_and_what_stays(folder: Path, tmp_path: Path) -> None:
    import gguf

    assert run(folder, tmp_path / "x.gguf", "--container", "q5_0", "--leave-output-tensor", "-q") == 0
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "x.gguf").tensors}
    assert {kinds["token_embd.weight"], kinds["output.weight"]} == {"F16"}
    assert {kind for name, kind in kinds.items() if name.startswith("blk.") and "norm" not in name} == {"Q5_0"}


def test_an_unknown_architecture_goes_by_kinds(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_model(tmp_path / "experts.gguf", n_experts=4)
    (tmp_path / "text").write_bytes(english(300))
    options = ["-o", str(tmp_path / "x.gguf"), "--calibration", str(tmp_path / "text"), "-c", "64", "--chunks", "4"]
    assert main(["quantize", str(model), *options]) == 0
    assert "mixtures of experts are not known here: steps go by the kind of tensor" in capfd.readouterr().err


def test_an_interrupted_run_goes_on(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lazyweights.quant import tuned

    original, calls = tuned.pack, []

    def stop(*arguments: object) -> object:
        calls.append(1)
        if len(calls) == 9:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(tuned, "pack", stop)
    out = tmp_path / "x.gguf"
    assert run(folder, out, "-T", "1") == 130
    assert "x.gguf.work: kept; the same command goes on from there" in capfd.readouterr().err
    assert not out.exists()
    assert run(folder, out, "-T", "1") == 0
    assert "8 tensors from before" in capfd.readouterr().err
    assert out.read_bytes() == (folder / "first.gguf").read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["x.gguf"]


def test_an_interrupted_search_goes_on(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lazyweights.quant.tuned import TunedQuantizer

    steps: list[float] = []
    original = TunedQuantizer.quantize

    def counted(self: TunedQuantizer, output: object, step: float, **options: object) -> object:
        steps.append(step)
        if len(steps) == 2:
            raise KeyboardInterrupt
        return original(self, output, step, **options)

    monkeypatch.setattr(TunedQuantizer, "quantize", counted)
    out, saved = tmp_path / "x.lw", tmp_path / "c"
    options = ["--calibration", str(folder / "text"), "-c", "64", "--chunks", "8", "--save-hessians", str(saved), "--bpw", "5.5"]
    command = ["quantize", str(folder / "tiny.gguf"), "-o", str(out), *options]
    assert main(command) == 130
    assert not saved.exists()
    assert main(command) == 0
    assert steps[0] not in steps[1:]
    assert "tried were 1 (" in capfd.readouterr().err
    assert saved.read_bytes() == (folder / "c").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "x.lw"]


def test_a_folder_in_the_way(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.gguf.work").mkdir()
    (tmp_path / "x.gguf.work" / "mine").write_text("mine")
    assert run(folder, tmp_path / "x.gguf") == 1
    assert "this is in the way" in capfd.readouterr().err
    assert run(folder, tmp_path / "no" / "x.gguf") == 1
    assert main(["quantize", str(folder / "tiny.gguf"), "-o", str(folder / "c"), "--hessians", str(folder / "c"), "-f"]) == 1
    assert "the output is the input itself" in capfd.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["x.gguf.work"]


def test_refusals(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "there.gguf").write_text("mine")
    assert run(folder, tmp_path / "there.gguf") == 1
    assert "exists already" in capfd.readouterr().err
    assert run(folder, tmp_path / "x.gguf", "--budget-ppl", "1%") == 2
    assert "--evaluation" in capfd.readouterr().err
    assert run(folder, tmp_path / "x.gguf", "--container", "Q9_0") == 1
    assert "there is no container 'Q9_0'" in capfd.readouterr().err
    assert main(["quantize", str(folder / "none.gguf"), "-o", str(tmp_path / "x.gguf"), "--hessians", str(folder / "c")]) == 1
    assert "none.gguf" in capfd.readouterr().err
    assert run(folder, tmp_path / "x.gguf.lw", "--target-size", "1") == 1
    assert "no step that was tried gives" in capfd.readouterr().err
    for options in (["--step", "0"], ["--budget-ppl", "-1"], ["--bpw", "4", "--step", "1"], ["--calibration", "x"]):
        with pytest.raises(SystemExit):
            run(folder, tmp_path / "x.gguf", *options)
