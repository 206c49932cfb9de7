"""Work for several threads: results in order, few in flight, errors where their result would have been."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from lazyweights.container.jobs import HUGE_PAGE_BYTES, BufferPool, ordered_map


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_come_in_order(threads: int) -> None:
    rng = np.random.default_rng(0)
    delays = rng.random(60) / 500

    def work(i: int) -> int:
        time.sleep(delays[i])
        return i * i

    assert list(ordered_map(work, range(60), threads)) == [i * i for i in range(60)]
    assert list(ordered_map(work, [], threads)) == []


def test_the_caller_works_too() -> None:
    names = {name for name in ordered_map(lambda i: threading.current_thread().name, range(200), 2)}
    assert threading.current_thread().name in names


@pytest.mark.parametrize(("in_flight", "expected"), [(0, 4), (7, 7)])
def test_few_results_are_in_flight(in_flight: int, expected: int) -> None:
    started = []

    def items() -> Iterator[int]:
        for i in range(50):
            started.append(i)
            yield i

    most = 0
    for n_done, _ in enumerate(ordered_map(lambda i: i, items(), 2, in_flight=in_flight)):
        time.sleep(0.001)
        most = max(most, len(started) - n_done)
    assert most <= expected
    assert len(started) == 50


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_stands_in_its_place_and_stops_the_run(threads: int) -> None:
    started = []

    def work(i: int) -> int:
        started.append(i)
        if i == 10:
            raise ValueError(f"item {i}")
        return i

    found: list[int] = []
    with pytest.raises(ValueError, match="item 10"):
        found.extend(ordered_map(work, range(1000), threads))
    assert found == list(range(10))
    assert len(started) <= 10 + 2 * threads
    assert threading.active_count() == 1


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_of_the_items(threads: int) -> None:
    def items() -> Iterator[int]:
        yield from range(5)
        raise KeyError("items")

    found: list[int] = []
    with pytest.raises(KeyError, match="items"):
        found.extend(ordered_map(lambda i: i, items(), threads))
    assert found == list(range(5))


def test_a_run_that_is_left_leaves_no_thread() -> None:
    results = ordered_map(lambda i: i, iter(range(10**9)), 3)
    assert next(results) == 0
    results.close()
    assert threading.active_count() == 1


@pytest.mark.parametrize("n_bytes", [0, 1000, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES + 1])
def test_buffers_are_used_again(n_bytes: int) -> None:
    pool = BufferPool()
    first = pool.take(n_bytes)
    assert first.dtype == np.uint8
    assert first.size == n_bytes
    first[:] = 7
    pool.give(first)
    second = pool.take(n_bytes // 2)
    assert second.size == n_bytes // 2
    assert second.size == 0 or np.shares_memory(first, second)
    pool.give(second)
    assert n_bytes == 0 or np.shares_memory(pool.take(n_bytes), first)
