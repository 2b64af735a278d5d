"""What a vLLM worker reports to its receiver when it releases memory, with a simulated worker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_ext import settings
from engine_ext.adapters.vllm import worker as adapter
from engine_ext.ranks.operations import GetStatus
from tests.support.endpoint_rig import Rig


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
