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
    walk(nodes[0], "kept", set(), tensorless)
    assert {id(node) for node in nodes} <= tensorless.keys()


def test_a_configuration_that_all_modules_share_is_walked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = SimpleNamespace(parts=[SimpleNamespace(values=[1, 2]) for _ in range(50)])
    for part in config.parts:
        part.parent, part.neighbour = config, config.parts[0]
    model = nn.Module()
    for number in range(20):
        child = nn.Module()
        child.config = config
        model.add_module(f"m{number}", child)
    calls = 0
    parts = module_walk._parts

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return parts(*arguments)

    monkeypatch.setattr(module_walk, "_parts", counted)
    assert list(reachable_tensors(model)) == []
    assert calls < 500  # 20 whole walks take more than 2,000
