"""Time how parts travel from a trainer to a vLLM engine of the same cluster.

    python -m scripts.gpu.carriers                          # on a CPU build of vLLM, or GPU 0
    python -m scripts.gpu.carriers --trainer cuda:1         # two GPUs: NCCL, too

Starts an engine with a random Qwen3, whose first worker is on GPU 0 if there is one. Each carrier
sends the same syncs, of --density changed elements and of all elements, without compression, and
the engine's digest is compared with that of its memory.

With two GPUs it has not been run: it is expected to print two lines more, of nccl.

carriers:
  http        `DeltaSender`: parts are posted
  memory      vLLM's weight-transfer API; each part is a file in shared memory, whose path is posted
  gloo, nccl  the same API; each part is broadcast to the engine's first worker. NCCL needs the
              trainer on another GPU than the engine
columns:
  ms          the fastest and the slowest of --runs syncs, from the trainer's tensors to the answer
              that the engine has committed
  GB/s        bytes of the parts over the fastest time
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import torch
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from delta_sender import MultiSender, SyncError
from delta_sender.integrations.transfer_destination import (
    Channel,
    HttpSyncClient,
    TransferDestination,
)
from delta_sender.publish.http_client import EngineClient
from delta_sender.publish.publisher import Connect
from scripts import command_line
from scripts.gpu.engine import GpuVllm
from scripts.gpu.timing import SIZES, Weights, random_weights, step, write_checkpoint
from scripts.gpu.trees import REHEARSAL, environment
from scripts.live_engine.process import EngineError, EngineProcess

_BACKEND: Final = ("--weight-transfer-config", json.dumps({"backend": "delta_updates"}))
_SHARED_MEMORY: Final = Path("/dev/shm")
Row = dict[str, Any]


def carriers(folder: Path, trainer: torch.device) -> Iterator[tuple[str, Connect]]:
    """Yield each carrier with what makes its destination.

    Args:
        folder: in shared memory, below a ``--delta-root`` of the engine.
        trainer: device of the trainer's tensors.
    """
    channels = {
        "memory": Channel(kind="disk", folder=folder, inline_bytes=0),
        "gloo": Channel(kind="collective", inline_bytes=0),
    }
    if trainer.type == "cuda" and trainer.index:
        channels["nccl"] = Channel(kind="collective", backend="nccl", inline_bytes=0)
    yield "http", EngineClient
    for name, channel in channels.items():

        def connect(url: str, options: Any, channel: Channel = channel) -> TransferDestination:
            return TransferDestination(url, options, HttpSyncClient(url), channel)

        yield name, connect


def measure(options: argparse.Namespace, scratch: Path, console: Console, rows: list[Row]) -> None:
    """Time every carrier; add one row for each, and each kind of sync, and print it.

    Raises:
        EngineError: The engine did not start, or holds other weights than were sent.
        SyncError: The engine refused a sync.
    """
    trainer, size = options.trainer, SIZES[options.size]
    weights = random_weights(size, trainer)
    base, parts = scratch / "base", scratch / "parts"
    write_checkpoint(weights, size, base)
    parts.mkdir()
    flags = ("--dtype", "bfloat16", "--enforce-eager", *_BACKEND, "--delta-root", str(parts))
    console.print("starting vLLM")
    more: Row = {"kv_bytes": 1 << 30, "log_path": scratch / "engine.log"}
    with GpuVllm(base, flags, delta=True, **more) as engine:
        found = track([*carriers(parts, trainer)], "syncing", console=console, transient=True)
        for name, connect in found:
            for row in _syncs(engine, name, connect, weights, options):
                console.print(f"{name}, {row['sync']}: {row['ms']:.0f} ms")
                rows.append(row)


def _syncs(
    engine: EngineProcess,
    name: str,
    connect: Connect,
    weights: Weights,
    options: argparse.Namespace,
) -> Iterator[Row]:
    """Time the syncs of one carrier; each sends what one more step changes, or all."""
    at = int(engine.delta_status().version.number)
    with MultiSender(
        [engine.url], weights.items(), connect=connect, base_version=at, encoding="deltas"
    ) as sender:
        sender.sync(weights.items())  # gets the plan, and joins the group
        for kind in ("delta", "full"):
            found = []
            for seed in range(options.runs):
                step(weights, seed, options.density)
                send = sender.sync_full if kind == "full" else sender.sync
                start = time.perf_counter()
                [report] = send(weights.items()).values()
                found.append((1e3 * (time.perf_counter() - start), report))
                if report.full != (kind == "full"):
                    raise EngineError(f"{name}: the engine was not at the version sent before")
            scan = engine.get("/delta_digest", params={"scan": True}, timeout=600).json()
            if scan["corrupted"] or scan["digest"] != found[-1][1].engine["digest"]:
                raise EngineError(f"{name}: the engine holds other weights than were sent")
            times = [ms for ms, _ in found]
            nbytes = found[-1][1].wire_bytes
            yield {
                **{"carrier": name, "sync": kind, "bytes": nbytes},
                **{"ms": round(min(times), 1), "slowest_ms": round(max(times), 1)},
            }


def show(rows: Sequence[Row], console: Console) -> None:
    """Print one line for each carrier and kind of sync."""
    table = Table("carrier", "sync", "ms", "bytes", "GB/s", box=box.MARKDOWN)
    for row in rows:
        speed = row["bytes"] / row["ms"] / 1e6
        times = f"{row['ms']:.0f}-{row['slowest_ms']:.0f}"
        table.add_row(row["carrier"], row["sync"], times, f"{row['bytes']:,}", f"{speed:.2f}")
    console.print(table)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    epilog = "exit status: 0 measured; 1 the engine failed; 2 bad usage; 130 interrupted"
    parser = command_line.make_parser("scripts.gpu.carriers", __doc__, epilog)
    has_gpu = torch.cuda.is_available()
    add, positive = parser.add_argument, command_line.at_least(1)
    trainer = "cuda:0" if has_gpu else "cpu"
    add(
        "--trainer",
        type=_device,
        default=trainer,
        help="device of the trainer's tensors (%(default)s)",
    )
    size = "4b" if has_gpu else "0.2b"
    add("--size", choices=sorted(SIZES), default=size, help="of the model (%(default)s)")
    add("--density", type=float, default=0.02, help="share that changes (%(default)s)")
    add("--runs", type=positive, default=3, help="syncs of each kind (%(default)s)")
    add("--json", action="store_true", help="end with one line of JSON")
    return parser.parse_args(arguments)


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no device") from error
    return torch.device("cuda", 0) if text == "cuda" else device


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    options = parse_arguments(arguments)
    logging.getLogger("delta_sender").setLevel(logging.ERROR)  # full syncs, and random values
    if options.trainer.type == "cuda":
        torch.cuda.set_device(options.trainer)  # NCCL's group is on the current one
    if not torch.cuda.is_available():
        os.environ[REHEARSAL] = "1"

    def program() -> int:
        console = Console(width=120, markup=False, highlight=False)
        rows: list[Row] = []
        try:
            with tempfile.TemporaryDirectory(prefix="delta-bench-", dir=_SHARED_MEMORY) as scratch:
                os.environ.update(environment(None, Path(scratch)))  # the engine finds the plug-in
                measure(options, Path(scratch), console, rows)
        finally:  # a carrier that fails leaves those before it
            if rows:
                show(rows, console)
            if rows and options.json:
                print(json.dumps(rows), flush=True)
        return 0

    failures = (EngineError, SyncError, httpx.HTTPError)
    return command_line.run(program, failures, "interrupted; the engine is stopped")


if __name__ == "__main__":
    sys.exit(main())
