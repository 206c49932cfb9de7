"""Logits to log-probabilities, row by row, with the roundings of llama-perplexity.

A row of logits becomes, for the token that follows, a negative log-likelihood (nll, in nats). What llama-perplexity keeps in
float32 is float32 here: the largest logit, differences from it and their exponentials; their sum is float64.

The rows of a base logits file hold the log-probabilities of all tokens, in ``row_words(n_vocab)`` uint16, little-endian:

=========== =========== ==============================================================================
words       type        holds
=========== =========== ==============================================================================
0, 1        float32     scale: (max - min) / 65535, where min is the least logit, at least max - 16
2, 3        float32     the log-probability of code 0
4 ...       uint16      a code for each token: round((logit - min) / scale), 0 for logits below min
last        uint16      0, where n_vocab is odd
=========== =========== ==============================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

import numpy as np

HEAD_WORDS = 4
"""uint16 words of a row before its codes."""

MAX_RANGE = np.float32(16)
"""Nats below the most likely token that a row keeps apart."""

MIN_LOG_PROB = np.float32(-16)
"""Tokens at or below this log-probability of the base do not count in a divergence."""


def row_words(n_vocab: int) -> int:
    """Return the uint16 words of a row of a base logits file.

    >>> row_words(49152), row_words(5)
    (49156, 10)
    """
    return 2 * ((n_vocab + 1) // 2) + HEAD_WORDS


@dataclass
class Divergences:
    """What comparing positions with a base gives, an array (n,) for each quantity.

    Attributes
    ----------
    nll, nll_base : numpy.ndarray
        float32, of the token that follows, in nats.
    kld : numpy.ndarray
        float64, Kullback-Leibler divergence of the distribution from that of the base, in nats.
    delta_p : numpy.ndarray
        float32, probability of the token that follows, less that of the base.
    same_top : numpy.ndarray
        bool, whether both find the same token most likely.
    """

    nll: np.ndarray
    nll_base: np.ndarray
    kld: np.ndarray
    delta_p: np.ndarray
    same_top: np.ndarray

    @classmethod
    def empty(cls, n: int) -> Divergences:
        """Make room for n positions."""
        return cls(
            np.zeros(n, np.float32), np.zeros(n, np.float32), np.zeros(n, np.float64), np.zeros(n, np.float32), np.zeros(n, bool)
        )

    def part(self, start: int, stop: int) -> Divergences:
        """Return a view of some positions."""
        at = slice(start, stop)
        return Divergences(self.nll[at], self.nll_base[at], self.kld[at], self.delta_p[at], self.same_top[at])


class RowWorkers:
    """Threads that reduce rows. A context manager. Numpy lets go of the interpreter's lock in each step.

    Parameters
    ----------
    n_vocab : int
        Tokens of the vocabulary.
    threads : int
        At least 1.
    """

    def __init__(self, n_vocab: int, threads: int) -> None:
        self.n_vocab = n_vocab
        self._scratch = [np.empty((2, n_vocab), np.float32) for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def __enter__(self) -> RowWorkers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _run(self, work: Callable[[int, np.ndarray], None], n_rows: int) -> None:
        """Call ``work(row, scratch)`` for each row; scratch: float32 (2, n_vocab)."""
        n_parts = len(self._scratch)

        def part(k: int) -> None:
            with np.errstate(invalid="ignore"):  # of infinite logits: the caller sees that the results are no numbers
                for row in range(k * n_rows // n_parts, (k + 1) * n_rows // n_parts):
                    work(row, self._scratch[k])

        if self._pool is None:
            part(0)
        else:
            list(self._pool.map(part, range(n_parts)))

    def nll(self, logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return the negative log-likelihood of targets, float64 (n,); logits: float32 (n, n_vocab), targets: int32 (n,)."""
        found = np.empty(len(targets), np.float64)

        def work(row: int, scratch: np.ndarray) -> None:
            values = logits[row]
            top, total = _sum_exp(values, scratch[0])
            found[row] = math.log(total) - float(values[targets[row]] - top)

        self._run(work, len(targets))
        return found

    def pack(self, logits: np.ndarray, targets: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Fill rows of a base logits file, uint16 (n, row_words); return what `nll` does, rounded to float32 on the way."""
        found = np.empty(len(targets), np.float64)

        def work(row: int, scratch: np.ndarray) -> None:
            found[row] = _pack_row(logits[row], int(targets[row]), rows[row], scratch[0])

        self._run(work, len(targets))
        return found

    def compare(self, logits: np.ndarray, targets: np.ndarray, rows: np.ndarray, out: Divergences) -> None:
        """Compare with the rows of a base logits file, uint16 (n, row_words); fill `out`, of n positions."""

        def work(row: int, scratch: np.ndarray) -> None:
            _compare_row(logits[row], int(targets[row]), rows[row], scratch, out, row)

        self._run(work, len(targets))


def _sum_exp(values: np.ndarray, scratch: np.ndarray) -> tuple[np.float32, float]:
    """Return the largest value and the sum of exp(value - largest)."""
    top = values.max()
    np.subtract(values, top, out=scratch)
    np.exp(scratch, out=scratch)
    return top, float(scratch.sum(dtype=np.float64))


def _pack_row(values: np.ndarray, target: int, row: np.ndarray, scratch: np.ndarray) -> float:
    top, total = _sum_exp(values, scratch)
    log_total = np.float32(math.log(total))
    low = max(values.min(), top - MAX_RANGE)
    scale = (top - low) / np.float32(65535)
    row[:HEAD_WORDS] = np.array([scale, low - top - log_total], "<f4").view("<u2")
    codes = row[HEAD_WORDS : HEAD_WORDS + len(values)]
    row[HEAD_WORDS + len(values) :] = 0
    if scale > 0:
        np.subtract(values, low, out=scratch)
        np.maximum(scratch, 0, out=scratch)
        np.multiply(scratch, np.float32(1) / scale, out=scratch)
        np.rint(scratch, out=scratch)
        codes[...] = scratch
    else:
        codes[...] = 0
    return float(top + log_total - values[target])


def _compare_row(
    values: np.ndarray, target: int, row: np.ndarray, scratch: np.ndarray, out: Divergences, at: int
) -> None:
    top, total = _sum_exp(values, scratch[0])
    log_total = np.float32(math.log(total))
    nll = top + log_total - values[target]
    scale, low = row[:HEAD_WORDS].view("<f4")
    base, terms = scratch
    np.multiply(row[HEAD_WORDS : HEAD_WORDS + len(values)], scale, out=base, dtype=np.float32)
    np.add(base, low, out=base)
    nll_base = -base[target]
    top_base = int(base.argmax())
    np.subtract(base, values, out=terms)
    np.add(terms, top + log_total, out=terms)
    counts = base > MIN_LOG_PROB
    np.exp(base, out=base)
    np.multiply(base, counts, out=base)
    np.multiply(terms, base, out=terms)
    kld = terms.sum(dtype=np.float64)
    if math.isnan(kld):  # infinity times 0, of a token that does not count
        kld = terms.sum(dtype=np.float64, where=counts)
    out.nll[at] = nll
    out.nll_base[at] = nll_base
    out.kld[at] = kld
    out.delta_p[at] = np.exp(-nll) - np.exp(-nll_base)
    out.same_top[at] = int(values.argmax()) == top_base
