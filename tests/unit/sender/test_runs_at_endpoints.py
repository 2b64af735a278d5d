"""Senders and the engine's own endpoints agree on runs: claims, takeovers, numbers, reasons."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from delta_sender import DeltaSender, FullSyncRefused, RunConflict, RunFenced, ShardedSender
from scripts import reference_sender
from tests.support.delta_bodies import VERSION
from tests.support.endpoint_rig import Rig
from tests.support.fake_engine import Model, bits, copied, train
from tests.support.present import present
from tests.unit.sender.sharded.test_one_rank import whole
from tests.unit.sender.test_fleet import fresh_model

pytestmark = pytest.mark.slow


@pytest.fixture
def client(rig: Rig) -> httpx.Client:
    """A client that any thread can use, of the engine at version 7, which it was started with."""
    lock = threading.Lock()

    def answer(request: httpx.Request) -> httpx.Response:
        body, url = request.read(), request.url
        headers = {k: v for k, v in request.headers.items() if k in ("content-type", "accept")}
        with lock:
            given = rig.run(
                rig.request(request.method, str(url), content=body or None, headers=headers)
            )
        return httpx.Response(given.status_code, content=given.content, headers=given.headers)

    transport = httpx.MockTransport(answer)
    return httpx.Client(transport=transport, base_url="http://engine")


@pytest.fixture
def model() -> Model:
    return fresh_model()


Open = Callable[..., DeltaSender]


@pytest.fixture
def open_sender(client: httpx.Client) -> Open:
    return lambda base, **options: DeltaSender(
        "http://engine", base.items(), client=client, **options
    )


def holds(rig: Rig, model: Model) -> bool:
    held = rig.engine.weights
    return all(np.array_equal(held[name], bits(tensor)) for name, tensor in model.items())


def test_restarted_sender_sends_what_changed(rig: Rig, model: Model, open_sender: Open) -> None:
    runs = []
    for number in range(3):
        with open_sender(model) as sender:
            model["norm.weight"].view(torch.int16)[number] += 1
            report = sender.sync(model.items())
        assert (report.full, report.nnz, report.run) == (False, 1, sender.run)
        assert (report.base_version, report.version) == (VERSION + number, VERSION + number + 1)
        status = rig.status()
        assert (status.version.run, status.owner) == (sender.run, None)
        assert holds(rig, model)
        runs.append(sender.run)
    assert len(set(runs)) == 3


def test_wrong_checkpoint_replaces_nothing(rig: Rig, model: Model, open_sender: Open) -> None:
    wrong = copied(model)
    train(wrong)
    with open_sender(wrong) as sender, pytest.raises(FullSyncRefused, match="was started with"):
        sender.sync(wrong.items())
    assert (rig.status().version.number, rig.status().owner, holds(rig, model)) == (7, None, True)
    with open_sender(wrong) as sender:
        report = sender.sync_full(wrong.items())
    assert (report.base_version, report.version, holds(rig, wrong)) == (7, 8, True)
    history = rig.get("/delta_status", params={"history": "true"}).json()["history"]
    assert history[-1]["reason"] == report.reason == "requested"


def test_takeover_fences_for_good(rig: Rig, model: Model, open_sender: Open) -> None:
    theirs = copied(model)
    with open_sender(model) as zombie, open_sender(theirs) as second:
        zombie.sync(model.items())
        with pytest.raises(RunConflict) as caught:
            second.sync(theirs.items())
        assert not isinstance(caught.value, RunFenced)
        assert caught.value.error["owner"]["run"] == zombie.run
        with open_sender(theirs, takeover=True) as third:
            train(theirs)
            assert not third.sync(theirs.items()).full
            train(model, 1)
            for sync in (zombie.sync, zombie.sync_full):
                with pytest.raises(RunFenced) as fenced:
                    sync(model.items())
                assert fenced.value.error["owner"]["run"] == third.run
            train(theirs, 2)
            assert not third.sync(theirs.items()).full
    assert holds(rig, theirs)


def test_killed_sender_is_resumed_by_its_state(
    rig: Rig, model: Model, open_sender: Open, tmp_path: Path
) -> None:
    file, left = tmp_path / "state.json", tmp_path / "left.json"
    killed = open_sender(model, state=file)
    train(model)
    killed.sync(model.items())
    left.write_bytes(file.read_bytes())  # whose lock nobody has
    with open_sender(model, state=left) as sender:
        assert (sender.run, sender.epoch) == (killed.run, 2)
        train(model, 1)
        report = sender.sync(model.items())
        assert (report.full, report.version) == (False, 9)
        with pytest.raises(RunFenced):
            killed.sync(model.items())
    assert holds(rig, model)
    killed.close()


def test_rolled_back_engine_gets_a_new_number(rig: Rig, model: Model, open_sender: Open) -> None:
    with open_sender(model) as sender:
        for step in range(2):
            train(model, step)
            sender.sync(model.items())
        assert rig.post("/delta_rollback").json()["version"] == 8
        train(model, 2)
        report = sender.sync(model.items())
        assert (report.full, report.base_version, report.version) == (True, 8, 10)
        assert (report.reason or "").startswith("behind: ")
        assert rig.post("/delta_rollback").json()["version"] == 8
    assert rig.status().version.number == 8


def test_rolled_back_base_is_continued(rig: Rig, model: Model, open_sender: Open) -> None:
    """By another sender, whose base is what the engine went back to."""
    first = copied(model)
    with open_sender(model) as sender:
        train(model)
        sender.sync(model.items())
    rig.post("/delta_rollback")
    with open_sender(first) as sender:
        train(first, 5)
        report = sender.sync(first.items())
    assert (report.full, report.base_version, report.version) == (False, 7, 8)
    assert holds(rig, first)


def test_sharded_sender_owns_the_engine(rig: Rig, model: Model, client: httpx.Client) -> None:
    with ShardedSender("http://engine", whole(model), client=client) as sender:
        train(model)
        report = sender.sync(whole(model))
        assert (report.full, report.base_version, report.version) == (False, 7, 8)
        assert present(rig.status().owner).run == sender.run == report.run
    assert rig.status().owner is None
    assert holds(rig, model)


def test_reference_sender_keeps_to_the_rules(
    rig: Rig, model: Model, client: httpx.Client, open_sender: Open
) -> None:
    first = reference_sender.Sender(client, model, version=VERSION)
    train(model)
    assert first.sync(model) == 8
    with open_sender(model) as sender, pytest.raises(RunConflict):
        sender.sync(model.items())
    with pytest.raises(reference_sender.SyncError, match="RunConflict"):
        reference_sender.Sender(client, model, version=8).sync(model)
    first.close()
    with pytest.raises(reference_sender.BaseError, match="the engine is at 8, the base at 0"):
        reference_sender.Sender(client, model).sync(model)
    again = reference_sender.Sender(client, model, version=8)
    for version in (9, 10):
        train(model, version)
        assert again.sync(model) == version
    rig.post("/delta_rollback")
    assert again.sync(model) == 12  # 11 was the delta that did not fit
    assert holds(rig, model)
    again.close()


def test_copies_of_a_state_file_do_not_heal_each_other(
    rig: Rig, model: Model, open_sender: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / name for name in ("state.json", "copy.json")]
    with open_sender(model, state=files[0]) as sender:
        sender.sync(model.items())
    files[1].write_bytes(files[0].read_bytes())
    first, theirs = open_sender(model, state=files[0]), copied(model)
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    second = open_sender(theirs, state=files[1])
    assert (first.run, first.epoch) == (second.run, second.epoch)
    train(model)
    first.sync(model.items())
    train(theirs, 1)
    with pytest.raises(RunConflict, match="same state"):
        second.sync(theirs.items())
    second.close()
    train(model, 2)
    assert not first.sync(model.items()).full
    assert holds(rig, model)
    first.close()
