"""What every rebuild promises, over all kinds of them; see `engine_ext.startup.Rebuild`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from engine_ext.startup import Rebuild, RebuildError
from engine_ext.startup.recomputed.loader_rebuild import LoaderRebuild
from engine_ext.startup.recomputed.rebuild import Perturbation
from engine_ext.startup.recomputed.unprocessed_modules import Replacement
from tests.support.quantised_engine import process, served
from tests.support.served_models import changed
from tests.support.toy_quantised import Int8, Layer, Method, Packed, SecondCopy
from tests.unit.startup.recomputed.test_loader_rebuild import Mamba
from tests.unit.startup.recomputed.test_module_rebuild import Change, loaded, rebuild_of

Weights = Mapping[str, torch.Tensor]


@dataclass
class Kind:
    """A rebuild of something that an engine serves.

    Attributes:
        live: what is served.
        fresh: returns what a fresh engine serves that has loaded some weights.
    """

    rebuild: Rebuild
    live: torch.nn.Module
    fresh: Callable[[Weights], torch.nn.Module]

    def change(self, new: Weights) -> dict[str, list[Change]]:
        old = dict(self.rebuild.weights())
        return {name: [Change.to(old[name], tensor)] for name, tensor in new.items()}

    def others(self, seed: int = 1) -> dict[str, torch.Tensor]:
        return {name: changed(tensor, seed) for name, tensor in self.rebuild.weights()}


def module_kind(method: type[Method]) -> Kind:
    def fresh(weights: Weights) -> Layer:
        layer: Layer = loaded(method)
        for name, tensor in weights.items():
            layer.get_parameter(name).data.copy_(tensor)
        layer.quant_method.process_weights_after_loading(layer)
        return layer

    layer = loaded(method)
    return Kind(rebuild_of(layer), layer, fresh)


def loader_kind(name: str, live: str) -> Kind:
    base = Mamba.checkpoint()

    def fresh(weights: Weights) -> Any:
        model = Mamba()
        model.load_weights((base | {name: weights.get("tensor", base[name])}).items())
        process(model)
        return model

    model = fresh({})
    kept = base[name].clone()
    rebuild = LoaderRebuild(
        *(model, lambda copy: copy.load_weights, contextlib.nullcontext), name, kept, [live]
    )
    return Kind(rebuild, model, fresh)


KINDS: dict[str, Callable[[], Kind]] = {
    "quantised": lambda: module_kind(Int8),
    "second copy": lambda: module_kind(SecondCopy),
    "as it is": lambda: module_kind(Method),
    "packed": lambda: module_kind(Packed),
    "computed by the loader": lambda: loader_kind("mixer.A_log", "mixer.A"),
    "replaced by the loader": lambda: loader_kind("mixer.D", "mixer.D"),
}


@pytest.fixture(params=[pytest.param(n, marks=pytest.mark.host_memory) for n in KINDS])
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]()


def test_same_weights_give_what_is_served(kind: Kind) -> None:
    found = kind.rebuild.rebuild({})
    assert all(isinstance(one.new, Replacement) for one in found.differences)
    again = kind.rebuild.rebuild({}).fingerprints
    replaced = {one.path for one in found.differences}
    assert not found.unlike({p: text for p, text in again.items() if p not in replaced})


def test_a_rebuild_writes_nothing(kind: Kind) -> None:
    live = served(kind.live)
    weights = {name: tensor.clone() for name, tensor in kind.rebuild.weights()}
    kind.rebuild.rebuild(kind.change(kind.others()))
    assert served(kind.live) == live
    for name, tensor in kind.rebuild.weights():
        assert torch.equal(tensor, weights[name])


def test_differences_make_a_fresh_engine(kind: Kind) -> None:
    new = kind.others()
    for one in kind.rebuild.rebuild(kind.change(new)).differences:
        one.elements.put(one.new)
    assert served(kind.live) == served(kind.fresh(new))


def test_old_elements_undo_the_differences(kind: Kind) -> None:
    before = served(kind.live)
    found = kind.rebuild.rebuild(kind.change(kind.others())).differences
    old = [one.elements.read() for one in found]
    for one in found:
        one.elements.put(one.new)
    assert served(kind.live) != before
    for one, value in zip(found, old, strict=True):
        one.elements.put(value)
    assert served(kind.live) == before


def test_every_kept_weight_is_read(kind: Kind) -> None:
    for name, _ in kind.rebuild.weights():
        if kind.rebuild.keeps(name):
            found = kind.rebuild.rebuild({name: [Perturbation()]})
            assert found.unlike(kind.rebuild.rebuild({}).fingerprints)


def test_a_corrupted_tensor_is_not_intact(kind: Kind) -> None:
    found = kind.rebuild.rebuild({})
    replaced = {one.path for one in found.differences}
    expected = {p: text for p, text in found.fingerprints.items() if p not in replaced}
    kind.rebuild.proven = expected
    assert kind.rebuild.is_intact(expected)
    for one in kind.rebuild.rebuild(kind.change(kind.others())).differences:
        one.elements.put(one.new)
    assert not kind.rebuild.is_intact(expected)


def test_an_unknown_weight_is_an_error(kind: Kind) -> None:
    live = served(kind.live)
    with pytest.raises(RebuildError, match="another"):
        kind.rebuild.rebuild({"another": []})
    assert served(kind.live) == live


def test_sizes_and_names_are_of_the_weights(kind: Kind) -> None:
    weights = dict(kind.rebuild.weights())
    assert kind.rebuild.numel == sum(tensor.numel() for tensor in weights.values())
    assert weights.keys() >= {*kind.rebuild.names.values(), *kind.rebuild.in_place}
    assert not any(kind.rebuild.shares(name) for name in weights)
    assert not kind.rebuild.shared_tensors()
