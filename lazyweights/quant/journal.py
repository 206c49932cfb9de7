"""Finished tensors of a run, from which a run that was interrupted goes on."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash


class Journal:
    """Finished tensors of a run, in a folder: a line of JSON with the report and a hash, then the packed bytes.

    Parameters
    ----------
    folder : pathlib.Path
        Created if it is not there. What it has of other runs, or not whole, is deleted.
    identity : str
        Tells apart runs that may not share tensors.

    Attributes
    ----------
    n_reused : int
        Tensors that were loaded.
    """

    _NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}\.(tensor|writing)")

    def __init__(self, folder: Path, identity: str) -> None:
        self._folder = folder
        self._key = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self.n_reused = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._unlink(lambda name: not name.startswith(self._key) or name.endswith(".writing"))  # of other settings, or not whole

    def _unlink(self, is_wanted: Callable[[str], bool]) -> None:
        for path in self._folder.iterdir():
            if self._NAME.fullmatch(path.name) and is_wanted(path.name):
                path.unlink()

    def _path(self, name: str) -> Path:
        return self._folder / f"{self._key}-{hashlib.sha256(name.encode()).hexdigest()[:16]}.tensor"

    def has(self, name: str) -> bool:
        """Whether a tensor is there, whole."""
        try:
            self._read(name)
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return True

    def _read(self, name: str) -> tuple[dict[str, Any], np.ndarray]:
        line, _, packed = self._path(name).read_bytes().partition(b"\n")
        entry = json.loads(line)
        if entry["hash"] != xxhash.xxh3_128_hexdigest(packed):
            raise ValueError("damaged")
        return dict(entry["report"]), np.frombuffer(packed, np.uint8)

    def load(self, name: str) -> tuple[dict[str, Any], np.ndarray]:
        """Return the report and the bytes of a tensor that is there."""
        self.n_reused += 1
        return self._read(name)

    def store(self, name: str, report: dict[str, Any], packed: np.ndarray) -> None:
        """Keep a tensor."""
        path = self._path(name)
        temporary = path.with_suffix(".writing")
        with open(temporary, "wb") as file:
            entry = {"report": report, "hash": xxhash.xxh3_128_hexdigest(packed.data)}
            file.write(json.dumps(entry).encode() + b"\n")
            file.write(packed.data)
        temporary.replace(path)

    def remove(self) -> None:
        """Delete the files, and the folder if nothing else is in it."""
        self._unlink(lambda name: True)
        with suppress(OSError):
            self._folder.rmdir()
