"""Healing: new values in place of differences that an engine's old values do not fit."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from delta_sender import DeltaSender, SyncError
from delta_sender.diff.snapshot import Changes
from delta_sender.publish.state_file import StateFile
from engine_ext.log import open_log
from engine_ext.log.writer import manifest_of
from tests.support.fake_engine import (
    Engine,
    Handler,
    Model,
    bits,
    breaks,
    copied,
    error,
    loses,
    model_of,
    train,
)
from tests.unit.sender.test_differences import ONE, multi_of, sender_of
from tests.unit.sender.test_log_destination import Fault, chain, let_catch_up, replayed

BUCKETS = pytest.mark.parametrize("bucket_bytes", [200, 1 << 20])


@dataclass
class Witness(Engine):
    """Records what it commits. Once it has loaded its own weights, it refuses what is not full."""

    commits: list[str] = field(default_factory=list)
    foreign: str | None = None

    def take(self, request: httpx.Request) -> httpx.Response:
        assert len(self.requests) < 200, "the same is sent again and again"
        if self.foreign is not None and not manifest_of(request.content).full:
            return error(409, "BaseMismatch")
        return super().take(request)

    def commit(self, full: bool) -> httpx.Response | None:
        kinds = {part.manifest.encoding for part, _ in self.staged.values()}
        refusal = super().commit(full)
        if refusal is None:
            self.commits.append("full" if full else "+".join(sorted(kinds)))
            self.foreign = None
        return refusal

    def reload(self, version: int | None) -> None:
        """Take other weights: from a sender that leads to this version, or its own."""
        self.weights = {name: values ^ 12 for name, values in self.weights.items()}
        self.version = version or self.version
        self.foreign = None if version else "update_weights_from_disk"


def spoil(held: Model, model: Model, engine: Engine) -> None:
    """The engine holds others of the elements that changed since `held`."""
    for name, values in engine.weights.items():
        values[bits(held[name]) != bits(model[name])] ^= 4


def refusing(**options: Any) -> tuple[Model, Model, Witness, DeltaSender]:
    """A trainer's model after a step and before it, and an engine that the step does not fit.

    The engine is at version 1, which the sender has committed.
    """
    model = model_of(tensors=3)
    base, engine = copied(model), Witness.of(model)
    sender = sender_of(engine, model, **options)
    sender.sync(model.items())
    for noted in (engine.commits, engine.requests, engine.bodies, engine.log):
        noted.clear()
    train(model)
    spoil(base, model, engine)
    return model, base, engine, sender


def go_on(model: Model) -> None:
    """Train so that no element goes back to what it was."""
    for tensor in model.values():
        tensor.view(torch.int16).view(-1)[::17] += 2


def ends_healing(request: httpx.Request) -> bool:
    part = manifest_of(request.content)
    return not part.full and part.digest_part is None and part.digest_after is not None


def where_healing_ends(fault: Fault, times: int) -> dict[int, Fault]:
    """The first deliveries of a healing attempt's last part meet a fault."""
    left = [fault] * times

    def takes(take: Handler, request: httpx.Request) -> httpx.Response:
        return left.pop()(take, request) if left and ends_healing(request) else take(request)

    return dict.fromkeys(range(99), takes)


def goes_on_with_differences(sender: DeltaSender, engine: Engine, model: Model) -> None:
    known, base = len(engine.log), engine.version
    go_on(model)
    report = sender.sync(model.items())
    assert (report.full, report.base_version) == (False, base)
    assert {part.manifest.encoding for part in engine.log[known:]} == {"gap8_ulp"}
    assert engine.holds(model)
    assert engine.version == sender.version == base + 1


@pytest.mark.parametrize(
    ("fault", "times", "bucket_bytes"),
    [(breaks, 1, 200), (breaks, 8, 1 << 20), (loses, 1, 1 << 20), (loses, 8, 200)],
)
def test_answers_to_healing_are_lost(
    fault: Fault, times: int, bucket_bytes: int, naps: list[float]
) -> None:
    """One, or all that the sender waits for: then the next sync asks what came of it."""
    model, _, engine, sender = refusing(bucket_bytes=bucket_bytes)
    engine.faults = where_healing_ends(fault, times)
    with nullcontext() if times == 1 else pytest.raises(SyncError):
        report = sender.sync(model.items())
        status = "already_applied" if fault is loses else "committed"
        assert (report.status, report.full, report.version) == (status, False, 2)
        assert engine.holds(model)
    has_it = fault is loses or times == 1
    versions = 1 + has_it, 1 + (times == 1)
    assert (engine.version, sender.version, len(naps)) == (*versions, min(times, 7))
    go_on(model)
    report = sender.sync(model.items())
    assert (report.full, report.base_version, report.version) == (False, 1 + has_it, 3)
    assert engine.holds(model)
    goes_on_with_differences(sender, engine, model)
    assert engine.commits == ["gap8_exp", *["gap8_ulp"] * (1 + has_it)]


@BUCKETS
def test_the_log_has_its_own_parts_of_a_healed_sync(bucket_bytes: int, tmp_path: Path) -> None:
    """They lead on from the right old values only, and say so."""
    model, base, engine, sender = refusing(delta_log=tmp_path, bucket_bytes=bucket_bytes)
    with sender:
        assert not sender.sync(model.items()).full
        assert engine.holds(model)
        goes_on_with_differences(sender, engine, model)
    assert chain(tmp_path) == [(0, 1), (1, 2), (2, 3)]
    assert replayed(tmp_path, base).holds(model)
    assert engine.version == 3
    paths = [path for entry in open_log(tmp_path).listing().entries for path in entry.paths]
    parts = [manifest_of(path.read_bytes()) for path in paths]
    assert {part.encoding for part in parts} == {"gap8_exp"}
    assert all(part.digest_before and part.digest_part for part in parts)


@pytest.mark.parametrize("reached", ["the base", "what is sent", "nothing"])
def test_one_behind_in_the_log_has_other_old_values(reached: str, tmp_path: Path) -> None:
    """The log leads it to a version whose bits turn then; or the log does not continue from it."""
    model, log, earlier = model_of(tensors=3), tmp_path / "log", tmp_path / "earlier"
    base, engine = copied(model), Witness.of(model)
    answer = engine.answer

    def answers(request: httpx.Request) -> httpx.Response:
        if request.url.path != "/delta_catch_up":
            return answer(request)
        if reached == "nothing":
            return error(409, "LogDamaged")
        late = replayed(earlier if reached == "the base" else log, base)
        engine.weights, engine.version = late.weights, late.version
        spoil(held, model, engine)
        return httpx.Response(200, json={"status": "caught_up", "version": late.version})

    engine.answer = answers  # type: ignore[method-assign]
    with sender_of(engine, model, delta_log=log) as sender:
        for step in range(3):
            train(model, step)
            sender.sync(model.items())
        shutil.copytree(log, earlier)
        held = copied(model)
        engine.weights, engine.version = Engine.of(base).weights, 0
        train(model, 5)
        spoil(held, model, engine)
        report = sender.sync(model.items())
        base_version = {"the base": 3, "what is sent": 4, "nothing": 0}[reached]
        assert (report.full, report.base_version) == (reached != "the base", base_version)
        assert engine.holds(model)
        goes_on_with_differences(sender, engine, model)
    assert engine.commits[3:] == ["full" if report.full else "gap8_exp", "gap8_ulp"]
    late = replayed(log, base)
    assert late.holds(model)
    assert late.version == engine.version


@pytest.mark.parametrize("encoding", ["gap8_exp", "gap8_ulp"])
def test_what_the_log_has_led_to_needs_no_full_sync(encoding: str, tmp_path: Path) -> None:
    """The log gets the version first, as values; differences of it would be another sync."""
    model = model_of(tensors=3)
    base, engine = copied(model), Witness.of(model)
    let_catch_up(engine, tmp_path, base)
    with sender_of(engine, model, encoding=encoding, delta_log=tmp_path) as sender:
        for step in range(3):
            train(model, step)
            sender.sync(model.items())
        engine.weights, engine.version = Engine.of(base).weights, 0
        train(model, 3)
        report = sender.sync(model.items())
        assert (report.status, report.full, report.version) == ("already_applied", False, 4)
        assert engine.holds(model)
        train(model, 4)
        sender.sync(model.items())
        assert engine.holds(model)
    assert engine.commits == [encoding] * 4


@pytest.mark.parametrize("version", [None, 7])
@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_foreign_weights_are_replaced_as_a_whole(
    version: int | None, when: str, naps: list[float]
) -> None:
    """Also where they come between differences and values, or after values that had no answer."""
    model, _, engine, sender = refusing()
    if when == "after":
        engine.faults = where_healing_ends(loses, 8)
        with pytest.raises(SyncError):
            sender.sync(model.items())
    known, tries = len(engine.bodies), 2 if when == "between" else 1

    def reloads(take: Handler, request: httpx.Request) -> httpx.Response:
        engine.reload(version)
        return take(request)

    if when == "between":
        engine.faults = {1: reloads}
    else:
        engine.reload(version)
    report = sender.sync(model.items())
    assert [manifest_of(body).full for body in engine.bodies[known:]] == [False] * tries + [True]
    assert engine.holds(model)
    assert (report.full, report.base_version) == (True, version or (2 if when == "after" else 1))
    assert report.version == (8 if version else 3 if when == "after" else 2)
    goes_on_with_differences(sender, engine, model)
    assert engine.commits[-2:] == ["full", "gap8_ulp"]


@BUCKETS
def test_one_of_several_is_healed(bucket_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(tensors=3)
    base, engines = copied(model), [Witness.of(model) for _ in "abc"]
    sender = multi_of([*engines], model, bucket_bytes=bucket_bytes)
    snapshot, moves = sender._publisher.snapshot, []
    advance = snapshot.advance

    def counted(changes: Changes) -> None:
        moves.append(len(changes))
        advance(changes)

    monkeypatch.setattr(snapshot, "advance", counted)
    train(model)
    spoil(base, model, engines[1])
    for version in (1, 2):
        reports = sender.sync(model.items())
        assert not any(report.full for report in reports.values())
        for engine, at in zip(engines, sender.versions.values(), strict=True):
            assert engine.version == at == version
            assert engine.holds(model)
        assert moves == [3] * version
        assert all(np.array_equal(snapshot.image(n).values, bits(t)) for n, t in model.items())
        go_on(model)
    kinds = [("gap8_ulp", "gap8_exp", "gap8_ulp"), ("gap8_ulp",) * 3]
    assert [*zip(*(engine.commits for engine in engines), strict=True)] == kinds
    assert len({engine.bodies[-1] for engine in engines}) == 1


@BUCKETS
@pytest.mark.parametrize("trains", [True, False])
def test_what_does_not_change_has_other_bytes(trains: bool, bucket_bytes: int) -> None:
    """The digest after the new values shows it, before anything is written."""
    model, base, engine, sender = refusing(bucket_bytes=bucket_bytes)
    for name in [ONE] if trains else model:
        model[name].copy_(base[name])
    report = sender.sync(model.items())
    assert (report.full, report.version) == (True, 2)
    assert engine.holds(model)
    assert engine.commits == ["full"]
    assert sum(map(ends_healing, engine.requests)) == 1
    goes_on_with_differences(sender, engine, model)


def test_another_sender_goes_on_from_what_was_healed(tmp_path: Path) -> None:
    model, _, engine, sender = refusing(state=tmp_path / "state")
    assert not sender.sync(model.items()).full
    sender.close()
    with sender_of(engine, model, state=tmp_path / "state") as sender:
        goes_on_with_differences(sender, engine, model)
    assert engine.commits == ["gap8_exp", "gap8_ulp"]


def live(seed: int, state: Path) -> Counter[str]:
    """A trainer, an engine and senders with one state, to whom things happen; how syncs ended."""
    chance, ends = random.Random(seed), Counter[str]()
    model = model_of(torch.bfloat16, torch.float32, tensors=2, numel=80)
    acknowledged, engine = copied(model), Witness.of(model)
    encoding = chance.choice(["gap8_ulp", "auto"])
    options = {"encoding": encoding, "state": state, "full": "allow"}
    sender = sender_of(engine, model, **options, bucket_bytes=chance.choice([40, 1 << 20]))
    for _ in range(6):
        if chance.random() < 0.3:
            sender.close()
            model = copied(chance.choice([model, acknowledged]))
            sender = sender_of(engine, model, **options, bucket_bytes=chance.choice([40, 1 << 20]))
        train(model, chance.getrandbits(30), chance.choice([0.0, 0.05, 0.05, 0.6]))
        name, touched = chance.choice([*model]), chance.random() < 0.8
        places = np.flatnonzero((engine.weights[name] != bits(model[name])) == touched)
        if places.size and chance.random() < 0.4:
            engine.weights[name][chance.choice(places.tolist())] ^= 4
        known = len(engine.requests)
        lost = range(chance.randrange(4), chance.choice([0, 0, 1, 3, 12]))
        engine.faults = dict.fromkeys((known + n for n in lost), chance.choice([breaks, loses]))
        try:
            report = sender.sync(model.items())
        except SyncError:
            assert lost
            ends["failed"] += 1
            continue
        assert engine.holds(model), seed
        assert engine.version == sender.version == report.version, seed
        acknowledged = copied(model)
        healed = any(map(ends_healing, engine.requests[known:]))
        ends["full" if report.full else "healed" if healed else "straight"] += 1
    sender.close()
    return ends


@pytest.mark.slow
def test_sync_that_returns_has_led_to_the_model(
    tmp_path: Path, naps: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, closes = StateFile._write, StateFile.close
    # A disk can take longer than all the rest: only what the next sender reads is written.
    monkeypatch.setattr(StateFile, "_write", lambda file, state: setattr(file, "state", state))
    monkeypatch.setattr(StateFile, "close", lambda file: (writes(file, file.state), closes(file)))
    ends = sum((live(seed, tmp_path / str(seed)) for seed in range(40)), Counter[str]())
    assert min(ends[end] for end in ("failed", "full", "healed", "straight")) > 20, ends
