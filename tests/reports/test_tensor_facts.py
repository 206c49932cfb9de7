"""Histograms, entropies and errors of tensors, against numbers worked out by hand or by plain numpy."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

import lazyweights
from lazyweights.blocks.types import TYPE_BY_NAME
from lazyweights.llama.capture import InputGroup
from lazyweights.llama.hessians import CaptureInfo, Hessians
from lazyweights.reports.report_data import kind_rows
from lazyweights.reports.tensor_facts import TensorExaminer, check_hessians, count_entropy
from tests.make_gguf import build_gguf

ROWS, COLUMNS, EXPERTS = 96, 64, 3


def write(path: Path, values: dict[str, np.ndarray], type_name: str) -> Path:
    """A GGUF of some matrices."""
    kind = gguf.GGMLQuantizationType[type_name]
    tensors = [
        (name, TYPE_BY_NAME[type_name].type_id, array.shape[::-1], gguf.quants.quantize(array, kind).tobytes())
        for name, array in values.items()
    ]
    path.write_bytes(build_gguf(tensors, {"general.architecture": "llama"}))
    lazyweights.encode(path)
    return path


@pytest.fixture
def values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "blk.0.a.weight": rng.standard_normal((ROWS, COLUMNS)).astype(np.float32),
        "blk.1.a.weight": rng.standard_normal((ROWS, COLUMNS)).astype(np.float32),
        "blk.0.e_exps.weight": rng.standard_normal((EXPERTS, ROWS, COLUMNS)).astype(np.float32),
    }


def restored(array: np.ndarray, type_name: str) -> np.ndarray:
    kind = gguf.GGMLQuantizationType[type_name]
    return gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)


def made_up_hessians(kind: str) -> Hessians:
    rng = np.random.default_rng(1)
    inputs = {"blk.0.a.weight": rng.standard_normal((1, 500, COLUMNS)),
              "blk.0.e_exps.weight": rng.standard_normal((EXPERTS, 300, COLUMNS)) * rng.uniform(0.1, 3, COLUMNS)}  # fmt: skip
    values = {name: x.transpose(0, 2, 1) @ x for name, x in inputs.items()}
    if kind == "diagonal":
        values = {name: np.diagonal(h, axis1=1, axis2=2).copy() for name, h in values.items()}
    groups = [InputGroup((name,), COLUMNS, len(h), len(h) > 1) for name, h in values.items()]
    rows = {name: np.full(len(h), 500) for name, h in values.items()}
    return Hessians(CaptureInfo(kind), groups, values, rows, {name: 0 * n for name, n in rows.items()})


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_codes_and_entropy(values, tmp_path, type_name):
    source = write(tmp_path / "s.gguf", values, "F32")
    model = write(tmp_path / "m.gguf", values, type_name)
    with TensorExaminer(source, None) as examiner:
        facts = examiner.examine(str(model) + ".lw")
    block_bytes = TYPE_BY_NAME[type_name].block_bytes
    for fact, (name, array) in zip(facts, values.items(), strict=True):
        assert (fact.name, fact.type, fact.n_weights) == (name, type_name, array.size)
        assert fact.packed_bytes == array.size // 32 * block_bytes
        assert 0 < fact.coded_bytes <= fact.packed_bytes + 100
        assert sum(fact.counts) == array.size
        assert fact.counts[0]
        assert fact.counts[-1]
        assert fact.entropy_bits == pytest.approx(count_entropy(np.array(fact.counts)))
    packed = gguf.quants.quantize(values["blk.0.a.weight"], gguf.GGMLQuantizationType[type_name])
    if type_name == "Q8_0":
        codes = packed.reshape(-1, 34)[:, 2:].view(np.int8).ravel().astype(int)
    elif type_name == "Q4_0":
        nibbles = packed.reshape(-1, 18)[:, 2:]
        codes = np.concatenate([nibbles & 15, nibbles >> 4]).ravel().astype(int)
    else:
        return
    assert facts[0].first_code == codes.min()
    assert facts[0].counts == np.bincount(codes - codes.min()).tolist()


@pytest.mark.parametrize("kind", ["hessian", "diagonal", None])
def test_errors(values, tmp_path, kind):
    source = write(tmp_path / "s.gguf", values, "F32")
    model = write(tmp_path / "m.gguf", values, "Q4_0")
    hessians = None if kind is None else made_up_hessians(kind)
    with TensorExaminer(source, hessians) as examiner:
        first = examiner.examine(str(model) + ".lw")
        assert examiner.examine(str(model) + ".lw") == first  # with what it remembers of the source
    for fact in first:
        array = values[fact.name].astype(np.float64)
        loss = restored(values[fact.name], "Q4_0") - array
        if kind is not None and fact.name in hessians:
            h = np.asarray(hessians[fact.name])
            if kind == "diagonal":
                h = h[..., None] * np.eye(COLUMNS)
            expected = np.einsum("...ri,...ij,...rj", loss, h, loss).sum() / np.einsum("...ri,...ij,...rj", array, h, array).sum()
            assert fact.error_kind == kind
        else:
            expected = (loss**2).sum() / (array**2).sum()
            assert fact.error_kind == "plain"
        assert fact.error == pytest.approx(expected, rel=1e-4)


def test_without_the_source_there_is_no_error(values, tmp_path):
    source = write(tmp_path / "s.gguf", {"other.weight": values["blk.0.a.weight"]}, "F32")
    model = write(tmp_path / "m.gguf", values, "Q4_0")
    with TensorExaminer(source, None) as examiner:
        assert all(fact.error is None for fact in examiner.examine(str(model) + ".lw"))
        same = examiner.examine(str(source) + ".lw", with_errors=False)
    assert [(fact.counts, fact.error) for fact in same] == [([], None)]


def test_kinds_are_sums(values, tmp_path):
    source = write(tmp_path / "s.gguf", values, "F32")
    model = write(tmp_path / "m.gguf", values, "Q8_0")
    with TensorExaminer(source, None) as examiner:
        facts = examiner.examine(str(model) + ".lw")
    rows = kind_rows(facts)
    assert [(row["kind"], row["n_tensors"]) for row in rows] == [("a", 2), ("e_exps", 1)]
    first, second = facts[0], facts[1]
    assert rows[0]["first_code"] == min(first.first_code, second.first_code)
    total = np.zeros(256, int)
    for fact in (first, second):
        total[128 + fact.first_code : 128 + fact.first_code + len(fact.counts)] += fact.counts
    assert rows[0]["counts"] == np.trim_zeros(total).tolist()
    assert rows[0]["entropy_bits"] == pytest.approx((first.entropy_bits + second.entropy_bits) / 2)
    assert rows[0]["pooled_entropy_bits"] == pytest.approx(count_entropy(total))


def test_samples_are_refused(tmp_path):
    group = InputGroup(("a.weight",), 4, 1, False)
    samples = Hessians(
        CaptureInfo("samples", n_samples=2), [group], {"a.weight": np.zeros((1, 2, 4), np.float32)}, {"a.weight": np.array([2])},
        {"a.weight": np.array([0])},
    )  # fmt: skip
    samples.save(tmp_path / "samples")
    with pytest.raises(lazyweights.errors.LazyWeightsError, match="capture Hessians or the diagonal"):
        check_hessians(tmp_path / "samples")
