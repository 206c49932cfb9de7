"""Planes mean what they say: weights computed from them equal those of the `gguf` package, libgguf and llama.cpp."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

import gguf
import gguf.quants
import libgguf
import numpy as np
import pytest

from lazyweights.blocks import GGML_TYPES, TYPE_BY_NAME, split

from .dequantize import dequantize
from .samples import QUANTIZED_BY_LIBGGUF, finite_bytes, type_label, weights

IN_GGUF_PACKAGE = sorted({int(kind) for kind in gguf.quants._type_traits} | {0, 1})
COLUMNS, ROWS, OUTER = 512, 5, 3

# Types whose C dequantizer is called by name; it is the only oracle of Q2_0, and a second one of the rest.
C_FUNCTIONS = {
    name: f"dequantize_row_{name.lower().replace('_k', '_K')}"
    for name in ("Q2_0", "Q1_0", "Q8_K", "Q4_0", "Q5_1", "Q4_K", "Q6_K", "TQ1_0", "TQ2_0", "NVFP4", "IQ1_M", "IQ3_S")
}


def as_bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


def gguf_weights(type_id: int, data: np.ndarray) -> np.ndarray:
    known = GGML_TYPES[type_id]
    rows = data.reshape(OUTER, ROWS, COLUMNS // known.block_size * known.block_bytes)
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(type_id))


@pytest.mark.parametrize("type_id", IN_GGUF_PACKAGE, ids=type_label)
def test_random_finite_blocks_dequantize_as_in_gguf(type_id: int) -> None:
    shape = (COLUMNS, ROWS, OUTER)
    data = finite_bytes(type_id, shape)
    with np.errstate(invalid="ignore"):  # random F16 words include signalling NaNs
        found, expected = dequantize(split(type_id, data, shape)), gguf_weights(type_id, data)
    np.testing.assert_array_equal(as_bits(found), as_bits(expected))


@pytest.mark.parametrize("type_id", QUANTIZED_BY_LIBGGUF, ids=type_label)
def test_quantized_weights_dequantize_as_in_libgguf(type_id: int) -> None:
    packed = libgguf.quantize_rows(weights(OUTER * ROWS, COLUMNS), type_id)
    known = GGML_TYPES[type_id]
    assert packed.nbytes == OUTER * ROWS * COLUMNS // known.block_size * known.block_bytes
    planes = split(type_id, packed, (COLUMNS, ROWS, OUTER))
    expected = libgguf.dequantize_rows(packed.reshape(OUTER, ROWS, -1), type_id, COLUMNS)
    np.testing.assert_array_equal(as_bits(dequantize(planes)), as_bits(expected).reshape(OUTER, ROWS, COLUMNS))
    if type_id in IN_GGUF_PACKAGE:
        np.testing.assert_array_equal(as_bits(dequantize(planes)), as_bits(gguf_weights(type_id, packed)))


@pytest.mark.parametrize("type_id", QUANTIZED_BY_LIBGGUF, ids=type_label)
def test_quantized_weights_come_back_close(type_id: int) -> None:
    # A coarse bound, but one that a shuffled column order or a swapped nibble cannot meet.
    original = weights(8, COLUMNS, seed=3)
    planes = split(type_id, libgguf.quantize_rows(original, type_id), (COLUMNS, 8))
    found = dequantize(planes)[0]
    live = np.any(original, axis=1)
    correlation = [np.corrcoef(a, b)[0, 1] for a, b in zip(found[live], original[live], strict=True)]
    assert min(correlation) > 0.4


@pytest.mark.parametrize("name", ["TQ1_0"])
def test_quantizers_write_no_escape(name: str) -> None:
    type_id = TYPE_BY_NAME[name].type_id
    for packed in (
        libgguf.quantize_rows(weights(64, 1024), type_id),
        gguf.quants.quantize(weights(64, 1024, seed=1), gguf.GGMLQuantizationType(type_id)),
    ):
        assert not split(type_id, packed, (1024, 64)).planes["escape"].any()


@pytest.mark.parametrize("name", sorted(C_FUNCTIONS))
def test_random_finite_blocks_dequantize_as_in_llama_cpp(name: str) -> None:
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        pytest.skip("llama-cpp-python is not installed")
    library = ctypes.CDLL(str(Path(spec.origin).parent / "lib" / "libggml-base.so"))
    function = getattr(library, C_FUNCTIONS[name])
    function.restype = None
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    type_id = TYPE_BY_NAME[name].type_id
    shape = (COLUMNS, ROWS, OUTER)
    data = finite_bytes(type_id, shape, seed=2)
    expected = np.empty((OUTER, ROWS, COLUMNS), np.float32)
    function(data.ctypes.data, expected.ctypes.data, expected.size)
    # The C compiler may contract d * code - min into one rounding; sums of the two differ in the last place.
    fused = name in ("Q4_K", "Q5_1")
    np.testing.assert_allclose(dequantize(split(type_id, data, shape)), expected, rtol=1e-5 if fused else 0)


def test_q8_1_and_q8_k_fields_by_hand() -> None:
    codes = np.arange(-128, 128, dtype=np.int8)
    q8_1 = np.array([0x3C00, 0xBEEF], "<u2").tobytes() + codes[:32].tobytes()
    planes = split(TYPE_BY_NAME["Q8_1"].type_id, q8_1, (32,)).planes
    assert planes["scale"].tolist() == [[[0x3C00]]]
    assert planes["sum"].tolist() == [[[0xBEEF]]]
    np.testing.assert_array_equal(planes["codes"].view(np.int8)[0, 0], codes[:32])

    sums = np.arange(-8, 8, dtype="<i2") * 1000
    q8_k = np.array([1.5], "<f4").tobytes() + codes.tobytes() + sums.tobytes()
    planes = split(TYPE_BY_NAME["Q8_K"].type_id, q8_k, (256,)).planes
    assert planes["scale"].view(np.float32).tolist() == [[[1.5]]]
    np.testing.assert_array_equal(planes["block_sums"].view(np.int16)[0, 0], sums)
    np.testing.assert_array_equal(planes["codes"].view(np.int8)[0, 0], codes)


def test_q1_0_and_q2_0_are_sequential() -> None:
    scale = np.array([0x3C00], "<u2").tobytes()
    planes = split(TYPE_BY_NAME["Q1_0"].type_id, scale + bytes([0b00000101, 0b10000000] + [0] * 14), (128,)).planes
    assert np.flatnonzero(planes["codes"]).tolist() == [0, 2, 15]
    planes = split(TYPE_BY_NAME["Q2_0"].type_id, scale + bytes([0b11100100, 0b01000000] + [0] * 14), (64,)).planes
    assert planes["codes"][0, 0, :8].tolist() == [0, 1, 2, 3, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("name", "dtype"), [("I8", "i1"), ("I16", "<i2"), ("I32", "<i4"), ("I64", "<i8"), ("F64", "<f8")]
)
def test_plain_types_keep_the_element_bits(name: str, dtype: str) -> None:
    values = (np.arange(24) * 7 - 100).astype(dtype).reshape(2, 3, 4)
    plane = split(TYPE_BY_NAME[name].type_id, values, (4, 3, 2)).planes["values"]
    assert plane.dtype == np.dtype(f"u{np.dtype(dtype).itemsize}")
    np.testing.assert_array_equal(plane.view(dtype), values)
