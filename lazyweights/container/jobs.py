"""Threads for work that must come back in order, with few results in flight."""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

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


HUGE_PAGE_BYTES = 1 << 21


class BufferPool:
    """Byte buffers that are used again: fresh large arrays cost a page fault every 4 KiB. Thread-safe."""

    def __init__(self) -> None:
        self._free: deque[np.ndarray] = deque()

    def take(self, n_bytes: int) -> np.ndarray:
        """Return an uninitialised uint8 array of `n_bytes` bytes, a view of a buffer of the pool."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = _fresh_buffer(0)
        if buffer.size < n_bytes:
            buffer = _fresh_buffer(n_bytes)
        return buffer[:n_bytes]

    def give(self, array: np.ndarray) -> None:
        """Give back what `take` returned; the caller must not use it any more."""
        base = array.base
        self._free.append(base if isinstance(base, np.ndarray) else array)


def _fresh_buffer(n_bytes: int) -> np.ndarray:
    """Return a uint8 array of at least `n_bytes` bytes, in huge pages where the system has them and it is large.

    Rows that lie side by side in a buffer are written at the same time, so ordinary pages would be too many for the
    processor's list of recent ones.
    """
    if n_bytes < HUGE_PAGE_BYTES // 2 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.empty(n_bytes, np.uint8)
    memory = mmap.mmap(-1, -(-n_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES)
    with suppress(OSError):  # a system may be built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def thread_count(threads: int) -> int:
    """Return the number of threads for a ``-T`` value: 0 means all cores that this process may use."""
    if threads > 0:
        return threads
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def ordered_map(
    function: Callable[[T], R], items: Iterable[T], threads: int, *, in_flight: int = 0
) -> Generator[R, None, None]:
    """Yield ``function(item)`` for each item, in order, computed by `threads` threads, of which the caller's is one.

    At most `in_flight` results are in flight, by default two per thread. With one thread nothing is started. An error of
    one item stops the run: no further item is started, and the error is raised where its result would have been.
    """
    if threads == 1:
        yield from map(function, items)
        return
    work = _Work(function, items, max(in_flight, 2 * threads))
    helpers = [threading.Thread(target=work.help, name=f"lazyweights-{k}", daemon=True) for k in range(threads - 1)]
    try:
        for helper in helpers:
            helper.start()
        yield from work.results()
    finally:
        work.stop()
        for helper in helpers:
            if helper.ident is not None:
                helper.join()


class _Work(Generic[T, R]):
    """Items that several threads take and whose results one thread hands out in order."""

    def __init__(self, function: Callable[[T], R], items: Iterable[T], in_flight: int) -> None:
        self._function = function
        self._items = enumerate(items)
        self._in_flight = in_flight
        self._changed = threading.Condition()
        self._finished: dict[int, R] = {}
        self._failed: dict[int, BaseException] = {}
        self._n_taken = self._n_yielded = 0
        self._is_over = False

    def results(self) -> Generator[R, None, None]:
        """Yield the results; while the next one is not there, compute another."""
        while True:
            with self._changed:
                number = self._n_yielded
                while number not in self._finished:
                    if number in self._failed:
                        raise self._failed.pop(number)
                    taken = self._take()
                    if taken is not None:
                        break
                    if self._is_over and number == self._n_taken:
                        return
                    self._changed.wait()
                else:
                    result = self._finished.pop(number)
                    taken = None
            if taken is not None:
                self._compute(*taken)
                continue
            yield result
            with self._changed:  # only now: until then the caller uses the result, which is one of those in flight
                self._n_yielded += 1
                self._changed.notify_all()

    def help(self) -> None:
        """Compute items until there are no more."""
        while True:
            with self._changed:
                while (taken := self._take()) is None:
                    if self._is_over:
                        return
                    self._changed.wait()
            self._compute(*taken)

    def stop(self) -> None:
        """Start no further item."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _take(self) -> tuple[int, T] | None:
        """Return the next item and its number; None where too many are in flight or there is none. The lock is held."""
        if self._is_over or self._n_taken >= self._n_yielded + self._in_flight:
            return None
        try:
            taken = next(self._items)
        except StopIteration:
            taken = None
        except BaseException as error:
            self._failed[self._n_taken] = error
            self._n_taken += 1
            taken = None
        if taken is None:
            self._is_over = True
            self._changed.notify_all()
            return None
        self._n_taken += 1
        return taken

    def _compute(self, number: int, item: T) -> None:
        try:
            result = self._function(item)
        except BaseException as error:
            with self._changed:
                self._failed[number] = error
                self._is_over = True
                self._changed.notify_all()
            if not isinstance(error, Exception):
                raise  # an interrupt does not wait for its turn
            return
        with self._changed:
            self._finished[number] = result
            if number == self._n_yielded:
                self._changed.notify_all()
