"""Hessians of the inputs of weights, in memory or in a file: `Hessians`.

The file is a safetensors file. Its metadata says what was run on what; its arrays are, for each group of weights that share an
input, named after the first of them (all with one first dimension: the experts or heads of a weight, 1 for a matrix):

- ``NAME.hessian`` (matrices, n, n), ``NAME.squares`` (matrices, n) or ``NAME.samples`` (matrices, limit, n), by kind;
- ``NAME.rows`` and ``NAME.dropped``, int64 (matrices,): activation rows summed up, and left out because not finite.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

import numpy as np

from lazyweights.container.atomic import AtomicFile
from lazyweights.errors import FormatError, VersionError
from lazyweights.llama.accumulators import KINDS, SECTIONS, matrix_shape
from lazyweights.llama.capture import InputGroup
from lazyweights.llama.safetensors_file import SafetensorsWriter, read_safetensors

FORMAT = "lazyweights.activations"
VERSION = 1


@dataclass(frozen=True)
class CaptureInfo:
    """What activations come from. Fields that are not known ("" and 0) are those of imatrix files.

    Attributes
    ----------
    kind : str
        "hessian", "diagonal" or "samples".
    model, text : str
        Names of the files, without their folders.
    model_sha256, text_sha256 : str
        Of the GGUF (that a coded file holds) and of the text, hexadecimal.
    n_ctx, n_chunks : int
        Tokens of a chunk, and how many of them were evaluated.
    n_samples : int
        Rows of a sample; 0 for the other kinds.
    adds_bos : bool
        Whether the first token of each chunk was replaced by BOS.
    llama_cpp : str
        The build.
    """

    kind: str
    model: str = ""
    model_sha256: str = ""
    text: str = ""
    text_sha256: str = ""
    n_ctx: int = 0
    n_chunks: int = 0
    n_samples: int = 0
    adds_bos: bool = False
    llama_cpp: str = ""

    @property
    def n_tokens(self) -> int:
        """Tokens that were evaluated."""
        return self.n_ctx * self.n_chunks


class Hessians:
    """What is known of the inputs of the weights of a model. A mapping from names of weights.

    Parameters
    ----------
    info : CaptureInfo
    groups : sequence of InputGroup
    values : dict of str to numpy.ndarray
        By leader, first dimension its matrices.
    n_rows, n_dropped : dict of str to numpy.ndarray
        int64 (matrices,), by leader.

    Examples
    --------
    >>> group = InputGroup(("a.weight", "b.weight"), 2, 1, False)
    >>> h = Hessians(CaptureInfo("hessian"), [group], {"a.weight": np.eye(2)[None]}, {"a.weight": np.array([7])},
    ...              {"a.weight": np.array([0])})
    >>> h["b.weight"], h.n_rows("b.weight"), h.shared_with("b.weight")
    (array([[1., 0.],
           [0., 1.]]), 7, ('a.weight', 'b.weight'))
    """

    def __init__(
        self, info: CaptureInfo, groups: Sequence[InputGroup], values: dict[str, np.ndarray], n_rows: dict[str, np.ndarray],
        n_dropped: dict[str, np.ndarray],
    ) -> None:
        self.info = info
        self.groups = tuple(groups)
        self._values, self._n_rows, self._n_dropped = values, n_rows, n_dropped
        self._group_of = {name: group for group in self.groups for name in group.weights}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Hessians:
        """Open a file written by `save` or a capture (mapped, not read), or an imatrix file of llama.cpp in either format.

        Raises
        ------
        FormatError
            If it is neither, or damaged.
        """
        from lazyweights.llama import imatrix

        if imatrix.is_imatrix(path):
            return imatrix.read_imatrix(path)
        name = os.fspath(path)
        arrays, metadata = read_safetensors(path)
        if metadata.get("format") != FORMAT:
            raise FormatError("this safetensors file holds no activations", path=name, expected=FORMAT)
        if metadata.get("version") != str(VERSION):
            raise VersionError("written by a later version", path=name, expected=VERSION, found=metadata.get("version"))
        try:
            info = CaptureInfo(**json.loads(metadata["info"]))
            groups = [
                InputGroup(tuple(g["weights"]), g["n_columns"], g["n_matrices"], g["is_routed"], g["is_output"])
                for g in json.loads(metadata["groups"])
            ]
            section = SECTIONS[info.kind]
            leaders = [group.leader for group in groups]
            values, rows, dropped = ({key: arrays[f"{key}.{part}"] for key in leaders} for part in (section, "rows", "dropped"))
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError("the description of the activations is damaged", path=name) from error
        for group in groups:
            shape = (group.n_matrices, *matrix_shape(info.kind, group.n_columns, info.n_samples))
            if values[group.leader].shape != shape:
                raise FormatError("wrong shape", path=name, tensor=group.leader, expected=shape, found=values[group.leader].shape)
        return cls(info, groups, values, rows, dropped)

    def save(self, path: str | os.PathLike[str], *, force: bool = False, dtype: str = "float64") -> None:
        """Write the file, whole or not at all; `dtype`: of Hessians, float64 or float32.

        Raises
        ------
        OutputExistsError, LazyWeightsError
            As for `AtomicFile`.
        """
        with AtomicFile(path, force) as file:
            writer = HessianWriter(file, self.info, self.groups, dtype)
            for group in self.groups:
                key = group.leader
                writer.write(key, 0, self._values[key], self._n_rows[key], self._n_dropped[key])

    def keys(self) -> list[str]:
        """Names of the weights, in the order of the graph."""
        return list(self._group_of)

    def __iter__(self) -> Iterator[str]:
        return iter(self._group_of)

    def __len__(self) -> int:
        return len(self._group_of)

    def __contains__(self, name: object) -> bool:
        return name in self._group_of

    def __getitem__(self, name: str) -> np.ndarray:
        """Return the values of a weight: (n, n) Hessian, (n,) squares or (limit, n) samples; of experts (experts, ...)."""
        values = self._values[self._group_of[name].leader]
        return values[0] if self._group_of[name].n_matrices == 1 else values

    def n_rows(self, name: str) -> Any:
        """Return how many activation rows the values of a weight come from: int; of experts int64 (experts,)."""
        rows = self._n_rows[self._group_of[name].leader]
        return int(rows[0]) if self._group_of[name].n_matrices == 1 else rows

    def n_dropped(self, name: str) -> int:
        """Return how many rows were left out because an element was NaN or infinite."""
        return int(self._n_dropped[self._group_of[name].leader].sum())

    def diagonal(self, name: str) -> np.ndarray:
        """Return the sums of squares of a weight's inputs, float64 (n,); of experts (experts, n).

        Raises
        ------
        ValueError
            If only samples are there.
        """
        if self.info.kind == "samples":
            raise ValueError("samples have no sums of squares")
        values = self[name]
        if self.info.kind == "hessian":
            values = np.diagonal(values, axis1=-2, axis2=-1)
        return np.asarray(values, np.float64)

    def shared_with(self, name: str) -> tuple[str, ...]:
        """Return the weights that share an input with this one, itself included."""
        return self._group_of[name].weights


class HessianWriter:
    """Writes the file piece by piece.

    Parameters
    ----------
    file : BinaryIO
        Empty, seekable.
    info, groups
        As of `Hessians`.
    dtype : str
        float64 or float32, of Hessians; squares are float64 and samples float32.
    """

    def __init__(self, file: BinaryIO, info: CaptureInfo, groups: Sequence[InputGroup], dtype: str = "float64") -> None:
        if info.kind not in KINDS or dtype not in ("float64", "float32"):
            raise ValueError(f"no kind {info.kind!r} of {dtype}")
        self._section = SECTIONS[info.kind]
        kept = {"hessian": dtype, "diagonal": "float64", "samples": "float32"}[info.kind]
        arrays: dict[str, tuple[Any, tuple[int, ...]]] = {}
        for group in groups:
            shape = (group.n_matrices, *matrix_shape(info.kind, group.n_columns, info.n_samples))
            arrays[f"{group.leader}.{self._section}"] = (kept, shape)
            arrays[f"{group.leader}.rows"] = arrays[f"{group.leader}.dropped"] = (np.int64, (group.n_matrices,))
        metadata = {
            "format": FORMAT, "version": str(VERSION), "info": json.dumps(asdict(info)),
            "groups": json.dumps([asdict(group) for group in groups]),
        }  # fmt: skip
        self._writer = SafetensorsWriter(file, arrays, metadata)

    def write(self, leader: str, first: int, values: np.ndarray, n_rows: np.ndarray, n_dropped: np.ndarray) -> None:
        """Write the values of matrices from number `first` on, and their numbers of rows."""
        self._writer.write(f"{leader}.{self._section}", values, first)
        self._writer.write(f"{leader}.rows", n_rows, first)
        self._writer.write(f"{leader}.dropped", n_dropped, first)
