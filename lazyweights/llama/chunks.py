"""A text in chunks of one context each: which tokens go into which batch, and the logits that are scored.

As llama-perplexity does it: the text is tokenized once, the tail that fills no chunk is dropped, and of each chunk the
positions n_ctx/2 .. n_ctx-2 are scored, each on the token that follows. Where the tokenizer adds BOS, BOS takes the place of
the first token of each chunk while it is evaluated.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lazyweights.errors import LazyWeightsError
from lazyweights.llama.model import Context, Model

MAX_LOGITS_BYTES = 256 << 20
"""Of the logits that one batch gives: with a large vocabulary, batches get smaller."""


@dataclass(frozen=True)
class BatchPlan:
    """How chunks are put into batches.

    Attributes
    ----------
    n_ctx : int
        Tokens of a chunk.
    n_batch : int
        Tokens of a batch at most: `n_seq` whole chunks, or, where it is below `n_ctx`, part of one.
    n_seq : int
        Chunks that are evaluated together, as sequences of one batch.
    """

    n_ctx: int
    n_batch: int
    n_seq: int

    @property
    def first(self) -> int:
        """The first position that is scored."""
        return self.n_ctx // 2

    @property
    def n_scored(self) -> int:
        """Positions that are scored in each chunk."""
        return n_scored(self.n_ctx)


@dataclass(frozen=True)
class ScoredRows:
    """Scored positions of one chunk, all of them or the next ones.

    Attributes
    ----------
    chunk : int
        Index of the chunk.
    row : int
        How many scored positions of the chunk came before.
    logits : numpy.ndarray
        float32 (n, n_vocab); valid until the next batch is evaluated.
    targets : numpy.ndarray
        int32 (n,), the token that follows each position.
    is_last : bool
        Whether the chunk is done.
    """

    chunk: int
    row: int
    logits: np.ndarray
    targets: np.ndarray
    is_last: bool


def n_scored(n_ctx: int) -> int:
    """Return how many positions of a chunk are scored.

    >>> n_scored(512)
    255
    """
    return n_ctx - 1 - n_ctx // 2


def plan_batches(n_ctx: int, n_batch: int, n_vocab: int, n_chunks: int) -> BatchPlan:
    """Choose how many chunks go into a batch.

    Parameters
    ----------
    n_ctx : int
        Tokens of a chunk, at least 3.
    n_batch : int
        Tokens of a batch at most, at least 1.
    n_vocab : int
        Tokens of the vocabulary; the logits of a batch take at most `MAX_LOGITS_BYTES`, or one row.
    n_chunks : int
        Chunks there are, at least 1.

    Examples
    --------
    >>> plan_batches(512, 2048, 49152, 40)
    BatchPlan(n_ctx=512, n_batch=2048, n_seq=4)
    >>> plan_batches(512, 2048, 262144, 40)
    BatchPlan(n_ctx=512, n_batch=512, n_seq=1)
    >>> plan_batches(512, 100, 49152, 40)
    BatchPlan(n_ctx=512, n_batch=100, n_seq=1)
    """
    max_rows = max(1, MAX_LOGITS_BYTES // (4 * n_vocab))
    scored = n_scored(n_ctx)
    if scored > max_rows:
        n_batch = min(n_batch, max_rows)
    if n_batch < n_ctx:
        return BatchPlan(n_ctx, n_batch, 1)
    n_seq = min(n_batch // n_ctx, max_rows // scored, n_chunks)
    return BatchPlan(n_ctx, n_seq * n_ctx, n_seq)


def read_text(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a text file without the newline at its end, which llama.cpp's tools drop from what ``-f`` names.

    Raises
    ------
    LazyWeightsError
        If it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return file.read().removesuffix(b"\n")
    except OSError as error:
        raise LazyWeightsError(f"cannot read the text: {error.strerror}", path=os.fspath(path)) from error


def split_chunks(tokens: np.ndarray, n_ctx: int, n_chunks: int | None, source: str) -> np.ndarray:
    """Cut tokens into chunks, int32 (n_chunks, n_ctx); the tail is dropped.

    Parameters
    ----------
    tokens : numpy.ndarray
        int32, of the whole text.
    n_ctx : int
    n_chunks : int or None
        Chunks to take at most; None: all.
    source : str
        The model, for the error.

    Raises
    ------
    LazyWeightsError
        If the tokens fill less than two chunks.
    """
    if len(tokens) < 2 * n_ctx:
        raise LazyWeightsError(
            f"the text has {len(tokens)} tokens, but two chunks of {n_ctx} need {2 * n_ctx}: take a longer text, or a smaller "
            "context with -c", path=source,
        )  # fmt: skip
    n = len(tokens) // n_ctx
    if n_chunks is not None:
        n = min(n, n_chunks)
    return tokens[: n * n_ctx].reshape(n, n_ctx)


def start_token(model: Model) -> int | None:
    """Return the token that starts each chunk, None where the tokenizer adds none.

    Raises
    ------
    LazyWeightsError
        If the tokenizer ends texts with a token: llama-perplexity refuses such models.
    """
    if model.adds_eos:
        raise LazyWeightsError("the tokenizer of this model ends each text with EOS: its perplexity is not defined",
                               path=model.source.source)  # fmt: skip
    return model.bos if model.adds_bos else None


def iter_scored(context: Context, chunks: np.ndarray, plan: BatchPlan, bos: int | None) -> Iterator[ScoredRows]:
    """Evaluate chunks; yield the logits of their scored positions.

    Parameters
    ----------
    context : Context
        Made for ``n_seq * n_ctx`` tokens, `n_batch` and `n_seq` of the plan.
    chunks : numpy.ndarray
        int32 (n_chunks, n_ctx).
    plan : BatchPlan
    bos : int or None
        Takes the place of the first token of each chunk.

    Yields
    ------
    ScoredRows
        Chunk after chunk, the rows of each in order.
    """
    for start in range(0, len(chunks), plan.n_seq):
        group = chunks[start : start + plan.n_seq]
        tokens = group.copy()
        if bos is not None:
            tokens[:, 0] = bos
        context.clear()
        row = 0
        step = min(plan.n_batch, plan.n_ctx)
        for begin in range(0, plan.n_ctx, step):
            positions = np.arange(begin, min(begin + step, plan.n_ctx))
            wanted = (positions >= plan.first) & (positions < plan.n_ctx - 1)
            n = len(group)
            context.decode(
                tokens[:, positions].ravel(), np.tile(positions, n), np.repeat(np.arange(n), len(positions)), np.tile(wanted, n)
            )
            n_rows = int(wanted.sum())
            if not n_rows:
                continue
            logits = context.logits(n * n_rows).reshape(n, n_rows, -1)
            targets = group[:, positions[wanted] + 1]
            for i in range(n):
                yield ScoredRows(start + i, row, logits[i], targets[i], row + n_rows == plan.n_scored)
            row += n_rows
