"""Stock quantization: types asked for, bytes of the reference quantizers, and nothing left behind."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import gguf
import libgguf
import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from lazyweights.container.encoder import encode_file
from lazyweights.errors import LazyWeightsError, OutputExistsError, QuantizationError
from lazyweights.llama import passes, stock
from lazyweights.llama.model import Model
from lazyweights.llama.stock import FILE_TYPES, stock_quantize
from tests.llama.tiny_model import write_tiny_model

TEXT = b"The rain in there went on and on; the hens ran to their den. " * 20


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("stock") / "tiny.gguf", n_embedding=512)


@pytest.fixture(scope="module")
def imatrix(source: Path) -> Path:
    text, path = source.with_name("text.txt"), source.with_name("imatrix.gguf")
    text.write_bytes(TEXT)
    passes.capture(source, text, path, kind="diagonal", n_ctx=64, n_chunks=2, imatrix_format="gguf", process_output=True)
    return path


def tensors(path: Path) -> dict[str, gguf.ReaderTensor]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def test_numbers_are_those_of_the_library() -> None:
    from llama_cpp import llama_cpp

    for name, number in FILE_TYPES.items():
        long = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}.get(name, name)
        constant = "LLAMA_FTYPE_ALL_F32" if name == "F32" else f"LLAMA_FTYPE_MOSTLY_{long}"
        assert getattr(llama_cpp, constant) == number


@pytest.mark.parametrize("name", ["Q4_0", "q8_0", "Q4_K_S", "iq4_nl", "TQ2_0", "BF16"])
def test_pure_gives_every_matrix_its_type(source: Path, tmp_path: Path, name: str) -> None:
    output = tmp_path / "out.gguf"
    result = stock_quantize(source, output, name, pure=True, threads=2)
    wanted = {"Q4_K_S": "Q4_K"}.get(name.upper(), name.upper())
    found = tensors(output)
    for key, tensor in found.items():
        assert tensor.tensor_type.name == ("F32" if "norm" in key else wanted), key
    assert result.output_bytes == output.stat().st_size
    assert result.n_weights == sum(int(t.n_elements) for t in found.values())
    assert result.bpw == 8 * result.output_bytes / result.n_weights
    with Model(output) as model:
        assert model.n_vocab > 256


def test_bytes_are_those_of_the_reference_quantizer(source: Path, tmp_path: Path) -> None:
    plain = tensors(source)
    for name in ("Q4_0", "Q8_0"):
        output = tmp_path / f"{name}.gguf"
        stock_quantize(source, output, name, pure=True)
        found = tensors(output)
        for key in ("blk.0.attn_q.weight", "blk.1.ffn_down.weight", "output.weight"):
            rows = np.array(plain[key].data, np.float32)
            assert found[key].data.tobytes() == libgguf.quantize_rows(rows, found[key].tensor_type).tobytes(), (name, key)


def test_mixes_and_imatrix(source: Path, imatrix: Path, tmp_path: Path) -> None:
    stock_quantize(source, tmp_path / "plain.gguf", "Q4_K_M")
    result = stock_quantize(source, tmp_path / "weighted.gguf", "q4_k_m", imatrix=imatrix)
    assert result.file_type == "Q4_K_M"
    assert result.n_imatrix == 2 * 7 + 1
    plain, weighted = tensors(tmp_path / "plain.gguf"), tensors(tmp_path / "weighted.gguf")
    assert {t.tensor_type.name for t in plain.values()} == {"F32", "Q4_K", "Q6_K"}
    assert [t.tensor_type for t in plain.values()] == [t.tensor_type for t in weighted.values()]
    name = "blk.0.attn_q.weight"
    assert plain[name].data.tobytes() != weighted[name].data.tobytes()
    fields = gguf.GGUFReader(tmp_path / "weighted.gguf").fields
    assert fields["quantize.imatrix.file"].contents() == "imatrix.gguf"
    assert fields["quantize.imatrix.dataset"].contents() == "text.txt"
    assert fields["quantize.imatrix.entries_count"].contents() == 15
    assert fields["quantize.imatrix.chunks_count"].contents() == 2


def test_imatrix_lowers_the_weighted_error(source: Path, imatrix: Path, tmp_path: Path) -> None:
    from lazyweights.llama.hessians import Hessians

    stock_quantize(source, tmp_path / "plain.gguf", "Q4_0", pure=True)
    stock_quantize(source, tmp_path / "weighted.gguf", "Q4_0", pure=True, imatrix=imatrix)
    name = "blk.0.ffn_down.weight"
    weights = tensors(source)[name].data.astype(np.float64)
    importance = Hessians.load(imatrix).diagonal(name)
    errors = []
    for path in ("plain.gguf", "weighted.gguf"):
        found = tensors(tmp_path / path)[name]
        errors.append(float((importance * (gguf.dequantize(found.data, found.tensor_type) - weights) ** 2).sum()))
    assert errors[1] < 0.98 * errors[0]


def test_hessians_and_both_imatrix_formats_give_the_same(source: Path, imatrix: Path, tmp_path: Path) -> None:
    text = source.with_name("text.txt")
    passes.capture(source, text, tmp_path / "full", n_ctx=64, n_chunks=2)
    passes.capture(source, text, tmp_path / "i.dat", kind="diagonal", n_ctx=64, n_chunks=2, imatrix_format="dat")
    name = "blk.0.attn_q.weight"
    found = []
    for used in (imatrix, tmp_path / "full", tmp_path / "i.dat"):
        stock_quantize(source, tmp_path / "out.gguf", "Q4_K_S", imatrix=used, force=True)
        found.append(tensors(tmp_path / "out.gguf")[name].data.tobytes())
    assert found[0] == found[1]
    assert np.mean(np.frombuffer(found[0], np.uint8) != np.frombuffer(found[2], np.uint8)) < 0.01  # rounded once more


def test_types_that_need_an_imatrix(source: Path, imatrix: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.gguf"
    with pytest.raises(QuantizationError, match="IQ2_XXS needs an imatrix"):
        stock_quantize(source, output, "IQ2_XXS")
    result = stock_quantize(source, output, "IQ2_XXS", imatrix=imatrix)
    assert result.bpw < 8
    assert tensors(output)["blk.1.attn_q.weight"].tensor_type.name == "IQ2_XXS"


def test_coded_source_gives_the_same(source: Path, tmp_path: Path) -> None:
    encode_file(source, tmp_path / "tiny.gguf.lw")
    for path, output in ((source, "a"), (tmp_path / "tiny.gguf.lw", "b")):
        stock_quantize(path, tmp_path / output, "Q5_1")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_errors_leave_nothing(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.gguf"
    with pytest.raises(QuantizationError, match=r"no type 'Q4_K_X'; there are .*Q4_K_M.*Q8_0"):
        stock_quantize(source, output, "Q4_K_X")
    with pytest.raises(OutputExistsError):
        stock_quantize(source, source, "Q4_0", force=True)
    with pytest.raises(LazyWeightsError):
        stock_quantize(tmp_path / "none.gguf", output, "Q4_0")
    (tmp_path / "no.imatrix").write_bytes(b"nothing of the kind")
    with pytest.raises(QuantizationError, match="not an imatrix file"):
        stock_quantize(source, output, "Q4_0", imatrix=tmp_path / "no.imatrix")
    (tmp_path / "broken.gguf").write_bytes(source.read_bytes()[:20000])
    with pytest.raises(QuantizationError, match="cannot quantize this model"):
        stock_quantize(tmp_path / "broken.gguf", output, "Q4_0")
    stock_quantize(source, tmp_path / "q8.gguf", "Q8_0")
    with pytest.raises(QuantizationError, match="requantizing from type q8_0 is disabled"):
        stock_quantize(tmp_path / "q8.gguf", output, "Q4_0")
    stock_quantize(tmp_path / "q8.gguf", tmp_path / "q4.gguf", "Q4_0", allow_requantize=True)
    assert sorted(os.listdir(tmp_path)) == ["broken.gguf", "no.imatrix", "q4.gguf", "q8.gguf"]


def test_existing_outputs_are_kept_without_force(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.gguf"
    output.write_bytes(b"mine")
    with pytest.raises(OutputExistsError):
        stock_quantize(source, output, "Q4_0")
    assert output.read_bytes() == b"mine"
    stock_quantize(source, output, "Q4_0", force=True)
    assert output.stat().st_size > 1000
    assert os.listdir(tmp_path) == ["out.gguf"]


def test_interruption_ends_the_process_and_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    popen = stock.subprocess.Popen

    def keep(*arguments: object, **options: object) -> object:
        started.append(popen(*arguments, **options))  # type: ignore[call-overload]
        return started[-1]

    def stop(n_done: int, n_total: int, name: str) -> None:
        assert 0 <= n_done < n_total == 21
        raise KeyboardInterrupt

    monkeypatch.setattr(stock.subprocess, "Popen", keep)
    with pytest.raises(KeyboardInterrupt):
        stock_quantize(source, tmp_path / "out.gguf", "Q4_K_M", progress=stop)
    assert started[0].returncode is not None
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_process_that_dies_is_an_error(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = []
    popen = stock.subprocess.Popen

    def keep(*arguments: object, **options: object) -> object:
        killed.append(popen(*arguments, **options))  # type: ignore[call-overload]
        return killed[-1]

    monkeypatch.setattr(stock.subprocess, "Popen", keep)
    with pytest.raises(QuantizationError, match=r"its process ended with -(6|9)"):
        stock_quantize(
            source, tmp_path / "out.gguf", "Q4_K_M", progress=lambda *_: os.kill(killed[0].pid, signal.SIGKILL)
        )
    assert os.listdir(tmp_path) == []
