from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine_ext.model.state_guard import ModelStateGuard


def test_what_a_loader_keeps_on_a_tensor_is_restored_though_it_is_cyclic() -> None:
    model = nn.Linear(2, 2)
    kept: dict[str, Any] = {"shards": [1]}
    kept["up"] = [kept]
    model.weight.kept = kept  # type: ignore[assignment]
    guard = ModelStateGuard(model, bits=True)
    kept["shards"].append(2)
    kept["counter"] = torch.ones(1)
    guard.restore()
    assert kept == {"shards": [1], "up": kept["up"]}
    guard.verify()
