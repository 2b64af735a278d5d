"""The adapter's view of vLLM's modules, with stand-ins for its classes."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from engine_ext.adapters.vllm.lora import without_lora
from engine_ext.adapters.vllm.postload import _processings, copied_on_first_use, with_sinks_copies


class Wrapper(nn.Module):
    """vLLM's wrapper around a layer."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_a_stacked = torch.zeros(2, 2)


class Attention(nn.Module):
    """One that is processed after loading."""

    def __init__(self, projection: nn.Module | None = None) -> None:
        super().__init__()
        self.projection = projection


class Method:
    """A quant method that counts how often it has processed a layer."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.processed = getattr(layer, "processed", 0) + 1


class Unquantized:
    """The quant method of a layer that is not quantised."""


class PackingAttention(Attention):
    """One that packs the weight of its projection, and drops it."""

    is_amx_bmm_enabled = True

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        projection: Any = self.projection
        self.packed = (projection.weight.detach() * projection.processed).to(dtype)
        projection.weight = nn.Parameter(torch.empty(0), requires_grad=False)


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.linear = Wrapper(nn.Linear(2, 2))
        self.norm = nn.LayerNorm(2)


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_deferred(module: Any) -> bool:
        return isinstance(module, Attention)

    found = {
        "vllm.lora.layers": SimpleNamespace(BaseLayerWithLoRA=Wrapper),
        "vllm.model_executor.layers.attention": SimpleNamespace(
            is_deferred_attention_layer=is_deferred
        ),
        "vllm.model_executor.layers.quantization.base_config": SimpleNamespace(
            QuantizeMethodBase=Method
        ),
    }
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)


def test_names_are_the_checkpoints_and_modules_are_live() -> None:
    model = nn.ModuleDict({"block": Block(Attention())})
    live: Any = model["block"]
    base = without_lora(model)
    names = dict(base.named_parameters())
    assert [*names] == [
        "block.linear.weight",
        "block.linear.bias",
        "block.norm.weight",
        "block.norm.bias",
    ]
    assert names["block.linear.weight"] is live.linear.base_layer.weight
    assert base["block"] is not live
    for name in ("norm", "attention"):
        assert getattr(base["block"], name) is getattr(live, name)
    assert isinstance(live.linear, Wrapper)


def test_a_parameter_that_is_replaced_later_is_seen() -> None:
    model = nn.ModuleDict({"block": Block(Attention())})
    live: Any = model["block"]
    live.own = nn.Parameter(torch.zeros(2))
    base = without_lora(model)
    live.own = nn.Parameter(torch.ones(2))
    live.linear.base_layer.bias = nn.Parameter(torch.ones(2))
    assert base["block"].own is live.own
    assert base["block"].linear.bias is live.linear.base_layer.bias


def test_a_model_without_wrapped_layers_is_itself() -> None:
    model = nn.ModuleDict({"norm": nn.LayerNorm(2)})
    assert without_lora(model) is model


def test_attention_with_wrapped_layers_is_refused() -> None:
    """It would keep what it derives on the live module, and the copy's would be updated."""
    model = nn.ModuleDict({"block": Block(Attention(Wrapper(nn.Linear(2, 2))))})
    with pytest.raises(RuntimeError, match="attention keeps"):
        without_lora(model)


def test_gates_that_vllm_copies_at_first_use_are_refused() -> None:
    """The router's and the shared expert's, where they are fused."""
    model = nn.Module()
    for name, fused in (("fused", True), ("plain", False)):
        runner: Any = nn.Module()
        runner.gate = nn.Linear(2, 4, bias=False)
        runner.shared_expert_gate = nn.Linear(2, 1, bias=False)
        runner._fse_fuse_gate = fused
        model.add_module(name, runner)
    assert [*copied_on_first_use(model)] == ["fused.gate.weight", "fused.shared_expert_gate.weight"]


class FourierRotaryEmbedding(nn.Module):
    """vLLM's in small: its table is computed at the first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.cos_coef, self.sin_coef = (nn.Parameter(torch.ones(2)) for _ in range(2))


def test_coefficients_of_a_learned_rotary_table_are_refused() -> None:
    model = nn.ModuleDict({"rotary_emb": FourierRotaryEmbedding(), "norm": nn.LayerNorm(2)})
    assert [*copied_on_first_use(model)] == ["rotary_emb.cos_coef", "rotary_emb.sin_coef"]


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("processed", [True, False])
def test_sinks_that_flashinfer_copies_are_refused(processed: bool, copies: bool) -> None:
    """Where the layer is not processed anew, its own function recomputes them."""
    block: Any = nn.Module()
    block.sinks = nn.Parameter(torch.ones(2).bfloat16())
    block.attn = nn.Module()
    kept = block.sinks.float() if copies else block.sinks
    block.attn.impl = SimpleNamespace(_sinks_source=block.sinks, sinks=kept)
    block.attn.quant_method = Method() if processed else None
    model = nn.ModuleDict({"self_attn": block})
    found = copied_on_first_use(model)
    assert [*found] == (["self_attn.sinks"] if processed and copies else [])
    known = with_sinks_copies(lambda path, tensor: path == "other", model)
    assert known("self_attn.attn.impl.sinks", kept) == bool(found)
    assert known("other", kept)
    block.sinks = nn.Parameter(torch.ones(2))  # what is copied cannot be refused by name then
    assert copied_on_first_use(model) == {}
    assert not with_sinks_copies(lambda *_: False, model)("self_attn.attn.impl.sinks", kept)


@pytest.mark.parametrize(("fuses", "quantised"), [(True, True), (False, True), (True, False)])
def test_output_scales_that_attention_takes_are_refused(
    fuses: bool, quantised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only those of the output projection, where FlashInfer quantises for it."""

    class RowParallelLinear(nn.Module):
        """Its scale was replaced when it was processed."""

        def __init__(self) -> None:
            super().__init__()
            self.quant_method = Method() if quantised else Unquantized()

    class Scaled(nn.Module):
        _o_scale_float = None

    class FlashInferImpl:
        _sinks_source = None

        def fused_output_quant_supported(self, key: str) -> bool:
            return fuses and key == "fp8"

    keys = SimpleNamespace(kFp8StaticTensorSym="fp8", kNvfp4Dynamic="fp4")
    layers = SimpleNamespace(
        RowParallelLinear=RowParallelLinear, UnquantizedLinearMethod=Unquantized
    )
    package = "vllm.model_executor.layers"
    monkeypatch.setitem(sys.modules, f"{package}.quantization.utils.quant_utils", keys)
    monkeypatch.setitem(sys.modules, f"{package}.linear", layers)
    block: Any = nn.Module()
    block.attn, block.o_proj, block.qkv = Scaled(), RowParallelLinear(), nn.Linear(2, 2)
    block.attn.impl = FlashInferImpl()
    found = copied_on_first_use(nn.ModuleDict({"self_attn": block}))
    scales = ["self_attn.o_proj.input_scale", "self_attn.o_proj.input_global_scale"]
    assert [*found] == (scales if fuses and quantised else [])


def test_attention_packing_its_projection_is_processed_whole() -> None:
    """First the projection, then the layer; the projection has no processing of its own."""
    projection, linear = nn.Linear(2, 2), nn.Linear(2, 2)
    for part in (projection, linear):
        part.quant_method = Method()  # type: ignore[assignment]
    layer = PackingAttention(projection)
    model = nn.ModuleDict({"projection": projection, "attention": layer, "linear": linear})
    found = {p.module: p for p in _processings(model, SimpleNamespace(dtype=torch.bfloat16))}
    assert [*found] == [layer, linear]
    assert not found[layer].recomputed
    weight = projection.weight.detach()
    found[layer].call(layer)
    assert torch.equal(layer.packed, weight.bfloat16())
    assert projection.weight.numel() == 0


def test_attention_that_leaves_its_projection_may_be_recomputed() -> None:
    projection = nn.Linear(2, 2)
    projection.quant_method = Method()  # type: ignore[assignment]
    layer = Attention(projection)
    found = _processings(nn.ModuleDict({"attention": layer}), SimpleNamespace(dtype=torch.float32))
    assert [(p.module, p.recomputed) for p in found] == [(layer, True), (projection, False)]
