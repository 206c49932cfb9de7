"""Points: quantized models that were measured, and the folder in which they are kept from run to run.

A point is stored as ``points/NAME.KEY.json``. The key is a hash of everything that its numbers depend on, so a changed text,
context, source or option finds no file and is measured; what is there and readable is taken.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from lazyweights.container.atomic import AtomicFile
from lazyweights.llama.divergence import Estimate
from lazyweights.reports.tensor_facts import TensorFacts

POINT_VERSION = 1
"""Part of every key: points of another version are measured anew."""

SOURCE, STOCK, TUNED = "source", "stock", "tuned"
HASH_BYTES = 1 << 24


@dataclass(frozen=True)
class Point:
    """A model that was measured.

    Attributes
    ----------
    kind : str
        SOURCE, STOCK or TUNED.
    name : str
        The format, or the step: what tables and plots call it.
    key : str
        See `point_key`.
    options : dict
        What the quantizer was told, JSON values.
    gguf_bytes, coded_bytes : int
        Whole files.
    n_weights : int
    ppl : Estimate
        Perplexity.
    ratio : Estimate
        Perplexity over that of the source; its error is that of paired positions. 1 and 0 of the source.
    kld, same_top : Estimate or None
        KL divergence from the source in nats, and the share of positions with the same most likely token; None of the source.
    kld_quantiles : dict
        Of the divergence, by the keys of `lazyweights.llama.divergence.KLD_FRACTIONS`.
    tensors : tuple of TensorFacts
    seconds : dict
        Of what was done (quantize, encode, evaluate); what was not done is missing.
    """

    kind: str
    name: str
    key: str
    options: dict[str, Any]
    gguf_bytes: int
    coded_bytes: int
    n_weights: int
    ppl: Estimate
    ratio: Estimate
    kld: Estimate | None
    same_top: Estimate | None
    kld_quantiles: dict[str, float]
    tensors: tuple[TensorFacts, ...]
    seconds: dict[str, float]

    @property
    def id(self) -> str:
        """Names the point within a report: letters, digits, ``-``, ``_`` and ``.``."""
        name = re.sub(r"[^A-Za-z0-9_.]+", "-", self.name)
        return name if name.startswith(self.kind) else f"{self.kind}-{name}"

    @property
    def bpw(self) -> float:
        """Bits per weight of the GGUF, the whole file counted."""
        return 8 * self.gguf_bytes / self.n_weights if self.n_weights else 0.0

    @property
    def coded_bpw(self) -> float:
        """Bits per weight of the coded file, the whole file counted."""
        return 8 * self.coded_bytes / self.n_weights if self.n_weights else 0.0

    @property
    def increase(self) -> float:
        """Perplexity over that of the source, less 1."""
        return self.ratio.value - 1

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON takes it: numbers that are not finite become None."""
        return {
            "kind": self.kind, "name": self.name, "key": self.key, "options": self.options, "gguf_bytes": self.gguf_bytes,
            "coded_bytes": self.coded_bytes, "n_weights": self.n_weights, "bpw": self.bpw, "coded_bpw": self.coded_bpw,
            "ppl": estimate_dict(self.ppl), "ratio": estimate_dict(self.ratio), "kld": estimate_dict(self.kld),
            "same_top": estimate_dict(self.same_top),
            "kld_quantiles": {name: finite(value) for name, value in self.kld_quantiles.items()},
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "tensors": [asdict(tensor) for tensor in self.tensors],
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Point:
        """Inverse of `as_dict`.

        Raises
        ------
        KeyError, TypeError, ValueError
            If it is no such dict.
        """
        return cls(
            kind=data["kind"], name=data["name"], key=data["key"], options=data["options"], gguf_bytes=data["gguf_bytes"],
            coded_bytes=data["coded_bytes"], n_weights=data["n_weights"], ppl=_estimate(data["ppl"]),
            ratio=_estimate(data["ratio"]), kld=data["kld"] and _estimate(data["kld"]),
            same_top=data["same_top"] and _estimate(data["same_top"]),
            kld_quantiles={name: _number(value) for name, value in data["kld_quantiles"].items()},
            tensors=tuple(TensorFacts(**tensor) for tensor in data["tensors"]), seconds=data["seconds"],
        )  # fmt: skip


def estimate_dict(estimate: Estimate | None) -> dict[str, float | None] | None:
    """Return an estimate as JSON takes it."""
    return None if estimate is None else {"value": finite(estimate.value), "error": finite(estimate.error)}


def finite(value: float) -> float | None:
    """Return a number that JSON can hold, None where it is NaN or infinite.

    >>> finite(0.5), finite(float("nan"))
    (0.5, None)
    """
    return value if math.isfinite(value) else None


def _estimate(data: Mapping[str, float | None]) -> Estimate:
    return Estimate(_number(data["value"]), _number(data["error"]))


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def point_key(facts: Mapping[str, Any]) -> str:
    """Return the hash of what a point depends on: JSON values, in any order.

    >>> point_key({"a": 1, "b": [2]}) == point_key({"b": [2], "a": 1})
    True
    """
    text = json.dumps({**facts, "point_version": POINT_VERSION}, sort_keys=True, allow_nan=False)
    return xxhash.xxh3_128_hexdigest(text.encode())


def file_identity(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return size and hash of a file; its name and times do not matter."""
    digest = xxhash.xxh3_128()
    n_bytes = 0
    with open(path, "rb") as file:
        while part := file.read(HASH_BYTES):
            digest.update(part)
            n_bytes += len(part)
    return {"bytes": n_bytes, "xxh3_128": digest.hexdigest()}


class PointStore:
    """The points of a report folder, and which searches for a step have ended.

    Parameters
    ----------
    folder : str or os.PathLike
        Created when something is written.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.fspath(folder)

    def load(self, key: str) -> Point | None:
        """Return the point of a key, None where there is none or its file is damaged."""
        for name in self._names(f".{key}.json"):
            data = self._read(name)
            try:
                found = None if data is None else Point.from_dict(data)
            except (KeyError, TypeError, ValueError, AttributeError):
                continue
            if found is not None and found.key == key:
                return found
        return None

    def save(self, point: Point) -> None:
        """Write a point, whole or not at all."""
        self._write(f"{point.id}.{point.key}.json", point.as_dict())

    def of_family(self, family: str) -> Iterator[Point]:
        """Yield the points that were stored with a family, in no order."""
        for name in self._names(".json"):
            data = self._read(name)
            if isinstance(data, dict) and data.get("options", {}).get("family") == family:
                point = self.load(data.get("key", ""))
                if point is not None:
                    yield point

    def search_ended(self, key: str) -> bool:
        """Whether a search was noted as ended."""
        return bool(self._names(f"search.{key}.json"))

    def end_search(self, key: str, facts: Mapping[str, Any]) -> None:
        """Note that a search has ended, and what it found, so that it is not repeated."""
        self._write(f"search.{key}.json", dict(facts))

    def _names(self, suffix: str) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self.folder) if name.endswith(suffix) and not name.startswith("."))
        except FileNotFoundError:
            return []

    def _read(self, name: str) -> Any:
        try:
            with open(os.path.join(self.folder, name), "rb") as file:
                return json.loads(file.read())
        except (OSError, ValueError):
            return None

    def _write(self, name: str, data: Any) -> None:
        os.makedirs(self.folder, exist_ok=True)
        with AtomicFile(os.path.join(self.folder, name), force=True) as file:
            file.write(json.dumps(data, separators=(",", ":"), allow_nan=False).encode() + b"\n")
