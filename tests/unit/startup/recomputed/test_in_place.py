"""The unprocessed weight of what processing leaves as it is, is live memory."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from engine_ext.model import StorageIndex
from engine_ext.startup.recomputed import ModuleRebuild, share_in_place
from engine_ext.startup.recomputed.compare import RebuildError
from engine_ext.startup.recomputed.rebuild import Perturbation
from tests.support.quantised_engine import Serving, refusal
from tests.support.rank_engine import errors_of
from tests.support.served_models import changed
from tests.support.toy_quantised import (
    IN,
    OUT,
    Int8,
    Layer,
    Method,
    Model,
    Packed,
    SecondCopy,
    linear_shapes,
    one_layer,
    parameter,
)
from tests.unit.startup.recomputed.test_module_rebuild import Change, loaded, rebuild_of


class InPlace(Method):
    """Negates the weight where it is."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight.data.neg_()
        layer.scale = torch.ones(1)


class Clamp(SecondCopy):
    """Clamps the weight where it is, which changes nothing while all are small."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight.data.clamp_(-1e30, 1e30)
        super().process_weights_after_loading(layer)


class Captured(Method):
    """Makes a second copy of the first weight that it was given, wherever that is."""

    first: ClassVar[Any] = None

    def process_weights_after_loading(self, layer: Any) -> None:
        cls = type(self)
        cls.first = layer.weight if cls.first is None else cls.first
        layer.copies = [cls.first.t().contiguous()]


class Picky(SecondCopy):
    """Fails for bits that no checkpoint has."""

    def process_weights_after_loading(self, layer: Any) -> None:
        if bool((layer.weight.abs() > 1e6).any()):
            raise ValueError("out of range")
        super().process_weights_after_loading(layer)


def shared(layer: Any) -> tuple[ModuleRebuild, int]:
    rebuild = rebuild_of(layer)
    return rebuild, share_in_place(rebuild, StorageIndex(layer))


@pytest.mark.parametrize(
    ("method", "names"),
    [
        (SecondCopy, {"weight", "bias"}),
        (Method, {"weight", "bias"}),
        (Int8, {"bias"}),
        (Packed, {"bias"}),
        (InPlace, {"bias"}),
    ],
)
def test_what_stays_has_no_memory_of_its_own(method: type[Method], names: set[str]) -> None:
    layer = loaded(method)
    rebuild, freed = shared(layer)
    assert rebuild.in_place == names
    sizes = {"weight": OUT * IN * 2, "bias": OUT * 2}
    assert freed == sum(sizes[name] for name in names)
    live = dict(layer.named_parameters())
    for name, tensor in rebuild.weights():
        assert (tensor.data_ptr() == live[name].data_ptr()) == (name in names)


def test_nothing_stays_where_other_bits_cannot_be_processed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine starts, with a copy of the weights."""
    layer = loaded(Picky)

    def within(self: Perturbation, tensor: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(put=lambda seed: tensor.detach().fill_(2e6))

    monkeypatch.setattr(Perturbation, "within", within)
    with caplog.at_level(logging.INFO):
        rebuild, freed = shared(layer)
    assert (rebuild.in_place, freed) == (set(), 0)
    assert "out of range" in caplog.text


@pytest.mark.host_memory
def test_only_what_was_made_of_it_differs() -> None:
    """The sync itself writes to what is in place."""
    layer = loaded(SecondCopy)
    rebuild, _ = shared(layer)
    old = layer.weight.clone()
    new = changed(old, 1)
    [one] = rebuild.rebuild({"weight": [Change.to(layer.weight, new)]}).differences
    assert one.path == "copies[0]"
    one.elements.put(one.new)
    assert torch.equal(layer.copies[0], new.t())
    assert torch.equal(layer.weight, old)


def test_overlapping_tensor_keeps_unprocessed_weight() -> None:
    layer = loaded(SecondCopy)
    root = torch.nn.Module()
    root.layer = layer
    root.rows = parameter(layer.weight.data[1:])
    rebuild = rebuild_of(layer)
    share_in_place(rebuild, StorageIndex(root))
    assert rebuild.in_place == {"bias"}


def test_processing_that_changes_it_later_is_refused(tmp_path: Path) -> None:
    serving = Serving(one_layer(Clamp), tmp_path)
    assert set(serving.statuses().values()) == {"exact", "rebuilt"}
    target = {"lin.weight": serving.current["lin.weight"].clone()}
    target["lin.weight"][0, 0] = 2.0
    errors_of(serving.sync(target), none=True)
    serving.assert_fresh()
    before = serving.served()
    target = {"lin.weight": target["lin.weight"].clone()}
    target["lin.weight"][0, 0] = 3e38
    assert "processing changes weight" in refusal(serving.sync(target))
    assert serving.served() == before


@pytest.mark.host_memory
def test_processing_that_changes_it_later_fails_rebuild() -> None:
    layer = loaded(Clamp)
    rebuild, _ = shared(layer)
    new = layer.weight.clone()
    new[0, 0] = 3e38
    with pytest.raises(RebuildError, match="which it left as it was"):
        rebuild.rebuild({"weight": [Change.to(layer.weight, new)]})


def test_processing_that_reads_live_memory_is_refused(tmp_path: Path) -> None:
    class Two(Model):
        shapes: ClassVar = linear_shapes("lin")

        def build(self, rank: int, ranks: int) -> None:
            self.lin = Layer(type("Fresh", (Captured,), {})())

    serving = Serving(Two, tmp_path)
    assert serving.statuses()["lin.weight"] == "uncertified"
