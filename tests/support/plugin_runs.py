"""Whose an engine is, through any trainer plug-in: the scenarios that each of them must pass.

A plug-in is a function that trains as its users do. It calls each of some steps, syncs after each,
and closes what it has opened, however it ends.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import pytest
import torch
import transformers
from torch.distributed.tensor import DTensor

from delta_sender import (
    DeltaSender,
    FullSyncRefused,
    RunConflict,
    RunFenced,
    SyncReport,
    named_tensors,
)
from engine_ext.ranks.status import EngineStatus
from scripts.live_engine import tiny_models
from tests.support.plain_trainer import model_digest
from tests.support.present import present

TOUCHED: Final = 10  # elements

Step = Callable[[], None]


class Plugin(Protocol):
    def __call__(
        self, url: str, base: Path, model: Any, steps: Sequence[Step], **options: Any
    ) -> list[SyncReport]:
        """Sync the engine at a root with a model after every step; return the reports."""


class Scene:
    """An engine that holds a checkpoint, and belongs to nobody.

    Args:
        status: Returns the engine's ``/delta_status``.
        digest: Returns the digest of its live weights.
        prepare: Changes a model that was loaded before it is trained.
    """

    def __init__(
        self,
        url: str,
        base: Path,
        folder: Path,
        status: Callable[[], EngineStatus],
        digest: Callable[[], str],
        prepare: Callable[[Any], Any] = lambda model: model,
    ) -> None:
        self.url, self.base, self.status, self._digest = url, base, status, digest
        self.state_file = folder / "state.json"
        self._folder, self._numbers, self._prepare = folder, itertools.count(), prepare
        tensors = tiny_models.load_tensors(base)
        with DeltaSender(url, tensors, takeover=True) as sender:
            sender.sync_full(tensors)

    def model(self, folder: Path | None = None) -> Any:
        """Return float32 masters of a checkpoint; of the engine's first one if none is given."""
        load = transformers.AutoModelForCausalLM.from_pretrained
        return self._prepare(load(folder or self.base, dtype=torch.float32))

    def save(self, model: Any) -> Path:
        """Write a model as a checkpoint in bfloat16."""
        target = self._folder / f"saved-{next(self._numbers)}"
        return tiny_models.save_checkpoint(self.base, target, tensors_of(model))

    def held(self) -> dict[str, Any]:
        """Return the state that a refusal must not change."""
        status = self.status()
        version, health = status.version, status.health
        return {
            "digest": self._digest(),
            "run": version.run,
            "version": version.number,
            "state": health.state,
            "changed_externally": health.changed_externally,
        }

    def holds(self, model: Any) -> bool:
        return self._digest() == model_digest(tensors_of(model)).hex()


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in named_tensors(model, dtype=torch.bfloat16)}


def touch(model: Any, place: int = 0) -> None:
    """Change as many elements as `TOUCHED` says, other ones for each place."""
    parameter = next(iter(model.parameters())).detach()
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    chosen = local.view(-1)[TOUCHED * place : TOUCHED * (place + 1)]
    chosen.copy_(chosen * 1.5 + 0.01)


def nothing() -> None:
    """Be a step that changes nothing."""


def second_trainer_is_refused(scene: Scene, train: Plugin) -> None:
    first, second = scene.model(), scene.model()

    def start_another() -> None:
        before, owner = scene.held(), present(scene.status().owner)
        with pytest.raises(RunConflict) as caught:
            train(scene.url, scene.base, second, [lambda: touch(second, 1)])
        assert type(caught.value) is RunConflict
        assert caught.value.error["owner"] == msgspec.to_builtins(owner)
        assert (owner.host, owner.pid) == (socket.gethostname(), os.getpid())
        for named in (owner.run, owner.host, str(owner.pid)):
            assert str(named) in str(caught.value)
        assert scene.held() == before
        touch(first, 2)

    reports = train(scene.url, scene.base, first, [lambda: touch(first), start_another])
    assert [(r.full, r.nnz) for r in reports[:2]] == [(False, TOUCHED)] * 2
    assert scene.holds(first)
    assert scene.status().owner is None


def restarted_trainer_continues(scene: Scene, train: Plugin) -> None:
    """With its state file: from its newest weights by a delta, from older ones by a full sync."""
    model, state, epochs = scene.model(), scene.state_file, []
    train(scene.url, scene.base, model, [lambda: touch(model)], state=state)
    run, version = scene.status().version.run, scene.status().version.number
    held = scene.save(model)
    resumed = scene.model(held)

    def note_epoch() -> None:
        epochs.append(present(scene.status().owner).epoch)

    steps = [lambda: touch(resumed, 1), note_epoch]
    first, *_ = train(scene.url, held, resumed, steps, state=state)
    assert (first.full, first.nnz, first.run) == (False, TOUCHED, run)
    assert (first.base_version, first.version) == (version, version + 1)
    assert epochs == [2]
    assert scene.holds(resumed)
    older = scene.model()
    first, *_ = train(scene.url, scene.base, older, [nothing], state=state)
    assert (first.full, first.run) == (True, run)
    assert scene.holds(older)


def resumed_trainer_is_at_its_base(scene: Scene, train: Plugin) -> None:
    """Without a state file: neither the run nor the number is known, but the digest is."""
    model = scene.model()
    train(scene.url, scene.base, model, [lambda: touch(model), lambda: touch(model, 1)])
    run, version = scene.status().version.run, scene.status().version.number
    held = scene.save(model)
    resumed = scene.model(held)
    first, *_ = train(scene.url, held, resumed, [lambda: touch(resumed, 2)])
    assert (first.full, first.nnz, first.base_version) == (False, TOUCHED, version)
    assert first.run != run
    assert scene.holds(resumed)


def wrong_checkpoint_replaces_nothing(scene: Scene, train: Plugin) -> None:
    other = scene.model()
    for place in range(20):
        touch(other, place)
    wrong, before = scene.save(other), scene.held()
    with pytest.raises(FullSyncRefused) as caught:
        train(scene.url, wrong, scene.model(wrong), [nothing])
    assert scene.held() == before
    assert caught.value.error["version"] == before["version"]
    assert 'full="allow"' in str(caught.value)
    first, *_ = train(scene.url, wrong, scene.model(wrong), [nothing], full="allow")
    assert first.full
    assert first.reason is not None
    assert scene.holds(other)


def takeover_fences_for_good(scene: Scene, train: Plugin) -> None:
    old, state, after = scene.model(), scene.state_file, {}

    def lose_the_engine() -> None:
        held = scene.save(old)
        new = scene.model(held)
        first, *_ = train(scene.url, held, new, [lambda: touch(new, 1)], takeover=True)
        assert (first.full, first.nnz) == (False, TOUCHED)
        assert scene.holds(new)
        after.update(scene.held())
        touch(old, 2)

    with pytest.raises(RunFenced) as caught:
        train(scene.url, scene.base, old, [lambda: touch(old), lose_the_engine], state=state)
    assert caught.value.error["owner"]["run"] == after["run"]
    assert scene.held() == after
    for options in ({}, {"takeover": True}):  # restarted, after the new trainer has ended
        with pytest.raises(RunFenced):
            train(scene.url, scene.base, scene.model(), [nothing], state=state, **options)
        assert scene.held() == after


Scenario = Callable[[Scene, Plugin], None]

SCENARIOS: Final[tuple[Scenario, ...]] = (
    second_trainer_is_refused,
    restarted_trainer_continues,
    resumed_trainer_is_at_its_base,
    wrong_checkpoint_replaces_nothing,
    takeover_fences_for_good,
)


def live_scene(engine: Any, base: Path, folder: Path, **more: Any) -> Scene:
    """Return the scene of a server."""

    def digest() -> str:
        scan = engine.get("/delta_digest", params={"scan": "true"}).json()
        assert scan["corrupted"] == []
        return str(scan["digest"])

    return Scene(engine.url, base, folder, engine.delta_status, digest, **more)
