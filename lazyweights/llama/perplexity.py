"""Perplexity and KL divergence by the rules of llama.cpp's llama-perplexity, so that the numbers can be compared with its own.

`docs/perplexity.md` says what is computed. Logits are reduced batch by batch: what grows with the text is a few bytes a token.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np

from lazyweights.container.atomic import AtomicFile, check_output
from lazyweights.container.jobs import ProgressCallback, thread_count
from lazyweights.errors import FormatError, LazyWeightsError
from lazyweights.llama import chunks as chunked
from lazyweights.llama import library
from lazyweights.llama.divergence import DivergenceStatistics, Estimate, exponential, summarize
from lazyweights.llama.log_probs import Divergences, RowWorkers, row_words
from lazyweights.llama.logits_file import LogitsFile, write_head
from lazyweights.llama.model import Context, Model

DEFAULT_CONTEXT = 512
DEFAULT_BATCH = 2048


@dataclass(frozen=True)
class Evaluation:
    """What is evaluated, known before the first chunk.

    Attributes
    ----------
    model : str
        The file.
    is_coded : bool
        Whether it is a coded file, decoded into memory.
    description : str
        Architecture, size and type, in llama.cpp's words.
    n_tokens : int
        Of the whole text, BOS included.
    n_chunks, n_ctx : int
        Chunks that are evaluated, and tokens in each.
    n_scored : int
        Tokens whose likelihood counts, in all chunks.
    n_vocab : int
        Tokens of the vocabulary.
    n_batch, n_seq : int
        Tokens of a batch at most, and chunks that are evaluated together.
    adds_bos : bool
        Whether BOS takes the place of the first token of each chunk.
    n_ctx_train : int
        Context that the model was trained with.
    build : str
        Which llama.cpp.
    """

    model: str
    is_coded: bool
    description: str
    n_tokens: int
    n_chunks: int
    n_ctx: int
    n_scored: int
    n_vocab: int
    n_batch: int
    n_seq: int
    adds_bos: bool
    n_ctx_train: int
    build: str


@dataclass(frozen=True)
class PerplexityResult:
    """Perplexity of a model on a text.

    Attributes
    ----------
    ppl : Estimate
        exp of the mean negative log-likelihood, and its standard error (NaN where the likelihood does not vary).
    nll : float
        Mean negative log-likelihood of a token, in nats.
    running : tuple of float
        The perplexity of the first chunk, the first two, ...
    evaluation : Evaluation
    load_seconds, seconds : float
        To load the model (decoding included), and to evaluate the text.
    """

    ppl: Estimate
    nll: float
    running: tuple[float, ...]
    evaluation: Evaluation
    load_seconds: float
    seconds: float


@dataclass(frozen=True)
class DivergenceResult:
    """KL divergence of a model from the base whose logits a file holds.

    Attributes
    ----------
    statistics : DivergenceStatistics
    evaluation : Evaluation
    load_seconds, seconds : float
        As in `PerplexityResult`.
    """

    statistics: DivergenceStatistics
    evaluation: Evaluation
    load_seconds: float
    seconds: float


Started = Callable[[Evaluation], None]
PerplexityChunkDone = Callable[[int, float], None]
"""Called with the number of chunks done and the perplexity so far."""
DivergenceChunkDone = Callable[[int, DivergenceStatistics], None]
"""Called with the number of chunks done and the statistics so far."""


def perplexity(
    path: str | os.PathLike[str], text: bytes, *, n_ctx: int = DEFAULT_CONTEXT, n_chunks: int | None = None,
    n_batch: int = DEFAULT_BATCH, threads: int = 0, base_file: str | os.PathLike[str] | None = None, force: bool = False,
    progress: ProgressCallback | None = None, started: Started | None = None, chunk_done: PerplexityChunkDone | None = None,
) -> PerplexityResult:  # fmt: skip
    """Measure the perplexity of a model on a text.

    Parameters
    ----------
    path : str or os.PathLike
        A GGUF or a coded file.
    text : bytes
        UTF-8. llama-perplexity drops a newline at the end of a file: `lazyweights.llama.chunks.read_text` does too.
    n_ctx : int
        Tokens of a chunk, even, at least 4.
    n_chunks : int, optional
        Chunks to evaluate at most; all that the text fills if it is not given.
    n_batch : int
        Tokens to evaluate together at most.
    threads : int
        0: all cores.
    base_file : str or os.PathLike, optional
        Base logits file to write: 2 bytes for each scored token and token of the vocabulary.
    force : bool
        Replace `base_file` if it is there.
    progress : callable, optional
        Told how far decoding of a coded file is.
    started, chunk_done : callable, optional
        Called before the first chunk, and after each.

    Returns
    -------
    PerplexityResult

    Raises
    ------
    BackendUnavailableError
        If llama-cpp-python is not installed.
    LazyWeightsError
        If the text is too short for two chunks, the model cannot be loaded or gives logits that are no numbers, or
        `base_file` cannot be written (`OutputExistsError`: it is there).
    ValueError
        If a number is out of range.
    """
    if n_ctx < 4 or n_ctx % 2:
        raise ValueError(f"a context of {n_ctx} tokens: it has to be even and at least 4, such as 512")
    _check_counts(n_chunks, n_batch)
    if base_file is not None:
        check_output(base_file, force, path)
    with _loaded(path, threads, progress) as (model, load_seconds):
        bos = chunked.start_token(model)
        tokens = model.tokenize(text)
        chunks = chunked.split_chunks(tokens, n_ctx, n_chunks, model.source.source)
        plan = chunked.plan_batches(n_ctx, n_batch, model.n_vocab, len(chunks))
        evaluation = _evaluation(model, len(tokens), chunks, plan)
        if started is not None:
            started(evaluation)
        began = time.monotonic()
        nll = nll_of_squares = 0.0
        n = 0
        running: list[float] = []
        with (
            _context(model, plan, threads) as context,
            RowWorkers(model.n_vocab, thread_count(threads)) as workers,
            nullcontext() if base_file is None else AtomicFile(base_file, force, path) as file,
        ):
            packed = np.empty((0 if file is None else plan.n_scored, row_words(model.n_vocab)), "<u2")
            if file is not None:
                write_head(file, chunks, model.n_vocab)
            for rows in chunked.iter_scored(context, chunks, plan, bos):
                if file is None:
                    found = workers.nll(rows.logits, rows.targets)
                else:
                    part = packed[: len(rows.targets)]
                    found = workers.pack(rows.logits, rows.targets, part)
                    file.write(part.data)
                _check_numbers(found, rows.chunk, model)
                nll += float(found.sum())
                nll_of_squares += float((found * found).sum())
                n += len(found)
                if rows.is_last:
                    running.append(exponential(nll / n))
                    if chunk_done is not None:
                        chunk_done(rows.chunk + 1, running[-1])
    mean = nll / n
    variance = nll_of_squares / n - mean * mean
    ppl = exponential(mean)
    error = math.sqrt(variance / (n - 1)) * ppl if variance > 0 and n > 1 else math.nan
    return PerplexityResult(Estimate(ppl, error), mean, tuple(running), evaluation, load_seconds, time.monotonic() - began)


def kl_divergence(
    path: str | os.PathLike[str], base_file: str | os.PathLike[str], *, text: bytes | None = None, n_ctx: int | None = None,
    n_chunks: int | None = None, n_batch: int = DEFAULT_BATCH, threads: int = 0, progress: ProgressCallback | None = None,
    started: Started | None = None, chunk_done: DivergenceChunkDone | None = None,
) -> DivergenceResult:  # fmt: skip
    """Measure how a model differs from the base whose logits a file holds.

    Parameters
    ----------
    path : str or os.PathLike
        A GGUF or a coded file.
    base_file : str or os.PathLike
        What `perplexity` or llama-perplexity wrote; it holds the tokens, and is read front to back once.
    text : bytes, optional
        If it is given, its tokens have to be those of the file.
    n_ctx : int, optional
        If it is given, it has to be that of the file.
    n_chunks, n_batch, threads, progress, started, chunk_done
        As in `perplexity`.

    Returns
    -------
    DivergenceResult

    Raises
    ------
    BackendUnavailableError
        If llama-cpp-python is not installed.
    FormatError
        If `base_file` is damaged, or belongs to another vocabulary, context or text.
    LazyWeightsError
        If the model cannot be loaded or gives logits that are no numbers.
    ValueError
        If a number is out of range.
    """
    _check_counts(n_chunks, n_batch)
    with LogitsFile(base_file) as base:
        if n_ctx is not None and n_ctx != base.n_ctx:
            raise FormatError(f"the base logits were computed with -c {base.n_ctx}, not {n_ctx}", path=base.path)
        with _loaded(path, threads, progress) as (model, load_seconds):
            if model.n_vocab != base.n_vocab:
                raise FormatError(
                    "the base logits belong to another vocabulary", path=base.path, expected=model.n_vocab, found=base.n_vocab
                )
            bos = chunked.start_token(model)
            if text is not None:
                _check_text(model.tokenize(text), base)
            chunks = base.chunks[:n_chunks]
            plan = chunked.plan_batches(base.n_ctx, n_batch, base.n_vocab, len(chunks))
            evaluation = _evaluation(model, base.chunks.size, chunks, plan)
            if started is not None:
                started(evaluation)
            began = time.monotonic()
            found = Divergences.empty(len(chunks) * plan.n_scored)
            with _context(model, plan, threads) as context, RowWorkers(model.n_vocab, thread_count(threads)) as workers:
                for rows in chunked.iter_scored(context, chunks, plan, bos):
                    start = rows.chunk * plan.n_scored + rows.row
                    stop = start + len(rows.targets)
                    part = found.part(start, stop)
                    workers.compare(rows.logits, rows.targets, base.read_rows(stop - start), part)
                    _check_numbers(part.nll, rows.chunk, model)
                    if rows.is_last and chunk_done is not None:
                        chunk_done(rows.chunk + 1, summarize(found.part(0, stop)))
    return DivergenceResult(summarize(found), evaluation, load_seconds, time.monotonic() - began)


def _check_counts(n_chunks: int | None, n_batch: int) -> None:
    if n_chunks is not None and n_chunks < 1:
        raise ValueError(f"{n_chunks} chunks: it has to be at least 1")
    if n_batch < 1:
        raise ValueError(f"a batch of {n_batch} tokens: it has to be at least 1")


@contextmanager
def _loaded(
    path: str | os.PathLike[str], threads: int, progress: ProgressCallback | None
) -> Iterator[tuple[Model, float]]:
    """Yield a model and the seconds that loading took."""
    began = time.monotonic()
    with Model(path, threads=threads, progress=progress) as model:
        yield model, time.monotonic() - began


def _context(model: Model, plan: chunked.BatchPlan, threads: int) -> Context:
    # As llama-perplexity has it: chunks do not share a cache, and the room of each is rounded up to 256 tokens.
    n_ctx = plan.n_seq * (-(-plan.n_ctx // 256) * 256)
    return Context(model, n_ctx=n_ctx, n_batch=plan.n_batch, n_seq=plan.n_seq, threads=threads, kv_unified=False)


def _evaluation(model: Model, n_tokens: int, chunks: np.ndarray, plan: chunked.BatchPlan) -> Evaluation:
    return Evaluation(
        model=model.source.source,
        is_coded=model.source.is_coded,
        description=model.description,
        n_tokens=n_tokens,
        n_chunks=len(chunks),
        n_ctx=plan.n_ctx,
        n_scored=len(chunks) * plan.n_scored,
        n_vocab=model.n_vocab,
        n_batch=plan.n_batch,
        n_seq=plan.n_seq,
        adds_bos=model.adds_bos,
        n_ctx_train=model.n_ctx_train,
        build=library.build_text(),
    )


def _check_numbers(nll: np.ndarray, chunk: int, model: Model) -> None:
    if np.isnan(nll).any():
        raise LazyWeightsError(f"the logits of chunk {chunk + 1} are no numbers: the weights are damaged, or they overflow",
                               path=model.source.source)  # fmt: skip


def _check_text(tokens: np.ndarray, base: LogitsFile) -> None:
    expected = base.chunks.ravel()
    if not np.array_equal(tokens[: len(expected)], expected):
        raise FormatError("the base logits were computed on another text, or with another tokenizer", path=base.path)
