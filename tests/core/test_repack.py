"""Learned repacks: what only moves elements is found out; what computes is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch

from engine_ext.repack import learn

Parameters = dict[str, torch.Tensor]

EXPERTS = (3, 8, 16)


def per_expert(move: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Parameters], Parameters]:
    """A processing that moves the elements of each expert alike, into the same storage."""

    def process(parameters: Parameters) -> Parameters:
        weight = parameters["w"]
        moved = torch.stack([move(expert).reshape(EXPERTS[1:]) for expert in weight.clone()])
        weight.copy_(moved)
        return parameters

    return process


def interleaved(expert: torch.Tensor) -> torch.Tensor:
    """Pairs of rows side by side, as matrix units want them."""
    return expert.reshape(4, 2, 16).transpose(1, 2).contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("move", [lambda e: e.t().contiguous(), interleaved], ids=["t", "pairs"])
def test_a_move_is_learned(
    move: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    process = per_expert(move)
    learned = learn({"w": torch.empty(EXPERTS, dtype=dtype)}, process)
    assert learned.refusals == {}
    repack = learned.repacks["w"]
    assert repack.block <= 8 * 16
    loaded = torch.randint(-(2**15), 2**15, EXPERTS).to(torch.int16)
    live = process({"w": loaded.clone()})["w"].reshape(-1).numpy()
    where = repack.move(np.arange(loaded.numel()))
    assert np.array_equal(live[where], loaded.reshape(-1).numpy())


def test_nothing_done_is_nothing_learned() -> None:
    learned = learn({"w": torch.empty(EXPERTS, dtype=torch.bfloat16)}, lambda p: p)
    assert (learned.repacks, learned.refusals) == ({}, {})


def scaled(parameters: Parameters) -> Mapping[str, torch.Tensor]:
    return {"w": parameters["w"] * 2}


def clamped(parameters: Parameters) -> Mapping[str, torch.Tensor]:
    return {"w": parameters["w"].clamp(max=1e3)}


def sorted_values(parameters: Parameters) -> Mapping[str, torch.Tensor]:
    return {"w": parameters["w"].flatten().sort().values.reshape(EXPERTS)}


def emptied(parameters: Parameters) -> Mapping[str, torch.Tensor]:
    return {"w": torch.empty(0, dtype=parameters["w"].dtype)}


def broken(parameters: Parameters) -> Mapping[str, torch.Tensor]:
    raise RuntimeError("not today")


@pytest.mark.parametrize("process", [scaled, clamped, sorted_values, emptied, broken])
def test_what_is_no_move_is_refused(
    process: Callable[[Parameters], Mapping[str, torch.Tensor]],
) -> None:
    learned = learn({"w": torch.empty(EXPERTS, dtype=torch.bfloat16)}, process)
    assert learned.repacks == {}
    assert learned.refusals["w"]
