"""llama.cpp's samplers, chained and set as in llama-cli: the next token, from the logits of a context."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any

from lazyweights.llama import library
from lazyweights.llama.model import Context


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; names and defaults are llama-cli's.

    Attributes
    ----------
    seed : int
        0 .. 2**32 - 2. The same seed gives the same tokens.
    temp : float
        Temperature; 0 takes the most probable token, whatever the seed.
    top_k : int
        Choose among this many most probable tokens; 0: all.
    top_p : float
        Choose among the most probable tokens that have this probability together; 1: all.
    min_p : float
        Leave out what is less probable than this share of the most probable token; 0: nothing.
    repeat_penalty : float
        Logits of tokens seen lately are divided by it (multiplied where negative); 1: none.
    repeat_last_n : int
        What "lately" is, in tokens, the prompt included; -1: the whole context.
    """

    seed: int
    temp: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64


class Sampler:
    """A chain of samplers with its random state, for one sequence of a context. A context manager.

    The order is llama-cli's: penalties, top-k, top-p, min-p, temperature, then a random choice; with temperature 0 the most
    probable token after the penalties.
    """

    def __init__(self, context: Context, sampling: Sampling) -> None:
        self._lib = lib = library.load()
        self._context = context
        params = lib.llama_sampler_chain_default_params()
        params.no_perf = True
        self._chain: Any = lib.llama_sampler_chain_init(params)
        links = []
        if sampling.repeat_penalty != 1:
            last_n = context.n_ctx if sampling.repeat_last_n < 0 else sampling.repeat_last_n
            links.append(lib.llama_sampler_init_penalties(context.model.n_vocab, last_n, sampling.repeat_penalty, 0.0, 0.0))
        if sampling.temp > 0:
            links += [
                lib.llama_sampler_init_top_k(sampling.top_k),
                lib.llama_sampler_init_top_p(sampling.top_p, 0),
                lib.llama_sampler_init_min_p(sampling.min_p, 0),
                lib.llama_sampler_init_temp(sampling.temp),
                lib.llama_sampler_init_dist(sampling.seed),
            ]
        else:
            links.append(lib.llama_sampler_init_greedy())
        for link in links:
            lib.llama_sampler_chain_add(self._chain, link)  # which frees it with the chain

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self._chain:
            self._lib.llama_sampler_free(self._chain)
            self._chain = None

    def accept(self, token: int) -> None:
        """Tell of a token that was not sampled, one of the prompt."""
        self._lib.llama_sampler_accept(self._chain, token)

    def sample(self) -> int:
        """Choose a token from the last logits that the context computed, and remember it."""
        return int(self._lib.llama_sampler_sample(self._chain, self._context.handle, -1))
