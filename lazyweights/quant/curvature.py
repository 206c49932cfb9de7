"""How much each weight matters to what the model says: Fisher information, as one matrix a tensor and one number a row.

A change D of a weight matrix (rows, columns) moves the distribution of the next token. The divergence per token is, in second
order,

    KLD ~ 1/2 coherence * sum over rows i of  row_weights[i] * D[i]' H D[i]

- ``row_weights[i]``: mean square of the gradient of output row i. The gradients are those of the log-probability of a token drawn
  from the model's own distribution, which makes their second moment the Fisher information (not the "empirical" one of the
  text's tokens).
- ``H``: mean of ``x x'`` over the inputs x, each weighted with the square norm of its output gradient: tokens that matter count.
- ``coherence``: the above treats tokens as independent, but one D moves all of them. ``|sum of g x'|^2 / sum of |g|^2 |x|^2``
  says how much their effects add up; it is near 3 for values of attention, which are summed over tokens, and near 1 elsewhere.

The token embedding that also is the output matrix gets both roles: the probability of a token weighs its row, and H has the
curvature of the output plus that of the input. Chunks are spread evenly over the text, since neighbours are about the same
things; what words come up differs from page to page even so, and half of the weight of a token's row is how often it comes in
the whole text. Layers are run one at a time (`lazyweights.quant.transformer`), with the inputs of
all layers in a temporary file; sums are taken in the order of the chunks, so the result does not depend on threads.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace

import numpy as np
from threadpoolctl import threadpool_limits

from lazyweights.container.atomic import AtomicFile
from lazyweights.container.jobs import ordered_map, thread_count
from lazyweights.errors import FormatError, QuantizationError, VersionError
from lazyweights.llama.memory_file import model_path
from lazyweights.llama.safetensors_file import SafetensorsWriter, read_safetensors
from lazyweights.quant.float_source import FloatSource
from lazyweights.quant.gguf_rewrite import open_gguf
from lazyweights.quant.transformer import (
    Architecture,
    Layer,
    Rotation,
    layer_weight_names,
    normalize,
    normalize_backward,
    read_architecture,
)

FORMAT = "lazyweights.curvature"
VERSION = 1
LOGITS_BYTES = 1 << 25
EMBEDDING, OUTPUT, OUTPUT_NORM = "token_embd.weight", "output.weight", "output_norm.weight"

CurvatureProgress = Callable[[int, int, str], None]
"""Takes steps done, steps in all, and what is at work."""


@dataclass(frozen=True)
class CurvatureInfo:
    """What curvature was measured on: names without folders, sizes of the run, and the seed of the drawn tokens."""

    model: str
    model_sha256: str
    text: str
    text_sha256: str
    n_ctx: int
    n_chunks: int
    seed: int


@dataclass(frozen=True)
class TensorCurvature:
    """Curvature of one weight matrix.

    Attributes
    ----------
    hessian : numpy.ndarray
        float32 (columns, columns).
    row_weights : numpy.ndarray
        float64 (rows,).
    coherence : float
    n_dropped : int
        Tokens of chunks that were left out because something in them was not finite.
    """

    hessian: np.ndarray
    row_weights: np.ndarray
    coherence: float
    n_dropped: int = 0


class Curvature:
    """A curvature file, mapped.

    Parameters
    ----------
    path : str or os.PathLike

    Attributes
    ----------
    info : CurvatureInfo

    Raises
    ------
    FormatError
        If it is no such file, or damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        name = os.fspath(path)
        self._arrays, metadata = read_safetensors(path)
        if metadata.get("format") != FORMAT:
            raise FormatError("this safetensors file holds no curvature", path=name, expected=FORMAT)
        if metadata.get("version") != str(VERSION):
            raise VersionError("written by a later version", path=name, expected=VERSION, found=metadata.get("version"))
        try:
            self.info = CurvatureInfo(**json.loads(metadata["info"]))
            self._coherence: dict[str, float] = {str(k): float(v) for k, v in json.loads(metadata["coherence"]).items()}
            self._n_dropped: dict[str, int] = {str(k): int(v) for k, v in json.loads(metadata.get("dropped", "{}")).items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError("the description of the curvature is damaged", path=name) from error
        for key in self._coherence:
            hessian, rows = self._arrays.get(f"{key}.hessian"), self._arrays.get(f"{key}.row_weights")
            if hessian is None or rows is None or hessian.ndim != 2 or hessian.shape[0] != hessian.shape[1] or rows.ndim != 1:
                raise FormatError("an array is missing or has the wrong shape", path=name, tensor=key)

    def __contains__(self, name: object) -> bool:
        return name in self._coherence

    def __iter__(self) -> Iterator[str]:
        return iter(self._coherence)

    def __getitem__(self, name: str) -> TensorCurvature:
        return TensorCurvature(
            self._arrays[f"{name}.hessian"], self._arrays[f"{name}.row_weights"], self._coherence[name],
            self._n_dropped.get(name, 0),
        )  # fmt: skip


class _Sums:
    """Sums of one matrix over chunks; `add` is called in the order of the chunks."""

    def __init__(self, rows: int, columns: int) -> None:
        self.hessian = np.zeros((columns, columns))
        self.squares = np.zeros(rows)
        self.gradient_norms = 0.0
        self.apart = 0.0
        self.together = 0.0
        self.n_tokens = self.n_dropped = 0

    def add(self, part: _Part) -> None:
        if not part.is_finite:
            self.n_dropped += part.n_tokens
            return
        self.hessian += part.hessian
        self.squares += part.squares
        self.gradient_norms += part.gradient_norms
        self.apart += part.apart
        self.together += part.together
        self.n_tokens += part.n_tokens

    def result(self) -> TensorCurvature:
        n = max(self.n_tokens, 1)
        # The weights of tokens have the mean 1, so that row_weights carry the size of the gradients.
        scale = 1 / self.gradient_norms if self.gradient_norms > 0 else 0.0
        coherence = self.together / self.apart if self.apart > 0 else 1.0
        return TensorCurvature((self.hessian * scale).astype(np.float32), self.squares / n, coherence, self.n_dropped)


@dataclass(frozen=True)
class _Part:
    """What one chunk adds."""

    hessian: np.ndarray
    squares: np.ndarray
    gradient_norms: float
    apart: float
    together: float
    n_tokens: int
    is_finite: bool


def _part(x: np.ndarray, gradient: np.ndarray) -> _Part:
    square = gradient * gradient
    weights = square.sum(axis=1)
    hessian = (x * weights[:, None]).T @ x
    product = gradient.T @ x
    return _Part(
        hessian, square.sum(axis=0, dtype=np.float64), float(weights.sum(dtype=np.float64)),
        float((weights * (x * x).sum(axis=1)).sum(dtype=np.float64)), float((product * product).sum(dtype=np.float64)), len(x),
        bool(np.isfinite(hessian).all() and np.isfinite(weights).all()),
    )  # fmt: skip


def _back(
    layer: Layer, states: np.ndarray, gradients: np.ndarray, chunk: int
) -> tuple[np.ndarray, dict[str, _Part]]:
    """Return the gradient of a layer's input for a chunk, and what its matrices see."""
    parts: dict[str, _Part] = {}

    def record(name: str, x: np.ndarray, gradient: np.ndarray) -> None:
        parts[name] = _part(x, gradient)

    return layer.backward(states[chunk], gradients[chunk], record), parts


def measure_curvature(
    model: str | os.PathLike[str], text: str | os.PathLike[str], output: str | os.PathLike[str], *, n_ctx: int = 512,
    n_chunks: int | None = 64, seed: int = 0, threads: int = 0, force: bool = False, allow_requantize: bool = False,
    progress: CurvatureProgress | None = None,
) -> CurvatureInfo:  # fmt: skip
    """Measure the curvature of all matrices of a model on a text.

    Parameters
    ----------
    model : str or os.PathLike
        A GGUF of floats of an architecture that `read_architecture` knows, or its coded file.
    text : str or os.PathLike
        Tokenized by llama.cpp, in chunks of `n_ctx` tokens.
    output : str or os.PathLike
        The file to write, whole or not at all.
    n_ctx, n_chunks : int
        Tokens of a chunk, and chunks at most.
    seed : int
        Of the tokens that are drawn.
    threads : int
        0: all cores.
    force : bool
        Replace an output that exists.
    allow_requantize : bool
        Take a model that is quantized already.
    progress : callable, optional

    Returns
    -------
    CurvatureInfo

    Raises
    ------
    QuantizationError
        If gradients of this model are not known.
    LazyWeightsError
        If a file cannot be read or written, or the text is too short.
    """
    chunks, frequencies, text_hash = _tokenize(model, text, n_ctx, n_chunks)
    n_threads = thread_count(threads)
    path = os.fspath(model)
    with (
        model_path(path, threads=threads) as plain, open_gguf(plain.path) as (view, scan),
        AtomicFile(output, force, path) as file, threadpool_limits(1),
    ):  # fmt: skip
        source = FloatSource(view, scan, allow_requantize)
        architecture = read_architecture(source.metadata)
        info = CurvatureInfo(
            os.path.basename(path), hashlib.sha256(view).hexdigest(), os.path.basename(os.fspath(text)), text_hash, n_ctx,
            len(chunks), seed,
        )  # fmt: skip
        run = _Run(source, architecture, chunks, frequencies, seed, n_threads, progress)
        names = run.names()
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name in names:
            rows, columns = source.shape(name)
            shapes[f"{name}.hessian"] = ("<f4", (columns, columns))
            shapes[f"{name}.row_weights"] = ("<f8", (rows,))
        coherence, dropped = dict.fromkeys(names, 1.0), dict.fromkeys(names, 0)

        def metadata() -> dict[str, str]:
            return {
                "format": FORMAT, "version": str(VERSION), "info": json.dumps(asdict(info)),
                "coherence": _fixed_text(coherence, "12.5e"), "dropped": _fixed_text(dropped, "12d"),
            }  # fmt: skip

        # The header stands before the arrays: its numbers are padded to one width and filled in at the end.
        writer = SafetensorsWriter(file, shapes, metadata())
        beside = os.path.dirname(os.path.abspath(os.fspath(output)))
        with tempfile.TemporaryDirectory(prefix=".lazyweights-", dir=beside) as folder:
            for name, found in run.tensors(folder):
                coherence[name], dropped[name] = found.coherence, found.n_dropped
                writer.write(f"{name}.hessian", found.hessian)
                writer.write(f"{name}.row_weights", found.row_weights)
        file.seek(0)
        SafetensorsWriter(file, shapes, metadata())
    return info


def _fixed_text(values: Mapping[str, float], width: str) -> str:
    """Return numbers by name as JSON whose length does not depend on them."""
    return "{" + ", ".join(f"{json.dumps(name)}: {value:{width}}" for name, value in values.items()) + "}"


def _tokenize(
    model: str | os.PathLike[str], text: str | os.PathLike[str], n_ctx: int, n_chunks: int | None
) -> tuple[np.ndarray, np.ndarray, str]:
    """Return chunks, int32 (n_chunks, n_ctx), the frequency of each token in the whole text, float64, and a hash of the text."""
    from lazyweights.llama.chunks import read_text, split_chunks, start_token
    from lazyweights.llama.model import Model

    data = read_text(text)
    with Model(model, vocab_only=True) as vocabulary:
        tokens = vocabulary.tokenize(data)
        chunks = split_chunks(tokens, n_ctx, None, os.fspath(model))
        bos = start_token(vocabulary)
        frequencies = np.bincount(tokens, minlength=vocabulary.n_vocab) / len(tokens)
        if bos is not None:  # it starts each chunk
            frequencies[bos] = max(frequencies[bos], 1 / n_ctx)
            frequencies /= frequencies.sum()
    wanted = min(n_chunks or len(chunks), len(chunks))
    chunks = chunks[np.arange(wanted) * len(chunks) // wanted].copy()
    if bos is not None:
        chunks[:, 0] = bos
    return chunks, frequencies, hashlib.sha256(data).hexdigest()


class _Run:
    """One sweep through the layers, forward and back."""

    def __init__(
        self, source: FloatSource, architecture: Architecture, chunks: np.ndarray, frequencies: np.ndarray, seed: int,
        threads: int, progress: CurvatureProgress | None,
    ) -> None:  # fmt: skip
        self._frequencies = frequencies
        self._source, self._arch, self._chunks, self._seed, self._threads = source, architecture, chunks, seed, threads
        self._progress = progress
        self._n_steps = (2 * architecture.n_layers + 1) * len(chunks)
        self._n_done = 0
        factors = source.vector("rope_freqs.weight") if "rope_freqs.weight" in source.tensors else None
        self._rotation = Rotation(architecture, chunks.shape[1], factors)
        self._is_tied = OUTPUT not in source.tensors
        norms = [f"blk.{i}.{kind}.weight" for i in range(architecture.n_layers) for kind in ("attn_norm", "ffn_norm")]
        for name in (*self.names(), *norms, OUTPUT_NORM):
            if name not in source.tensors:
                raise QuantizationError("the model has no tensor of this name: its layers are not those known here", tensor=name)

    def names(self) -> list[str]:
        """Return the names of the matrices in the order in which `tensors` yields them."""
        layers = [name for i in reversed(range(self._arch.n_layers)) for name in layer_weight_names(i)]
        return [*([] if self._is_tied else [OUTPUT]), *layers, EMBEDDING]

    def tensors(self, folder: str) -> Iterator[tuple[str, TensorCurvature]]:
        """Yield name and curvature of each matrix; keeps the inputs of layers in files in `folder`."""
        arch, chunks = self._arch, self._chunks
        shape = (arch.n_layers + 1, *chunks.shape, arch.n_embedding)
        states = _spilled(os.path.join(folder, "states"), shape)
        embedding = self._source.rows(EMBEDDING)
        states[0] = embedding[chunks]
        del embedding
        for index in range(arch.n_layers):
            layer = self._layer(index)
            for i, out in enumerate(ordered_map(layer.forward, (states[index, i] for i in range(len(chunks))), self._threads)):
                states[index + 1, i] = out
                self._step(f"layer {index}")

        gradients = _spilled(os.path.join(folder, "gradients"), shape[1:])
        output = self._source.rows(EMBEDDING if self._is_tied else OUTPUT)
        of_output = _OutputSums(output.shape)
        head = functools.partial(self._head, output, states[arch.n_layers])
        for i, (gradient, of_chunk) in enumerate(ordered_map(head, range(len(chunks)), self._threads)):
            gradients[i] = gradient
            of_output.add(of_chunk)
            self._step("output")
        del output, head
        if not self._is_tied:
            yield OUTPUT, of_output.result(self._frequencies)

        for index in reversed(range(arch.n_layers)):
            layer = self._layer(index)
            sums = {name: _Sums(*self._source.shape(name)) for name in layer_weight_names(index)}

            back = functools.partial(_back, layer, states[index], gradients)
            for i, (gradient, parts) in enumerate(ordered_map(back, range(len(chunks)), self._threads)):
                gradients[i] = gradient
                for name, part in parts.items():
                    sums[name].add(part)
                self._step(f"layer {index}")
            for name, found in sums.items():
                yield name, found.result()

        at_input = np.zeros((arch.n_embedding, arch.n_embedding))
        n_tokens = 0
        for gradient in gradients:
            square = gradient.T @ gradient
            if np.isfinite(square).all():
                at_input += square
                n_tokens += len(gradient)
        at_rows = self._embedding(at_input / max(n_tokens, 1), of_output)
        yield EMBEDDING, replace(at_rows, n_dropped=max(chunks.size - n_tokens, of_output.n_dropped if self._is_tied else 0))

    def _embedding(self, at_input: np.ndarray, of_output: _OutputSums) -> TensorCurvature:
        """Return the curvature of the token embedding: its rows count as often as their tokens come."""
        if self._is_tied:
            found = of_output.result(self._frequencies)
            share = float(found.row_weights.sum()) or 1.0
            return TensorCurvature((found.hessian + at_input / share).astype(np.float32), found.row_weights, 1.0)
        return TensorCurvature(at_input.astype(np.float32), _of_rows(self._frequencies, self._source.shape(EMBEDDING)[0]), 1.0)

    def _layer(self, index: int) -> Layer:
        return Layer(self._arch, index, self._source.layer_weights(f"blk.{index}."), self._rotation)

    def _head(self, output: np.ndarray, states: np.ndarray, chunk: int) -> tuple[np.ndarray, _OutputPart]:
        """Return the gradient of the last layer's output of a chunk, and what the output matrix sees."""
        x = states[chunk]
        weight, epsilon = self._source.vector(OUTPUT_NORM), self._arch.norm_epsilon
        normed = normalize(x, weight, epsilon)
        draws = np.random.Generator(np.random.PCG64([self._seed, chunk])).random(len(x))
        gradient = np.empty_like(x)
        squares = np.zeros(len(output))
        token_weights = np.empty(len(x), np.float32)
        step = max(LOGITS_BYTES // (4 * len(output)), 1)
        for start in range(0, len(x), step):
            rows = slice(start, start + step)
            p = normed[rows] @ output.T
            p -= p.max(axis=1, keepdims=True)
            np.exp(p, out=p)
            p /= p.sum(axis=1, keepdims=True)
            spread = p * (1 - p)
            squares += spread.sum(axis=0, dtype=np.float64)
            token_weights[rows] = spread.sum(axis=1)
            reached = np.cumsum(p, axis=1, dtype=np.float64)
            drawn = (reached < draws[rows, None] * reached[:, -1:]).sum(axis=1)
            p[np.arange(len(p)), np.minimum(drawn, len(output) - 1)] -= 1
            gradient[rows] = p @ output
        hessian = (normed * token_weights[:, None]).T @ normed
        is_finite = bool(np.isfinite(hessian).all() and np.isfinite(squares).all())
        part = _OutputPart(hessian, squares, float(token_weights.sum(dtype=np.float64)), len(x), is_finite)
        return normalize_backward(x, weight, epsilon, gradient), part

    def _step(self, stage: str) -> None:
        self._n_done += 1
        if self._progress is not None:
            self._progress(self._n_done, self._n_steps, stage)


@dataclass(frozen=True)
class _OutputPart:
    hessian: np.ndarray
    squares: np.ndarray
    weight: float
    n_tokens: int
    is_finite: bool


class _OutputSums:
    """Sums of the output matrix: the square gradient of a logit has the expectation p (1 - p), which needs no draw."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.hessian = np.zeros((shape[1], shape[1]))
        self.squares = np.zeros(shape[0])
        self.weight = 0.0
        self.n_tokens = self.n_dropped = 0

    def add(self, part: _OutputPart) -> None:
        if not part.is_finite:
            self.n_dropped += part.n_tokens
            return
        self.hessian += part.hessian
        self.squares += part.squares
        self.weight += part.weight
        self.n_tokens += part.n_tokens

    def result(self, frequencies: np.ndarray) -> TensorCurvature:
        seen = self.squares / max(self.n_tokens, 1)
        rows = (seen + _of_rows(frequencies, len(seen)) * seen.sum()) / 2
        return TensorCurvature((self.hessian / (self.weight or 1.0)).astype(np.float32), rows, 1.0, self.n_dropped)


def _spilled(path: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a float32 array in a file whose room is there: writing to a full disk through a map would kill the process."""
    if hasattr(os, "posix_fallocate"):
        with open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, 4 * math.prod(shape))
        return np.memmap(path, np.float32, "r+", shape=shape)
    return np.memmap(path, np.float32, "w+", shape=shape)


def _of_rows(frequencies: np.ndarray, n_rows: int) -> np.ndarray:
    """Return the frequencies of tokens for the rows of a matrix, which may have more or fewer of them."""
    return np.pad(frequencies, (0, max(n_rows - len(frequencies), 0)))[:n_rows]

