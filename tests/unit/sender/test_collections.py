"""No full garbage collection runs during a sync, and the thresholds are restored after it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.support.fake_engine import Engine, Model, model_of, sender_of, train


@pytest.mark.parametrize("fails", [False, True])
def test_thresholds_in_a_sync(fails: bool) -> None:
    usual, model = gc.get_threshold(), model_of()
    engine, found = Engine.of(model), []

    def read(model: Model) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in model.items():
            found.append(gc.get_threshold())
            yield name, tensor
            if fails:
                raise KeyError(name)

    with sender_of(engine, model) as sender:
        train(model)
        assert gc.get_threshold() == usual
        if fails:
            with pytest.raises(KeyError):
                sender.sync(read(model))
        else:
            sender.sync(read(model))
            assert engine.holds(model)
    assert gc.get_threshold() == usual
    assert all(during[:2] == usual[:2] and during[2] > 1 << 20 for during in found)
    assert found
