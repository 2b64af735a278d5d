"""Models whose weights are quantised, packed, or computed from the checkpoint as they load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from scripts.live_engine import quantised_checkpoints, tiny_models
from scripts.live_engine.process import EngineProcess
from tests.live.conftest import fingerprint

_CHANNEL = ("--quantization", "fp8_per_channel")
_TENSOR = ("--quantization", "fp8_per_tensor")
# vLLM has no kernels for fp8 with one scale per tensor on CPU.
_SHIM = Path(__file__).parents[1] / "shims" / "vllm_cpu_fp8"


def cpu_has(instructions: str) -> bool:
    """Return whether this CPU has an instruction set; vLLM packs weights for some of them."""
    return bool(torch.cpu.get_capabilities().get(instructions, False))


@dataclass(frozen=True)
class Case:
    """A checkpoint, how vLLM serves it, and how many tensors have which status in the plan."""

    checkpoint: str  # a format of `quantised_checkpoints`, or an architecture of `tiny_models`
    states: dict[str, int]
    tp: int = 1
    flags: tuple[str, ...] = ()
    int4: bool = False  # generates on AVX512 only
    packed: bool = False  # with AVX512 linear weights are in oneDNN's handles, without checksums
    shim: bool = False
    convolutions: int = 0  # of the rebuilt tensors; vLLM packs them on CPUs with bf16 instructions

    def planned(self) -> dict[str, int]:
        """Return the statuses on this machine: what its CPU does not pack is exact."""
        exact = 0
        if self.packed and not cpu_has("avx512_bw"):
            exact += self.states["rebuilt"] - self.convolutions
        if not cpu_has("avx512_bf16"):
            exact += self.convolutions
        states = {
            **self.states,
            "rebuilt": self.states.get("rebuilt", 0) - exact,
            "exact": self.states["exact"] + exact,
        }
        return {state: count for state, count in states.items() if count}

    def build(self, folder: Path) -> Path:
        """Write the checkpoint, and return its folder."""
        if self.checkpoint in quantised_checkpoints.FORMATS:
            return quantised_checkpoints.build(self.checkpoint, folder)
        return tiny_models.build(self.checkpoint, folder)

    def options(self, *more: str) -> dict[str, Any]:
        """Return the arguments to start an engine with; `more` arguments go to it."""
        dtype = quantised_checkpoints.serving_dtype(self.checkpoint)
        return {
            "tp": self.tp,
            "extra_args": ["--dtype", dtype, *self.flags, *more],
            "keep_plain": not self.packed,
            "python_path": [_SHIM] if self.shim else [],
        }

    def observed(self, engine: EngineProcess) -> dict[str, Any]:
        """Return everything about an engine's weights that this machine can observe."""
        if self.int4 and not cpu_has("avx512_bw"):
            return {"parameters": engine.checksums(), "buffers": engine.buffer_checksums()}
        return fingerprint(engine)


CASES: Final = {
    "online-fp8-2-ranks": Case("qwen3", {"rebuilt": 14, "exact": 11}, 2, _CHANNEL),
    "w8a8": Case("w8a8", {"rebuilt": 14, "cast": 14, "exact": 11}),
    "online-fp8": Case("qwen3", {"rebuilt": 14, "exact": 11}, 1, _CHANNEL),
    "w8a8-2-ranks": Case("w8a8", {"rebuilt": 14, "cast": 14, "exact": 11}, 2),
    "fp8-channel": Case("fp8_channel", {"exact": 25, "cast": 14}),
    "online-fp8-tensor": Case("qwen3", {"rebuilt": 14, "exact": 11}, 1, _TENSOR, shim=True),
    # The largest magnitude is that of the shards of both ranks.
    "online-fp8-tensor-2-ranks": Case("qwen3", {"rebuilt": 14, "exact": 11}, 2, _TENSOR, shim=True),
    "fp8-tensor": Case("fp8_tensor", {"rebuilt": 28, "exact": 11}, shim=True),
    "fp8-tensor-static-2-ranks": Case(
        "fp8_tensor_static", {"rebuilt": 42, "exact": 11}, 2, shim=True
    ),
    "compressed-fp8-tensor": Case("compressed_fp8_tensor", {"rebuilt": 28, "exact": 11}, shim=True),
    "awq": Case("awq", {"rebuilt": 42, "exact": 11}, int4=True),
    "gptq": Case("gptq", {"rebuilt": 42, "ignored": 14, "exact": 11}, int4=True),
    "packed": Case("llama_tied", {"rebuilt": 15, "exact": 5, "ignored": 1}, packed=True),
    "packed-2-ranks": Case("qwen3_moe", {"rebuilt": 12, "exact": 33, "ignored": 2}, 2, packed=True),
    "packed-hybrid": Case(
        "qwen3_next",
        {"rebuilt": 20, "exact": 33, "cast": 1, "ignored": 6},
        packed=True,
        convolutions=1,
    ),
    "w4a16": Case("w4a16", {"rebuilt": 36, "ignored": 6, "exact": 11}, int4=True),
}
