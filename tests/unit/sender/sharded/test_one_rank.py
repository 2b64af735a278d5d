"""Refusals and lost answers, with a single rank: what follows is what `DeltaSender` does."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from delta_sender import (
    EngineBusy,
    EngineUnreachable,
    FullSyncRefused,
    RankError,
    Shard,
    ShardedSender,
    SyncError,
)
from delta_sender.encode.part_builder import EncodedPart
from delta_sender.publish.post_queue import PostQueue
from tests.support.fake_engine import (
    Engine,
    Model,
    breaks,
    error,
    loses,
    model_of,
    sends,
    train,
)


def whole(model: Model) -> list[Shard]:
    return [
        Shard(name, tensor, tuple(tensor.shape), (slice(None),) * tensor.ndim)
        for name, tensor in model.items()
    ]


def sender_of(engine: Engine, model: Model, **options: Any) -> ShardedSender:
    return ShardedSender("http://engine/", whole(model), client=engine.client(), **options)


def snapshot_is(sender: ShardedSender, engine: Engine) -> bool:
    return all(
        np.array_equal(sender._snapshot.image(name).values, values)
        for name, values in engine.weights.items()
    )


def test_what_ranks_give_is_watched(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of(torch.bfloat16)
    engine = Engine.of(model)
    with sender_of(engine, model, unchanged_warning=2, refuse_nonfinite=True) as sender:
        counts = [sender.sync(whole(model)).unchanged_in_a_row for _ in range(3)]
        assert counts == [1, 2, 3]
        assert caplog.text.count("no value has changed in 2 syncs") == 1
        wide = {name: tensor.float() for name, tensor in model.items()}
        wide["layers.1.weight"][0, 0] = float("inf")
        given = [shard._replace(dtype=torch.bfloat16) for shard in whole(wide)]
        with pytest.raises(RankError, match=r"layers.1.weight: 1 values .* NaN or infinite"):
            sender.sync(given)
        assert engine.version == 3
        wide["layers.1.weight"][0, 0] = 0.5
        report = sender.sync(given)
        assert (report.unchanged_in_a_row, report.rounded) == (0, report.numel)
        assert "6 of 6 tensors (2400 values) are rounded" not in caplog.text  # not a warning


def test_changes_that_are_not_served_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of(tensors=3)
    engine = Engine.of(model, ignored={"layers.1.weight"})
    with sender_of(engine, model) as sender:
        sender.sync(whole(model))
        assert not [text for text in caplog.messages if "have changed" in text]
        for step in range(2):
            train(model, step)
            sender.sync(whole(model))
    [said] = [text for text in caplog.messages if "have changed" in text]
    assert said.endswith(
        "ignores tensors that have changed, as a fresh load of them would: layers.1.weight"
    )


@pytest.mark.parametrize("encoding", ["deltas", "gap8_ulp", "auto"])
def test_syncs_of_sparse_dense_and_no_changes(encoding: str) -> None:
    model = model_of(torch.bfloat16, torch.float32)
    engine = Engine.of(model)
    with sender_of(engine, model, encoding=encoding, bucket_bytes=500) as sender:
        for version, density in enumerate((0.05, 1.0, 0.0), 1):
            train(model, version, density)
            report = sender.sync(whole(model))
            assert (report.version, report.status, report.full) == (version, "committed", False)
            assert report.digest == engine.digest().hex()
            assert engine.holds(model)
            assert snapshot_is(sender, engine)
            assert report.parts == 1 or density


def test_slices_and_plain_tuples_are_shards() -> None:
    model = model_of()
    engine = Engine.of(model)
    halves = [(n, t.clone(), t.shape, [slice(0, 4), slice(0, 100)]) for n, t in model.items()]
    with ShardedSender("http://engine/", halves, client=engine.client()) as sender:
        train(model)
        assert sender.sync(whole(model), step=3).nnz
    assert engine.holds(model)


@pytest.mark.parametrize("state", ["restarted", "uncertain", "other values"])
def test_what_it_holds_is_replaced_by_a_full_sync(state: str) -> None:
    model = model_of()
    engine = Engine.of(model)
    with sender_of(engine, model) as sender:
        train(model)
        sender.sync(whole(model))
        if state == "restarted":
            engine.restart(model_of())
        elif state == "uncertain":
            engine.uncertain = True
        else:
            engine.weights["layers.1.weight"][3] ^= 1
        train(model, 2)
        report = sender.sync(whole(model))
        assert (report.full, engine.holds(model), snapshot_is(sender, engine)) == (True,) * 3
        train(model, 3)
        assert not sender.sync(whole(model)).full
    assert engine.holds(model)


def test_values_follow_refused_differences() -> None:
    model = model_of()
    engine = Engine.of(model, cast={"layers.2.weight"})
    with sender_of(engine, model, encoding="gap8_ulp", bucket_bytes=300) as sender:
        train(model)
        report = sender.sync(whole(model))
    assert (report.full, engine.holds(model)) == (False, True)


def test_an_engine_without_a_plan() -> None:
    model = model_of()
    engine = Engine.of(model, has_plan=False)
    with sender_of(engine, model) as sender:
        train(model)
        assert sender.sync(whole(model)).digest is None
    assert engine.holds(model)


def test_ignored_tensors_are_left_out() -> None:
    model = model_of()
    engine = Engine.of(model, ignored={"layers.0.weight"})
    with sender_of(engine, model) as sender:
        for sync in (sender.sync, sender.sync_full):
            train(model)
            assert sync(whole(model)).numel == 2000
    assert engine.holds(model)


@pytest.mark.parametrize("number", [0, 1])
def test_a_refusal_leaves_all_as_it_was(number: int) -> None:
    model = model_of()
    engine = Engine.of(model)
    engine.faults[number] = sends(error(507, "SpoolFull"))
    with sender_of(engine, model) as sender:
        train(model)
        with pytest.raises(SyncError, match="SpoolFull") as raised:
            sender.sync(whole(model))
        assert not isinstance(raised.value, RankError)
        assert (sender.version, engine.version) == (0, 0)
        assert snapshot_is(sender, engine)
        train(model, 2)
        assert sender.sync(whole(model)).version
    assert engine.holds(model)


@pytest.mark.parametrize("fault", [loses, breaks])
def test_an_unknown_outcome_is_found_out(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from delta_sender.publish.http_client import EngineClient

    monkeypatch.setattr(EngineClient.retrying, "stop", lambda state: True)
    model = model_of()
    engine = Engine.of(model)
    engine.faults[1] = fault  # of the last part
    with sender_of(engine, model, encoding="gap8_ulp") as sender:
        train(model)
        with pytest.raises(SyncError):
            sender.sync(whole(model))
        train(model, 2)
        report = sender.sync(whole(model))
        assert not report.full
        assert report.base_version == (1 if fault is loses else 0)
        assert engine.holds(model)
        assert snapshot_is(sender, engine)
        train(model, 3)
        assert not sender.sync(whole(model)).full
    assert engine.holds(model)


def test_refusal_after_a_lost_answer_of_a_rank_is_none(naps: list[float]) -> None:
    """The engine has committed what it refuses to take again."""
    model = model_of()
    engine = Engine.of(model)
    engine.faults = {1: loses, 2: sends(error(507, "SpoolFull"))}
    with sender_of(engine, model) as sender:
        train(model)
        with pytest.raises(SyncError, match="SpoolFull") as raised:
            sender.sync(whole(model))
        assert raised.value.unanswered
        train(model, 2)
        report = sender.sync(whole(model))
        assert (report.base_version, report.version, report.full) == (1, 2, False)
    assert engine.holds(model)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [(breaks, EngineUnreachable), (sends(error(429, "SyncInProgress")), EngineBusy)],
)
def test_error_of_a_rank_keeps_its_class(
    fault: Any, kind: type[SyncError], naps: list[float]
) -> None:
    model = model_of()
    engine = Engine.of(model)
    engine.faults = dict.fromkeys(range(99), fault)
    with sender_of(engine, model, timeout=0.01) as sender, pytest.raises(kind) as raised:
        sender.sync(whole(model))
    assert type(raised.value) is kind


def test_interrupted_share_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    model, put = model_of(), PostQueue.put
    engine = Engine.of(model)

    def interrupted(queue: PostQueue, part: EncodedPart) -> None:
        put(queue, part)
        while not engine.log:
            time.sleep(0.001)
        raise KeyboardInterrupt

    monkeypatch.setattr(PostQueue, "put", interrupted)
    with sender_of(engine, model) as sender:
        train(model)
        with pytest.raises(KeyboardInterrupt):
            sender.sync(whole(model))
        assert not [one for one in threading.enumerate() if one.name == "delta-post"]


@pytest.mark.parametrize("digest", [True, False])
def test_another_trainers_sync_is_not_taken_for_an_empty_one(digest: bool) -> None:
    base = model_of()
    other = model_of()
    engine = Engine.of(base)
    with sender_of(engine, other, digest=digest) as sender:
        train(other)
        sender.sync(whole(other))
    with (
        sender_of(engine, base, digest=digest) as sender,
        pytest.raises(FullSyncRefused, match="version 1 "),
    ):
        sender.sync(whole(base))
    assert engine.holds(other)
    with sender_of(engine, base, digest=digest, full="allow") as sender:
        report = sender.sync(whole(base))
    assert (report.version, report.full) == (2, True)
    assert engine.holds(base)


def test_an_engine_that_takes_no_more_uploads_is_waited_for(naps: list[float]) -> None:
    """At every part of a sync, the one that commits among them."""
    model = model_of(tensors=3)
    engine = Engine.of(model)
    with sender_of(engine, model, bucket_bytes=1, posts_in_flight=1) as sender:
        engine.faults = {post: sends(error(429, "TooManyUploads")) for post in (0, 2, 4, 6)}
        train(model)
        report = sender.sync(whole(model))
    assert (report.parts, report.full, len(naps)) == (4, False, 4)
    assert engine.holds(model)


def test_other_shards_are_refused() -> None:
    model = model_of()
    engine = Engine.of(model)
    with sender_of(engine, model) as sender:
        few = whole(model)[1:]
        with pytest.raises(RankError, match=r"rank 0: ValueError: missing.*layers\.0\.weight"):
            sender.sync(few)
        cast = [shard._replace(dtype=torch.float16) for shard in whole(model)]
        with pytest.raises(RankError, match=r"layers\.0\.weight"):
            sender.sync(cast)
        assert not engine.requests
        train(model)
        sender.sync(whole(model))
    assert engine.holds(model)


def test_the_base_may_be_a_checkpoint_of_other_values() -> None:
    base = model_of()
    model = {name: tensor.float() for name, tensor in base.items()}
    engine = Engine.of(base)
    train(model, density=1.0)
    cast = [shard._replace(dtype=torch.bfloat16) for shard in whole(model)]
    with ShardedSender("http://engine/", cast, base, client=engine.client()) as sender:
        report = sender.sync(cast)
    assert not report.full
    assert engine.holds({name: tensor.bfloat16() for name, tensor in model.items()})
    with pytest.raises(RankError, match=r"layers.0.weight: .*not in the base"):
        ShardedSender("http://engine/", cast, {}, client=engine.client())


def test_options_are_checked() -> None:
    wrong: list[dict[str, Any]] = [{"encoding": "other"}, {"posts_in_flight": 0}]
    for options in wrong:
        with pytest.raises(ValueError):
            ShardedSender("http://engine/", [], **options)
    with pytest.raises(TypeError, match="delta_log"):
        ShardedSender("http://engine/", [], delta_log="folder")  # type: ignore[call-arg]
