"""The trainer's half over vLLM's own `WeightSource`, as the installed vLLM has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.lazy_modules import LazyModule

VLLM = LazyModule("vllm.distributed.weight_transfer.base")
OURS = LazyModule("delta_sender.integrations.vllm_transfer")


class Pieces:
    """A source of vLLM 0.33 that yields this rank's pieces only."""

    def implements_iter_full(self) -> bool:
        return False

    def iter_full(self) -> Any:
        raise NotImplementedError


def test_module_source_yields_fresh_passes() -> None:
    module = nn.Linear(3, 2).to(torch.bfloat16)
    source = VLLM.ModuleSource(module)
    for _ in range(2):
        found = dict(OURS.whole_tensors(source))
        assert {n: t.shape for n, t in found.items()} == {"weight": (2, 3), "bias": (2,)}
        assert all(torch.equal(found[n], p) for n, p in module.named_parameters())


def test_source_of_pieces_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="Pieces implements iter_local only"):
        OURS.whole_tensors(Pieces())


@pytest.mark.parametrize("rank", [0, 1])
def test_engine_takes_rank_where_base_class_does(rank: int) -> None:
    source = VLLM.ModuleSource(nn.Linear(2, 2))
    info = OURS.DeltaTrainerInitInfo(base="unread", rank=rank)
    engine = OURS.DeltaTrainerEngine(info, client=object(), source=source)
    assert engine.is_sender == (rank == 0)
    has_modes = hasattr(VLLM.WeightSource, "iter_full")  # since 0.33
    assert getattr(engine, "rank", None) == (rank if has_modes else None)
