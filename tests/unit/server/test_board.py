"""Items of the board as several HTTP processes of one engine see them, over two ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from delta_server import board
from delta_server.board import Item
from engine_ext.ranks.operations import GetItem, Operation
from tests.support.endpoint_rig import Rig


class Counts(msgspec.Struct, frozen=True):
    """A value that every change must find as the one before has left it."""

    total: int = 0
    by_process: dict[str, int] = {}


def count(process: str, counts: Counts) -> Counts:
    mine = counts.by_process.get(process, 0) + 1
    return Counts(counts.total + 1, {**counts.by_process, process: mine})


@pytest.fixture
def items(rig: Rig) -> Iterator[list[Item[Counts]]]:
    """The item of two processes; at the end all ranks must have the same."""
    yield [Item(rig.engine, "counts", Counts) for _ in range(2)]
    first, *others = rig.run(rig.engine.call(GetItem(key="counts")))
    assert all(other == first for other in others)


def test_a_process_sees_what_another_has_put(rig: Rig, items: list[Item[Counts]]) -> None:
    one, other = items
    assert rig.run(one.read()) == Counts()
    assert rig.run(one.update(lambda counts: count("a", counts))) == Counts(1, {"a": 1})
    assert other.value == Counts()
    assert rig.run(other.read()) == Counts(1, {"a": 1})


def test_changes_at_once_are_all_kept(rig: Rig, items: list[Item[Counts]]) -> None:
    async def add(number: int) -> None:
        process = "ab"[number % 2]
        await items[number % 2].update(
            lambda counts: count(process, counts),
            append=lambda before: Counts(before.total),
            most=15,
        )

    async def add_all() -> None:
        await asyncio.gather(*map(add, range(20)))

    rig.run(add_all())
    assert rig.run(items[0].read()) == Counts(20, {"a": 10, "b": 10})
    entries = rig.run(items[1].entries())
    assert [entry["total"] for entry in entries] == [*range(5, 20)]


def test_one_of_two_puts_at_once_is_refused(rig: Rig, items: list[Item[Counts]]) -> None:
    async def both() -> list[bool]:
        return list(await asyncio.gather(*(item.try_put(Counts(7)) for item in items)))

    assert sorted(rig.run(both())) == [False, True]
    assert [item.value for item in items] == [Counts(7), Counts(7)]


def test_a_change_is_one_call_while_no_other_process_writes(
    rig: Rig, items: list[Item[Counts]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    original = rig.engine.call

    async def record(request: Operation[Any]) -> object:
        calls.append(type(request).__name__)
        return await original(request)

    monkeypatch.setattr(rig.engine, "call", record)
    for _ in range(3):
        rig.run(items[0].update(lambda counts: count("a", counts)))
    assert calls == ["PutItem"] * 3
    assert rig.run(items[1].update(lambda counts: count("b", counts))).total == 4
    assert calls[3:] == ["PutItem"] * 2


def test_one_of_two_processes_gets_the_lease(rig: Rig, items: list[Item[Counts]]) -> None:

    async def both() -> list[bool]:
        return list(await asyncio.gather(*(item.acquire() for item in items)))

    granted = rig.run(both())
    assert sorted(granted) == [False, True]
    winner = granted.index(True)
    assert [item.holder for item in items] == [items[winner].name] * 2
    rig.run(items[1 - winner].release())  # it has none
    assert not rig.run(items[1 - winner].acquire())
    rig.run(items[winner].release(Counts(3)))
    assert rig.run(items[1 - winner].acquire())
    assert items[1 - winner].value == Counts(3)


def test_a_dead_process_loses_its_lease_to_one(
    rig: Rig, items: list[Item[Counts]], monkeypatch: pytest.MonkeyPatch
) -> None:
    third = Item(rig.engine, "counts", Counts)
    assert rig.run(third.acquire(Counts(2)))
    monkeypatch.setattr(board, "is_alive", lambda name: name != third.name)

    async def both() -> list[bool]:
        return list(await asyncio.gather(*(item.acquire() for item in items)))

    assert sorted(rig.run(both())) == [False, True]
    assert [item.value for item in items] == [Counts(2), Counts(2)]


class Restarting:
    """An engine whose ranks can be replaced by others that have just started."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig

    async def call(self, request: Any) -> Any:
        return await self.rig.engine.call(request)


def test_ranks_that_were_restarted_have_an_empty_board(make_rig: Callable[..., Rig]) -> None:
    engine: Any = Restarting(make_rig())
    item = Item(engine, "counts", Counts)
    for _ in range(3):
        engine.rig.run(item.update(lambda counts: count("a", counts)))
    engine.rig = make_rig()
    changed = engine.rig.run(item.update(lambda counts: count("a", counts)))
    assert changed == Counts(1, {"a": 1})
