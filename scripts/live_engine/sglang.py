"""Run a real SGLang server as a child process.

SGLang has its own environment. ``SGLANG_PYTHON`` names its interpreter; without it, the current
interpreter is used if it has SGLang, else ``.venv-sglang``, which ``make setup NAME=sglang`` makes.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Final

from scripts.live_engine.process import HOST, EngineProcess

_ROOT: Final = Path(__file__).resolve().parents[2]


class SglangProcess(EngineProcess):
    """One SGLang server; see `EngineProcess` for the arguments."""

    name = "SGLang"
    rank_title = "sglang::scheduler"
    waits_in_loop = False  # with --sleep-on-idle
    # The wheels for CPU-only machines lack modules that SGLang imports all the same.
    _python_path: ClassVar[Sequence[Path]] = (_ROOT / "tests" / "shims" / "sglang_cpu",)

    @classmethod
    def interpreter(cls) -> Path:
        """Return the first of the three interpreters that the module's docstring names."""
        named = os.environ.get("SGLANG_PYTHON")
        if named:
            return Path(named)
        if importlib.util.find_spec("sglang") is not None:
            return Path(sys.executable)
        return _ROOT / ".venv-sglang" / "bin" / "python"

    @classmethod
    def loop_cache(cls) -> dict[str, str]:
        """Return variables with which numba keeps compiled loops in SGLang's environment.

        The two engines need different versions of numba, which share this checkout's folders
        otherwise, and each takes the other's loops for stale and compiles all of them again.
        """
        home = cls.interpreter().parents[1]
        is_own = home != Path(sys.executable).parents[1] and os.access(home, os.W_OK)
        return {"NUMBA_CACHE_DIR": str(home / "numba-cache")} if is_own else {}

    def checksums(self) -> dict[str, str]:
        """Return SHA-256 of every parameter and persistent buffer, by ``tp<rank>:<name>``."""
        answer = self._checked(self.post("/weights_checker", json={"action": "checksum"}))
        return {
            f"tp{rank}:{name}": checksum
            for rank, of_rank in enumerate(answer["ranks"])
            for name, checksum in of_rank["checksums"].items()
        }

    def buffer_checksums(self) -> dict[str, str]:
        """Return nothing: `checksums` has the buffers too."""
        return {}

    def weight_version(self) -> str:
        return str(self._checked(self.get("/model_info"))["weight_version"])

    def pause(self) -> None:
        self._checked(self.post("/pause_generation", json={"mode": "in_place"}))

    def resume(self) -> None:
        self._checked(self.post("/continue_generation", json={}))

    def _server_arguments(self) -> list[str]:
        return [
            *("-m", "sglang.launch_server"),
            *("--model-path", str(self.model), "--host", HOST, "--port", str(self.port)),
            *("--dtype", "bfloat16", "--device", "cpu", "--max-total-tokens", "4096"),
            "--sleep-on-idle",  # otherwise every scheduler keeps a core busy
            *("--tp-size", str(self.tp)),
        ]

    def _server_environment(self) -> dict[str, str]:
        cores = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(self.tp)))}
        shared = {"SGLANG_USE_CPU_ENGINE": "1", **self.loop_cache()}
        return {**shared, **(cores if self.tp > 1 else {})}
