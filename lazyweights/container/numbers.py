"""Numbers of variable length (LEB128): seven bits a byte, the low ones first, the top bit set on all but the last."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from lazyweights.errors import FormatError, LimitError, TruncatedError


def pack_number(value: int) -> bytes:
    """Return the bytes of a number >= 0.

    >>> pack_number(300).hex()
    'ac02'
    """
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def pack_numbers(values: Iterable[int]) -> bytes:
    """Return the bytes of several numbers, one after the other."""
    return b"".join(pack_number(value) for value in values)


def pack_freqs(values: np.ndarray) -> bytes:
    """Return what `pack_numbers` does for an array of numbers below 2**14.

    >>> pack_freqs(np.array([3, 300, 16383])) == pack_numbers([3, 300, 16383])
    True
    """
    wide = values > 127
    pairs = np.stack([values & 127 | wide << 7, values >> 7], axis=-1).astype(np.uint8)
    return pairs[np.stack([np.ones_like(wide), wide], axis=-1)].tobytes()


class NumberReader:
    """Reads numbers and byte strings; every count is checked against a limit and the bytes left.

    Parameters
    ----------
    data : bytes
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def number(self, limit: int = (1 << 63) - 1) -> int:
        """Read a number of at most `limit`.

        Raises
        ------
        TruncatedError, LimitError
        """
        at = self.at
        if at < len(self._data):  # most are one byte
            value = self._data[at]
            if value < 128 and value <= limit:
                self.at = at + 1
                return value
        return self.several(1, limit)[0]

    def several(self, n: int, limit: int = (1 << 63) - 1) -> list[int]:
        """Read `n` numbers of at most `limit`, a few of them: quicker than one by one.

        Raises
        ------
        TruncatedError, LimitError
        """
        data, at = self._data, self.at
        found = []
        try:
            for _ in range(n):
                byte = data[at]
                at += 1
                if byte < 128:
                    found.append(byte)
                    continue
                value, shift = byte & 127, 7
                while byte >= 128:
                    if shift > 63:
                        raise LimitError("a number is too long", offset=at)
                    byte = data[at]
                    at += 1
                    value |= (byte & 127) << shift
                    shift += 7
                found.append(value)
        except IndexError:
            raise TruncatedError("the data ends inside a number", offset=at) from None
        if n and max(found) > limit:
            raise LimitError("a number is too large", offset=at, expected=f"<= {limit}", found=max(found))
        self.at = at
        return found

    def numbers(self, n: int, limit: int) -> np.ndarray:
        """Read `n` numbers of at most `limit`, int64 (n,): many at once, where they have two bytes at most.

        Raises
        ------
        TruncatedError, LimitError
        """
        data = np.frombuffer(self._data, np.uint8, min(2 * n, len(self._data) - self.at), self.at)
        ends = np.flatnonzero(data < 128)[:n]
        starts = np.concatenate([np.zeros(1, np.int64), ends[:-1] + 1])[: ends.size]
        if n and ends.size == n and int((ends - starts).max()) <= 1:
            values = data[starts] & 127 | data[ends].astype(np.int64) << np.where(ends > starts, 7, 0)
            if int(values.max()) <= limit:
                self.at += int(ends[-1]) + 1
                return values
        return np.array([self.number(limit) for _ in range(n)], np.int64)

    def take(self, n: int) -> bytes:
        """Read `n` bytes.

        Raises
        ------
        TruncatedError
        """
        if n > len(self._data) - self.at:
            raise TruncatedError("the data ends too early", offset=self.at, expected=n, found=len(self._data) - self.at)
        self.at += n
        return self._data[self.at - n : self.at]

    def data(self) -> bytes:
        """Read a byte string behind its length."""
        return self.take(self.number())

    def finish(self) -> None:
        """Check that nothing is left.

        Raises
        ------
        FormatError
        """
        if self.at != len(self._data):
            raise FormatError("bytes are left behind the data", expected=self.at, found=len(self._data))
