"""What the sender does at the same time: it posts parts while it reads and compares the rest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from delta_sender import DeltaSender, MultiSender, SyncError
from delta_sender.diff import compare as diff_host
from delta_sender.diff import snapshot as sender_snapshot
from delta_sender.encode import part_builder
from delta_sender.publish import session_thread
from engine_ext.format import digest, exponent_planes, gap_streams, ulp_differences
from engine_ext.kernels import gather_scatter
from tests.support.fake_engine import (
    A,
    B,
    Engine,
    Handler,
    Model,
    bits,
    client_of,
    copied,
    error,
    model_of,
    sends,
    train,
)


def sender_of(engine: Engine, base: Model, **options: Any) -> DeltaSender:
    options = {"bucket_bytes": 1, **options}
    return DeltaSender("http://engine/", base.items(), client=engine.client(), **options)


@pytest.fixture(autouse=True)
def _nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the comparison of each tensor before the next is taken."""
    monkeypatch.setattr(sender_snapshot, "_AHEAD", 0)


@pytest.mark.parametrize("full", [False, True])
def test_parts_are_posted_before_all_is_read(full: bool) -> None:
    model = model_of(tensors=4)
    engine = Engine.of(model)
    sender = sender_of(engine, model)
    first_came = threading.Event()

    def tells(take: Handler, request: httpx.Request) -> httpx.Response:
        first_came.set()
        return take(request)

    engine.faults[0] = tells
    train(model)

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(model.items()):
            if number == 3:
                assert first_came.wait(30)
            yield item

    report = (sender.sync_full if full else sender.sync)(read())
    assert report.parts == 4
    assert engine.holds(model)


def test_a_part_is_encoded_while_the_one_before_is_posted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of(tensors=4)
    engine = Engine.of(model)
    sender = sender_of(engine, model)
    encoded = [threading.Event() for _ in range(4)]
    encode, numbers = part_builder.ChangedTensors.encode, iter(range(4))

    def tells(*pieces: Any, **metadata: Any) -> bytes:
        body = encode(*pieces, **metadata)
        encoded[next(numbers)].set()
        return body

    def lingers(number: int) -> Callable[[Handler, httpx.Request], httpx.Response]:
        def wait(take: Handler, request: httpx.Request) -> httpx.Response:
            assert encoded[number + 1].wait(30)
            return take(request)

        return wait

    monkeypatch.setattr(part_builder.ChangedTensors, "encode", tells)
    engine.faults = {number: lingers(number) for number in range(3)}
    train(model)
    report = sender.sync(model.items())
    assert engine.holds(model)
    assert sorted(part.manifest.part or 0 for part in engine.log) == [0, 1, 2, 3]
    assert report.post_ms > 0


def test_the_snapshot_stays_until_the_engine_has_committed() -> None:
    base = model_of(tensors=4)
    model = copied(base)
    engine = Engine.of(base)
    sender = sender_of(engine, base)
    snapshot = sender._publisher.snapshot
    moved: list[str] = []

    def looks(take: Handler, request: httpx.Request) -> httpx.Response:
        moved.extend(
            name
            for name in base
            if not np.array_equal(snapshot.image(name).values, bits(base[name]))
        )
        return take(request)

    engine.faults = dict.fromkeys(range(3), looks) | {3: sends(error(507, "SpoolFull"))}
    train(model)
    with pytest.raises(SyncError):
        sender.sync(iter(model.items()))
    assert all(np.array_equal(snapshot.image(n).values, bits(base[n])) for n in base)
    engine.faults = dict.fromkeys(range(4, 8), looks)
    assert not sender.sync(iter(model.items())).full
    assert moved == []
    assert engine.holds(model)
    assert all(np.array_equal(snapshot.image(n).values, bits(model[n])) for n in model)


@pytest.mark.parametrize(
    ("wrong", "several"),
    [("shape", False), ("missing", True), ("unknown", False), ("dtype", True)],
)
def test_tensors_that_turn_out_to_be_wrong_are_never_committed(wrong: str, several: bool) -> None:
    base = model_of(tensors=4)
    engines = [Engine.of(base), Engine.of(base)][: 1 + several]
    urls, client = [A, B][: 1 + several], client_of(*engines)
    sender = MultiSender(urls, base.items(), client=client, bucket_bytes=1)
    model = copied(base)
    train(model)
    bad = dict(model)
    last = "layers.3.weight"
    if wrong == "shape":
        bad[last] = bad[last].view(-1)
    elif wrong == "dtype":
        bad[last] = bad[last].float()
    elif wrong == "missing":
        del bad[last]
    else:
        bad["new"] = torch.zeros(1)
    for send in (sender.sync, sender.sync_full):
        with pytest.raises(ValueError, match=r"layers\.3|new"):
            send(bad.items())
    assert [engine.requests for engine in engines] == [[]] * len(engines)
    with pytest.raises(ValueError, match=r"layers\.3|new"):
        sender.sync(iter(bad.items()))
    for engine in engines:
        assert engine.holds(base)
        assert engine.version == 0
    reports = sender.sync(iter(model.items()))
    assert not any(report.full for report in reports.values())
    assert all(engine.holds(model) for engine in engines)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError])
def test_reading_that_is_interrupted(kind: type[BaseException]) -> None:
    """The engine is still busy with a part then; the next sync waits for the answer."""
    model = model_of(tensors=4)
    engine = Engine.of(model)
    sender = sender_of(engine, model)
    posting, interrupted = threading.Event(), threading.Event()

    def lingers(take: Handler, request: httpx.Request) -> httpx.Response:
        posting.set()
        if kind is KeyboardInterrupt:  # otherwise the sync waits for this
            assert interrupted.wait(30)
        return take(request)

    engine.faults[0] = lingers
    train(model)

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        yield from [*model.items()][:2]
        assert posting.wait(30)
        raise kind

    with pytest.raises(kind):
        sender.sync(read())
    interrupted.set()
    report = sender.sync(model.items())
    assert len(engine.requests) == 1 + 4
    assert (report.full, report.version) == (False, 1)
    assert engine.holds(model)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_threads_that_do_not_all_start(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that did are not waited for for ever."""
    model = model_of(tensors=2)
    engines = Engine.of(model), Engine.of(model)
    sender = MultiSender([A, B], model.items(), client=client_of(*engines))
    started: list[threading.Thread] = []

    class OneOnly(threading.Thread):
        def start(self) -> None:
            if started:
                raise kind
            started.append(self)
            super().start()

    train(model)
    with monkeypatch.context() as patched:
        patched.setattr(session_thread, "Thread", OneOnly)
        with pytest.raises(kind):
            sender.sync(iter(model.items()))
    started[0].join(10)
    assert not started[0].is_alive()
    assert not any(report.full for report in sender.sync(iter(model.items())).values())
    assert all(engine.holds(model) for engine in engines)


@pytest.mark.parametrize("encoding", ["deltas_zstd", "gap8_exp", "gap8_ulp"])
def test_without_numba(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff_host, "loop_of", lambda width: None)
    monkeypatch.setattr(gather_scatter, "_loops", lambda width, index: None)
    sums = {False: digest._numpy_dense, True: digest._numpy_sparse}
    monkeypatch.setattr(digest, "_kernel", lambda width, sparse, change: sums[sparse])
    monkeypatch.setattr(gap_streams, "_match", lambda width: None)
    for module in (gap_streams, ulp_differences, exponent_planes):
        monkeypatch.setattr(module, "_loops", lambda *width: None)
    model = model_of(torch.bfloat16, torch.float32, torch.float8_e4m3fn, tensors=3)
    engine = Engine.of(model)
    sender = sender_of(engine, model, encoding=encoding)
    for step, density in enumerate([0.01, 0.3, 0.9]):
        train(model, step, density)
        report = sender.sync(iter(model.items()))
        assert engine.holds(model)
        assert report.digest == engine.digest().hex()
