"""Time how one version reaches a group of engines by a log in a store, with and without peers.

    export AWS_ENDPOINT_URL=http://127.0.0.1:8333 AWS_ALLOW_HTTP=true ...   # a store on this host
    python -m scripts.bench.fan_out s3://bucket/prefix
    python -m scripts.bench.fan_out s3://bucket/prefix --json               # the last line is JSON

Each receiver is a process with a real receiver, the endpoints of an engine, and a host's cache of
its own; nothing generates. All follow one log, and are asked to look at once. The store is behind a
link that all receivers share, a TCP relay of --megabytes-per-second, which counts the bytes that it
carries. The receivers reach each other directly.

from store   bytes of all answers of the store to the receivers, listings and headers included
from peers   bytes of parts that receivers have sent each other
seconds      until every receiver has committed the version
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import numpy as np
import torch

from delta_sender import LogSender
from engine_ext.log import open_log
from engine_ext.settings import Settings
from engine_ext.store_urls import store_url
from scripts import command_line
from scripts.bench import frame
from scripts.bench.pipeline_link import HOST, Direction
from scripts.bench.pipeline_receiver import serve
from scripts.bench.server_process import process
from scripts.bench.synthetic_weights import Tensors, as_tensor, change_tensors, make_weights

_ENDPOINT: Final = "AWS_ENDPOINT_URL"
_TENSORS: Final = 8
_BUCKET_BYTES: Final = 8 << 20  # of a part before compression
_LOOK_S: Final = 3600.0  # nobody looks without a request


class Relay:
    """The link to the store, in a thread; `carried` counts the bytes of its answers."""

    def __init__(self, target: int, bytes_per_s: float) -> None:
        self.carried = 0
        self._target, self._speed = target, bytes_per_s
        listener = socket.create_server((HOST, 0))
        self.port = int(listener.getsockname()[1])
        thread = threading.Thread(target=asyncio.run, args=(self._serve(listener),), daemon=True)
        thread.start()

    async def _serve(self, listener: socket.socket) -> None:
        there, back = (Direction(self._speed, 0.0) for _ in range(2))

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection(HOST, self._target)
            counted: Any = _Counted(far_reader, self)
            await asyncio.gather(there.forward(reader, far_writer), back.forward(counted, writer))

        await asyncio.start_server(carry, sock=listener)
        await asyncio.Event().wait()


class _Counted:
    """A reader that counts what it reads."""

    def __init__(self, reader: asyncio.StreamReader, relay: Relay) -> None:
        self._reader, self._relay = reader, relay

    async def read(self, most: int) -> bytes:
        data = await self._reader.read(most)
        self._relay.carried += len(data)
        return data


def make_tensors(elements: int) -> Tensors:
    """Return the weights that all receivers load."""
    rng, share = np.random.default_rng(1), elements // _TENSORS
    return {
        f"layers.{n}.weight": as_tensor(make_weights(share, rng)).reshape(-1, 1024)
        for n in range(_TENSORS)
    }


def _receive(pipe: Any, port: int, settings: Settings, elements: int) -> None:
    torch.set_num_threads(1)
    serve(pipe, make_tensors(elements), settings, port)


@contextlib.contextmanager
def receivers(
    log: str, folder: Path, options: argparse.Namespace, peers: bool
) -> Iterator[list[str]]:
    """Run the receivers; yield the roots of their servers."""
    ports = _free_ports(options.receivers)
    urls = [f"http://{HOST}:{port}" for port in ports]
    with contextlib.ExitStack() as stack:
        for number, port in enumerate(ports):
            cache = folder / f"cache{number}"
            cache.mkdir(mode=0o700)
            settings = Settings(
                log=log,
                follow=True,
                follow_interval=_LOOK_S,
                cache_dir=str(cache),
                peers=tuple(urls) if peers else (),
                own_url=urls[number] if peers else None,
            )
            stack.enter_context(process(_receive, port, settings, options.megaparams << 20))
        yield urls


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(count)]
        return [int(one.getsockname()[1]) for one in found]


def measure(options: argparse.Namespace, *, peers: bool) -> dict[str, Any]:
    """Publish one version, let all receivers take it, and return the row of the table."""
    direct, log = os.environ[_ENDPOINT], f"{options.url}/{uuid.uuid4().hex}"
    relay = Relay(urlsplit(direct).port or 80, options.megabytes_per_second * 1e6)
    tensors = make_tensors(options.megaparams << 20)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        with LogSender(log, tensors.items(), bucket_bytes=_BUCKET_BYTES) as sender:
            os.environ[_ENDPOINT] = f"http://{HOST}:{relay.port}"
            try:
                with receivers(log, Path(folder), options, peers) as urls:
                    os.environ[_ENDPOINT] = direct
                    sender.sync(change_tensors(tensors, options.density).items())
                    before, start = relay.carried, time.perf_counter()
                    with ThreadPoolExecutor(len(urls)) as pool:
                        answers = list(pool.map(_catch_up, urls))
                    seconds = time.perf_counter() - start
                    carried = relay.carried - before
                    status = [httpx.get(f"{url}/delta_status", timeout=60).json() for url in urls]
            finally:
                os.environ[_ENDPOINT] = direct
    assert all(answer["applied"] == [1] for answer in answers), answers
    assert len({one["version"]["digest"] for one in status}) == 1
    [entry] = open_log(log).listing().entries
    return {
        "receivers": len(urls),
        "peers": peers,
        "version_bytes": entry.nbytes,
        "parts": len(entry.files),
        "from_store": carried,
        "from_peers": sum(one["log"]["from_peers"] for one in status),
        "seconds": round(seconds, 3),
        "megabytes_per_second": options.megabytes_per_second,
    }


def _catch_up(url: str) -> dict[str, Any]:
    answer = httpx.post(f"{url}/delta_catch_up", timeout=600)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    names = ("receivers", "peers", "parts", "MB of the version", "MB from the store", "times")
    cells = (
        (
            str(row["receivers"]),
            "yes" if row["peers"] else "no",
            str(row["parts"]),
            f"{row['version_bytes'] / 1e6:.1f}",
            f"{row['from_store'] / 1e6:.1f}",
            f"{row['from_store'] / row['version_bytes']:.2f}",
            f"{row['from_peers'] / 1e6:.1f}",
            f"{row['seconds']:.1f}",
        )
        for row in rows
    )
    link = f"a link of {rows[0]['megabytes_per_second']:g} MB/s to the store"
    frame.show(link, (*names, "MB from peers", "seconds"), cells)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = frame.make_parser("fan_out", __doc__)
    add, positive = parser.add_argument, command_line.at_least(1)
    add("url", type=store_url, help="where the logs are put; on a store on this host")
    add("--receivers", type=positive, default=8, metavar="N", help="(%(default)s)")
    add("--megaparams", type=positive, default=64, metavar="N", help="of the model (%(default)s)")
    add("--density", type=float, default=0.1, help="share that changes (%(default)s)")
    add("--megabytes-per-second", type=float, default=25.0, help="of the link (%(default)s)")
    options = parser.parse_args(arguments)
    if not os.environ.get(_ENDPOINT):
        parser.error(f"set {_ENDPOINT} to the store's endpoint on this host")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    options = parse_arguments(arguments)
    return frame.run(options, lambda _: run(options))


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure and print; return the rows of the table."""
    rows = [measure(options, peers=peers) for peers in (False, True)]
    show(rows)
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
