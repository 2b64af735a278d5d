"""Which tensors a sender takes, and under which names it sends them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from delta_sender import DeltaSender
from tests.support.fake_engine import Engine, Model, copied, model_of, sender_of, train


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.update({"layers.0.weight": torch.zeros(400)}), "layers.0.weight: float32"),
        (
            lambda m: m.update({"layers.0.weight": m["layers.0.weight"].float()}),
            r"float32 .* in the base; give it in that dtype, as named_tensors\(model, base\) does",
        ),
        (
            lambda m: m.update({"module.layers.0.weight": m.pop("layers.0.weight")}),
            r"module.layers.0.weight: not in the base; .* take the prefix 'module\.' off",
        ),
        (
            lambda m: m.update({"0.weight": m.pop("layers.0.weight")}),
            r"0.weight: not in the base; .* put the prefix 'layers\.' before the names",
        ),
        (
            lambda m: m.update({"layers.0.weight": m["layers.0.weight"].view(-1)}),
            r"layers.0.weight: bfloat16 \(400,\), but bfloat16 \(4, 100\)",
        ),
        (lambda m: m.update({"new": torch.zeros(1)}), "new: not in the base"),
        (lambda m: m.pop("layers.5.weight"), "missing.*layers.5.weight"),
        (
            lambda m: m.update({"layers.0.weight": torch.zeros(1, dtype=torch.complex64)}),
            "layers.0.weight: .*complex64",
        ),
    ],
)
def test_other_names_shapes_and_dtypes_are_refused(
    change: Callable[[Model], object], said: str
) -> None:
    base = model_of()
    engine = Engine.of(base)
    sender = sender_of(engine, base, bucket_bytes=1)
    model = copied(base)
    train(model)
    good = dict(model)
    change(model)
    for send in (sender.sync, sender.sync_full):
        with pytest.raises(ValueError, match=said):
            send(model.items())
    assert sender.version == engine.version == 0
    assert engine.holds(base)
    sender.sync(good.items())
    assert engine.holds(good)


@pytest.mark.parametrize("given", [list, iter])
def test_tied_tensors_are_sent_once(given: Callable[..., Any]) -> None:
    model = model_of(tensors=2)
    engine = Engine.of(model)
    tied = {**model, "lm_head.weight": model["layers.0.weight"]}
    sender = DeltaSender("http://engine", given(tied.items()), client=engine.client())
    for reading in (tied.items(), list(tied.items())[::-1], model.items()):
        train(model, 3)
        sender.sync(given(reading))
        assert engine.holds(model)
    sender.sync_full(tied.items())
    assert engine.holds(model)
    copies = copied(tied)
    sender.sync(copies.items())
    copies["lm_head.weight"][0, 0] += 1
    with pytest.raises(ValueError, match=r"lm_head.*differs from layers"):
        sender.sync(copies.items())


def test_a_tied_name_that_the_base_lacks_is_found_by_its_storage() -> None:
    model = model_of(tensors=2)
    engine = Engine.of(model)
    sender = sender_of(engine, copied(model))
    train(model)
    sender.sync([*model.items(), ("lm_head.weight", model["layers.1.weight"])])
    assert engine.holds(model)
    with pytest.raises(ValueError, match=r"lm_head.*not in the base"):
        sender.sync([*model.items(), ("lm_head.weight", model["layers.1.weight"].clone())])


def test_a_name_given_twice_must_agree() -> None:
    model = model_of(tensors=1)
    engine = Engine.of(model)
    sender = sender_of(engine, model)
    name, tensor = next(iter(model.items()))
    sender.sync([(name, tensor), (name, tensor.clone())])
    with pytest.raises(ValueError, match="repeats"):
        sender.sync([(name, tensor), (name, tensor + 1)])
