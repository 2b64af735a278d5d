"""Time how an engine fetches a part from an object store over a far link, by the ranges at once.

    export AWS_ENDPOINT_URL=http://127.0.0.1:8333 AWS_ALLOW_HTTP=true ...   # a store on this host
    python -m scripts.bench.store_link s3://bucket/prefix
    python -m scripts.bench.store_link s3://bucket/prefix --json            # the last line is JSON

The part is written into the store first. The link is a TCP relay, which carries all connections
together at --megabytes-per-second in each direction and adds half of the round trip each way. TCP's
own slow start is not simulated.

share  bytes of the part over those that the link could have carried in that time
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from engine_ext.log import Objects
from engine_ext.store_urls import store_url
from scripts import command_line
from scripts.bench import pipeline_link

_NAME: Final = "store-link/part"
_ENDPOINT: Final = "AWS_ENDPOINT_URL"


@contextlib.contextmanager
def relay(port: int, bytes_per_s: float, round_trip: float) -> Iterator[int]:
    """Run a relay to a port of this host, and yield its own port."""
    ours, theirs = multiprocessing.Pipe()
    arguments = (theirs, port, bytes_per_s, round_trip)
    process = multiprocessing.get_context("spawn").Process(
        target=pipeline_link.serve, args=arguments, daemon=True
    )
    process.start()
    try:
        yield ours.recv()[0]
    finally:
        process.terminate()
        process.join()


def fetch(url: str, streams: int, size: int) -> float:
    """Return the seconds in which a part is fetched."""
    store = Objects(url, streams=streams)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        with open(os.path.join(folder, "part"), "w+b", buffering=0) as file:
            start = time.perf_counter()
            store.fetch(_NAME, size, file)
            return time.perf_counter() - start


def measure(options: argparse.Namespace) -> dict[int, float]:
    """Return the least seconds by the number of ranges at once."""
    size, speed = options.megabytes * 1_000_000, options.megabytes_per_second * 1e6
    direct = os.environ[_ENDPOINT]
    Objects(options.url).put(_NAME, np.random.default_rng(0).bytes(size))
    found: dict[int, float] = {}
    try:
        with relay(urlsplit(direct).port or 80, speed, options.round_trip / 1e3) as port:
            os.environ[_ENDPOINT] = f"http://{pipeline_link.HOST}:{port}"
            for _ in range(options.repeats):
                for streams in options.streams or (1, 2, 4, 8):
                    seconds = fetch(options.url, streams, size)
                    found[streams] = min(seconds, found.get(streams, seconds))
    finally:
        os.environ[_ENDPOINT] = direct
        Objects(options.url).delete([_NAME])
    return found


def show(found: dict[int, float], options: argparse.Namespace, console: Console) -> list[Any]:
    """Print the times; return them as JSON."""
    rows = [
        {
            "streams": streams,
            "seconds": round(seconds, 3),
            "share": round(options.megabytes / options.megabytes_per_second / seconds, 3),
        }
        for streams, seconds in found.items()
    ]
    table = Table("ranges at once", "seconds", "share of the link", box=box.MARKDOWN)
    for row in rows:
        table.add_row(str(row["streams"]), f"{row['seconds']:.2f}", f"{row['share']:.0%}")
    link = f"{options.megabytes_per_second:g} MB/s, round trip {options.round_trip:g} ms"
    console.print(f"{options.megabytes} MB over {link}")
    console.print(table)
    return rows


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line.make_parser("scripts.bench.store_link", __doc__)
    add = parser.add_argument
    add("url", type=store_url, help="where the part is put; on a store on this host")
    add("--megabytes", type=command_line.at_least(1), default=150, help="(default: %(default)s)")
    add("--megabytes-per-second", type=float, default=25.0, help="(default: %(default)s)")
    trip_help = "milliseconds there and back (default: %(default)s)"
    add("--round-trip", type=float, default=40.0, help=trip_help)
    add("--streams", type=command_line.at_least(1), action="append", help="(1, 2, 4 and 8)")
    add("--repeats", type=command_line.at_least(1), default=3, help="(default: %(default)s)")
    add("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(arguments)
    if not os.environ.get(_ENDPOINT):
        parser.error(f"set {_ENDPOINT} to the store's endpoint on this host")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    options = parse_arguments(arguments)
    rows = show(measure(options), options, Console(width=120))
    if options.json:
        print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
