"""Senders that write one log in a store side by side, or die: never two, never half a version."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from obstore.store import MemoryStore

from engine_ext.log import (
    DeltaLog,
    LogWriter,
    ObjectFacts,
    Objects,
    ObjectStore,
    fold_versions,
    route,
)
from engine_ext.log.catalog import Done, FileFacts, folder_name
from tests.support.served_models import PROPERTY
from tests.unit.log.places import decoded, part

pytestmark = pytest.mark.slow

PARTS = 2


class Killed(BaseException):
    """The process is gone."""


class StepObjects(Objects):
    """Objects in memory; `step` is called before each operation, and after it if it writes."""

    def __init__(self, memory: MemoryStore, step: Callable[[], None]) -> None:
        super().__init__("s3://test/log", store=memory, sleep=lambda seconds: None)
        self.step = step

    def list(self, prefix: str = "") -> list[ObjectFacts]:
        self.step()
        return super().list(prefix)

    def read(self, name: str, most: int) -> bytes:
        self.step()
        return super().read(name, most)

    def put(self, name: str, data: bytes) -> None:
        self.step()
        super().put(name, data)
        self.step()

    def create(self, name: str, data: bytes) -> None:
        self.step()
        super().create(name, data)
        self.step()

    def delete(self, names: Any) -> None:
        for name in names:
            self.step()
            super().delete([name])


def store_of(
    memory: MemoryStore, step: Callable[[], None] = lambda: None, scratch: Path | None = None
) -> ObjectStore:
    """Return a log's store that calls `step`."""
    return ObjectStore(StepObjects(memory, step), scratch=None if scratch is None else str(scratch))


def killed_after(steps: int) -> Callable[[], None]:
    """Return a step that kills its caller after so many."""
    left = iter(range(steps))

    def step() -> None:
        if next(left, None) is None:
            raise Killed

    return step


def write_version(writer: LogWriter, owner: str) -> int:
    """Write the next version as a sender does, and return its number."""
    version = max(writer.last_number, 0) + 1
    draft = writer.begin(version)
    sync_id = f"{owner}-{version}"
    for k in range(PARTS):
        draft.add(part(version, version - 1, part=k, num_parts=PARTS, sync_id=sync_id))
    draft.finish()
    return version


def owners(memory: MemoryStore, folder: Path) -> dict[int, str]:
    """Return who wrote each version that a reader sees; all are sound."""
    log = DeltaLog(store_of(memory, scratch=folder))
    listing = log.listing()
    assert listing.damaged == {}
    found = {}
    for entry in listing.entries:
        with log.fetched(entry):
            [sync_id] = {one.manifest.sync_id for one in decoded(entry)}
        assert sync_id is not None
        found[entry.version] = sync_id.rpartition("-")[0]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reader")


def test_a_sender_is_killed_at_every_step(folder: Path) -> None:
    """Visible versions are whole, and the next sender continues."""
    for steps in range(1000):
        memory = MemoryStore()
        finished = []
        try:
            writer = LogWriter(store_of(memory, killed_after(steps)))
            finished = [write_version(writer, "first") for _ in range(2)]
        except Killed:
            pass
        before = owners(memory, folder)
        assert set(finished) <= before.keys() <= {1, 2}
        later = LogWriter(store_of(memory))
        number = write_version(later, "second")
        assert owners(memory, folder) == {**before, number: "second"}
        assert number > max(before, default=0)
        if finished:
            return
    raise AssertionError("it is never done")


def test_a_long_mark_settles_its_version_for_good() -> None:
    """It has thousands of parts: it is longer than what another sender would settle it with."""
    memory = MemoryStore()
    objects, first = store_of(memory).objects, LogWriter(store_of(memory))
    first.begin(1)
    facts = {f"{k:05d}.safetensors": FileFacts(1, f"{k:032x}") for k in range(20_000)}
    done = msgspec.json.encode(Done(version=1, base_version=0, files=facts))
    assert len(done) > 1 << 20
    objects.create("weight_v000001/DONE", done)
    objects.create("weight_v000001/DONE", done)
    assert LogWriter(store_of(memory)).last_number == 1
    assert objects.read("weight_v000001/DONE", len(done)) == done


def test_folded_version_is_not_refused_once_deleted() -> None:
    memory = MemoryStore()
    writer, log = LogWriter(store_of(memory)), DeltaLog(store_of(memory))
    last = [write_version(writer, "first") for _ in range(3)][-1]
    fold_versions(log, route(log.listing().entries, 0), 0)
    log.store.delete([folder_name(version) for version in range(1, last + 1)])
    assert LogWriter(store_of(memory)).last_number == last
    listing = log.listing()
    assert [entry.folder.name for entry in listing.entries] == [folder_name(last, 0)]
    assert not listing.refused


def test_refusal_by_a_sender_that_is_out_marks_nothing(folder: Path) -> None:
    """Nor does one that is killed at any step of it: the version has a successor."""
    for steps in range(20):
        memory = MemoryStore()
        objects = StepObjects(memory, lambda: None)
        first = LogWriter(ObjectStore(objects))
        write_version(first, "first")
        write_version(LogWriter(store_of(memory)), "second")
        objects.step = killed_after(steps)
        with contextlib.suppress(Killed, BlockingIOError):
            first.refuse(1)
        LogWriter(store_of(memory))
        assert owners(memory, folder) == {1: "first", 2: "second"}


@pytest.mark.parametrize("lasts", [1, 3])
def test_store_that_fails_keeps_no_sender_out(folder: Path, lasts: int) -> None:
    """Its own claim is not that of another sender, if only the answer to it was lost."""
    for steps in range(1000):
        memory, count, failures = MemoryStore(), itertools.count(), list[int]()

        def step(
            count: Iterator[int] = count, failures: list[int] = failures, first: int = steps
        ) -> None:
            if first <= next(count) < first + lasts:
                failures.append(first)
                raise OSError("the store is down")

        objects = StepObjects(memory, lambda: None)
        writer = LogWriter(ObjectStore(objects))
        objects.step = step
        for _ in range(2 + lasts):
            with contextlib.suppress(OSError):
                write_version(writer, "first")
        objects.step = lambda: None
        number = write_version(writer, "first")
        assert write_version(LogWriter(store_of(memory)), "second") > number
        assert {number: "first", number + 1: "second"}.items() <= owners(memory, folder).items()
        if not failures:
            return
    raise AssertionError("it never succeeds")


class Schedule:
    """Lets one of several threads run at a time, in a given order and then in turn."""

    def __init__(self, order: Sequence[int], threads: int) -> None:
        self._order, self._living = list(order), set(range(threads))
        self._changed = threading.Condition()
        self._next = 0
        self._choose()

    def _choose(self) -> None:
        while self._order and (chosen := self._order.pop(0)) is not None:
            if chosen in self._living:
                self._next = chosen
                return
        if self._living:
            after = [one for one in sorted(self._living) if one > self._next]
            self._next = (after or sorted(self._living))[0]

    def step(self, thread: int) -> None:
        """Wait for the turn of a thread, and pass it on."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._next == thread, timeout=60)
            self._choose()
            self._changed.notify_all()

    def leave(self, thread: int) -> None:
        """A thread is done."""
        with self._changed:
            self._living.discard(thread)
            if self._next == thread:
                self._choose()
            self._changed.notify_all()


@PROPERTY
@example(order=[0, 0, 0, 1, 0, 1], versions=1)  # a claim that is gone when it is compared
@given(order=st.lists(st.integers(0, 1), max_size=80), versions=st.integers(1, 2))
def test_two_senders_never_both_win(order: list[int], versions: int, folder: Path) -> None:
    """In whatever order their requests reach the store: one of them continues from the other."""
    memory, schedule = MemoryStore(), Schedule(order, 2)
    finished: dict[int, str] = {}
    out: set[str] = set()

    def send(thread: int) -> None:
        owner = f"sender{thread}"
        try:
            store = store_of(memory, lambda: schedule.step(thread))
            with contextlib.suppress(BlockingIOError, FileExistsError):
                writer = LogWriter(store)
                for _ in range(versions):
                    finished[write_version(writer, owner)] = owner
                return
            out.add(owner)
        finally:
            schedule.leave(thread)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(send, range(2)))
    visible = owners(memory, folder)
    assert finished.items() <= visible.items()
    # A version whose DONE was written, and whose sender found out afterwards that it is out.
    assert set(visible.values()) <= {*finished.values(), *out}
    by_number = [visible[version] for version in sorted(visible)]
    changes = sum(one != other for one, other in itertools.pairwise(by_number))
    assert changes <= 1
