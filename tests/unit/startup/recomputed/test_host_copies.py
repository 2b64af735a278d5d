"""Unprocessed weights of a GPU are in host memory, and its processing gets them on the device.

The weights are in host memory here anyway: they are only taken for those of a device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from engine_ext.conformance.toy_models.base import DEVICE
from engine_ext.startup import UnprocessedModules
from engine_ext.startup.recomputed import host_copies
from engine_ext.startup.recomputed.host_copies import HostMemory
from tests.support.quantised_engine import Serving, processing, refusal
from tests.support.rank_engine import errors_of
from tests.support.toy_quantised import (
    IN,
    OUT,
    Everything,
    Int8,
    Layer,
    linear_shapes,
    one_layer,
    parameter,
)
from tests.unit.sync.test_post_load import TwoLayers, target_of

pytestmark = pytest.mark.slow


class Gapped(Int8):
    """Its weight is a part of wider rows."""

    def create_weights(self, layer: Any) -> None:
        rows = layer.weight.shape[0]
        wide = torch.full((rows, IN + 2), 7.0, dtype=torch.bfloat16, device=DEVICE)
        layer.weight = parameter(wide[:, :IN])
        layer.weight.weight_loader = layer.load


class Repeated(Int8):
    """A buffer repeats one row without memory of its own."""

    def create_weights(self, layer: Any) -> None:
        layer.register_buffer("row", torch.arange(3.0, device=DEVICE).expand(4, 3))


class EverythingAndGaps(Everything):
    shapes: ClassVar = {**Everything.shapes, **linear_shapes("gapped")}

    def build(self, rank: int, ranks: int) -> None:
        super().build(rank, ranks)
        self.gapped = Layer(Gapped(), rank=rank, ranks=ranks)


@pytest.fixture
def uploaded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Every tensor belongs on a device; what was copied, there or with changes, and its copy."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        assert device == torch.empty(0, device=DEVICE).device
        found.append((tensor, copied(tensor, device)))
        return found[-1][1]

    copied = host_copies.copied
    monkeypatch.setattr(host_copies, "copied", upload)
    monkeypatch.setattr(host_copies, "belongs_elsewhere", lambda tensor: not tensor.is_meta)
    return found


@pytest.mark.parametrize("chunk", [256, 1 << 20])
def test_a_copy_has_the_layout_and_the_bits(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "_CHUNK", chunk)
    memory, size = HostMemory(), 0
    tensors = [
        torch.arange(30, dtype=torch.bfloat16).view(5, 6),
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(20, dtype=torch.uint8)[::2],
        torch.arange(12.0).view(3, 4)[:, :3],
        torch.empty(0),
        torch.tensor(7.0, dtype=torch.float64),
        torch.arange(100, dtype=torch.int32),
    ]
    sources = [tensor.to(DEVICE) for tensor in tensors]
    copies = [memory.copy(source) for source in sources]
    for tensor, source, copy in zip(tensors, sources, copies, strict=True):
        assert torch.equal(copy, tensor)
        assert (copy.stride(), copy.dtype, copy.device.type) == (
            *(source.stride(), tensor.dtype, "cpu"),
        )
        size += copy.nbytes
    storages = {c.untyped_storage().data_ptr(): c.untyped_storage().nbytes() for c in copies}
    assert size <= sum(storages.values()) <= max(chunk, 4 * size)


def test_processing_gets_a_module_on_its_device(
    uploaded: list[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    layer: Any = Layer(Int8())
    states = UnprocessedModules(1 << 20)
    assert states.keep(processing(layer), False) is None
    [state] = states.states
    weights = dict(state.weights())
    assert weights.keys() == {"weight", "bias"}
    chunk = weights["weight"].untyped_storage()
    assert chunk.data_ptr() == weights["bias"].untyped_storage().data_ptr()
    copy: Any = state.copy().root
    weight: Any = copy.weight
    assert weight.weight_loader.__func__ is Layer.load
    assert type(weight) is torch.nn.Parameter
    assert {t.data_ptr() for _, t in uploaded} == {copy.weight.data_ptr(), copy.bias.data_ptr()}
    assert torch.equal(copy.weight.cpu(), weights["weight"])


@pytest.mark.host_memory
@pytest.mark.parametrize("ranks", [1, 2])
def test_syncs_are_those_of_weights_on_the_device(
    ranks: int, tmp_path: Path, uploaded: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    serving = Serving(EverythingAndGaps, tmp_path, ranks=ranks)
    assert serving.reasons() == {}
    before = serving.base
    for seed in range(2):
        uploaded.clear()
        before = dict(serving.current)
        errors_of(serving.sync(target_of(serving, seed=seed)), none=True)
        made = {id(copy) for _, copy in uploaded}
        assert any(id(given) in made for given, _ in uploaded)  # a copy with changes goes there
        serving.assert_fresh()
    errors_of(serving.rollback(before), none=True)
    serving.assert_fresh()
    errors_of(serving.sync(target_of(serving, seed=40), full=True), none=True)
    serving.assert_fresh()


@pytest.mark.host_memory
def test_a_repeated_row_is_refused_by_name(
    tmp_path: Path, uploaded: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    serving = Serving(one_layer(Repeated), tmp_path)
    assert serving.reasons().keys() == {"lin.weight", "lin.bias"}
    errors_of(serving.sync(target_of(serving, "norm")), none=True)
    serving.assert_fresh()


@pytest.mark.host_memory
def test_an_engine_without_a_checkpoint(
    tmp_path: Path, uploaded: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    serving = Serving(Everything, tmp_path, dummy=True)
    errors_of(serving.sync(target_of(serving), full=True), none=True)
    serving.assert_fresh()
    errors_of(serving.sync(target_of(serving, seed=9)), none=True)
    serving.assert_fresh()


def test_a_module_that_is_refused_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where vLLM quantises while it loads: its loader does not know the processed weights."""
    keep = UnprocessedModules.keep

    def keep_or_refuse(self: UnprocessedModules, one: Any, moves: bool) -> str | None:
        why = keep(self, one, moves)
        if why is not None:
            self.refuse(one, why)
        return why

    monkeypatch.setattr(UnprocessedModules, "keep", keep_or_refuse)
    size = 2 * (OUT * IN + OUT)
    serving = Serving(TwoLayers, tmp_path, shadow_bytes=2 * size - 1)
    assert serving.reasons().keys() == {"two.weight", "two.bias"}
    assert serving.statuses()["norm"] == "exact"
    before = serving.served()
    message = refusal(serving.sync(target_of(serving, "two.weight")))
    assert f"take {size} bytes more than {size}: raise --delta-shadow-bytes" in message
    assert serving.served() == before
    errors_of(serving.sync(target_of(serving, "one.weight", "one.bias", "norm")), none=True)
    serving.assert_fresh()
