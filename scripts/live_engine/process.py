"""Run a real server of an engine as a child process, for tests, the demo and benchmarks.

`vllm_process` and `sglang_process` have one class each, `engine_kinds` knows them by name::

    with VllmProcess(model_dir, enable_delta=True) as engine:
        engine.complete("the quick", max_tokens=8, temperature=0.0)
        engine.checksums()

The settings are those of a CPU-only machine. Whatever ends the ``with`` block, the server and
all the processes it started are gone afterwards.
"""

from __future__ import annotations

import abc
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final

import httpx

HOST: Final = "127.0.0.1"
_POLL_S: Final = 0.2
_GRACE_S: Final = 15.0
_GRACE_STARTING_S: Final = 2.0  # vLLM can hang on a SIGTERM that comes before it serves
_TAIL_LINES: Final = 40
_REQUEST_TIMEOUT_S: Final = 300.0

_EXCEPTION: Final = re.compile(r"\w(Error|Exception): ")
_MAX_ERRORS: Final = 10
_SHARED_MEMORY: Final = Path("/dev/shm")


class EngineError(RuntimeError):
    """The server did not start, or an answer was not 200; the message shows why."""


class EngineProcess(abc.ABC):
    """One server on a free port of the loopback interface, in a process group of its own.

    Args:
        model: Folder of the model to serve.
        tp: Tensor parallel size, 1 or 2.
        port: Where it serves; a free one if None. Of a server that starts again, the one it had.
        enable_delta: Add ``--enable-delta-updates``.
        extra_args: Further command line arguments.
        python_path: Folders in which the server's Python looks first.
        command_prefix: A program that runs the server, and its arguments.
        extra_env: Further environment variables; they win over the built-in ones. A large model
            wants more than the one ``OMP_NUM_THREADS`` per rank.
        log_path: File for the server's output; a temporary one if None. It is kept.
        start_timeout_s: Seconds until a server that does not answer ``/health`` is given up.

    Attributes:
        name: the engine's.
    """

    name: ClassVar[str]
    _python_path: ClassVar[Sequence[Path]] = ()

    def __init__(
        self,
        model: Path,
        *,
        tp: int = 1,
        port: int | None = None,
        enable_delta: bool = False,
        extra_args: Sequence[str] = (),
        python_path: Sequence[Path] = (),
        command_prefix: Sequence[str] = (),
        extra_env: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        start_timeout_s: float = 480.0,
    ) -> None:
        self.port = port or _free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.log_path = log_path or _temporary_log()
        self.model = model
        self.tp = tp
        command = [str(self.interpreter()), *self._server_arguments()]
        if enable_delta:
            command.append("--enable-delta-updates")
        self._command = [*command_prefix, *command, *extra_args]
        paths = [*map(str, python_path), *map(str, self._python_path)]
        paths += filter(None, [os.environ.get("PYTHONPATH")])
        self._env = {
            **os.environ,
            **self._server_environment(),
            "PYTHONPATH": os.pathsep.join(paths),
            **(extra_env or {}),
        }
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: Path | None = None
        self._client = httpx.Client(base_url=self.url, timeout=_REQUEST_TIMEOUT_S, trust_env=False)

    def __enter__(self) -> EngineProcess:
        """Start the server and return once it is healthy.

        Raises:
            EngineError: It died or did not answer in time; the message shows its log.
        """
        try:
            self._scratch = Path(tempfile.mkdtemp(prefix="engine-"))
            with self.log_path.open("wb") as log:
                self._process = subprocess.Popen(
                    self._command,
                    env={**self._env, "TMPDIR": str(self._scratch)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self._wait_healthy(self._process)
        except BaseException:
            self.stop(_GRACE_STARTING_S)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self, grace_s: float = _GRACE_S) -> None:
        """End the server and everything it started: SIGTERM, after `grace_s` seconds SIGKILL."""
        self._client.close()
        process, self._process = self._process, None
        scratch, self._scratch = self._scratch, None
        segments = _shared_memory_of(scratch) if scratch else []
        try:
            if process:
                _signal_group(process.pid, signal.SIGTERM)
                _wait_group(process, grace_s)
        finally:
            if process:
                _signal_group(process.pid, signal.SIGKILL)
                process.wait()
            for segment in segments:
                segment.unlink(missing_ok=True)
            if scratch:
                shutil.rmtree(scratch, ignore_errors=True)

    def wait(self, timeout_s: float) -> bool:
        """Whether the server exits by itself within these seconds."""
        assert self._process is not None
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def pids(self) -> list[int]:
        """Every process of the server that runs now."""
        return [] if self._process is None else _running(self._process.pid)

    def log_tail(self, lines: int = _TAIL_LINES) -> str:
        """The last lines of the server's output."""
        text = self.log_path.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def log_errors(self) -> str:
        """The lines of the server's output that name an exception, first ones first.

        vLLM's processes wrap each other's failures, so the cause stands far above the tail.
        """
        text = self.log_path.read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.splitlines() if _EXCEPTION.search(line)]
        return "\n".join(dict.fromkeys(lines[:_MAX_ERRORS]))

    def get(self, path: str, **options: Any) -> httpx.Response:
        """``GET path``; `options` are httpx's (params, headers, timeout in seconds)."""
        return self._client.get(path, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        """``POST path``; `options` are httpx's (json, content, params, headers, timeout)."""
        return self._client.post(path, **options)

    def complete(self, prompt: str | Sequence[int] | Sequence[str], **options: Any) -> Any:
        """Answer of ``/v1/completions``; `options` are fields of the request.

        Useful ones: ``n``, ``max_tokens``, ``temperature``, ``seed``, ``logprobs``, and
        ``return_token_ids``, which adds ``token_ids`` and ``prompt_token_ids`` to each choice.
        """
        body = {"prompt": prompt, **options}
        return self._checked(self.post("/v1/completions", json=body))

    @abc.abstractmethod
    def checksums(self) -> dict[str, str]:
        """The engine's own checksum of every live parameter, by rank and name."""

    @abc.abstractmethod
    def buffer_checksums(self) -> dict[str, str]:
        """Checksums of the registered buffers that `checksums` leaves out, by rank and name."""

    @abc.abstractmethod
    def weight_version(self) -> str:
        """The version of the weights as the engine's own route tells it."""

    @abc.abstractmethod
    def pause(self) -> None:
        """Stop generation by the engine's own route; requests are kept."""

    @abc.abstractmethod
    def resume(self) -> None:
        """Let generation go on by the engine's own route."""

    def delta_status(self) -> dict[str, Any]:
        """Answer of ``GET /delta_status``."""
        status: dict[str, Any] = self._checked(self.get("/delta_status"))
        return status

    @classmethod
    @abc.abstractmethod
    def interpreter(cls) -> Path:
        """The Python that has the engine; it may not exist."""

    @abc.abstractmethod
    def _server_arguments(self) -> list[str]:
        """What the interpreter is called with."""

    @abc.abstractmethod
    def _server_environment(self) -> dict[str, str]:
        """Environment variables of the server."""

    def _checked(self, response: httpx.Response) -> Any:
        if response.status_code != httpx.codes.OK:
            request = response.request
            raise EngineError(
                f"{request.method} {request.url.path} answered {response.status_code}: "
                f"{response.text[:2000]}\nlog: {self.log_path}"
            )
        return response.json()

    def _wait_healthy(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise EngineError(self._failure(f"exited with code {process.returncode}"))
            with contextlib.suppress(httpx.TransportError):
                if self._client.get("/health", timeout=5.0).status_code == httpx.codes.OK:
                    return
            time.sleep(_POLL_S)
        raise EngineError(self._failure(f"was not healthy after {self._start_timeout_s:.0f} s"))

    def _failure(self, what: str) -> str:
        return (
            f"the {self.name} server {what}\ncommand: {' '.join(self._command)}\n"
            f"end of {self.log_path}:\n{self.log_tail()}\nexceptions in it:\n{self.log_errors()}"
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _temporary_log() -> Path:
    handle, name = tempfile.mkstemp(prefix="engine-", suffix=".log")
    os.close(handle)
    return Path(name)


def _shared_memory_of(scratch: Path) -> list[Path]:
    """Segments of the ranks' shared memory, which vLLM does not remove (4 MiB per rank).

    They are named after the rendezvous file that the ranks have in the temporary folder.
    """
    names = [file.name for file in scratch.glob("vllm_dist_*")]
    return [segment for name in names for segment in _SHARED_MEMORY.glob(f"{name}-*")]


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _wait_group(leader: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Wait until no process of the group that `leader` leads runs, at most `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        leader.poll()
        if not _running(leader.pid):
            return
        time.sleep(_POLL_S)


def _running(group: int) -> list[int]:
    """The processes of the group that are alive; orphaned zombies, which stay where no init reaps
    them, are not."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended just now
            state, _, of_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(of_group) == group and state not in "ZX":
                found.append(int(stat.parent.name))
    return sorted(found)
