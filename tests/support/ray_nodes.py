"""A Ray cluster whose two nodes are on hosts of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.hosts import Host, two_hosts

_START_S = 240.0
_ATTEMPTS = 3  # Ray has deadlines of its own, which a busy machine misses
_SMALL = ("--num-cpus", "2", "--num-gpus", "1", "--object-store-memory", str(256 << 20))


@dataclass(frozen=True, slots=True)
class Node:
    """One node.

    Attributes:
        host: it is on.
        process: the command that started it, and ends it.
        scratch: the temporary folder of its workers, as they see it.
    """

    host: Host
    process: subprocess.Popen[bytes]
    scratch: Path

    @property
    def temporary(self) -> Path:
        """That folder, as this process sees it; the second host has it for itself."""
        return Path(f"/proc/{self.process.pid}/root{self.scratch}")

    def workers(self, name: str) -> list[int]:
        """Return the ids of its worker processes that run an actor of this class."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [one.pid for one in found if f"ray::{name}" in " ".join(one.cmdline())]


@dataclass(frozen=True, slots=True)
class Nodes:
    """A cluster.

    Attributes:
        address: of its head.
        first, second: its nodes; the first one is the head, on this machine itself.
    """

    address: str
    first: Node
    second: Node

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a driver on the first host."""
        return {"RAY_ADDRESS": self.address, **self.first.host.environment}


@contextlib.contextmanager
def two_nodes(folder: Path, python_path: Sequence[Path] = ()) -> Iterator[Nodes]:
    """Start Ray on two hosts, with a "GPU" each; `python_path` is that of their workers.

    The second host has a network interface, shared memory and a temporary folder of its own. The
    first one shares the memory of this machine, as workers of vLLM do with the process that drives
    them.
    """
    root = Path(__file__).parents[2]
    paths = [*map(str, python_path), str(root), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    # The path of a socket can have 107 characters, and Ray's are long themselves.
    session = tempfile.mkdtemp(prefix="ray-")
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, session, ignore_errors=True)
        first, second = stack.enter_context(two_hosts(folder))
        with socket.create_server((first.address, 0)) as probe:
            port = str(probe.getsockname()[1])
        address = f"{first.address}:{port}"
        head = ("--head", "--port", port, "--temp-dir", session, "--include-dashboard", "false")
        nodes = []
        for host, prefix, options in (
            (first, (), head),
            (second, second.prefix, ("--address", address)),
        ):
            scratch = host.folder / "tmp"
            scratch.mkdir()
            command = ("-m", "ray.scripts.scripts", "start", "--block", *options, *_SMALL)
            log = host.folder / "ray.log"
            process = _started(
                [*prefix, sys.executable, *command, "--node-ip-address", host.address],
                {**environment, **host.environment, "TMPDIR": str(scratch)},
                log,
            )
            stack.callback(_stop, process)
            nodes.append(Node(host, process, scratch))
        yield Nodes(address, *nodes)


def _started(
    command: Sequence[str], environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Return the process of a node once the node is up."""
    give_up = time.monotonic() + _START_S
    for _ in range(_ATTEMPTS):
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        while process.poll() is None and time.monotonic() < give_up:
            if b"Ray runtime started" in log.read_bytes():
                return process
            time.sleep(0.1)
        _stop(process)
    raise RuntimeError(f"Ray did not start: {log.read_text()}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a node and all of its processes, also those with sessions of their own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        everything = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        for one in everything:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    process.kill()
    process.wait()
