"""The page that shows all HTTP processes of an engine which version it serves."""

from __future__ import annotations

import asyncio

import pytest

from delta_server import served_versions
from delta_server.board import SERVED, Item
from delta_server.served_versions import UNKNOWN, ServedFiles, ServedVersions
from engine_ext.settings import Settings
from tests.support.in_process_engine import Engine


@pytest.fixture
def engine() -> Engine:
    engine = Engine(Settings())
    engine.shared = True
    return engine


def process(engine: Engine, version: int = 1) -> ServedVersions:
    """What a process of an engine knows that has just started."""
    served = ServedVersions()
    asyncio.run(served.share(engine, version, "digest"))
    return served


def test_all_processes_see_a_change(engine: Engine) -> None:
    one, two = process(engine), process(engine)
    since = one.changes
    two.move(2, "other")
    assert (one.version, two.version) == (2, 2)
    assert one.left(since, 1, 1)
    assert not one.left(since, 1, 2)


def test_a_later_process_joins_the_others(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the one that has made the page is dead."""
    one, two = process(engine), process(engine)
    item = Item(engine, SERVED, ServedFiles)
    [first, _] = asyncio.run(item.read()).paths
    monkeypatch.setattr(served_versions, "is_alive", lambda name: name != first)
    two.move(2, "other")
    three = process(engine)
    assert (one.version, three.version) == (2, 2)
    two.move(3, "third")
    assert three.version == 3
    assert first not in asyncio.run(item.read()).paths


def test_the_page_of_dead_processes_is_not_used(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    process(engine).move(2, "other")
    monkeypatch.setattr(served_versions, "is_alive", lambda name: False)
    assert process(engine, version=5).version == 5


def test_processes_that_start_at_once_share_a_page(engine: Engine) -> None:
    both = [ServedVersions(), ServedVersions()]

    async def start() -> None:
        await asyncio.gather(*(one.share(engine, 1, "") for one in both))

    asyncio.run(start())
    both[0].move(9, "other")
    assert both[1].version == 9


def test_a_version_between_two_looks_counts() -> None:
    served = ServedVersions()
    served.move(1, "a")
    since = served.changes
    served.move(2, "b")
    served.move(1, "a")
    assert served.left(since, 1, 1)
    assert not served.left(served.changes, 1, 1)


def test_too_many_changes_count_as_left() -> None:
    served = ServedVersions()
    for version in range(200):
        served.move(version, "")
    assert served.left(0, 0, 500)
    assert not served.left(served.changes - 10, 0, 500)


def test_the_same_weights_are_no_change() -> None:
    served = ServedVersions()
    served.move(1, "a")
    since = served.changes
    served.move(1, "a")
    assert served.changes == since


def test_a_number_with_another_content_is_left() -> None:
    served = ServedVersions()
    served.move(1, "a")
    since = served.changes
    served.move(1, "b")
    assert served.version == 1
    assert served.left(since, 0, 9)


def test_a_process_that_dies_in_a_write_leaves_doubt() -> None:
    served = ServedVersions()
    served.move(1, "a")
    since = served.changes
    served.begin_write()
    served.see(1)  # the next process holds the lease
    assert served.version == 1
    assert served.left(since, 0, 9)


def test_a_refused_write_leaves_no_doubt() -> None:
    served = ServedVersions()
    served.move(1, "a")
    since = served.changes
    served.begin_write()
    served.keep()
    served.see(1)
    assert served.changes == since


def test_lost_weights_are_of_no_version() -> None:
    served = ServedVersions()
    served.move(1, "a")
    since = served.changes
    served.lose()
    assert served.version == UNKNOWN
    assert served.left(since, 0, 9)
    served.see(1)
    assert served.version == 1
