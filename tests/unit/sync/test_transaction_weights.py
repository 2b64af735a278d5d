"""Commits, undos and rollbacks with real weights, on every rank."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_ext.conformance import toy_models
from engine_ext.conformance.toy_models import ToyModel
from engine_ext.format import ParamDelta
from engine_ext.format.digest import Digest, tensor_digest
from engine_ext.placement import HostElements
from engine_ext.sync.staged import Write
from tests.support.rank_engine import Engine, errors_of, part_id
from tests.support.served_models import (
    base_checkpoint,
    bits,
    changed,
    delta_between,
    dense_delta,
    load,
    memory,
    one_part,
    serve_ranks,
    target_checkpoint,
)
from tests.unit.sync.recorded_ranks import lose_sync


class Sharded:
    """Two ranks that each hold half of a tensor, with real appliers."""

    models: tuple[type[ToyModel], ...] = (toy_models.RowShardFirst, toy_models.RowShard)

    def __init__(self, folder: Path, apply: str = "masked") -> None:
        self.base = base_checkpoint(toy_models.RowShard)
        self.served = serve_ranks(self.models, self.base, apply=apply)
        self.engine = Engine([served.applier for served in self.served], folder)

    def memories(self) -> list[dict[str, bytes]]:
        return [memory(served.model) for served in self.served]

    def fresh(self, checkpoint: toy_models.Checkpoint) -> list[dict[str, bytes]]:
        return [memory(load(model, checkpoint)) for model in self.models]

    def sparse(self, target: toy_models.Checkpoint, **metadata: Any) -> bytes:
        delta = delta_between("weight", self.base["weight"], target["weight"])
        return one_part([delta], **metadata)


@pytest.fixture
def sharded(tmp_path: Path) -> Sharded:
    return Sharded(tmp_path)


@pytest.fixture
def scattered(tmp_path: Path) -> Sharded:
    return Sharded(tmp_path, "scatter")


def test_shards_end_as_freshly_loaded(sharded: Sharded) -> None:
    target = target_checkpoint(sharded.base, ["weight"])
    data = sharded.sparse(target)
    errors_of(sharded.engine.apply(part_id(data), data), none=True)
    assert sharded.memories() == sharded.fresh(target)


def test_a_refused_sync_changes_no_shard(sharded: Sharded) -> None:
    before = sharded.memories()
    data = one_part([dense_delta("weight", torch.ones(3, 4, dtype=torch.bfloat16))])
    answers = sharded.engine.stage(part_id(data), data)
    assert [e["tensor"] for e in errors_of(answers)] == ["weight"] * 2
    assert sharded.memories() == before


def test_a_rank_without_a_part_keeps_the_others_from_writing(sharded: Sharded) -> None:
    before = sharded.memories()
    data = sharded.sparse(target_checkpoint(sharded.base, ["weight"]))
    sharded.engine.stage(part_id(data), data)
    lose_sync(sharded.engine.receivers[1])
    errors_of(sharded.engine.commit(part_id(data)))
    assert sharded.memories() == before


def test_mixed_weights_are_healed_by_a_full_sync(
    sharded: Sharded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 breaks while rank 0 has written: both know, and a full sync makes both right."""
    target = target_checkpoint(sharded.base, ["weight"])
    data = sharded.sparse(target)
    sharded.engine.stage(part_id(data), data)
    with monkeypatch.context() as broken:
        broken.setattr(sharded.served[1].applier, "write", fails)
        broken.setattr(sharded.served[0].applier, "undo", fails)
        for error in errors_of(sharded.engine.commit(part_id(data))):
            assert error["engine_state"] == "uncertain"
    [first, second] = sharded.memories()
    assert first == sharded.fresh(target)[0]
    assert second == sharded.fresh(sharded.base)[1]

    all_of_it = one_part([dense_delta("weight", target["weight"])], full=True)
    errors_of(sharded.engine.apply(part_id(all_of_it), all_of_it), none=True)
    assert sharded.memories() == sharded.fresh(target)
    assert [s["engine_state"] for s in sharded.engine.status()] == ["certain"] * 2


def fails(*arguments: object) -> None:
    raise RuntimeError("the loader broke")


def test_a_write_that_fails_on_one_rank_is_undone_on_all(
    sharded: Sharded, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sharded.memories()
    target = target_checkpoint(sharded.base, ["weight"])
    data = sharded.sparse(target)
    sharded.engine.stage(part_id(data), data)
    with monkeypatch.context() as broken:
        broken.setattr(sharded.served[1].applier, "write", fails)
        for error in errors_of(sharded.engine.commit(part_id(data))):
            assert (error["type"], error["engine_state"]) == ("WriteUndone", "unchanged")
            assert "the loader broke" in error["message"]
    assert sharded.memories() == before
    errors_of(sharded.engine.apply(part_id(data), data), none=True)
    assert sharded.memories() == sharded.fresh(target)


def corrupt(scattered: Sharded, rank: int, element: int) -> None:
    live = next(iter(scattered.served[rank].applier.plan.targets["weight"])).segment.live_view()
    live.view(torch.int16).reshape(-1)[element] ^= 0x100


@pytest.mark.host_memory
def test_weight_changed_after_staging_refuses_on_all_ranks(
    scattered: Sharded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the pass that writes is the one that finds it: every rank has its bits again."""
    monkeypatch.setattr(HostElements, "seems_to_hold", lambda self, bits: True)
    target = {"weight": changed(scattered.base["weight"], 3, 1.0)}
    for ranks, element in product([[0], [1], [0, 1]], [0, 5, 11]):
        data = scattered.sparse(target, sync_id=f"{ranks} {element}")
        scattered.engine.stage(part_id(data), data)
        for rank in ranks:
            corrupt(scattered, rank, element)
        before = scattered.memories()
        for error in errors_of(scattered.engine.commit(part_id(data))):
            assert (error["type"], error["engine_state"]) == ("BaseMismatch", "unchanged")
            assert "between staging and commit" in error["message"]
        assert scattered.memories() == before, (ranks, element)
        states = {(s["version"], s["engine_state"], s["staged"]) for s in scattered.engine.status()}
        assert states == {(0, "certain", None)}, "what was staged is of other old values"

        for rank in ranks:
            corrupt(scattered, rank, element)
        errors_of(scattered.engine.apply(part_id(data), data), none=True)
        assert scattered.memories() == scattered.fresh(target), (ranks, element)
        errors_of(scattered.engine.call("rollback"), none=True)
        assert scattered.memories() == scattered.fresh(scattered.base), (ranks, element)


@pytest.mark.host_memory
@pytest.mark.parametrize("sampled", [True, False])
def test_sampled_changed_weight_is_refused_before_writes(
    scattered: Sharded, sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = {"weight": changed(scattered.base["weight"], 3, 1.0)}
    data = scattered.sparse(target)
    scattered.engine.stage(part_id(data), data)
    corrupt(scattered, 1, 0)
    puts = []
    put = Write.put

    def noted(write: Write, compares: bool) -> None:
        puts.append(write)
        put(write, compares)

    monkeypatch.setattr(Write, "put", noted)
    if not sampled:
        monkeypatch.setattr(HostElements, "seems_to_hold", lambda self, bits: True)
    assert {e["type"] for e in errors_of(scattered.engine.commit(part_id(data)))} == {
        "BaseMismatch"
    }
    assert bool(puts) is not sampled


@pytest.mark.host_memory
@pytest.mark.parametrize(
    ("broken", "kind", "state"),
    [("undo", "CommitFailed", "uncertain"), ("write", "WriteUndone", "unchanged")],
)
def test_a_changed_weight_and_another_failure(
    scattered: Sharded, broken: str, kind: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a rank cannot undo, the weights are mixed; if one could not write, that is the error."""
    data = scattered.sparse({"weight": changed(scattered.base["weight"], 3, 1.0)})
    scattered.engine.stage(part_id(data), data)
    corrupt(scattered, 1, 5)
    before = scattered.memories()
    monkeypatch.setattr(HostElements, "seems_to_hold", lambda self, bits: True)
    monkeypatch.setattr(scattered.served[0].applier, broken, fails)
    for error in errors_of(scattered.engine.commit(part_id(data))):
        assert (error["type"], error["engine_state"]) == (kind, state)
        assert any("BaseMismatch" in text for text in error["failed"])
    assert (scattered.memories() == before) is (broken == "write")


def test_a_full_sync_heals_a_corrupted_weight(sharded: Sharded) -> None:
    """Its digest is of what it writes; what lay there before is of no account."""
    target = target_checkpoint(sharded.base, ["weight"])
    live = next(iter(sharded.served[0].applier.plan.targets["weight"])).segment.live_view()
    live.view(torch.int16).reshape(-1)[0] ^= 1
    digest = tensor_digest("weight", bits(target["weight"])).hex()
    healing = one_part([dense_delta("weight", target["weight"])], full=True, digest_after=digest)
    errors_of(sharded.engine.apply(part_id(healing), healing), none=True)
    assert sharded.memories() == sharded.fresh(target)
    shares = [Digest.parse(status["digest"]) for status in sharded.engine.status()]
    assert sum(shares, start=Digest.ZERO).hex() == digest


def test_a_full_sync_may_say_how_much_it_changes(sharded: Sharded) -> None:
    """Then the old values are looked at after all."""
    target = target_checkpoint(sharded.base, ["weight"])
    after = tensor_digest("weight", bits(target["weight"]))
    change = after - tensor_digest("weight", bits(sharded.base["weight"]))
    before, data = sharded.memories(), b""
    for declared in (after, change):
        digests = {"digest_part": declared.hex(), "digest_after": after.hex()}
        data = one_part([dense_delta("weight", target["weight"])], full=True, **digests)
        if declared == after:
            answers = sharded.engine.stage(part_id(data), data)
            assert {error["type"] for error in errors_of(answers)} == {"BaseMismatch"}
            assert sharded.memories() == before
            errors_of(sharded.engine.call("abort"), none=True)
    errors_of(sharded.engine.apply(part_id(data), data), none=True)
    assert sharded.memories() == sharded.fresh(target)
    errors_of(sharded.engine.call("rollback"), none=True)
    assert sharded.memories() == before


def test_rollback(sharded: Sharded) -> None:
    before = sharded.memories()
    data = sharded.sparse(target_checkpoint(sharded.base, ["weight"]))
    errors_of(sharded.engine.apply(part_id(data), data), none=True)
    assert sharded.memories() != before
    errors_of(sharded.engine.call("rollback"), none=True)
    assert sharded.memories() == before
    assert {s["version"] for s in sharded.engine.status()} == {0}
    errors = errors_of(sharded.engine.call("rollback"))
    assert {error["type"] for error in errors} == {"Conflict"}


def test_parts_of_one_tensor_reach_their_shards(sharded: Sharded) -> None:
    target = target_checkpoint(sharded.base, ["weight"])
    whole = delta_between("weight", sharded.base["weight"], target["weight"])
    assert whole.indices is not None
    data = b""
    for number, piece in enumerate((whole.indices < 12, whole.indices >= 12)):
        delta = ParamDelta(
            "weight", whole.dtype, whole.shape, whole.indices[piece], whole.values[piece]
        )
        data = one_part([delta], part=number, num_parts=2)
        errors_of(sharded.engine.stage(part_id(data), data), none=True)
    errors_of(sharded.engine.commit(part_id(data)), none=True)
    assert sharded.memories() == sharded.fresh(target)
