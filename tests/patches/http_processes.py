"""Servers whose processes share a port: which one answers, and that all report the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import psutil

from scripts.live_engine.process import EngineProcess

_WAIT_S = 120.0
_POLL_S = 0.1


@contextmanager
def one_client_each(engine: EngineProcess, processes: int) -> Iterator[list[httpx.Client]]:
    """A client for every process that serves HTTP, each on a connection that it keeps.

    The server is healthy when the first of them is, and the kernel chooses who accepts a
    connection, so it takes some.
    """
    found: dict[int, httpx.Client] = {}
    deadline = time.monotonic() + _WAIT_S
    with ExitStack() as stack:
        while len(found) < processes:
            assert time.monotonic() < deadline, f"of {processes} only {list(found)} answered"
            client = httpx.Client(base_url=engine.url, timeout=300.0)
            stream = client.get("/delta_status").extensions["network_stream"]
            process = _who_has(engine, stream.get_extra_info("client_addr")[1])
            if process in found:
                client.close()
                time.sleep(_POLL_S)
            else:
                stack.callback(client.close)
                found[process] = client
        yield list(found.values())


@contextmanager
def connected(engine: EngineProcess) -> Iterator[dict[int, set[int]]]:
    """Per process that serves HTTP, the other ends' ports of the connections seen meanwhile."""
    seen: dict[int, set[int]] = {}
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(_POLL_S):
            for process, port in _connections(engine):
                seen.setdefault(process, set()).add(port)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


def committed(client: httpx.Client) -> float:
    """How many syncs were committed, as the engine's ``/metrics`` counts them."""
    start = 'delta_updates_syncs_total{error="",outcome="committed"} '
    lines = client.get("/metrics").text.splitlines()
    [value] = [line.removeprefix(start) for line in lines if line.startswith(start)]
    return float(value)


def shown_by_top(url: str) -> tuple[int, int, str]:
    """The exit status of ``delta-top``, and the version and state that it shows."""
    command = [sys.executable, "-m", "engine_ext.cli.top", "--json", url]
    paths = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    [seen] = json.loads(done.stdout)
    status = seen["status"]
    return done.returncode, status["version"]["number"], status["health"]["state"]


def _who_has(engine: EngineProcess, port: int) -> int:
    """The id of the process that has the other end of a connection."""
    for process, other_port in _connections(engine):
        if other_port == port:
            return process
    raise AssertionError(f"nobody has the connection from port {port}")


def _connections(engine: EngineProcess) -> Iterator[tuple[int, int]]:
    """The processes that have accepted connections to the engine's port, and their other ends."""
    assert engine._process is not None
    for process in psutil.Process(engine._process.pid).children(recursive=True):
        for connection in process.net_connections("tcp"):
            ours = connection.laddr and connection.laddr.port == engine.port
            if ours and connection.raddr:
                yield process.pid, connection.raddr.port
