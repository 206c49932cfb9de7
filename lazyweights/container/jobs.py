"""Threads for work that must come back in order, with few results in flight."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Progress:
    """Where a long run stands.

    Attributes
    ----------
    n_bytes, total_bytes : int
        Source bytes done and in all.
    coded_bytes : int
        Coded bytes that belong to `n_bytes`.
    stage : str
        ``"analyse"``, ``"encode"``, ``"decode"`` or ``"verify"``.
    name : str
        Tensor at work, or "".
    """

    n_bytes: int
    total_bytes: int
    coded_bytes: int
    stage: str
    name: str


ProgressCallback = Callable[[Progress], None]


class BufferPool:
    """Byte buffers that are used again: fresh large arrays cost a page fault every 4 KiB. Thread-safe."""

    def __init__(self) -> None:
        self._free: deque[np.ndarray] = deque()

    def take(self, n_bytes: int) -> np.ndarray:
        """Return an uninitialised uint8 array of `n_bytes` bytes, a view of a buffer of the pool."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = np.empty(0, np.uint8)
        if buffer.size < n_bytes:
            buffer = np.empty(n_bytes, np.uint8)
        return buffer[:n_bytes]

    def give(self, array: np.ndarray) -> None:
        """Give back what `take` returned; the caller must not use it any more."""
        self._free.append(array if array.base is None else array.base)


def thread_count(threads: int) -> int:
    """Return the number of threads for a ``-T`` value: 0 means all cores that this process may use."""
    if threads > 0:
        return threads
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def ordered_map(function: Callable[[T], R], items: Iterable[T], threads: int) -> Generator[R, None, None]:
    """Yield ``function(item)`` for each item, in order, computed by `threads` threads.

    At most two results per thread are in flight. With one thread nothing is started. An error of one item stops the
    run: no further item is started, and the error is raised.
    """
    if threads == 1:
        yield from map(function, items)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="lazyweights")
    waiting: deque[Future[R]] = deque()
    try:
        for item in items:
            if len(waiting) >= 2 * threads:
                yield waiting.popleft().result()
            waiting.append(pool.submit(function, item))
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
        pool.shutdown(wait=True, cancel_futures=True)
