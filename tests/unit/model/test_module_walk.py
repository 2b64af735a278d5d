"""Every tensor is found for every module that reaches it, whatever other modules reached before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from engine_ext.model import module_walk
from engine_ext.model.module_walk import reachable_tensors, walk


def two_modules(first: Any, second: Any) -> nn.Module:
    model = nn.Module()
    model.a, model.b = nn.Module(), nn.Module()
    model.a.kept, model.b.kept = first, second
    return model


def found_on(model: nn.Module, path: str) -> set[int]:
    return {id(tensor) for at, _, _, tensor in reachable_tensors(model) if at == path}


def test_a_cycle_through_an_object_that_holds_a_tensor() -> None:
    tensor = torch.zeros(3)
    up: dict[str, Any] = {}
    holder = [up, tensor]
    up["up"] = holder
    for first, second in ((holder, up), (holder, [[up]]), (up, holder), ([[up]], [holder])):
        assert found_on(two_modules(first, second), "b") == {id(tensor)}


def test_an_object_whose_tensor_was_listed_for_the_same_module() -> None:
    tensor = torch.zeros(3)
    shared = [tensor]
    wrapper = {"shared": shared}
    for second in (wrapper, [wrapper], [[wrapper]]):
        assert found_on(two_modules([shared, wrapper], second), "b") == {id(tensor)}


def test_a_long_cycle_without_tensors_is_walked_once() -> None:
    nodes = [SimpleNamespace() for _ in range(4)]
    for number, node in enumerate(nodes):
        node.next = nodes[(number + 1) % 4]
    tensorless: dict[int, int] = {}
    walk(nodes[0], "kept", {}, tensorless)
    assert {id(node) for node in nodes} <= tensorless.keys()


def nested(value: Any, levels: int) -> Any:
    for _ in range(levels):
        value = [value]
    return value


def tensors_in(**values: Any) -> set[int]:
    """The tensors found on one module with these attributes."""
    model = nn.Module()
    for name, value in values.items():
        setattr(model, name, value)
    return found_on(model, "")


def test_what_hangs_on_a_tensor() -> None:
    model, scale, inner, deep = nn.Module(), *(torch.zeros(3) for _ in range(3))
    model.weight = nn.Parameter(torch.zeros(3))
    model.weight.scale, scale.of = scale, model.weight  # type: ignore[attr-defined]
    model.made = inner
    inner.parts = {"deep": deep}  # type: ignore[attr-defined]
    paths = {path: tensor for _, _, path, tensor in reachable_tensors(model)}
    assert paths == {
        "weight": model.weight,
        "weight.scale": scale,
        "made": inner,
        "made.parts['deep']": deep,
    }


@pytest.mark.parametrize("levels", range(7))
def test_a_tensor_that_is_reached_again_with_more_levels_left(levels: int) -> None:
    tensor, deep = torch.zeros(3), torch.zeros(3)
    tensor.holder = {"deep": deep}  # type: ignore[attr-defined]
    assert tensors_in(x=nested(tensor, levels), y=tensor) == {id(tensor), id(deep)}


@pytest.mark.parametrize("levels", range(7))
def test_an_object_that_is_reached_again_with_more_levels_left(levels: int) -> None:
    """Parts that were cut off the first time are found, also below an object without tensors."""
    deep, near = torch.zeros(3), torch.zeros(3)
    for shared, found in (
        ({"k": {"t": deep}}, {id(deep)}),
        ({"near": near, "k": {"t": deep}}, {id(near), id(deep)}),
    ):
        assert tensors_in(x=nested(shared, levels), y=shared) == found
        assert tensors_in(x=[nested(shared, levels), shared]) == found


def test_object_of_a_cycle_is_reached_with_more_levels_left() -> None:
    tensor = torch.zeros(3)
    root: dict[str, Any] = {}
    member = {"up": root, "deep": nested(tensor, 3)}
    root |= {"late": nested(member, 2), "early": member}
    assert tensors_in(x=root) == {id(tensor)}


def test_an_object_is_walked_no_more_often_than_there_are_levels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though every object leads to all others."""
    nodes = [SimpleNamespace() for _ in range(30)]
    for node in nodes:
        node.others = nodes
    calls = Calls(monkeypatch)
    assert tensors_in(x=nested(nodes, 3), y=nested(nodes, 1), z=nodes) == set()
    assert calls.number < 200


class Calls:
    """How many objects have been entered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = 0
        self._parts = module_walk._parts
        monkeypatch.setattr(module_walk, "_parts", self)

    def __call__(self, *arguments: Any) -> Any:
        self.number += 1
        return self._parts(*arguments)


def test_a_configuration_that_all_modules_share_is_walked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = SimpleNamespace(parts=[SimpleNamespace(values=[1, 2]) for _ in range(50)])
    for part in config.parts:
        part.parent, part.neighbour = config, config.parts[0]
    model = nn.Module()
    for number in range(20):
        child: Any = nn.Module()
        child.config = config
        model.add_module(f"m{number}", child)
    calls = Calls(monkeypatch)
    assert list(reachable_tensors(model)) == []
    assert calls.number < 500  # 20 whole walks take more than 2,000


@pytest.mark.parametrize("package", ["vllm.distributed", "sglang.srt.distributed"])
def test_buffers_of_a_group_of_ranks_are_not_the_models(package: str) -> None:
    """Collectives change them, and some are other ranks' memory."""
    group = type("GroupCoordinator", (), {"__module__": f"{package}.parallel_state"})()
    group.buffer = torch.zeros(3)
    module = torch.nn.Linear(2, 2)
    module.group = group
    module.scratch = SimpleNamespace(buffer=torch.zeros(3))  # type: ignore[assignment]
    found = [attribute for _, _, attribute, _ in reachable_tensors(module)]
    assert sorted(found) == ["bias", "scratch.buffer", "weight"]
