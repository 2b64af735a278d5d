"""What the sender remembers over its own restart."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from delta_sender import DeltaSender, FullSyncRefused, MultiSender, PartialSyncError, SyncError
from delta_sender.publish.state_file import Known, State, StateFile, read_state
from tests.support.fake_engine import (
    A,
    B,
    Engine,
    Handler,
    Model,
    client_of,
    copied,
    error,
    model_of,
    sends,
    train,
)
from tests.unit.sender.test_log_destination import chain, let_catch_up, replayed
from tests.unit.sender.test_multi_sender import two


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state.json"


def sender_of(engine: Engine, base: Model, file: Path, **options: Any) -> DeltaSender:
    return DeltaSender(A, base.items(), client=engine.client(), state=file, **options)


def synced(engine: Engine, model: Model, file: Path, count: int = 2, **options: Any) -> None:
    """What a sender did that has ended since."""
    with sender_of(engine, model, file, **options) as sender:
        for step in range(count):
            train(model, step)
            sender.sync(model.items())


# The file --------------------------------------------------------------------------------------


def test_the_file_is_never_half_written(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(StateFile(file)) as state:
        state.begin(3, "a" * 32, "f" * 32)
    before = file.read_bytes()

    def killed(source: object, target: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            with contextlib.closing(StateFile(file)) as state:
                state.begin(4, "b" * 32, "f" * 32)
    assert file.read_bytes() == before
    assert read_state(file) == State(base="f" * 32, in_flight=Known(3, "a" * 32), highest=3)


def test_a_sender_that_fails_gives_the_file_back(file: Path, tmp_path: Path) -> None:
    model = model_of(tensors=2)
    engine = Engine.of(model)
    with pytest.raises(FileNotFoundError) as failed:
        DeltaSender(A, tmp_path / "none", state=file)
    synced(engine, model, file)
    assert failed.value.__traceback__ is not None  # it keeps what the sender had opened
    assert engine.holds(model)


def test_two_senders_do_not_share_it(file: Path) -> None:
    model = model_of(tensors=2)
    engine = Engine.of(model)
    with pytest.raises(ValueError, match="not one of"):
        sender_of(engine, model, file, encoding="none")
    file.write_text("{")
    with pytest.raises(ValueError, match="not a sender's state"):
        sender_of(engine, model, file)
    file.unlink()
    with pytest.raises(TypeError, match=r"weight: a torch\.Tensor is needed"):
        DeltaSender(A, [("weight", None)], state=file)  # type: ignore[list-item]
    with sender_of(engine, model, file) as sender:
        with pytest.raises(BlockingIOError, match="another sender uses the state"):
            sender_of(engine, model, file)
        sender.sync(model.items())
    with sender_of(engine, model, file) as sender:
        assert sender.version == 1


def test_a_folder_that_cannot_be_synced(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems know no fsync of a folder."""
    fsync = os.fsync

    def files_only(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", files_only)
    model = model_of(tensors=2)
    engine = Engine.of(model)
    synced(engine, model, file, 1)
    assert read_state(file).engines[A].version == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"engines": {"u": 3}}'])
def test_a_file_that_is_no_state(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(ValueError, match="not a sender's state"):
        read_state(file)


def test_what_it_holds(file: Path) -> None:
    model = model_of(tensors=2)
    engine = Engine.of(model)
    synced(engine, model, file)
    found = json.loads(file.read_bytes())
    assert found["highest"] == 2
    assert found["in_flight"] is None
    assert found["engines"] == {A: {"version": 2, "digest": engine.digest().hex()}}


def test_what_was_in_flight_stays_until_something_else_is(file: Path) -> None:
    """A sender that ends without a sync knows no more of it than the one before."""
    model = model_of(tensors=2)
    engine = Engine.of(model)
    with contextlib.closing(StateFile(file)) as state:
        state.begin(1, "a" * 32, "f" * 32)
    before = read_state(file)
    with sender_of(engine, model, file) as sender, pytest.raises(ValueError, match="missing"):
        sender.sync([])
    after = read_state(file)
    assert after.epoch == 1
    assert msgspec.structs.replace(after, run="", epoch=0) == before
    with sender_of(engine, model, file) as sender:
        assert sender.sync(model.items()).version == 2
    assert read_state(file).in_flight is None


# Restarts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("digest", [True, False])
def test_it_goes_on_from_what_was_acknowledged(file: Path, digest: bool) -> None:
    model = model_of(tensors=3)
    engine = Engine.of(model)
    synced(engine, model, file, digest=digest)
    with sender_of(engine, model, file, digest=digest) as sender:
        assert sender.version == 2
        train(model, 7)
        report = sender.sync(model.items())
    assert (report.full, report.base_version, report.version) == (False, 2, 3)
    assert engine.holds(model)


def test_from_other_weights_it_sends_all(file: Path) -> None:
    """The trainer goes back to a checkpoint that is older than what the engine holds."""
    model = model_of(tensors=3)
    engine = Engine.of(model)
    synced(engine, model, file, 1)
    checkpoint = copied(model)
    synced(engine, model, file, 2)
    with sender_of(engine, checkpoint, file) as sender:
        train(checkpoint, 7)
        report = sender.sync(checkpoint.items())
    assert report.full
    assert report.version == 4
    assert engine.holds(checkpoint)


def test_url_names_the_same_engine_with_a_slash(file: Path) -> None:
    model = model_of(tensors=3)
    engine = Engine.of(model)
    for url in (A, f"{A}/"):
        known_at = Known(engine.version, engine.digest().hex())
        state = read_state(file)
        engines = {f"{A}/": known_at} if url == A else state.engines  # as older senders wrote it
        file.write_bytes(msgspec.json.encode(msgspec.structs.replace(state, engines=engines)))
        with DeltaSender(url, model.items(), client=engine.client(), state=file) as sender:
            assert sender.version == engine.version
            train(model, engine.version)
            assert not sender.sync(model.items()).full
        assert [*read_state(file).engines] == [A]


def test_close_again_leaves_a_later_senders_file_alone(file: Path) -> None:
    model = model_of(tensors=2)
    engine = Engine.of(model)
    first = sender_of(engine, model, file)
    first.sync(model.items())
    first.close()
    synced(engine, model, file)
    first.close()
    assert read_state(file).engines[A].version == engine.version == 3


def test_state_that_cannot_be_written_hides_no_outcome(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One engine has committed, the other refused; the file is from before that."""
    folder, away, model = tmp_path / "states", tmp_path / "away", model_of(tensors=3)
    folder.mkdir()
    a, b = two(model)

    def commits_last(take: Handler, request: httpx.Request) -> httpx.Response:
        folder.rename(away)
        return take(request)

    a.faults, b.faults = {1: commits_last}, {1: sends(error(507, "SpoolFull"))}
    options: dict[str, Any] = {"client": client_of(a, b), "state": folder / "state.json"}
    with MultiSender([A, B], model.items(), **options) as sender:
        sender.sync(model.items())
        train(model)
        with pytest.raises(PartialSyncError, match="SpoolFull") as failed:
            sender.sync(model.items())
        assert ([*failed.value.reports], [*failed.value.failures]) == ([A], [B])
    assert "the state file cannot be written" in caplog.text
    away.rename(folder)
    with MultiSender([A, B], model.items(), **options) as sender:  # the lock is free
        train(model, 1)
        reports = sender.sync(model.items())
    assert [reports[url].full for url in (A, B)] == [False, True]
    assert a.holds(model)
    assert b.holds(model)


def test_other_weights_outside_the_digest_are_sent(file: Path) -> None:
    """The file's digest covers every tensor, and the engine's does not."""
    model = model_of(tensors=3)
    engine = Engine.of(model, undigested={"layers.1.weight"})
    base = copied(model)
    synced(engine, model, file, 1)
    for name in engine.digested:
        base[name].copy_(model[name])
    with sender_of(engine, base, file) as sender:
        sender.sync(base.items())
    assert engine.holds(base)


@pytest.mark.parametrize("same", [True, False])
def test_nothing_was_acknowledged_before_the_restart(file: Path, same: bool) -> None:
    """The base is what the run began with, or what the engine has refused."""
    model = model_of(tensors=3)
    engine, base = Engine.of(model), copied(model)
    engine.faults[0] = sends(error(507, "SpoolFull"))
    with pytest.raises(SyncError, match="SpoolFull"):
        synced(engine, model, file, 1, digest=False)
    with sender_of(engine, base if same else model, file, digest=False) as sender:
        train(model, 1)
        refused = contextlib.nullcontext() if same else pytest.raises(FullSyncRefused)
        with refused:
            sender.sync(model.items())
    assert engine.holds(model if same else base)


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("went_on", [False, True])
def test_killed_while_the_last_part_was_posted(file: Path, committed: bool, went_on: bool) -> None:
    """The engine has committed or not, and the trainer's checkpoint is from before or after."""
    model = model_of(tensors=3)
    engine = Engine.of(model)
    synced(engine, model, file, 1)
    before = copied(model)

    def killed(take: Handler, request: httpx.Request) -> httpx.Response:
        if committed:
            take(request)
        raise KeyboardInterrupt

    engine.faults = {1: killed}
    sender = sender_of(engine, model, file)
    train(model, 5)
    wrote = StateFile.end
    try:
        StateFile.end = lambda *arguments, **named: None  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            sender.sync(model.items())
    finally:
        StateFile.end = wrote  # type: ignore[method-assign]
    engine.faults = {}
    assert read_state(file).in_flight is not None
    assert sender._publisher._tracker.file is not None
    sender._publisher._tracker.file.close()  # as with every file of a process that is gone

    base = model if went_on else before
    with sender_of(engine, base, file) as sender:
        train(base, 6)
        report = sender.sync(base.items())
    assert report.full is (committed is not went_on)
    assert report.version == engine.version
    assert report.version >= 3
    assert engine.holds(base)


def test_the_number_of_a_refused_sync_is_not_used_again(file: Path) -> None:
    model = model_of(tensors=2)
    engine = Engine.of(model)
    engine.faults = {0: sends(error(507, "SpoolFull"))}
    with sender_of(engine, model, file) as sender:
        train(model, 0)
        with pytest.raises(Exception, match="SpoolFull"):
            sender.sync(model.items())
        assert read_state(file).in_flight is None
        assert sender.sync(model.items()).version == 2


def test_each_engine_goes_on_from_its_own_version(file: Path) -> None:
    model = model_of(tensors=3)
    a, b = two(model)
    client = client_of(a, b)
    with MultiSender([A, B], model.items(), client=client, state=file) as sender:
        train(model, 0)
        sender.sync(model.items())
        b.faults = {1: sends(error(507, "SpoolFull"))}
        train(model, 1)
        with pytest.raises(PartialSyncError):
            sender.sync(model.items())
        b.faults = {}
    with MultiSender([A, B], model.items(), client=client, state=file) as sender:
        train(model, 2)
        reports = sender.sync(model.items())
    assert [reports[url].full for url in (A, B)] == [False, True]
    assert a.holds(model)
    assert b.holds(model)
    assert a.version == b.version == 3


def test_an_engine_that_is_behind_is_brought_up_by_its_log(file: Path, tmp_path: Path) -> None:
    """It has started from the base. The version that it is sent can already be in the log."""
    model = model_of(tensors=3)
    base, log = copied(model), tmp_path / "log"
    engine = Engine.of(model)
    synced(engine, model, file, 3, delta_log=log)
    engine.weights, engine.version = Engine.of(base).weights, 0
    let_catch_up(engine, log, base)
    with sender_of(engine, model, file, delta_log=log) as sender:
        train(model, 8)
        report = sender.sync(model.items())
    assert (report.full, report.base_version, report.version) == (False, 3, 4)
    assert report.status in ("committed", "already_applied")
    assert engine.holds(model)
    assert chain(log) == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_a_log_that_lacks_the_version_gets_all_of_it(file: Path, tmp_path: Path) -> None:
    model = model_of(tensors=3)
    base, log = copied(model), tmp_path / "log"
    engine = Engine.of(model)
    synced(engine, model, file, 1, delta_log=log)
    synced(engine, model, file, 2)  # without the log
    synced(engine, model, file, 1, delta_log=log)
    assert chain(log) == [(0, 1), (None, 4)]
    assert replayed(log, base).holds(model)
    assert engine.holds(model)


def known(file: Path, **engines: Engine) -> None:
    """A state in which engines have acknowledged what they hold."""
    urls = {"a": A, "b": B}
    at = {urls[name]: Known(e.version, e.digest().hex()) for name, e in engines.items()}
    file.write_bytes(msgspec.json.encode(State(run="another", epoch=1, engines=at)))


def test_a_number_that_two_engines_have_for_different_weights(file: Path) -> None:
    """The one that holds the base continues; the other is not taken for it by its version."""
    older = model_of(tensors=3)
    model = copied(older)
    train(model)
    a, b = Engine.of(older, version=5), Engine.of(model, version=5)
    known(file, a=a, b=b)
    options: dict[str, Any] = {"client": client_of(a, b), "state": file, "digest": False}
    with MultiSender([A, B], model.items(), **options) as sender:
        train(model, 1)
        reports = sender.sync(model.items())
    assert [reports[url].full for url in (A, B)] == [True, False]
    assert a.holds(model)
    assert b.holds(model)


def test_a_new_engine_is_not_overwritten_unasked(file: Path) -> None:
    """It is at the version that nobody has said anything about, but not with these weights."""
    first = model_of(tensors=3)
    model = copied(first)
    train(model)
    a, b = Engine.of(model, version=3), Engine.of(first)
    known(file, a=a)
    train(model, 1)
    options: dict[str, Any] = {"client": client_of(a, b), "state": file, "digest": False}
    with MultiSender([A, B], model.items(), **options) as sender:
        train(model, 2)
        with pytest.raises(PartialSyncError) as caught:
            sender.sync(model.items())
    assert caught.value.reports[A].full
    assert isinstance(caught.value.failures[B], FullSyncRefused)
    assert b.holds(first)
    with MultiSender([A, B], model.items(), full="allow", **options) as sender:
        reports = sender.sync(model.items())
    assert [reports[url].full for url in (A, B)] == [False, True]
    assert a.holds(model)
    assert b.holds(model)


@pytest.mark.parametrize("digest", [True, False])
def test_a_log_gets_all_where_the_base_is_of_no_known_version(
    file: Path, tmp_path: Path, digest: bool
) -> None:
    """A delta from it leads on from nothing in the log, least of all from its beginning."""
    model = model_of(tensors=3)
    base, log = copied(model), tmp_path / "log"
    engine = Engine.of(model)
    options: dict[str, Any] = {"delta_log": log, "digest": digest}
    synced(engine, model, file, 1, **options)
    checkpoint = copied(model)
    synced(engine, model, file, 2, **options)
    synced(engine, checkpoint, file, 1, **options)
    assert chain(log)[3:] == [(None, 4)]
    assert replayed(log, base).holds(checkpoint)
    assert engine.holds(checkpoint)


def test_a_log_whose_number_is_of_other_weights_gets_all(file: Path, tmp_path: Path) -> None:
    """One engine was given the whole of an older step under a number that the log has too."""
    older = model_of(tensors=3)
    base, newer, log = copied(older), copied(older), tmp_path / "log"
    b = Engine.of(newer)
    with MultiSender([B], newer.items(), client=client_of(b, b), delta_log=log) as sender:
        train(newer)
        sender.sync(newer.items())
    a = Engine.of(older, version=1)
    known(file, a=a, b=b)
    synced(a, older, file, 1, delta_log=log, digest=False)
    assert chain(log) == [(0, 1), (None, 2)]
    assert replayed(log, base).holds(older)
    assert a.holds(older)
