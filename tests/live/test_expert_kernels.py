"""Experts whose processing makes vLLM's own kernel objects, which hold scales: rebuilt in place.

A captured graph has the tensors of the live kernel, so that the object must stay and its tensors be
written to. The objects are vLLM's; what processing computes for them is made here, as the kernels
themselves need a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from engine_ext.startup.recomputed import ModuleRebuild
from tests.support.quantised_engine import Serving
from tests.support.rank_engine import errors_of
from tests.support.served_models import changed
from tests.support.toy_quantised import Layer, Method, Model, linear_shapes, parameter

OUT = 8


def config() -> Any:
    from vllm.model_executor.layers.fused_moe import config
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    return config.FusedMoEConfig(
        num_experts=OUT,
        experts_per_token=1,
        hidden_dim=128,
        intermediate_size=128,
        num_local_experts=OUT,
        num_logical_experts=OUT,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=config.RoutingMethodType.Default,
        moe_parallel_config=config.FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.bfloat16,
    )


class Experts(Method):
    """Quantises each row like an expert; the scales are in the kernel's configuration alone."""

    kernel: ClassVar = "triton_moe.TritonExperts"

    def __init__(self) -> None:
        self.moe = config()
        self.moe_quant_config: Any = None
        self.moe_kernel: Any = None

    def process_weights_after_loading(self, layer: Any) -> None:
        weight = layer.weight.float()
        scale = weight.nan_to_num().abs().amax(1).clamp(min=1e-6) / 448
        layer.weight = parameter((weight / scale[:, None]).nan_to_num().to(torch.float8_e4m3fn))
        layer.weight_scale = parameter(scale)
        self.make_kernel(layer)

    def make_kernel(self, layer: Any) -> None:
        from vllm.model_executor.layers.fused_moe import modular_kernel
        from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize

        made = self.quant_config(layer.weight_scale)
        kind = self.experts()
        monolithic = issubclass(kind, modular_kernel.FusedMoEExpertsMonolithic)
        prepare = maybe_make_prepare_finalize(
            self.moe, made, allow_new_interface=True, use_monolithic=monolithic
        )
        assert prepare is not None
        self.moe_quant_config = made
        self.moe_kernel = modular_kernel.FusedMoEKernel(prepare, kind(self.moe, made))

    def experts(self) -> Any:
        import importlib

        module, name = self.kernel.split(".")
        package = "vllm.model_executor.layers.fused_moe.experts"
        return getattr(importlib.import_module(f"{package}.{module}"), name)

    def quant_config(self, scale: torch.Tensor) -> Any:
        """Return a configuration with the scale as it is, and with what is computed from it."""
        from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config

        return fp8_w8a8_moe_quant_config(
            w1_scale=scale, w2_scale=scale * 2, g1_alphas=(scale * 3).squeeze()
        )

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x @ (layer.weight.float() * layer.weight_scale[:, None]).t()
        return found


class Cutlass(Experts):
    kernel = "cutlass_moe.CutlassExpertsFp8"


class Monolithic(Experts):
    kernel = "trtllm_bf16_moe.TrtLlmBf16ExpertsMonolithic"


class FlashInfer(Experts):
    kernel = "flashinfer_cutlass_moe.FlashInferExperts"


class Fp4(Experts):
    kernel = "nvfp4_emulation_moe.Nvfp4QuantizationEmulationTritonExperts"

    def quant_config(self, scale: torch.Tensor) -> Any:
        from vllm.model_executor.layers.fused_moe.config import nvfp4_moe_quant_config

        ones = torch.ones_like(scale)
        return nvfp4_moe_quant_config(
            g1_alphas=scale * 2,
            g2_alphas=scale * 3,
            a1_gscale=ones,
            a2_gscale=ones.clone(),
            w1_scale=scale,
            w2_scale=scale.clone(),
        )


class Marlin(Experts):
    kernel = "marlin_moe.MarlinExperts"

    def quant_config(self, scale: torch.Tensor) -> Any:
        from vllm.model_executor.layers.fused_moe.config import int4_w4a16_moe_quant_config

        return int4_w4a16_moe_quant_config(
            w1_scale=scale, w2_scale=scale * 2, w1_zp=None, w2_zp=None, block_shape=[0, 128]
        )


class Mxfp4(Experts):
    kernel = "gpt_oss_triton_kernels_moe.OAITritonExperts"

    def quant_config(self, scale: torch.Tensor) -> Any:
        from vllm.model_executor.layers.fused_moe.config import mxfp4_w4a16_moe_quant_config

        return mxfp4_w4a16_moe_quant_config(w1_scale=scale, w2_scale=scale * 2)


class Numbered(Experts):
    """Its kernel has a number that is computed from the weights."""

    def make_kernel(self, layer: Any) -> None:
        super().make_kernel(layer)
        self.moe_kernel.fused_experts.largest = float(layer.weight_scale.max())


class Opaque(Experts):
    """Its kernel has an object that nothing can be compared of."""

    def make_kernel(self, layer: Any) -> None:
        super().make_kernel(layer)
        scale = layer.weight_scale.clone()
        self.moe_kernel.fused_experts.run = lambda x: x * scale


def one(method: type[Method]) -> type[Model]:
    class OneLayer(Model):
        shapes: ClassVar = linear_shapes("lin", bias=False)

        def build(self, rank: int, ranks: int) -> None:
            self.lin = Layer(method(), bias=False, rank=rank, ranks=ranks)

    return OneLayer


def served_at(module: Any) -> list[int]:
    """The live objects and tensors that a kernel call or a captured graph has."""
    method: Any = module.lin.quant_method
    made = method.moe_quant_config
    tensors = [made.w1_scale, made.w2_scale, made.g1_alphas, method.moe_kernel]
    addresses = [t.data_ptr() for t in tensors if isinstance(t, torch.Tensor)]
    return [*map(id, tensors), *addresses]


@pytest.fixture(autouse=True)
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be replaced as a whole, as on a GPU."""
    elsewhere = torch.empty(0, device="meta")
    monkeypatch.setattr(ModuleRebuild, "live_tensors", lambda self: [elsewhere])


@pytest.mark.parametrize(
    "method", [Experts, Cutlass, Monolithic, FlashInfer, Fp4, Marlin, Mxfp4], ids=lambda m: m.kernel
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_kernels_tensors_follow(tmp_path: Path, method: type[Experts], ranks: int) -> None:
    serving = Serving(one(method), tmp_path, ranks=ranks)
    assert serving.statuses() == {"norm": "exact", "lin.weight": "rebuilt"}
    before = [served_at(model) for model in serving.models]
    first = dict(serving.current)
    previous = first
    for seed in (1, 2):
        previous = dict(serving.current)
        target = {name: changed(tensor, seed) for name, tensor in previous.items()}
        errors_of(serving.sync(target), none=True)
        serving.assert_fresh()
    errors_of(serving.rollback(previous), none=True)
    serving.assert_fresh()
    errors_of(serving.sync(first, full=True), none=True)
    serving.assert_fresh()
    assert [served_at(model) for model in serving.models] == before


def test_a_number_of_the_kernel_is_refused_when_it_changes(tmp_path: Path) -> None:
    serving = Serving(one(Numbered), tmp_path)
    before = serving.served()
    errors = errors_of(serving.sync({"lin.weight": serving.current["lin.weight"] * 2}))
    assert "moe_kernel.impl.fused_experts.largest would be" in errors[0]["message"]
    assert serving.served() == before


def test_an_object_that_shows_nothing_is_named(tmp_path: Path) -> None:
    serving = Serving(one(Opaque), tmp_path)
    assert "moe_kernel.impl.fused_experts.run" in serving.reasons()["lin.weight"]


def test_an_attribute_that_came_later_is_refused(tmp_path: Path) -> None:
    """It can be computed from the weights of before."""
    serving = Serving(one(Experts), tmp_path)
    method: Any = serving.models[0].lin.quant_method
    method.moe_kernel.fused_experts.cached = torch.ones(3)
    before = serving.served()
    target = {"lin.weight": changed(serving.current["lin.weight"], 1)}
    errors = errors_of(serving.sync(target))
    assert "has other attributes: cached" in errors[0]["message"]
    assert serving.served() == before
