"""Digests in a sender's parts: what they prove, what they find, and what follows."""

from __future__ import annotations

import itertools

import httpx
import numpy as np
import pytest
import torch

from delta_sender import FullSyncRefused, SyncError
from delta_sender.encode import acked_state
from engine_ext.format.digest import Digest
from tests.support.fake_engine import (
    Engine,
    Handler,
    bits,
    digest_of,
    error,
    loses,
    model_of,
    sender_of,
    sends,
    train,
)


def test_digests_of_the_parts() -> None:
    model = model_of(torch.bfloat16, torch.float32, tensors=4)
    engine = Engine.of(model)
    sender = sender_of(engine, model, bucket_bytes=1)
    before = digest_of(engine.weights)
    train(model)
    after = digest_of({name: bits(tensor) for name, tensor in model.items()})
    assert sender.sync(model.items()).digest == after.hex()
    manifests = [part.manifest for part in engine.log]
    assert {m.digest_before for m in manifests} == {before.hex()}
    assert [m.digest_after for m in manifests] == [None, None, None, after.hex()]
    parts = [Digest.parse(m.digest_part or "") for m in manifests]
    assert sum(parts, start=before) == after
    engine.log.clear()
    train(model, 1)
    report = sender.sync_full(model.items())
    assert {m.digest_before or m.digest_part for m in (p.manifest for p in engine.log)} == {None}
    assert [p.manifest.digest_after for p in engine.log] == [None, None, None, report.digest]
    assert sender.sync(model.items()).digest == report.digest
    assert engine.log[-1].manifest.digest_part == Digest.ZERO.hex()


@pytest.mark.parametrize("touched", ["nothing", "other bytes", "the new bytes"])
def test_a_corrupted_element_is_found_and_healed(touched: str) -> None:
    """Also one that the delta would correct."""
    model = model_of(tensors=3)
    engine = Engine.of(model)
    sender = sender_of(engine, model, bucket_bytes=1)
    train(model)
    sender.sync(model.items())
    engine.weights["layers.1.weight"][7] ^= 4
    posted = len(engine.requests)
    changed = "layers.2.weight" if touched == "nothing" else "layers.1.weight"
    model[changed].view(-1)[7] += 1
    if touched == "the new bytes":
        engine.weights[changed][7] = bits(model[changed])[7]
    report = sender.sync(model.items())
    assert report.full
    assert len(engine.requests) == posted + 1 + 3
    assert engine.holds(model)
    assert report.digest == digest_of(engine.weights).hex()
    train(model, 1)
    assert not sender.sync(model.items()).full
    assert engine.holds(model)


def test_without_digests_only_the_version_counts() -> None:
    model = model_of(tensors=2)
    engine = Engine.of(model)
    sender = sender_of(engine, model, digest=False)
    engine.weights["layers.1.weight"][7] ^= 4
    model["layers.0.weight"].view(-1)[7] += 1
    report = sender.sync(model.items())
    assert (report.full, report.digest) == (False, None)
    assert not engine.holds(model)
    assert sender.sync_full(model.items()).digest is None
    assert engine.holds(model)
    manifests = [part.manifest for part in engine.log]
    assert {m.digest_part or m.digest_before or m.digest_after for m in manifests} == {None}


@pytest.mark.parametrize("full", [False, True])
def test_commit_of_other_bytes_is_reported_and_resynced(full: bool) -> None:
    model = model_of(tensors=2)
    engine = Engine.of(model)
    sender = sender_of(engine, model)

    def spoils(take: Handler, request: httpx.Request) -> httpx.Response:
        take(request)
        engine.weights["layers.1.weight"][9] ^= 1
        return engine.ok("committed", digest=engine.digest().hex())

    engine.faults[0] = spoils
    train(model)
    with pytest.raises(SyncError, match=r"version 1 is committed, but .* does not hold") as caught:
        (sender.sync_full if full else sender.sync)(model.items())
    assert caught.value.status == 200
    assert len(engine.requests) == 1
    assert sender.version == engine.version == 1
    engine.faults[1] = sends(error(500, "DeltaError"))
    with pytest.raises(SyncError, match="DeltaError"):
        sender.sync(model.items())
    report = sender.sync(model.items())  # unchanged: as a delta it would be empty
    assert (report.full, report.version) == (True, 3)  # 2 was tried
    assert engine.holds(model)
    assert not sender.sync(model.items()).full


def test_the_same_sync_again_after_its_answers_were_lost(naps: list[float]) -> None:
    """Nothing is left to be sent."""
    model = model_of(tensors=3)
    engine = Engine.of(model)
    sender = sender_of(engine, model, bucket_bytes=1)
    engine.faults = dict.fromkeys(range(2, 10), loses)
    train(model)
    with pytest.raises(SyncError, match="ReadTimeout"):
        sender.sync(model.items())
    assert (sender.version, engine.version) == (0, 1)
    report = sender.sync(model.items())
    assert (report.status, report.full, report.nnz) == ("committed", False, 0)
    assert (report.base_version, report.version) == (1, 2)
    assert report.digest == digest_of(engine.weights).hex()
    train(model, 1)
    assert not sender.sync(model.items()).full
    assert engine.holds(model)


@pytest.mark.parametrize(
    ("kept", "first_full", "full", "changed"),
    [
        *itertools.product(["digest", "plan", "neither", "some"], [False, True], [False], [1]),
        ("digest", False, False, 0),
        ("neither", False, False, 0),
        ("plan", False, True, 0),
        ("some", True, True, 0),
    ],
)
def test_without_digests_lost_commit_is_not_assumed(
    kept: str, first_full: bool, full: bool, changed: int, naps: list[float]
) -> None:
    """The trainer goes back on one tensor after a lost answer."""
    model = model_of(tensors=2)
    old = model[f"layers.{changed}.weight"].clone()
    some = {f"layers.{changed}.weight"} if kept == "some" else set()
    engine = Engine.of(model, has_plan=kept in ("plan", "some"), undigested=some)
    sender = sender_of(engine, model, bucket_bytes=1, digest=kept in ("digest", "some"))
    engine.faults = dict.fromkeys(range(1, 9), loses)
    train(model)
    with pytest.raises(SyncError, match="ReadTimeout"):
        (sender.sync_full if first_full else sender.sync)(model.items())
    model[f"layers.{changed}.weight"].copy_(old)
    report = (sender.sync_full if full else sender.sync)(model.items())
    assert report.version == sender.version == engine.version
    assert engine.holds(model)
    train(model, 1)
    assert not sender.sync(model.items()).full
    assert engine.holds(model)


def test_tensors_outside_the_digest() -> None:
    model = model_of(tensors=3)
    engine = Engine.of(model, undigested={"layers.1.weight"})
    sender = sender_of(engine, model, bucket_bytes=1)
    train(model)
    report = sender.sync(model.items())
    assert not report.full
    assert engine.holds(model)
    assert report.digest == engine.digest().hex() != digest_of(engine.weights).hex()
    digests = {part.manifest.part: part.manifest.digest_part for part in engine.log}
    assert digests[1] == Digest.ZERO.hex()
    assert sender.sync_full(model.items()).digest == report.digest


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError])
def test_interrupted_first_digest_is_computed_again(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other weights at the number of the base are found all the same."""
    model, held = model_of(tensors=2), model_of(tensors=2)
    train(held, 9)
    engine = Engine.of(held)
    sender = sender_of(engine, model)

    def interrupted(*_: object, **__: object) -> Digest:
        raise kind

    with monkeypatch.context() as patch:
        patch.setattr(acked_state, "tensor_digest", interrupted)
        with pytest.raises(kind):
            sender.sync(model.items())
    model["layers.0.weight"].view(-1)[7] += 1
    with pytest.raises(FullSyncRefused):
        sender.sync(model.items())
    assert engine.holds(held)
    engine.restart(model)
    assert sender.sync(model.items()).digest == engine.digest().hex()


def test_changes_alone_are_proven_if_base_lacks_tensors(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of(tensors=3)
    engine = Engine.of(model)
    del model["layers.1.weight"]
    sender = sender_of(engine, model)
    for step in range(2):
        train(model, step)
        report = sender.sync(model.items())
        assert (report.full, report.digest) == (False, None)
    assert np.array_equal(engine.weights["layers.0.weight"], bits(model["layers.0.weight"]))
    assert [part.manifest.digest_before for part in engine.log] == [None] * 2
    assert all(part.manifest.digest_part for part in engine.log)
    assert caplog.text.count("prove the changed values alone") == 1
    assert "layers.1.weight" in caplog.text


def test_part_of_another_base_is_refused() -> None:
    model, held = model_of(tensors=3), model_of(tensors=3)
    train(held, 9)
    engine = Engine.of(held)
    del model["layers.1.weight"]
    sender = sender_of(engine, model)
    train(model)
    with pytest.raises(FullSyncRefused):
        sender.sync(model.items())
    assert engine.holds(held)
