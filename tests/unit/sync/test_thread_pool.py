"""Threads that share work: all of it in order, or the error, and nothing that runs on."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine_ext.sync import thread_pool
from engine_ext.sync.thread_pool import ThreadPool

pytestmark = pytest.mark.slow

THREADS = 3
WAIT_S = 30


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


class Item:
    pass


@pytest.mark.parametrize("threads", [1, THREADS])
@pytest.mark.parametrize("size", [0, 1, 50])
@pytest.mark.parametrize("nbytes", [0, 1, thread_pool._MANY // 3, thread_pool._MANY])
def test_results_are_in_order(threads: int, size: int, nbytes: int) -> None:
    found = ThreadPool(threads).map(lambda n: n * n, range(size), lambda n: nbytes)
    assert found == [n * n for n in range(size)]


def test_small_items_stay_in_one_thread() -> None:
    caller = threading.current_thread()
    found = ThreadPool(THREADS).map(
        lambda _: threading.current_thread() is caller, range(1000), lambda _: 100
    )
    assert found == [True] * 1000


def test_items_that_are_together_large_are_divided() -> None:
    """Each thread gets one group of them, while the others have theirs."""
    all_started, groups = threading.Barrier(THREADS), 4

    def work(number: int) -> threading.Thread:
        if number % groups == 0:
            all_started.wait(WAIT_S)
        return threading.current_thread()

    nbytes = thread_pool._MANY // groups
    found = ThreadPool(THREADS).map(work, range(groups * THREADS), lambda _: nbytes)
    assert len(set(found)) == THREADS
    assert [len({*found[k : k + groups]}) for k in range(0, len(found), groups)] == [1] * THREADS


def test_nothing_runs_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    cleared = threading.Event()

    class Todo(deque[tuple[int, int]]):
        def clear(self) -> None:
            super().clear()
            cleared.set()

    monkeypatch.setattr(thread_pool, "deque", Todo)
    running: set[int] = set()
    done: list[int] = []

    def work(number: int) -> None:
        running.add(number)
        if number > 5:  # still running when the error is raised
            assert cleared.wait(WAIT_S)
        running.discard(number)
        if number == 5:
            raise ValueError(number)
        done.append(number)

    with pytest.raises(ValueError, match="5"):
        ThreadPool(THREADS).map(work, range(100))
    assert not running
    assert len(done) < 5 + THREADS


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("in_caller", [True, False])
def test_an_error_keeps_no_item_alive(in_caller: bool) -> None:
    caller = threading.current_thread()
    started: set[threading.Thread] = set()
    all_started = threading.Barrier(THREADS)

    def work(item: Item) -> None:
        if threading.current_thread() not in started:
            started.add(threading.current_thread())
            all_started.wait(WAIT_S)
        if (threading.current_thread() is caller) is in_caller:
            raise ValueError

    items = [Item() for _ in range(20)]
    known = [weakref.ref(item) for item in items]
    with pytest.raises(ValueError) as raised:
        ThreadPool(THREADS).map(work, items)
    del raised, items
    assert not any(one() for one in known)


def test_fewer_threads_than_wanted_do_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def limited(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    pool = ThreadPool(THREADS)
    for _ in range(2):
        assert pool.map(lambda n: n * n, range(50)) == [n * n for n in range(50)]


def test_busy_threads_are_not_waited_for() -> None:
    """Their helpers are of other maps; what was queued for them does nothing later."""
    pool, goes_on = ThreadPool(3), threading.Event()
    busy, called = threading.Barrier(5), list[int]()

    def block(_: int) -> None:
        busy.wait(WAIT_S)
        assert goes_on.wait(WAIT_S)

    with ThreadPoolExecutor(3) as callers:
        others = [callers.submit(pool.map, block, range(2)) for _ in range(2)]
        try:
            busy.wait(WAIT_S)
            callers.submit(pool.map, called.append, range(4)).result(5)
        finally:
            goes_on.set()
    for other in others:
        other.result()
    assert called == [0, 1, 2, 3]
