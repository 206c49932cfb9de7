"""Weights from planes, written from the meaning of the planes alone: what the `gguf` package must agree with.

Only the fixed tables (codebooks, even-parity signs, 4-bit value table) are taken from that package. The float32
operations follow its order, so that equality holds bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import gguf.quants
import numpy as np

from lazyweights.blocks import GGML_TYPES, Planes

FP4_TIMES_TWO = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
NL_TABLE = np.array(gguf.quants.IQ4_NL.kvalues, np.float32)
EVEN_SIGNS = np.array([i | (i.bit_count() & 1) << 7 for i in range(128)], np.uint8)

PlaneDict = dict[str, np.ndarray]


def dequantize(planes: Planes) -> np.ndarray:
    """Return float32 ``(outer, rows, columns)``."""
    rule = _RULES[GGML_TYPES[planes.type_id].name]
    return rule(planes.planes).reshape(planes.shape)


def _half(plane: np.ndarray) -> np.ndarray:
    return plane.view(np.float16).astype(np.float32)


def _per_element(values: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Repeat side values along the row until there is one per element."""
    return np.repeat(values, codes.shape[-1] // values.shape[-1], axis=-1)


def _f(codes: np.ndarray, offset: int = 0) -> np.ndarray:
    return (codes.astype(np.int32) - offset).astype(np.float32)


def _symmetric(offset: int) -> Callable[[PlaneDict], np.ndarray]:
    return lambda p: _per_element(_half(p["scale"]), p["codes"]) * _f(p["codes"], offset)


def _with_min(p: PlaneDict) -> np.ndarray:
    codes = p["codes"]
    return _per_element(_half(p["scale"]), codes) * _f(codes) + _per_element(_half(p["min"]), codes)


def _k_with_min(p: PlaneDict) -> np.ndarray:
    codes, sub_scale, sub_min = p["codes"], p["sub_scale"], p["sub_min"]
    step = _per_element(_half(p["scale"]), sub_scale) * _f(sub_scale)
    low = _per_element(_half(p["min_scale"]), sub_min) * _f(sub_min)
    return _per_element(step, codes) * _f(codes) - _per_element(low, codes)


def _k_symmetric(p: PlaneDict, sub_scale: np.ndarray, values: np.ndarray) -> np.ndarray:
    return _per_element(_per_element(_half(p["scale"]), sub_scale) * sub_scale, values) * values


def _mxfp4(p: PlaneDict) -> np.ndarray:
    half_scale = np.ldexp(np.float32(1), p["scale"].astype(np.int32) - 128)
    return _per_element(half_scale, p["codes"]) * FP4_TIMES_TWO[p["codes"]]


def _nvfp4(p: PlaneDict) -> np.ndarray:
    raw = p["scale"].astype(np.int32)
    exponent, mantissa = raw >> 3 & 0xF, raw & 7
    value = np.where(
        exponent == 0,
        np.ldexp(mantissa.astype(np.float32), -9),
        np.ldexp((8 + mantissa).astype(np.float32), exponent - 10),
    )
    half_scale = np.where(raw == 0x7F, 0, value / 2).astype(np.float32)
    return _per_element(half_scale, p["codes"]) * FP4_TIMES_TWO[p["codes"]]


def _float(exponent_bits: int, mantissa_bits: int, dtype: type) -> Callable[[PlaneDict], np.ndarray]:
    def rule(p: PlaneDict) -> np.ndarray:
        exponent, rest = p["exponent"].astype(np.uint32), p["sign_mantissa"].astype(np.uint32)
        sign, mantissa = rest >> mantissa_bits, rest & ((1 << mantissa_bits) - 1)
        word = sign << (exponent_bits + mantissa_bits) | exponent << mantissa_bits | mantissa
        if dtype is np.float16:
            return word.astype(np.uint16).view(np.float16).astype(np.float32)
        return (word << (32 - 1 - exponent_bits - mantissa_bits)).view(np.float32)

    return rule


def _codebook(name: str, sub_values: Callable[[PlaneDict], np.ndarray]) -> Callable[[PlaneDict], np.ndarray]:
    def rule(p: PlaneDict) -> np.ndarray:
        kind = getattr(gguf.quants, name)
        kind.init_grid()
        entries = kind.grid.reshape(kind.grid_shape)[p["index"]].reshape(*p["index"].shape[:-1], -1)
        step = _per_element(sub_values(p), entries)
        if name.startswith("IQ1"):
            shift = np.where(p["sign"] == 0, np.float32(0.125), np.float32(-0.125))
            return step * (entries + _per_element(shift, entries))
        bits = p["sign"] if name in ("IQ2_S", "IQ3_S") else EVEN_SIGNS[p["sign"]]
        negative = np.unpackbits(bits, axis=-1, bitorder="little")
        return step * entries * np.where(negative == 0, np.float32(1), np.float32(-1))

    return rule


def _quarter_steps(p: PlaneDict) -> np.ndarray:
    return _per_element(_half(p["scale"]), p["sub_scale"]) * (np.float32(0.5) + _f(p["sub_scale"])) * np.float32(0.25)


def _half_steps(p: PlaneDict) -> np.ndarray:
    return _per_element(_half(p["scale"]), p["sub_scale"]) * (np.float32(0.5) + _f(p["sub_scale"])) * np.float32(0.5)


def _odd_steps(p: PlaneDict) -> np.ndarray:
    return _per_element(_half(p["scale"]), p["sub_scale"]) * (1 + 2 * _f(p["sub_scale"]))


_RULES: dict[str, Callable[[PlaneDict], np.ndarray]] = {
    "F32": _float(8, 23, np.float32),
    "F16": _float(5, 10, np.float16),
    "BF16": _float(8, 7, np.float32),
    "Q4_0": _symmetric(8),
    "Q4_1": _with_min,
    "Q5_0": _symmetric(16),
    "Q5_1": _with_min,
    "Q8_0": lambda p: _per_element(_half(p["scale"]), p["codes"]) * p["codes"].view(np.int8).astype(np.float32),
    "Q8_1": lambda p: _per_element(_half(p["scale"]), p["codes"]) * p["codes"].view(np.int8).astype(np.float32),
    "Q8_K": lambda p: _per_element(p["scale"].view(np.float32), p["codes"]) * p["codes"].view(np.int8),
    "Q2_K": _k_with_min,
    "Q3_K": lambda p: _k_symmetric(p, _f(p["sub_scale"], 32), _f(p["codes"], 4)),
    "Q4_K": _k_with_min,
    "Q5_K": _k_with_min,
    "Q6_K": lambda p: _k_symmetric(p, _f(p["sub_scale"].view(np.int8)), _f(p["codes"], 32)),
    "IQ4_XS": lambda p: _k_symmetric(p, _f(p["sub_scale"], 32), NL_TABLE[p["codes"]]),
    "IQ4_NL": lambda p: _per_element(_half(p["scale"]), p["codes"]) * NL_TABLE[p["codes"]],
    "TQ1_0": _symmetric(1),
    "TQ2_0": _symmetric(1),
    "Q1_0": lambda p: _per_element(_half(p["scale"]), p["codes"]) * (2 * _f(p["codes"]) - 1),
    "Q2_0": _symmetric(1),
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "IQ2_XXS": _codebook("IQ2_XXS", _quarter_steps),
    "IQ2_XS": _codebook("IQ2_XS", _quarter_steps),
    "IQ2_S": _codebook("IQ2_S", _quarter_steps),
    "IQ3_XXS": _codebook("IQ3_XXS", _half_steps),
    "IQ3_S": _codebook("IQ3_S", _odd_steps),
    "IQ1_S": _codebook("IQ1_S", _odd_steps),
    "IQ1_M": _codebook("IQ1_M", _odd_steps),
}
