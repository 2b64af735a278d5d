"""The engines that the programs and the live tests can start, by the name that options take."""

from __future__ import annotations

from typing import Final

from scripts.live_engine.process import EngineProcess
from scripts.live_engine.sglang import SglangProcess
from scripts.live_engine.vllm import VllmProcess

ENGINES: Final[dict[str, type[EngineProcess]]] = {"vllm": VllmProcess, "sglang": SglangProcess}

# All of a small KV cache is soon resident; a large one grows for as long as the load lasts.
SOAK_ARGUMENTS: Final[dict[str, list[str]]] = {
    "vllm": ["--num-gpu-blocks-override", "64"],
    "sglang": [],
}
# Batches have hundreds of shapes, and torch's CPU kernels would cache a megabyte for each.
SOAK_ENVIRONMENT: Final = {"LRU_CACHE_CAPACITY": "16", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}
