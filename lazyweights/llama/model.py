"""A model loaded by llama.cpp: tokens in, logits out. Thin: each object owns one handle of the library and frees it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from lazyweights.container.jobs import ProgressCallback, thread_count
from lazyweights.errors import LazyWeightsError
from lazyweights.llama import library
from lazyweights.llama.memory_file import ModelPath, model_path

EvalCallback = Callable[[int, bool], bool]
"""Called by the scheduler with the address of a ``ggml_tensor``: first with ask = True (is its value wanted?), then, where it
is, with ask = False once it is computed. Returning False there stops the evaluation."""


class Model:
    """A model and its vocabulary. A context manager.

    Parameters
    ----------
    path : str or os.PathLike
        A GGUF or a coded file; the latter is decoded into memory.
    threads : int
        To decode with; 0: all cores.
    progress : callable, optional
        Told how far decoding is.
    vocab_only : bool
        Load no weights.

    Attributes
    ----------
    source : ModelPath
        What was loaded, and how long decoding took.

    Raises
    ------
    FormatError, CodecError
        If a coded file is damaged.
    LazyWeightsError
        If llama.cpp cannot load it; the message has llama.cpp's reason.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, threads: int = 0, progress: ProgressCallback | None = None,
        vocab_only: bool = False,
    ) -> None:
        self._lib = lib = library.load()
        self._handle: Any = None
        params = lib.llama_model_default_params()
        params.vocab_only = vocab_only
        params.n_gpu_layers = 0
        # Weights stay as they are in the file, rather than repacked for this CPU: results do not depend on the machine then,
        # a callback sees the file's types, and AMX, which some virtual machines offer without allowing it, is not used.
        params.use_extra_bufts = False
        library.take_last_errors()
        try:
            # Loading reads the header and maps the tensors, without a look at them: they may be decoded meanwhile.
            with model_path(path, threads=threads, progress=progress, whole=False) as source:
                self.source: ModelPath = source
                with library.unlogged():
                    self._handle = lib.llama_model_load_from_file(os.fsencode(source.path), params)
                if not self._handle:  # once more, to hear why
                    self._handle = lib.llama_model_load_from_file(os.fsencode(source.path), params)
                if not self._handle:
                    reason = library.take_last_errors() or "it gave no reason"
                    raise LazyWeightsError(f"llama.cpp cannot load this model: {reason}", path=source.source)
        except BaseException:
            self.close()
            raise
        self.vocab = lib.llama_model_get_vocab(self._handle)

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Free the model; contexts must be closed before."""
        if self._handle:
            self._lib.llama_model_free(self._handle)
            self._handle = None

    @property
    def handle(self) -> Any:
        return self._handle

    @property
    def n_vocab(self) -> int:
        return int(self._lib.llama_vocab_n_tokens(self.vocab))

    @property
    def n_ctx_train(self) -> int:
        """Context that the model was trained with."""
        return int(self._lib.llama_model_n_ctx_train(self._handle))

    @property
    def adds_bos(self) -> bool:
        """Whether the tokenizer starts a text with a begin-of-sequence token."""
        return bool(self._lib.llama_vocab_get_add_bos(self.vocab))

    @property
    def adds_eos(self) -> bool:
        """Whether the tokenizer ends a text with an end-of-sequence token."""
        return bool(self._lib.llama_vocab_get_add_eos(self.vocab))

    @property
    def bos(self) -> int:
        return int(self._lib.llama_vocab_bos(self.vocab))

    @property
    def description(self) -> str:
        """Architecture, size and type, in llama.cpp's words."""
        buffer = ctypes.create_string_buffer(256)
        self._lib.llama_model_desc(self._handle, buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")

    def tokenize(self, text: bytes, add_special: bool = True, parse_special: bool = False) -> np.ndarray:
        """Return the tokens of a text, int32; `add_special`: with BOS and EOS where the tokenizer adds them."""
        room = len(text) + 16
        tokens = np.empty(room, np.int32)
        pointer = tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        n = self._lib.llama_tokenize(self.vocab, text, len(text), pointer, room, add_special, parse_special)
        if n < 0:
            tokens = np.empty(-n, np.int32)
            pointer = tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
            n = self._lib.llama_tokenize(self.vocab, text, len(text), pointer, -n, add_special, parse_special)
        return tokens[:n].copy()

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token, as they are to be printed."""
        buffer = ctypes.create_string_buffer(256)
        n = self._lib.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, False)
        if n < 0:
            buffer = ctypes.create_string_buffer(-n)
            n = self._lib.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, False)
        return buffer.raw[: max(n, 0)]

    def is_end(self, token: int) -> bool:
        """Whether a token ends a generation."""
        return bool(self._lib.llama_vocab_is_eog(self.vocab, token))


class Context:
    """A context: the state of up to `n_seq` sequences of a model. A context manager.

    Parameters
    ----------
    model : Model
    n_ctx : int
        Tokens of all sequences together.
    n_batch : int
        Tokens that one call of `decode` takes at most.
    n_seq : int
    threads : int
        To compute with; 0: all cores.
    callback : callable, optional
        See `EvalCallback`.
    kv_unified : bool
        Let all sequences share one cache of `n_ctx` tokens. Otherwise each has a part of its own, attends to no other, and
        its results do not depend on what else is in a batch.
    """

    def __init__(
        self, model: Model, *, n_ctx: int, n_batch: int = 512, n_seq: int = 1, threads: int = 0,
        callback: EvalCallback | None = None, kv_unified: bool = True,
    ) -> None:
        self._lib = lib = library.load()
        self.model = model
        params = lib.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = n_batch
        params.n_ubatch = min(n_batch, 512)
        params.n_seq_max = n_seq
        params.n_threads = params.n_threads_batch = thread_count(threads)
        params.kv_unified = kv_unified
        params.no_perf = True
        self._callback = None
        if callback is not None:
            # Kept: llama.cpp holds only a pointer.
            self._callback = lib.ggml_backend_sched_eval_callback(lambda tensor, ask, _: callback(tensor, ask))
            params.cb_eval = self._callback
        library.take_last_errors()
        self._handle = lib.llama_init_from_model(model.handle, params)
        if not self._handle:
            reason = library.take_last_errors() or "it gave no reason"
            raise LazyWeightsError(f"llama.cpp cannot make a context of {n_ctx} tokens: {reason}", path=model.source.source)
        self._batch = lib.llama_batch_init(n_batch, 0, 1)
        self._capacity = n_batch

    def __enter__(self) -> Context:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self._handle:
            self._lib.llama_batch_free(self._batch)
            self._lib.llama_free(self._handle)
            self._handle = None

    @property
    def handle(self) -> Any:
        return self._handle

    @property
    def n_ctx(self) -> int:
        """Tokens of all sequences together that there is room for."""
        return int(self._lib.llama_n_ctx(self._handle))

    def clear(self) -> None:
        """Forget all sequences."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._handle), True)

    def decode(
        self, tokens: Sequence[int] | np.ndarray, positions: Sequence[int] | np.ndarray, sequences: Sequence[int] | np.ndarray,
        wanted: Sequence[bool] | np.ndarray,
    ) -> None:
        """Evaluate tokens: number, position in its sequence, sequence, and whether its logits are wanted.

        Raises
        ------
        LazyWeightsError
            If llama.cpp cannot.
        """
        n = len(tokens)
        if n > self._capacity:
            raise ValueError(f"{n} tokens in a batch of {self._capacity}")
        batch = self._batch
        batch.n_tokens = n
        for i in range(n):
            batch.token[i] = int(tokens[i])
            batch.pos[i] = int(positions[i])
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = int(sequences[i])
            batch.logits[i] = bool(wanted[i])
        library.take_last_errors()
        status = self._lib.llama_decode(self._handle, batch)
        if status != 0:
            reason = library.take_last_errors() or f"status {status}"
            raise LazyWeightsError(f"llama.cpp cannot evaluate these tokens: {reason}", path=self.model.source.source)

    def logits(self, n: int) -> np.ndarray:
        """Return the logits of the n tokens of the last `decode` that wanted them, float32 (n, n_vocab).

        A view of llama.cpp's memory, valid until the next `decode`.
        """
        pointer = self._lib.llama_get_logits(self._handle)
        return np.ctypeslib.as_array(pointer, (n, self.model.n_vocab))
