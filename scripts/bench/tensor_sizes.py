"""Time syncs of the same weights as few large tensors, or as many small ones.

    python -m scripts.bench.tensor_sizes               # about 1 GB of memory
    python -m scripts.bench.tensor_sizes --json        # the last line is JSON

The engine takes every part at once and does nothing, so that this is the sender's own time, from
the trainer's tensors to the refreshed snapshot. One element in fifty changes. Times are the fastest
of --repeats syncs.

columns:
  elements       of a tensor
  tensors        at most --most, so that the smallest have fewer elements in all
  sync ms        wall time
  CPU ms         processor time of all threads
  us per tensor  wall time over tensors
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from scripts import command_line
from scripts.bench import frame, synthetic_weights
from scripts.bench.sender import simulated_sender

SIZES: Final = (1 << 24, 3 << 19, 1 << 18, 1 << 14, 1 << 9)
_EVERY: Final = 50


def measure(
    elements: int, tensors: int, repeats: int, bucket_bytes: int = 8 << 20
) -> tuple[float, float]:
    """Return wall and CPU seconds of the fastest sync of some tensors of so many elements each."""
    bits = synthetic_weights.make_weights(elements * tensors, np.random.default_rng(0))
    names = [f"model.layers.{number}.weight" for number in range(tensors)]
    rows = bits.reshape(tensors, elements)
    weights = {
        name: synthetic_weights.as_tensor(row) for name, row in zip(names, rows, strict=True)
    }
    times = []
    with simulated_sender(
        weights, math.inf, encoding="gap8_ulp", bucket_bytes=bucket_bytes
    ) as sender:
        for number in range(repeats + 1):  # the first one digests every tensor
            rows[:, number % _EVERY :: _EVERY] ^= 1
            cpu, start = time.process_time(), time.perf_counter()
            sender.sync(weights.items())
            times.append((time.perf_counter() - start, time.process_time() - cpu))
    return min(times[1:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = frame.make_parser("tensor_sizes", __doc__)
    add, positive = parser.add_argument, command_line.at_least(1)
    elements_help = "elements in all (default: %(default)s)"
    add("--elements", type=positive, metavar="N", default=12 << 24, help=elements_help)
    add("--most", type=positive, metavar="N", default=18_867, help="tensors (default: %(default)s)")
    add("--repeats", type=positive, metavar="N", default=5, help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    return frame.run(options, lambda _: run(options))


def run(options: argparse.Namespace) -> list[dict[str, float]]:
    """Measure and print; return the rows of the table."""
    found, rows = [], []
    for size in SIZES:
        tensors = max(1, min(options.most, options.elements // size))
        seconds, cpu = measure(size, tensors, options.repeats)
        times = {"sync_ms": seconds * 1e3, "cpu_ms": cpu * 1e3}
        found.append({"elements": size, "tensors": tensors, **times})
        each = f"{seconds / tensors * 1e6:,.0f}"
        rows.append([f"{size:,}", f"{tensors:,}", *(f"{ms:.1f}" for ms in times.values()), each])
    title = f"{options.elements:,} elements in all, the fastest of {options.repeats} syncs"
    frame.show(title, ("elements", "tensors", "sync ms", "CPU ms", "us per tensor"), rows)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
