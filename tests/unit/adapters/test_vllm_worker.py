"""What a vLLM worker reports to its receiver when it releases memory, with a simulated worker."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_ext import settings
from engine_ext.adapters.vllm import worker as adapter
from engine_ext.adapters.vllm.features import RESET_WEIGHTS
from engine_ext.ranks.operations import GetStatus
from tests.support.endpoint_rig import Rig
from tests.support.quantised_engine import Serving
from tests.support.toy_quantised import Everything


@pytest.fixture
def worker(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """One that has loaded its model; its memory needs no release."""
    monkeypatch.setattr(adapter, "weight_changes", lambda own_transfer: ())
    made = SimpleNamespace(
        load_model=lambda: None,
        sleep=lambda level: None,
        discard=lambda tags: None,
        wake_up=lambda tags: None,
        vllm_config=SimpleNamespace(weight_transfer_config=None),
    )
    adapter.attach_receiver(made, settings.Settings())
    made.delta_receiver = rig.engine.receivers[0]
    return made


def released(worker: Any) -> tuple[bool, bool]:
    state = worker.delta_receiver.execute(GetStatus(details=False)).state
    return state.asleep, state.released


def test_memory_is_released_until_all_of_it_wakes_up(worker: SimpleNamespace) -> None:
    """Woken weights can be written to, but an engine without a KV cache cannot generate."""
    assert released(worker) == (False, False)
    worker.sleep()
    assert released(worker) == (True, True)
    worker.wake_up(["weights"])
    assert released(worker) == (False, True)
    worker.wake_up(["kv_cache"])
    assert released(worker) == (False, False)
    worker.discard(("kv_cache",))
    assert released(worker) == (False, True)
    worker.wake_up()
    assert released(worker) == (False, False)


@pytest.fixture
def constant(tmp_path: Path, worker: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tensor of the worker's model that no sync writes; it is lost with the weights."""
    serving = Serving(Everything, tmp_path)
    found: torch.Tensor = torch.arange(3.0)
    serving.models[0].constant = found

    def lose(level: int = 2) -> None:
        if level > 1:
            found.zero_()

    monkeypatch.setattr(adapter, "weight_changes", lambda own_transfer: (RESET_WEIGHTS.name,))
    worker.sleep, worker.reset_weights = lose, lose
    worker.wake_up, worker.discard = lambda tags: None, lambda tags: lose(2)
    worker.model_runner = SimpleNamespace(reset_lora_state=lambda: None)
    adapter.attach_receiver(worker, settings.Settings())
    [worker.delta_receiver] = serving.engine.receivers
    return found


@pytest.mark.slow
def test_what_no_sync_writes_is_there_after_discarded_weights(
    worker: SimpleNamespace, constant: torch.Tensor
) -> None:
    worker.sleep(2)
    worker.wake_up(["kv_cache"])
    assert constant.tolist() == [0, 0, 0]
    worker.wake_up(["weights"])
    assert constant.tolist() == [0, 1, 2]
    constant.add_(1)
    worker.sleep(1)
    worker.wake_up()
    assert constant.tolist() == [1, 2, 3]
    worker.reset_weights()
    assert constant.tolist() == [1, 2, 3]
    worker.discard(("weights",))
    assert (released(worker), constant.tolist()) == ((True, True), [0, 0, 0])
    worker.wake_up(["weights"])
    assert (released(worker), constant.tolist()) == ((False, False), [1, 2, 3])
    state = worker.delta_receiver.execute(GetStatus(details=False)).state
    assert state.foreign == "vLLM's discard of its weights"


def test_a_sleep_that_fails_leaves_the_worker_awake(
    worker: SimpleNamespace, constant: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(level: int) -> None:
        raise ValueError("no parameter matches")

    monkeypatch.setattr(worker, "sleep", fail)
    adapter.attach_receiver(worker, settings.Settings())
    with pytest.raises(ValueError, match="no parameter"):
        worker.sleep(2)
    assert released(worker) == (False, False)
    constant.add_(1)
    worker.wake_up()
    assert constant.tolist() == [1, 2, 3]
