"""Memory that a rebuilt module shares, or that something else keeps: exact, or refused."""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from engine_ext.placement import DeviceElements, flat_bits
from engine_ext.startup.recomputed import module_rebuild
from engine_ext.startup.recomputed.compare import Place
from engine_ext.startup.recomputed.rebuild import Difference
from engine_ext.sync.post_load import PostLoad
from tests.support.quantised_engine import Serving
from tests.support.rank_engine import errors_of, part_id
from tests.support.served_models import changed, delta_between, dense_delta, one_part
from tests.support.toy_quantised import (
    OUT,
    Attribute,
    Int8,
    Layer,
    Method,
    Model,
    Packed,
    PackedAway,
    SecondCopy,
    Transpose,
    empty,
    linear_shapes,
    one_layer,
    parameter,
)

UPDATED = ("exact", "cast", "rebuilt")


def assert_exact(serving: Serving, *refused: str) -> None:
    """These tensors are refused; each of the others is updated alone, and then all at once."""
    assert serving.reasons().keys() == set(refused)
    names = [name for name, status in serving.statuses().items() if status in UPDATED]
    alone = [[name] for name in names if name != "norm"]  # which no layer is made of
    for seed, chosen in enumerate([*alone, names]):
        target = {name: changed(serving.current[name], seed) for name in chosen}
        errors_of(serving.sync(target), none=True)
        serving.assert_fresh()


# --- one parameter of several modules ---


class Tied(Model):
    """A head with the weight of the embedding, which the checkpoint has once."""

    shapes: ClassVar = {"embed.weight": (OUT, 6)}
    methods: ClassVar[tuple[type[Method], type[Method]]]
    order: ClassVar[tuple[str, ...]] = ("embed", "head")

    def build(self, rank: int, ranks: int) -> None:
        methods = dict(zip(("embed", "head"), self.methods, strict=True))
        for name in self.order:
            setattr(self, name, Layer(methods[name](), bias=False))
        self.head.weight = self.embed.weight


def tied(embed: type[Method], head: type[Method], *first: str) -> type[Tied]:
    class TiedSo(Tied):
        methods = (embed, head)
        order = first or Tied.order

    return TiedSo


@pytest.mark.parametrize("order", [("embed", "head"), ("head", "embed")])
@pytest.mark.parametrize(
    ("embed", "head"),
    [(Method, Int8), (Method, Packed), (Int8, Int8)],
)
def test_tied_modules_are_not_updated_if_one_is_processed(
    tmp_path: Path, embed: type[Method], head: type[Method], order: tuple[str, ...]
) -> None:
    """The loader writes to one of them only, and the other would keep what it was made of."""
    serving = Serving(tied(embed, head, *order), tmp_path)
    assert_exact(serving, "embed.weight")
    assert "parted it from" in serving.reasons()["embed.weight"]


@pytest.mark.parametrize("order", [("embed", "head"), ("head", "embed")])
@pytest.mark.parametrize(
    ("embed", "head"), [(Method, Method), (Method, SecondCopy), (SecondCopy, SecondCopy)]
)
def test_a_tie_that_processing_leaves_is_followed(
    tmp_path: Path, embed: type[Method], head: type[Method], order: tuple[str, ...]
) -> None:
    """Both modules rebuild what they make of the weight."""
    assert_exact(Serving(tied(embed, head, *order), tmp_path))


def test_a_parameter_of_a_kept_module_and_of_another_one(tmp_path: Path) -> None:
    """A router's bias is a parameter of the experts, too: a rebuild must not write it back."""

    class Router(Model):
        shapes: ClassVar = {"gate.bias": (OUT,), **linear_shapes("experts", bias=False)}

        def build(self, rank: int, ranks: int) -> None:
            self.gate = Layer(Method())
            del self.gate.weight
            self.gate.quant_method = None  # type: ignore[assignment]
            self.experts = Layer(Int8(), bias=False)
            self.experts.correction = self.gate.bias

    assert_exact(Serving(Router, tmp_path))


def test_a_module_under_two_names_is_rebuilt_once(tmp_path: Path) -> None:
    class Shared(Model):
        shapes: ClassVar = linear_shapes("one")

        def build(self, rank: int, ranks: int) -> None:
            self.one = Layer(Int8())
            self.two = self.one

    assert_exact(Serving(Shared, tmp_path))


def test_a_parameter_under_two_names_of_a_module(tmp_path: Path) -> None:
    class Aliased(Model):
        shapes: ClassVar = linear_shapes("lin")

        def build(self, rank: int, ranks: int) -> None:
            self.lin = Layer(SecondCopy())
            self.lin.alias = self.lin.weight

    assert_exact(Serving(Aliased, tmp_path))


@pytest.mark.parametrize(("embed", "head"), [(Method, Transpose), (Int8, Method)])
def test_what_processing_leaves_without_a_loader_is_refused(
    tmp_path: Path, embed: type[Method], head: type[Method]
) -> None:
    with pytest.raises(RuntimeError, match="no tensor of this model can be certified"):
        Serving(tied(embed, head), tmp_path)


def test_value_that_loader_keeps_elsewhere_is_not_rebuilt(tmp_path: Path) -> None:
    """The parameter would be right, what is kept next to it would not."""

    class Keeping(Model):
        shapes: ClassVar = {"decay": (OUT,)}

        def build(self, rank: int, ranks: int) -> None:
            self.decay = empty(OUT)
            self.decay.weight_loader = self.load_decay  # type: ignore[attr-defined]

        def load_decay(self, live: object, weight: object) -> None:
            self.decay.data.copy_(-weight.exp())  # type: ignore[attr-defined]
            self.kept = weight.exp()  # type: ignore[attr-defined]

    with pytest.raises(RuntimeError, match="no tensor of this model can be certified"):
        Serving(Keeping, tmp_path)


# --- buffers ---


@pytest.mark.host_memory
@pytest.mark.parametrize("method", [Int8, Transpose, Packed])
def test_a_buffer_that_is_loaded_follows(tmp_path: Path, method: type[Method]) -> None:
    class WithBuffer(Model):
        shapes: ClassVar = {**linear_shapes("lin"), "lin.stats": (OUT,)}

        def build(self, rank: int, ranks: int) -> None:
            self.lin = Layer(method())
            self.lin.register_buffer("stats", torch.full((OUT,), 3.0, dtype=torch.bfloat16))

    assert_exact(Serving(WithBuffer, tmp_path))


# --- memory within one module that processing reaches in several ways ---


class FromAlias(Int8):
    """Quantises what another tensor of the layer shows of the weight."""

    def create_weights(self, layer: Any) -> None:
        layer.alias = layer.weight.data

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.made = layer.alias.float() * 2
        layer.weight = parameter(torch.empty(0))
        del layer.alias

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x @ layer.made.t()
        return found


class FromView(FromAlias):
    def create_weights(self, layer: Any) -> None:
        layer.alias = parameter(layer.weight.data)


class FromStore(FromAlias):
    """Quantises what a plain object holds of the weight, which no copy of the layer copies."""

    def create_weights(self, layer: Any) -> None:
        layer.store = SimpleNamespace(weight=layer.weight.data)

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.made = layer.store.weight.float() * 2
        layer.weight = parameter(torch.empty(0))
        layer.store = None


class FromClosure(FromStore):
    def create_weights(self, layer: Any) -> None:
        weight = layer.weight
        layer.read = lambda: weight.float() + 0

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.made = layer.read() * 2
        layer.weight = parameter(torch.empty(0))
        layer.read = None


class FromBoth(FromStore):
    """So does this, and it reads the parameter as well."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.made = layer.store.weight.float() * 2 + layer.weight.float()
        layer.weight = parameter(torch.empty(0))
        layer.store = None


@pytest.mark.parametrize("method", [FromAlias, FromView, FromStore, FromClosure, FromBoth])
def test_what_processing_reads_in_another_way_is_refused(
    tmp_path: Path, method: type[Method]
) -> None:
    serving = Serving(one_layer(method), tmp_path)
    assert_exact(serving, "lin.weight", "lin.bias")


# --- tensors that are computed from a rebuilt module, or before it is processed ---


class FromTotal(FromAlias):
    """Reads a sum that the loader has kept in a plain object."""

    def create_weights(self, layer: Any) -> None:
        layer.store = SimpleNamespace(total=torch.full((OUT,), 7.5))
        layer.weight.weight_loader = functools.partial(self.load, layer)

    @staticmethod
    def load(layer: Any, live: torch.Tensor, weight: torch.Tensor) -> None:
        live.data.copy_(weight)
        if not weight.is_meta:
            layer.store.total.fill_(float(weight.sum()))

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.made = layer.weight.float() * layer.store.total[0]
        layer.weight = parameter(torch.empty(0))


class FromTotalBuffer(FromTotal):
    def create_weights(self, layer: Any) -> None:
        super().create_weights(layer)
        layer.register_buffer("total", layer.store.total)


@pytest.mark.parametrize("method", [FromTotal, FromTotalBuffer])
def test_what_the_loader_computes_besides_is_refused(tmp_path: Path, method: type[Method]) -> None:
    serving = Serving(one_layer(method), tmp_path)
    assert {"lin.weight", "lin.bias"} == serving.reasons().keys()
    assert_exact(serving, "lin.weight", "lin.bias")


@pytest.mark.host_memory
@pytest.mark.parametrize("method", [Int8, Packed, PackedAway, Attribute])
@pytest.mark.parametrize("where", ["group", "sibling"])
def test_what_is_computed_outside_of_the_module_is_refused(
    tmp_path: Path, method: type[Method], where: str
) -> None:
    """Also if the module has no live tensor left that it could have been computed from."""

    class Absorbed(Model):
        shapes: ClassVar = {**linear_shapes("group.lin", bias=False), **linear_shapes("plain")}

        def build(self, rank: int, ranks: int) -> None:
            self.group: Any = nn.Module()
            self.group.sibling = nn.Module()
            self.group.lin = Layer(method(), bias=False)
            self.plain = Layer(Method())

        def after_processing(self) -> None:
            paths = {"group": self.group, "sibling": self.group.sibling}
            paths[where].absorbed = self.group.lin(torch.eye(6)) * 2

    serving = Serving(Absorbed, tmp_path)
    assert "absorbed" in serving.reasons()["group.lin.weight"]
    assert_exact(serving, "group.lin.weight")


# --- objects that a copy of the module shares with it ---


class OpaqueHandle:
    """No tensor can be found in it."""

    def __init__(self, weight: torch.Tensor) -> None:
        packed = weight.float().numpy()
        self.run = lambda x: torch.from_numpy(x.numpy() @ packed.T)


class IntoHelper(Packed):
    """Keeps its handle in a plain object, which no copy of the layer copies."""

    def create_weights(self, layer: Any) -> None:
        layer.helper = SimpleNamespace()

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.helper.handle = OpaqueHandle(layer.weight)
        layer.weight = parameter(torch.empty(0))

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = layer.helper.handle.run(x)
        return found


class IntoDict(IntoHelper):
    """Keeps it in an ordered dict."""

    def create_weights(self, layer: Any) -> None:
        layer.helper = OrderedDict(handle=None)

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.helper["handle"] = OpaqueHandle(layer.weight)
        layer.weight = parameter(torch.empty(0))

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = layer.helper["handle"].run(x)
        return found


@pytest.mark.host_memory
@pytest.mark.parametrize("method", [IntoHelper, IntoDict])
def test_processing_that_writes_to_what_copies_share_is_refused(
    tmp_path: Path, method: type[Method]
) -> None:
    """It would change the served module before the commit."""
    serving = Serving(one_layer(method), tmp_path)
    serving.assert_fresh()
    assert "writes to the live mod" in serving.reasons()["lin.bias"]
    assert_exact(serving, "lin.weight", "lin.bias")


class WithReference(Packed):
    """Its handle refers to the layer; a rebuild keeps no copy of that layer."""

    def process_weights_after_loading(self, layer: Any) -> None:
        packed = layer.weight.float()
        layer.handle = SimpleNamespace(run=lambda x: x @ packed.t() * layer.factor)
        layer.factor = 2.0
        layer.weight = parameter(torch.empty(0))


def test_a_handle_that_refers_to_the_copy_is_refused(tmp_path: Path) -> None:
    serving = Serving(one_layer(WithReference), tmp_path)
    assert_exact(serving, "lin.weight", "lin.bias")


def test_the_model_itself_is_processed(tmp_path: Path) -> None:
    class Processed(Model):
        shapes: ClassVar = {"weight": (OUT, 6)}
        quant_method = Int8()

        def build(self, rank: int, ranks: int) -> None:
            self.weight = empty(OUT, 6)

    assert_exact(Serving(Processed, tmp_path))


@pytest.mark.parametrize("outer", [Int8, Transpose, Packed, Method])
@pytest.mark.parametrize("inner", [Int8, Transpose, Packed, Method])
def test_a_processed_module_within_another_one(
    tmp_path: Path, outer: type[Method], inner: type[Method]
) -> None:
    class Nested(Model):
        shapes: ClassVar = linear_shapes("lin", "lin.inner")

        def build(self, rank: int, ranks: int) -> None:
            self.lin = Layer(outer())
            self.lin.inner = Layer(inner())

    serving = Serving(Nested, tmp_path)
    assert_exact(serving, *serving.reasons())


@pytest.mark.parametrize("shape", [(0, 6), (8, 0)])
def test_parameters_without_elements(tmp_path: Path, shape: tuple[int, ...]) -> None:
    class Empty(Method):
        def create_weights(self, layer: Any) -> None:
            layer.none = empty(*shape)

        def process_weights_after_loading(self, layer: Any) -> None:
            layer.weight = parameter(layer.weight.float() * 2)
            layer.none = parameter(layer.none.float())

    assert_exact(Serving(one_layer(Empty), tmp_path))


# --- another tensor over the memory of a weight that processing leaves in place ---


class ViewBeside(Method):
    """Keeps another view of the weight, and computes something besides."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.view = layer.weight.data.t()
        layer.scale = layer.weight.float() * 2


class ParameterBeside(ViewBeside):
    """The same, registered."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.again = parameter(layer.weight.data)
        layer.scale = layer.weight.float().sum()


def differences_on_a_device(path: str, live: torch.Tensor, new: torch.Tensor) -> Iterator[Any]:
    """Take live tensors of a module for those of a device, which are written before the others."""
    memory, other = flat_bits(live), flat_bits(new)
    found = (memory != other).nonzero().view(-1)
    if len(found):
        yield Difference(path, DeviceElements(memory, found), other[found])


def stage_in_parts(
    serving: Serving, first: str, sync_id: str, *, full: bool
) -> tuple[Any, dict[str, Any]]:
    """Stage a part for each tensor, this one first; return the sync and the new checkpoint."""
    names = sorted(serving.current, key=lambda name: name != first)
    target = {name: changed(serving.current[name], seed) for seed, name in enumerate(names)}
    kind: dict[str, Any] = {"full": True, "base_version": None} if full else {}
    parts = [
        one_part(
            [
                dense_delta(name, target[name])
                if full
                else delta_between(name, serving.current[name], target[name])
            ],
            **{"current_version": 1, "num_parts": len(names), "sync_id": sync_id, "part": number},
            **kind,
        )
        for number, name in enumerate(names)
    ]
    for part in parts:
        errors_of(serving.stage(part), none=True)
    return part_id(parts[0]), target


@pytest.fixture(params=["host", "device"])
def _order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rebuilt tensors are in host memory, or are taken for those of a device."""
    if request.param == "device":
        monkeypatch.setattr(module_rebuild, "tensor_differences", differences_on_a_device)


@pytest.mark.usefixtures("_order")
@pytest.mark.parametrize("method", [ViewBeside, ParameterBeside])
def test_memory_that_two_writes_share_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: type[Method]
) -> None:
    """The first part also writes what the module computes, before or after the weight.

    A write that fails, and a rollback, restore all of it.
    """
    serving = Serving(one_layer(method), tmp_path)
    before, recomputed, fails = serving.served(), PostLoad.recomputed_from, list[str]()

    def fail_once(*arguments: Any) -> Any:
        if fails:
            raise OSError(fails.pop())
        return recomputed(*arguments)

    monkeypatch.setattr(PostLoad, "recomputed_from", fail_once)
    for full, first in itertools.product((False, True), ("lin.bias", "lin.weight")):
        case = f"{first} first, full={full}"
        sync, _ = stage_in_parts(serving, first, f"fails: {case}", full=full)
        fails.append("the write fails")
        errors = errors_of(serving.engine.commit(sync))
        assert [error["type"] for error in errors] == ["WriteUndone"], case
        assert serving.served() == before, case
        serving.assert_fresh()
        serving.engine.call("abort")
        sync, target = stage_in_parts(serving, first, case, full=full)
        errors_of(serving.engine.commit(sync), none=True)
        serving.current = serving.base | target
        serving.assert_fresh()
        errors_of(serving.engine.call("rollback"), none=True)
        assert serving.served() == before, case
        serving.current = dict(serving.base)


@pytest.mark.parametrize("method", [ViewBeside, ParameterBeside])
def test_memory_that_two_threads_write_is_written_exactly(
    tmp_path: Path, method: type[Method]
) -> None:
    serving = Serving(one_layer(method), tmp_path)
    for seed in range(20):
        target = {"lin.weight": changed(serving.current["lin.weight"], seed)}
        errors_of(serving.sync(target), none=True)
    serving.assert_fresh()


def test_places_are_compared_while_a_rebuild_adds_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scrubbing thread compares them at any time."""
    serving = Serving(one_layer(ViewBeside), tmp_path)
    target = {"lin.weight": changed(serving.current["lin.weight"], 3)}
    unchanged = Place.unchanged

    def stage_meanwhile(place: Place) -> bool:
        monkeypatch.undo()
        errors_of(serving.stage(serving.body(target)), none=True)
        return unchanged(place)

    monkeypatch.setattr(Place, "unchanged", stage_meanwhile)
    assert serving.applier().moved() == []
