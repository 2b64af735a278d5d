"""The engines that the programs and the live tests can start, by the name that options take."""

from __future__ import annotations

from typing import Final

from scripts.live_engine.process import EngineProcess
from scripts.live_engine.sglang import SglangProcess
from scripts.live_engine.vllm import VllmProcess

ENGINES: Final[dict[str, type[EngineProcess]]] = {"vllm": VllmProcess, "sglang": SglangProcess}
