"""An engine has one owner, which limits what a sender can replace there."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from delta_sender import DeltaSender, FullSyncRefused, MultiSender, RunConflict, RunFenced
from delta_sender.results import PartialSyncError, SyncError
from tests.support.fake_engine import (
    A,
    B,
    Engine,
    Handler,
    Model,
    breaks,
    client_of,
    copied,
    error,
    model_of,
    sender_of,
    sends,
    train,
)
from tests.support.line_interrupts import InterruptedAt


def other_of(model: Model) -> Model:
    """Other weights of the same shapes."""
    other = copied(model)
    train(other, 77, 0.5)
    return other


def touched(model: Model, count: int = 10) -> Model:
    """The model with some elements changed."""
    target = copied(model)
    target["layers.0.weight"].view(-1)[:count] += 1
    return target


@pytest.fixture
def model() -> Model:
    return model_of(tensors=3)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state.json"


# ---- what can be replaced ------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 6])
@pytest.mark.parametrize("encoding", ["deltas_zstd", "gap8_ulp"])
def test_wrong_checkpoint_replaces_nothing(model: Model, version: int, encoding: str) -> None:
    engine, wrong = Engine.of(model, version=version), other_of(model)
    with sender_of(engine, wrong, encoding=encoding) as sender:
        with pytest.raises(FullSyncRefused) as caught:
            sender.sync(wrong.items())
    assert engine.holds(model)
    assert (engine.version, engine.owner, sender.version) == (version, None, 0)
    assert (caught.value.status, caught.value.error["version"]) == (409, version)
    assert caught.value.error["digest"] == engine.digest().hex()
    for way in ("base", 'full="allow"', "--allow-full", "sync_full()", "--full"):
        assert way in str(caught.value)


def test_engine_that_is_put_right_is_continued(model: Model) -> None:
    """By a start on the checkpoint of the base, after the refusal."""
    engine = Engine.of(other_of(model))
    with sender_of(engine, model) as sender:
        with pytest.raises(FullSyncRefused):
            sender.sync(model.items())
        engine.restart(model)
        report = sender.sync(touched(model).items())
    assert (report.full, report.nnz, report.version) == (False, 10, 1)


def test_wrong_checkpoint_by_version_number(model: Model) -> None:
    """Without digests, a number that fits nothing is no reason to replace what is there."""
    engine = Engine.of(model, version=6)
    with sender_of(engine, model, digest=False) as sender, pytest.raises(FullSyncRefused):
        sender.sync(model.items())
    assert engine.version == 6


def test_the_expected_number_is_not_called_another(model: Model) -> None:
    engine = Engine.of(model, version=6)
    engine.faults = {0: sends(error(409, "VersionConflict", actual=6))}
    with sender_of(engine, model, digest=False, base_version=6) as sender:
        with pytest.raises(FullSyncRefused) as caught:
            sender.sync(model.items())
    assert "version 6 is there, but not known to be" in str(caught.value)


@pytest.mark.parametrize("how", ["allow", "asked for"])
def test_other_weights_are_replaced_if_wanted(
    model: Model, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine, wanted = Engine.of(model, version=6), other_of(model)
    held = engine.digest().hex()
    with sender_of(engine, wanted, full="allow" if how == "allow" else "own") as sender:
        report = (sender.sync if how == "allow" else sender.sync_full)(wanted.items())
    assert engine.holds(wanted)
    assert (report.full, report.base_version, report.version) == (True, 6, 7)
    assert report.run == engine.run == sender.run
    kind = "behind" if how == "allow" else "requested"
    assert report.reason is not None
    assert report.reason.partition(":")[0] == kind
    [warning] = [text for text in caplog.messages if "sending the whole model" in text]
    assert "version 6 (of run another" in warning
    assert held in warning
    assert warning.endswith(report.reason)
    assert {request.url.params["reason"] for request in engine.requests} == {report.reason}


def test_engine_without_weights_gets_all(model: Model) -> None:
    engine = Engine.of(other_of(model), has_plan=False)
    engine.faults = {0: sends(error(409, "BaseMismatch"))}
    with sender_of(engine, model) as sender:
        report = sender.sync(model.items())
    assert (report.full, engine.holds(model)) == (True, True)
    assert report.reason == "first: the engine was started without weights"


@pytest.mark.parametrize("loaded", ["the first checkpoint", "another one"])
def test_restarted_engine_gets_all(model: Model, loaded: str) -> None:
    first, engine = copied(model), Engine.of(model)
    with sender_of(engine, model) as sender:
        train(model)
        sender.sync(model.items())
        engine.restart(first if loaded == "the first checkpoint" else other_of(model))
        train(model, 1)
        report = sender.sync(model.items())
        assert (report.full, report.base_version, report.version) == (True, 0, 2)
        assert (report.reason or "").startswith("restarted: ")
        assert engine.holds(model)
        train(model, 2)
        assert not sender.sync(model.items()).full


def test_sender_that_sent_nothing_replaces_no_restarted_engine(model: Model) -> None:
    """It has met the engine, which held the base and then refused the first sync."""
    engine, theirs = Engine.of(model), other_of(model)
    engine.faults = {0: sends(error(507, "SpoolFull"))}
    with sender_of(engine, model) as sender:
        train(model)
        with pytest.raises(SyncError, match="SpoolFull"):
            sender.sync(model.items())
        engine.restart(theirs)
        with pytest.raises(FullSyncRefused):
            sender.sync(model.items())
    assert engine.holds(theirs)


def test_engine_restarted_for_another_trainer_is_left_alone(model: Model) -> None:
    engine, theirs = Engine.of(model), other_of(model)
    with sender_of(engine, model) as sender:
        train(model)
        sender.sync(model.items())
        engine.restart(theirs)
        with sender_of(engine, theirs) as another:
            another.sync(theirs.items())
        train(model, 1)
        with pytest.raises(FullSyncRefused, match=another.run):
            sender.sync(model.items())
    assert engine.holds(theirs)


def test_nobody_comes_before_a_full_sync(model: Model) -> None:
    """After the engine's restart, between its status and the first part that follows from it."""
    engine, theirs = Engine.of(model), other_of(model)
    outcomes: list[str | None] = []

    def comes_between(request: httpx.Request) -> httpx.Response:
        answer = engine.answer(request)
        is_status = request.url.path == "/delta_status"
        if engine.loaded and is_status and posts:
            try:
                another.sync(theirs.items())
                outcomes.append("committed")
            except RunConflict:
                outcomes.append("refused")
        return answer

    posts: list[int] = []
    client = httpx.Client(transport=httpx.MockTransport(comes_between))
    with (
        DeltaSender("http://engine", model.items(), client=client) as sender,
        sender_of(engine, theirs) as another,
    ):
        train(model)
        sender.sync(model.items())
        engine.restart(copied(theirs))
        train(theirs)
        posts.append(1)
        train(model, 1)
        report = sender.sync(model.items())
        assert report.full
    assert outcomes
    assert {*outcomes} == {"refused"}
    assert engine.holds(model)


@pytest.mark.parametrize("run", ["another", "anonymous-1"])
def test_later_weights_of_the_bases_run_are_kept(model: Model, run: str) -> None:
    """Its trainer has gone on after the engine's restart, or an anonymous run has its name."""
    engine, theirs = Engine.of(model, version=6, run=run), other_of(model)
    with sender_of(engine, model) as sender:
        train(model)
        sender.sync(model.items())
        engine.restart(theirs)
        engine.version, engine.run, engine.loaded = 9, run, False
        train(model, 1)
        with pytest.raises(FullSyncRefused, match="version 9"):
            sender.sync(model.items())
    assert engine.holds(theirs)


def test_the_base_that_is_rolled_back_to_is_replaced(model: Model) -> None:
    base, engine = copied(model), Engine.of(model, version=6)
    with sender_of(engine, model) as sender:
        train(model)
        sender.sync(model.items())
        engine.restart(base)
        engine.version, engine.run, engine.loaded = 6, "another", False
        train(model, 1)
        report = sender.sync(model.items())
    assert (report.full, engine.holds(model)) == (True, True)


@pytest.mark.parametrize(
    ("state", "kind"), [("uncertain", "uncertain"), ("foreign", "changed"), ("other", "changed")]
)
def test_own_weights_are_healed_with_a_reason(model: Model, state: str, kind: str) -> None:
    engine = Engine.of(model)
    with sender_of(engine, model) as sender:
        sender.sync(model.items())
        engine.uncertain = state == "uncertain"
        engine.foreign = "update_weights_from_disk" if state == "foreign" else None
        engine.weights["layers.1.weight"][3] ^= 1
        report = sender.sync(model.items())
    assert (report.reason or "").partition(":")[0] == kind
    assert engine.holds(model)


def test_a_delta_has_no_reason(model: Model) -> None:
    engine = Engine.of(model)
    with sender_of(engine, model) as sender:
        report = sender.sync(model.items())
    assert (report.full, report.reason) == (False, None)
    assert "reason" not in engine.requests[0].url.params


# ---- digests, not versions -----------------------------------------------------------------------


@pytest.mark.parametrize("base_version", [0, 3])
def test_base_is_found_under_any_number(model: Model, base_version: int) -> None:
    engine, target = Engine.of(model, version=6), touched(model)
    with sender_of(engine, model, base_version=base_version) as sender:
        report = sender.sync(target.items())
    assert (report.full, report.nnz, report.base_version, report.version) == (False, 10, 6, 7)
    assert engine.holds(target)


@pytest.mark.parametrize("encoding", ["deltas_zstd", "gap8_ulp"])
def test_same_command_again_sends_nothing(model: Model, encoding: str) -> None:
    """The engine holds what the sync leads to; the base is not there any more."""
    engine, target = Engine.of(model), touched(model)
    for version in (1, 2):
        with sender_of(engine, model, encoding=encoding) as sender:
            report = sender.sync(target.items())
            assert (report.full, report.version) == (False, version)
            assert report.nnz == (10 if version == 1 else 0)
            assert engine.holds(target)
    with sender_of(engine, model, encoding=encoding) as sender:
        sender.sync(target.items())
        further = touched(target, 5)
        assert sender.sync(further.items()).nnz == 5
    assert engine.holds(further)


def test_uncovered_tensors_are_sent_whole_once(model: Model) -> None:
    """No digest shows that they are the base's; here they are not."""
    engine = Engine.of(model, version=6, undigested={"layers.2.weight"})
    engine.weights["layers.2.weight"][5] ^= 1
    target = touched(model)
    with sender_of(engine, model) as sender:
        report = sender.sync(target.items())
        assert (report.full, report.nnz) == (False, 10 + 400)
        assert engine.holds(target)
        assert sender.sync(target.items()).nnz == 0


def test_engines_of_several_numbers_meet(model: Model) -> None:
    client = client_of(Engine.of(model, version=6), Engine.of(model, version=2))
    with MultiSender([A, B], model.items(), client=client) as sender:
        reports = sender.sync(touched(model).items())
    assert [(r.full, r.base_version, r.version) for r in reports.values()] == [
        (False, 6, 7),
        (False, 2, 7),
    ]


def test_next_sender_of_a_process_opens_its_run(model: Model, tmp_path: Path) -> None:
    base, engine = copied(model), Engine.of(model)
    with sender_of(engine, model) as sender:
        train(model)
        sender.sync(model.items())
    with sender_of(engine, base, continues=(sender.run, sender.epoch)) as following:
        assert (following.run, following.epoch) == (sender.run, 2)
        train(base, 5)
        assert following.sync(base.items()).full  # over what its run has sent
    with pytest.raises(ValueError, match="continues= is for engines"):
        DeltaSender(tmp_path / "log", base.items(), continues=("a", 1))


# ---- one owner -----------------------------------------------------------------------------------


def test_second_trainer_is_refused_with_the_owner(model: Model) -> None:
    engine, theirs = Engine.of(model), copied(model)
    with sender_of(engine, model) as sender, sender_of(engine, theirs) as another:
        sender.sync(model.items())
        train(theirs)
        with pytest.raises(RunConflict) as caught:
            another.sync(theirs.items())
        owner = caught.value.error["owner"]
        assert (owner["run"], owner["epoch"]) == (sender.run, sender.epoch) == (sender.run, 1)
        assert (owner["host"], owner["pid"]) == (socket.gethostname(), os.getpid())
        train(model)
        assert not sender.sync(model.items()).full
    assert engine.holds(model)


def test_takeover_is_claimed_once(model: Model) -> None:
    """One that is taken over after its own takeover does not take the engine back."""
    engine = Engine.of(model)
    with sender_of(engine, model, takeover=True) as first:
        first.sync(model.items())
        with sender_of(engine, model, takeover=True) as second:
            second.sync(model.items())
            with pytest.raises(RunFenced):
                first.sync(model.items())


def test_restart_without_its_state_is_refused(model: Model) -> None:
    """If it was killed; the weights are right, but its run is another."""
    engine = Engine.of(model)
    killed = sender_of(engine, model)
    killed.sync(model.items())
    with sender_of(engine, model) as sender, pytest.raises(RunConflict):
        sender.sync(model.items())
    with sender_of(engine, model, takeover=True) as sender:
        report = sender.sync(touched(model).items())
    assert (report.full, report.nnz, report.version) == (False, 10, 2)


def test_other_engines_continue_without_an_owned_one(model: Model) -> None:
    a, b = Engine.of(model), Engine.of(model)
    client = client_of(a, b)
    with DeltaSender(B, model.items(), client=client) as owner:
        owner.sync(model.items())
        with MultiSender([A, B], model.items(), client=client) as sender:
            with pytest.raises(PartialSyncError) as caught:
                sender.sync(touched(model).items())
    assert list(caught.value.reports) == [A]
    assert isinstance(caught.value.failures[B], RunConflict)
    assert b.holds(model)


def test_run_is_opened_again_by_a_later_sender(model: Model) -> None:
    engine = Engine.of(model)
    urls, client = ["http://engine"], engine.client()
    with MultiSender(urls, model.items(), client=client) as first:
        train(model)
        first.sync(model.items())
    continues = first.run, first.epoch
    older = other_of(model)
    with MultiSender(urls, older.items(), continues=continues, client=client) as second:
        assert (second.run, second.epoch) == (first.run, 2)
        [report] = second.sync(older.items()).values()
    assert (report.full, report.version) == (True, 2)


def test_engine_that_knows_no_runs(model: Model) -> None:
    """Its weights are not replaced unasked: who has sent them cannot be known."""
    engine = Engine.of(model, has_runs=False)
    with sender_of(engine, model) as sender:
        train(model)
        assert not sender.sync(model.items()).full
        engine.weights["layers.1.weight"][3] ^= 1
        with pytest.raises(FullSyncRefused):
            sender.sync(model.items())
        assert sender.sync_full(model.items()).full
    assert engine.holds(model)


# ---- leaving -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_what_is_staged_is_withdrawn(model: Model, kind: type[BaseException]) -> None:
    engine = Engine.of(model)

    def interrupts(take: Handler, request: httpx.Request) -> httpx.Response:
        assert engine.staged
        raise kind

    engine.faults = {1: interrupts}
    options = {"bucket_bytes": 1, "posts_in_flight": 1}
    with pytest.raises(kind), sender_of(engine, model, **options) as sender:
        sender.sync(other_of(model).items())
    assert (engine.staged, engine.staging, engine.owner) == ({}, None, None)
    assert engine.claims[-1]["action"] == "release"
    with sender_of(engine, model) as another:
        assert not another.sync(model.items()).full


def test_nothing_is_released_that_was_not_claimed(model: Model) -> None:
    engine = Engine.of(model)
    sender_of(engine, model).close()
    assert engine.claims == []


def test_claim_is_released_if_nothing_follows(model: Model) -> None:
    engine = Engine.of(model)
    engine.status = lambda: error(500, "DeltaError")  # type: ignore[method-assign]
    with sender_of(engine, model) as sender, pytest.raises(SyncError):
        sender.sync(model.items())
    assert [body["action"] for body in engine.claims] == ["claim", "release"]


def test_claim_without_an_answer_is_released(model: Model, naps: list[float]) -> None:
    """The engine might have taken it nevertheless."""
    engine = Engine.of(model)
    takes = engine.take_claim

    def loses(body: dict[str, object]) -> httpx.Response:
        answer = takes(body)
        if body["action"] == "claim":
            raise httpx.ReadTimeout("late")
        return answer

    engine.take_claim = loses  # type: ignore[method-assign]
    with sender_of(engine, model) as sender, pytest.raises(SyncError):
        sender.sync(model.items())
    assert engine.owner is None


def test_close_after_an_interrupted_one_releases(model: Model) -> None:
    """As at the interpreter's end after a second Ctrl-C."""
    engine = Engine.of(model)
    sender = sender_of(engine, model)
    sender.sync(model.items())
    with InterruptedAt(0, ("contact.py", "release_all")), pytest.raises(KeyboardInterrupt):
        sender.close()
    assert engine.owner is not None
    sender.close()
    assert engine.owner is None


def test_release_that_fails_is_no_error(model: Model) -> None:
    engine = Engine.of(model)
    with sender_of(engine, model) as sender:
        sender.sync(model.items())
        engine.take_claim = lambda body: 1 / 0  # type: ignore[method-assign, assignment, return-value]


def test_closed_sender_posts_nothing(model: Model) -> None:
    """Its run would own the engine again."""
    engine = Engine.of(model)
    with sender_of(engine, model) as sender:
        sender.sync(model.items())
    posted = len(engine.requests)
    with pytest.raises(SyncError, match="closed"):
        sender.sync(model.items())
    assert (len(engine.requests), engine.owner) == (posted, None)


_PROGRAM = """
import httpx, torch
from delta_sender import DeltaSender
said = []
def answer(request):
    if request.url.path == "/delta_run":
        print(request.content.decode(), flush=True)
    return httpx.Response(200, json={"version": 0})
client = httpx.Client(transport=httpx.MockTransport(answer))
sender = DeltaSender("http://engine", [("w", torch.zeros(4))], client=client)
try:
    sender.sync([("w", torch.ones(4))])
except Exception:
    pass
raise SystemExit(3)
"""


@pytest.mark.slow
def test_sender_left_open_is_released_at_exit() -> None:
    program = [sys.executable, "-c", _PROGRAM]
    said = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert said.returncode == 3, said.stderr
    assert [line.split('"')[3] for line in said.stdout.splitlines()] == ["claim", "release"]


# ---- waiting -------------------------------------------------------------------------------------


def test_who_waits_says_for_whom(
    model: Model, naps: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine.of(model)
    owner = {"run": "theirs", "epoch": 1, "host": "node7", "pid": 99, "since": 0.0}
    facts: dict[str, Any] = {"staged_version": 4, "owner": owner, "until": 60.0}
    engine.faults = {0: sends(error(409, "SyncInProgress", **facts))}
    with sender_of(engine, model, timeout=90.0) as sender, caplog.at_level(logging.WARNING):
        sender.sync(model.items())
    [said] = caplog.messages
    for word in ("http://engine is busy", "version 4 of run theirs (node7, pid 99", "again in 1 s"):
        assert word in said


def test_first_sync_waits_for_staged_parts(model: Model, naps: list[float]) -> None:
    """The staged parts of a sender without a run also block a claim."""
    engine = Engine.of(model)
    takes, busy = engine.take_claim, [error(409, "SyncInProgress", staged_version=4)] * 2

    def take_claim(body: dict[str, object]) -> httpx.Response:
        return busy.pop() if busy else takes(body)

    engine.take_claim = take_claim  # type: ignore[method-assign]
    with sender_of(engine, model, timeout=90.0) as sender:
        assert not sender.sync(model.items()).full
    assert naps == [1.0, 1.0]


def test_retries_are_said(
    model: Model, naps: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine.of(model)
    engine.faults = {0: breaks, 1: breaks}
    with sender_of(engine, model) as sender, caplog.at_level(logging.WARNING):
        sender.sync(model.items())
    assert [text.partition(",")[0] for text in caplog.messages] == [
        "no answer (try 1 of 8)",
        "no answer (try 2 of 8)",
    ]
    assert all("ConnectError" in text for text in caplog.messages)
