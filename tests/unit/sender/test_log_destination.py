"""The delta log that the sender writes."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from delta_sender import DeltaSender, PartialSyncError, SyncError
from engine_ext.log import open_log
from engine_ext.log.catalog import DONE, REFUSED, route
from engine_ext.log.folder_store import FolderDraft, FolderStore
from engine_ext.log.writer import Draft, manifest_of
from tests.support.fake_engine import (
    A,
    B,
    Engine,
    Handler,
    Model,
    breaks,
    copied,
    error,
    loses,
    model_of,
    sends,
    train,
)
from tests.unit.sender.test_multi_sender import sender_of, two

Fault = Callable[[Handler, httpx.Request], httpx.Response]


def replayed(where: str | Path, base: Model, version: int = 0, **state: Any) -> Engine:
    """An engine that was started with the base and the log."""
    engine, log = Engine.of(base, version=version, **state), open_log(where)
    for entry in route(log.listing().entries, version):
        engine.owner = None  # a replay claims nothing
        with log.fetched(entry):
            for path in entry.paths:
                request = httpx.Request("POST", "http://engine/", content=path.read_bytes())
                assert engine.take(request).status_code == 200
        assert engine.version == entry.version
    return engine


def let_catch_up(engine: Engine, log: Path, base: Model) -> None:
    """Let the engine replay a log when it is asked to look there."""
    answer = engine.answer

    def answers(request: httpx.Request) -> httpx.Response:
        if request.url.path != "/delta_catch_up":
            return answer(request)
        late = replayed(log, base)
        engine.weights, engine.version = late.weights, late.version
        engine.committed = late.committed
        return httpx.Response(200, json={"status": "caught_up", "version": late.version})

    engine.answer = answers  # type: ignore[method-assign]


def chain(log: str | Path) -> list[tuple[int | None, int]]:
    return [(entry.base_version, entry.version) for entry in open_log(log).listing().entries]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoding", "bucket_bytes"), [("deltas_zstd", 1), ("gap8_ulp", 1 << 20), ("auto", 1)]
)
def test_an_engine_that_starts_reaches_what_the_others_hold(
    tmp_path: Path, encoding: str, bucket_bytes: int
) -> None:
    model = model_of(torch.bfloat16, torch.float32, tensors=4)
    base = copied(model)
    a, b = two(model)
    options = {"encoding": encoding, "bucket_bytes": bucket_bytes}
    with sender_of(a, b, model, delta_log=tmp_path / "log", **options) as sender:
        for step, density in enumerate([0.02, 0.0, 0.9, 0.05]):
            train(model, step, density)
            (sender.sync_full if step == 2 else sender.sync)(model.items())
    assert chain(tmp_path / "log") == [(0, 1), (1, 2), (None, 3), (3, 4)]
    # Differences are not for engines of every kind.
    for part in (tmp_path / "log").glob("*/*.safetensors"):
        assert manifest_of(part.read_bytes()).encoding != "gap8_ulp"
    late = replayed(tmp_path / "log", base)
    assert late.holds(model)
    assert a.holds(model)
    assert b.holds(model)
    assert late.version == a.version == b.version == 4


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_differences_reach_what_the_others_hold(tmp_path: Path, bucket_bytes: int) -> None:
    model = model_of(torch.bfloat16, torch.float32, tensors=4)
    base, log = copied(model), tmp_path / "log"
    a, b = two(model)
    options = {"encoding": "gap8_ulp", "bucket_bytes": bucket_bytes, "log_differences": True}
    with sender_of(a, b, model, delta_log=log, **options) as sender:
        for step in range(3):
            train(model, step, 0.05)
            sender.sync(model.items())
    encodings = {manifest_of(part.read_bytes()).encoding for part in log.glob("*/*.safetensors")}
    assert encodings == {"gap8_ulp"}
    assert replayed(log, base).holds(model)
    other = {name: tensor + 1 for name, tensor in base.items()}
    with pytest.raises(AssertionError):  # refused: it has other old values
        replayed(log, other)


def test_the_log_has_the_bytes_that_were_sent(tmp_path: Path) -> None:
    """So an engine that has replayed a version says to the sender's repeat that it has it."""
    model = model_of(torch.bfloat16, torch.float32)
    engine = Engine.of(model)
    with DeltaSender(A, model.items(), client=engine.client(), delta_log=tmp_path) as sender:
        train(model)
        sender.sync(model.items())
    parts = (tmp_path / "weight_v000001").glob("*.safetensors")
    assert sorted(part.read_bytes() for part in parts) == sorted(engine.bodies)


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_no_engine_commits_before_the_version_is_in_the_log(
    tmp_path: Path, bucket_bytes: int
) -> None:
    model = model_of(tensors=3)
    a, b = two(model)
    seen = []

    def note(take: Handler, request: httpx.Request) -> httpx.Response:
        response = take(request)
        if json.loads(response.content)["status"] == "committed":
            seen.append((tmp_path / "weight_v000001" / DONE).exists())
        return response

    for engine in (a, b):
        engine.faults = dict.fromkeys(range(9), note)
    with sender_of(a, b, model, delta_log=tmp_path, bucket_bytes=bucket_bytes) as sender:
        train(model)
        sender.sync(model.items())
    assert seen == [True, True]


def test_a_log_that_cannot_be_written_stops_the_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(tensors=3)
    base = copied(model)
    a, b = two(model)
    with sender_of(a, b, model, delta_log=tmp_path) as sender:
        train(model)

        def full(*arguments: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(Draft, "add", full)
            with pytest.raises(PartialSyncError, match="No space left") as caught:
                sender.sync(model.items())
        assert set(caught.value.failures) == {A, B}
        assert (a.version, b.version) == (0, 0)
        assert chain(tmp_path) == []
        sender.sync(model.items())
    assert (a.version, b.version) == (1, 1)
    assert replayed(tmp_path, base).holds(model)


def test_version_whose_answer_was_lost_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines that start replay it, so that it must not be one that nobody has committed."""
    model = model_of(tensors=3)
    a, b = two(model)
    publish = FolderDraft.publish

    def lost(draft: FolderDraft, mark: str, data: bytes) -> None:
        publish(draft, mark, data)
        raise OSError(errno.EIO, "no answer")

    monkeypatch.setattr(FolderDraft, "publish", lost)
    with sender_of(a, b, model, delta_log=tmp_path) as sender:
        for step in range(2):
            train(model, step)
            assert len(sender.sync(model.items())) == 2
            assert a.version == b.version == step + 1
    assert chain(tmp_path) == [(0, 1), (1, 2)]


def test_version_that_cannot_be_refused_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log still has it, so the next version there applies to any other."""
    model = model_of(tensors=3)
    base, engine = copied(model), Engine.of(model)
    engine.faults = {0: sends(error(507, "SpoolFull"))}

    def full(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with DeltaSender(A, model.items(), client=engine.client(), delta_log=tmp_path) as sender:
        train(model)
        with monkeypatch.context() as patch:
            patch.setattr(FolderStore, "refuse", full)
            with pytest.raises(SyncError, match="SpoolFull"):
                sender.sync(model.items())
        assert (chain(tmp_path), engine.version) == ([(0, 1)], 0)
        train(model, 1)
        assert not sender.sync(model.items()).full
    assert chain(tmp_path) == [(0, 1), (None, 2)]
    assert replayed(tmp_path, base).holds(model)


def test_close_again_leaves_a_later_version_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the same number that another sender has written meanwhile."""
    model = model_of(tensors=3)
    base, engine = copied(model), Engine.of(model)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    first = DeltaSender(A, model.items(), client=engine.client(), delta_log=tmp_path)
    train(model)
    with monkeypatch.context() as patch:
        patch.setattr(Draft, "finish", full)
        with pytest.raises(SyncError, match="No space left"):
            first.sync(model.items())
    first.close()
    with DeltaSender(A, base.items(), client=engine.client(), delta_log=tmp_path) as second:
        second.sync(model.items())
        first.close()
    assert chain(tmp_path) == [(0, 1)]
    assert replayed(tmp_path, base).holds(model)


def test_what_no_engine_took_is_refused_in_the_log(tmp_path: Path) -> None:
    model = model_of(tensors=3)
    base = copied(model)
    engine = Engine.of(model)
    engine.faults = {0: sends(error(507, "SpoolFull"))}
    with DeltaSender(A, model.items(), client=engine.client(), delta_log=tmp_path) as sender:
        train(model, 0)
        with pytest.raises(SyncError):
            sender.sync(model.items())
        engine.faults = {}
        assert sender.version == 0
        assert [path.name for path in (tmp_path / "weight_v000001").iterdir()] == [REFUSED]
        train(model, 1)
        assert sender.sync(model.items()).version == 2
        assert chain(tmp_path) == [(0, 2)]
        train(model, 2)
        sender.sync(model.items())
    assert chain(tmp_path) == [(0, 2), (2, 3)]
    assert replayed(tmp_path, base).holds(model)


@pytest.mark.parametrize(
    ("fault", "restarts", "encoding"),
    [
        (breaks, False, "deltas_zstd"),
        (breaks, True, "gap8_ulp"),
        (loses, False, "gap8_ulp"),
        (loses, True, "deltas_zstd"),
    ],
)
def test_what_an_engine_may_have_taken_stays_in_the_log(
    tmp_path: Path, naps: list[float], fault: Fault, restarts: bool, encoding: str
) -> None:
    """It has, or has not; or it starts again, and replays it, as values."""
    model = model_of(tensors=3)
    base = copied(model)
    engine = Engine.of(model)
    engine.faults = dict.fromkeys(range(8), fault)
    with DeltaSender(
        A, model.items(), client=engine.client(), delta_log=tmp_path, encoding=encoding
    ) as sender:
        train(model, 0)
        with pytest.raises(SyncError):
            sender.sync(model.items())
        assert sender.version == 0
        assert chain(tmp_path) == [(0, 1)]
        if restarts:
            late = replayed(tmp_path, base)
            engine.weights, engine.version = late.weights, late.version
            engine.last_sync = late.last_sync
        has_it = engine.version
        assert has_it == (fault is loses or restarts)
        train(model, 1)
        report = sender.sync(model.items())
        assert (report.full, report.base_version, report.version) == (False, has_it, 2)
        assert engine.holds(model)
        train(model, 2)
        sender.sync(model.items())
    assert chain(tmp_path) == [(0, 1), (1, 2), (2, 3)]
    assert replayed(tmp_path, base).holds(model)
    assert engine.holds(model)


def test_an_engine_that_replayed_a_refused_version_is_found_out(tmp_path: Path) -> None:
    model = model_of(tensors=3)
    engine = Engine.of(model)

    def restart(take: Handler, request: httpx.Request) -> httpx.Response:
        late = replayed(tmp_path, copied(before))
        engine.weights, engine.version = late.weights, late.version
        engine.run, engine.loaded = late.run, late.loaded
        return error(507, "SpoolFull")

    before = copied(model)
    engine.faults = {0: restart}
    with DeltaSender(A, model.items(), client=engine.client(), delta_log=tmp_path) as sender:
        train(model, 0)
        with pytest.raises(SyncError):
            sender.sync(model.items())
        assert engine.version == 1
        train(model, 1)
        report = sender.sync(model.items())
    assert report.full
    assert engine.holds(model)


def test_one_that_was_down_for_some_syncs_has_them_from_the_log(
    tmp_path: Path, naps: list[float]
) -> None:
    model = model_of(tensors=3)
    base = copied(model)
    a, b = two(model)
    b.faults = dict.fromkeys(range(99), breaks)
    with sender_of(a, b, model, delta_log=tmp_path) as sender:
        for step in range(3):
            train(model, step)
            with pytest.raises(PartialSyncError):
                sender.sync(model.items())
        late = replayed(tmp_path, base)
        b.weights, b.version, b.faults = late.weights, late.version, {}
        train(model, 7)
        reports = sender.sync(model.items())
    assert [(r.full, r.base_version) for r in reports.values()] == [(False, 3), (False, 3)]
    assert a.holds(model)
    assert b.holds(model)


def test_one_that_fails_keeps_nothing_out_of_the_log(tmp_path: Path) -> None:
    model = model_of(tensors=3)
    base = copied(model)
    a, b = two(model)
    a.faults = {0: sends(error(507, "SpoolFull"))}
    with sender_of(a, b, model, delta_log=tmp_path) as sender:
        train(model, 0)
        with pytest.raises(PartialSyncError):
            sender.sync(model.items())
        train(model, 1)
        sender.sync(model.items())
    assert chain(tmp_path) == [(0, 1), (1, 2)]
    assert replayed(tmp_path, base).holds(model)
    assert a.holds(model)


def test_another_sender_goes_on_in_the_same_log(tmp_path: Path) -> None:
    """From the newest version, or, as a trainer that went back to an earlier step, from there."""
    model = model_of(tensors=3)
    first = copied(model)
    engine = Engine.of(model)
    for base_version, kept in ((0, None), (1, None), (0, first)):
        if kept is not None:
            model = copied(kept)
        options: Any = {"base_version": base_version, "delta_log": tmp_path, "full": "allow"}
        with DeltaSender(A, model.items(), client=engine.client(), **options) as sender:
            train(model, base_version + 5)
            report = sender.sync(model.items())
        assert engine.holds(model)
        assert report.full or kept is None  # the engine was at version 2
    assert chain(tmp_path) == [(0, 1), (1, 2), (0, 3)]
    assert replayed(tmp_path, first).holds(model)


@pytest.mark.parametrize("digest", [True, False])
def test_restarted_sender_continues_the_log(tmp_path: Path, digest: bool) -> None:
    """Its digest shows which version the base is, not ``base_version``; without, all is sent."""
    model = model_of(tensors=3)
    base, engine = copied(model), Engine.of(model)
    options: Any = {"delta_log": tmp_path, "digest": digest, "full": "allow"}
    for steps in ((0, 1), (2, 3)):
        with DeltaSender(A, model.items(), client=engine.client(), **options) as sender:
            for step in steps:
                train(model, step)
                sender.sync(model.items())
    assert chain(tmp_path) == [(0, 1), (1, 2), (2 if digest else None, 3), (3, 4)]
    assert replayed(tmp_path, base).holds(model)
    assert engine.holds(model)


def test_log_continues_by_its_own_version_number(tmp_path: Path) -> None:
    """An engine that has loaded the trainer's checkpoint counts from 0; another log begins so."""
    model = model_of(tensors=3)
    base, engine = copied(model), Engine.of(model, version=6)
    with DeltaSender(A, model.items(), client=engine.client(), delta_log=tmp_path / "a") as sender:
        train(model, 0)
        sender.sync(model.items())
    engine.restart(model)
    with DeltaSender(A, model.items(), client=engine.client(), delta_log=tmp_path / "a") as sender:
        train(model, 1)
        first = sender.sync(model.items())
    with DeltaSender(A, model.items(), client=engine.client(), delta_log=tmp_path / "b") as sender:
        train(model, 2)
        sender.sync(model.items())
    assert chain(tmp_path / "a") == [(6, 7), (7, 8)]
    assert chain(tmp_path / "b") == [(8, 9)]
    late = replayed(tmp_path / "a", base, 6)
    assert late.digest().hex() == first.digest


def test_log_gets_whole_what_no_digest_covers(tmp_path: Path) -> None:
    """A base that differs from the log's version there looks like it."""
    model = model_of(tensors=3)
    base, [name, *_] = copied(model), sorted(model)
    engine = Engine.of(model, undigested={name})
    options: Any = {"client": engine.client(), "delta_log": tmp_path}
    with DeltaSender(A, model.items(), **options) as sender:
        train(model, 0)
        sender.sync(model.items())
    model[name].add_(1)
    with DeltaSender(A, model.items(), **options) as sender:
        train(model, 1)
        sender.sync(model.items())
    assert chain(tmp_path) == [(0, 1), (1, 2)]
    assert replayed(tmp_path, base, undigested={name}).holds(model)


def test_what_is_no_log_is_refused_before_the_base_is_read() -> None:
    def base() -> Iterator[tuple[str, torch.Tensor]]:
        yield pytest.fail("the base is read")

    with pytest.raises(ValueError, match="'http://engine' is no delta log"):
        DeltaSender(A, base(), delta_log="http://engine")
