"""Refusals, lost answers, interruptions: what a sender does, and what its snapshot then holds."""

from __future__ import annotations

import httpx
import pytest
import torch

from delta_sender import SyncError
from delta_sender.diff.snapshot import Changes
from tests.support.fake_engine import (
    Engine,
    Handler,
    breaks,
    copied,
    digest_of,
    error,
    loses,
    model_of,
    sender_of,
    sends,
    snapshot_is,
    train,
)
from tests.support.statuses import last_sync


@pytest.mark.parametrize("at_once", [1, 4])
def test_a_refused_sync_is_sent_again_whole(at_once: int) -> None:
    """Whichever part is refused, and with whichever status."""
    model = model_of(tensors=4)
    engine = Engine.of(model)
    sender = sender_of(engine, model, bucket_bytes=1, posts_in_flight=at_once)
    for step, status in enumerate([400, 401, 413, 422, 500, 507]):
        failing, known, held = step % 4, len(engine.requests), sender.version
        refusal = error(status, "NotUpdatable", tensor="layers.0.weight")
        engine.faults = {known + failing: sends(refusal)}
        train(model, step)
        with pytest.raises(SyncError, match="no") as caught:
            sender.sync(model.items())
        assert caught.value.status == status
        assert caught.value.error["tensor"] == "layers.0.weight"
        assert sender.version == engine.version == held
        # Each part once, and the refused one again: others can be sent before its answer is read.
        most = failing + 1 if at_once == 1 else len(model) + 1
        assert failing + 1 <= len(engine.requests) - known <= most
        model["layers.2.weight"][0, step] += 1
        report = sender.sync(model.items())
        assert engine.holds(model), status
        assert (report.version, report.full) == (engine.version, False)
    assert sender.sync(model.items()).nnz == 0


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("at_once", [1, 4])
def test_lost_answers_and_connections_are_retried(
    part: int, at_once: int, naps: list[float]
) -> None:
    model = model_of(tensors=3)
    engine = Engine.of(model)
    sender = sender_of(engine, model, bucket_bytes=1, posts_in_flight=at_once)
    engine.faults = {
        part: loses,
        part + 1: breaks,
        part + 2: sends(httpx.Response(503, text="<html>no upstream</html>")),
        part + 3: sends(httpx.Response(502)),
    }
    train(model)
    report = sender.sync(model.items())
    if at_once == 1:
        assert len(set(engine.bodies[part : part + 5])) == 1
    assert len(engine.bodies) == 3 + 4
    assert len(naps) == 4
    assert engine.holds(model)
    assert not report.full
    assert report.parts == 3
    # Only the last part is posted alone: it commits, and its answer is the one that is lost.
    assert report.status == ("already_applied" if part == 2 else "committed")
    assert report.wire_bytes == sum(len(body) for body in set(engine.bodies))
    assert sender.sync(model.items()).nnz == 0


@pytest.mark.parametrize("another", [False, True])
@pytest.mark.parametrize("digest", [True, False])
def test_a_commit_whose_answer_never_came_is_found_out(
    naps: list[float], another: bool, digest: bool
) -> None:
    """The engine says that it has it; or that it has something else of that version."""
    model = model_of(tensors=2)
    engine = Engine.of(model)
    sender = sender_of(engine, model, digest=digest)
    engine.faults = dict.fromkeys(range(8), loses)
    train(model)
    with pytest.raises(SyncError, match="ReadTimeout") as caught:
        sender.sync(model.items())
    assert caught.value.status is None
    assert caught.value.error == {}
    assert (sender.version, engine.version, len(naps)) == (0, 1, 7)
    if another:
        engine.weights["layers.1.weight"][3] ^= 1
        engine.last_sync = last_sync(1, "another's")
    train(model, 1)
    report = sender.sync(model.items())
    assert report.full is another
    assert report.base_version == 1
    assert report.version == engine.version == sender.version == 2
    assert engine.holds(model)
    train(model, 2)
    assert not sender.sync(model.items()).full
    assert engine.holds(model)


@pytest.mark.parametrize("digest", [True, False])
def test_sender_refuses_another_sync_as_already_applied(digest: bool) -> None:
    """It held the part that was posted, and more."""
    model = model_of(tensors=2)
    engine = Engine.of(model)
    sender = sender_of(engine, model, digest=digest)

    def had_it(take: Handler, request: httpx.Request) -> httpx.Response:
        take(request)
        engine.weights["layers.1.weight"][3] ^= 1
        engine.last_sync = last_sync(1, "another's")
        return engine.ok("already_applied", engine.digest().hex() if digest else None)

    engine.faults[0] = had_it
    train(model)
    report = sender.sync(model.items())
    assert (report.status, report.full, engine.holds(model)) == ("committed", True, True)


@pytest.mark.parametrize("digest", [True, False])
def test_another_trainers_sync_that_holds_the_same_part(digest: bool) -> None:
    """An empty part is the whole of every empty sync, and the end of every sharded one."""
    model = model_of(tensors=2)
    engine = Engine.of(model)
    sender = sender_of(engine, model, digest=digest, full="allow")
    with sender_of(engine, model) as another:  # whose last part is empty
        another.sync(model.items())
    engine.weights["layers.1.weight"][3] ^= 1  # by the other parts of that sync
    report = sender.sync(model.items())
    assert (report.full, engine.holds(model)) == (True, True)


def busy(
    retry_after: str | None = None, status: int = 409, kind: str = "SyncInProgress"
) -> httpx.Response:
    response = error(status, kind)
    if retry_after is not None:
        response.headers["Retry-After"] = retry_after
    return response


def test_waits_as_long_as_the_engine_says(naps: list[float]) -> None:
    model = model_of(tensors=1)
    engine = Engine.of(model)
    sender = sender_of(engine, model)
    date = "Wed, 21 Oct 2026 07:28:00 GMT"
    many = busy("3", 429, "TooManyUploads")
    answers = [busy("7"), busy(), busy("0"), busy(date), many]
    engine.faults = {number: sends(answer) for number, answer in enumerate(answers)}
    train(model)
    assert not sender.sync(model.items()).full
    assert naps == [7.0, 1.0, 0.1, 1.0, 3.0]
    assert engine.holds(model)
    assert len(set(engine.bodies)) == 1


def test_waits_no_longer_than_the_timeout(naps: list[float]) -> None:
    model = model_of(tensors=1)
    engine = Engine.of(model)
    sender = sender_of(engine, model, timeout=60.0)
    engine.faults = {0: sends(busy("20")), 1: sends(busy("61"))}
    train(model)
    with pytest.raises(SyncError, match="SyncInProgress") as caught:
        sender.sync(model.items())
    assert caught.value.status == 409
    assert naps == [20.0]
    assert not sender.sync(model.items()).full
    assert engine.holds(model)


@pytest.mark.parametrize("failing", range(3))
def test_an_engine_with_other_bytes_gets_a_full_sync(failing: int) -> None:
    model = model_of(tensors=3)
    engine = Engine.of(model)
    sender = sender_of(engine, model, bucket_bytes=1)
    sender.sync(model.items())
    version = 1
    for refusal in (
        error(409, "VersionConflict", expected=1, actual=41),
        error(409, "VersionConflict", expected=1, actual=0),
        error(409, "BaseMismatch", actual="f00d"),
        error(500, "CommitFailed", "uncertain"),
        error(503, "EngineUncertain", "uncertain"),
    ):
        for values in engine.weights.values():
            values[:] = 0
        engine.faults = {len(engine.requests) + failing: sends(refusal)}
        train(model, version)
        report = sender.sync((name, tensor) for name, tensor in model.items())
        version = 42 if version == 1 else version + 1
        assert (report.full, report.parts) == (True, 3), refusal.text
        assert report.version == sender.version == engine.version == version
        assert engine.holds(model)
        train(model, version)
        version += 1
        assert not sender.sync(model.items()).full
        assert engine.holds(model)


def test_there_is_only_one_full_sync() -> None:
    model = model_of(tensors=2)
    engine = Engine.of(model)
    sender = sender_of(engine, model)
    sender.sync(model.items())
    engine.requests.clear()
    engine.faults = {
        0: sends(error(503, "EngineUncertain", "uncertain")),
        1: sends(error(500, "CommitFailed", "uncertain")),
    }
    engine.uncertain = True
    train(model)
    with pytest.raises(SyncError, match="CommitFailed"):
        sender.sync(model.items())
    assert len(engine.requests) == 2
    assert sender.version == 1
    report = sender.sync(model.items())
    assert report.full
    assert engine.holds(model)
    assert not engine.uncertain


def test_sleeping_weights_are_no_reason_for_a_full_sync() -> None:
    model = model_of(tensors=1)
    engine = Engine.of(model)
    sender = sender_of(engine, model)
    engine.faults[0] = sends(error(409, "WeightsAsleep"))
    with pytest.raises(SyncError, match="WeightsAsleep"):
        sender.sync(model.items())
    assert len(engine.requests) == 1


@pytest.mark.parametrize("part", [0, 1])
def test_a_strange_answer_is_no_commit(part: int) -> None:
    model = model_of(tensors=2)
    engine = Engine.of(model)
    sender = sender_of(engine, model, bucket_bytes=1)
    for step, answer in enumerate(
        [
            httpx.Response(200, text="<html>"),
            httpx.Response(200, json=["committed"]),
            httpx.Response(200, json={"status": "committed", "version": 80}),
            httpx.Response(307, headers={"Location": "http://elsewhere"}),
        ]
    ):
        known, held = len(engine.requests), sender.version
        engine.faults = {known + part: sends(answer)}
        train(model, step)
        with pytest.raises(SyncError):
            sender.sync(model.items())
        assert (sender.version, len(engine.requests)) == (held, known + part + 1), answer
        sender.sync(model.items())
        assert engine.holds(model)


def test_a_last_part_that_is_only_staged_is_no_commit() -> None:
    model = model_of(tensors=2)
    engine = Engine.of(model)
    sender = sender_of(engine, model, bucket_bytes=1)

    def forgets(take: Handler, request: httpx.Request) -> httpx.Response:
        engine.staged.clear()  # as after its stage timeout
        return take(request)

    engine.faults[1] = forgets
    train(model)
    with pytest.raises(SyncError, match="staged"):
        sender.sync(model.items())
    sender.sync(model.items())
    assert engine.holds(model)
    assert sender.version == 2  # the engine might have committed the first


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("density", [0.05, 0.9])
def test_a_trainer_that_moves_on_while_posting(full: bool, density: float) -> None:
    model = model_of(tensors=3)
    engine = Engine.of(model)
    sender = sender_of(engine, model, bucket_bytes=1)

    def moves(take: Handler, request: httpx.Request) -> httpx.Response:
        train(model, 50 + len(engine.requests))
        return take(request)

    engine.faults = dict.fromkeys(range(3), moves)
    train(model, density=density)
    (sender.sync_full if full else sender.sync)(model.items())
    assert snapshot_is(sender, engine)
    assert not engine.holds(model)
    sender.sync(model.items())
    assert engine.holds(model)


def test_resync_sends_snapshot_after_trainer_moved_on() -> None:
    model = model_of()
    engine = Engine.of(model)
    sender = sender_of(engine, model, bucket_bytes=1)

    def refuses(take: Handler, request: httpx.Request) -> httpx.Response:
        train(model, 9)
        return error(409, "BaseMismatch")

    engine.faults[3] = refuses
    train(model)
    assert sender.sync(model.items()).full
    assert snapshot_is(sender, engine)
    sender.sync(model.items())
    assert engine.holds(model)


def test_base_and_trainer_tensors_are_left_alone() -> None:
    base = model_of()
    model = copied(base)
    engine = Engine.of(base)
    sender = sender_of(engine, base)
    train(model)
    before = copied(model)
    sender.sync(model.items())
    sender.sync_full(model.items())
    fresh = model_of()
    assert all(torch.equal(base[name], fresh[name]) for name in base)
    assert all(torch.equal(model[name], before[name]) for name in model)


@pytest.mark.parametrize("fault", ["breaks", "loses"])
def test_an_interrupted_sync_is_set_right_by_the_next(fault: str) -> None:
    model = model_of(tensors=2)
    engine = Engine.of(model)
    sender = sender_of(engine, model, bucket_bytes=1)

    def interrupts(take: Handler, request: httpx.Request) -> httpx.Response:
        if fault == "loses":
            take(request)
        raise KeyboardInterrupt

    for number in (0, 2):
        engine.faults = {number: interrupts}
        train(model, number)
        with pytest.raises(KeyboardInterrupt):
            sender.sync(model.items())
        assert sender.version == 0
    assert engine.version == (1 if fault == "loses" else 0)
    train(model, 3)
    assert not sender.sync(model.items()).full
    assert engine.holds(model)


@pytest.mark.parametrize("full", [False, True])
def test_a_snapshot_interrupted_while_it_moved(full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(tensors=3)
    engine = Engine.of(model)
    sender = sender_of(engine, model)
    snapshot = sender._publisher.snapshot
    advance = snapshot.advance

    def interrupted(changes: Changes) -> None:
        advance(dict([*changes.items()][:1]))
        raise KeyboardInterrupt

    train(model)
    with monkeypatch.context() as patched:
        patched.setattr(snapshot, "advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sender.sync(model.items())
    train(model, 1)
    report = (sender.sync_full if full else sender.sync)(model.items())
    assert report.full
    assert engine.holds(model)
    assert report.digest == digest_of(engine.weights).hex()
