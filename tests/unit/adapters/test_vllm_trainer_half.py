"""vLLM's trainer half with a quantised base, against an engine in this process."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from delta_sender.diff.quantize import FORMS
from engine_ext.files import read_checkpoint
from tests.support.fake_engine import Engine
from tests.support.quantised_models import quantised, save_quantised
from tests.support.trainer_models import change, make_model, saved

pytestmark = pytest.mark.slow


class Client:
    """A client of the weight-transfer API whose engine takes parts as they come."""

    base_url = "http://e"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any]) -> None:
        part = base64.b64decode(update_info["part"])
        answer = self._engine.take(httpx.Request("POST", self.base_url, content=part))
        assert answer.status_code == 200, answer.text

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass


@pytest.mark.parametrize("names", ["model", "checkpoint"])
@pytest.mark.parametrize("form", FORMS)
def test_float32_masters_are_quantised(form: str, names: str, tmp_path: Path) -> None:
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    from delta_sender.integrations.vllm_transfer import DeltaTrainerInitInfo

    base = save_quantised(make_model("qwen3_moe"), form, tmp_path)
    engine = Engine.of(dict(read_checkpoint(base)))
    model = make_model("qwen3_moe", torch.float32)
    change(model, scale=0.01)
    source: Any = list(model.named_parameters())
    if names == "checkpoint":
        source = [
            (name, tensor if name.endswith("_proj.weight") else tensor.to(torch.bfloat16))
            for name, tensor in saved(model).items()
        ]
    transfer = WeightTransferTrainerFactory.trainer_init(
        DeltaTrainerInitInfo(
            base=base,
            model=model if names == "model" else None,
            options={"quantize": form, "client": engine.client()},
            rank=0,
        ),
        client=Client(engine),
        source=source,
    )
    transfer.send_weights()
    assert engine.version == 1
    assert engine.holds(quantised(model, form))
    transfer.shutdown()
