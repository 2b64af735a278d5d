"""Generators that yield views of memory which they refill or free, as frameworks that gather do."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from delta_sender import DeltaSender, checkpoint_names, named_tensors
from delta_sender.diff import snapshot
from tests.support.fake_engine import Engine, Model, copied, sender_of, train
from tests.support.trainer_models import make_model, saved

Generator = Iterator[tuple[str, torch.Tensor]]


def sized(*sizes: int) -> Model:
    generator = torch.Generator().manual_seed(0)
    return {
        f"q{n}": torch.randn(size, generator=generator).bfloat16() for n, size in enumerate(sizes)
    }


def refilling(model: Model) -> Generator:
    """Yield views of one buffer, from its beginning."""
    buffer = torch.empty(max(tensor.numel() for tensor in model.values()), dtype=torch.bfloat16)
    for name, tensor in model.items():
        view = buffer[: tensor.numel()]
        view.copy_(tensor.view(-1))
        yield name, view.view(tensor.shape)
    buffer.fill_(float("nan"))


def packing(model: Model) -> Generator:
    """Yield views of a buffer for two tensors at a time, and fill it again for the next two."""
    names, most = list(model), 2 * max(tensor.numel() for tensor in model.values())
    buffer = torch.empty(most, dtype=torch.bfloat16)
    for start in range(0, len(names), 2):
        pair = [(name, model[name]) for name in names[start : start + 2]]
        views = buffer.split([most // 2] * 2)
        for (_, tensor), view in zip(pair, views, strict=True):
            view[: tensor.numel()] = tensor.view(-1)
        for (name, tensor), view in zip(pair, views, strict=True):
            yield name, view[: tensor.numel()].view(tensor.shape)


SIZES = {
    "small": (100, 400, 300, 400),
    "alike": (400, 400, 400, 400),
    "large": (40_000, 60_000, 50_000, 60_000),
    "largest first": (60_000, 34_000, 40_000, 50_000),
    "largest last": (2_200_000, 50_000, 100, 2_300_000),  # more than a thread compares at a time
}


@pytest.mark.parametrize("yielding", [refilling, packing])
@pytest.mark.parametrize("sizes", SIZES)
def test_refilled_views_are_sent_as_they_were_yielded(
    sizes: str, yielding: Callable[[Model], Generator]
) -> None:
    model = sized(*SIZES[sizes])
    engine = Engine.of(model)
    first = yielding(model)
    sender = DeltaSender("http://engine", first, client=engine.client())
    for _ in range(2):
        train(model, 50)
        model["q1"][:] += 1
        report = sender.sync(yielding(model))
        assert not report.full
        assert engine.holds(model)
    sender.sync_full(yielding(model))
    assert engine.holds(model)


def freeing(model: Model) -> Generator:
    """Yield copies; each is freed by the time of the next, which can have its memory."""
    for name in model:
        yield name, model[name].clone()


@pytest.mark.parametrize("yielding", [refilling, freeing])
def test_equal_tensors_in_the_same_memory_are_not_tied(
    yielding: Callable[[Model], Generator],
) -> None:
    model = {f"norm.{n}": torch.ones(64, dtype=torch.bfloat16) for n in range(10)}
    model["other"] = torch.zeros(64, dtype=torch.bfloat16)
    engine = Engine.of(model)
    sender = DeltaSender("http://engine", yielding(model), client=engine.client())
    model["norm.7"][3] = 2
    sender.sync(yielding(model))
    assert engine.holds(model)


def test_memory_that_is_overwritten_too_soon_is_refused() -> None:
    """It is alone in its memory and large, so that copying each such tensor would cost too much."""
    model = sized(*[100_000] * 6)
    engine = Engine.of(model)
    sender = sender_of(engine, model)
    base = copied(model)

    def overwriting(fill: float) -> Generator:
        for name, tensor in model.items():
            gathered = tensor.clone()
            yield name, gathered
            gathered.fill_(fill)

    train(model)
    with pytest.raises(ValueError, match="q4: has changed since it was yielded"):
        sender.sync(overwriting(float("nan")))
    assert engine.holds(base)
    assert engine.version == 0
    sender.sync(model.items())
    assert engine.holds(model)


def test_stable_tensors_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a live model: experts are views of one tensor, and are compared together."""
    model = make_model("qwen3_moe")
    base = saved(model)
    engine = Engine.of(base)
    sender = sender_of(engine, base)
    monkeypatch.setattr(snapshot, "Yielded", None)  # what looks after other iterators
    for stream in (named_tensors(model, base), checkpoint_names(model.named_parameters(), model)):
        sender.sync(stream)
    with pytest.raises(TypeError):
        sender.sync(iter(base.items()))
    assert engine.holds(base)


def test_live_tensors_from_a_generator_can_be_views() -> None:
    flat = torch.zeros(300_000, dtype=torch.bfloat16)
    model = {"a": flat[:200_000], "b": flat[200_000:], "tied": flat[:200_000]}
    engine = Engine.of({name: model[name] for name in "ab"})
    sender = DeltaSender("http://engine", iter(model.items()), client=engine.client())
    flat[::7] += 1
    sender.sync(iter(model.items()))
    assert engine.holds({name: model[name] for name in "ab"})
