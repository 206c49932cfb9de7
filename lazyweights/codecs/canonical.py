"""Canonical codes: codewords and decode tables that follow from the code lengths alone.

Codewords are assigned in order of (length, symbol), counting upwards (RFC 1951, 3.2.2). They are
read from the most significant bit. A one-symbol alphabet has length 1 in the list of lengths but an
**empty codeword**: a constant plane takes no bits.

A decode table has 2048 entries, one for each 11-bit window; entry = ``symbol | length << 8``.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from lazyweights.codecs import ALPHABET_SIZE, MAX_CODE_LENGTH, TABLE_SIZE
from lazyweights.errors import CodecError


def check_lengths(lengths: np.ndarray) -> None:
    """Raise CodecError unless the lengths are those of a complete prefix code (Kraft sum exactly one)."""
    used = lengths[lengths > 0].astype(np.int64)
    if used.size == 0:
        raise CodecError("a code table has no symbol")
    if used.max() > MAX_CODE_LENGTH:
        raise CodecError("a code length is too long", expected=f"<= {MAX_CODE_LENGTH}", found=int(used.max()))
    if used.size == 1:
        if used[0] != 1:
            raise CodecError("a one-symbol table must have length 1", expected=1, found=int(used[0]))
        return
    kraft = int((1 << (MAX_CODE_LENGTH - used)).sum())
    if kraft != TABLE_SIZE:
        raise CodecError("the code lengths are not those of a complete prefix code", expected=TABLE_SIZE, found=kraft)


def check_pool(lengths: np.ndarray) -> None:
    """Raise CodecError unless every row of uint8 (n_tables, 256) is a complete prefix code (`check_lengths`)."""
    used = lengths.astype(np.int64)
    kraft = np.where(used > 0, 1 << np.maximum(MAX_CODE_LENGTH - used, 0), 0).sum(axis=1)
    for t in np.flatnonzero((kraft != TABLE_SIZE) | (used.max(axis=1, initial=0) > MAX_CODE_LENGTH)):
        check_lengths(lengths[t])


def codewords(lengths: np.ndarray) -> np.ndarray:
    """Return encode entries ``codeword | length << 16`` (uint32, shape of `lengths`), of one table or of several.

    Symbols without a codeword get ``0xFFFFFFFF``.

    Parameters
    ----------
    lengths : ndarray of uint8, shape (256,) or (n_tables, 256)

    >>> [hex(e) for e in codewords(np.array([1, 2, 2], np.uint8))]
    ['0x10000', '0x20002', '0x20003']
    """
    entries = np.empty(lengths.shape, np.uint32)
    _fill_codewords(np.ascontiguousarray(lengths).reshape(-1, lengths.shape[-1]), entries.reshape(-1, lengths.shape[-1]))
    return entries


@njit(cache=True, nogil=True)
def _fill_codewords(lengths: np.ndarray, entries: np.ndarray) -> None:
    n_tables, n_symbols = lengths.shape
    entries[:] = 0xFFFFFFFF
    for t in range(n_tables):
        n_used = 0
        for s in range(n_symbols):
            if lengths[t, s] > 0:
                n_used += 1
        code = 0
        for length in range(1, 12):
            code <<= 1
            for s in range(n_symbols):
                if lengths[t, s] == length:
                    entries[t, s] = code | length << 16 if n_used > 1 else 0
                    code += 1


@njit(cache=True, nogil=True)
def _fill(lengths: np.ndarray, tables: np.ndarray) -> None:
    n_tables, n_symbols = lengths.shape
    for t in range(n_tables):
        n_used = 0
        last = 0
        for s in range(n_symbols):
            if lengths[t, s] > 0:
                n_used += 1
                last = s
        if n_used == 1:
            tables[t, :] = last << 8
            continue
        position = 0
        for length in range(1, 12):
            run = 1 << (11 - length)
            for s in range(n_symbols):
                if lengths[t, s] == length:
                    entry = (s << 8) | length
                    for k in range(position, position + run):
                        tables[t, k] = entry
                    position += run


def decode_tables(lengths: np.ndarray) -> np.ndarray:
    """Return the decode tables of a pool, flat, followed by one *null table* whose codewords are empty.

    Parameters
    ----------
    lengths : ndarray of uint8, shape (n_tables, 256)
        Code lengths of each table.

    Returns
    -------
    ndarray of uint16, shape ((n_tables + 1) * 2048 + 16,)
        Table t starts at ``t * 2048``; an entry is ``symbol << 8 | length``.
        The null table (symbol 0, length 0) is number `n_tables`.
        The 16 entries at the end are padding for wide loads.

    Raises
    ------
    CodecError
        If a table is not a complete prefix code.
    """
    check_pool(lengths)
    n_tables = lengths.shape[0]
    flat = np.zeros((n_tables + 1) * TABLE_SIZE + 16, np.uint16)
    if n_tables:
        _fill(np.ascontiguousarray(lengths), flat[: n_tables * TABLE_SIZE].reshape(n_tables, TABLE_SIZE))
    return flat


def flat_lengths() -> np.ndarray:
    """Return the lengths of the flat code: 8 bits for each of the 256 symbols, each codeword its own symbol."""
    return np.full(ALPHABET_SIZE, 8, np.uint8)
