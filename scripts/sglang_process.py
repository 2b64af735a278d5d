"""Run a real SGLang server as a child process, as `engine_process` runs vLLM's.

SGLang has an environment of its own: ``SGLANG_PYTHON`` names its interpreter; without it, this
one is taken where it has SGLang, and otherwise ``.venv-sglang``, which ``make setup-sglang`` makes.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any, Final

from engine_process import HOST, EngineProcess

_ROOT: Final = Path(__file__).resolve().parents[1]
_SHIMS: Final = _ROOT / "tests" / "shims" / "sglang_cpu"

_ENV: Final = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "1",
}


def interpreter() -> Path:
    """The Python that has SGLang; it may not exist."""
    named = os.environ.get("SGLANG_PYTHON")
    if named:
        return Path(named)
    if importlib.util.find_spec("sglang") is not None:
        return Path(sys.executable)
    return _ROOT / ".venv-sglang" / "bin" / "python"


class SglangProcess(EngineProcess):
    """One SGLang server; arguments as of `EngineProcess`. It has its checksums always."""

    name = "SGLang"

    def checksums(self) -> dict[str, str]:
        """SGLang's checksum of every live parameter and persistent buffer, by rank and name."""
        answer = self._checked(self.post("/weights_checker", json={"action": "checksum"}))
        return {
            f"tp{rank}:{name}": checksum
            for rank, of_rank in enumerate(answer["ranks"])
            for name, checksum in of_rank["checksums"].items()
        }

    def buffer_checksums(self) -> list[dict[str, str]]:
        """Nothing: `checksums` has the buffers too."""
        return []

    def _server_command(self, model: Path, tp: int, enable_delta: bool) -> list[str]:
        command = [str(interpreter()), "-m", "sglang.launch_server"]
        command += ["--model-path", str(model), "--host", HOST, "--port", str(self.port)]
        command += ["--dtype", "bfloat16", "--device", "cpu", "--max-total-tokens", "4096"]
        command += ["--tp-size", str(tp)]
        if enable_delta:
            command.append("--enable-delta-updates")
        return command

    def _server_environment(self, tp: int, dev_mode: bool) -> dict[str, str]:
        paths = [str(_SHIMS), os.environ.get("PYTHONPATH", "")]
        env = {**_ENV, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        if tp > 1:
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank) for rank in range(tp))
        return env

    def generate(self, prompt: str, **sampling: Any) -> Any:
        """Answer of SGLang's own ``/generate``; `sampling` are its sampling parameters."""
        body = {"text": prompt, "sampling_params": sampling}
        return self._checked(self.post("/generate", json=body))
