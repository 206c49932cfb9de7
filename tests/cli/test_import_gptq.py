"""``lazyweights import-gptq``: a GGUF or a coded file, what it says, and what it leaves when it fails."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import lazyweights
from lazyweights.cli.main import main
from tests.llama.tiny_model import write_tiny_model
from tests.quant.gptq_samples import make_model


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "base.gguf")


def test_a_gguf_and_its_coded_file(base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = make_model(4, 32, symmetric=False).write(tmp_path / "hf")
    plain, coded = tmp_path / "out.gguf", tmp_path / "out.gguf.lw"
    assert main(["import-gptq", str(folder), "--base", str(base), "-o", str(plain), "-v"]) == 0
    said = capfd.readouterr().err
    assert f"{plain}: 14 quantized and 7 other tensors, " in said
    assert "Q5_0: 14" in said
    assert main(["import-gptq", str(folder), "--base", str(base), "-o", str(coded), "-q"]) == 0
    assert capfd.readouterr().err == ""
    assert lazyweights.verify(coded, against=plain).n_tensors == 21
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base.gguf", "hf", "out.gguf", "out.gguf.lw"]
    assert main(["import-gptq", str(folder), "--base", str(base), "-o", str(coded)]) == 1
    assert "exists already" in capfd.readouterr().err
    assert main(["import-gptq", str(folder), "--base", str(base), "-o", str(coded), "-f"]) == 0
    assert f"{coded}: 14 quantized and 7 other tensors, " in capfd.readouterr().err


def test_refusals(base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = make_model()
    model.arrays["model.layers.0.self_attn.v_proj.g_idx"] = np.arange(64, dtype=np.int32) % 2
    folder = model.write(tmp_path / "hf")
    before = sorted(tmp_path.iterdir())
    assert main(["import-gptq", str(folder), "-o", str(tmp_path / "out.gguf")]) == 2
    said = capfd.readouterr().err
    assert "--base" in said
    assert "--vocab-only" in said
    for output in ("out.gguf", "out.gguf.lw"):
        assert main(["import-gptq", str(folder), "--base", str(base), "-o", str(tmp_path / output)]) == 1
        said = capfd.readouterr().err
        assert f"ERROR {folder}: tensor 'model.layers.0.self_attn.v_proj': " in said
        assert "act-order" in said
    assert main(["import-gptq", str(folder), "--base", str(base), "-o", str(tmp_path / "no" / "out.gguf.lw")]) == 1
    assert "does not exist" in capfd.readouterr().err
    assert main(["import-gptq", str(folder), "--base", str(tmp_path / "none.gguf"), "-o", str(tmp_path / "out.gguf")]) == 1
    assert "none.gguf" in capfd.readouterr().err
    assert sorted(tmp_path.iterdir()) == before
    output = str(tmp_path / "out.gguf")
    assert main(["import-gptq", str(folder), "--base", str(base), "-o", output, "--float-fallback", "-v"]) == 0
    assert "F32: 1, Q4_0: 13" in capfd.readouterr().err
