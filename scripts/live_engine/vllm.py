"""Run a real vLLM OpenAI server as a child process, of the vLLM that this Python has."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from typing import Final

from scripts.live_engine.process import HOST, EngineProcess

_ENV: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_SERVER_DEV_MODE": "1",  # enables the routes for checksums, pause and sleep
    "VLLM_LOGGING_LEVEL": "INFO",  # its log is read; importing TRL sets another level
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # The default binds threads to cores: it asserts with two ranks on a machine of one NUMA node,
    # and binds two engines on one machine to the same cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
_CHECKSUMS: Final = "scripts.live_engine.vllm_checksums.WeightChecksums"


class VllmProcess(EngineProcess):
    """One vLLM server with its development routes; see `EngineProcess` for the arguments."""

    name = "vLLM"
    rank_title = "Worker"  # there is one for a single rank, too
    waits_in_loop = True  # vllm.distributed.device_communicators.shm_broadcast.SpinCondition

    @classmethod
    def interpreter(cls) -> Path:
        """Return the current interpreter."""
        return Path(sys.executable)

    def checksums(self) -> dict[str, str]:
        """Return SHA-256 of every live parameter, by rank and name."""
        if not _has_weight_checker():
            return self._of_all_workers("weight_checksums")
        answer = self._checked(self.post("/weight_checker", json={"action": "checksum"}))
        return dict(answer["checksums"])

    def buffer_checksums(self) -> dict[str, str]:
        """Return SHA-256 of every registered buffer, named alike; needs delta updates enabled."""
        return self._of_all_workers("delta_buffer_checksums")

    def weight_version(self) -> str:
        return str(self._checked(self.get("/weight_info"))["weight_version"])

    def pause(self) -> None:
        self._checked(self.post("/pause", params={"mode": "keep"}))

    def resume(self) -> None:
        self._checked(self.post("/resume"))

    def _server_arguments(self) -> list[str]:
        return [
            *("-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self.model), "--host", HOST, "--port", str(self.port)),
            *("--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "256"),
            *("--tensor-parallel-size", str(self.tp)),
            *(() if _has_weight_checker() else ("--worker-extension-cls", _CHECKSUMS)),
        ]

    def _server_environment(self) -> dict[str, str]:
        return _ENV

    def _of_all_workers(self, method: str) -> dict[str, str]:
        answer = self._checked(self.post("/collective_rpc", json={"method": method}))
        return {name: digest for rank in answer["results"] for name, digest in rank.items()}


@functools.cache
def _has_weight_checker() -> bool:
    """Return whether this Python's vLLM has the route ``/weight_checker``."""
    found = importlib.util.find_spec("vllm")
    [package] = (found and found.submodule_search_locations) or [""]
    return (Path(package) / "model_executor" / "model_loader" / "weight_checksum.py").is_file()
