"""Perplexity and KL divergence against the same maths written plainly here, in float64, one chunk at a time."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="needs the extra lazyweights[llama]")

from lazyweights.container.encoder import encode_file
from lazyweights.errors import FormatError, LazyWeightsError, LimitError, OutputExistsError, TruncatedError
from lazyweights.llama import chunks as chunked
from lazyweights.llama.chunks import plan_batches, read_text
from lazyweights.llama.logits_file import LogitsFile, file_bytes
from lazyweights.llama.model import Context, Model
from lazyweights.llama.perplexity import PerplexityResult, kl_divergence, perplexity
from tests.llama.texts import data_file, english, real_model
from tests.llama.tiny_model import N_VOCAB, write_tiny_model

N_CTX = 32
N_SCORED = 15


@pytest.fixture(scope="module", params=[True, False], ids=["bos", "no bos"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return write_tiny_model(folder / "tiny.gguf", add_bos=request.param)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same vocabulary, with other weights; it adds BOS."""
    return write_tiny_model(tmp_path_factory.mktemp("other") / "other.gguf", seed=1)


def plain_log_probs(path: Path, text: bytes, n_ctx: int, n_chunks: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities of all tokens at the scored positions, float64 (n, n_vocab), and the tokens that follow, (n,)."""
    log_probs, targets = [], []
    with Model(path) as model, Context(model, n_ctx=n_ctx, n_batch=n_ctx) as context:
        tokens = model.tokenize(text).tolist()
        n = len(tokens) // n_ctx if n_chunks is None else n_chunks
        for chunk in range(n):
            part = tokens[chunk * n_ctx : (chunk + 1) * n_ctx]
            evaluated = [model.bos, *part[1:]] if model.adds_bos else part
            context.clear()
            context.decode(evaluated, range(n_ctx), [0] * n_ctx, [True] * n_ctx)
            logits = context.logits(n_ctx).astype(np.float64)
            for position in range(n_ctx // 2, n_ctx - 1):
                row = logits[position]
                log_probs.append(row - row.max() - np.log(np.exp(row - row.max()).sum()))
                targets.append(part[position + 1])
    return np.array(log_probs), np.array(targets)


def plain_perplexity(path: Path, text: bytes, n_ctx: int, n_chunks: int | None = None) -> tuple[float, float]:
    log_probs, targets = plain_log_probs(path, text, n_ctx, n_chunks)
    nll = -log_probs[np.arange(len(targets)), targets]
    ppl = math.exp(nll.mean())
    return ppl, float(nll.std(ddof=1)) / math.sqrt(len(nll)) * ppl


def close(value: float, tolerance: float = 1e-5) -> object:
    return pytest.approx(value, rel=tolerance)


# Perplexity.


def test_perplexity_is_that_of_plain_maths(model: Path) -> None:
    text = english()
    seen: list[float] = []
    result = perplexity(model, text, n_ctx=N_CTX, chunk_done=lambda n, ppl: seen.append(ppl))
    ppl, error = plain_perplexity(model, text, N_CTX)
    assert result.ppl.value == close(ppl)
    assert result.ppl.error == close(error)
    assert result.nll == close(math.log(ppl))
    assert list(result.running) == seen
    assert seen[-1] == close(result.ppl.value, 1e-12)
    for n in (1, 3):
        assert seen[n - 1] == close(plain_perplexity(model, text, N_CTX, n)[0])


def test_what_is_evaluated_is_said(model: Path) -> None:
    started: list[object] = []
    result = perplexity(model, english(), n_ctx=N_CTX, n_chunks=5, started=started.append)
    evaluation = result.evaluation
    assert started == [evaluation]
    with Model(model, vocab_only=True) as vocabulary:
        assert evaluation.n_tokens == len(vocabulary.tokenize(english()))
        assert evaluation.adds_bos == vocabulary.adds_bos
    assert (evaluation.n_chunks, evaluation.n_ctx, evaluation.n_scored, evaluation.n_vocab) == (5, N_CTX, 5 * N_SCORED, N_VOCAB)
    assert (evaluation.n_seq, evaluation.n_batch, evaluation.is_coded) == (5, 5 * N_CTX, False)
    assert len(result.running) == 5
    assert "llama-cpp-python" in evaluation.build


@pytest.mark.parametrize("n_batch", [1, 7, 16, N_CTX - 1, N_CTX, 3 * N_CTX + 5])
def test_batches_change_nothing(model: Path, n_batch: int) -> None:
    together = perplexity(model, english(), n_ctx=N_CTX, n_chunks=7)
    apart = perplexity(model, english(), n_ctx=N_CTX, n_chunks=7, n_batch=n_batch)
    assert apart.evaluation.n_seq == max(1, n_batch // N_CTX)
    tolerance = 1e-5 if n_batch > 1 else 3e-4  # llama.cpp attends by another kernel for single tokens, in float16
    assert apart.running == pytest.approx(together.running, rel=tolerance)
    assert apart.ppl.error == close(together.ppl.error, tolerance)


def test_threads_change_nothing(model: Path) -> None:
    one, two = (perplexity(model, english(), n_ctx=N_CTX, threads=threads) for threads in (1, 2))
    assert one.running == two.running


def test_logits_of_a_batch_are_limited(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = perplexity(model, english(), n_ctx=N_CTX, n_chunks=4)
    monkeypatch.setattr(chunked, "MAX_LOGITS_BYTES", 4 * N_VOCAB * 6)
    limited = perplexity(model, english(), n_ctx=N_CTX, n_chunks=4)
    assert (limited.evaluation.n_seq, limited.evaluation.n_batch) == (1, 6)
    assert limited.ppl.value == close(whole.ppl.value)


def test_plans_of_batches() -> None:
    assert plan_batches(512, 1100, 49152, 40).n_batch == 1024
    assert plan_batches(512, 2048, 49152, 2).n_seq == 2
    assert plan_batches(4096, 4096, 262144, 2).n_batch == 256


def test_coded_file_gives_the_same_number(model: Path, tmp_path: Path) -> None:
    coded = tmp_path / "tiny.gguf.lw"
    encode_file(model, coded)
    plain, decoded = perplexity(model, english(), n_ctx=N_CTX), perplexity(coded, english(), n_ctx=N_CTX)
    assert decoded.evaluation == replace(plain.evaluation, model=str(coded), is_coded=True)
    assert (decoded.ppl, decoded.nll, decoded.running) == (plain.ppl, plain.nll, plain.running)


def test_text_loses_one_newline(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"a\xff\n\n")
    assert read_text(path) == b"a\xff\n"
    with pytest.raises(LazyWeightsError, match="cannot read the text: No such file"):
        read_text(tmp_path / "missing")


def test_text_has_to_fill_two_chunks(model: Path) -> None:
    with Model(model, vocab_only=True) as vocabulary:
        n = len(vocabulary.tokenize(b"the thing"))
    with pytest.raises(LazyWeightsError, match=f"has {n} tokens, but two chunks of 32 need 64: take a longer text"):
        perplexity(model, b"the thing", n_ctx=N_CTX)


@pytest.mark.parametrize(
    "options", [{"n_ctx": 33}, {"n_ctx": 2}, {"n_ctx": 0}, {"n_chunks": 0}, {"n_batch": 0}], ids=lambda value: str(value)
)
def test_numbers_out_of_range(model: Path, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="it has to be"):
        perplexity(model, english(), **options)  # type: ignore[arg-type]


def test_tokenizer_that_ends_texts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "adds_eos", True)
    with pytest.raises(LazyWeightsError, match="ends each text with EOS"):
        perplexity(model, english(), n_ctx=N_CTX)


def test_logits_that_are_no_numbers(tmp_path: Path) -> None:
    import gguf

    path = write_tiny_model(tmp_path / "tiny.gguf")
    reader = gguf.GGUFReader(path, "r+")
    (norm,) = [tensor for tensor in reader.tensors if tensor.name == "output_norm.weight"]
    norm.data[0] = np.nan
    reader.data.flush()
    for base in (None, tmp_path / "base"):
        with pytest.raises(LazyWeightsError, match="logits of chunk 1 are no numbers"):
            perplexity(path, english(), n_ctx=N_CTX, base_file=base)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["tiny.gguf"]


# The base logits file.


def test_bytes_of_the_base_logits(model: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    result = perplexity(model, english(), n_ctx=N_CTX, n_chunks=3, base_file=base)
    plain = perplexity(model, english(), n_ctx=N_CTX, n_chunks=3)
    assert result.ppl.value == close(plain.ppl.value)
    data = base.read_bytes()
    assert len(data) == file_bytes(N_CTX, N_VOCAB, 3) == 20 + 4 * 3 * N_CTX + 2 * 3 * N_SCORED * (N_VOCAB + N_VOCAB % 2 + 4)
    assert data[:20] == b"_logits_" + struct.pack("<3i", N_CTX, N_VOCAB, 3)
    with Model(model, vocab_only=True) as vocabulary:
        tokens = vocabulary.tokenize(english())
    assert data[20 : 20 + 12 * N_CTX] == struct.pack(f"<{3 * N_CTX}i", *tokens[: 3 * N_CTX].tolist())
    rows = np.frombuffer(data, "<u2", offset=20 + 12 * N_CTX).reshape(3 * N_SCORED, -1)
    log_probs, _ = plain_log_probs(model, english(), N_CTX, 3)
    for row, expected in zip(rows, log_probs, strict=True):
        scale, low = struct.unpack("<2f", row[:4].tobytes())
        least = max(expected.min(), expected.max() - 16)
        assert low == pytest.approx(least, abs=1e-4)
        assert scale == pytest.approx((expected.max() - least) / 65535, rel=1e-4)
        codes = row[4 : 4 + N_VOCAB].astype(np.int64)
        assert (codes.max(), codes.min()) == (65535, 0)
        assert np.abs(codes - np.rint((np.maximum(expected, least) - least) / scale)).max() <= 2
        assert not row[4 + N_VOCAB :].any()


def test_base_logits_do_not_depend_on_the_batch(model: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    perplexity(model, english(), n_ctx=N_CTX, n_chunks=3, base_file=whole)
    perplexity(model, english(), n_ctx=N_CTX, n_chunks=3, base_file=parts, n_batch=9)
    head = 20 + 12 * N_CTX
    assert whole.read_bytes()[:head] == parts.read_bytes()[:head]
    a, b = (np.frombuffer(path.read_bytes(), "<u2", offset=head).reshape(3 * N_SCORED, -1) for path in (whole, parts))
    assert np.abs(a[:, 4:].astype(int) - b[:, 4:]).max() <= 2


def test_base_logits_are_not_replaced(model: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.write_bytes(b"mine")
    with pytest.raises(OutputExistsError):
        perplexity(model, english(), n_ctx=N_CTX, n_chunks=2, base_file=base)
    assert base.read_bytes() == b"mine"
    perplexity(model, english(), n_ctx=N_CTX, n_chunks=2, base_file=base, force=True)
    with LogitsFile(base) as file:
        assert (file.n_ctx, file.n_vocab, file.chunks.shape) == (N_CTX, N_VOCAB, (2, N_CTX))
    with pytest.raises(OutputExistsError, match="the input itself"):
        perplexity(model, english(), n_ctx=N_CTX, base_file=model, force=True)


@pytest.fixture(scope="module")
def base_of(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Path, PerplexityResult]:
    """The base logits of `model` on eight chunks, and its perplexity."""
    base = tmp_path_factory.mktemp("base") / "base.logits"
    return base, perplexity(model, english(), n_ctx=N_CTX, n_chunks=8, base_file=base)


def patched(base: Path, tmp_path: Path, offset: int, data: bytes) -> Path:
    changed = bytearray(base.read_bytes())
    changed[offset : offset + len(data)] = data
    path = tmp_path / "changed"
    path.write_bytes(changed)
    return path


@pytest.mark.parametrize(
    ("offset", "data", "error", "said"),
    [
        (0, b"_logitz_", FormatError, "not a base logits file"),
        (8, struct.pack("<i", 2), LimitError, "make no sense"),
        (12, struct.pack("<i", -5), LimitError, "make no sense"),
        (16, struct.pack("<i", 0), LimitError, "make no sense"),
        (16, struct.pack("<i", 2**31 - 1), TruncatedError, "incomplete"),
        (16, struct.pack("<i", 3), FormatError, "longer than"),
        (20, struct.pack("<i", N_VOCAB), LimitError, "tokens outside"),
        (24, struct.pack("<i", -1), LimitError, "tokens outside"),
    ],
)
def test_damaged_base_logits(
    base_of: tuple[Path, PerplexityResult], model: Path, tmp_path: Path, offset: int, data: bytes,
    error: type[Exception], said: str,
) -> None:  # fmt: skip
    with pytest.raises(error, match=said):
        kl_divergence(model, patched(base_of[0], tmp_path, offset, data))


def test_short_base_logits(base_of: tuple[Path, PerplexityResult], model: Path, tmp_path: Path) -> None:
    data = base_of[0].read_bytes()
    for n in (0, 7):
        (tmp_path / "short").write_bytes(data[:n])
        with pytest.raises(FormatError, match="not a base logits file"):
            kl_divergence(model, tmp_path / "short")
    for n in (8, 19, 20, 200, len(data) - 1):
        (tmp_path / "short").write_bytes(data[:n])
        with pytest.raises(TruncatedError):
            kl_divergence(model, tmp_path / "short")
    with pytest.raises(LazyWeightsError, match="cannot read the base logits"):
        kl_divergence(model, tmp_path / "missing")


# KL divergence.


def test_divergence_from_itself(base_of: tuple[Path, PerplexityResult], model: Path) -> None:
    base, measured = base_of
    result = kl_divergence(model, base, text=english(), n_ctx=N_CTX)
    found = result.statistics
    assert result.evaluation == measured.evaluation or result.evaluation.n_tokens == 8 * N_CTX
    assert found.n_positions == 8 * N_SCORED
    assert abs(found.kld.value) < 1e-4
    assert abs(found.kld_quantiles["maximum"]) < 1e-3
    assert found.rms_delta_p.value < 1e-4
    assert found.same_top_p.value > 0.99  # codes may tie
    assert found.ppl.value == close(measured.ppl.value)
    assert found.ppl.error == close(measured.ppl.error)
    assert found.ppl_base.value == close(measured.ppl.value, 1e-3)
    assert found.ratio.value == pytest.approx(1, abs=1e-3)
    assert found.correlation == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("n_batch", [2048, 11])
def test_divergence_from_another_model(
    base_of: tuple[Path, PerplexityResult], model: Path, other: Path, n_batch: int
) -> None:
    steps: list[float] = []
    result = kl_divergence(other, base_of[0], n_batch=n_batch, chunk_done=lambda n, so_far: steps.append(so_far.kld.value))
    found = result.statistics
    p, targets = plain_log_probs(model, english(), N_CTX, 8)
    with Model(model, vocab_only=True) as vocabulary:
        same_tokens = vocabulary.tokenize(english())[: 8 * N_CTX]
    q = other_log_probs(other, same_tokens)
    at = np.arange(len(targets))
    kld = (np.exp(p) * (p - q)).sum(axis=1)
    n = len(kld)

    def error_of(values: np.ndarray) -> float:
        return float(values.std(ddof=0) / math.sqrt(n - 1))

    assert found.n_positions == n
    assert steps[0] == close(kld[:N_SCORED].mean(), 1e-3)
    assert steps[-1] == found.kld.value == close(kld.mean(), 1e-3)
    assert found.kld.error == close(error_of(kld), 1e-2)
    for name, fraction in (("maximum", 1), ("99.0%", 0.99), ("90.0%", 0.9), ("median", 0.5), ("5.0%", 0.05), ("minimum", 0)):
        assert found.kld_quantiles[name] == close(float(np.quantile(kld, fraction)), 1e-3), name
    delta = np.exp(q[at, targets]) - np.exp(p[at, targets])
    assert found.delta_p.value == pytest.approx(delta.mean(), abs=1e-6)
    assert found.delta_p.error == close(error_of(delta), 1e-3)
    for name, fraction in (("maximum", 1), ("75.0%", 0.75), ("25.0%", 0.25), ("minimum", 0)):
        assert found.delta_p_quantiles[name] == pytest.approx(np.quantile(delta, fraction), abs=1e-5), name
    rms = math.sqrt((delta**2).mean())
    assert found.rms_delta_p.value == close(rms, 1e-3)
    assert found.rms_delta_p.error == close(error_of(delta**2) / (2 * rms), 1e-3)
    same = float((p.argmax(axis=1) == q.argmax(axis=1)).mean())
    assert found.same_top_p.value == pytest.approx(same, abs=0.01)
    assert found.same_top_p.error == pytest.approx(math.sqrt(same * (1 - same) / (n - 1)), abs=0.01)
    a, b = -q[at, targets], -p[at, targets]
    assert found.ppl.value == close(math.exp(a.mean()), 1e-4)
    assert found.ppl_base.value == close(math.exp(b.mean()), 1e-4)
    assert found.correlation == pytest.approx(np.corrcoef(a, b)[0, 1], abs=1e-3)
    assert found.ln_ratio.value == pytest.approx((a - b).mean(), abs=1e-4)
    assert found.ln_ratio.error == close(error_of(a - b), 1e-3)
    assert found.ratio.error == close(math.exp((a - b).mean()) * error_of(a - b), 1e-3)
    assert found.difference.value == pytest.approx(math.exp(a.mean()) - math.exp(b.mean()), rel=1e-3)
    weighted = a * math.exp(a.mean()) - b * math.exp(b.mean())
    assert found.difference.error == close(error_of(weighted), 1e-3)


def other_log_probs(path: Path, tokens: np.ndarray) -> np.ndarray:
    """Log-probabilities of a model that adds BOS, on tokens that are given."""
    found = []
    with Model(path) as model, Context(model, n_ctx=N_CTX, n_batch=N_CTX) as context:
        for part in tokens.reshape(-1, N_CTX).tolist():
            context.clear()
            context.decode([model.bos, *part[1:]], range(N_CTX), [0] * N_CTX, [True] * N_CTX)
            rows = context.logits(N_CTX)[N_CTX // 2 : N_CTX - 1].astype(np.float64)
            found.append(rows - np.log(np.exp(rows).sum(axis=1, keepdims=True)))
    return np.concatenate(found)


def test_base_of_something_else(base_of: tuple[Path, PerplexityResult], model: Path, tmp_path: Path) -> None:
    base, _ = base_of
    with pytest.raises(FormatError, match="computed with -c 32, not 64"):
        kl_divergence(model, base, n_ctx=64)
    with pytest.raises(FormatError, match="on another text"):
        kl_divergence(model, base, text=english(seed=1))
    fewer = kl_divergence(model, base, n_chunks=2)
    assert fewer.evaluation.n_chunks == 2
    assert fewer.statistics.n_positions == 2 * N_SCORED
    words = 2 * ((N_VOCAB - 3 + 1) // 2) + 4
    header = b"_logits_" + struct.pack("<3i", N_CTX, N_VOCAB - 3, 1)
    (tmp_path / "fewer").write_bytes(header + bytes(4 * N_CTX + 2 * N_SCORED * words))
    with pytest.raises(FormatError, match="another vocabulary"):
        kl_divergence(model, tmp_path / "fewer")


# Real models.

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA = "gemma-3-270m-q4_k_m.gguf"


@pytest.mark.real
def test_smollm2_plain_and_coded(tmp_path: Path) -> None:
    """llama-perplexity says 22.5836 +/- 0.68 after 40 chunks; these are its first four."""
    model, text = real_model(SMOLLM2), read_text(data_file("wiki.test.raw"))
    coded = tmp_path / "coded.gguf.lw"
    encode_file(model, coded, verify=False)
    plain, decoded = perplexity(model, text, n_chunks=4), perplexity(coded, text, n_chunks=4)
    assert plain.evaluation.n_tokens == 304_829
    assert not plain.evaluation.adds_bos
    assert plain.running == pytest.approx([12.6138, 21.3795, 22.2525, 22.1792], rel=1e-4)
    assert (decoded.ppl, decoded.running) == (plain.ppl, plain.running)


@pytest.mark.real
def test_gemma_starts_chunks_with_bos() -> None:
    model, text = real_model(GEMMA), read_text(data_file("wiki.test.raw"))[:20_000]
    result = perplexity(model, text, n_chunks=2)
    assert result.evaluation.adds_bos
    ppl, error = plain_perplexity(model, text, 512, 2)
    assert result.ppl.value == close(ppl, 1e-5)
    assert result.ppl.error == close(error, 1e-4)
