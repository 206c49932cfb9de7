"""Reports agree with the files: sizes add up, entropies are those of the codes, estimates are near the truth."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from lazyweights.blocks import GGML_TYPES, TYPE_BY_NAME, split
from lazyweights.blocks.codebook_ranks import ranks_of_indices
from lazyweights.container.coded_file import UNIT_DTYPE
from lazyweights.container.gguf_scan import ElidedArray, read_metadata, scan_gguf
from lazyweights.container.inspect import SAMPLE_ROWS, FileReport, inspect_file
from lazyweights.container.reader import CodedFile
from lazyweights.container.stream_layout import STREAM_LAYOUTS, newest_form, stream_layout
from lazyweights.errors import LazyWeightsError, NotCodedError
from tests.container.coded_samples import coded_span, encode_bytes, layout_of, tensor_bytes, type_label
from tests.make_gguf import Tensor, build_gguf, every_type_gguf, plausible_metadata

PRESETS = ("dense", "unit")


@dataclass(frozen=True)
class Model:
    """A source of a few MB, its coded file, and reports on both."""

    source: bytes
    coded: bytes
    source_path: Path
    coded_path: Path


def small_model() -> bytes:
    """A file like those of small models: a few quantized matrices, experts, float norms, a vocabulary."""
    rng = np.random.default_rng(51)
    tensors: list[Tensor] = []
    for name, type_name, shape in [
        ("token_embd.weight", "Q6_K", (512, 2000)),
        *((f"blk.{i}.attn_q.weight", "Q4_K", (512, 512)) for i in range(4)),
        *((f"blk.{i}.attn_v.weight", "Q8_0", (512, 256)) for i in range(2)),
        *((f"blk.{i}.ffn_up.weight", "Q4_1", (512, 1024)) for i in range(2)),
        ("blk.0.ffn_gate.weight", "Q5_0", (512, 1024)),
        ("blk.0.ffn_down_exps.weight", "Q4_0", (512, 512, 4)),
        *((f"blk.{i}.norm.weight", "F32", (512,)) for i in range(9)),
        ("output.weight", "BF16", (512, 700)),
    ]:
        type_id = TYPE_BY_NAME[type_name].type_id
        tensors.append((name, type_id, shape, tensor_bytes(type_id, shape, rng)))
    return build_gguf(tensors, plausible_metadata())


@pytest.fixture(scope="module", params=PRESETS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    source = small_model()
    coded = encode_bytes(source, folder, preset=request.param)
    return Model(source, coded, folder / "sample.gguf", folder / "sample.gguf.lw")


@pytest.fixture(scope="module")
def every_type(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("every")
    source = every_type_gguf(np.random.default_rng(52), slow_types=False)
    coded = encode_bytes(source, folder)
    return Model(source, coded, folder / "sample.gguf", folder / "sample.gguf.lw")


def entropy(values: np.ndarray) -> float:
    """Bits per value of the order-0 entropy."""
    counts = np.unique(values, return_counts=True)[1]
    share = counts / counts.sum()
    return float(-(share * np.log2(share)).sum())


def expected_entropy(type_id: int, data: bytes, shape: tuple[int, ...]) -> float:
    """Bits per weight, from the planes of `blocks`: the coded bits of a code by entropy, its low bits as they are."""
    planes = split(type_id, data, shape).planes
    layout = stream_layout(type_id, newest_form(type_id))
    n_weights = math.prod(shape)
    if layout.codes == "words":
        words = np.frombuffer(data, "<u2")
        return entropy(words >> 7 & 255) + 8
    if layout.codes == "exponent":
        return entropy(planes["exponent"]) + 24
    if layout.codes == "bytes":
        values = planes["values"].astype(np.int64)
        low = entropy(values & 255)
        return low if planes["values"].itemsize == 1 else low + entropy((values + 128) >> 8 & 255)
    codes = planes[layout.codes]
    if layout.ranked:
        codes = ranks_of_indices(layout.type_name)[codes]
    low_bits = max(layout.code_bits - 8, 0)
    return (entropy(codes >> low_bits) + low_bits) * codes.size / n_weights


def check_sums(report: FileReport) -> None:
    assert report.n_weights == sum(t.n_weights for t in report.tensors)
    for t in report.tensors:
        assert t.n_weights == math.prod(t.shape)
        known = t.coded_bytes if t.coded_bytes is not None else t.source_bytes
        assert t.bpw == pytest.approx(8 * known / t.n_weights)
    if report.coded_bytes is not None:
        assert report.overhead_bytes is not None
        assert sum(t.coded_bytes or 0 for t in report.tensors) + report.overhead_bytes == report.coded_bytes


def check_same_source(report: FileReport, source: bytes) -> None:
    scan = scan_gguf(source)
    assert report.source_bytes == len(source)
    placed = [scan.tensors[s.tensor] for s in scan.spans if s.tensor is not None]
    assert [(t.name, t.shape, t.source_bytes) for t in report.tensors] == [(t.name, t.shape, t.n_bytes) for t in placed]
    assert report.metadata == read_metadata(source, max_array=8)
    assert report.version == scan.version
    assert report.alignment == scan.alignment


def test_coded_file(model: Model) -> None:
    report = inspect_file(model.coded_path)
    layout = layout_of(model.coded)
    assert (report.kind, report.preset, report.estimated) == ("coded", layout.preset, False)
    assert report.coded_bytes == len(model.coded)
    assert report.sha256 == hashlib.sha256(model.source).hexdigest()
    check_same_source(report, model.source)
    check_sums(report)
    for t in report.tensors:
        if t.payload_bpw is None:
            continue
        span, units = coded_span(layout, t.name)
        padded = (layout.sizes[units] + 3) & ~3
        assert t.coded_bytes == int(padded.sum()) + UNIT_DTYPE.itemsize * span.n_units
        assert 0 < t.payload_bpw <= t.bpw
        assert t.entropy_bits is not None


def test_coded_file_with_every_type(every_type: Model) -> None:
    report = inspect_file(every_type.coded_path)
    check_same_source(report, every_type.source)
    check_sums(report)


def test_compressible_verbatim_tensors(tmp_path: Path) -> None:
    """Verbatim tensors that zstd shrinks: the sum is still the file."""
    i32 = TYPE_BY_NAME["I32"].type_id
    source = build_gguf([("a", i32, (100_000,), bytes(400_000)), ("b", i32, (50,), bytes(200))])
    encode_bytes(source, tmp_path)
    check_sums(inspect_file(tmp_path / "sample.gguf.lw"))


def test_gguf_file(model: Model) -> None:
    report = inspect_file(model.source_path)
    assert (report.kind, report.preset, report.estimated) == ("gguf", None, False)
    assert (report.coded_bytes, report.sha256, report.overhead_bytes) == (None, None, None)
    check_same_source(report, model.source)
    check_sums(report)


def test_both_files_agree(model: Model) -> None:
    coded, gguf = inspect_file(model.coded_path), inspect_file(model.source_path, estimate=True, threads=1)
    assert coded.sha256 == gguf.sha256
    assert coded.n_weights == gguf.n_weights
    for a, b in zip(coded.tensors, gguf.tensors, strict=True):
        assert (a.name, a.type_name, a.shape, a.n_weights, a.source_bytes) == (
            b.name, b.type_name, b.shape, b.n_weights, b.source_bytes,
        )  # fmt: skip
        if a.entropy_bits is not None:
            assert b.entropy_bits == a.entropy_bits


@pytest.mark.parametrize("threads", [1, 2])
def test_estimate(model: Model, threads: int, tmp_path: Path) -> None:
    """Of the dense preset, whatever the file at hand was coded with; threads change nothing."""
    report = inspect_file(model.source_path, estimate=True, threads=threads)
    assert report.estimated
    assert report.sha256 == hashlib.sha256(model.source).hexdigest()
    check_sums(report)
    dense = encode_bytes(model.source, tmp_path, preset="dense")
    assert report.coded_bytes is not None
    assert abs(report.coded_bytes - len(dense)) <= 0.002 * len(dense)


def test_estimate_of_each_tensor(tmp_path: Path) -> None:
    source = small_model()
    encode_bytes(source, tmp_path)
    estimated = inspect_file(tmp_path / "sample.gguf", estimate=True)
    measured = inspect_file(tmp_path / "sample.gguf.lw")
    assert estimated == inspect_file(tmp_path / "sample.gguf", estimate=True, threads=1)
    for a, b in zip(estimated.tensors, measured.tensors, strict=True):
        assert a.coded_bytes is not None
        assert b.coded_bytes is not None
        assert abs(a.coded_bytes - b.coded_bytes) <= 0.01 * b.coded_bytes + 64
        if b.payload_bpw is not None:
            assert a.payload_bpw == pytest.approx(b.payload_bpw)


@pytest.mark.parametrize("type_id", STREAM_LAYOUTS, ids=type_label)
def test_entropy(type_id: int, tmp_path: Path) -> None:
    """Of a coded file and an estimate: of all codes. Of a GGUF file otherwise: of the first rows."""
    columns = 33 * 3 if GGML_TYPES[type_id].block_size == 1 else 768
    shape, row_bytes = (columns, 100, 2), columns // GGML_TYPES[type_id].block_size * GGML_TYPES[type_id].block_bytes
    rng = np.random.default_rng([53, type_id])
    data = tensor_bytes(type_id, shape, rng)
    # Random bytes are not coded in every type; a tensor of skewed bytes is.
    skewed = np.minimum(rng.geometric(0.05, len(data)), 255).astype(np.uint8).tobytes()
    encode_bytes(build_gguf([("a", type_id, shape, data), ("b", type_id, shape, skewed)]), tmp_path)
    n = 0
    for report in (
        inspect_file(tmp_path / "sample.gguf.lw"),
        inspect_file(tmp_path / "sample.gguf", estimate=True),
        inspect_file(tmp_path / "sample.gguf"),
    ):
        sampled = report.kind == "gguf" and not report.estimated
        for t, packed in zip(report.tensors, (data, skewed), strict=True):
            if t.entropy_bits is None:
                assert report.kind == "coded"
                continue
            if sampled:
                expected = expected_entropy(type_id, packed[: SAMPLE_ROWS * row_bytes], (columns, SAMPLE_ROWS))
            else:
                expected = expected_entropy(type_id, packed, shape)
            assert abs(t.entropy_bits - expected) < 0.01
            n += 1
    assert n >= 4


def test_long_arrays_are_elided(model: Model) -> None:
    for path in (model.source_path, model.coded_path):
        short = inspect_file(path).metadata["tokenizer.ggml.tokens"]
        assert isinstance(short, ElidedArray)
        whole = inspect_file(path, max_array=None).metadata["tokenizer.ggml.tokens"]
        assert whole == plausible_metadata()["tokenizer.ggml.tokens"]


def test_problem_of_a_source(tmp_path: Path) -> None:
    q4_0 = TYPE_BY_NAME["Q4_0"].type_id
    (tmp_path / "a.gguf").write_bytes(build_gguf([("a", q4_0, (64, 70), bytes(100))]))
    report = inspect_file(tmp_path / "a.gguf")
    assert report.problem is not None
    assert "missing" in report.problem


@pytest.mark.parametrize(
    "source", [b"GGUF", build_gguf([]), build_gguf([], plausible_metadata())], ids=["magic", "empty", "header"]
)
def test_file_without_tensors(source: bytes, tmp_path: Path) -> None:
    coded = encode_bytes(source, tmp_path)
    report = inspect_file(tmp_path / "sample.gguf.lw")
    assert (report.n_weights, report.tensors) == (0, ())
    assert (report.coded_bytes, report.overhead_bytes) == (len(coded), len(coded))
    for estimate in (False, True):
        report = inspect_file(tmp_path / "sample.gguf", estimate=estimate)
        assert (report.n_weights, report.tensors) == (0, ())


def test_neither_kind_of_file(tmp_path: Path) -> None:
    for name, data in {"empty": b"", "zip": b"PK\x03\x04" + bytes(100)}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(LazyWeightsError) as caught:
            inspect_file(tmp_path / name)
        assert not isinstance(caught.value, NotCodedError)
        assert caught.value.path == str(tmp_path / name)


def test_reports_and_reader_count_the_same(model: Model) -> None:
    report = inspect_file(model.coded_path)
    with CodedFile(model.coded_path) as file:
        assert [t.name for t in report.tensors] == file.keys()
        for t in report.tensors:
            if t.payload_bpw is None:
                continue
            rows = t.shape[1] if len(t.shape) > 1 else 1
            payload = sum(file.payload_bytes(t.name, 0, rows, k) for k in range(math.prod(t.shape[2:])))
            assert t.coded_bytes is not None
            _, units = coded_span(file.layout, t.name)
            n_units = units.stop - units.start
            assert 0 <= t.coded_bytes - payload - UNIT_DTYPE.itemsize * n_units < 4 * n_units
