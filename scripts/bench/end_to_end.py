"""Time syncs to a live engine over simulated links, against a reload of the whole checkpoint.

    python -m scripts.bench.end_to_end                         # vLLM; about 2 GB of memory
    python -m scripts.bench.end_to_end --engine sglang --json  # the last line is JSON

Starts an engine with a random Qwen3 on this machine, and syncs it with every encoding over every
link. A link is simulated: the client sends each part only after the time in which the link would
carry its bytes; "no link" does not wait.

rows:
  <encoding>  syncs with this encoding; see `delta-send --help` for auto
  full        a sync that sends every tensor dense
  reload      computed time of the checkpoint's bytes on the link, plus the measured time in which
              the engine loads it from a folder (vLLM's `reload_weights`, SGLang's
              `/update_weights_from_disk`). Writing the checkpoint on both machines is not counted.
columns:
  <link>: ms  the fastest and the slowest of --runs syncs, from the trainer's tensors to the answer
              that the engine has committed
  pause ms    time for which generation was paused: of the fastest sync, and the least of all links
  bytes       of all parts of the sync; for auto and full, on each link where they differ
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from rich.console import Console
from rich.progress import track

from delta_sender import DeltaSender, SyncError, SyncReport
from engine_ext.resources import usable_cores
from scripts.bench import frame, synthetic_weights
from scripts.live_engine.process import EngineError, EngineProcess
from scripts.live_engine.registry import ENGINES
from scripts.live_engine.tiny_models import build, load_tensors, save_checkpoint

LINKS: Final = {"1 Gbit/s": 125e6, "300 MB/s": 300e6, "10 Gbit/s": 1.25e9, "no link": float("inf")}
SENT_AS: Final = ("deltas", "deltas_zstd", "gap8_exp", "gap8_ulp", "auto")
_BUCKET_BYTES: Final = 4 << 20
_TIMEOUT_S: Final = 600.0


class SlowTransport(httpx.HTTPTransport):
    """Sends each request after the time that a link of `bytes_per_s` takes for its body."""

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
    """Figures of one way to update an engine: of its fastest sync, and the time of its slowest."""

    ms: float
    slowest_ms: float
    pause_ms: float
    nbytes: int

    @classmethod
    def of(cls, syncs: Sequence[tuple[float, SyncReport]]) -> Measured:
        """Summarise syncs, given as seconds and report of each."""
        times = [round(seconds * 1e3, 1) for seconds, _ in syncs]
        fastest = syncs[times.index(min(times))][1]
        pause_ms = round(fastest.engine["timings_ms"]["pause_ms"], 1)
        return cls(min(times), max(times), pause_ms, fastest.wire_bytes)


@dataclass
class LiveEngine:
    """A live engine that is synced back and forth between two sets of weights.

    Attributes:
        process: the engine.
        tensors: what it holds.
        other: what the next sync sends; the sync swaps the two.
        runs: number of syncs per measurement.
        version: of the engine's weights.
    """

    process: EngineProcess
    tensors: synthetic_weights.Tensors
    other: synthetic_weights.Tensors
    runs: int
    version: int = 0

    @property
    def nbytes(self) -> int:
        """Return the bytes of all weights."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def syncs(self, encoding: str, speed: float, *, full: bool = False) -> Measured:
        """Time `runs` syncs with an encoding over a link of `speed` bytes/s.

        Raises:
            EngineError: The engine was not at the version that was sent before.
            SyncError: The engine refused a sync.
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
            sender.sync(self.tensors.items())  # gets the plan and digests every tensor
            for _ in range(self.runs):
                self.tensors, self.other = self.other, self.tensors
                send = sender.sync_full if full else sender.sync
                start = time.perf_counter()
                report = send(self.tensors.items())
                found.append((time.perf_counter() - start, report))
                if report.full != full:
                    raise EngineError("the engine was not at the version that was sent before")
            self.version = sender.version
        return Measured.of(found)

    def reload(self, engine: str, checkpoint: Path) -> float:
        """Return the milliseconds in which the engine itself loads a whole checkpoint.

        The engine refuses deltas afterwards.
        """
        path, body = "/update_weights_from_disk", dict[str, Any](model_path=str(checkpoint))
        if engine == "vllm":
            kwargs = {"weights_path": str(checkpoint)}
            path, body = "/collective_rpc", {"method": "reload_weights", "kwargs": kwargs}
        start = time.perf_counter()
        answer = self.process.post(path, json=body, timeout=_TIMEOUT_S)
        if answer.status_code != httpx.codes.OK:
            raise EngineError(f"{path}: HTTP {answer.status_code}: {answer.text[:500]}")
        return (time.perf_counter() - start) * 1e3


def measure(
    options: argparse.Namespace, scratch: Path, console: Console
) -> dict[str, dict[str, Measured]]:
    """Measure all ways over all links; return figures by link and way.

    Raises:
        EngineError: The engine did not start, or one of its own routes failed.
        SyncError: The engine refused a sync.
    """
    sizes = {**synthetic_weights.QWEN3_SIZES, "num_hidden_layers": options.layers}
    base = build("qwen3", scratch / "base", **sizes)
    kind = ENGINES[options.engine]
    console.print(f"starting {kind.name}")
    threads = {"OMP_NUM_THREADS": str(options.threads)}
    log = scratch / "engine.log"
    with kind(base, enable_delta=True, extra_env=threads, log_path=log) as process:
        tensors = load_tensors(base)
        engine = LiveEngine(
            process,
            tensors,
            synthetic_weights.change_tensors(tensors, options.density),
            options.runs,
        )
        found: dict[str, dict[str, Measured]] = {link: {} for link in LINKS}
        rounds = [(way, link) for way in (*SENT_AS, "full") for link in LINKS]
        for way, link in track(rounds, "syncing", console=console, transient=True):
            encoding = "auto" if way == "full" else way
            found[link][way] = engine.syncs(encoding, LINKS[link], full=way == "full")
        changed = save_checkpoint(base, scratch / "changed", engine.tensors)
        reloads = [engine.reload(options.engine, changed) for _ in range(options.runs)]
    for link, speed in LINKS.items():
        on_link = engine.nbytes / speed * 1e3
        least, most = (round(on_link + ms, 1) for ms in (min(reloads), max(reloads)))
        found[link]["reload"] = Measured(least, most, round(min(reloads), 1), engine.nbytes)
    return found


def show(title: str, found: Mapping[str, Mapping[str, Measured]]) -> None:
    """Print the figures by way and link."""
    rows = []
    first = next(iter(found.values()))
    for way in first:
        cells = [of_link[way] for of_link in found.values()]
        pause = min(cell.pause_ms for cell in cells)
        sizes = ", ".join(f"{size:,}" for size in sorted({cell.nbytes for cell in cells}))
        sizes = sizes if way in ("auto", "full") else f"{cells[-1].nbytes:,}"
        times = [f"{cell.ms:.0f}-{cell.slowest_ms:.0f}" for cell in cells]
        rows.append([way, *times, f"{pause:.0f}", sizes])
    frame.show(title, ["", *(f"{link}: ms" for link in found), "pause ms", "bytes"], rows)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    epilog = "exit status: 0 measured; 1 the engine failed; 2 bad usage; 130 interrupted"
    parser = frame.make_parser("end_to_end", __doc__, epilog)
    add = parser.add_argument
    add("--engine", choices=sorted(ENGINES), default="vllm", help="engine to sync (%(default)s)")
    add("--layers", type=int, default=8, help="layers of its model (default: %(default)s)")
    add("--density", type=float, default=0.02, help="share that changes (default: %(default)s)")
    add("--runs", type=int, default=5, help="syncs of each way (default: %(default)s)")
    cores = usable_cores()
    add("--threads", type=int, default=cores, help="the engine's OMP_NUM_THREADS (%(default)s)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    options = parse_arguments(arguments)
    failures = (EngineError, SyncError, httpx.HTTPError)
    stopped = "interrupted; the engine is stopped"
    return frame.run(options, lambda folder: run(options, folder), failures, stopped)


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure and print; return what the JSON has."""
    found = measure(options, folder, Console(width=120, markup=False, highlight=False))
    nbytes = next(iter(found.values()))["reload"].nbytes
    kind = ENGINES[options.engine].name
    show(f"{kind}, {nbytes:,} bytes of weights, {options.density:.1%} changed", found)
    rows = {link: {way: asdict(m) for way, m in by.items()} for link, by in found.items()}
    return {"engine": options.engine, "syncs": rows}


if __name__ == "__main__":
    raise SystemExit(main())
