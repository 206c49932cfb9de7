"""The tuned quantizer on the tiny model: the same bytes whatever the threads, resumed runs, containers, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest

pytest.importorskip("llama_cpp")

import lazyweights
from lazyweights.container.decoder import decode_file
from lazyweights.container.encoder import encode_file
from lazyweights.container.inspect import inspect_file
from lazyweights.errors import OutputExistsError, QuantizationError
from lazyweights.llama.passes import capture
from lazyweights.llama.perplexity import kl_divergence, perplexity
from lazyweights.quant import tuned
from lazyweights.quant.curvature import measure_curvature
from lazyweights.quant.tuned import TunedQuantizer, TunedResult
from tests.llama.texts import english
from tests.llama.tiny_model import write_tiny_model

TEXT = english(900)


@pytest.fixture(scope="module", autouse=True)
def small_slabs() -> object:
    """Several slabs a tensor."""
    before, tuned.SLAB_ROWS = tuned.SLAB_ROWS, 128
    yield
    tuned.SLAB_ROWS = before


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tuned") / "tiny.gguf", n_embedding=256)


@pytest.fixture(scope="module")
def curvature(model: Path) -> Path:
    text, path = model.with_name("text"), model.with_name("curvature")
    text.write_bytes(TEXT)
    measure_curvature(model, text, path, n_ctx=64, n_chunks=16)
    return path


@pytest.fixture(scope="module")
def hessians(model: Path, curvature: Path) -> Path:
    path = model.with_name("hessians")
    capture(model, curvature.with_name("text"), path, n_ctx=64, n_chunks=16)
    return path


def quantize(model: Path, known: Path, out: Path, step: float = 1.0, threads: int = 0, **settings: object) -> TunedResult:
    with TunedQuantizer(model, known, threads=threads, **settings) as quantizer:
        return quantizer.quantize(out, step)


def divergence(base: Path, model: Path) -> float:
    """Mean divergence from the base, by llama.cpp."""
    logits = base.with_name("logits")
    if not logits.exists():
        perplexity(base, TEXT, n_ctx=64, base_file=logits)
    return kl_divergence(model, logits).statistics.kld.value


def weights_of(path: Path) -> dict[str, np.ndarray]:
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}


def test_bytes_do_not_depend_on_threads(model: Path, curvature: Path, tmp_path: Path) -> None:
    one, three = (quantize(model, curvature, tmp_path / str(n), threads=n) for n in (1, 3))
    assert (tmp_path / "1").read_bytes() == (tmp_path / "3").read_bytes()
    assert one.tensors == three.tensors
    assert one.n_weights == sum(w.size for w in weights_of(model).values())


def test_metadata_and_other_tensors_are_kept(model: Path, curvature: Path, tmp_path: Path) -> None:
    quantize(model, curvature, tmp_path / "out")
    before, after = gguf.GGUFReader(model), gguf.GGUFReader(tmp_path / "out")
    assert [t.name for t in before.tensors] == [t.name for t in after.tensors]
    assert {k: [bytes(p) for p in f.parts] for k, f in before.fields.items() if not k.startswith("GGUF.")} == {
        k: [bytes(p) for p in f.parts] for k, f in after.fields.items() if not k.startswith("GGUF.")
    }
    for old, new in zip(before.tensors, after.tensors, strict=True):
        if old.tensor_type == gguf.GGMLQuantizationType.F32:
            assert np.array_equal(old.data, new.data)
        else:
            assert new.tensor_type in {gguf.GGMLQuantizationType[name] for name in ("Q4_0", "Q5_0", "Q8_0")}


def test_larger_steps_cost_quality_and_save_bits(model: Path, curvature: Path, tmp_path: Path) -> None:
    results = [quantize(model, curvature, tmp_path / str(step), step) for step in (2.0, 4.0)]
    bits = [sum(t["entropy_bits"] * t["n_weights"] for t in result.tensors) / result.n_weights for result in results]
    assert 0.6 < bits[0] - bits[1] < 1.05  # a bit, less where codes are few
    predicted = [result.predicted_kld for result in results]
    assert predicted[1] / predicted[0] == pytest.approx(4, rel=0.4)
    assert predicted[0] == pytest.approx(2**2 * tuned.TARGET_DIVERGENCE, rel=0.4)  # what a step of 2 is meant to cost
    for step, expected in zip(("2.0", "4.0"), predicted, strict=True):
        assert 0.4 < divergence(model, tmp_path / step) / expected < 2.5


@pytest.mark.parametrize("container", ["Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K", "Q5_1", "Q4_1", "Q5_0", "Q4_0"])
def test_containers_load_and_come_close(model: Path, curvature: Path, tmp_path: Path, container: str) -> None:
    result = quantize(model, curvature, tmp_path / "out", 2.0, container=container)
    # Rows of ffn_down are one and a half super-blocks.
    assert {report["type"] for report in result.tensors if "ffn_down" not in report["name"]} == {container}
    # The prediction knows which sub-blocks were widened: many, where codes are few. Then it is no small change any more.
    assert (0.3 if result.predicted_kld < 1 else 0.01) < divergence(model, tmp_path / "out") / result.predicted_kld < 2.5
    lazyweights.encode(tmp_path / "out", tmp_path / "out.lw")
    lazyweights.decode(tmp_path / "out.lw", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == (tmp_path / "out").read_bytes()


def test_rows_that_are_no_whole_super_blocks(tmp_path: Path, curvature: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny.gguf")  # 64 and 96 columns
    text = curvature.with_name("text")
    measure_curvature(model, text, tmp_path / "c", n_ctx=64, n_chunks=4)
    result = quantize(model, tmp_path / "c", tmp_path / "out", container="Q6_K")
    assert {report["type"] for report in result.tensors} == {"Q8_0"}
    assert {r["type"] for r in quantize(model, tmp_path / "c", tmp_path / "out4", container="Q4_K").tensors} == {"Q4_0"}


def test_plain_hessians_work_too(model: Path, hessians: Path, tmp_path: Path) -> None:
    result = quantize(model, hessians, tmp_path / "out")
    assert result.predicted_kld == 0.0
    assert len(result.tensors) == 16
    assert 0.02 < divergence(model, tmp_path / "out") < 0.6


def test_experts(tmp_path: Path) -> None:
    """Each expert has a Hessian of its own; one that no token came to takes the diagonal of all."""
    model = write_tiny_model(tmp_path / "experts.gguf", n_experts=4, n_used=1)
    (tmp_path / "text").write_bytes(TEXT)
    capture(model, tmp_path / "text", tmp_path / "h", n_ctx=64, n_chunks=16)
    result = quantize(model, tmp_path / "h", tmp_path / "out", threads=2)
    experts = [report for report in result.tensors if "_exps" in report["name"]]
    assert {report["type"] for report in experts} == {"Q8_0"}
    assert {report["fallback_share"] for report in experts} <= {0.0, 0.25, 0.5}
    assert not any("gate_inp" in report["name"] for report in result.tensors)
    before, after = weights_of(model), weights_of(tmp_path / "out")
    for name in (report["name"] for report in experts):
        error = np.sqrt(np.mean((before[name] - after[name]) ** 2, axis=(1, 2)) / np.mean(before[name] ** 2, axis=(1, 2)))
        assert error.shape == (4,)
        assert 0.005 < error.min() <= error.max() < 0.3
    assert divergence(model, tmp_path / "out") < 0.5


def test_each_part_of_the_method_can_be_left_out(model: Path, curvature: Path, tmp_path: Path) -> None:
    files = set()
    switches = (
        "use_gptq", "use_order", "use_column_steps", "use_row_steps", "use_sensitivity", "quantize_embedding", "use_widening"
    )  # fmt: skip
    for switch in (None, *switches):
        settings = {"container": "Q4_0", **({} if switch is None else {switch: False})}
        result = quantize(model, curvature, tmp_path / f"{switch}", 1.5, **settings)
        files.add((tmp_path / f"{switch}").read_bytes())
        names = {report["name"] for report in result.tensors}
        assert ("token_embd.weight" in names) == (switch != "quantize_embedding")
        assert any(report["widened"] > 0 for report in result.tensors) == (switch != "use_widening")
    assert len(files) == 1 + len(switches)


def test_the_order_of_columns_is_undone(model: Path, curvature: Path, tmp_path: Path) -> None:
    """Weights come back where they were: a fine step leaves them all but unchanged."""
    quantize(model, curvature, tmp_path / "out", 0.02, container="Q8_0")
    found = weights_of(tmp_path / "out")
    for name, source in weights_of(model).items():
        assert np.corrcoef(source.ravel(), found[name].ravel())[0, 1] > 0.999, name


def test_codes_on_a_trellis_make_a_smaller_file(model: Path, curvature: Path, tmp_path: Path) -> None:
    sizes, errors = [], []
    for use in (True, False):
        result = quantize(model, curvature, tmp_path / "out", 4.0, container="Q8_0", use_trellis=use)
        sizes.append(sum(report["entropy_bits"] * report["n_weights"] for report in result.tensors) / result.n_weights)
        errors.append(result.predicted_kld)
        encode_file(tmp_path / "out", tmp_path / f"{use}.lw")
        decode_file(tmp_path / f"{use}.lw", tmp_path / "back", force=True)
        assert (tmp_path / "back").read_bytes() == (tmp_path / "out").read_bytes()
        (tmp_path / "out").unlink()
        coded = {t.name for t in inspect_file(tmp_path / f"{use}.lw").tensors if t.is_trellis}
        assert ("blk.0.ffn_down.weight" in coded) == use
    assert sizes[0] < sizes[1] - 0.1
    assert errors[0] == pytest.approx(errors[1], rel=0.05)
    assert (tmp_path / "True.lw").stat().st_size < (tmp_path / "False.lw").stat().st_size


def test_an_interrupted_run_goes_on(model: Path, curvature: Path, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop_at_five(done: int, total: int, name: str) -> None:
        if done == 5:
            raise Stop

    whole = quantize(model, curvature, tmp_path / "whole")
    with TunedQuantizer(model, curvature) as quantizer:
        with pytest.raises(Stop):
            quantizer.quantize(tmp_path / "out", 1.0, parts=tmp_path / "parts", progress=stop_at_five)
        assert not (tmp_path / "out").exists()
        kept = list((tmp_path / "parts").iterdir())
        assert kept
        other = quantizer.quantize(tmp_path / "other", 1.5, parts=tmp_path / "parts2")
        assert other.n_reused == 0
        result = quantizer.quantize(tmp_path / "out", 1.0, parts=tmp_path / "parts")
    assert result.n_reused == len(kept)
    assert result.tensors == whole.tensors
    assert (tmp_path / "out").read_bytes() == (tmp_path / "whole").read_bytes()
    assert not (tmp_path / "parts").exists()


def test_parts_of_another_step_are_not_used(model: Path, curvature: Path, tmp_path: Path) -> None:
    with TunedQuantizer(model, curvature) as quantizer:
        quantizer.quantize(tmp_path / "a", 1.0)
        (tmp_path / "parts").mkdir()
        (tmp_path / "parts" / "0123456789abcdef-x.tensor").write_bytes(b"{}\n")
        assert quantizer.quantize(tmp_path / "b", 1.0, parts=tmp_path / "parts").n_reused == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_damaged_part_is_made_anew(model: Path, curvature: Path, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop_at_five(done: int, total: int, name: str) -> None:
        if done == 5:
            raise Stop

    parts = tmp_path / "parts"
    with TunedQuantizer(model, curvature, threads=1) as quantizer:
        quantizer.quantize(tmp_path / "whole", 1.0)
        with pytest.raises(Stop):
            quantizer.quantize(tmp_path / "out", 1.0, parts=parts, progress=stop_at_five)
        first, second, *others = sorted(parts.iterdir())
        first.write_bytes(b"")
        data = bytearray(second.read_bytes())
        data[-1] ^= 1
        second.write_bytes(data)
        (parts / "mine.tensor").write_text("mine")
        result = quantizer.quantize(tmp_path / "out", 1.0, parts=parts)
    assert result.n_reused == len(others)
    assert (tmp_path / "out").read_bytes() == (tmp_path / "whole").read_bytes()
    assert [path.name for path in parts.iterdir()] == ["mine.tensor"]


def test_parts_of_another_model_are_not_used(curvature: Path, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop_at_five(done: int, total: int, name: str) -> None:
        if done == 5:
            raise Stop

    model = write_tiny_model(tmp_path / "m.gguf", n_embedding=256, seed=1)
    with TunedQuantizer(model, curvature) as quantizer, pytest.raises(Stop):
        quantizer.quantize(tmp_path / "out", 1.0, parts=tmp_path / "parts", progress=stop_at_five)
    write_tiny_model(model, n_embedding=256, seed=2)
    with TunedQuantizer(model, curvature) as quantizer:
        result = quantizer.quantize(tmp_path / "out", 1.0, parts=tmp_path / "parts")
        quantizer.quantize(tmp_path / "anew", 1.0)
    assert result.n_reused == 0
    assert (tmp_path / "out").read_bytes() == (tmp_path / "anew").read_bytes()


def test_row_weights_of_another_model(model: Path, curvature: Path, tmp_path: Path) -> None:
    data = bytearray(curvature.read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    entry = header["output.weight.row_weights"]
    entry["shape"] = [entry["shape"][0] - 8]
    entry["data_offsets"][1] -= 64
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    data[8 : 8 + length] = text.ljust(length)
    (tmp_path / "c").write_bytes(data)
    with TunedQuantizer(model, tmp_path / "c") as quantizer, pytest.raises(QuantizationError, match="another model"):
        quantizer.quantize(tmp_path / "x", 1.0)


def test_an_imatrix_without_the_output(model: Path, curvature: Path, tmp_path: Path) -> None:
    capture(model, curvature.with_name("text"), tmp_path / "i.gguf", kind="diagonal", imatrix_format="gguf", n_ctx=64, n_chunks=8)
    with TunedQuantizer(model, tmp_path / "i.gguf") as quantizer:
        result = quantizer.quantize(tmp_path / "x", 1.0)
        assert quantizer.left_out == ["output.weight"]
    assert {report["fallback"] for report in result.tensors} == {None}
    assert divergence(model, tmp_path / "x") < 1.0


def test_refusals(model: Path, curvature: Path, hessians: Path, tmp_path: Path) -> None:
    with pytest.raises(QuantizationError, match="there are Q2_K"):
        TunedQuantizer(model, curvature, container="Q7_K")
    with TunedQuantizer(model, curvature) as quantizer, pytest.raises(QuantizationError, match="above 0"):
        quantizer.quantize(tmp_path / "x", 0.0)
    other = write_tiny_model(tmp_path / "other.gguf")
    with TunedQuantizer(other, curvature) as quantizer, pytest.raises(QuantizationError, match="another model"):
        quantizer.quantize(tmp_path / "x", 1.0)
    with pytest.raises(QuantizationError, match="--allow-requantize"):
        TunedQuantizer(write_tiny_model(tmp_path / "q.gguf", file_type="Q8_0", n_embedding=256), curvature)
    (tmp_path / "there").write_text("mine")
    with TunedQuantizer(model, curvature) as quantizer, pytest.raises(OutputExistsError):
        quantizer.quantize(tmp_path / "there", 1.0)
    assert (tmp_path / "there").read_text() == "mine"
    assert not (tmp_path / "x").exists()


def test_unusable_hessians_fail_the_run(model: Path, curvature: Path, tmp_path: Path) -> None:
    data = bytearray(curvature.read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for name, entry in header.items():
        if name.endswith("ffn_up.weight.hessian"):
            start = 8 + length + entry["data_offsets"][0]
            data[start + 4 : start + 8] = np.float32(np.nan).tobytes()
    (tmp_path / "c").write_bytes(data)
    with TunedQuantizer(model, tmp_path / "c") as quantizer, pytest.raises(QuantizationError, match=r"no usable Hessian.*ffn_up"):
        quantizer.quantize(tmp_path / "x", 1.0)
    assert not (tmp_path / "x").exists()
