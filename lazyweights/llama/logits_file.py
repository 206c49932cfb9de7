"""The base logits file of llama-perplexity (``--kl-divergence-base``): what a model says at each scored position of a text.

Little-endian: the magic ``_logits_``; int32 n_ctx, n_vocab, n_chunks; int32 tokens, n_chunks * n_ctx of them (as they are in
the text: BOS does not show); then a row for each scored position (`lazyweights.llama.log_probs`), chunk after chunk.
"""

from __future__ import annotations

import os
import struct
from types import TracebackType
from typing import BinaryIO

import numpy as np

from lazyweights.errors import FormatError, LazyWeightsError, LimitError, TruncatedError
from lazyweights.llama.chunks import n_scored
from lazyweights.llama.log_probs import row_words

MAGIC = b"_logits_"

_HEAD = struct.Struct("<8s3i")


def file_bytes(n_ctx: int, n_vocab: int, n_chunks: int) -> int:
    """Return the size of a base logits file.

    >>> file_bytes(512, 49152, 40)
    1002864340
    """
    return _HEAD.size + n_chunks * (4 * n_ctx + 2 * n_scored(n_ctx) * row_words(n_vocab))


def write_head(file: BinaryIO, chunks: np.ndarray, n_vocab: int) -> None:
    """Write what comes before the rows; chunks: int32 (n_chunks, n_ctx)."""
    n_chunks, n_ctx = chunks.shape
    file.write(_HEAD.pack(MAGIC, n_ctx, n_vocab, n_chunks))
    file.write(chunks.astype("<i4").tobytes())


class LogitsFile:
    """A base logits file, read front to back. A context manager.

    Parameters
    ----------
    path : str or os.PathLike

    Attributes
    ----------
    n_ctx, n_vocab : int
    chunks : numpy.ndarray
        int32 (n_chunks, n_ctx), the tokens.

    Raises
    ------
    LazyWeightsError
        If it cannot be read.
    FormatError
        If it is no such file, is too short (`TruncatedError`), or has sizes or tokens that make no sense (`LimitError`).
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        try:
            self._file = open(path, "rb")  # noqa: SIM115 - closed by __exit__
        except OSError as error:
            raise LazyWeightsError(f"cannot read the base logits: {error.strerror}", path=self.path) from error
        try:
            self._read_head()
        except BaseException:
            self._file.close()
            raise

    def _read_head(self) -> None:
        head = self._file.read(_HEAD.size)
        if not head.startswith(MAGIC):
            raise FormatError("not a base logits file: --kl-divergence-base without --kl-divergence writes one", path=self.path)
        if len(head) < _HEAD.size:
            raise TruncatedError("the base logits end in their header", path=self.path, expected=_HEAD.size, found=len(head))
        _, self.n_ctx, self.n_vocab, n_chunks = _HEAD.unpack(head)
        if self.n_ctx < 3 or self.n_vocab < 1 or n_chunks < 1:
            sizes = f"n_ctx {self.n_ctx}, n_vocab {self.n_vocab}, {n_chunks} chunks"
            raise LimitError(f"the base logits have sizes that make no sense: {sizes}", path=self.path)
        expected = file_bytes(self.n_ctx, self.n_vocab, n_chunks)
        found = os.fstat(self._file.fileno()).st_size
        if found < expected:
            raise TruncatedError(
                "the base logits are incomplete: write them again", path=self.path, expected=expected, found=found
            )
        if found > expected:
            raise FormatError("the base logits are longer than their header says", path=self.path, expected=expected, found=found)
        tokens = np.frombuffer(self._file.read(4 * n_chunks * self.n_ctx), "<i4")
        if tokens.min() < 0 or tokens.max() >= self.n_vocab:
            raise LimitError("the base logits have tokens outside their vocabulary", path=self.path)
        self.chunks = tokens.astype(np.int32).reshape(n_chunks, self.n_ctx)

    def __enter__(self) -> LogitsFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def read_rows(self, n: int) -> np.ndarray:
        """Return the next n rows, uint16 (n, row_words).

        Raises
        ------
        TruncatedError
            If the file became shorter meanwhile.
        """
        words = row_words(self.n_vocab)
        data = self._file.read(2 * n * words)
        if len(data) < 2 * n * words:
            raise TruncatedError("the base logits end early", path=self.path, expected=2 * n * words, found=len(data))
        return np.frombuffer(data, "<u2").reshape(n, words)
