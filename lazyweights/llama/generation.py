"""Text from a model: the prompt in batches, then token by token."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from lazyweights.errors import LazyWeightsError
from lazyweights.llama.model import Context, Model
from lazyweights.llama.sampler import Sampler, Sampling

PROMPT_BATCH = 512
DEFAULT_CONTEXT = 4096
_CONTEXT_STEP = 256  # llama.cpp rounds contexts up to it


def prompt_tokens(model: Model, prompt: bytes) -> np.ndarray:
    """Return the tokens of a prompt as llama-cli makes them, int32: with BOS where the tokenizer adds it, special tokens parsed.

    Raises
    ------
    LazyWeightsError
        If there are none to start from.
    """
    tokens = model.tokenize(prompt, add_special=True, parse_special=True)
    if tokens.size == 0 and model.bos >= 0:
        tokens = np.array([model.bos], np.int32)
    if tokens.size == 0:
        raise LazyWeightsError("the prompt is empty, and this model has no token to start a text with", path=model.source.source)
    return tokens


def context_size(model: Model, n_prompt: int, n_predict: int, wanted: int | None) -> int:
    """Return how many tokens the context is to have.

    Parameters
    ----------
    model : Model
    n_prompt, n_predict : int
        Tokens of the prompt, and at most to generate; negative: no limit.
    wanted : int, optional
        What the user asks for; 0: what the model was trained with. If it is not given, what prompt and generation need.

    Raises
    ------
    LazyWeightsError
        If the prompt does not fit.
    """
    trained = model.n_ctx_train
    if wanted is None:
        need = max(n_prompt + n_predict, n_prompt + 1) if n_predict >= 0 else max(DEFAULT_CONTEXT, n_prompt + 1)
        size = min(-(-need // _CONTEXT_STEP) * _CONTEXT_STEP, trained)
    else:
        size = wanted or trained
    if n_prompt > size:
        raise LazyWeightsError(
            f"the prompt has {n_prompt} tokens and the context {size}: give a longer one with -c, or a shorter prompt",
            path=model.source.source,
        )
    return size


class Generation:
    """Tokens that follow a prompt; iterating over it generates them, once.

    Parameters
    ----------
    context : Context
        Without anything in it.
    prompt : ndarray of int32
        Tokens, at least one and at most as many as the context has.
    sampling : Sampling
    n_predict : int
        Tokens at most; negative: until the model ends the text or the context is full.

    Attributes
    ----------
    tokens : list of int
        What was generated so far, without the token that ended it.
    prompt_seconds : float
        Time to evaluate the prompt.
    token_seconds : float
        Time from the first token to the last.
    stop : str
        Why it ended: ``"end"`` (the model ended the text), ``"length"`` (`n_predict`), ``"context"`` (full), or "" if it did not.
    """

    def __init__(self, context: Context, prompt: np.ndarray, sampling: Sampling, n_predict: int) -> None:
        self._context, self._prompt, self._sampling, self._n_predict = context, prompt, sampling, n_predict
        self.tokens: list[int] = []
        self.prompt_seconds = 0.0
        self.token_seconds = 0.0
        self.stop = ""

    @property
    def prompt_rate(self) -> float | None:
        """Tokens of the prompt per second."""
        return self._prompt.size / self.prompt_seconds if self.prompt_seconds else None

    @property
    def token_rate(self) -> float | None:
        """Generated tokens per second; the first is not counted, since the prompt's evaluation gives it."""
        return (len(self.tokens) - 1) / self.token_seconds if self.token_seconds else None

    def __iter__(self) -> Iterator[int]:
        context, n_prompt = self._context, self._prompt.size
        with Sampler(context, self._sampling) as sampler:
            started = time.perf_counter()
            for first in range(0, n_prompt, PROMPT_BATCH):
                tokens = self._prompt[first : first + PROMPT_BATCH]
                wanted = np.zeros(tokens.size, bool)
                wanted[-1] = True
                context.decode(tokens, range(first, first + tokens.size), [0] * tokens.size, wanted)
            self.prompt_seconds = time.perf_counter() - started
            for token in self._prompt.tolist():
                sampler.accept(token)
            first_time = 0.0
            while True:
                if 0 <= self._n_predict <= len(self.tokens):
                    self.stop = "length"
                    return
                token = sampler.sample()
                if context.model.is_end(token):
                    self.stop = "end"
                    return
                self.tokens.append(token)
                now = time.perf_counter()
                first_time = first_time or now
                self.token_seconds = now - first_time
                yield token
                position = n_prompt + len(self.tokens) - 1
                if position >= context.n_ctx:
                    self.stop = "context"
                    return
                if len(self.tokens) != self._n_predict:  # the last token needs no successor
                    context.decode([token], [position], [0], [True])
