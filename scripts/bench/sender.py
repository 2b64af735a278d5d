"""Time the sender: its passes over the weights, and whole syncs over simulated links.

    python -m scripts.bench.sender                     # 200M elements; about 2 GB of memory
    python -m scripts.bench.sender --json              # the last line is JSON
    python -m scripts.bench.sender --real-steps 0      # needs no transformers

See scripts/bench/synthetic_weights.py for the weights and their changes. Times are the fastest of
--repeats runs.

columns of the first table, at one density each:
  read ms     reading both copies of the weights once, with the same threads, in the same run
  diff ms     finding the changed elements: positions, old and new bits, gap stream and digest of
              every param, params in parallel, as a sync does
  refresh ms  writing the new bits into the snapshot, as a sync does after the engine's commit
  / read      the time left of it, over "read ms"
columns of the tables of whole syncs, from the trainer's tensors to the refreshed snapshot:
  <link>: ms           time of the sync. A link is simulated: a part is answered after the time in
                       which the link would carry its bytes; the engine behind it does nothing (see
                       scripts/bench/end_to_end.py for live engines).
  bytes                of all parts of the sync; for auto, on each link
  picked on each link  encodings that auto chose
  all weights          all bytes over the link's speed, computed
The last table is of a real step: REINFORCE on the demo's policy, as in scripts/bench/codec.py.

With --device cuda the trainer's tensors are on the device, "read" and "diff" run there, and changes
are copied to the host. With --snapshot-on host every diff copies the snapshot to the device.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from delta_sender.diff.compare import Comparisons, Difference
from delta_sender.diff.device import SNAPSHOT_ON
from delta_sender.publish.bandwidth import LinkSpeed
from delta_sender.publish.destination import Destination
from delta_sender.publish.multi_sender import MultiSender
from delta_sender.results import SyncReport
from engine_ext.kernels import gather_scatter
from engine_ext.resources import usable_cores
from scripts import command_line
from scripts.bench import sender_device, synthetic_weights
from scripts.bench.memory_read import fastest, read_time

LINKS = {"1 Gbit/s": 125e6, "300 MB/s": 300e6, "10 Gbit/s": 1.25e9}
SENT_AT = 0.02
LEARNING_RATE = 1e-6  # of the real step
SENT_AS = ("deltas", "deltas_zstd", "gap8_exp", "gap8_ulp", "auto")
_Bits = NDArray[np.uint16]
_Tensors = dict[str, torch.Tensor]
_Syncs = dict[str, dict[str, tuple[float, SyncReport]]]  # by link and encoding


class SimulatedDestination(Destination):
    """Take what is sent, at the speed of a link in bytes/s."""

    def __init__(self, bytes_per_s: float) -> None:
        self.speed = LinkSpeed()
        self.highest_posted = 0
        self._bytes_per_s = bytes_per_s

    def deliver(self, body: bytes, version: int, part: int, last: bool) -> dict[str, Any]:
        answer = {"status": "committed" if last else "staged", "version": version}
        with self.speed.crossing() as start:
            time.sleep(len(body) / self._bytes_per_s)
            ended = time.perf_counter()
            self.speed.note(len(body), ended - start, answer, ended)
        return answer


def simulated_sender(base: _Tensors, bytes_per_s: float, **options: Any) -> MultiSender:
    """Return a sender whose only engine is behind a simulated link."""
    return MultiSender(
        ["http://nobody"],
        base.items(),
        connect=lambda url, options: SimulatedDestination(bytes_per_s),
        **options,
    )


def diff(old: _Bits, new: _Bits, pool: ThreadPoolExecutor) -> list[Difference]:
    """Find the changes as a sync does."""
    comparisons = Comparisons(pool, streams=True)
    begun = [
        comparisons.begin(
            gather_scatter.signed(old[param]),
            gather_scatter.signed(new[param]),
            f"model.layers.{number}.weight",
        )
        for number, param in enumerate(synthetic_weights.params(old))
    ]
    return [wait() for wait in begun]


def refresh(snapshot: _Bits, found: Sequence[Difference], pool: ThreadPoolExecutor) -> None:
    """Write the changes into the snapshot as a sync does."""

    def write(item: tuple[slice, Difference]) -> None:
        gather_scatter.write(snapshot[item[0]], item[1].indices, item[1].new)

    params = synthetic_weights.params(snapshot)
    for _ in pool.map(write, zip(params, found, strict=True)):
        pass


def measure(old: _Bits, density: float, options: argparse.Namespace) -> dict[str, float]:
    """Return the seconds of every pass at one density."""
    threads, repeats = options.threads, options.repeats
    number = synthetic_weights.DENSITIES.index(density)
    new = synthetic_weights.change(old, density, np.random.default_rng([0, number]))
    if options.device != "cpu":
        here, there = (tensors(weights, options.device) for weights in (old, new))
        nnz = int(np.count_nonzero(old != new))
        return sender_device.measure(
            here, there, options.snapshot_on, nnz, lambda do: fastest(do, repeats)
        )
    with ThreadPoolExecutor(threads) as pool:
        found = diff(old, new, pool)
        if sum(one.indices.size for one in found) != np.count_nonzero(old != new):
            raise AssertionError("the diff did not find every change")
        snapshot = old.copy()
        refresh(snapshot, found, pool)
        if not np.array_equal(snapshot, new):
            raise AssertionError("the snapshot was not refreshed")
        # In turn, as the machine's speed varies over time.
        rounds = [
            {
                "read": read_time(old, new, pool, 1),
                "diff": fastest(lambda: diff(old, new, pool), 1),
                "refresh": fastest(lambda: refresh(snapshot, found, pool), 1),
            }
            for _ in range(repeats)
        ]
        return {what: min(times[what] for times in rounds) for what in rounds[0]}


def tensors(weights: _Bits, device: str = "cpu") -> _Tensors:
    """Return the weights as a trainer's tensors."""
    return {
        f"model.layers.{number}.weight": _tensor(weights[param]).to(device)
        for number, param in enumerate(synthetic_weights.params(weights))
    }


def real_step(steps: int) -> tuple[_Tensors, _Tensors, float]:
    """Return a trainer's tensors before and after the last of some steps, and the density."""
    from scripts.bench.real_steps import train

    training = train(LEARNING_RATE, steps)
    sides = (training.old, training.new)
    before, after = ({name: _tensor(bits) for name, bits in side.items()} for side in sides)
    return before, after, training.density


def _tensor(bits: _Bits) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def sync_over(
    link: float, encoding: str, old: _Tensors, steps: Sequence[_Tensors], **options: Any
) -> tuple[float, SyncReport]:
    """Return seconds and report of the fastest sync after the first, which measures the link."""
    syncs: list[tuple[float, SyncReport]] = []
    with simulated_sender(old, link, encoding=encoding, **options) as sender:
        for trained in steps:
            start = time.perf_counter()
            (report,) = sender.sync(trained.items()).values()
            syncs.append((time.perf_counter() - start, report))
    return min(syncs[1:], key=lambda sync: sync[0])


def all_syncs(old: _Tensors, new: _Tensors, options: argparse.Namespace) -> _Syncs:
    """Sync between two versions, some times each, in all encodings over all links."""
    here = {name: tensor.to(options.device) for name, tensor in old.items()}
    there = {name: tensor.to(options.device) for name, tensor in new.items()}
    steps = [there, here] * (1 + options.repeats // 6)
    kept = {"bucket_bytes": options.bucket_bytes, "snapshot_on": options.snapshot_on}
    return {
        link: {encoding: sync_over(speed, encoding, old, steps, **kept) for encoding in SENT_AS}
        for link, speed in LINKS.items()
    }


def show_passes(rows: dict[float, dict[str, float]], numel: int, console: Console) -> None:
    """Print the seconds of the passes by density."""
    columns = ("density", "read ms", "diff ms", "diff / read", "refresh ms", "refresh / read")
    table = Table(*columns, box=box.MARKDOWN)
    for density, times in rows.items():
        cells = [f"{density:.1%}", f"{times['read'] * 1e3:.1f}"]
        for what in ("diff", "refresh"):
            cells += [f"{times[what] * 1e3:.1f}", f"{times[what] / times['read']:.2f}"]
        table.add_row(*cells)
    console.print(table)
    rate = 4 * numel / min(times["read"] for times in rows.values()) / 1e9
    console.print(f"both copies are read at {rate:.1f} GB/s")


def show_syncs(found: _Syncs, full_bytes: int, console: Console) -> None:
    """Print whole syncs by encoding and link."""
    columns = ("encoding", *(f"{link}: ms" for link in found), "bytes", "picked on each link")
    table = Table(*columns, box=box.MARKDOWN)
    for encoding in SENT_AS:
        cells = [found[link][encoding] for link in found]
        picked = ["+".join(report.picked) for _, report in cells]
        times = [_milliseconds(seconds) for seconds, _ in cells]
        nbytes = sorted({report.wire_bytes for _, report in cells})
        nbytes = nbytes if encoding == "auto" else nbytes[-1:]
        sizes = ", ".join(f"{size:,}" for size in nbytes)
        table.add_row(encoding, *times, sizes, ", ".join(picked) if encoding == "auto" else "")
    times = [_milliseconds(full_bytes / LINKS[link]) for link in found]
    table.add_row("all weights", *times, f"{full_bytes:,}", "computed, link only")
    console.print(table)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.{int(seconds < 0.1)}f}"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line.make_parser("scripts.bench.sender", __doc__)
    add = parser.add_argument
    add("--elements", type=int, default=200_000_000, help="weights (default: %(default)s)")
    add("--threads", type=int, default=usable_cores(), help="threads (default: all cores)")
    repeats_help = "runs of each pass; syncs run a third as often (default: %(default)s)"
    add("--repeats", type=int, default=15, help=repeats_help)
    bucket_help = "bytes of a part before compression, in syncs (default: %(default)s)"
    add("--bucket-bytes", type=int, default=4 << 20, help=bucket_help)
    real_help = "steps of the real training run, 0 for none (default: %(default)s)"
    add("--real-steps", type=int, default=5, help=real_help)
    add("--device", choices=("cpu", "cuda"), default="cpu", help="of the tensors (%(default)s)")
    on_help = "where the snapshot of CUDA tensors is, see DeltaSender (default: %(default)s)"
    add("--snapshot-on", choices=SNAPSHOT_ON, default="auto", help=on_help)
    add("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(arguments)
    if missing := sender_device.missing_device(options.device):
        parser.error(missing)
    options.elements -= options.elements % 4  # whole words
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    options = parse_arguments(arguments)
    console = Console(width=120)
    old = synthetic_weights.make_weights(options.elements, np.random.default_rng(0))
    rows = {density: measure(old, density, options) for density in synthetic_weights.DENSITIES}
    console.print(f"{options.elements:,} elements, {options.threads} thread(s)")
    show_passes(rows, options.elements, console)

    first = synthetic_weights.change(old, SENT_AT, np.random.default_rng(1))
    syncs = {"sync_ms": all_syncs(tensors(old), tensors(first), options)}
    console.print(f"whole syncs, {SENT_AT:.0%} changed, parts of {options.bucket_bytes:,} bytes")
    show_syncs(syncs["sync_ms"], old.nbytes, console)
    if options.real_steps:
        before, after, density = real_step(options.real_steps)
        syncs["real_sync_ms"] = all_syncs(before, after, options)
        nbytes = sum(tensor.nbytes for tensor in before.values())
        console.print(f"whole syncs of a real step, {nbytes:,} bytes, {density:.2%} changed")
        show_syncs(syncs["real_sync_ms"], nbytes, console)
    found: dict[str, Any] = {
        f"{what}_vs_read": {
            str(density): round(times[what] / times["read"], 3) for density, times in rows.items()
        }
        for what in ("diff", "refresh")
    }
    for what, by_link in syncs.items():
        found[what] = {
            link: {encoding: round(cell[0] * 1e3, 1) for encoding, cell in cells.items()}
            for link, cells in by_link.items()
        }
    if options.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
