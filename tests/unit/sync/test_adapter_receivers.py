"""Adapters on two ranks, with the HTTP side that calls them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine_ext.ranks import ENGINE
from engine_ext.ranks import operations as ops
from tests.support.delta_bodies import VERSION, delta_part, full_part
from tests.support.endpoint_rig import Rig
from tests.support.in_process_engine import RANKS
from tests.support.present import present
from tests.support.served_models import delta_between, dense_delta, one_part
from tests.support.toy_adapters import (
    A,
    B,
    Tensors,
    ToyAdapters,
    fresh_adapter,
    same_adapter,
    with_adapters,
)

BASE = fresh_adapter()


def step(tensors: Tensors, by: float = 3) -> Tensors:
    """The tensors with some other elements."""
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in changed.values():
        tensor.view(-1)[1::3] += by
    return changed


NEXT = step(BASE)


def part(old: Tensors, new: Tensors, version: int = 1, **metadata: Any) -> bytes:
    """One part that makes one adapter of another."""
    metadata = {"base_version": version - 1, **metadata}
    deltas = [delta_between(name, old[name], new[name]) for name in (A,)]
    return one_part(deltas, current_version=version, **metadata)


def only_a(new: Tensors, old: Tensors = BASE) -> Tensors:
    return {A: new[A], B: old[B]}


@pytest.fixture
def ranks(rig: Rig) -> list[ToyAdapters]:
    return with_adapters(rig, "one", "two")


def installed(ranks: list[ToyAdapters], name: str, tensors: Tensors) -> bool:
    """Whether every rank generates with these tensors, and keeps them."""
    kept = [adapters.stores[name].tensors for adapters in ranks]
    return all(
        same_adapter(adapters.installed[name], tensors) and same_adapter(dict(own), tensors)
        for adapters, own in zip(ranks, kept, strict=True)
    )


def error_of(response: Any) -> tuple[int, str, str]:
    error = response.json()["error"]
    return response.status_code, error["type"], error["engine_state"]


def versions(rig: Rig) -> dict[str, int]:
    return {one.name: one.version for one in present(rig.status().adapters)}


def test_a_delta_reaches_one_adapter_on_every_rank(rig: Rig, ranks: list[ToyAdapters]) -> None:
    response = rig.send(part(BASE, NEXT), adapter="one")
    assert response.json()["status"] == "committed", response.text
    assert installed(ranks, "one", only_a(NEXT))
    assert installed(ranks, "two", BASE)
    assert versions(rig) == {"one": 1, "two": 0}
    assert rig.engine.writes == [0] * RANKS
    assert rig.status().version.number == VERSION


def test_each_adapter_has_its_own_versions(rig: Rig, ranks: list[ToyAdapters]) -> None:
    for name in ("one", "two", "one"):
        before = only_a(ranks[0].installed[name])
        after = only_a(step(before))
        version = versions(rig)[name] + 1
        assert rig.send(part(before, after, version), adapter=name).status_code == 200
        assert installed(ranks, name, after)
    assert versions(rig) == {"one": 2, "two": 1}
    assert rig.send(delta_part()).json()["version"] == VERSION + 1
    assert versions(rig) == {"one": 2, "two": 1}


def test_fp32_tensors_and_whole_adapters(rig: Rig, ranks: list[ToyAdapters]) -> None:
    metadata = {"full": True, "num_parts": 2, "sync_id": "s", "current_version": 9}
    for number, name in enumerate((A, B)):
        body = one_part([dense_delta(name, NEXT[name])], part=number, **metadata)
        assert rig.send(body, adapter="one").status_code == 200
    assert installed(ranks, "one", NEXT)
    assert versions(rig)["one"] == 9


@pytest.mark.parametrize("failures", [1, RANKS])
def test_an_installation_that_fails_is_undone_everywhere(
    rig: Rig, ranks: list[ToyAdapters], failures: int
) -> None:
    for adapters in ranks[:failures]:
        adapters.fails = 1
    response = rig.send(part(BASE, NEXT), adapter="one")
    assert error_of(response) == (500, "WriteUndone", "unchanged")
    assert installed(ranks, "one", BASE)
    assert versions(rig)["one"] == 0
    assert not rig.engine.paused
    assert rig.send(part(BASE, NEXT), adapter="one").status_code == 200
    assert installed(ranks, "one", only_a(NEXT))


def test_a_rollback_installs_the_old_tensors(rig: Rig, ranks: list[ToyAdapters]) -> None:
    assert rig.send(part(BASE, NEXT), adapter="one").status_code == 200
    back = rig.post("/delta_rollback", params={"adapter": "one"})
    assert (back.json()["status"], back.json()["version"]) == ("rolled_back", 0)
    assert installed(ranks, "one", BASE)


# What ranks disagree about ------------------------------------------------------------------


def test_a_rank_without_the_adapter_votes_no(rig: Rig, ranks: list[ToyAdapters]) -> None:
    ranks[1].unload("one")
    response = rig.send(part(BASE, NEXT), adapter="one")
    assert error_of(response) == (422, "AdapterNotLoaded", "unchanged")
    assert same_adapter(ranks[0].installed["one"], BASE)
    assert rig.send(part(BASE, NEXT), adapter="two").status_code == 200


def test_ranks_that_have_read_different_bytes(rig: Rig, ranks: list[ToyAdapters]) -> None:
    ranks[1].load("one", NEXT)
    response = rig.send(part(BASE, NEXT), adapter="one")
    assert error_of(response) == (409, "Conflict", "unchanged")
    assert same_adapter(ranks[0].installed["one"], BASE)


def test_an_adapter_that_one_rank_has_loaded_again(rig: Rig, ranks: list[ToyAdapters]) -> None:
    assert rig.send(part(BASE, NEXT), adapter="one").status_code == 200
    ranks[1].load("one", BASE)
    response = rig.send(part(only_a(NEXT), BASE, 2), adapter="one")
    assert error_of(response) == (409, "Conflict", "unchanged")
    assert same_adapter(ranks[0].installed["one"], only_a(NEXT))
    ranks[0].load("one", BASE)
    assert versions(rig)["one"] == 0
    assert rig.send(part(BASE, NEXT), adapter="one").status_code == 200


def test_an_adapter_between_staging_and_commit(rig: Rig, ranks: list[ToyAdapters]) -> None:
    """A sync that was staged for the old tensors is not written to the new ones."""
    halves = [part(BASE, NEXT, part=n, num_parts=2, sync_id="s") for n in range(2)]
    assert rig.send(halves[0], adapter="one").json()["status"] == "staged"
    for adapters in ranks:
        adapters.load("one", NEXT)
    answer = rig.send(halves[1], adapter="one").json()
    assert answer.get("status") == "staged", answer
    assert installed(ranks, "one", NEXT)


# Uncertainty ---------------------------------------------------------------------------------


def test_an_adapter_that_cannot_be_restored_stops_everything(
    rig: Rig, ranks: list[ToyAdapters]
) -> None:
    ranks[1].fails = 2
    response = rig.send(part(BASE, NEXT), adapter="one")
    assert error_of(response) == (500, "CommitFailed", "uncertain")
    assert rig.is_paused()
    assert rig.status().health.state == "uncertain"
    assert rig.post("/v1/completions", json={}).status_code == 503
    for body, adapter in (
        (delta_part(), {}),
        (full_part(rig.engine.weights, VERSION + 1), {}),
        (part(BASE, NEXT), {"adapter": "two"}),
        (part(BASE, NEXT), {"adapter": "one"}),
    ):
        assert error_of(rig.send(body, **adapter)) == (503, "EngineUncertain", "uncertain")
    assert rig.is_paused()
    # It cannot be forgotten either.
    rig.run(rig.engine.call(ops.AbortSync(adapter="one", unloads=True)))
    body = one_part([dense_delta(n, t) for n, t in only_a(NEXT).items() if n == A])
    assert rig.send(body, adapter="one").status_code == 503
    for number, name in enumerate((A, B)):
        healing = {"full": True, "num_parts": 2, "part": number, "sync_id": "h"}
        body = one_part([dense_delta(name, NEXT[name])], current_version=2, **healing)
        assert rig.send(body, adapter="one").status_code == 200
    assert installed(ranks, "one", NEXT)
    assert not rig.engine.paused
    assert rig.status().health.state == "certain"
    assert rig.send(part(BASE, NEXT), adapter="two").status_code == 200


def test_an_uncertain_model_stops_adapters(rig: Rig, ranks: list[ToyAdapters]) -> None:
    assert rig.fail_commit().status_code == 500
    response = rig.send(part(BASE, NEXT), adapter="one")
    assert error_of(response) == (503, "EngineUncertain", "uncertain")
    assert rig.engine.paused
    assert rig.send(full_part(rig.engine.weights, VERSION + 2)).status_code == 200
    assert rig.send(part(BASE, NEXT), adapter="one").status_code == 200
    assert installed(ranks, "one", only_a(NEXT))


def test_the_lease_shows_an_uncertain_adapter(rig: Rig, ranks: list[ToyAdapters]) -> None:
    ranks[0].fails = 2
    rig.send(part(BASE, NEXT), adapter="one")
    request = ops.LeaseItem(key=ENGINE, holder="another process")
    for reply in rig.run(rig.engine.call(request)):
        assert reply.state.engine_state == "uncertain"


# Memory that is released ---------------------------------------------------------------------


def test_asleep_nothing_is_installed(rig: Rig, ranks: list[ToyAdapters]) -> None:
    assert rig.send(part(BASE, NEXT), adapter="one").status_code == 200
    for receiver in rig.engine.receivers:
        receiver.weights_released()
    for name, old, version in (("one", only_a(NEXT), 2), ("two", BASE, 1)):
        response = rig.send(part(old, step(old), version), adapter=name)
        assert error_of(response) == (409, "WeightsAsleep", "unchanged")
    rig.engine.set_asleep(False)
    assert rig.send(part(BASE, NEXT), adapter="two").status_code == 200
    assert installed(ranks, "two", only_a(NEXT))


def test_weights_that_something_else_has_replaced(rig: Rig, ranks: list[ToyAdapters]) -> None:
    """Those of the model; adapters are what they were."""
    for receiver in rig.engine.receivers:
        receiver.weights_replaced("a reload")
    assert error_of(rig.send(delta_part()))[1] == "BaseMismatch"
    assert rig.send(part(BASE, NEXT), adapter="one").status_code == 200


def test_an_unloaded_adapter_is_not_found(rig: Rig, ranks: list[ToyAdapters]) -> None:
    rig.run(rig.engine.call(ops.AbortSync(adapter="one", unloads=True)))
    assert error_of(rig.send(part(BASE, NEXT), adapter="one"))[1] == "AdapterNotLoaded"
    assert versions(rig) == {"two": 0}


def test_an_engine_without_adapters(rig: Rig) -> None:
    response = rig.send(part(BASE, NEXT), adapter="one")
    assert error_of(response) == (422, "AdapterNotLoaded", "unchanged")
    assert rig.status().adapters is None


def test_a_scan_finds_bytes_that_no_sync_has_written(rig: Rig, ranks: list[ToyAdapters]) -> None:
    assert rig.send(part(BASE, NEXT), adapter="one").status_code == 200
    query = {"adapter": "one", "scan": "true"}
    assert rig.get("/delta_digest", params=query).json()["corrupted"] == []
    with torch.no_grad():
        ranks[0].stores["one"].tensors[B][0, 0] = 77
    assert rig.get("/delta_digest", params=query).json()["corrupted"] == [B]
