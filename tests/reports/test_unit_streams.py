"""Streams of coded files in the model of the unit: it decodes what the file holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lazyweights.container.encoder import encode_file
from lazyweights.container.reader import CodedFile
from lazyweights.errors import LazyWeightsError
from lazyweights.hardware.devices import find_device
from lazyweights.hardware.engine_kernels import simulate_unit
from lazyweights.hardware.placement import KvCache
from lazyweights.hardware.unit_config import UnitConfig
from lazyweights.reports.unit_simulation import kv_cache_of, simulate_file
from lazyweights.reports.unit_streams import (
    PlainTensor,
    golden_symbols,
    read_tensors,
    require_unit_preset,
    tensor_symbols,
)
from tests.cli.conftest import model_bytes

GOLDENS = Path(__file__).resolve().parents[1] / "goldens"
MODELS = Path(__file__).resolve().parents[2] / ".cache" / "models"


def test_golden_file_of_the_preset_unit():
    decoded = 0
    with CodedFile(GOLDENS / "unit_preset.lw") as file:
        require_unit_preset(file)
        for tensor in read_tensors(file):
            if isinstance(tensor, PlainTensor):
                continue
            golden = golden_symbols(tensor.stream, tensor.decode_table)
            for config in (UnitConfig(), UnitConfig(n_engines=1, bytes_per_cycle=3, fifo_words=1)):
                np.testing.assert_array_equal(simulate_unit(tensor.stream, config).symbols, golden)
            decoded += tensor.stream.n_weights
    assert decoded


def test_symbols_are_the_bytes_of_the_tensor(tmp_path):
    source, coded = tmp_path / "m.gguf", tmp_path / "m.lw"
    source.write_bytes(model_bytes(n_tensors=1, columns=320, rows=192))
    encode_file(source, coded, preset="unit")
    with CodedFile(coded) as file:
        (tensor,) = [t for t in read_tensors(file) if not isinstance(t, PlainTensor)]
        packed = file.get_tensor(tensor.name).reshape(192, -1, 34)[:, :, 2:].reshape(192, 320)
        symbols = tensor_symbols(tensor)
        assert symbols.shape == packed.shape
        assert len({tuple(pair) for pair in np.stack([symbols.ravel(), packed.ravel()], 1).tolist()}) == len(np.unique(packed))
        assert tensor.n_weights == tensor.stream.n_weights == packed.size
        report = simulate_file(file, find_device("orin-nano-super"))
    assert report.n_weights == packed.size
    assert report.kv_bytes is None


def test_dense_file_is_refused(tmp_path):
    source, coded = tmp_path / "m.gguf", tmp_path / "m.lw"
    source.write_bytes(model_bytes())
    encode_file(source, coded)
    with CodedFile(coded) as file, pytest.raises(LazyWeightsError, match="--preset unit"):
        require_unit_preset(file)


@pytest.mark.parametrize(
    ("metadata", "want"),
    [
        ({"general.architecture": "llama", "llama.block_count": 32, "llama.attention.head_count": 32,
          "llama.attention.head_count_kv": 8, "llama.embedding_length": 4096}, KvCache(32, 8, 128)),
        ({"general.architecture": "g", "g.block_count": 2, "g.attention.head_count": 4, "g.attention.key_length": 256},
         KvCache(2, 4, 256)),
        ({"general.architecture": "llama"}, None),
        ({}, None),
        ({"general.architecture": "x", "x.block_count": [1, 2], "x.attention.head_count": 1, "x.embedding_length": 8}, None),
    ],
)  # fmt: skip
def test_shape_of_the_kv_cache(metadata, want):
    assert kv_cache_of(metadata) == want


@pytest.mark.real
@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct.Q4_1", "gemma-3-270m-q4_k_m"])
def test_every_tensor_of_a_real_model(name, tmp_path):
    source, coded = MODELS / f"{name}.gguf", tmp_path / "coded.lw"
    if not source.is_file():
        pytest.skip(f"{name}.gguf is not in .cache/models; `make test` fetches it")
    encode_file(source, coded, preset="unit")
    with CodedFile(coded) as file:
        report = simulate_file(file, find_device("orin-nano-super"))  # compares the codes of every tensor
    assert report.kv_bytes
    assert report.n_weights > 50e6
    assert all(row.losses["decode"] > 0.5 for row in report.types)
