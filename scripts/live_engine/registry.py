"""The engines that a server process can be started of, by name."""

from __future__ import annotations

from typing import Final

from engine_process import EngineProcess
from sglang_process import SglangProcess
from vllm_process import VllmProcess

ENGINES: Final[dict[str, type[EngineProcess]]] = {"vllm": VllmProcess, "sglang": SglangProcess}
