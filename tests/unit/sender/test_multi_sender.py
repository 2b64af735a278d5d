"""`MultiSender` against two engines in the same process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import httpx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_sender import MultiSender, PartialSyncError
from delta_sender.diff import device as diff_device
from delta_sender.diff import snapshot as sender_snapshot
from delta_sender.diff.snapshot import Changes
from delta_sender.encode import part_builder
from engine_ext.format import encode_part
from tests.support.fake_engine import (
    A,
    B,
    Engine,
    Handler,
    Model,
    client_of,
    copied,
    digest_of,
    error,
    model_of,
    sends,
    train,
)


def sender_of(first: Engine, second: Engine, base: Model, **options: Any) -> MultiSender:
    return MultiSender([A, B], base.items(), client=client_of(first, second), **options)


def two(model: Model, **state: Any) -> tuple[Engine, Engine]:
    return Engine.of(model, **state), Engine.of(model, **state)


def refuse() -> Callable[[Handler, httpx.Request], httpx.Response]:
    return sends(error(507, "SpoolFull"))


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_both_follow_and_get_the_same_bytes(
    bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part is encoded once, whichever engine asks first, if the other is not far behind."""
    encoded = []

    def counted(*arguments: Any, **options: Any) -> bytes:
        encoded.append(1)
        return encode_part(*arguments, **options)

    monkeypatch.setattr(part_builder, "encode_part", counted)
    model = model_of(torch.bfloat16, torch.float32, tensors=4)
    a, b = two(model)
    sender = sender_of(a, b, model, bucket_bytes=bucket_bytes)
    for step, density in enumerate([0.0, 0.02, 0.9, 1.0]):
        train(model, step, density)
        reports = (sender.sync if step < 3 else sender.sync_full)(model.items())
        assert list(reports) == [A, B]
        for url, engine in ((A, a), (B, b)):
            assert engine.holds(model)
            assert reports[url].version == engine.version == sender.versions[url] == step + 1
            assert reports[url].digest == digest_of(engine.weights).hex()
    assert sorted(a.bodies) == sorted(b.bodies)
    if bucket_bytes > 1:  # three parts; of more, the first can be forgotten
        assert len(encoded) == len(a.bodies)


@pytest.mark.parametrize(("failing", "times"), [(0, 2), (1, 1), (2, 2)])
def test_one_that_refuses_is_brought_what_it_missed(failing: int, times: int) -> None:
    model = model_of(tensors=3)
    base = copied(model)
    a, b = two(model)
    sender = sender_of(a, b, model, bucket_bytes=1)
    for step in range(times):
        b.faults[len(b.requests) + failing] = refuse()
        train(model, step)
        with pytest.raises(PartialSyncError, match=r"^http://b:2: HTTP 507: SpoolFull") as caught:
            sender.sync(iter(model.items()))
        assert (list(caught.value.failures), list(caught.value.reports)) == ([B], [A])
        assert a.holds(model)
        assert b.holds(base)
        assert sender.versions == {A: step + 1, B: 0}
    train(model, 7)
    model["layers.1.weight"].copy_(base["layers.1.weight"])  # as b has it: nothing to send
    reports = sender.sync(model.items())
    assert a.holds(model)
    assert b.holds(model)
    assert not reports[B].full
    assert (reports[A].base_version, reports[B].base_version) == (times, 0)
    assert sender.versions == {A: times + 1, B: times + 1}
    assert {d.name for d in b.log[-1].deltas + b.log[-2].deltas} == base.keys() - {
        "layers.1.weight"
    }
    train(model, 8)
    sender.sync(model.items())
    assert sorted(a.bodies[-3:]) == sorted(b.bodies[-3:])
    assert b.holds(model)


def test_engine_with_other_names_keeps_no_other_back() -> None:
    model = model_of(tensors=3)
    a, b = Engine.of(model), Engine.of({"other.weight": model["layers.0.weight"]})
    with sender_of(a, b, model) as sender:
        for step in range(2):
            train(model, step)
            with pytest.raises(PartialSyncError, match="none of the tensors") as caught:
                sender.sync(model.items())
            assert ([*caught.value.reports], [*caught.value.failures]) == ([A], [B])
            assert a.holds(model)
            assert b.version == 0


def test_who_missed_much_gets_all() -> None:
    model = model_of(tensors=3)
    a, b = two(model)
    sender = sender_of(a, b, model)
    b.faults[0] = refuse()
    train(model, density=0.9)
    with pytest.raises(PartialSyncError):
        sender.sync(model.items())
    train(model, 1)
    reports = sender.sync(model.items())
    assert (reports[A].full, reports[B].full) == (False, True)
    assert a.holds(model)
    assert b.holds(model)
    train(model, 2)
    assert not any(report.full for report in sender.sync(model.items()).values())


@pytest.mark.parametrize("moved", [0, 1, 3])
def test_a_snapshot_interrupted_while_one_engine_is_behind(
    moved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the step that was interrupted goes back to what that engine holds."""
    model = model_of(tensors=3)
    base = copied(model)
    a, b = two(model)
    sender = sender_of(a, b, model)
    b.faults = {0: refuse(), 1: refuse()}
    train(model)
    with pytest.raises(PartialSyncError):
        sender.sync(model.items())
    for name in model:
        model[name].copy_(base[name])
    advance = sender._publisher.snapshot.advance

    def interrupted(changes: Changes) -> None:
        advance(dict([*changes.items()][:moved]))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(sender._publisher.snapshot, "advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sender.sync(model.items())
    train(model)
    assert all(report.full for report in sender.sync(model.items()).values())
    assert a.holds(model)
    assert b.holds(model)
    train(model, 1)
    assert not any(report.full for report in sender.sync(model.items()).values())


@pytest.mark.parametrize("missed", [False, True])
def test_one_that_was_restarted_gets_all_and_leads_the_versions(missed: bool) -> None:
    model = model_of(tensors=2)
    a, b = two(model)
    sender = sender_of(a, b, model, full="allow")
    if missed:
        b.faults[0] = refuse()
        train(model, 5)
        with pytest.raises(PartialSyncError):
            sender.sync(model.items())
    b.version, b.weights = 40, {name: values ^ 1 for name, values in b.weights.items()}
    train(model)
    reports = sender.sync(model.items())
    assert (reports[A].full, reports[B].full, reports[B].version) == (False, True, 41)
    train(model, 1)
    reports = sender.sync(model.items())
    assert sender.versions == {A: 42, B: 42}
    assert not reports[A].full
    assert not reports[B].full
    assert a.holds(model)
    assert b.holds(model)


def test_engines_that_ignore_and_cover_other_tensors() -> None:
    model = model_of(tensors=4)
    a = Engine.of(model, ignored={"layers.0.weight"})
    b = Engine.of(model, undigested={"layers.1.weight"})
    sender = sender_of(a, b, model, bucket_bytes=1)
    for step in range(4):
        train(model, step)
        if step == 1:
            b.faults[len(b.requests) + 1] = refuse()
            with pytest.raises(PartialSyncError, match=r"^http://b:2: HTTP 507"):
                sender.sync(model.items())
            continue
        reports = sender.sync(model.items())
        assert (reports[A].digest, reports[B].digest) == (a.digest().hex(), b.digest().hex())
        assert (reports[A].parts, reports[B].parts) == (3, 4)
        assert not reports[B].full
        assert a.holds(model)
        assert b.holds(model)


def test_a_slow_engine_does_not_hold_back_the_other() -> None:
    """The first part of one is not answered before the other has committed its last."""
    model = model_of(tensors=5)
    a, b = two(model)
    sender = sender_of(a, b, model, bucket_bytes=1)
    done = threading.Event()

    def waits(take: Handler, request: httpx.Request) -> httpx.Response:
        assert done.wait(30)
        return take(request)

    def tells(take: Handler, request: httpx.Request) -> httpx.Response:
        answer = take(request)
        done.set()
        return answer

    a.faults[0], b.faults[4] = waits, tells
    train(model)
    sender.sync(model.items())
    assert a.holds(model)
    assert b.holds(model)
    assert sorted(a.bodies) == sorted(b.bodies)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError])
def test_what_is_no_refusal_is_raised_when_the_others_are_done(kind: type[BaseException]) -> None:
    model = model_of(tensors=2)
    a, b = two(model)
    sender = sender_of(a, b, model)

    def raises(take: Handler, request: httpx.Request) -> httpx.Response:
        raise kind

    a.faults[0] = raises
    train(model)
    with pytest.raises(kind):
        sender.sync(model.items())
    assert sender.versions == {A: 0, B: 1}
    assert not any(report.full for report in sender.sync(model.items()).values())
    assert a.holds(model)
    assert b.holds(model)


@pytest.mark.parametrize("urls", [[], [A, A], [A, A + "/"]])
def test_every_engine_is_named_once(urls: list[str]) -> None:
    with pytest.raises(ValueError, match="each once"):
        MultiSender(urls, [])


@pytest.mark.parametrize("url", ["s3://bucket/log", "gs://bucket", "file:///log", "/log"])
def test_a_log_is_no_engine(url: str) -> None:
    with pytest.raises(ValueError, match="a delta log is no engine"):
        MultiSender([A, url], [])


FAULTS = st.sampled_from(["none", "refuses", "loses", "restarts", "corrupts"])


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    steps=st.lists(st.tuples(FAULTS, FAULTS, st.sampled_from([0.0, 0.03, 0.3, 0.7])), max_size=6),
    digest=st.booleans(),
    encoding=st.sampled_from(["deltas_zstd", "gap8_ulp"]),
    on_device=st.booleans(),
)
def test_engine_that_acknowledged_holds_trainers_bytes(
    steps: list[tuple[str, str, float]], digest: bool, encoding: str, on_device: bool
) -> None:
    with (
        mock.patch.object(sender_snapshot, "is_on_device", return_value=on_device),
        mock.patch.object(diff_device, "free_bytes", return_value=1 << 20),
        mock.patch.object(diff_device, "LISTED_SHARE", 1),  # of some changes, not of all
    ):
        send_steps(steps, digest, encoding)


def send_steps(steps: list[tuple[str, str, float]], digest: bool, encoding: str) -> None:
    base = model_of(tensors=2, numel=40)
    model = copied(base)
    a, b = two(base)
    options = {"bucket_bytes": 40, "digest": digest, "encoding": encoding, "full": "allow"}
    sender = sender_of(a, b, base, **options)

    def injure(engine: Engine, fault: str) -> None:
        now = len(engine.requests)
        if fault == "refuses":
            engine.faults[now] = refuse()
        elif fault == "loses":
            # Every answer of this sync is lost, so that the engine might have committed it.
            engine.faults = dict.fromkeys(range(now, now + 50), gone)
        elif fault == "restarts":
            engine.restart(base)
        elif fault == "corrupts" and digest:
            engine.weights["layers.0.weight"][3] ^= 1

    def gone(take: Handler, request: httpx.Request) -> httpx.Response:
        take(request)
        return error(500, "DeltaError")

    for number, (of_a, of_b, density) in enumerate(steps):
        injure(a, of_a)
        injure(b, of_b)
        train(model, number, density)
        try:
            reports = sender.sync(model.items())
        except PartialSyncError as some:
            reports = some.reports
        a.faults, b.faults = {}, {}
        for url, engine in ((A, a), (B, b)):
            if url in reports:
                assert engine.holds(model)
                assert engine.version == sender.versions[url] == reports[url].version
    train(model, 99)
    reports = sender.sync(model.items())
    assert a.holds(model)
    assert b.holds(model)
    snapshot = sender._publisher.snapshot
    for name in model:
        assert np.array_equal(snapshot.image(name).values, a.weights[name])
