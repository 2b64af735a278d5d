"""Objects in a real store are read as they were written, through every transient fault."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_ext.log import Objects
from engine_ext.log.objects import RANGE_BYTES
from engine_ext.resources import RateLimit
from tests.support.object_stores import StoreServer, rclone_gateway
from tests.support.store_proxy import Fault, StoreProxy

pytestmark = pytest.mark.slow

SIZE = 2 * RANGE_BYTES + 12345
CONTENT = os.urandom(SIZE)


def no_sleep(seconds: float) -> None:
    """Repeats follow at once."""


@pytest.fixture
def store(store_url: str) -> Objects:
    return Objects(store_url, sleep=no_sleep)


@pytest.fixture
def proxy(
    store_server: StoreServer, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StoreProxy]:
    with StoreProxy(store_server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.server.endpoint)
        yield proxy


@pytest.fixture
def by_proxy(proxy: StoreProxy, store_url: str) -> Objects:
    """The same objects as `store`, read through the proxy."""
    return Objects(store_url, sleep=no_sleep)


def fetched(store: Objects, name: str, size: int, path: Path) -> bytes:
    with path.open("w+b") as file:
        store.fetch(name, size, file)
    return path.read_bytes()


def test_objects_are_listed_read_and_deleted(store: Objects) -> None:
    assert store.list() == []
    store.put("b/2", b"two")
    store.put("a/1", b"one")
    store.put("ab/3", b"three")
    assert [(one.name, one.size) for one in store.list()] == [("a/1", 3), ("ab/3", 5), ("b/2", 3)]
    assert [one.name for one in store.list("a")] == ["a/1"]
    [before] = store.list("b")
    store.put("b/2", b"other")
    [after] = store.list("b")
    assert (after.size, after.tag != before.tag) == (5, True)
    assert store.read("b/2", 5) == b"other"
    with pytest.raises(OSError, match="over 4 bytes"):
        store.read("b/2", 4)
    store.delete(["b/2", "b/2", "none"])
    with pytest.raises(FileNotFoundError, match="b/2"):
        store.read("b/2", 5)


@pytest.mark.parametrize("size", [1, RANGE_BYTES - 1, RANGE_BYTES, RANGE_BYTES + 1, SIZE])
def test_ranges_are_put_together(store: Objects, tmp_path: Path, size: int) -> None:
    store.put("part", CONTENT[:size])
    assert fetched(store, "part", size, tmp_path / "file") == CONTENT[:size]


def test_an_object_is_created_once(store: Objects) -> None:
    store.create("one", b"mine")
    store.create("one", b"mine")  # as if the answer to the first one had been lost
    with pytest.raises(FileExistsError):
        store.create("one", b"yours")
    assert store.read("one", 9) == b"mine"
    store.require_creates()
    assert [one.name for one in store.list()] == ["one"]


def test_a_store_that_creates_twice_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rclone_gateway(tmp_path) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(OSError, match="use a store with conditional writes") as refused:
            Objects("s3://test/log").require_creates()
    assert refused.value.errno == errno.ENOTSUP


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=503),
        Fault(status=500),
        Fault(cut_after=1000),
        Fault(seconds=0.2),
        Fault(slow_s=0.05),
    ],
)
def test_faults_that_pass_lose_nothing(
    store: Objects, by_proxy: Objects, proxy: StoreProxy, tmp_path: Path, fault: Fault
) -> None:
    store.put("part", CONTENT)
    proxy.faults = lambda method, path, number: fault if number < 2 else None
    assert fetched(by_proxy, "part", SIZE, tmp_path / "file") == CONTENT


def test_only_the_range_that_failed_is_read_again(
    store: Objects, by_proxy: Objects, proxy: StoreProxy, tmp_path: Path
) -> None:
    store.put("part", CONTENT)
    proxy.faults = lambda method, path, number: Fault(cut_after=99) if number == 1 else None
    assert fetched(by_proxy, "part", SIZE, tmp_path / "file") == CONTENT
    assert proxy.reads("part") == 3 + 1


def test_a_store_that_stays_away_is_an_error(
    store: Objects, by_proxy: Objects, proxy: StoreProxy, tmp_path: Path
) -> None:
    store.put("part", CONTENT)
    proxy.faults = lambda method, path, number: Fault(cut_after=99)
    with pytest.raises(OSError, match="part") as failed:
        fetched(by_proxy, "part", SIZE, tmp_path / "file")
    assert failed.value.errno == errno.EIO


def test_a_missing_object_is_not_waited_for(
    by_proxy: Objects, proxy: StoreProxy, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError):
        fetched(by_proxy, "none", 10, tmp_path / "file")
    assert proxy.reads("none") == 1


def test_the_answer_to_a_creation_is_lost(
    store: Objects, by_proxy: Objects, proxy: StoreProxy
) -> None:
    """It was created all the same, and the repeat finds what it has written itself."""
    silent = Fault(silent=True)
    proxy.faults = lambda method, path, number: silent if method == "PUT" and not number else None
    by_proxy.create("claim", b"mine")
    assert store.read("claim", 9) == b"mine"


def test_no_more_bytes_are_asked_for_than_the_limit_allows(
    store: Objects, store_url: str, tmp_path: Path
) -> None:
    store.put("part", CONTENT)
    asked: list[int] = []

    class Counted(RateLimit):
        def wait(self, nbytes: int) -> None:
            asked.append(nbytes)

    limited = Objects(store_url, limit=Counted(1.0), streams=2)
    assert fetched(limited, "part", SIZE, tmp_path / "file") == CONTENT
    assert sorted(asked) == [SIZE % RANGE_BYTES, RANGE_BYTES, RANGE_BYTES]


def test_a_full_disk_is_not_the_stores_error(store: Objects) -> None:
    store.put("part", CONTENT)
    with open("/dev/full", "r+b", buffering=0) as full, pytest.raises(OSError) as failed:
        store.fetch("part", SIZE, full)
    assert (failed.value.errno, failed.value.filename) == (errno.ENOSPC, None)
