"""Results that a sync keeps between its rebuilds and its commit, and the parts they are from."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from engine_ext.conformance.toy_models import Checkpoint
from engine_ext.format.identity import PartId
from tests.support.quantised_engine import Serving, refusal
from tests.support.rank_engine import errors_of, part_id
from tests.support.served_models import delta_between, one_part
from tests.support.toy_quantised import (
    Everything,
    Int8,
    Layer,
    Model,
    Packed,
    linear_shapes,
    one_layer,
)
from tests.unit.sync.test_post_load import Drifting, target_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_collections")]


class TwoLayers(Model):
    shapes: ClassVar = linear_shapes("one", "two")

    def build(self, rank: int, ranks: int) -> None:
        self.one, self.two = Layer(Int8(), rank=rank), Layer(Int8(), rank=rank)


def two_parts(serving: Serving, seed: int, **more: Any) -> tuple[dict[str, Any], list[bytes]]:
    target = target_of(serving, seed=seed)
    shares = [n for n in target if n.startswith("one")], [n for n in target if n[:3] != "one"]
    common = {"current_version": 1, "num_parts": 2, "sync_id": "a", **more}
    bodies = [
        one_part([delta_between(n, serving.current[n], target[n]) for n in names], part=k, **common)
        for k, names in enumerate(shares)
    ]
    return target, bodies


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("number", [0, 1])
def test_another_part_after_preparing_is_prepared_again(
    tmp_path: Path, ranks: int, number: int
) -> None:
    """One part is taken back and sent with other bytes: nothing rebuilt from the first is used."""
    serving = Serving(TwoLayers, tmp_path, ranks=ranks)
    engine = serving.engine
    first, bodies = two_parts(serving, 1)
    other, others = two_parts(serving, 50)
    for body in bodies:
        errors_of(engine.stage(part_id(body), body), none=True)
    engine.settle(part_id(bodies[number]), staged=False)
    taken: list[PartId] = [part_id(others[number]), part_id(bodies[1 - number])]
    begun = engine.begin(taken[0], engine.spool(others[number]))
    assert {answer["ok"]["admission"] for answer in begun} == {"new"}
    errors_of(engine.poll(taken[0]), none=True)
    settled = errors_free(engine.settle(taken[0], staged=True))
    base: dict[str, Any] = {"complete": True, "folder": None, "files": []}
    assert settled == [{"complete": True, "done": False, "rebuilt": 0, "base": base}] * ranks
    assert "not prepared" in refusal(engine.commit(taken[0]))
    while not all(answer["ok"]["done"] for answer in engine.prepare(taken[0])):
        pass
    errors_of(engine.commit(taken[0]), none=True)
    mixed = {n: t for n, t in first.items() if n.startswith("one") == (number == 1)}
    mixed |= {n: t for n, t in other.items() if n.startswith("one") == (number == 0)}
    serving.version, serving.current = 1, serving.current | mixed
    serving.assert_fresh()


def errors_free(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    errors_of(answers, none=True)
    return [answer["ok"] for answer in answers]


def alive(serving: Serving) -> list[weakref.ref[Any]]:
    """What every rank has staged: the values sent, and what came out of the rebuilds."""
    found: list[Any] = []
    for receiver in serving.engine.receivers:
        for future in receiver._staging._parts.values():
            part = future.result()
            found += [write.new for param in part.params for write in param.writes]
            for made in part.totals.modules.values() if part.totals else ():
                found += [getattr(write.new, "value", write.new) for write in made.writes]
    return [weakref.ref(one) for one in found]


def on_ranks(serving: Serving, method: str, *arguments: object) -> None:
    for receiver in serving.engine.receivers:
        getattr(receiver, method)(*arguments)


ENDS: dict[str, Callable[[Serving, Checkpoint], object]] = {
    "dropped": lambda serving, before: serving.engine.call("abort"),
    "rolled back": lambda serving, before: serving.rollback(before),
    "put to sleep": lambda serving, before: on_ranks(serving, "weights_released"),
    "reloaded": lambda serving, before: on_ranks(serving, "weights_replaced", "it"),
}


@pytest.mark.host_memory
def test_nothing_is_kept_of_a_prepared_sync(tmp_path: Path) -> None:
    serving = Serving(Everything, tmp_path, ranks=2)
    for seed, (end, do) in enumerate(ENDS.items()):
        previous = dict(serving.current)
        errors_of(serving.sync(target_of(serving, seed=100 * seed)), none=True)
        errors_of(serving.stage(serving.body(target_of(serving, seed=100 * seed + 30))), none=True)
        kept = alive(serving)
        assert len(kept) > 40, end
        before = serving.served()
        do(serving, previous)
        gc.collect()
        assert not [one for one in kept if one() is not None], end
        assert (serving.served() != before) == (end == "rolled back"), end
        if end == "put to sleep":
            on_ranks(serving, "set_asleep", False)


@pytest.mark.host_memory
def test_replaced_prepared_sync_keeps_nothing(tmp_path: Path) -> None:
    serving = Serving(Everything, tmp_path, ranks=2)
    errors_of(serving.stage(serving.body(target_of(serving))), none=True)
    kept, before = alive(serving), serving.served()
    target = target_of(serving, seed=30)
    deltas = [delta_between(n, serving.current[n], t) for n, t in target.items()]
    body = one_part(deltas, sync_id="b", current_version=1)
    early = serving.engine.begin(part_id(body), serving.engine.spool(body))
    assert {e["type"] for e in errors_of(early)} == {"SyncInProgress"}
    serving.engine.now += 61
    errors_of(serving.engine.stage(part_id(body), body), none=True)
    gc.collect()
    assert not [one for one in kept if one() is not None]
    assert serving.served() == before
    errors_of(serving.engine.commit(part_id(body)), none=True)
    serving.version, serving.current = 1, serving.current | target
    serving.assert_fresh()


@pytest.mark.host_memory
def test_of_a_committed_sync_only_what_undoes_it_is_kept(tmp_path: Path) -> None:
    """And of its handles the new ones, which are served."""
    serving = Serving(one_layer(Packed), tmp_path, ranks=2)
    body = serving.body(target_of(serving))
    errors_of(serving.stage(body), none=True)
    kept = alive(serving)
    first = [weakref.ref(model.lin.handle) for model in serving.models]
    errors_of(serving.engine.commit(part_id(body)), none=True)
    gc.collect()
    served = [weakref.ref(model.lin.handle) for model in serving.models]
    assert [one for one in kept if one() is not None] == served
    assert all(one() is not None for one in first)  # a rollback takes it
    serving.version, serving.current = 1, serving.current | target_of(serving)
    errors_of(serving.sync(target_of(serving, seed=9)), none=True)
    gc.collect()
    assert not [one for one in first if one() is not None]
    assert all(one() is not None for one in served)


def test_nothing_is_kept_of_a_rebuild_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even in a cycle of references."""
    serving = Serving(one_layer(Drifting), tmp_path)
    made: list[weakref.ref[Any]] = []

    def fail(layer: Any) -> None:
        layer.itself = layer
        made.extend([weakref.ref(layer.weight), weakref.ref(layer.weight_scale)])
        raise ValueError("no memory left")

    gc.disable()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Drifting, "drift", staticmethod(fail))
            assert "no memory left" in refusal(serving.sync(target_of(serving)))
        assert len(made) == 2
        assert not [one for one in made if one() is not None]
    finally:
        gc.enable()
