"""Real files: identity and size. `make test` fetches them; a file that is not there is skipped, and said so."""

from __future__ import annotations

import filecmp
from pathlib import Path

import pytest

from lazyweights.container.decoder import decode_file, verify_file
from lazyweights.container.encoder import encode_file
from lazyweights.container.inspect import inspect_file
from lazyweights.container.reader import CodedFile

MODELS = Path(__file__).resolve().parents[2] / ".cache" / "models"

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA = "gemma-3-270m-q4_k_m.gguf"

CASES = [
    (SMOLLM2, "dense"),
    (SMOLLM2, "unit"),
    (GEMMA, "dense"),
    ("reference-135m.F16.gguf", "dense"),
    ("reference-135m.BF16.gguf", "dense"),
]

MAX_BYTES = {(SMOLLM2, "dense"): 86_600_000, (GEMMA, "dense"): 229_000_000}
"""Promised sizes of whole coded files."""

pytestmark = pytest.mark.real


@pytest.mark.parametrize(("name", "preset"), CASES, ids=lambda value: str(value).removesuffix(".gguf"))
def test_real_model(name: str, preset: str, tmp_path: Path) -> None:
    source = MODELS / name
    if not source.is_file():
        pytest.skip(f"{name} is not in .cache/models; `make test` fetches it")
    coded, back = tmp_path / "coded.gguf.lw", tmp_path / "back.gguf"
    result = encode_file(source, coded, preset=preset)
    assert result.problem is None
    assert result.coded_bytes == coded.stat().st_size
    assert result.coded_bytes < result.source_bytes
    assert result.coded_bytes <= MAX_BYTES.get((name, preset), result.source_bytes)
    verified = verify_file(coded, against=source)
    assert verified.source_bytes == source.stat().st_size
    decode_file(coded, back)
    assert filecmp.cmp(source, back, shallow=False)
    back.unlink()
    check_tensors(source, coded)


def check_tensors(source: Path, coded: Path) -> None:
    """The first and the last row group of every tensor, read alone; no payload larger than the rows it gives."""
    report = inspect_file(source)
    with source.open("rb") as plain, CodedFile(coded) as file:
        assert file.keys() == [t.name for t in report.tensors]
        names = file.keys()
        for name in names:
            info = file.tensor_info(name)
            rows = info.shape[1] if len(info.shape) > 1 else 1
            n = min(rows, 3)
            row_bytes = info.n_bytes // rows
            assert info.n_bytes == rows * row_bytes
            for start in (0, rows - n):
                plain.seek(info.offset + start * row_bytes)
                assert file.get_rows(name, start, start + n).tobytes() == plain.read(n * row_bytes)
        layout = file.layout
        for _, span, first, _ in layout.spans():
            if span.is_coded:
                sizes = layout.sizes[first : first + span.n_units].tolist()
                assert all(size <= span.unit_bytes(k) for k, size in enumerate(sizes)), span.name
