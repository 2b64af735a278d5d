"""Values that processing computes from weights are found, also those that are not tensors."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from engine_ext.startup.permuted.kept_values import kept_values


def found(
    keep: Callable[[Any], object], dtype: torch.dtype = torch.bfloat16, fill: float = 1.0
) -> list[str]:
    """Return the values that a layer's processing is found to keep; `keep` gets the layer."""
    shared = SimpleNamespace(name="shared", count=3)
    weight = torch.full((4, 6), fill).to(dtype)

    def process(payload: dict[str, torch.Tensor]) -> nn.Module:
        layer: Any = nn.Module()
        layer.shared, layer.options = shared, {}
        layer.weight = nn.Parameter(payload["weight"], requires_grad=False)
        keep(layer)
        return layer

    return kept_values({"weight": weight}, process)


def largest(layer: Any) -> float:
    return float(layer.weight.float().abs().max())


def put(layer: Any, name: str, value: object) -> None:
    setattr(layer, name, value)


def scaled(scale: float) -> Callable[[Any], Any]:
    return lambda x: x * scale


KEEPERS: dict[str, Callable[[Any], object]] = {
    "scale": lambda layer: put(layer, "scale", largest(layer)),
    "options['scale']": lambda layer: layer.options.update(scale=largest(layer)),
    "shared.scale": lambda layer: put(layer.shared, "scale", largest(layer)),
    "run.scale": lambda layer: put(layer, "run", scaled(largest(layer))),
    "array": lambda layer: put(layer, "array", layer.weight.float().numpy().copy()),
    "handle": lambda layer: put(layer, "handle", np.nditer(layer.weight.float().numpy())),
    "weight['scale']": lambda layer: put(layer.weight, "scale", largest(layer)),
    "empty": lambda layer: put(layer, "empty", not layer.weight.any()),
    "nothing": lambda layer: None if layer.weight.any() else put(layer, "nothing", None),
}


@pytest.mark.parametrize("path", KEEPERS)
def test_what_depends_on_the_weights_is_found_wherever_it_is(path: str) -> None:
    assert found(KEEPERS[path]) == [path]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.int8, torch.int32])
def test_of_weights_of_any_dtype(dtype: torch.dtype) -> None:
    def keep(layer: Any) -> None:
        layer.total = float(layer.weight.float().sum())

    assert found(keep, dtype) == ["total"]


def test_of_weights_that_are_all_zero() -> None:
    """The loaded weights show no difference then, but random bits do."""

    def keep(layer: Any) -> None:
        layer.empty = not layer.weight.any()

    assert found(keep, fill=0.0) == ["empty"]


def test_of_a_number_that_is_nan_for_random_bits() -> None:
    assert found(lambda layer: put(layer, "total", float(layer.weight.float().sum()))) == ["total"]
    assert found(lambda layer: put(layer, "total", float("nan"))) == []


def constant(layer: Any) -> None:
    layer.processed = True
    layer.options["names"] = {"weight"}
    layer.rows, layer.none, layer.dtype = len(layer.weight), None, layer.weight.dtype
    layer.empty, layer.plain = set(), SimpleNamespace()
    layer.run = lambda x: x * 2
    layer.of_tensors = layer.weight * 2  # is looked for elsewhere


def test_what_is_the_same_for_all_weights_is_not_found() -> None:
    assert found(constant) == []


def test_processing_may_fail_on_some_weights() -> None:
    def keep(layer: Any) -> None:
        if not layer.weight.any():
            raise ValueError("no weights")
        layer.scale = largest(layer)

    assert found(keep) == ["scale"]
    assert found(lambda layer: layer.missing) == []
