"""Bit fields inside bytes, for whole arrays: the two packings that GGML formats use.

Bit 0 is the least significant bit. `unpack_fields_first` puts all first fields of a run of bytes before all second
fields (Q2_K: bytes 0..31 hold elements 0..31 in bits 0-1, elements 32..63 in bits 2-3, ...); `unpack_neighbours` keeps
the fields of one byte together (Q1_0: byte 0 holds elements 0..7).

All loops below go over the fields of a byte, at most eight, so that each numpy call works on long runs; the
fields-first pair handles up to eight bytes as one word, where a shift followed by a repeated mask acts on each byte
alone.
"""

from __future__ import annotations

import numpy as np


def _as_words(array: np.ndarray) -> tuple[np.ndarray, int]:
    """View the last axis as the widest words that divide it; also return a word with 1 in every byte."""
    contiguous = np.ascontiguousarray(array)
    size = next(n for n in (8, 4, 2, 1) if contiguous.shape[-1] % n == 0)
    return contiguous.view(f"u{size}"), int.from_bytes(b"\x01" * size, "little")


def unpack_fields_first(packed: np.ndarray, width: int) -> np.ndarray:
    """Return the `width`-bit fields of ``(..., k)`` uint8 as ``(..., 8 // width, k)`` uint8.

    >>> unpack_fields_first(np.array([0x21, 0x43], np.uint8), 4).tolist()
    [[1, 3], [2, 4]]
    """
    words, ones = _as_words(packed)
    mask = words.dtype.type(ones * ((1 << width) - 1))
    fields = np.empty((*words.shape[:-1], 8 // width, words.shape[-1]), words.dtype)
    for field in range(8 // width):
        fields[..., field, :] = words >> words.dtype.type(width * field) & mask
    return fields.view(np.uint8)


def pack_fields_first(fields: np.ndarray, width: int) -> np.ndarray:
    """Inverse of `unpack_fields_first`; the values must be below ``1 << width``.

    >>> pack_fields_first(np.array([[1, 3], [2, 4]], np.uint8), 4).tolist()
    [33, 67]
    """
    words, _ = _as_words(fields)
    packed = words[..., 0, :].copy()
    for field in range(1, 8 // width):
        packed |= words[..., field, :] << words.dtype.type(width * field)
    return packed.view(np.uint8)


def unpack_neighbours(packed: np.ndarray, width: int) -> np.ndarray:
    """Return the `width`-bit fields of ``(..., k)`` uint8 as ``(..., k * 8 // width)`` uint8, byte after byte.

    >>> unpack_neighbours(np.array([0x21, 0x43], np.uint8), 4).tolist()
    [1, 2, 3, 4]
    """
    flat = np.ascontiguousarray(packed).reshape(-1)
    fields = np.empty((flat.size, 8 // width), np.uint8)
    for field in range(8 // width):
        fields[:, field] = flat >> width * field & (1 << width) - 1
    return fields.reshape(*packed.shape[:-1], -1)


def pack_neighbours(fields: np.ndarray, width: int) -> np.ndarray:
    """Inverse of `unpack_neighbours`; the values must be below ``1 << width``.

    >>> pack_neighbours(np.array([1, 2, 3, 4], np.uint8), 4).tolist()
    [33, 67]
    """
    bytewise = np.ascontiguousarray(fields).reshape(-1, 8 // width)
    packed = bytewise[:, 0].copy()
    for field in range(1, 8 // width):
        packed |= bytewise[:, field] << width * field
    return packed.reshape(*fields.shape[:-1], -1)


def unpack_words(blocks: np.ndarray, start: int, stop: int, dtype: str) -> np.ndarray:
    """Return bytes ``start:stop`` of each block as little-endian words, ``(n, words)`` of `dtype` ("<u2", "<u4")."""
    return np.ascontiguousarray(blocks[:, start:stop]).view(dtype)


def pack_words(words: np.ndarray, dtype: str) -> np.ndarray:
    """Return ``(n, words)`` integers as the little-endian bytes of `dtype`, ``(n, bytes)`` uint8."""
    return np.ascontiguousarray(words, dtype=dtype).view(np.uint8)
