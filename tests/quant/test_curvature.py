"""Curvature of the tiny model: it predicts the divergence of small changes; files and threads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("llama_cpp")

from lazyweights.errors import FormatError, LazyWeightsError, OutputExistsError, QuantizationError
from lazyweights.llama.chunks import split_chunks
from lazyweights.llama.model import Model
from lazyweights.quant.curvature import Curvature, measure_curvature
from lazyweights.quant.float_source import FloatSource
from lazyweights.quant.gguf_rewrite import open_gguf
from lazyweights.quant.transformer import Layer, Rotation, layer_weight_names, normalize, read_architecture
from tests.llama.texts import english
from tests.llama.tiny_model import write_tiny_model

N_CTX, N_CHUNKS = 64, 24


@pytest.fixture(scope="module", params=[False, True], ids=["output", "tied"])
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Model, text and curvature file."""
    folder = tmp_path_factory.mktemp("curvature")
    model = write_tiny_model(folder / "tiny.gguf", file_type="F32", tied=request.param, add_bos=False)
    text = folder / "text.txt"
    text.write_bytes(english(1500))
    measure_curvature(model, text, folder / "c", n_ctx=N_CTX, n_chunks=N_CHUNKS, threads=1)
    return model, text, folder / "c"


def log_probabilities(model: Path, text: Path, changes: dict[str, np.ndarray]) -> np.ndarray:
    """Evaluate all chunks with some matrices changed."""
    with Model(model, vocab_only=True) as vocabulary:
        chunks = split_chunks(vocabulary.tokenize(text.read_bytes()), N_CTX, N_CHUNKS, "tiny")
    with open_gguf(model) as (view, scan):
        source = FloatSource(view, scan)
        arch = read_architecture(source.metadata)
        rotation = Rotation(arch, N_CTX)

        outer = {
            name: source.rows(name) + changes.get(name, np.float32(0))
            for name in ("token_embd.weight", "output.weight") if name in source.tensors
        }  # fmt: skip
        head = outer.get("output.weight", outer["token_embd.weight"])
        results = []
        for chunk in chunks:
            x = outer["token_embd.weight"][chunk]
            for index in range(arch.n_layers):
                layer = {name: w + changes.get(name, np.float32(0)) for name, w in source.layer_weights(f"blk.{index}.").items()}
                x = Layer(arch, index, layer, rotation).forward(x)
            logits = normalize(x, source.vector("output_norm.weight"), arch.norm_epsilon) @ head.T
            logits = logits.astype(np.float64)
            logits -= logits.max(axis=1, keepdims=True)
            results.append(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))
        del source
    return np.concatenate(results)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [(name, 0.6, 1.6) for name in (*layer_weight_names(0)[2:], *layer_weight_names(1)[2:])]
    + [("blk.1.attn_q.weight", 0.5, 2.0), ("blk.1.attn_k.weight", 0.4, 2.5), ("token_embd.weight", 0.5, 2.0),
       ("output.weight", 0.7, 1.4)],
)  # fmt: skip
def test_predicts_the_divergence_of_a_random_change(
    measured: tuple[Path, Path, Path], name: str, low: float, high: float
) -> None:
    model, text, path = measured
    curvature = Curvature(path)
    if name not in curvature:
        assert name == "output.weight"
        return
    found = curvature[name]
    change = np.random.default_rng(5).standard_normal((len(found.row_weights), len(found.hessian))).astype(np.float32)
    predicted = 0.5 * float((found.row_weights * np.einsum("ri,ij,rj->r", change, found.hessian, change)).sum())
    predicted *= found.coherence
    change *= np.float32(np.sqrt(1e-3 / predicted))
    base, moved = log_probabilities(model, text, {}), log_probabilities(model, text, {name: change})
    divergence = float((np.exp(base) * (base - moved)).sum(axis=1).mean())
    assert low < divergence / 1e-3 < high


def test_sums_do_not_depend_on_threads(measured: tuple[Path, Path, Path], tmp_path: Path) -> None:
    model, text, path = measured
    seen: list[tuple[int, int]] = []
    info = measure_curvature(
        model, text, tmp_path / "c", n_ctx=N_CTX, n_chunks=N_CHUNKS, threads=3,
        progress=lambda done, total, what: seen.append((done, total)),
    )  # fmt: skip
    assert (tmp_path / "c").read_bytes() == path.read_bytes()
    assert info == Curvature(path).info
    assert (info.n_ctx, info.n_chunks, info.model, info.text) == (N_CTX, N_CHUNKS, "tiny.gguf", "text.txt")
    assert [done for done, _ in seen] == list(range(1, len(seen) + 1))
    assert seen[-1][0] == seen[-1][1]


def test_every_matrix_is_there(measured: tuple[Path, Path, Path]) -> None:
    model, _, path = measured
    curvature = Curvature(path)
    with open_gguf(model) as (_, scan):
        matrices = {t.name: t.shape for t in scan.tensors if len(t.shape) == 2}
    assert set(curvature) == set(matrices)
    for name, (columns, rows) in matrices.items():
        found = curvature[name]
        assert found.hessian.shape == (columns, columns)
        assert found.row_weights.shape == (rows,)
        assert np.allclose(found.hessian, found.hessian.T, rtol=1e-4, atol=1e-6 * np.abs(found.hessian).max())
        assert np.linalg.eigvalsh(found.hessian.astype(np.float64)).min() > -1e-4 * np.trace(found.hessian)
        assert found.row_weights.min() >= 0
        assert found.coherence > 0


def test_seeds_draw_other_tokens(measured: tuple[Path, Path, Path], tmp_path: Path) -> None:
    model, text, path = measured
    measure_curvature(model, text, tmp_path / "c", n_ctx=N_CTX, n_chunks=N_CHUNKS, seed=1)
    one, other = (Curvature(p)["blk.0.ffn_down.weight"].row_weights for p in (path, tmp_path / "c"))
    assert not np.array_equal(one, other)
    assert 0.7 < one.sum() / other.sum() < 1.4


def test_refusals(measured: tuple[Path, Path, Path], tmp_path: Path) -> None:
    model, text, path = measured
    with pytest.raises(OutputExistsError):
        measure_curvature(model, text, path, n_ctx=N_CTX, n_chunks=2)
    quantized = write_tiny_model(tmp_path / "q.gguf", file_type="Q8_0", add_bos=False)
    with pytest.raises(QuantizationError, match="--allow-requantize"):
        measure_curvature(quantized, text, tmp_path / "c", n_ctx=N_CTX, n_chunks=2)
    short = tmp_path / "short.txt"
    short.write_text("the town")
    with pytest.raises(LazyWeightsError, match="chunk"):
        measure_curvature(model, short, tmp_path / "c", n_ctx=N_CTX)
    experts = write_tiny_model(tmp_path / "e.gguf", n_experts=4, add_bos=False)
    with pytest.raises(QuantizationError, match="mixtures"):
        measure_curvature(experts, text, tmp_path / "c", n_ctx=N_CTX, n_chunks=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["e.gguf", "q.gguf", "short.txt"]


def test_chunks_with_infinite_values_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny_model(tmp_path / "tiny.gguf", file_type="F32", add_bos=False)
    (tmp_path / "text").write_bytes(english(400))
    original = Layer.backward

    def backward(self: Layer, x: np.ndarray, gradient: np.ndarray, record: object) -> np.ndarray:
        def spoiled(name: str, inputs: np.ndarray, g: np.ndarray) -> None:
            is_first = "blk.1.ffn_down" in name and not seen
            seen.extend([1] if is_first else [])
            record(name, inputs * np.float32(np.inf if is_first else 1), g)  # type: ignore[operator]

        return original(self, x, gradient, spoiled)

    seen: list[int] = []
    monkeypatch.setattr(Layer, "backward", backward)
    with np.errstate(invalid="ignore"):
        measure_curvature(model, tmp_path / "text", tmp_path / "c", n_ctx=64, n_chunks=4, threads=1)
    curvature = Curvature(tmp_path / "c")
    assert curvature["blk.1.ffn_down.weight"].n_dropped == 64
    assert curvature["blk.1.ffn_up.weight"].n_dropped == 0
    assert np.isfinite(curvature["blk.1.ffn_down.weight"].hessian).all()


def test_a_coded_model_gives_the_same(measured: tuple[Path, Path, Path], tmp_path: Path) -> None:
    import lazyweights

    model, text, path = measured
    lazyweights.encode(model, tmp_path / "tiny.gguf.lw")
    measure_curvature(tmp_path / "tiny.gguf.lw", text, tmp_path / "c", n_ctx=N_CTX, n_chunks=N_CHUNKS)
    one, other = Curvature(path), Curvature(tmp_path / "c")
    assert other.info.model == "tiny.gguf.lw"
    assert other.info.model_sha256 == one.info.model_sha256
    for name in one:
        assert np.array_equal(one[name].hessian, other[name].hessian)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "tiny.gguf.lw"]


def test_bos_counts_as_often_as_it_comes(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny.gguf", file_type="F32", add_bos=True)
    (tmp_path / "text").write_bytes(english(400))
    measure_curvature(model, tmp_path / "text", tmp_path / "c", n_ctx=N_CTX, n_chunks=4)
    rows = Curvature(tmp_path / "c")["token_embd.weight"].row_weights
    assert rows[1] == pytest.approx(1 / N_CTX, rel=0.05)
    assert rows.sum() == pytest.approx(1)


def test_damaged_files(measured: tuple[Path, Path, Path], tmp_path: Path) -> None:
    data = measured[2].read_bytes()
    for name, changed in (
        ("format", data.replace(b"lazyweights.curvature", b"lazyweights.curvaturX", 1)),
        ("version", data.replace(b'"version":"1"', b'"version":"9"', 1)),
        ("info", data.replace(b"n_chunks", b"n_chunkz", 1)),
        ("array", data.replace(b"blk.0.ffn_up.weight.hessian", b"blk.0.ffn_up.weight.hessiaN", 1)),
    ):
        (tmp_path / name).write_bytes(changed)
        with pytest.raises(FormatError):
            Curvature(tmp_path / name)
