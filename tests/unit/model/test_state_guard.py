from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from engine_ext.model import state_guard
from engine_ext.model.state_guard import ModelStateGuard, TracingError


def test_cyclic_attributes_of_a_tensor_are_restored() -> None:
    model: Any = nn.Linear(2, 2)
    kept: dict[str, Any] = {"shards": [1]}
    kept["up"] = [kept]
    model.weight.kept = kept
    guard = ModelStateGuard(model, bits=True)
    kept["shards"].append(2)
    kept["counter"] = torch.ones(1)
    guard.restore()
    assert kept == {"shards": [1], "up": kept["up"]}
    guard.verify()


@pytest.mark.parametrize("batch", [1, 30, 1 << 20], ids=["each alone", "a few", "all together"])
@pytest.mark.parametrize("name", ["0.weight", "0.bias", "1.weight", "1.bias"])
def test_a_write_to_any_tensor_is_found(
    name: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_guard, "_BATCH", batch)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    guard = ModelStateGuard(model, bits=True)
    guard.verify()
    dict(model.named_parameters())[name].data.view(-1)[-1] += 1
    with pytest.raises(TracingError, match=rf"\['{name}'\]"):
        guard.verify()


def test_values_that_are_equal_are_no_other_contents() -> None:
    model: Any = nn.Linear(2, 3)
    model.sizes = {"a": 4096, "b": [2.5, (1, "c")]}
    guard = ModelStateGuard(model, bits=False)
    model.sizes["b"][:] = [float("2.5"), (1, "c")]
    model.sizes["a"] = model.sizes.pop("a") + 0  # in another order, too
    assert not guard.contents_changed()
    model.sizes["b"][1] = (1, "d")
    assert guard.contents_changed()
    guard.restore()
    assert not guard.contents_changed()
    model.sizes["e"] = model.sizes.pop("a")
    assert guard.contents_changed()


class Cache(dict[str, int]):
    """A dict with an attribute."""

    newest = "a"


def test_attributes_of_a_dict_are_contents() -> None:
    model: Any = nn.Linear(2, 3)
    model.cache = Cache(a=1)
    model.cache.newest = "a"
    guard = ModelStateGuard(model, bits=False)
    model.cache.newest = "b"
    assert guard.contents_changed()
    guard.restore()
    assert (model.cache.newest, guard.contents_changed()) == ("a", False)
