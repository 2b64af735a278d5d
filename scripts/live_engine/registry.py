"""The engines that a server process can be started of, by name."""

from __future__ import annotations

from typing import Final

from scripts.live_engine.process import EngineProcess
from scripts.live_engine.sglang import SglangProcess
from scripts.live_engine.vllm import VllmProcess

ENGINES: Final[dict[str, type[EngineProcess]]] = {"vllm": VllmProcess, "sglang": SglangProcess}
