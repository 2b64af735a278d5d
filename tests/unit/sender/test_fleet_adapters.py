"""`MultiSender` with ``commit="all_or_none"`` for a LoRA adapter that all engines have loaded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from delta_sender import GroupAborted, MultiSender, SyncError
from tests.support.delta_bodies import VERSION
from tests.support.fake_engine import copied, train
from tests.support.fleet_rig import COMMIT, FleetRig
from tests.support.toy_adapters import (
    Tensors,
    ToyAdapters,
    fresh_adapter,
    same_adapter,
    with_adapters,
)
from tests.unit.sender.test_fleet import Answer, Dead, fresh_model

pytestmark = pytest.mark.slow

NAME = "tiny"
OPTIONS: dict[str, Any] = {"commit": "all_or_none", "commit_window": 5.0, "timeout": 5.0}


class AdapterFleet(FleetRig):
    """Engines that have loaded an adapter.

    Attributes:
        ranks: the adapters of each rank, by url.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.ranks: dict[str, list[ToyAdapters]] = {}
        super().__init__(folder, count)

    def start(self, url: str) -> None:
        super().start(url)
        self.ranks[url] = with_adapters(self.rigs[url], NAME)

    def unload(self, url: str) -> None:
        """Unload the adapter, as the engine does when it is asked to."""
        for adapters in self.ranks[url]:
            adapters.unload(NAME)

    def installed(self, tensors: Tensors) -> list[bool]:
        """Whether every engine generates with these tensors, on all ranks."""
        return [
            all(same_adapter(adapters.installed[NAME], tensors) for adapters in ranks)
            for ranks in self.ranks.values()
        ]

    def versions(self) -> list[int]:
        return [rig.status(adapter=NAME).version.number for rig in self.rigs.values()]

    def settle_adapter(self, url: str) -> bool:
        rig = self.rigs[url]
        settled: bool = rig.run(rig.service.for_adapter(NAME).fleet.settle())
        return settled


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[AdapterFleet]:
    made = AdapterFleet(tmp_path, 3)
    yield made
    made.close()


def sender_of(fleet: FleetRig, base: Tensors, answer: Answer | None = None, **options: Any) -> Any:
    client = httpx.Client(transport=httpx.MockTransport(answer or fleet.answer))
    given = {**OPTIONS, "adapter": NAME, **options}
    return MultiSender(fleet.urls, base.items(), client=client, **given)


def states(sender: MultiSender) -> list[str]:
    return [one.state for one in sender.outcomes.values()]


def test_all_engines_commit_an_adapter(fleet: AdapterFleet) -> None:
    """The model's own fleet commits in between."""
    tensors, model = fresh_adapter(), fresh_model()
    client = httpx.Client(transport=httpx.MockTransport(fleet.answer))
    with (
        sender_of(fleet, tensors) as sender,
        MultiSender(fleet.urls, model.items(), client=client, **OPTIONS) as of_model,
    ):
        for step in range(2):
            train(tensors, step)
            reports = sender.sync(tensors.items())
            assert [r.version for r in reports.values()] == [step + 1] * 3
            assert states(sender) == ["committed"] * 3
            assert fleet.installed(tensors) == [True] * 3
            train(model, step)
            assert len(of_model.sync(model.items())) == 3
            versions = [fleet.status(url).version.number for url in fleet.urls]
            assert versions == [VERSION + step + 1] * 3


def test_engine_without_the_adapter_keeps_all_back(fleet: AdapterFleet) -> None:
    tensors, gone = fresh_adapter(), fleet.urls[1]
    with sender_of(fleet, tensors) as sender:
        train(tensors)
        sender.sync(tensors.items())
        before = copied(tensors)
        train(tensors, 1)
        fleet.unload(gone)
        with pytest.raises(GroupAborted):
            sender.sync(tensors.items())
        assert states(sender) == ["aborted", "refused", "aborted"]
        assert fleet.installed(before)[::2] == [True, True]
        for adapters in fleet.ranks[gone]:
            adapters.load(NAME, before)
        sender.sync(tensors.items())
        assert fleet.installed(tensors) == [True] * 3
        assert len({*fleet.versions()}) == 1


@pytest.mark.parametrize("number", [0, 2, 4, 6, 8])
def test_trainer_of_an_adapter_dies_at_any_step(fleet: AdapterFleet, number: int) -> None:
    """All engines end alike, and the model's weights are as before."""
    tensors, is_dead, lock, steps = fresh_adapter(), threading.Event(), threading.Lock(), 0
    before = copied(tensors)

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal steps
        if request.url.path == COMMIT:
            with lock:
                steps += 1
                if steps == number + 1:
                    is_dead.set()
        if is_dead.is_set():
            raise Dead
        return fleet.answer(request)

    dead = sender_of(fleet, tensors, answer, commit_window=0.2)
    train(tensors)
    with pytest.raises((SyncError, Dead)):
        dead.sync(tensors.items())
    assert all(fleet.settle_adapter(url) for url in fleet.urls)
    assert len({*fleet.versions()}) == 1
    held = tensors if fleet.versions()[0] else before
    assert fleet.installed(held) == [True] * 3
    assert [fleet.status(url).version.number for url in fleet.urls] == [VERSION] * 3
    with sender_of(fleet, held, takeover=True) as sender:
        train(tensors, 1)
        assert len(sender.sync(tensors.items())) == 3
        assert fleet.installed(tensors) == [True] * 3


@pytest.mark.parametrize("recorded", [1, 3])
def test_engines_do_not_wait_for_an_unloaded_adapter(fleet: AdapterFleet, recorded: int) -> None:
    """An engine that has unloaded it has lost what it held, as one that was started again."""
    tensors, is_dead, lock, records = fresh_adapter(), threading.Event(), threading.Lock(), 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal records
        if is_dead.is_set():
            raise Dead
        given = fleet.answer(request)
        if request.url.path == COMMIT and b'"record"' in request.read():
            with lock:
                records += 1
                if records == recorded:
                    is_dead.set()
                    raise Dead
        return given

    dead = sender_of(fleet, tensors, answer, commit_window=0.2)
    before = copied(tensors)
    train(tensors)
    with pytest.raises((SyncError, Dead)):
        dead.sync(tensors.items())
    fleet.unload(fleet.urls[1])
    assert all(fleet.settle_adapter(url) for url in fleet.urls)
    ends = [fleet.rigs[url].status(adapter=NAME).version.number for url in fleet.urls[::2]]
    assert ends in ([0, 0], [1, 1])
    held = tensors if ends[0] else before
    kept = [fleet.ranks[url] for url in fleet.urls[::2]]
    assert all(same_adapter(one.installed[NAME], held) for ranks in kept for one in ranks)
