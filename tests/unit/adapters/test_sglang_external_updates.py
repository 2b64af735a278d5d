"""What SGLang's own requests report to a rank's receiver, with a simulated scheduler's part."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_ext.adapters.sglang.external_updates import watch_external_updates
from engine_ext.ranks.operations import GetStatus
from tests.support.quantised_engine import Serving
from tests.support.toy_quantised import Everything

_OTHERS = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "begin_weight_update",
    "end_weight_update",
)


@pytest.fixture
def serving(tmp_path: Path) -> Serving:
    """An engine with a tensor that no sync writes."""
    made = Serving(Everything, tmp_path)
    made.models[0].constant = torch.arange(3.0)
    return made


@pytest.fixture(params=[False, True], ids=["no backup", "backup"])
def updater(
    request: pytest.FixtureRequest, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Loses that tensor with released weights, unless there is a backup, and with reset ones."""
    constant, backup = serving.models[0].constant, request.param

    class Updater:
        kept = backup
        offload_tags: frozenset[str] = frozenset()

        def release_memory_occupation(self, asked: Any) -> None:
            if not backup and "weights" in (asked.tags or ["weights"]):
                constant.zero_()

        def resume_memory_occupation(self, asked: Any) -> None: ...

        def check_weights(self, asked: Any) -> None:
            if asked.action == "reset_tensors":
                constant.zero_()

    for name in _OTHERS:
        setattr(Updater, name, lambda self, asked: None)
    features = SimpleNamespace(enable_memory_saver=True, enable_weights_cpu_backup=backup)
    context = SimpleNamespace(get_exec=lambda: SimpleNamespace(features=features))
    components = SimpleNamespace(
        weight_updater=SimpleNamespace(SchedulerWeightUpdaterManager=Updater)
    )
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.scheduler_components", components)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    watch_external_updates(serving.engine.receivers[0])
    return Updater()


def changed_by(serving: Serving) -> str | None:
    return serving.engine.receivers[0].execute(GetStatus(details=False)).state.foreign


@pytest.mark.parametrize("tags", [None, ["weights"]])
def test_released_weights_come_back_with_what_no_sync_writes(
    updater: Any, serving: Serving, tags: list[str] | None
) -> None:
    constant = serving.models[0].constant
    asked = SimpleNamespace(tags=tags)
    updater.release_memory_occupation(asked)
    assert constant.tolist() == ([0, 1, 2] if updater.kept else [0, 0, 0])
    updater.resume_memory_occupation(SimpleNamespace(tags=["kv_cache"]))
    assert constant.tolist() == ([0, 1, 2] if updater.kept else [0, 0, 0])
    updater.resume_memory_occupation(asked)
    assert constant.tolist() == [0, 1, 2]
    assert changed_by(serving) == (None if updater.kept else "SGLang's release of its weights")


def test_graphs_are_captured_while_no_thread_uses_the_device(
    updater: Any, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    [receiver] = serving.engine.receivers
    seen = []

    def update(self: Any, asked: Any) -> None:
        seen.append(receiver.execute(GetStatus(details=False)).state.asleep)

    monkeypatch.setattr(type(updater), "update_weights_from_disk", update)
    watch_external_updates(receiver)
    for recapture in (True, False):
        updater.update_weights_from_disk(SimpleNamespace(recapture_cuda_graph=recapture))
        assert not receiver.execute(GetStatus(details=False)).state.asleep
    assert seen == [True, False]


def test_reset_weights_keep_what_no_sync_writes(updater: Any, serving: Serving) -> None:
    constant = serving.models[0].constant
    updater.check_weights(SimpleNamespace(action="checksum"))
    assert changed_by(serving) is None
    updater.check_weights(SimpleNamespace(action="reset_tensors"))
    assert constant.tolist() == [0, 1, 2]
    assert changed_by(serving) == "SGLang's reset of its weights"


def test_other_updates_are_reported(updater: Any, serving: Serving) -> None:
    updater.update_weights_from_disk(SimpleNamespace(load_format="delta"))
    assert changed_by(serving) is None
    updater.update_weights_from_disk(SimpleNamespace(load_format=None))
    assert changed_by(serving) == "SGLang's update_weights_from_disk"
