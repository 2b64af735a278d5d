"""vLLM's own fp8 method of experts, with kernels of a GPU that are made and not called."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from engine_ext.conformance.toy_models import Checkpoint, Weights
from engine_ext.startup.recomputed import ModuleRebuild
from tests.shims.vllm_cpu_fp8.vllm_cpu_fp8 import scaled_fp8_quant
from tests.support import quantised_engine
from tests.support.quantised_engine import Serving
from tests.support.rank_engine import errors_of
from tests.support.served_models import changed, random_tensor
from tests.support.toy_quantised import IN, Model

SIZE, EXPERTS = 128, 2
PARTS = {"gate": ("w13", "w1"), "up": ("w13", "w3"), "down": ("w2", "w2")}
PREFIX = "model.layers.0.mlp.experts"


class Experts(Model):
    """A layer of experts whose checkpoint is in fp8."""

    options: ClassVar[dict[str, Any]] = {}
    scale: ClassVar[tuple[str, tuple[int, ...]]] = ("weight_scale", ())
    statuses: ClassVar = {"exact", "rebuilt"}
    runner: Any

    def build(self, rank: int, ranks: int) -> None:
        from vllm.config import get_current_vllm_config
        from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
        from vllm.model_executor.layers.quantization.fp8 import Fp8Config

        # vLLM knows layers by name; a fresh one takes the place of the last.
        get_current_vllm_config().compilation_config.static_forward_context.clear()
        self.runner = FusedMoEFactory(
            num_experts=EXPERTS,
            top_k=1,
            hidden_size=SIZE,
            intermediate_size=SIZE,
            params_dtype=torch.bfloat16,
            quant_config=Fp8Config(is_checkpoint_fp8_serialized=True, **self.options),
            prefix=PREFIX,
        )

    def load_weights(self, weights: Weights) -> None:
        parameters = dict(self.runner.routed_experts.named_parameters())
        for name, weight in weights:
            if name == "norm":
                self.norm.data.copy_(weight)
                continue
            number, part, kind = name.split(".")
            group, shard = PARTS[part]
            live = parameters[f"{group}_{kind}"]
            live.weight_loader(live, weight, f"{PREFIX}.{name}", shard, int(number))

    @classmethod
    def checkpoint(cls, seed: int = 0) -> Checkpoint:
        kind, shape = cls.scale
        found = {"norm": random_tensor((IN,), torch.bfloat16, seed)}
        for number in range(EXPERTS):
            for more, part in enumerate(PARTS, 10 * number + seed):
                weight = random_tensor((SIZE, SIZE), torch.float8_e4m3fn, more)
                scale = random_tensor(shape, torch.float32, more).abs() + 0.5
                found |= {f"{number}.{part}.weight": weight, f"{number}.{part}.{kind}": scale}
        return found


class Blocks(Experts):
    options: ClassVar = {"activation_scheme": "dynamic", "weight_block_size": [SIZE, SIZE]}
    scale: ClassVar = ("weight_scale_inv", (1, 1))
    statuses: ClassVar = {"exact"}


@pytest.fixture(params=["triton_moe.TritonExperts", "cutlass_moe.CutlassExpertsFp8"])
def kernels(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: Any) -> Iterator[None]:
    """Let vLLM choose kernels of a GPU, and process what `Serving` serves as its loader does."""
    import importlib

    from vllm import _custom_ops
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        init_distributed_environment,
        initialize_model_parallel,
        parallel_state,
    )
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.model_loader import utils

    from engine_ext.adapters.vllm import postload

    module, name = request.param.split(".")
    package = importlib.import_module(f"vllm.model_executor.layers.fused_moe.experts.{module}")
    backend = Fp8MoeBackend.TRITON if "triton" in module else Fp8MoeBackend.VLLM_CUTLASS
    chosen = backend, getattr(package, name)
    monkeypatch.setattr(fp8, "select_fp8_moe_backend", lambda **options: chosen)
    monkeypatch.setattr(_custom_ops, "scaled_fp8_quant", scaled_fp8_quant)
    config = SimpleNamespace(
        dtype=torch.bfloat16, quantization=None, word_embeddings_untied_by_checkpoint=False
    )
    device = torch.device("cpu")
    monkeypatch.setattr(
        quantised_engine, "walk", lambda model: postload._processings(model, config)
    )
    monkeypatch.setattr(
        quantised_engine,
        "process",
        lambda model: utils.process_weights_after_loading(model, config, device),
    )
    # Nothing can be replaced as a whole, as on a GPU.
    elsewhere = torch.empty(0, device="meta")
    monkeypatch.setattr(ModuleRebuild, "live_tensors", lambda self: [elsewhere])
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{tmp_path}/init", 0, "gloo")
        initialize_model_parallel(1, 1)
        yield
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", [Experts, Blocks])
def test_the_experts_and_their_kernel_follow(tmp_path: Path, kind: type[Experts]) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    serving = Serving(kind, folder, shadow_bytes=1 << 24, undo_bytes=1 << 24)
    assert serving.reasons() == {}
    assert set(serving.statuses().values()) == kind.statuses
    method = serving.models[0].runner.routed_experts.quant_method
    before = [id(method.moe_kernel), *map(id, vars(method.moe_quant_config).values())]
    dtypes = {tensor.dtype for tensor in serving.current.values()}
    previous = dict(serving.current)
    for seed, dtype in enumerate([*dtypes, *dtypes]):  # a part has tensors of one
        previous = dict(serving.current)
        own = {name: tensor for name, tensor in previous.items() if tensor.dtype == dtype}
        new = {name: changed(tensor, seed) for name, tensor in own.items()}
        scales = {name: tensor.abs() for name, tensor in new.items() if "scale" in name}
        errors_of(serving.sync(new | scales), none=True)
        serving.assert_fresh()
    errors_of(serving.rollback(previous), none=True)
    serving.assert_fresh()
    after = [id(method.moe_kernel), *map(id, vars(method.moe_quant_config).values())]
    assert after == before
