"""Activation capture on a tiny model, against inputs that are computed here without llama.cpp where that is possible."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import gguf
import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from lazyweights.container.encoder import encode_file
from lazyweights.errors import BackendUnavailableError, LazyWeightsError, OutputExistsError
from lazyweights.llama import accumulators, capture, ggml_tensor, passes
from lazyweights.llama.ggml_tensor import GgmlTensor, Tensors
from lazyweights.llama.hessians import Hessians
from lazyweights.llama.imatrix import read_imatrix
from lazyweights.llama.model import Context, Model
from lazyweights.llama.passes import CaptureProgress
from tests.llama.tiny_model import N_EMBEDDING, N_FEED_FORWARD, N_LAYERS, write_tiny_model

TEXT = b"The rain in there went on and on; the hens ran to their den. One man wrote it all down again, " * 20
N_CTX, N_CHUNKS = 64, 3
Q, K, V = (f"blk.0.attn_{letter}.weight" for letter in "qkv")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and the text."""
    folder = tmp_path_factory.mktemp("capture")
    (folder / "text.txt").write_bytes(TEXT)
    write_tiny_model(folder / "tiny.gguf")
    write_tiny_model(folder / "tied.gguf", tied=True, add_bos=False)
    write_tiny_model(folder / "experts.gguf", n_experts=6, n_used=2)
    return folder


def run(folder: Path, name: str = "tiny", **options: object) -> Hessians:
    """Capture to a new file and load it."""
    output = folder / f"{len(list(folder.iterdir()))}.out"
    arguments = {"n_ctx": N_CTX, "n_chunks": N_CHUNKS, "threads": 2, **options}
    passes.capture(folder / f"{name}.gguf", folder / "text.txt", output, **arguments)  # type: ignore[arg-type]
    return Hessians.load(output)


@pytest.fixture(scope="module")
def hessians(folder: Path) -> Hessians:
    return run(folder)


def tensor(path: Path, name: str) -> np.ndarray:
    (found,) = [t for t in gguf.GGUFReader(path).tensors if t.name == name]
    return np.array(found.data, np.float32)


def tokens_of(path: Path) -> np.ndarray:
    """The tokens that a run sees, with the BOS at the start of each chunk."""
    with Model(path) as model:
        tokens = model.tokenize(TEXT)[: N_CTX * N_CHUNKS].reshape(N_CHUNKS, N_CTX)
        if model.adds_bos:
            tokens[:, 0] = model.bos
    return tokens.reshape(-1)


def first_inputs(path: Path) -> np.ndarray:
    """What blk.0.attn_q is multiplied with, float64: the normalized rows of the token embedding."""
    rows = tensor(path, "token_embd.weight")[tokens_of(path)].astype(np.float64)
    rows /= np.sqrt(np.mean(rows * rows, axis=1, keepdims=True) + 1e-5)
    return rows * tensor(path, "blk.0.attn_norm.weight")


def assert_close(found: np.ndarray, reference: np.ndarray, tolerance: float) -> None:
    """Elements of Hessians, relative to the root of the product of the diagonal elements."""
    diagonal = np.sqrt(np.diagonal(reference, axis1=-2, axis2=-1))
    scale = diagonal[..., :, None] * diagonal[..., None, :]
    assert np.all(np.abs(found - reference) <= tolerance * scale)


# The structure of the library.


def swapped(first: str, second: str) -> type[ctypes.Structure]:
    fields = list(GgmlTensor._fields_)
    i, j = ([name for name, *_ in fields].index(which) for which in (first, second))
    fields[i], fields[j] = fields[j], fields[i]
    return type("Swapped", (ctypes.Structure,), {"_fields_": fields})


@pytest.mark.parametrize("pair", [("view_src", "data"), ("ne", "nb"), ("type", "flags"), ("data", "extra"), ("op", "flags")])
def test_wrong_layouts_are_refused(pair: tuple[str, str]) -> None:
    with pytest.raises(BackendUnavailableError, match="laid out otherwise"):
        Tensors(swapped(*pair))


def test_wrong_sizes_are_refused_before_anything_is_read() -> None:
    longer = type("Longer", (ctypes.Structure,), {"_fields_": [*GgmlTensor._fields_, ("more", ctypes.c_int64)]})
    with pytest.raises(BackendUnavailableError, match="size of the structure"):
        Tensors(longer)


def test_layout_of_this_build() -> None:
    tensors = Tensors()
    assert tensors.mul_mat != tensors.mul_mat_id


def test_values_follow_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = Tensors()
    monkeypatch.setattr(tensors, "_is_host", lambda buffer: True)
    memory = np.arange(60, dtype=np.float32)
    view = memory.reshape(3, 4, 5)[:, ::2, 1:4].transpose(1, 0, 2)
    node = GgmlTensor(type=ggml_tensor.F32, buffer=1, data=view.ctypes.data, ne=(3, 3, 2, 1), nb=(*view.strides[::-1], 240))
    assert np.array_equal(tensors.values(node)[0], view)
    node.buffer = None
    with pytest.raises(LazyWeightsError, match="not in host memory"):
        tensors.values(node)
    node.buffer, node.type = 1, 2
    with pytest.raises(LazyWeightsError, match=r"cannot be read .*found q4_0"):
        tensors.values(node)


def test_matrices_of_a_weight_get_their_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = Tensors()
    monkeypatch.setattr(tensors, "_is_host", lambda buffer: True)
    rows = np.random.default_rng(2).standard_normal((2, 4, 5, 8)).astype(np.float32)[..., ::2]  # 4 heads for 2 matrices
    weight = GgmlTensor(name=b"blk.0.attn_k_b.weight", ne=(4, 3, 2, 1))
    node = GgmlTensor(type=ggml_tensor.F32, buffer=1, data=rows.ctypes.data, ne=(4, 5, 4, 2), nb=rows.strides[::-1])
    group = capture.InputGroup(("blk.0.attn_k_b.weight",), 4, 2, False)
    sums = accumulators.make("hessian", 4, 0, 2, 0)
    collector = capture.Collector(tensors, [group], {group.leader: sums})
    collector.start_batch(5)
    assert collector.take(capture._Product(group.leader, (1, 0), False, weight, node, None))
    collector.end_batch()
    assert sums.n_rows.tolist() == [20, 20]
    for matrix in range(2):
        own = rows[:, 2 * matrix : 2 * matrix + 2].reshape(-1, 4).astype(np.float64)
        np.testing.assert_allclose(sums.values[matrix], own.T @ own, rtol=1e-13)


# Hessians.


def test_first_hessian_is_that_of_known_inputs(folder: Path, hessians: Hessians) -> None:
    inputs = first_inputs(folder / "tiny.gguf")
    assert hessians.n_rows(Q) == len(inputs) == N_CTX * N_CHUNKS
    assert hessians[Q].dtype == np.float64
    assert_close(hessians[Q], inputs.T @ inputs, 1e-6)


def test_every_matrix_is_there(hessians: Hessians) -> None:
    parts = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    assert set(hessians) == {f"blk.{i}.{part}.weight" for i in range(N_LAYERS) for part in parts} | {"output.weight"}
    for name in hessians:
        n = N_FEED_FORWARD if "ffn_down" in name else N_EMBEDDING
        assert hessians[name].shape == (n, n)
        assert hessians.n_rows(name) == N_CTX * N_CHUNKS, name  # in the last layer too
        assert hessians.n_dropped(name) == 0


def test_tied_embedding_is_captured_as_output(folder: Path) -> None:
    hessians = run(folder, "tied")
    assert [g.weights for g in hessians.groups if g.is_output] == [("token_embd.weight",)]
    assert not hessians.info.adds_bos
    inputs = first_inputs(folder / "tied.gguf")
    assert_close(hessians[Q], inputs.T @ inputs, 1e-6)


def test_hessians_are_symmetric_and_positive_semidefinite(hessians: Hessians) -> None:
    for name in hessians:
        values = hessians[name]
        assert np.array_equal(values, values.T)
        eigenvalues = np.linalg.eigvalsh(values)
        assert eigenvalues[0] >= -1e-13 * eigenvalues[-1]


def test_shared_inputs(hessians: Hessians) -> None:
    assert set(hessians.shared_with(Q)) == set(hessians.shared_with(V)) == {Q, K, V}
    assert set(hessians.shared_with("blk.1.ffn_up.weight")) == {"blk.1.ffn_up.weight", "blk.1.ffn_gate.weight"}
    assert hessians.shared_with("blk.1.ffn_down.weight") == ("blk.1.ffn_down.weight",)
    assert len(hessians.groups) == 4 * N_LAYERS + 1
    assert hessians[K] is not None
    assert np.shares_memory(hessians[Q], hessians[K])


def test_diagonal_equals_that_of_hessians_and_of_an_imatrix(folder: Path, hessians: Hessians) -> None:
    squares = run(folder, kind="diagonal")
    for file_format in ("gguf", "dat"):
        output = folder / f"imatrix.{file_format}"
        passes.capture(
            folder / "tiny.gguf", folder / "text.txt", output, kind="diagonal", n_ctx=N_CTX, n_chunks=N_CHUNKS,
            imatrix_format=file_format, process_output=True,
        )  # fmt: skip
        imatrix = read_imatrix(output, chunk_size=N_CTX)
        assert set(imatrix) == set(hessians)
        for name in hessians:
            assert imatrix.n_rows(name) == squares.n_rows(name) == hessians.n_rows(name)
            np.testing.assert_allclose(squares[name], hessians.diagonal(name), rtol=1e-12)
            np.testing.assert_allclose(imatrix[name], squares[name], rtol=3e-7)  # float32 in these files


def test_several_passes_give_the_same(folder: Path, hessians: Hessians) -> None:
    seen: list[CaptureProgress] = []
    each = 8 * N_FEED_FORWARD**2
    again = run(folder, max_memory=3 * each, progress=seen.append)
    n_passes = seen[-1].n_passes
    assert n_passes > 2
    assert [p.n_done for p in seen] == list(range(1, n_passes * N_CHUNKS + 1))
    assert seen[-1].n_done == seen[-1].n_total
    for name in hessians:
        assert np.array_equal(hessians[name], again[name]), name


def test_memory_for_one_matrix_is_needed(folder: Path) -> None:
    with pytest.raises(LazyWeightsError, match="too small for the accumulator"):
        run(folder, max_memory=8 * N_FEED_FORWARD**2)


def test_chunks_longer_than_a_batch(folder: Path, hessians: Hessians, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "MAX_BATCH", 24)  # 24, 24 and 16 tokens
    for memory in (10**9, 3 * 8 * N_FEED_FORWARD**2):
        pieces = run(folder, max_memory=memory)
        assert np.array_equal(pieces[Q], pieces[K])
        for name in hessians:
            assert pieces.n_rows(name) == N_CTX * N_CHUNKS
            assert_close(pieces[name], hessians[name], 1e-12 if name == Q else 0.02)  # attention rounds otherwise


def test_stored_as_float32(folder: Path, hessians: Hessians) -> None:
    single = run(folder, dtype="float32")
    assert single[Q].dtype == np.float32
    assert np.array_equal(single[Q], hessians[Q].astype(np.float32))


def test_coded_model_gives_the_same(folder: Path, hessians: Hessians) -> None:
    coded = folder / "coded.gguf"  # the suffix does not matter
    encode_file(folder / "tiny.gguf", coded)
    again = run(folder, "coded")
    assert again.info.model_sha256 == hessians.info.model_sha256
    for name in hessians:
        assert np.array_equal(hessians[name], again[name])


# Samples.


def test_samples_of_all_rows_give_the_hessian(folder: Path, hessians: Hessians) -> None:
    samples = run(folder, kind="samples", n_samples=N_CTX * N_CHUNKS)
    np.testing.assert_allclose(samples[Q], first_inputs(folder / "tiny.gguf"), rtol=1e-5, atol=1e-6)
    for name in hessians:
        rows = samples[name].astype(np.float64)
        assert_close(rows.T @ rows, hessians[name], 1e-12)


def test_samples_are_a_choice_of_the_same_tokens(folder: Path) -> None:
    every = run(folder, kind="samples", n_samples=N_CTX * N_CHUNKS)
    some = run(folder, kind="samples", n_samples=16)
    picked = [[int(np.flatnonzero((every[name] == row).all(axis=1))[0]) for row in some[name]] for name in (Q, "output.weight")]
    inputs = every[Q]
    assert np.array_equal(inputs[picked[0]], some[Q])
    assert np.array_equal(inputs[picked[1]], some[Q])  # the places are the same too
    assert max(picked[1]) > 100  # not just the first ones
    assert some.n_rows(Q) == N_CTX * N_CHUNKS


# Experts.


def test_experts_see_the_tokens_that_the_router_sends(folder: Path) -> None:
    hessians = run(folder, "experts")
    samples = run(folder, "experts", kind="samples", n_samples=N_CTX * N_CHUNKS)
    gate, router = "blk.0.ffn_gate_exps.weight", "blk.0.ffn_gate_inp.weight"
    inputs = samples[router].astype(np.float64)
    chosen = np.argsort(-(inputs @ tensor(folder / "experts.gguf", router).T.astype(np.float64)), axis=1)[:, :2]
    counts = np.bincount(chosen.reshape(-1), minlength=6)
    assert np.array_equal(hessians.n_rows(gate), counts)
    assert set(hessians.shared_with(gate)) == {gate, "blk.0.ffn_up_exps.weight"}
    assert hessians[gate].shape == (6, N_EMBEDDING, N_EMBEDDING)
    for expert in range(6):
        rows = inputs[(chosen == expert).any(axis=1)]
        assert_close(hessians[gate][expert], rows.T @ rows, 1e-12)
    down = "blk.0.ffn_down_exps.weight"  # a row for each token and expert
    assert np.array_equal(hessians.n_rows(down), counts)
    assert hessians[down].shape == (6, N_FEED_FORWARD, N_FEED_FORWARD)


def test_experts_are_split_over_passes(folder: Path) -> None:
    whole = run(folder, "experts")
    seen: list[CaptureProgress] = []
    split = run(folder, "experts", max_memory=3 * 8 * N_FEED_FORWARD**2, progress=seen.append)
    assert seen[-1].n_passes > 6
    for name in whole:
        assert np.array_equal(whole[name], split[name]), name
        assert np.array_equal(whole.n_rows(name), split.n_rows(name))


# What goes wrong.


@pytest.mark.parametrize("failure", [ValueError("in the callback"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", ["ask", "take"])
def test_errors_in_the_callback_are_raised_outside(folder: Path, failure: BaseException, at: str) -> None:
    class Failing(capture.Watcher):
        n_calls = 0

        def ask(self, product: object) -> bool:
            self.n_calls += 1
            if at == "ask":
                raise failure
            return product is not None

        def take(self, product: object) -> bool:
            raise failure

    watcher = Failing(Tensors())
    with Model(folder / "tiny.gguf") as model, Context(model, n_ctx=64, n_batch=64, callback=watcher) as context:
        context.decode([1, 5, 6], range(3), [0] * 3, [True] * 3)
    with pytest.raises(type(failure)):
        watcher.check()
    assert watcher.n_calls < 20  # the evaluation ended there
    watcher.check()


def test_not_finite_rows_are_dropped_and_counted() -> None:
    rows = np.random.default_rng(1).standard_normal((6, 4)).astype(np.float32)
    rows[1, 2], rows[4, 0] = np.nan, np.inf
    for kind in accumulators.KINDS:
        sums = accumulators.make(kind, 4, 3, 5, n_samples=8)
        sums.add(3, rows)
        sums.add(2, rows)  # held in another pass
        assert sums.n_rows.tolist() == [4, 0]
        assert sums.n_dropped.tolist() == [2, 0]
        good = rows[[0, 2, 3, 5]].astype(np.float64)
        expected = {"hessian": good.T @ good, "diagonal": (good**2).sum(0), "samples": np.vstack([good, np.zeros((4, 4))])}
        np.testing.assert_allclose(sums.values[0], expected[kind], rtol=1e-14)


def test_sums_do_not_lose_small_rows_among_large_ones() -> None:
    sums = accumulators.make("hessian", 2, 0, 1, 0)
    sums.add(0, np.array([[1e18, 1.0]], np.float32))
    for _ in range(100):
        sums.add(0, np.array([[1e-3, 1e-3]], np.float32))
    small = float(np.float32(1e-3))
    np.testing.assert_allclose(sums.values[0, 1], [float(np.float32(1e18)), 1 + 100 * small**2], rtol=1e-13)


def test_environment_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for before in ("ACTIVE", None):
        if before is None:
            monkeypatch.delenv(passes.WAIT_POLICY)
        else:
            monkeypatch.setenv(passes.WAIT_POLICY, before)
        passes._load_passive()
        assert os.environ.get(passes.WAIT_POLICY) == before


def test_outputs_and_texts_are_checked(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputExistsError):
        passes.capture(folder / "tiny.gguf", folder / "text.txt", folder / "tiny.gguf", force=True)
    (tmp_path / "short.txt").write_bytes(b"no")
    with pytest.raises(LazyWeightsError, match="shorter than a chunk"):
        passes.capture(folder / "tiny.gguf", tmp_path / "short.txt", tmp_path / "out")
    with pytest.raises(LazyWeightsError, match="cannot read"):
        passes.capture(folder / "tiny.gguf", tmp_path / "none.txt", tmp_path / "out")

    def stop(_: CaptureProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        passes.capture(folder / "tiny.gguf", folder / "text.txt", tmp_path / "out", n_ctx=64, progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["short.txt"]


# A real model.

REPOSITORY = Path(__file__).resolve().parents[2]
SMOLLM2 = REPOSITORY / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.real
def test_real_model(tmp_path: Path) -> None:
    if not SMOLLM2.is_file():
        pytest.skip(f"{SMOLLM2.name} is not in .cache/models; `make test` fetches it")
    text = REPOSITORY / "docs" / "format.md"
    for output, options in (("h", {"max_memory": 600_000_000}), ("i.gguf", {"kind": "diagonal", "imatrix_format": "gguf"})):
        result = passes.capture(SMOLLM2, text, tmp_path / output, n_chunks=2, n_ctx=256, **options)  # type: ignore[arg-type]
        assert result.n_passes == (2 if output == "h" else 1)
        assert (len(result.groups), result.n_dropped, result.info.n_tokens) == (121, 0, 512)
    hessians, imatrix = Hessians.load(tmp_path / "h"), Hessians.load(tmp_path / "i.gguf")
    assert len(hessians) == 211
    assert set(hessians) - set(imatrix) == {"token_embd.weight"}
    for name in imatrix:
        assert hessians.n_rows(name) == imatrix.n_rows(name) == 512
        np.testing.assert_allclose(imatrix[name], hessians.diagonal(name), rtol=3e-7)
    for name in ("blk.0.attn_q.weight", "blk.29.ffn_up.weight", "token_embd.weight"):
        values = hessians[name]
        assert np.array_equal(values, values.T)
        eigenvalues = np.linalg.eigvalsh(values)
        assert eigenvalues[0] >= -1e-13 * eigenvalues[-1]
