"""The votes of a commit, and what they leave on every rank: recorded, and with real weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from engine_ext.apply.staged import Write
from engine_ext.errors import NotUpdatable
from engine_ext.model import TracingError
from engine_ext.placement import HostElements
from engine_ext.receiver.receiver import Receiver
from engine_ext.wire import ParamDelta
from engine_ext.wire.digest import Digest, tensor_digest
from tests.support import toy_models
from tests.support.rank_engine import Engine, RecordingApplier, errors_of, part_id
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
from tests.support.toy_models import ToyModel
from tests.unit.receiver.recorded_ranks import Ranks, body


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path)


# --- the vote ---


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_one_rank_that_fails_makes_all_uncertain(ranks: Ranks, rank: int) -> None:
    ranks.appliers[rank].fail["commit"] = RuntimeError("out of luck")
    data = body()
    one = part_id(data)
    ranks.engine.stage(one, data)
    for error in errors_of(ranks.engine.commit(one)):
        assert error["type"] == "CommitFailed"
        assert error["engine_state"] == "uncertain"
        assert len(error["failed"]) == 1
        assert f"rank {rank}" in error["failed"][0]
        assert "out of luck" in error["message"]
    assert ranks.written == [1, 1, 1]
    assert ranks.states() == {(0, "uncertain")}


def test_every_rank_that_failed_is_named(ranks: Ranks) -> None:
    for rank in (0, 2):
        ranks.appliers[rank].fail["commit"] = RuntimeError("out of luck")
    data = body()
    ranks.engine.stage(part_id(data), data)
    for error in errors_of(ranks.engine.commit(part_id(data))):
        assert [text.split(":")[0] for text in error["failed"]] == ["rank 0", "rank 2"]


def test_only_a_full_sync_ends_uncertain(ranks: Ranks) -> None:
    ranks.appliers[0].fail["commit"] = RuntimeError("out of luck")
    data, all_of_it = body(), body(1, full=True)
    ranks.engine.stage(part_id(data), data)
    ranks.engine.commit(part_id(data))
    ranks.appliers[0].fail.clear()
    for again in (data, body(2, base_version=1)):
        answers = ranks.engine.stage(part_id(again), again)
        assert [e["type"] for e in errors_of(answers)] == ["EngineUncertain"] * 3
    assert ranks.written == [1, 1, 1]
    errors_of(ranks.engine.apply(part_id(all_of_it), all_of_it), none=True)
    assert ranks.states() == {(1, "certain")}
    errors_of(ranks.engine.apply(part_id(body(2)), body(2)), none=True)


def lose_sync(receiver: Receiver) -> None:
    receiver.handle("drop", {})


def lose_part(receiver: Receiver) -> None:
    receiver._sync_state.settle(1, staged=False)
    receiver._staging.forget(1)


def hold_another(receiver: Receiver) -> None:
    receiver.handle("drop", {})
    other = part_id(body(), part=0, num_parts=2, sync_id="other", identity="another")
    arguments = {"part": msgspec.to_builtins(other)}
    receiver.handle("begin", {**arguments, "path": "/nowhere", "now": 0.0})
    receiver._sync_state.settle(0, staged=True)


@pytest.mark.parametrize("lose", [lose_sync, lose_part, hold_another])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_lacks_a_part_refuses_for_all(
    ranks: Ranks, lose: Callable[[Receiver], None], rank: int
) -> None:
    parts = [body(name=name, part=n, num_parts=2) for n, name in enumerate("ab")]
    for data in parts:
        ranks.engine.stage(part_id(data), data)
    lose(ranks.engine.receivers[rank])
    for error in errors_of(ranks.engine.commit(part_id(parts[0]))):
        assert error["type"] == "Conflict"
        assert error["engine_state"] == "unchanged"
    assert ranks.written == [0, 0, 0]
    assert ranks.states() == {(0, "certain")}


@pytest.mark.parametrize("error", [NotUpdatable("moved", tensors=["w"]), MemoryError("none left")])
def test_a_check_that_fails_at_the_last_moment_refuses_for_all(
    ranks: Ranks, error: Exception
) -> None:
    """Whatever it is, the rank must still vote, or the others wait for it for ever."""
    data = body()
    one = part_id(data)
    ranks.engine.stage(one, data)
    ranks.appliers[1].fail["check_sync"] = error
    refusals = errors_of(ranks.engine.commit(one))
    assert refusals == [refusals[0]] * 3
    assert str(error) in refusals[0]["message"]
    assert ranks.written == [0, 0, 0]
    assert ranks.states() == {(0, "certain")}
    ranks.appliers[1].fail.clear()
    errors_of(ranks.engine.commit(one), none=True)


@pytest.mark.parametrize(
    ("version", "sync_id"), [(2, "a"), (1, "b"), (1, None)], ids=["version", "id", "no id"]
)
def test_only_the_staged_sync_is_committed(ranks: Ranks, version: int, sync_id: str | None) -> None:
    data = body(sync_id="a")
    ranks.engine.stage(part_id(data), data)
    answers = ranks.engine.call("commit", version=version, sync_id=sync_id)
    assert [e["type"] for e in errors_of(answers)] == ["Conflict"] * 3
    assert ranks.written == [0, 0, 0]


def test_an_incomplete_sync_is_not_committed(ranks: Ranks) -> None:
    data = body(part=0, num_parts=2)
    ranks.engine.stage(part_id(data), data)
    assert [e["type"] for e in errors_of(ranks.engine.commit(part_id(data)))] == ["Conflict"] * 3
    assert ranks.written == [0, 0, 0]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_weights_that_fell_asleep_after_staging_are_not_written(ranks: Ranks, rank: int) -> None:
    data = body()
    one = part_id(data)
    ranks.engine.stage(one, data)
    ranks.engine.receivers[rank].set_asleep(True)
    assert [e["type"] for e in errors_of(ranks.engine.commit(one))] == ["WeightsAsleep"] * 3
    assert ranks.written == [0, 0, 0]
    ranks.engine.receivers[rank].set_asleep(False)
    errors_of(ranks.engine.commit(one), none=True)


def test_weights_that_were_lost_after_staging_take_only_a_full_sync(ranks: Ranks) -> None:
    data, all_of_it = body(), body(full=True)
    ranks.engine.stage(part_id(data), data)
    for receiver in ranks.engine.receivers:
        receiver._sync_state.uncertain = True
    answers = ranks.engine.commit(part_id(data))
    assert [e["type"] for e in errors_of(answers)] == ["EngineUncertain"] * 3
    assert ranks.written == [0, 0, 0]
    ranks.engine.call("drop")
    errors_of(ranks.engine.apply(part_id(all_of_it), all_of_it), none=True)
    assert ranks.states() == {(1, "certain")}


class BrokenVote:
    """A rank alone in its group, whose n-th all-gather fails."""

    rank = 0

    def __init__(self, fails_at: int) -> None:
        self._left = fails_at

    def all_gather(self, value: Any) -> list[Any]:
        self._left -= 1
        if self._left == 0:
            raise ConnectionError("the other ranks are gone")
        return [value]


@pytest.mark.parametrize(
    ("fails_at", "kind", "state", "written"),
    [(1, "DeltaError", "unchanged", 0), (2, "CommitFailed", "uncertain", 1)],
    ids=["before the write", "after the write"],
)
def test_a_vote_that_fails(
    tmp_path: Path, fails_at: int, kind: str, state: str, written: int
) -> None:
    """After the write nobody knows what the others did, and that is not fine."""
    applier = RecordingApplier()
    engine = Engine([applier], tmp_path)
    data = body()
    engine.stage(part_id(data), data)
    engine.receivers[0]._transaction._ranks = BrokenVote(fails_at)
    [error] = errors_of(engine.commit(part_id(data)))
    assert (error["type"], error["engine_state"]) == (kind, state)
    assert len(applier.committed) == written
    [status] = engine.status()
    assert (status["version"], status["engine_state"] == "uncertain") == (0, state == "uncertain")


@pytest.mark.parametrize("at", ["settle", "commit"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_check_that_changes_the_model_makes_all_uncertain(
    ranks: Ranks, rank: int, at: str
) -> None:
    """Though another rank merely refuses the sync, and nothing was written."""
    whole = body(2, full=True)
    data = body()
    if at == "commit":
        errors_of(ranks.engine.stage(part_id(data), data), none=True)
    ranks.appliers[rank].fail["check_sync"] = TracingError("tensors moved")
    ranks.appliers[1].fail["check_sync"] = NotUpdatable("no", tensor="w")
    one = part_id(data)
    answers = ranks.engine.commit(one) if at == "commit" else ranks.engine.stage(one, data)
    for error in errors_of(answers):
        assert (error["type"], error["engine_state"]) == ("CommitFailed", "uncertain")
        assert f"rank {rank}: tensors moved" in error["message"]
    assert ranks.written == [0, 0, 0]
    assert ranks.states() == {(0, "uncertain")}
    assert [s["staged"] for s in ranks.engine.status()] == [None] * 3
    for applier in ranks.appliers:
        applier.fail.clear()
    assert {e["type"] for e in errors_of(ranks.engine.stage(one, data))} == {"EngineUncertain"}
    errors_of(ranks.engine.apply(part_id(whole), whole), none=True)
    assert ranks.states() == {(2, "certain")}


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("step", ["finish", "_keep_undo", "digest"])
def test_a_sync_that_is_written_but_not_recorded_is_not_called_unchanged(
    ranks: Ranks, rank: int, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("none left")

    receiver, applier = ranks.engine.receivers[rank], ranks.appliers[rank]
    data = body()
    errors_of(ranks.engine.stage(part_id(data), data), none=True)
    if step == "digest":
        broken = SimpleNamespace(hex=fail)
        monkeypatch.setattr(applier, step, broken)
    else:
        monkeypatch.setattr(applier if step == "finish" else receiver, step, fail)
    answers = ranks.engine.commit(part_id(data))
    monkeypatch.undo()
    error = answers[rank]["error"]
    assert (error["type"], error["engine_state"]) == ("CommitFailed", "uncertain")
    assert "none left" in error["message"]
    status = receiver.handle("status", {})
    assert status["ok"]["engine_state"] == "uncertain"
    assert (status["ok"]["version"], status["ok"]["can_roll_back"]) == (0, False)
    full = body(2, full=True)
    errors_of(ranks.engine.apply(part_id(full), full), none=True)
    assert ranks.states() == {(2, "certain")}


def test_a_check_that_changes_the_model_and_a_vote_that_fails(tmp_path: Path) -> None:
    applier = RecordingApplier()
    engine = Engine([applier], tmp_path)
    data = body()
    engine.stage(part_id(data), data)
    applier.fail["check_sync"] = TracingError("tensors moved")
    engine.receivers[0]._transaction._ranks = BrokenVote(1)
    [error] = errors_of(engine.commit(part_id(data)))
    assert (error["type"], error["engine_state"]) == ("CommitFailed", "uncertain")
    assert engine.status()[0]["engine_state"] == "uncertain"


# --- with real weights ---


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


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]])
@pytest.mark.parametrize("element", [0, 5, 11])
def test_a_weight_that_changes_after_staging_refuses_the_sync_on_all_ranks(
    scattered: Sharded, ranks: list[int], element: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the pass that writes is the one that finds it: every rank has its bits again."""
    target = {"weight": changed(scattered.base["weight"], 3, 1.0)}
    data = scattered.sparse(target)
    scattered.engine.stage(part_id(data), data)
    for rank in ranks:
        corrupt(scattered, rank, element)
    before = scattered.memories()
    monkeypatch.setattr(HostElements, "seems_to_hold", lambda self, bits: True)
    for error in errors_of(scattered.engine.commit(part_id(data))):
        assert (error["type"], error["engine_state"]) == ("BaseMismatch", "unchanged")
        assert "between staging and commit" in error["message"]
    assert scattered.memories() == before
    states = {(s["version"], s["engine_state"], s["staged"]) for s in scattered.engine.status()}
    assert states == {(0, "certain", None)}, "what was staged is of other old values"

    for rank in ranks:
        corrupt(scattered, rank, element)
    errors_of(scattered.engine.apply(part_id(data), data), none=True)
    assert scattered.memories() == scattered.fresh(target)
    errors_of(scattered.engine.call("rollback"), none=True)
    assert scattered.memories() == scattered.fresh(scattered.base)


@pytest.mark.parametrize("sampled", [True, False])
def test_a_changed_weight_that_the_sample_finds_is_refused_before_any_write(
    scattered: Sharded, sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = {"weight": changed(scattered.base["weight"], 3, 1.0)}
    data = scattered.sparse(target)
    scattered.engine.stage(part_id(data), data)
    corrupt(scattered, 1, 0)
    puts = []
    put = Write.put
    monkeypatch.setattr(
        Write, "put", lambda self, compares: (puts.append(self), put(self, compares))
    )
    if not sampled:
        monkeypatch.setattr(HostElements, "seems_to_hold", lambda self, bits: True)
    assert {e["type"] for e in errors_of(scattered.engine.commit(part_id(data)))} == {
        "BaseMismatch"
    }
    assert bool(puts) is not sampled


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
    before = sharded.memories()
    for declared in (after, change):
        digests = {"digest_part": declared.hex(), "digest_after": after.hex()}
        data = one_part([dense_delta("weight", target["weight"])], full=True, **digests)
        if declared == after:
            answers = sharded.engine.stage(part_id(data), data)
            assert {error["type"] for error in errors_of(answers)} == {"BaseMismatch"}
            assert sharded.memories() == before
            errors_of(sharded.engine.call("drop"), none=True)
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
    for number, piece in enumerate((whole.indices < 12, whole.indices >= 12)):
        delta = ParamDelta(
            "weight", whole.dtype, whole.shape, whole.indices[piece], whole.values[piece]
        )
        data = one_part([delta], part=number, num_parts=2)
        errors_of(sharded.engine.stage(part_id(data), data), none=True)
    errors_of(sharded.engine.commit(part_id(data)), none=True)
    assert sharded.memories() == sharded.fresh(target)
