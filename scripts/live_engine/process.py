"""Run a real server of an engine as a child process, for tests, the demo and benchmarks.

`vllm` and `sglang` have one class each; `registry` maps names to them::

    with VllmProcess(model_dir, enable_delta=True) as engine:
        engine.complete("the quick", max_tokens=8, temperature=0.0)
        engine.checksums()

The settings are for a machine without an accelerator. However the ``with`` block ends, the server
and every process that it started have ended afterwards.
"""

from __future__ import annotations

import abc
import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import httpx
import msgspec
import psutil

from engine_ext.ranks.status import EngineStatus

HOST: Final = "127.0.0.1"
_POLL_S: Final = 0.2
_GRACE_S: Final = 15.0
_GRACE_STARTING_S: Final = 2.0  # vLLM can hang on a SIGTERM that comes before it serves
_TAIL_LINES: Final = 40
_REQUEST_TIMEOUT_S: Final = 300.0

_EXCEPTION: Final = re.compile(r"\w(Error|Exception): ")
_MAX_ERRORS: Final = 10
# The variables of both engines.
_ENVIRONMENT: Final = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
_SHARED_MEMORY: Final = Path("/dev/shm")
# Below those of outgoing connections, see ip(7), ip_local_port_range.
_PORTS: Final = range(20_000, 32_768)
_ENDED: Final = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


class EngineError(RuntimeError):
    """The server did not start, or answered something else than 200; the message shows why."""


class EngineProcess(abc.ABC):
    """One server on a free port of the loopback interface, in a process group of its own.

    Args:
        model: Folder of the model to serve.
        tp: Tensor parallel size, 1 or 2.
        port: Port to serve on; None picks a free one.
        enable_delta: Add ``--enable-delta-updates``.
        keep_plain: Add ``--delta-keep-plain`` too, so that weights stay where a checksum sees them,
            and are written in place as on a GPU.
        extra_args: Further command line arguments.
        python_path: Folders to put first in the server's ``PYTHONPATH``.
        command_prefix: A command that runs the server, such as ``unshare`` and its options.
        extra_env: Further environment variables; they override the built-in ones. A large model
            needs more than the default of one ``OMP_NUM_THREADS`` per rank.
        log_path: File for the server's output; None creates a temporary one. It is kept.
        start_timeout_s: Seconds to wait for ``/health``.

    Attributes:
        name: Display name of the engine.
        rank_title: In the titles of its processes that hold weights, and of no others.
        waits_in_loop: Whether its ranks' main threads use a core for a second after each call.
    """

    name: ClassVar[str]
    rank_title: ClassVar[str]
    waits_in_loop: ClassVar[bool]
    _python_path: ClassVar[Sequence[Path]] = ()

    def __init__(
        self,
        model: Path,
        *,
        tp: int = 1,
        port: int | None = None,
        enable_delta: bool = False,
        keep_plain: bool = True,
        extra_args: Sequence[str] = (),
        python_path: Sequence[Path] = (),
        command_prefix: Sequence[str] = (),
        extra_env: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        start_timeout_s: float = 480.0,
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.log_path = log_path or _temporary_log()
        self.model = model
        self.tp = tp
        command = [str(self.interpreter()), *self._server_arguments()]
        if enable_delta:
            command.append("--enable-delta-updates")
            command += ["--delta-keep-plain"] if keep_plain else []
        self._command = [*command_prefix, *command, *extra_args]
        paths = [*map(str, python_path), *map(str, self._python_path)]
        paths += filter(None, [os.environ.get("PYTHONPATH")])
        self._env = {
            **os.environ,
            **_ENVIRONMENT,
            **self._server_environment(),
            "PYTHONPATH": os.pathsep.join(paths),
            **(extra_env or {}),
        }
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: Path | None = None
        # The engines close an idle connection after 5 s, as httpx does: it could be just now.
        limits = httpx.Limits(keepalive_expiry=2.0)
        self._client = httpx.Client(
            base_url=self.url, timeout=_REQUEST_TIMEOUT_S, limits=limits, trust_env=False
        )

    def __enter__(self) -> EngineProcess:
        """Start the server and return when it is healthy.

        Raises:
            EngineError: The server exited or did not answer in time; the message shows its log.
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

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self, grace_s: float = _GRACE_S) -> None:
        """Stop the server and its processes with SIGTERM, and after `grace_s` s with SIGKILL."""
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
        """Return whether the server exits within `timeout_s` seconds, without a signal."""
        assert self._process is not None
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def pids(self) -> list[int]:
        """Return the ids of the server's running processes, in order."""
        return [] if self._process is None else _running(self._process.pid)

    def get(self, path: str, **options: Any) -> httpx.Response:
        """Send ``GET path``; `options` are httpx's (params, headers, timeout in seconds)."""
        return self._client.get(path, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        """Send ``POST path``; `options` are httpx's (json, content, params, headers, timeout)."""
        return self._client.post(path, **options)

    def complete(self, prompt: str | Sequence[int] | Sequence[str], **options: Any) -> Any:
        """Return the answer of ``/v1/completions``; `options` are fields of the request.

        Useful ones: ``n``, ``max_tokens``, ``temperature``, ``seed``, ``logprobs``, and
        ``return_token_ids``, which adds ``token_ids`` and ``prompt_token_ids`` to each choice.
        """
        body = {"prompt": prompt, **options}
        return self._checked(self.post("/v1/completions", json=body))

    @abc.abstractmethod
    def checksums(self) -> dict[str, str]:
        """Return the engine's own checksum of every live parameter, by rank and name."""

    @abc.abstractmethod
    def buffer_checksums(self) -> dict[str, str]:
        """Return checksums of the buffers that `checksums` leaves out, by rank and name."""

    @abc.abstractmethod
    def weight_version(self) -> str:
        """Return the version of the weights that the engine's own route reports."""

    @abc.abstractmethod
    def pause(self) -> None:
        """Pause generation with the engine's own route; requests are kept."""

    @abc.abstractmethod
    def resume(self) -> None:
        """Resume generation with the engine's own route."""

    def delta_status(self) -> EngineStatus:
        """Return the answer of ``GET /delta_status``."""
        return msgspec.convert(self._checked(self.get("/delta_status")), EngineStatus)

    @classmethod
    @abc.abstractmethod
    def interpreter(cls) -> Path:
        """Return the Python interpreter that has the engine; it might not exist."""

    @abc.abstractmethod
    def _server_arguments(self) -> list[str]:
        """Return the interpreter's arguments."""

    @abc.abstractmethod
    def _server_environment(self) -> dict[str, str]:
        """Return the server's own environment variables."""

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
        # vLLM's processes wrap each other's failures, so the cause is far above the tail.
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = list(filter(_EXCEPTION.search, lines))[:_MAX_ERRORS]
        command = f"the {self.name} server {what}\ncommand: {' '.join(self._command)}"
        tail = [f"end of {self.log_path}:", *lines[-_TAIL_LINES:]]
        return "\n".join([command, *tail, "exceptions in it:", *dict.fromkeys(errors)])


def free_port() -> int:
    """Return a port that the system gives to nobody: a server binds it seconds later."""
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise EngineError(f"no port is free from {_PORTS[0]} to {_PORTS[-1]}")


def _temporary_log() -> Path:
    handle, name = tempfile.mkstemp(prefix="engine-", suffix=".log")
    os.close(handle)
    return Path(name)


def _shared_memory_of(scratch: Path) -> list[Path]:
    """List the segments of the ranks' shared memory, which vLLM does not remove (4 MiB per rank).

    They are named after the ranks' rendezvous file in the temporary folder.
    """
    names = [file.name for file in scratch.glob("vllm_dist_*")]
    return [segment for name in names for segment in _SHARED_MEMORY.glob(f"{name}-*")]


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _wait_group(leader: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Wait at most `timeout_s` seconds for every process of the leader's group to end."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        leader.poll()
        if not _running(leader.pid):
            return
        time.sleep(_POLL_S)


def _running(group: int) -> list[int]:
    """Return the ids of a process group's running processes, in order.

    Zombies are left out: without an init process that reaps them, orphans stay zombies for ever.
    """
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):  # it ended just now
            if os.getpgid(pid) == group and psutil.Process(pid).status() not in _ENDED:
                found.append(pid)
    return found
