"""A capture run: evaluate a text in as many passes as the memory for accumulators asks for, and write what they hold."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from lazyweights.container.atomic import AtomicFile, check_output
from lazyweights.container.jobs import ProgressCallback
from lazyweights.container.reader import CodedFile
from lazyweights.errors import LazyWeightsError
from lazyweights.llama import accumulators, imatrix, library
from lazyweights.llama.accumulators import Accumulator
from lazyweights.llama.capture import Collector, Discovery, InputGroup, Watcher
from lazyweights.llama.ggml_tensor import Tensors
from lazyweights.llama.hessians import CaptureInfo, Hessians, HessianWriter
from lazyweights.llama.memory_file import ModelPath
from lazyweights.llama.model import Context, Model

DEFAULT_MEMORY = 4_000_000_000
DEFAULT_SAMPLES = 1024
MAX_BATCH = 512
MAX_LOGITS_BYTES = 1 << 28
"""Bounds the batch: all its tokens ask for logits."""

DISCOVERY_TOKENS = 32
WAIT_POLICY = "OMP_WAIT_POLICY"
COPY_BYTES = 1 << 22


@dataclass(frozen=True)
class Part:
    """Matrices `first` to `stop` of a group, held in one pass."""

    group: InputGroup
    first: int
    stop: int


@dataclass(frozen=True)
class CaptureProgress:
    """How far a run is: chunks done of all passes, of how many, and which pass of how many this is (from 1)."""

    n_done: int
    n_total: int
    pass_number: int
    n_passes: int


@dataclass(frozen=True)
class CaptureResult:
    """What a run did.

    Attributes
    ----------
    info : CaptureInfo
    groups : tuple of InputGroup
    n_passes : int
    accumulator_bytes : int
        Memory that the largest pass took for accumulators.
    n_dropped : int
        Rows that were not finite, over all weights.
    n_unseen : int
        Experts that no row came to.
    output_bytes : int
    seconds : float
        Of the run, without loading the model.
    """

    info: CaptureInfo
    groups: tuple[InputGroup, ...]
    n_passes: int
    accumulator_bytes: int
    n_dropped: int
    n_unseen: int
    output_bytes: int
    seconds: float


def plan_passes(groups: Sequence[InputGroup], kind: str, max_memory: int, n_samples: int) -> list[list[Part]]:
    """Spread the accumulators over passes, in the order of the graph, none of which takes more than `max_memory` bytes.

    Raises
    ------
    LazyWeightsError
        If the accumulator of one matrix alone is larger.
    """
    passes: list[list[Part]] = [[]]
    scratch = max((accumulators.scratch_bytes(kind, group.n_columns) for group in groups), default=0)
    left = max_memory - scratch
    for group in groups:
        each = accumulators.matrix_bytes(kind, group.n_columns, n_samples)
        if each > max_memory - scratch:
            raise LazyWeightsError(
                "the memory is too small for the accumulator of one matrix: allow more, or capture the diagonal only",
                tensor=group.leader, expected=f"at least {each + scratch} bytes", found=max_memory,
            )  # fmt: skip
        first = 0
        while first < group.n_matrices:
            stop = min(group.n_matrices, first + left // each)
            if stop == first:
                passes.append([])
                left = max_memory - scratch
                continue
            passes[-1].append(Part(group, first, stop))
            left -= (stop - first) * each
            first = stop
    return passes


def capture(
    model_path: str | os.PathLike[str], text_path: str | os.PathLike[str], output: str | os.PathLike[str], *,
    kind: str = "hessian", n_ctx: int = 512, n_chunks: int | None = None, max_memory: int = DEFAULT_MEMORY,
    n_samples: int = DEFAULT_SAMPLES, dtype: str = "float64", imatrix_format: str | None = None,
    process_output: bool = False, threads: int = 0, force: bool = False,
    decode_progress: ProgressCallback | None = None, progress: Callable[[CaptureProgress], None] | None = None,
) -> CaptureResult:  # fmt: skip
    """Evaluate a text and write the activations of all weights to one file, whole or not at all.

    Parameters
    ----------
    model_path : str or os.PathLike
        A GGUF or a coded file.
    text_path : str or os.PathLike
        It is tokenized at once and cut into chunks of `n_ctx` tokens; what is left at its end is dropped. The first token
        of each chunk becomes BOS if the tokenizer adds BOS.
    output : str or os.PathLike
        The file.
    kind : str
        "hessian" (X^T X), "diagonal" (sums of squares) or "samples" (rows as they are).
    n_ctx : int
        Tokens of a chunk.
    n_chunks : int, optional
        How many chunks at most; all if not given.
    max_memory : int
        Bytes for accumulators; the text is evaluated once more for each time that they do not fit.
    n_samples : int
        Rows of a sample.
    dtype : str
        float64 or float32, how Hessians are stored.
    imatrix_format : str, optional
        "gguf" or "dat": write an imatrix file of llama.cpp instead, of the kind "diagonal".
    process_output : bool
        Put the output matrix into an imatrix file too, as ``llama-imatrix --process-output`` does.
    threads : int
        0: all cores.
    force : bool
        Replace an output that exists.
    decode_progress, progress : callable, optional
        Told how far decoding a coded file is, and how many chunks are done.

    Returns
    -------
    CaptureResult

    Raises
    ------
    LazyWeightsError
        If the text is too short, a file cannot be read or written, or the model cannot be evaluated.
    """
    if kind not in accumulators.KINDS or (imatrix_format is not None and kind != "diagonal"):
        raise ValueError(f"no imatrix file of the kind {kind!r}" if imatrix_format else f"no kind {kind!r}")
    check_output(output, force, model_path)
    _load_passive()
    tensors = Tensors()
    text = _read_text(text_path)
    with Model(model_path, threads=threads, progress=decode_progress) as model:
        started = time.monotonic()
        chunks = _chunks(model, text, n_ctx, n_chunks, os.fspath(text_path))
        info = CaptureInfo(
            kind=kind, model=os.path.basename(model_path), model_sha256=model_sha256(model.source),
            text=os.path.basename(text_path), text_sha256=hashlib.sha256(text).hexdigest(), n_ctx=n_ctx, n_chunks=len(chunks),
            n_samples=n_samples if kind == "samples" else 0, adds_bos=model.adds_bos, llama_cpp=library.build_text(),
        )  # fmt: skip
        groups = discover(model, tensors, chunks[0], threads)
        passes = plan_passes(groups, kind, max_memory, n_samples)
        run = _Run(model, tensors, groups, passes, chunks, kind, n_samples, threads, progress)
        if imatrix_format is None:
            with AtomicFile(output, force, model_path) as file:
                writer = HessianWriter(file, info, groups, dtype)
                for part, sums in run.parts():
                    writer.write(part.group.leader, part.first, sums.values, sums.n_rows, sums.n_dropped)
        else:
            hessians = run.in_memory(info)
            imatrix.write_imatrix(output, hessians, imatrix_format, process_output=process_output, force=force)
        return CaptureResult(
            info, tuple(groups), len(passes), run.peak_bytes, run.n_dropped, run.n_unseen, os.stat(output).st_size,
            time.monotonic() - started,
        )  # fmt: skip


def _load_passive() -> None:
    """Load llama.cpp with threads that sleep while they wait, unless it is loaded or the user chose otherwise.

    By default OpenMP's threads wait busily, for the callback too: in the way of those of BLAS, which computes meanwhile (four
    times slower, measured on two cores that were not idle). Only the start of OpenMP reads the variable.
    """
    is_chosen = WAIT_POLICY in os.environ
    os.environ.setdefault(WAIT_POLICY, "PASSIVE")
    try:
        library.load()
    finally:
        if not is_chosen:
            del os.environ[WAIT_POLICY]


def discover(model: Model, tensors: Tensors, chunk: np.ndarray, threads: int = 0) -> list[InputGroup]:
    """Find the weights that a model multiplies and which of them share an input, from the graph of a short batch.

    Raises
    ------
    LazyWeightsError
        If there are none.
    """
    discovery = Discovery(tensors)
    with _context(model, min(len(chunk), DISCOVERY_TOKENS), len(chunk), threads, discovery) as context:
        n = min(len(chunk), DISCOVERY_TOKENS)
        context.decode(chunk[:n], range(n), [0] * n, [True] * n)
    discovery.check()
    groups = discovery.groups()
    if not groups:
        raise LazyWeightsError("llama.cpp multiplies no weights in this model", path=model.source.source)
    return groups


class _Run:
    """The passes over the text; counts as it goes."""

    def __init__(
        self, model: Model, tensors: Tensors, groups: Sequence[InputGroup], passes: Sequence[Sequence[Part]],
        chunks: np.ndarray, kind: str, n_samples: int, threads: int, progress: Callable[[CaptureProgress], None] | None,
    ) -> None:  # fmt: skip
        self._model, self._tensors, self._groups, self._passes = model, tensors, groups, passes
        self._chunks, self._kind, self._n_samples = chunks, kind, n_samples
        self._threads, self._progress = threads, progress
        self.peak_bytes = self.n_dropped = self.n_unseen = 0

    def parts(self) -> Iterator[tuple[Part, Accumulator]]:
        """Yield each part once its pass is done; a part is free for reuse when the next one is asked for."""
        for number, parts in enumerate(self._passes):
            sums = {
                part.group.leader: accumulators.make(self._kind, part.group.n_columns, part.first, part.stop, self._n_samples)
                for part in parts
            }
            self.peak_bytes = max(self.peak_bytes, sum(s.values.nbytes for s in sums.values()))
            self._evaluate(sums, number)
            for part in parts:
                done = sums.pop(part.group.leader)
                self.n_dropped += int(done.n_dropped.sum()) * len(part.group.weights)
                self.n_unseen += int((done.n_rows == 0).sum()) * len(part.group.weights)
                yield part, done

    def in_memory(self, info: CaptureInfo) -> Hessians:
        """Return all of it."""
        n = {group.leader: group.n_matrices for group in self._groups}
        shapes = {g.leader: accumulators.matrix_shape(self._kind, g.n_columns, self._n_samples) for g in self._groups}
        values = {key: np.zeros((n[key], *shapes[key])) for key in n}
        rows, dropped = ({key: np.zeros(n[key], np.int64) for key in n} for _ in range(2))
        for part, sums in self.parts():
            for target, found in ((values, sums.values), (rows, sums.n_rows), (dropped, sums.n_dropped)):
                target[part.group.leader][part.first : part.stop] = found
        return Hessians(info, self._groups, values, rows, dropped)

    def _evaluate(self, sums: dict[str, Accumulator], number: int) -> None:
        n_chunks, n_ctx = self._chunks.shape
        n_batch = max(1, min(n_ctx, MAX_BATCH, MAX_LOGITS_BYTES // (4 * self._model.n_vocab)))
        collector = Collector(self._tensors, self._groups, sums)
        with _context(self._model, n_batch, n_ctx, self._threads, collector) as context:
            for done, chunk in enumerate(self._chunks, 1):
                context.clear()
                for start in range(0, n_ctx, n_batch):
                    tokens = chunk[start : start + n_batch]
                    collector.start_batch(len(tokens))
                    context.decode(tokens, range(start, start + len(tokens)), [0] * len(tokens), [True] * len(tokens))
                    collector.end_batch()
                if self._progress is not None:
                    n_passes = len(self._passes)
                    self._progress(CaptureProgress(number * n_chunks + done, n_passes * n_chunks, number + 1, n_passes))


@contextmanager
def _context(model: Model, n_batch: int, n_ctx: int, threads: int, watcher: Watcher) -> Iterator[Context]:
    """A context whose callback errors come before those of llama.cpp, which follow from them."""
    with Context(model, n_ctx=n_ctx, n_batch=n_batch, threads=threads, callback=watcher) as context:
        try:
            yield context
        except LazyWeightsError:
            watcher.check()
            raise


def _read_text(path: str | os.PathLike[str]) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise LazyWeightsError(f"cannot read: {error.strerror}", path=os.fspath(path)) from error


def _chunks(model: Model, text: bytes, n_ctx: int, n_chunks: int | None, path: str) -> np.ndarray:
    """Return the tokens to evaluate, int32 (chunks, n_ctx)."""
    tokens = model.tokenize(text)
    n = len(tokens) // n_ctx
    if n_chunks is not None:
        n = min(n, n_chunks)
    if n < 1:
        raise LazyWeightsError("the text is shorter than a chunk", path=path, expected=f"{n_ctx} tokens", found=len(tokens))
    chunks = tokens[: n * n_ctx].reshape(n, n_ctx).copy()
    if model.adds_bos:
        chunks[:, 0] = model.bos
    return chunks


def model_sha256(source: ModelPath) -> str:
    """Return the SHA-256 of a model's GGUF, hexadecimal; a coded file has it written down."""
    if source.is_coded:
        with CodedFile(source.source) as file:
            return file.layout.sha256.hex()
    digest = hashlib.sha256()
    with open(source.path, "rb") as plain:
        while block := plain.read(COPY_BYTES):
            digest.update(block)
    return digest.hexdigest()
