"""Scrubbing: a flipped bit is named, a write never is, and memory that is away is not read."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine_ext.conformance.toy_models import (
    Broadcast,
    ColumnShard,
    PlainCopy,
    RowShard,
    ToyModel,
    every_model,
)
from engine_ext.kernels import bits_of
from engine_ext.placement import plan as plan_module
from engine_ext.placement.plan import Plan
from engine_ext.sync import scrubber as module
from engine_ext.sync.scrubber import Scrubber
from tests.support.quantised_engine import Serving
from tests.support.rank_engine import Engine, errors_of, part_id
from tests.support.served_models import (
    Served,
    as_on_a_device,
    attempt,
    base_checkpoint,
    bits,
    delta_between,
    dense_delta,
    one_part,
    parts_of,
    serve,
    serve_ranks,
    target_checkpoint,
)
from tests.support.staged_writes import writes_of
from tests.unit.sync.test_moved_tensors import Unprocessed, assert_heals, give_memory, states
from tests.unit.sync.test_post_load import target_of

SHARE = module.SHARE


@pytest.fixture(autouse=True)
def _without_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARE", 1.0)


class Owner:
    """Has what a scrubber asks a receiver for."""

    def __init__(self, served: Served) -> None:
        self.applier: Any = served.applier
        self.scrubber = Scrubber(weakref.WeakMethod(self.current), 0)
        self.scrubber._interval = 60.0  # its thread is not started

    def current(self) -> Any:
        return self.applier

    def passed(self) -> list[str]:
        """What differs after one pass over everything."""
        assert self.scrubber._pass()
        assert self.scrubber.state is not None
        return self.scrubber.state.mismatched


@pytest.fixture(autouse=True)
def stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let no thread outlive its test.

    It ends before the pieces have their size again: half of a tensor in one size and half in
    another has no right digest.
    """
    before = scrubbing()
    started: list[Scrubber] = []
    original = Scrubber.start

    def start(self: Scrubber, interval: float) -> None:
        started.append(self)
        original(self, interval)

    monkeypatch.setattr(Scrubber, "start", start)
    yield
    for one in started:
        one._stopped.set()
    for thread in scrubbing():
        if thread not in before:
            thread.join(30)


def scrubbing() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "delta-scrub"]


def flip(target: Any, element: int) -> None:
    """Flip a bit of one element that the target holds, counted from its first in the checkpoint."""
    view = bits_of(target.segment.live.flat())
    offset = int(target.locator(np.arange(target.segment.live.tensor.numel() * 64))[1][element])
    view[offset] ^= 1
    if view.is_cuda:
        torch.cuda.synchronize()  # a scrubber reads in a stream of its own


def targets(plan: Plan) -> Iterator[tuple[str, Any]]:
    for name in sorted(plan.digested):
        for target in plan.targets.get(name, ()):
            if 0 not in target.segment.sizes:
                yield name, target


@pytest.mark.parametrize("model", every_model(), ids=lambda m: m.__name__)
def test_every_flipped_bit_is_named(model: type[ToyModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """In each segment, first and last element, copies on the same rank too; and it can heal."""
    piece = max(5, *(spec.numel // 7 for spec in model.specs()))
    monkeypatch.setattr(plan_module, "_SCAN_ELEMENTS", piece)
    monkeypatch.setattr(plan_module, "_DEVICE_SCAN_ELEMENTS", piece)
    served = serve(model, base_checkpoint(model))
    assert_every_flip_is_named(served)
    before = dict(served.applier.digests)
    as_on_a_device(served)
    assert served.applier.digests == before
    assert_every_flip_is_named(served)


def assert_every_flip_is_named(served: Served) -> None:
    owner, findings = Owner(served), 0
    assert owner.passed() == []
    for name, target in targets(served.applier.plan):
        flip(target, 0)
        first = owner.passed()
        assert name in first
        flip(target, 0)
        flip(target, -1)
        last = owner.passed()
        assert name in last
        assert owner.passed() == last
        findings += len({*first, *last})
        assert owner.scrubber.findings == findings, "a known one is counted again"
        flip(target, -1)
        assert owner.passed() == []


@pytest.mark.parametrize("on_device", [False, True])
def test_copies_in_one_segment_are_read_too(on_device: bool) -> None:
    served = serve(Broadcast, base_checkpoint(Broadcast))
    if on_device:
        as_on_a_device(served)
    owner = Owner(served)
    copied = [(n, t) for n, t in targets(served.applier.plan) if t.locator.copies > 1]
    assert copied
    for name, target in copied:
        for copy in range(target.locator.copies):
            flip(target, copy)
            assert owner.passed() == [name]
            flip(target, copy)


@pytest.mark.parametrize("model", [PlainCopy, RowShard, ColumnShard], ids=lambda m: m.__name__)
def test_a_bit_is_named_after_syncs(model: type[ToyModel]) -> None:
    base = base_checkpoint(model)
    served = serve(model, base)
    owner = Owner(served)
    target = target_checkpoint(base, base)
    if served.peer is None:
        deltas = [delta_between(name, base[name], target[name]) for name in base]
        assert attempt(served, parts_of(deltas)) is None
    assert owner.passed() == []
    name, place = next(targets(served.applier.plan))
    flip(place, 0)
    assert owner.passed() == [name]


# Ranks ---------------------------------------------------------------------------------------


def test_copies_that_another_rank_counts(tmp_path: Path) -> None:
    """The first pass learns them; syncs move what is known, a full one makes it be learnt again."""
    base = base_checkpoint(PlainCopy)
    ranks = serve_ranks([PlainCopy, PlainCopy], base)
    engine = Engine([served.applier for served in ranks], tmp_path)
    owner = Owner(ranks[1])
    [name, *_] = sorted(ranks[1].applier.plan.digested)
    [place] = [t for n, t in targets(ranks[1].applier.plan) if n == name]
    assert place.ranks == (0, 1)
    assert ranks[1].applier.digests.get(name) is None
    assert owner.passed() == []
    new = target_checkpoint(base, base)
    deltas = [delta_between(n, base[n], new[n]) for n in base]
    body = one_part(deltas, current_version=1)
    errors_of(engine.apply(part_id(body), body), none=True)
    assert name in ranks[1].applier.copies
    flip(place, 0)
    assert owner.passed() == [name]
    full = one_part([dense_delta(n, base[n]) for n in base], current_version=2, full="true")
    errors_of(engine.apply(part_id(full), full), none=True)
    assert name not in ranks[1].applier.copies
    assert owner.passed() == []
    flip(place, 0)
    assert owner.passed() == [name]
    flip(place, 0)
    assert owner.passed() == []
    errors_of(engine.call("rollback"), none=True)
    assert owner.passed() == []


# Next to a receiver --------------------------------------------------------------------------


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scrub without rests, in pieces of a few elements, with other threads between them."""
    original = Plan.piece_digest

    def slow(self: Plan, *piece: Any) -> Any:
        time.sleep(1e-4)
        return original(self, *piece)

    monkeypatch.setattr(plan_module, "_SCAN_ELEMENTS", 3)
    monkeypatch.setattr(Plan, "piece_digest", slow)
    monkeypatch.setattr(module, "_LONGEST_POLL_S", 0.001)
    monkeypatch.setattr(Scrubber.__init__, "__defaults__", (0.9,))


def slowly(applier: Any) -> None:
    """Let every step of a commit take a while, and the write have a middle."""

    def write(staged: Sequence[Any], given_up: Any) -> None:
        for part in staged:
            for one in writes_of(part):
                one.put()
                time.sleep(1e-3)

    def late(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            time.sleep(2e-3)
            found = step(*arguments)
            time.sleep(2e-3)
            return found

        return run

    applier.write = write
    for name in ("finish", "roll_back", "undo"):
        setattr(applier, name, late(getattr(applier, name)))


def wait_for(reached: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < give_up, "scrubbing does not get there"
        time.sleep(1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("hasty")
def test_syncs_while_scrubbing_are_no_mismatch(tmp_path: Path) -> None:
    base = base_checkpoint(PlainCopy)
    served = serve(PlainCopy, base)
    applier: Any = served.applier
    slowly(applier)
    engine = Engine([applier], tmp_path, scrub_interval=1e-4)
    engine.status()  # the first operation starts it
    [receiver] = engine.receivers
    scrubber: Any = receiver._scrubber
    rng = np.random.default_rng(0)
    weights = base
    for version in range(1, 60):
        new = target_checkpoint(weights, weights, seed=version)
        full = version % 7 == 0
        deltas = [
            dense_delta(n, new[n]) if full else delta_between(n, weights[n], new[n]) for n in base
        ]
        by_dtype = one_part(deltas, current_version=version, **({"full": "true"} if full else {}))
        broken = version % 5 == 0
        if broken:  # the write fails in the middle, and is undone

            def fail(staged: Sequence[Any], given_up: Any, write: Any = applier.write) -> None:
                write(staged[:1], given_up)
                applier.write = write
                raise OSError("the memory went away")

            applier.write = fail
        answers = engine.apply(part_id(by_dtype), by_dtype)
        assert ("error" in answers[0]) is broken
        if broken:
            answers = engine.apply(part_id(by_dtype), by_dtype)
        if "ok" in answers[0]:
            weights = new
        if version % 11 == 0:
            errors_of(engine.call("rollback"), none=True)
            errors_of(engine.apply(part_id(by_dtype), by_dtype), none=True)
        time.sleep(float(rng.choice([0, 1e-3, 5e-3])))
        assert scrubber.state.mismatched == []
    passes = scrubber.state.passes
    wait_for(lambda: scrubber.state.passes >= passes + 2)
    assert (scrubber.state.mismatched, scrubber.state.error) == ([], None)
    name, place = next(targets(served.applier.plan))
    flip(place, 0)
    wait_for(lambda: scrubber.state.mismatched == [name])
    for _ in range(2):
        [report] = engine.call("status", details=False)
        assert report["ok"]["findings"] == 1
    [status] = engine.status()
    assert status["scrub"]["mismatched"] == [name]
    flip(place, 0)
    wait_for(lambda: scrubber.state.mismatched == [])


@pytest.mark.slow
@pytest.mark.usefixtures("hasty")
def test_moved_tensor_is_found_and_healed(tmp_path: Path) -> None:
    """Only its rank knows, and that is enough to refuse deltas; a full sync ends the state."""
    serving = Serving(Unprocessed, tmp_path, ranks=2, scrub_interval=1e-3)
    errors_of(serving.sync(target_of(serving)), none=True)  # starts it
    give_memory(serving.models[1].norm)
    wait_for(lambda: ("mismatched", ("norm",)) in states(serving))
    found = serving.engine.call("status", details=False)
    assert [one["ok"]["findings"] for one in found] == [0, 1]
    assert_heals(serving)
    wait_for(lambda: all(not one["scrub"]["mismatched"] for one in serving.engine.status()))
    assert states(serving) == {("certain", ())}


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("why", ["asleep", "foreign", "uncertain"])
def test_weights_that_are_away_or_unknown_are_not_read(tmp_path: Path, why: str) -> None:
    served = serve(PlainCopy, base_checkpoint(PlainCopy))
    engine = Engine([served.applier], tmp_path, scrub_interval=1e-4)
    engine.status()  # the first operation starts it
    [receiver] = engine.receivers
    scrubber: Any = receiver._scrubber
    wait_for(lambda: scrubber.state.passes > 0)
    if why == "asleep":
        receiver.weights_released()
    elif why == "foreign":
        receiver.weights_replaced("its own update")
    else:
        receiver._sync_state.fail()
    scrubber.wait()
    before = scrubber.state.passes
    for parameter in served.model.parameters():
        bits_of(parameter.detach()).zero_()
    time.sleep(0.05)
    assert (scrubber.state.passes, scrubber.state.mismatched) == (before, [])
    if why == "asleep":
        receiver.set_asleep(False)
        wait_for(lambda: scrubber.state.mismatched != [])


def test_memory_is_released_only_after_it_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = threading.Event(), threading.Event()
    original = Plan.piece_digest

    def stop(self: Plan, *piece: Any) -> Any:
        reading.set()
        assert go_on.wait(30)
        return original(self, *piece)

    served = serve(PlainCopy, base_checkpoint(PlainCopy))
    monkeypatch.setattr(Plan, "piece_digest", stop)
    engine = Engine([served.applier], tmp_path, scrub_interval=0.01)
    engine.status()  # the first operation starts it
    [receiver] = engine.receivers
    assert reading.wait(30)
    releasing = threading.Thread(target=receiver.weights_released)
    releasing.start()
    releasing.join(0.05)
    assert releasing.is_alive()
    go_on.set()
    releasing.join(30)
    assert not releasing.is_alive()
    state = receiver._scrubber.state
    assert state is not None
    assert state.mismatched == []


def test_it_rests_for_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nineteen times as long as it works, at five per cent; disturbed tensors come first."""
    served = serve(PlainCopy, base_checkpoint(PlainCopy))
    owner = Owner(served)
    monkeypatch.setattr(module, "SHARE", SHARE)
    clock = iter(range(10_000))
    monkeypatch.setattr(time, "thread_time", lambda: float(next(clock)))
    rests: list[float] = []
    monkeypatch.setattr(owner.scrubber._stopped, "wait", rests.append)
    assert owner.passed() == []
    assert rests
    assert all(rest == pytest.approx(19) for rest in rests)


def test_repeatedly_disturbed_tensor_is_judged_at_last() -> None:
    """It is read without rests then; the others have their turn meanwhile."""
    served = serve(PlainCopy, base_checkpoint(PlainCopy))
    owner = Owner(served)
    first, *others = sorted(served.applier.plan.digested)
    seen: list[tuple[str, bool]] = []
    original = owner.scrubber._read

    def read(applier: Any, plan: Plan, name: str, *, rests: bool) -> bool | None:
        seen.append((name, rests))
        if name == first and len(seen) == 1:
            with owner.scrubber.interrupted():
                return original(applier, plan, name, rests=rests)
        return original(applier, plan, name, rests=rests)

    owner.scrubber._read = read  # type: ignore[method-assign]
    assert owner.passed() == []
    assert seen == [(first, True), *((name, True) for name in others), (first, False)]


@pytest.mark.usefixtures("hasty")
def test_an_error_is_shown_and_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(PlainCopy, base_checkpoint(PlainCopy))
    original = Plan.piece_digest

    def fail(self: Plan, *piece: Any) -> Any:
        raise OSError("the memory went away")

    monkeypatch.setattr(Plan, "piece_digest", fail)
    engine = Engine([served.applier], tmp_path, scrub_interval=1e-3)
    engine.status()  # the first operation starts it
    scrubber: Any = engine.receivers[0]._scrubber
    wait_for(lambda: scrubber.state.error is not None)
    assert scrubber.state.error == "OSError: the memory went away"
    assert scrubber.state.passes == 0
    assert "scrubbing failed" in caplog.text
    monkeypatch.setattr(Plan, "piece_digest", original)
    wait_for(lambda: scrubber.state.passes > 0)
    assert scrubber.state.error is None


def test_one_line_for_a_mismatch(caplog: pytest.LogCaptureFixture) -> None:
    served = serve(PlainCopy, base_checkpoint(PlainCopy))
    owner = Owner(served)
    name, place = next(targets(served.applier.plan))
    flip(place, 0)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert owner.passed() == [name]
        flip(place, 0)
        for _ in range(3):
            assert owner.passed() == []
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert name in lines[0]
    assert "rank 0" in lines[0]


def test_without_an_interval_there_is_no_thread(tmp_path: Path) -> None:
    served = serve(PlainCopy, base_checkpoint(PlainCopy))
    engine = Engine([served.applier], tmp_path)
    assert engine.status()[0]["scrub"] is None
    assert not any(thread.name == "delta-scrub" for thread in _alive(engine))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_collections")
def test_the_thread_ends_with_its_receiver(tmp_path: Path) -> None:
    before = scrubbing()
    engine: Any = Engine(
        [serve(PlainCopy, base_checkpoint(PlainCopy)).applier], tmp_path, scrub_interval=0.01
    )
    assert not any(thread.name == "delta-scrub" for thread in _alive(engine))
    engine.status()
    own = [thread for thread in scrubbing() if thread not in before]
    assert len(own) == 1
    del engine
    gc.collect()
    own[0].join(30)
    assert not own[0].is_alive()


def _alive(engine: Engine) -> list[threading.Thread]:
    owners = {id(receiver._scrubber) for receiver in engine.receivers}
    return [
        t
        for t in threading.enumerate()
        if id(getattr(getattr(t, "_target", None), "__self__", None)) in owners
    ]


def test_bits_that_no_number_shows_are_compared() -> None:
    """A zero whose sign was flipped equals the old one as a number."""
    served = serve(PlainCopy, base_checkpoint(PlainCopy))
    owner = Owner(served)
    name, place = next((n, t) for n, t in targets(served.applier.plan) if t.dtype == torch.bfloat16)
    before = bits(place.segment.live.tensor)
    bits_of(place.segment.live.flat())[0] ^= -(1 << 15)
    assert (bits(place.segment.live.tensor) ^ before).sum() == 1 << 15
    assert owner.passed() == [name]
