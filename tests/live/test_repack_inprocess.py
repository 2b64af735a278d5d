"""InferredRepacks repacks on a live vLLM, in one process: what is exact with them and without.

Each engine runs in a process of its own; this file is its script too, and writes what it finds as
JSON.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.in_process_vllm import run


def uncertified(found: dict[str, Any]) -> set[str]:
    return {name for name, status in found["status"].items() if status == "uncertified"}


@pytest.mark.full
@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_next", "mamba2"])
def test_learning_makes_experts_exact_and_changes_nothing(
    kind: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    model = checkpoint(kind)
    plain = run(__file__, model, tmp_path / "plain.json")
    learned = run(__file__, model, tmp_path / "learned.json", "--learn")
    experts = {name for name in plain["status"] if ".mlp.experts." in name}
    assert experts <= uncertified(plain)
    assert {learned["status"][name] for name in experts} <= {"exact"}
    assert uncertified(learned) <= uncertified(plain) - experts
    for fact in ("parameters", "buffers", "tokens"):
        assert learned[fact] == plain[fact]
    # Two layers, each with w13 and w2: what was learned of the first serves the second.
    assert [len(learned["blocks"]), learned["maps"]] == ([4, 2] if experts else [0, 0])
    assert all(block < numel for block, numel in learned["blocks"].values())


@pytest.mark.full
def test_what_the_engine_also_keeps_elsewhere_is_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Packed handles, and the convolution weights as a CPU with bf16 instructions packs them."""
    model = checkpoint("qwen3_next")
    found = run(__file__, model, tmp_path / "found.json", "--learn", "--packed")
    reasons = found["refusals"]
    packed = {"model.layers.0.linear_attn.conv1d.weight"}
    if found["packs_linear"]:  # oneDNN does on CPUs with AVX-512
        packed.add("lm_head.weight")
        assert "handle" in reasons["lm_head.weight"]
        assert "makes 0 elements" in reasons["model.layers.0.mlp.shared_expert.down_proj.weight"]
    assert "_cpu_unpacked_conv_weight" in reasons["model.layers.0.linear_attn.conv1d.weight"]
    assert packed <= uncertified(found)
    assert not any(".mlp.experts." in name for name in uncertified(found))


def main(model: str, out: str, *options: str) -> None:
    """Load a model, certify it and write what was found.

    Args:
        model: checkpoint folder.
        out: file to write.
        options: ``--learn``; ``--packed``: let vLLM pack linear and convolution weights.
    """
    from vllm import LLM

    from engine_ext.adapters.vllm import checkpoint, worker
    from engine_ext.adapters.vllm.postload import repack_learner
    from engine_ext.model.fingerprint import hash_tensor
    from engine_ext.model.storage_index import StorageIndex
    from engine_ext.placement.certify import certify_placement
    from engine_ext.placement.segments import TensorSpec
    from engine_ext.startup import LoaderDryRun
    from engine_ext.startup.permuted.infer import compose

    if "--packed" in options:
        _pack_convolutions()
    else:
        worker._keep_checkpoint_layout()
    learner = repack_learner()
    with learner if "--learn" in options else contextlib.nullcontext():
        llm = LLM(model, dtype="bfloat16", enforce_eager=True, max_model_len=256)
    own: Any = llm.llm_engine.model_executor.driver_worker.worker
    live, config = own.model_runner.model, own.vllm_config
    specs = [TensorSpec(n, tuple(t.shape), t.dtype) for n, t in checkpoint.checkpoint(live, config)]
    index = StorageIndex(live)
    placement = LoaderDryRun(live, checkpoint.load_function(live, config), index).trace(specs)
    compose(placement, learner.repacks, learner.refusals)
    certify_placement(placement, checkpoint.checkpoint(live, config))
    sizes = {name: parameter.numel() for name, parameter in live.named_parameters()}
    found = {
        "status": {name: placed.status.value for name, placed in placement.items()},
        "refusals": learner.refusals,
        "packs_linear": 0 in sizes.values(),
        "blocks": {name: [r.block, sizes[name]] for name, r in learner.repacks.items()},
        "maps": len({id(repack) for repack in learner.repacks.values()}),
        "parameters": {name: hash_tensor(p) for name, p in live.named_parameters()},
        "buffers": {name: hash_tensor(b) for name, b in live.named_buffers()},
        "tokens": [],
    }
    if "--packed" not in options:
        [answer] = llm.generate(["the quick brown fox"], use_tqdm=False)
        found["tokens"] = list(answer.outputs[0].token_ids)
    Path(out).write_text(json.dumps(found))


def _pack_convolutions() -> None:
    """Make vLLM take the path of a CPU with AVX512-BF16, with a packing of our own."""
    import torch
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    def pack(weight: torch.Tensor) -> torch.Tensor:
        tiles = weight.view(-1, 32, 2, 2).permute(0, 2, 1, 3)
        return tiles.contiguous().view(weight.shape)

    dispatch = utils.dispatch_cpu_unquantized_gemm

    def dispatch_as_if(layer: torch.nn.Module, remove_weight: bool) -> None:
        supported = torch.cpu._is_avx512_bf16_supported
        torch.cpu._is_avx512_bf16_supported = lambda: True
        try:
            dispatch(layer, remove_weight)
        finally:
            torch.cpu._is_avx512_bf16_supported = supported

    _custom_ops.causal_conv1d_weight_pack = pack
    utils.dispatch_cpu_unquantized_gemm = dispatch_as_if


if __name__ == "__main__":
    main(*sys.argv[1:])
