"""Tensors that no sync writes to, after something else has replaced all of the engine's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine_ext.conformance.toy_models.device import DEVICE
from tests.support.quantised_engine import Serving, refusal
from tests.support.rank_engine import errors_of
from tests.support.toy_quantised import Everything, parameter
from tests.unit.sync.test_post_load import target_of

KEPT = ("slopes", "omitted")


class WithSlopes(Everything):
    """Attention has slopes, and a parameter keeps the constructor's values."""

    def build(self, rank: int, ranks: int) -> None:
        super().build(rank, ranks)
        self.slopes = torch.linspace(0.5, 1.0, 4, device=DEVICE)
        self.omitted = parameter(torch.linspace(1.0, 2.0, 4, device=DEVICE))
        self.scratch = torch.zeros(6, device=DEVICE)


@pytest.fixture
def serving(tmp_path: Path) -> Serving:
    return Serving(WithSlopes, tmp_path, ranks=2)


def replace_weights(serving: Serving, rank: int = -1, *names: str) -> None:
    """Something else replaces all weights, and these tensors of one rank too."""
    for receiver, model in zip(serving.engine.receivers, serving.models, strict=True):
        receiver.weights_replaced("a sleep")
        model.norm.data.zero_()
    for name in names:
        tensor: Any = getattr(serving.models[rank], name)
        tensor.data.zero_()


@pytest.mark.host_memory
@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("times", [1, 2])
def test_what_a_full_sync_does_not_bring_back_is_refused(
    serving: Serving, name: str, times: int
) -> None:
    for _ in range(times):
        replace_weights(serving, 1, name)
    message = refusal(serving.sync(target_of(serving), full=True))
    assert f"also changed ['{name}']" in message
    assert "restart the engine" in message


@pytest.mark.host_memory
def test_what_a_full_sync_brings_back_heals(serving: Serving) -> None:
    """Also where what the engine writes itself has changed, as it did before."""
    for seed in range(2):
        for model in serving.models:  # it generates
            model.scratch.add_(1)
        replace_weights(serving, 1, "scratch")
        errors_of(serving.sync(target_of(serving, seed=seed), full=True), none=True)
    for model in serving.models:
        model.scratch.zero_()
    serving.assert_fresh()
