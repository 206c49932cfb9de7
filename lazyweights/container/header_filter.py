"""The GGUF header, regrouped so that zstd finds more in it (`docs/format.md`, "Filtered chunks").

A header is mostly tokenizer: hundreds of thousands of short strings, each behind its 64-bit length, and arrays of scores
and types. Here the lengths, the characters and the numbers go into streams of their own; what remains stays as it is. On
a vocabulary of 262,144 tokens that is smaller than zstd's strongest level on the plain bytes, and ten times as fast.

A payload is: for each of six streams its raw and its packed size (numbers as in the head), then the packed streams.
Streams: recipe, rest, lengths, long lengths, characters, words.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lazyweights.container.gguf_values import ARRAY, STRING, HeaderReader
from lazyweights.container.numbers import NumberReader, pack_numbers
from lazyweights.container.string_kernels import add_up, fill_starts, join_strings, take_characters
from lazyweights.container.zstd_frames import compress, decompress
from lazyweights.errors import FormatError, LazyWeightsError, TruncatedError

STRINGS, WORDS = 0, 1
N_STREAMS = 6
LEVEL, SHORT_LEVEL = 7, 15
SHORT_STREAM = 1 << 18
"""Streams of up to so many bytes take the higher zstd level, which would take too long for the characters of a vocabulary."""

MIN_ITEMS = 16
LONG = 255

MAX_SIZES_BYTES = 2 * N_STREAMS * 10
"""The sizes in front of the streams take at most so many bytes."""

_WORD_TYPES = (4, 5, 6)  # u32, i32, f32


@dataclass(frozen=True)
class ItemArray:
    """An array of a GGUF header: the offset of each item and, last, its end; int64 (n_items + 1,)."""

    kind: int
    starts: np.ndarray


def find_arrays(header: bytes) -> list[ItemArray]:
    """Return the arrays of a header worth regrouping, in file order; none where it cannot be followed."""
    found: list[ItemArray] = []
    try:
        reader = HeaderReader(memoryview(header))
        reader.read_counts()
        if reader.version < 2 or reader.byte_order != "little":
            return []
        for key, value_type in reader.pairs():
            what = key.decode("utf-8", "replace")
            if value_type != ARRAY:
                reader.skip_value(value_type, what)
                continue
            item_type, length = reader.array_head(what)
            first = reader.pos
            if item_type == STRING:
                starts = np.empty(length + 1, np.int64)
                if not fill_starts(np.frombuffer(header, np.uint8), first, starts):
                    break
                reader.pos = int(starts[-1])
                if length >= MIN_ITEMS:
                    found.append(ItemArray(STRINGS, starts))
                continue
            reader.skip_items(item_type, length, what)
            if length >= MIN_ITEMS and item_type in _WORD_TYPES:
                found.append(ItemArray(WORDS, first + 4 * np.arange(length + 1, dtype=np.int64)))
    except LazyWeightsError:
        pass  # what was found before stands; the rest of the header stays as it is
    return found


def filter_chunk(data: bytes, arrays: list[ItemArray], offset: int) -> bytes | None:
    """Return the payload of a chunk of the header, or None where no array lies in it.

    Parameters
    ----------
    data : the chunk
    arrays : of the whole header
    offset : of the chunk in the file
    """
    raw = np.frombuffer(data, np.uint8)
    numbers = [0]
    rest, lengths, long_lengths, characters, words = [], [], [], [], []
    end = 0
    for array in arrays:
        first = int(np.searchsorted(array.starts, offset))
        last = int(np.searchsorted(array.starts, offset + len(data), "right")) - 1
        n = last - first
        if n < MIN_ITEMS:
            continue
        starts = array.starts[first : last + 1] - offset
        begin, stop = int(starts[0]), int(starts[-1])
        region = raw[begin:stop]
        numbers[0] += 1
        numbers += [begin - end, array.kind, n]
        rest.append(raw[end:begin])
        end = stop
        if array.kind == WORDS:
            values = region.copy().view("<u4")
            deltas = np.diff(values, prepend=np.uint32(0)).astype("<u4")
            words.append(np.ascontiguousarray(deltas.view(np.uint8).reshape(-1, 4).T).reshape(-1))
        else:
            sizes = np.diff(starts) - 8
            characters.append(take_characters(region, sizes))
            lengths.append(np.minimum(sizes, LONG).astype(np.uint8))
            long_lengths.append(sizes[sizes >= LONG].astype("<u4").view(np.uint8))
    if not numbers[0]:
        return None
    rest.append(raw[end:])
    streams = [pack_numbers(numbers)] + [
        b"".join(part.tobytes() for part in stream) for stream in (rest, lengths, long_lengths, characters, words)
    ]
    packed = [compress(s, SHORT_LEVEL if len(s) <= SHORT_STREAM else LEVEL) for s in streams]
    sizes_of = [size for s, p in zip(streams, packed, strict=True) for size in (len(s), len(p))]
    return pack_numbers(sizes_of) + b"".join(packed)


def unfilter_chunk(payload: bytes | memoryview, target: np.ndarray) -> None:
    """Inverse of `filter_chunk`; `target`, uint8, has the size of the chunk and is filled.

    Raises
    ------
    FormatError
        If the payload is not one that `filter_chunk` writes.
    """
    n_bytes = target.size
    reader = NumberReader(bytes(payload[:MAX_SIZES_BYTES]))
    sizes = [(reader.number(n_bytes + (1 << 20)), reader.number(len(payload))) for _ in range(N_STREAMS)]
    streams = []
    at = reader.at
    for raw_size, packed_size in sizes:
        if packed_size > len(payload) - at:
            raise TruncatedError("a stream of the header ends too early", expected=packed_size, found=len(payload) - at)
        streams.append(decompress(payload[at : at + packed_size], raw_size, "a stream of the header"))
        at += packed_size
    if at != len(payload):
        raise FormatError("bytes are left behind the streams of the header", expected=at, found=len(payload))
    recipe = NumberReader(streams[0])
    rest, lengths, characters, words = (_Stream(streams[i]) for i in (1, 2, 4, 5))
    long_lengths = _Stream(streams[3])
    out = _Output(target)
    for _ in range(recipe.number(n_bytes)):
        gap, kind, n = recipe.number(n_bytes), recipe.number(1), recipe.number(n_bytes)
        if n < MIN_ITEMS:
            raise FormatError("an array of the header is too short to be regrouped", expected=f">= {MIN_ITEMS}", found=n)
        out.take(gap)[:] = rest.take(gap)
        if kind == WORDS:
            add_up(words.take(4 * n), out.take(4 * n))
            continue
        short = lengths.take(n)
        n_long = int(np.count_nonzero(short == LONG))
        long = long_lengths.take(4 * n_long).copy().view("<u4")
        total = int(short.sum(dtype=np.int64)) - LONG * n_long + int(long.sum(dtype=np.int64))
        join_strings(characters.take(total), short, long, out.take(total + 8 * n))
    tail = rest.take(rest.left)
    out.take(tail.size)[:] = tail
    recipe.finish()
    if any(stream.left for stream in (lengths, long_lengths, characters, words)):
        raise FormatError("a stream of the header is longer than its arrays")
    if out.left:
        raise FormatError("a filtered chunk has another size", expected=n_bytes, found=n_bytes - out.left)


class _Output:
    """Bytes to fill from front to back."""

    def __init__(self, data: np.ndarray) -> None:
        self._data = data
        self.left = data.size

    def take(self, n: int) -> np.ndarray:
        """Return the next `n` bytes, to be written.

        Raises
        ------
        FormatError
            If there are not so many.
        """
        if n > self.left:
            size = self._data.size
            raise FormatError("a filtered chunk has another size", expected=size, found=f"> {size}")
        at = self._data.size - self.left
        self.left -= n
        return self._data[at : at + n]


class _Stream:
    """Bytes taken from front to back."""

    def __init__(self, data: bytes) -> None:
        self._data = np.frombuffer(data, np.uint8)
        self._at = 0

    @property
    def left(self) -> int:
        return self._data.size - self._at

    def take(self, n: int) -> np.ndarray:
        if n > self.left:
            raise FormatError("a stream of the header ends too early", expected=n, found=self.left)
        self._at += n
        return self._data[self._at - n : self._at]
