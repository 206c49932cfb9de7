"""The tiny model, plain and coded."""

from __future__ import annotations

from pathlib import Path

import pytest

import lazyweights
from tests.llama.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with the types that most models have: matrices of Q8_0, norms of F32."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf", file_type="Q8_0")


@pytest.fixture(scope="session")
def tiny_coded(tiny: Path) -> Path:
    """Its coded file, beside it."""
    lazyweights.encode(tiny)
    return tiny.with_name("tiny.gguf.lw")


@pytest.fixture(scope="session")
def tiny_damaged(tiny_coded: Path) -> Path:
    """A coded file with one changed bit in the last tensors, so that its header is whole."""
    data = bytearray(tiny_coded.read_bytes())
    with lazyweights.open(tiny_coded) as file:
        layout = file.layout
        coded = [first for _, span, first, _ in layout.spans() if span.is_coded]
        at = int(layout.offsets()[coded[-1]])
    data[at + 8] ^= 4
    path = tiny_coded.with_name("damaged.gguf.lw")
    path.write_bytes(data)
    return path
