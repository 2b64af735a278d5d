"""The ranks of two replicas that know each other by a store alone."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from engine_ext.conformance.thread_group import Group, ThreadRanks
from engine_ext.ranks import RankGroup, ReplicaRanks, SingleRank, replicas

REPLICAS = 2


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Host a store, as a server's process does; return the number of replicas that share it."""
    monkeypatch.setenv(replicas.ENVIRONMENT, "")
    monkeypatch.setattr(replicas, "_hosted", [])
    replicas.host(REPLICAS)
    yield REPLICAS
    replicas._hosted.clear()


def on_all(size: int, run: Callable[[RankGroup], Any]) -> list[Any]:
    """Run something on all ranks of replicas of this size, each in a thread."""
    groups = [Group(size) for _ in range(REPLICAS)]

    def one(number: int) -> Any:
        replica, rank = divmod(number, size)
        group: Any = ThreadRanks(groups[replica], rank) if size > 1 else SingleRank()
        return run(replicas.among_replicas(replica, group))

    with ThreadPoolExecutor(REPLICAS * size) as pool:
        return list(pool.map(one, range(REPLICAS * size)))


@pytest.mark.usefixtures("hosted")
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_rank_gets_the_values_of_all(size: int) -> None:
    def run(ranks: RankGroup) -> Any:
        return ranks.rank, [ranks.all_gather([turn, ranks.rank]) for turn in range(5)]

    found = on_all(size, run)
    everyone = range(REPLICAS * size)
    assert [rank for rank, _ in found] == list(everyone)
    for _, turns in found:
        assert turns == [[[turn, rank] for rank in everyone] for turn in range(5)]


@pytest.mark.usefixtures("hosted")
def test_nothing_is_left_of_what_everyone_has_read() -> None:
    def run(ranks: RankGroup) -> int:
        for _ in range(20):
            ranks.all_gather("x" * 100)
        assert isinstance(ranks, ReplicaRanks)
        return int(ranks._store.num_keys())

    # The last two values of both, each with its chunk; their names, and the store's own key.
    assert max(on_all(1, run)) <= 2 * 2 * REPLICAS + REPLICAS + 1


@pytest.mark.slow
@pytest.mark.usefixtures("hosted")
@pytest.mark.parametrize("size", [1, 2])
def test_a_replica_that_does_not_come_is_waited_for_once(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "_TIMEOUT", datetime.timedelta(seconds=0.3))

    def run(ranks: RankGroup) -> list[str]:
        if ranks.rank >= size:
            return []
        messages = []
        for _ in range(2):
            with pytest.raises(RuntimeError, match="restart the engine") as caught:
                ranks.all_gather(None)
            messages.append(str(caught.value))
        return messages

    first, *others = on_all(size, run)
    assert "timeout" in first[0].lower()
    assert first[0] == first[1]
    assert others[: size - 1] == [first] * (size - 1)


@pytest.mark.usefixtures("hosted")
def test_a_forged_vote_is_refused() -> None:
    def run(ranks: RankGroup) -> str:
        assert isinstance(ranks, ReplicaRanks)
        if ranks.rank == 0:
            ranks._key = b"another key"
        with pytest.raises(RuntimeError, match="is not signed by it") as caught:
            ranks.all_gather("yes")
        return str(caught.value)

    assert on_all(1, run)


def test_the_store_is_on_this_host_alone(hosted: int) -> None:
    import psutil

    meeting = replicas._meeting()
    assert meeting is not None
    listening = [
        connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == meeting.port
    ]
    assert listening == ["127.0.0.1"]
    assert replicas.count() == hosted


def test_every_server_has_a_meeting_of_its_own(hosted: int) -> None:
    """Also two that one process starts, or one whose arguments it parses twice."""
    before = replicas._meeting()
    replicas.host(hosted)
    after = replicas._meeting()
    assert before is not None
    assert after is not None
    assert (before.port, before.key) != (after.port, after.key)
    replicas.host(1)
    assert replicas._meeting() is None


@pytest.mark.usefixtures("hosted")
def test_large_values() -> None:
    """Values have more bytes than the store takes at once."""
    found = on_all(1, lambda ranks: ranks.all_gather("x" * (9 << 20) + str(ranks.rank)))
    for values in found:
        assert [(len(value), value[-1]) for value in values] == [
            ((9 << 20) + 1, "0"),
            ((9 << 20) + 1, "1"),
        ]


@pytest.mark.usefixtures("hosted")
@pytest.mark.parametrize("value", [object(), "a name \udcff", 1 << 64], ids=["type", "text", "int"])
def test_a_value_that_cannot_travel_fails_on_all_at_once(
    value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "_TIMEOUT", datetime.timedelta(seconds=2))

    def run(ranks: RankGroup) -> str:
        with pytest.raises(RuntimeError, match="restart the engine") as caught:
            ranks.all_gather(value if ranks.rank == 0 else None)
        return str(caught.value)

    first, second = on_all(1, run)
    assert first == second


@pytest.mark.usefixtures("hosted")
def test_a_replica_comes_once(hosted: int) -> None:
    group: Any = SingleRank()
    replicas.among_replicas(0, group)
    with pytest.raises(RuntimeError, match="there is a replica 0 already"):
        replicas.among_replicas(0, group)
    with pytest.raises(RuntimeError, match="cannot meet the others"):
        replicas.among_replicas(hosted, group)


def test_without_replicas_there_is_the_group_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(replicas.ENVIRONMENT, raising=False)
    group: Any = SingleRank()
    assert replicas.among_replicas(0, group) is group
    assert replicas.count() == 1
    with pytest.raises(RuntimeError, match="cannot meet the others"):
        replicas.among_replicas(1, group)
