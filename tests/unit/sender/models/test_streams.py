"""Tensors that a framework gathers itself: copied, converted, and read to the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from delta_sender import checkpoint_names
from delta_sender.models import empty_model
from tests.support.trainer_models import KINDS, assert_same, change, make_model, save, saved


def freeing(model: torch.nn.Module, read: list[str] | None = None) -> Iterator[Any]:
    """Yield each parameter in a buffer that is overwritten on the next step."""
    for name, parameter in model.named_parameters():
        if read is not None:
            read.append(name)
        gathered = parameter.detach().clone()
        yield name, gathered
        gathered.fill_(float("nan"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_those_that_are_saved(kind: str, tmp_path: Path) -> None:
    masters = make_model(kind, torch.float32)
    folder = save(make_model(kind), tmp_path)
    change(masters, scale=0.01)
    empty = empty_model(folder)
    assert {tensor.device.type for tensor in empty.state_dict().values()} == {"meta"}
    given = checkpoint_names(freeing(masters), empty, folder, live=masters)
    assert_same(given, saved(masters.to(torch.bfloat16)))


BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture
def balanced(tmp_path: Path) -> tuple[torch.nn.Module, Path]:
    """Return a trained model whose routers are balanced by a buffer, and its base."""
    model = make_model("deepseek_v3")
    folder = save(model, tmp_path)
    change(model)
    model.get_buffer(BIAS).add_(0.5)
    return model, folder


@pytest.mark.parametrize("frozen", [False, True, ["*"]])
def test_trained_buffer_is_read_from_the_live_model(
    balanced: tuple[torch.nn.Module, Path], frozen: bool | list[str]
) -> None:
    model, folder = balanced
    assert_same(checkpoint_names(freeing(model), model, folder, frozen=frozen), saved(model))
    names = empty_model(folder)
    given = checkpoint_names(freeing(model), names, folder, frozen=frozen, live=model)
    assert_same(given, saved(model))


@pytest.mark.parametrize("frozen", [False, True, ["*.gate.weight"], "*.gate.weight"])
def test_trained_buffer_without_values_is_refused(
    balanced: tuple[torch.nn.Module, Path], frozen: bool | list[str] | str
) -> None:
    model, folder = balanced
    given = checkpoint_names(freeing(model), empty_model(folder), folder, frozen=frozen)
    with pytest.raises(ValueError, match=rf"{BIAS}: a buffer .*model=.*frozen="):
        list(given)


def test_buffer_named_as_frozen_is_the_base_s(balanced: tuple[torch.nn.Module, Path]) -> None:
    model, folder = balanced
    names, frozen = empty_model(folder), ["*.e_score_correction_bias"]
    given = dict(checkpoint_names(freeing(model), names, folder, frozen=frozen))
    assert_same(given.items(), {**saved(model), BIAS: torch.zeros_like(given[BIAS])})


def test_frozen_tensor_without_values_is_refused() -> None:
    model = make_model("dense").to("meta")
    with pytest.raises(ValueError, match="without a base or a model that has its values"):
        list(checkpoint_names([], model, frozen=True))


def test_all_is_read_however_it_ends() -> None:
    model = make_model("dense")
    every = [name for name, _ in model.named_parameters()]
    read: list[str] = []
    tensors = checkpoint_names(freeing(model, read), model)
    next(tensors)
    tensors.close()
    assert read == every
    read.clear()
    stream = (("other", tensor) for _, tensor in freeing(model, read))
    with pytest.raises(ValueError, match="other: not a tensor of the model"):
        list(checkpoint_names(stream, model))
    assert read == every


def test_what_is_left_out_is_refused_or_the_base_s() -> None:
    model = make_model("qwen3_moe")
    base = saved(model)
    change(model)

    def some(left_out: str) -> Iterator[Any]:
        return ((name, t) for name, t in freeing(model) if left_out not in name)

    with pytest.raises(ValueError, match=r"missing, but in the model: model.layers.0.mlp.experts"):
        list(checkpoint_names(some("experts"), model, base))
    given = dict(checkpoint_names(some("layers.0."), model, base, frozen=True))
    wanted = {n: base[n] if "layers.0." in n else t for n, t in saved(model).items()}
    assert_same(given.items(), wanted)


def test_other_shapes_are_refused() -> None:
    model = make_model("dense")
    with pytest.raises(ValueError, match=r"embed_tokens.weight: \[2\], but \[64, 32\] in the mod"):
        list(checkpoint_names([("model.embed_tokens.weight", torch.ones(2))], model))


def test_tied_tensor_that_was_trained_alone_is_refused() -> None:
    """As an untied copy of a tied head is: one that PEFT trains and saves."""
    model = make_model("tied")
    names = ["model.embed_tokens.weight", "lm_head.weight"]
    given = dict(model.state_dict())
    assert given.keys() >= {*names}
    assert_same(checkpoint_names(given.items(), model), saved(model))
    given[names[1]] = given[names[1]] + 1
    for order in (given, dict(reversed(given.items()))):
        with pytest.raises(ValueError, match="tie_word_embeddings=False") as caught:
            list(checkpoint_names(order.items(), model))
        assert all(name in str(caught.value) for name in names)
