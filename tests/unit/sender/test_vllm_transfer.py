"""The trainer's half of vLLM's weight-transfer API, with an engine in this process."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import torch

from delta_sender import DeltaSender, RunFenced
from delta_sender.models import empty_model
from tests.support.fake_engine import Engine
from tests.support.lazy_modules import LazyModule
from tests.support.trainer_models import change, make_model, save, saved

VLLM = LazyModule("vllm.distributed.weight_transfer")
OURS = LazyModule("delta_sender.integrations.vllm_transfer")
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


class SyncClient:
    """A client of the API, to an engine in this process."""

    base_url = "http://engine"

    def __init__(self, engine: Engine) -> None:
        self._client, self.started = engine.client(), 0

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None:
        self.started += 1

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        body = base64.b64decode(update_info["part"])
        self._client.post("http://engine/update_weights_delta", content=body).raise_for_status()


def engine_and_transfer(
    trained: torch.nn.Module, model: torch.nn.Module, base: Path
) -> tuple[Engine, Any]:
    engine = Engine.of(saved(trained))
    info = OURS.DeltaTrainerInitInfo(
        base=base, model=model, rank=0, options={"client": engine.client(), "posts_in_flight": 1}
    )
    source = VLLM.ModuleSource(trained)
    made = VLLM.WeightTransferTrainerFactory.trainer_init(
        info, client=SyncClient(engine), source=source
    )
    return engine, made


def test_module_source_sends_trained_buffers(tmp_path: Path) -> None:
    model = make_model("deepseek_v3")
    base = save(model, tmp_path)
    engine, transfer = engine_and_transfer(model, model, base)
    change(model, scale=0.01)
    model.get_buffer(BIAS).add_(0.5)
    transfer.send_weights()
    assert engine.holds(saved(model))
    transfer.shutdown()


def test_module_source_without_buffer_values_is_refused(tmp_path: Path) -> None:
    model = make_model("deepseek_v3")
    base = save(model, tmp_path)
    engine, transfer = engine_and_transfer(model, empty_model(base), base)
    model.get_buffer(BIAS).add_(0.5)
    with pytest.raises(ValueError, match=f"{BIAS}: a buffer"):
        transfer.send_weights()
    assert engine.version == 0
    transfer.shutdown()


def test_fenced_trainer_ends_no_update(tmp_path: Path) -> None:
    """The call that starts an update would end that of the new owner, as it has no run."""
    model = make_model("dense")
    base = save(model, tmp_path)
    engine, transfer = engine_and_transfer(model, model, base)
    transfer.send_weights()
    with DeltaSender("http://e", base, client=engine.client(), takeover=True) as sender:
        sender.sync(saved(model))
        change(model, scale=0.01)
        with pytest.raises(RunFenced, match="RunFenced"):
            transfer.send_weights()
    assert transfer.client.started == 1
    transfer.shutdown()
