"""Run a server on a GPU that several share: its arguments differ from `scripts.live_engine`'s."""

from __future__ import annotations

import abc
import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, Final

from scripts.gpu.trees import REHEARSAL
from scripts.live_engine.process import HOST, EngineProcess
from scripts.live_engine.sglang import SglangProcess
from scripts.live_engine.vllm import VllmProcess

MODEL: Final = "m"  # the served name, so that answers of two engines can be compared
_TAIL_BYTES: Final = 4000
_GRACE_FAILED_S: Final = 2.0  # for each engine: whoever interrupts a row waits only so long
_ERROR: Final = re.compile(r"\w(Error|Exception|Refused)\b.*: |not supported|refused|Cannot ")
_ENVIRONMENT: Final = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Files that the bundle leaves out.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
}


def on_cpu() -> bool:
    """Return whether the engines run on a CPU (``--device cpu``)."""
    return os.environ.get(REHEARSAL) == "1"


class GpuServer(EngineProcess):
    """One server on the GPU, with a small KV cache.

    Attributes:
        program: the module that runs it.

    Args:
        model: Folder of the model to serve.
        flags: Further arguments of the command line.
        delta: Whether delta updates are on.
        log_path: File for the server's output.
        kv_bytes: Size of vLLM's KV cache; SGLang's is of 8192 tokens.
        length: Longest sequence, in tokens.
        environment: Further variables.
    """

    program: ClassVar[str]

    def __init__(
        self,
        model: Path,
        flags: Sequence[str] = (),
        *,
        delta: bool,
        log_path: Path,
        kv_bytes: int = 256 << 20,
        length: int = 512,
        environment: Mapping[str, str] | None = None,
        start_timeout_s: float = 280.0,
    ) -> None:
        self._kv_bytes, self._length = kv_bytes, length
        super().__init__(
            model,
            enable_delta=delta,
            keep_plain=False,
            extra_args=flags,
            log_path=log_path,
            extra_env={"VLLM_CACHE_ROOT": f"{log_path}.cache", **(environment or {})},
            start_timeout_s=start_timeout_s,
            python_path=self.shims(),
        )

    @classmethod
    def shims(cls) -> Sequence[Path]:
        """Return folders with modules that an engine for CPUs lacks."""
        return ()

    @abc.abstractmethod
    def drop_prefixes(self) -> None:
        """Drop all KV entries that could be used again."""


class GpuVllm(GpuServer, VllmProcess):
    """One vLLM server; see `GpuServer`."""

    program: ClassVar[str] = "vllm.entrypoints.openai.api_server"

    def complete(self, prompt: Any, **options: Any) -> Any:
        """Return the answer of ``/v1/completions``; see `EngineProcess.complete`."""
        return super().complete(prompt, **{"model": MODEL, **options})

    def drop_prefixes(self) -> None:
        self.post("/reset_prefix_cache")

    def _server_arguments(self) -> list[str]:
        arguments = [
            *("-m", self.program),
            *("--model", str(self.model), "--served-model-name", MODEL),
            *("--host", HOST, "--port", str(self.port)),
            *("--max-model-len", str(self._length), "--max-num-seqs", "8"),
        ]
        if on_cpu():
            return arguments
        return [
            *arguments,
            *("--kv-cache-memory-bytes", str(self._kv_bytes)),
            *("--gpu-memory-utilization", "0.02"),
        ]

    def _server_environment(self) -> dict[str, str]:
        cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return {**_ENVIRONMENT, **(cpu if on_cpu() else {})}


class GpuSglang(GpuServer, SglangProcess):
    """One SGLang server; see `GpuServer`."""

    program: ClassVar[str] = "sglang.launch_server"
    _python_path: ClassVar[Sequence[Path]] = ()

    @classmethod
    def shims(cls) -> Sequence[Path]:
        return SglangProcess._python_path if on_cpu() else ()

    def drop_prefixes(self) -> None:
        self.post("/flush_cache")

    def _server_arguments(self) -> list[str]:
        if on_cpu():
            return super()._server_arguments()
        return [
            *("-m", self.program),
            *("--model-path", str(self.model), "--host", HOST, "--port", str(self.port)),
            *("--context-length", str(self._length), "--max-running-requests", "8"),
            *("--max-total-tokens", "8192", "--mem-fraction-static", "0.5"),
            "--skip-server-warmup",
        ]

    def _server_environment(self) -> dict[str, str]:
        return super()._server_environment() if on_cpu() else {}


ENGINES: Final[Mapping[str, type[GpuServer]]] = {"vllm": GpuVllm, "sglang": GpuSglang}


@contextmanager
def running(*engines: GpuServer) -> Iterator[list[Future[float]]]:
    """Start engines at once, and stop them at the end; yield the seconds that each takes to start.

    If something fails or is interrupted, those that are still starting are stopped too.
    """

    def up(engine: GpuServer) -> float:
        started = time.monotonic()
        engine.__enter__()
        return round(time.monotonic() - started, 1)

    with ThreadPoolExecutor(len(engines)) as pool:
        try:
            yield [pool.submit(up, one) for one in engines]
        except BaseException:
            for one in engines:
                one.stop(_GRACE_FAILED_S)
            raise
        for one in engines:
            one.stop()


def errors(engine: EngineProcess, most: int = 6) -> str:
    """Return the last lines of an engine's log that name an error, in one line."""
    lines = engine.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    found = [line.strip()[-300:] for line in lines if _ERROR.search(line)]
    return " | ".join(dict.fromkeys(found[-most:]))


def tail(log: Path) -> str:
    """Return the end of a log; empty if there is none."""
    with suppress(OSError):
        return log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
    return ""


def gpu_mib(engine: EngineProcess) -> int | None:
    """Return the MiB on the GPU of an engine's processes, as the driver counts; None if unknown."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    with suppress(Exception):
        said = subprocess.run(query, check=True, capture_output=True, text=True, timeout=10)
        pids, used = set(engine.pids()), 0
        for line in said.stdout.splitlines():
            pid, mib = map(int, line.split(","))
            used += mib if pid in pids else 0
        return used or None
    return None
