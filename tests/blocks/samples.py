"""Byte strings to split: random ones, finite ones, and what a reference quantizer writes for weight-like data."""

from __future__ import annotations

import libgguf
import numpy as np

from lazyweights.blocks import GGML_TYPES, TYPE_BY_NAME, Planes, join, split

ALL_TYPES = sorted(GGML_TYPES)
QUANTIZED_BY_LIBGGUF = sorted(libgguf._SUPPORTED_QUANTIZED_QTYPES)


def type_label(type_id: int) -> str:
    return GGML_TYPES[type_id].name


def byte_count(type_id: int, shape: tuple[int, ...]) -> int:
    known = GGML_TYPES[type_id]
    return int(np.prod(shape, dtype=np.int64)) // known.block_size * known.block_bytes


def random_bytes(type_id: int, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, type_id])
    return rng.integers(0, 256, byte_count(type_id, shape), dtype=np.uint8)


def finite_bytes(type_id: int, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random bytes whose floating point scales are neither infinite nor NaN."""
    planes = split(type_id, random_bytes(type_id, shape, seed), shape)
    changed = dict(planes.planes)
    for name in ("scale", "min_scale", "min", "sum"):
        if name not in changed:
            continue
        plane = changed[name]
        if plane.dtype == np.uint16:
            changed[name] = plane & np.uint16(0xBFFF)
        elif plane.dtype == np.uint32:
            changed[name] = plane & np.uint32(0xBFFFFFFF)
        elif type_id == TYPE_BY_NAME["MXFP4"].type_id:
            changed[name] = np.minimum(plane, np.uint8(250))
    return join(Planes(type_id, planes.shape, changed))


def weights(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Weight-like float32: Gaussian, one width per row, a few outliers, one row of zeros."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, columns)) * rng.uniform(0.01, 0.1, (rows, 1))
    values[rng.random((rows, columns)) < 0.003] *= 8
    values[rows // 2] = 0
    return values.astype(np.float32)
