"""Measure what posting a part costs: the sender, and the HTTP process of an engine.

The sender's own client posts to the real endpoints, in a process of their own, over the loopback
interface; the engine behind them does nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import numpy as np
import psutil
import xxhash

from delta_sender.options import SenderOptions
from delta_sender.publish.http_client import EngineClient
from engine_ext.format import ParamDelta, encode_part
from scripts.bench.scaling.stub_server import HOST
from scripts.bench.scaling.timing import ColdCaches, fastest
from scripts.live_engine.process import EngineError

_PART = 32 << 20  # bytes
_POSTS = 6  # of a large part, timed together: the system counts CPU time in hundredths
_SMALL_POSTS = 30
_START_S = 60.0


def measure(repeats: int) -> dict[str, float]:
    """Return the fields of `Constants` that concern posting."""
    with _server() as (url, server):
        client = EngineClient(url, SenderOptions())
        try:
            least = {"send": 1e9, "receive": 1e9, "wall": 1e9}
            for number in range(1, repeats + 1):
                large = _timed(client, server, _part(number, _PART), _POSTS)
                small = _timed(client, server, _part(number, 0), _SMALL_POSTS)
                found = {
                    "send": large["send"] - small["send"],
                    "receive": large["receive"] - small["receive"],
                    "wall": large["wall"] - small["wall"],
                }
                least = {key: min(least[key], found[key]) for key in least}
        finally:
            client.close()
    data = np.zeros(_PART, np.uint8).data
    hashing = fastest({"hash": lambda: xxhash.xxh3_128(data).digest()}, repeats, ColdCaches())
    return {
        "send_ns": max(least["send"], 0.0) / _PART * 1e9,
        "receive_ns": max(least["receive"], 0.0) / _PART * 1e9,
        "loopback_ns": max(least["wall"], 0.0) / _PART * 1e9,
        "hash_ns": hashing["hash"] / _PART * 1e9,
    }


def _part(version: int, nbytes: int) -> bytes:
    """Return a part with as many bytes of values."""
    values = np.zeros(max(nbytes // 2, 1), np.uint16)
    delta = ParamDelta("w", "bfloat16", (values.size,), None, values)
    return encode_part([delta], encoding="deltas", current_version=version)


def _timed(
    client: EngineClient, server: psutil.Process, body: bytes, posts: int
) -> dict[str, float]:
    """Post one part several times; return seconds of each post."""
    before, cpu, start = _cpu(server), time.process_time(), time.perf_counter()
    for number in range(posts):
        client.deliver(body, 1, number, False)
    wall = time.perf_counter() - start
    sent, received = time.process_time() - cpu, _cpu(server) - before
    return {"send": sent / posts, "receive": received / posts, "wall": wall / posts}


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextlib.contextmanager
def _server() -> Iterator[tuple[str, psutil.Process]]:
    """Start the endpoints; yield their url and their process."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "scripts.bench.scaling.stub_server", str(port)]
    paths = os.pathsep.join(path for path in sys.path if path)
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths})
    try:
        url = f"http://{HOST}:{port}"
        deadline = time.monotonic() + _START_S
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                raise EngineError("the endpoints that posts are timed with do not answer")
            with contextlib.suppress(httpx.TransportError):
                httpx.get(f"{url}/health", trust_env=False)
                break
            time.sleep(0.1)
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()
