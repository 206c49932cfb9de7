"""Texts for the tests of perplexity: a made-up one, and the real ones that are not part of the repository."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
WORDS = [
    "the", "thing", "and", "her", "mother", "were", "going", "to", "another", "town", "on", "hill", "where", "singing", "is",
    "heard", "at", "noon", "in", "winter",
]  # fmt: skip


def english(n_words: int = 400, seed: int = 0) -> bytes:
    """A text that ends in a newline; the tiny model needs about three tokens for a word."""
    rng = random.Random(seed)
    return (" ".join(rng.choice(WORDS) for _ in range(n_words)) + "\n").encode()


def data_file(name: str) -> Path:
    """A text beside the checkout, or in the folder that LAZYWEIGHTS_DATA names; skips the test where it is missing."""
    folder = Path(os.environ.get("LAZYWEIGHTS_DATA") or REPOSITORY.parent / "shared" / "data")
    if not (folder / name).is_file():
        pytest.skip(f"{name} is neither in ../shared/data nor in the folder that LAZYWEIGHTS_DATA names")
    return folder / name


def real_model(name: str) -> Path:
    """A real model; skips the test where it is missing."""
    path = REPOSITORY / ".cache" / "models" / name
    if not path.is_file():
        pytest.skip(f"{name} is not in .cache/models; `make test` fetches it")
    return path
