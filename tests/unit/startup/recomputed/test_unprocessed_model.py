"""The model as its loader knows it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine_ext.startup.recomputed import UnprocessedModules, make_unprocessed_model, share_views
from engine_ext.startup.recomputed.unprocessed_model import with_modules
from tests.support.quantised_engine import copied, process, processing
from tests.support.toy_quantised import Everything, Int8, Layer, Method, Transpose


def processed(kind: type[Method]) -> tuple[Any, Any]:
    """A processed model of one layer in a list, and the unprocessed one."""
    root: Any = nn.Module()
    root.layers = nn.ModuleList([Layer(kind()), Layer(Method())])
    layer = root.layers[0]
    states = UnprocessedModules(1 << 20)
    states.keep(processing(layer), kind is Transpose)
    layer.quant_method.process_weights_after_loading(layer)
    return root, make_unprocessed_model(root, states.states)


def test_only_what_was_processed_is_another() -> None:
    root, unprocessed = processed(Int8)
    assert unprocessed is not root
    assert type(unprocessed) is type(root)
    assert unprocessed.layers[1] is root.layers[1]
    assert unprocessed.layers[0].weight.dtype == torch.bfloat16
    assert root.layers[0].weight.dtype == torch.int8


def test_what_moves_shares_the_live_memory() -> None:
    root, unprocessed = processed(Transpose)
    live, before = root.layers[0].weight, unprocessed.layers[0].weight
    assert before.data_ptr() == live.data_ptr()
    assert before.shape == live.shape[::-1]
    assert unprocessed.layers[0].bias.data_ptr() == root.layers[0].bias.data_ptr()


def test_loaders_are_those_of_the_unprocessed_model() -> None:
    for kind in (Int8, Transpose):
        root, unprocessed = processed(kind)
        assert unprocessed.layers[0].weight.weight_loader.__self__ is unprocessed.layers[0]
        assert unprocessed.layers[1].weight.weight_loader.__self__ is root.layers[1]


def test_loading_unprocessed_leaves_what_was_processed() -> None:
    checkpoint = Everything.checkpoint()
    model, states = Everything(), UnprocessedModules(1 << 20)
    model.load_weights(copied(checkpoint))
    for module in model.modules():
        if isinstance(module, Layer) and not isinstance(module.quant_method, Transpose):
            states.keep(processing(module), False)
    process(model)
    unprocessed: Any = make_unprocessed_model(model, states.states)
    live = {n: p.clone() for n, p in model.named_parameters() if n.startswith("int8")}
    with torch.no_grad():
        unprocessed.load_weights((n, t + 1) for n, t in checkpoint.items() if n.startswith("int8"))
    assert all(torch.equal(model.get_parameter(n), p) for n, p in live.items())
    assert torch.equal(unprocessed.int8.weight.cpu(), checkpoint["int8.weight"] + 1)


def test_a_model_without_kept_modules_needs_no_copy() -> None:
    model = Everything()
    assert make_unprocessed_model(model, []) is model
    replaced: dict[int, nn.Module] = {}
    assert with_modules(model, replaced) is model
    assert replaced[id(model.int8)] is model.int8


def test_a_module_with_two_parents_has_one_copy() -> None:
    root: Any = nn.Module()
    root.one = root.two = Layer(Int8())
    states = UnprocessedModules(1 << 20)
    states.keep(processing(root.one), False)
    unprocessed: Any = make_unprocessed_model(root, states.states)
    assert unprocessed.one is unprocessed.two
    assert unprocessed.one is not root.one


def test_aliased_module_uses_kept_copy() -> None:
    """So the loader finds it as it was, under any name; a part that is kept itself is that."""
    root: Any = nn.Module()
    root.outer = Layer(Int8())
    root.outer.plain, root.outer.inner = Layer(Method()), Layer(Int8())
    root.plain, root.inner = root.outer.plain, root.outer.inner
    states = UnprocessedModules(1 << 20)
    for layer in (root.outer, root.inner):
        states.keep(processing(layer), False)
    outer, inner = (state.before for state in states.states)
    unprocessed: Any = make_unprocessed_model(root, states.states)
    assert unprocessed.outer is outer
    assert unprocessed.inner is inner
    assert unprocessed.plain is outer.plain
    assert unprocessed.plain.weight.weight_loader.__self__ is unprocessed.plain


def test_live_view_of_loaded_weight_is_unprocessed_weight() -> None:
    """Also one that begins within its storage, where other elements have the same bits."""
    root: Any = nn.Module()
    root.layer = layer = Layer(Int8())
    storage = torch.zeros(3 * layer.weight.numel(), dtype=layer.weight.dtype)
    middle = storage[layer.weight.numel() :][: layer.weight.numel()].view_as(layer.weight)
    layer.weight.data = middle
    root.plain = middle.view(-1)
    states = UnprocessedModules(1 << 20)
    states.keep(processing(layer), False)
    layer.quant_method.process_weights_after_loading(layer)
    share_views(root, states.states)
    weight = make_unprocessed_model(root, states.states).get_parameter("layer.weight")
    assert weight.dtype == torch.bfloat16
    assert weight.data_ptr() == root.plain.data_ptr()


def test_another_parameter_is_no_unprocessed_weight() -> None:
    """It has a name of its own, by which a rebuild would not know what was written."""
    root: Any = nn.Module()
    root.layer = layer = Layer(Int8())
    root.tied = layer.weight
    states = UnprocessedModules(1 << 20)
    states.keep(processing(layer), False)
    layer.quant_method.process_weights_after_loading(layer)
    share_views(root, states.states)
    weight = make_unprocessed_model(root, states.states).get_parameter("layer.weight")
    assert weight.data_ptr() != root.tied.data_ptr()
