"""Syncs to a live engine over a simulated link, beside a reload of the whole checkpoint.

    python scripts/bench/end_to_end.py                        # vLLM; about 2 GB of memory
    python scripts/bench/end_to_end.py --engine sglang --json  # the last line is JSON

Starts an engine with a random Qwen3 and syncs it with every encoding over every link. The time is
that of the whole `sync`, from the trainer's tensors to the answer that the engine has committed,
the fastest and the slowest of some; "pause" is what generation felt of the fastest. The engine is
on this machine: a link is simulated by letting each part through only once its bytes would have
crossed it; "no link" lets all through at once.

"full" is a sync that sends every tensor dense. "reload" is the engine's own way: the checkpoint's
bytes on the link, reckoned, and then its loading of the folder, measured (vLLM's `reload_weights`,
SGLang's `/update_weights_from_disk`). That the checkpoint must first be written here, and then
there, is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from delta_sender import DeltaSender, SyncError, SyncReport
from scripts.bench import synthetic_weights
from scripts.bench.sender import LINKS, SENT_AS
from scripts.live_engine.process import EngineError, EngineProcess
from scripts.live_engine.registry import ENGINES
from scripts.live_engine.tiny_models import build, load_tensors, save_checkpoint

_WIDTHS: Final = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
_LINKS: Final = {**LINKS, "no link": float("inf")}
_BUCKET_BYTES: Final = 4 << 20
_TIMEOUT_S: Final = 600.0
_RELOADS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "vllm": ("/collective_rpc", {"method": "reload_weights"}),
    "sglang": ("/update_weights_from_disk", {}),
}

Tensors = dict[str, torch.Tensor]


class SlowTransport(httpx.HTTPTransport):
    """Lets a request through once its body would have crossed a link of so many bytes a second."""

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__()
        self._bytes_per_s = bytes_per_s
        self._link = threading.Lock()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        nbytes = int(request.headers.get("Content-Length", 0))
        with self._link:
            time.sleep(nbytes / self._bytes_per_s)
        return super().handle_request(request)


@dataclass(frozen=True)
class Measured:
    """One way to bring an engine new weights: milliseconds in all, of the fastest time and of the
    slowest; those of pause in the fastest; bytes sent.
    """

    ms: float
    slowest_ms: float
    pause_ms: float
    nbytes: int

    @classmethod
    def of(cls, syncs: Sequence[tuple[float, SyncReport]]) -> Measured:
        """Of seconds, and reports."""
        times = [round(seconds * 1e3, 1) for seconds, _ in syncs]
        fastest = syncs[times.index(min(times))][1]
        pause_ms = round(fastest.engine["timings_ms"]["pause_ms"], 1)
        return cls(min(times), max(times), pause_ms, fastest.wire_bytes)


@dataclass
class Run:
    """A live engine, what it holds, and what it is to hold next; a sync swaps the two."""

    process: EngineProcess
    tensors: Tensors
    other: Tensors
    runs: int
    version: int = 0

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def syncs(self, encoding: str, speed: float, *, full: bool = False) -> Measured:
        """Some syncs.

        Raises:
            EngineError: The engine did not hold what it had been sent.
            SyncError: It refused a sync.
        """
        found = []
        transport = SlowTransport(speed)
        with (
            httpx.Client(transport=transport, timeout=_TIMEOUT_S) as client,
            DeltaSender(
                self.process.url,
                self.tensors.items(),
                base_version=self.version,
                encoding=encoding,
                client=client,
                bucket_bytes=_BUCKET_BYTES,
            ) as sender,
        ):
            sender.sync(self.tensors.items())  # asks for the plan, and digests all
            for _ in range(self.runs):
                self.tensors, self.other = self.other, self.tensors
                send = sender.sync_full if full else sender.sync
                start = time.perf_counter()
                report = send(self.tensors.items())
                found.append((time.perf_counter() - start, report))
                if report.full != full:
                    raise EngineError("the engine did not hold what it was sent")
            self.version = sender.version
        return Measured.of(found)

    def reload(self, engine: str, checkpoint: Path) -> float:
        """Milliseconds of the engine's own loading of a whole checkpoint.

        The engine takes no deltas afterwards.
        """
        path, body = _RELOADS[engine]
        where: dict[str, Any] = {"model_path": str(checkpoint)}
        if engine == "vllm":
            where = {"kwargs": {"weights_path": str(checkpoint)}}
        start = time.perf_counter()
        answer = self.process.post(path, json={**body, **where}, timeout=_TIMEOUT_S)
        if answer.status_code != httpx.codes.OK:
            raise EngineError(f"{path}: HTTP {answer.status_code}: {answer.text[:500]}")
        return (time.perf_counter() - start) * 1e3


def change(tensors: Tensors, density: float) -> Tensors:
    """The tensors with some elements moved, as in `bench_data`."""
    rng, changed = np.random.default_rng(0), {}
    for name, tensor in tensors.items():
        bits = tensor.contiguous().view(-1).view(torch.int16).numpy().view(np.uint16)
        moved = synthetic_weights.change(bits, density, rng).view(np.int16)
        changed[name] = torch.from_numpy(moved).view(torch.bfloat16).view(tensor.shape)
    return changed


def measure(
    options: argparse.Namespace, scratch: Path, console: Console
) -> dict[str, dict[str, Measured]]:
    """All ways over all links, by link and way.

    Raises:
        EngineError: The engine did not start or refused.
        SyncError: It refused a sync.
    """
    base = build("qwen3", scratch / "base", num_hidden_layers=options.layers, **_WIDTHS)
    kind = ENGINES[options.engine]
    console.print(f"starting {kind.name}")
    threads = {"OMP_NUM_THREADS": str(options.threads)}
    with kind(
        base, enable_delta=True, extra_env=threads, log_path=scratch / "engine.log"
    ) as process:
        tensors = load_tensors(base)
        run = Run(process, tensors, change(tensors, options.density), options.runs)
        found: dict[str, dict[str, Measured]] = {link: {} for link in _LINKS}
        for way, link in _progress([*SENT_AS, "full"], console):
            encoding = "auto" if way == "full" else way
            found[link][way] = run.syncs(encoding, _LINKS[link], full=way == "full")
        changed = save_checkpoint(base, scratch / "changed", run.tensors)
        reloads = [run.reload(options.engine, changed) for _ in range(options.runs)]
    for link, speed in _LINKS.items():
        on_link = run.nbytes / speed * 1e3
        least, most = (round(on_link + ms, 1) for ms in (min(reloads), max(reloads)))
        found[link]["reload"] = Measured(least, most, round(min(reloads), 1), run.nbytes)
    return found


def _progress(ways: Sequence[str], console: Console) -> Iterator[tuple[str, str]]:
    rounds = [(way, link) for way in ways for link in _LINKS]
    return iter(track(rounds, "syncing", console=console, transient=True))


def show(found: Mapping[str, Mapping[str, Measured]], console: Console) -> None:
    table = Table("", *(f"{link}: ms" for link in found), "pause ms", "bytes", box=box.MARKDOWN)
    first = next(iter(found.values()))
    for way in first:
        cells = [of_link[way] for of_link in found.values()]
        pause = min(cell.pause_ms for cell in cells)
        sizes = ", ".join(f"{size:,}" for size in sorted({cell.nbytes for cell in cells}))
        sizes = sizes if way in ("auto", "full") else f"{cells[-1].nbytes:,}"
        times = [f"{cell.ms:.0f}-{cell.slowest_ms:.0f}" for cell in cells]
        table.add_row(way, *times, f"{pause:.0f}", sizes)
    console.print(table)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--engine", choices=sorted(ENGINES), default="vllm", help="which (default: %(default)s)")
    add("--layers", type=int, default=8, help="layers of its model (default: %(default)s)")
    add("--density", type=float, default=0.02, help="share that changes (default: %(default)s)")
    add("--runs", type=int, default=5, help="syncs of each way (default: %(default)s)")
    cores = len(os.sched_getaffinity(0))
    add("--threads", type=int, default=cores, help="the engine's OMP_NUM_THREADS (%(default)s)")
    add("--json", action="store_true", help="end with one line of JSON")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status: 1 where the engine failed, 130 interrupted."""
    options = parse_arguments(arguments)
    signal.signal(signal.SIGTERM, _terminate)
    console = Console(width=120, markup=False, highlight=False)
    errors = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    try:
        with tempfile.TemporaryDirectory(prefix="delta-bench-") as scratch:
            found = measure(options, Path(scratch), console)
    except (EngineError, SyncError, httpx.HTTPError) as error:
        errors.print(f"{type(error).__name__}: {error}")
        return 1
    except KeyboardInterrupt:
        errors.print("interrupted; the engine is stopped")
        return 130
    nbytes = next(iter(found.values()))["reload"].nbytes
    kind = ENGINES[options.engine].name
    console.print(f"{kind}, {nbytes:,} bytes of weights, {options.density:.1%} changed")
    show(found, console)
    if options.json:
        rows = {link: {way: asdict(one) for way, one in row.items()} for link, row in found.items()}
        print(json.dumps({"engine": options.engine, "syncs": rows}))
    return 0


def _terminate(number: int, frame: object) -> None:
    """SIGTERM: leave through the ``with`` blocks, so that the engine is stopped."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
