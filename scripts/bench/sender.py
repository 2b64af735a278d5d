"""Time the sender's passes over the weights.

    python -m scripts.bench.sender                     # 200M elements; about 2 GB of memory
    python -m scripts.bench.sender --json              # the last line is JSON

See scripts/bench/synthetic_weights.py for the weights and their changes. Times are the fastest of
--repeats runs.

columns, at one density each:
  read ms     reading both copies of the weights once, with the same threads, in the same run
  diff ms     finding the changed elements: positions, old and new bits, gap stream and digest of
              every param, params in parallel, as a sync does
  refresh ms  writing the new bits into the snapshot, as a sync does after the engine's commit
  / read      the time left of it, over "read ms"

With --device cuda the trainer's tensors are on the device, "read" and "diff" run there, and changes
are copied to the host. With --snapshot-on host every diff copies the snapshot to the device.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from delta_sender.diff.compare import Difference
from delta_sender.diff.device import SNAPSHOT_ON
from delta_sender.publish.bandwidth import LinkSpeed
from delta_sender.publish.destination import Destination
from delta_sender.publish.multi_sender import MultiSender
from engine_ext.kernels import gather_scatter
from engine_ext.resources import usable_cores
from scripts.bench import frame, sender_device, synthetic_weights
from scripts.bench.memory_read import fastest, read_time
from scripts.bench.synthetic_weights import Bits, Tensors


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


def simulated_sender(base: Tensors, bytes_per_s: float, **options: Any) -> MultiSender:
    """Return a sender whose only engine is behind a simulated link."""
    return MultiSender(
        ["http://nobody"],
        base.items(),
        connect=lambda url, options: SimulatedDestination(bytes_per_s),
        **options,
    )


def refresh(snapshot: Bits, found: Sequence[Difference], pool: ThreadPoolExecutor) -> None:
    """Write the changes into the snapshot as a sync does."""

    def write(item: tuple[slice, Difference]) -> None:
        gather_scatter.write(snapshot[item[0]], item[1].indices, item[1].new)

    params = synthetic_weights.params(snapshot)
    for _ in pool.map(write, zip(params, found, strict=True)):
        pass


def measure(old: Bits, density: float, options: argparse.Namespace) -> dict[str, float]:
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
        found = synthetic_weights.compare(old, new, pool, digested=True)
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
                "diff": fastest(
                    lambda: synthetic_weights.compare(old, new, pool, digested=True), 1
                ),
                "refresh": fastest(lambda: refresh(snapshot, found, pool), 1),
            }
            for _ in range(repeats)
        ]
        return {what: min(times[what] for times in rounds) for what in rounds[0]}


def tensors(weights: Bits, device: str = "cpu") -> Tensors:
    """Return the weights as a trainer's tensors."""
    return {
        f"model.layers.{number}.weight": synthetic_weights.as_tensor(weights[param]).to(device)
        for number, param in enumerate(synthetic_weights.params(weights))
    }


def show_passes(rows: dict[float, dict[str, float]], options: argparse.Namespace) -> None:
    """Print the seconds of the passes by density."""
    columns = ("density", "read ms", "diff ms", "diff / read", "refresh ms", "refresh / read")
    table = []
    for density, times in rows.items():
        cells = [f"{density:.1%}", f"{times['read'] * 1e3:.1f}"]
        for what in ("diff", "refresh"):
            cells += [f"{times[what] * 1e3:.1f}", f"{times[what] / times['read']:.2f}"]
        table.append(cells)
    rate = 4 * options.elements / min(times["read"] for times in rows.values()) / 1e9
    frame.show(
        f"{options.elements:,} elements, {options.threads} thread(s); both copies are read at "
        f"{rate:.1f} GB/s",
        columns,
        table,
    )


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = frame.make_parser("sender", __doc__)
    add = parser.add_argument
    add("--elements", type=int, default=200_000_000, help="weights (default: %(default)s)")
    add("--threads", type=int, default=usable_cores(), help="threads (default: all cores)")
    add("--repeats", type=int, default=15, help="runs of each pass (default: %(default)s)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="of the tensors (%(default)s)")
    on_help = "where the snapshot of CUDA tensors is, see DeltaSender (default: %(default)s)"
    add("--snapshot-on", choices=SNAPSHOT_ON, default="auto", help=on_help)
    options = parser.parse_args(arguments)
    if missing := sender_device.missing_device(options.device):
        parser.error(missing)
    options.elements -= options.elements % 4  # whole words
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    options = parse_arguments(arguments)
    return frame.run(options, lambda _: run(options))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure and print; return the passes' times over those of reading."""
    old = synthetic_weights.make_weights(options.elements, np.random.default_rng(0))
    rows = {density: measure(old, density, options) for density in synthetic_weights.DENSITIES}
    show_passes(rows, options)
    return {
        f"{what}_vs_read": {
            str(density): round(times[what] / times["read"], 3) for density, times in rows.items()
        }
        for what in ("diff", "refresh")
    }


if __name__ == "__main__":
    raise SystemExit(main())
