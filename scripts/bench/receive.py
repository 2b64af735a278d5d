"""Time how an HTTP process receives large parts: its CPU time, and how long its event loop stalls.

    python -m scripts.bench.receive                # 1 GiB with each server; 1 GB of memory
    python -m scripts.bench.receive --http h11

Starts uvicorn on uvloop, as both engines run it, with the delta endpoints over an engine that does
nothing, and posts the same part again and again from this process over loopback, as fast as it
goes. vLLM installs httptools, with which uvicorn parses HTTP then; SGLang does not, which leaves
h11 (``--http h11``). An event loop that stalls delays the tokens of every request, so a task in it
beats every millisecond.

rows:
  dropped     the body is read and dropped: what uvicorn and the socket cost
  received    the endpoint
columns:
  CPU-s/GB    user and system time of the server per 1e9 bytes of the body, the lowest turn
  user, sys   of it
  GB/s        in the fastest turn
  late ms     how much later than due a beat was: median, 99th percentile and maximum of a turn,
              each the lowest of all turns
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.progress import track

from engine_ext.format import ParamDelta, encode_part
from scripts import command_line
from scripts.bench import frame
from scripts.bench.pipeline_link import HOST
from scripts.bench.receive_server import serve
from scripts.bench.server_process import process

_PATHS: Final = {"dropped": "/discard", "received": "/update_weights_delta"}
_PERCENTILES: Final = {"p50": 0.5, "p99": 0.99, "max": 1.0}


class ServerError(Exception):
    """The server has refused a part."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = frame.make_parser("receive", __doc__)
    add, positive = parser.add_argument, command_line.at_least(1)
    add("--part-mb", type=positive, metavar="N", default=128, help="of 2**20 bytes (%(default)s)")
    add("--parts", type=positive, metavar="N", default=8, help="in a turn (%(default)s)")
    add("--streams", type=positive, metavar="N", default=1, help="parts at once (%(default)s)")
    add("--runs", type=positive, metavar="N", default=5, help="turns of each (%(default)s)")
    encodings = ("deltas", "deltas_zstd", "gap8_exp")
    add("--encoding", choices=encodings, default="deltas", help="(%(default)s)")
    add("--http", choices=("httptools", "h11"), default="httptools", help="(%(default)s)")
    options = parser.parse_args(arguments)
    failures = (ServerError, OSError, EOFError, http.client.HTTPException)
    stopped = "interrupted; the servers are stopped"
    return frame.run(options, lambda _: run(options), failures, stopped)


def run(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Start the servers, measure and print; return the figures of each row."""
    body = part(options.part_mb << 20, options.encoding)
    errors = Console(stderr=True)
    with contextlib.ExitStack() as stack:
        servers = {
            way: Server(stack.enter_context(process(serve, options.http))[0], path)
            for way, path in _PATHS.items()
        }
        turns: dict[str, list[dict[str, float]]] = {way: [] for way in servers}
        for turn in track(range(options.runs + 1), "receiving", console=errors):
            for way, server in servers.items():
                figures = server.take(body, options)
                if turn:  # the first one warms up
                    turns[way].append(figures)
    found = {way: _best(figures) for way, figures in turns.items()}
    keys = ("cpu", "user", "system", "rate", *_PERCENTILES)
    frame.show(
        f"{options.parts} parts of {len(body) / 1e6:.0f} MB ({options.encoding}), "
        f"{options.streams} at once; {options.http}; {options.runs} turns",
        ("", "CPU-s/GB", "user", "sys", "GB/s", "late ms: p50", "p99", "max"),
        ((way, *(f"{figures[key]:.2f}" for key in keys)) for way, figures in found.items()),
    )
    return found


def part(nbytes: int, encoding: str) -> bytes:
    """Return a part with one dense param of random weights."""
    weights = np.random.default_rng(0).normal(0, 0.02, nbytes // 2).astype(np.float32)
    bits = (weights.view(np.uint32) >> 16).astype(np.uint16)
    delta = ParamDelta("weight", "bfloat16", bits.shape, None, bits)
    return encode_part([delta], encoding=encoding, current_version=1, base_version=0, part=0)


class Server:
    """One path of the server that listens on a port."""

    def __init__(self, port: int, path: str) -> None:
        self._port, self._path = port, path

    def take(self, body: bytes, options: argparse.Namespace) -> dict[str, float]:
        """Post a part again and again; return what that took."""
        before, start = self._usage(), time.perf_counter()
        with ThreadPoolExecutor(options.streams) as threads:
            list(threads.map(lambda _: self._post(body), range(options.parts)))
        seconds, after = time.perf_counter() - start, self._usage()
        gigabytes = len(body) * options.parts / 1e9
        figures = {key: (after[key] - before[key]) / gigabytes for key in ("user", "system")}
        late = after["late"]
        figures |= {
            name: late[min(int(len(late) * share), len(late) - 1)] * 1e3
            for name, share in _PERCENTILES.items()
        }
        return {"cpu": figures["user"] + figures["system"], "rate": gigabytes / seconds, **figures}

    def _post(self, body: bytes) -> None:
        with contextlib.closing(http.client.HTTPConnection(HOST, self._port)) as connection:
            headers = {"Content-Type": "application/octet-stream"}
            connection.request("POST", self._path, body, headers)
            answer = connection.getresponse()
            text = answer.read()
        if answer.status != 200:
            raise ServerError(f"{self._path} answered {answer.status}: {text[:500]!r}")

    def _usage(self) -> dict[str, Any]:
        """Return the CPU seconds of the server, and how late its beats were since the last call."""
        with contextlib.closing(http.client.HTTPConnection(HOST, self._port)) as connection:
            connection.request("GET", "/bench")
            usage: dict[str, Any] = json.loads(connection.getresponse().read())
        return usage


def _best(turns: Sequence[dict[str, float]]) -> dict[str, float]:
    best = min(turns, key=lambda figures: figures["cpu"])
    lowest = {name: min(figures[name] for figures in turns) for name in _PERCENTILES}
    return {**best, **lowest, "rate": max(figures["rate"] for figures in turns)}


if __name__ == "__main__":
    raise SystemExit(main())
