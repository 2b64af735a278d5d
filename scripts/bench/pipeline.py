"""Time whole syncs over a link with a round trip, against the slowest of their stages alone.

    python -m scripts.bench.pipeline          # about 2 GB of memory
    python -m scripts.bench.pipeline --json   # the last line is JSON

A sender syncs the endpoints that engines serve, over a PyTorch model in place of an engine. They
run in a process of their own, and so does the link between them: a TCP relay that adds half of the
round trip in each direction, and lets all connections together send --megabytes-per-second in each.
TCP's own slow start is not simulated. See scripts/bench/synthetic_weights.py for the weights.

stages, each alone, with all threads that it has in a sync:
  diff     comparing the weights with the snapshot
  encode   building and encoding every part from the differences
  link     as many bytes as all parts have, in one go over the same relay; with its round trip
  receive  checking every part while it is written to the spool
  stage    every part, at once, on the receiver; nothing is written yet
  cores    processor time of all of a sync's processes but the relay, over the cores: less than this
           no sync can take on this machine
the sync:
  wall ms          from the trainer's tensors to the answer that the receiver has committed
  / slowest stage  that over the slowest stage alone; "cores" is none
Every time is the least of --repeats; syncs and stages are timed in turn.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from delta_sender import DeltaSender
from delta_sender.diff.snapshot import Snapshot
from delta_sender.encode.acked_state import AckedState
from delta_sender.encode.encoding_policy import EncodingPolicy
from delta_sender.encode.part_builder import ChangedTensors, PartBuilder
from delta_sender.encode.sync_round import Attempt, SyncRound
from delta_sender.publish.bandwidth import LinkSpeed
from delta_sender.results import SyncReport
from delta_sender.run import Run
from engine_ext.format import ENCODINGS
from engine_ext.resources import usable_cores
from scripts import command_line
from scripts.bench import frame, pipeline_link, pipeline_receiver, synthetic_weights
from scripts.bench.server_process import process
from scripts.bench.synthetic_weights import Tensors

SPEEDS: Final = (50, 200)  # megabytes per second
STAGES: Final = ("diff", "encode", "link", "receive", "stage", "cores")
_PARAM: Final = 1 << 22  # elements of one layer; half of a part, by default
_NORM: Final = 1 << 12  # of these, in a tensor of their own, as a layer has small ones


class Stages:
    """The stages on the sender's side, each alone.

    Args:
        old, new: what the snapshot holds, and what is sent.
    """

    def __init__(self, old: Tensors, new: Tensors, options: argparse.Namespace) -> None:
        self._snapshot = Snapshot(old.items(), options.encoding)
        self._new, self._options = new, options

    def diff(self) -> float:
        """Return the seconds of comparing all tensors."""
        start = time.perf_counter()
        for _ in self._snapshot.read(self._new.items(), changes_in_memory=sys.maxsize):
            pass
        return time.perf_counter() - start

    def encode(self) -> tuple[float, list[bytes]]:
        """Return the seconds of building and encoding all parts, and their bodies."""
        run = Run.opened()
        shared = SyncRound(1, run, full=False, destinations=1, posts_in_flight=1, started=0.0)
        shared.read(self._snapshot.read(self._new.items()))
        policy = EncodingPolicy(self._options.encoding)
        state = AckedState(self._snapshot, 0)
        names = [{"name": name, "status": "exact", "digested": True} for name in self._new]
        state.read_plan([names], keep_digest=True, full=False)
        start = time.perf_counter()
        attempt = Attempt(1, False, policy, policy)
        builder = PartBuilder(
            shared,
            attempt,
            ChangedTensors(shared, attempt, state, LinkSpeed()),
            base_version=0,
            bucket_bytes=self._options.bucket_bytes,
        )
        bodies = [part.body for part in builder]
        found = [body.result() for body in bodies]
        return time.perf_counter() - start, found


class Syncs:
    """Syncs of one receiver, back and forth between two sets of weights.

    Args:
        server: process id of the receiver.
        sides: what it holds, and what the next sync sends; each sync swaps the two.
    """

    def __init__(
        self, url: str, server: int, sides: list[Tensors], options: argparse.Namespace
    ) -> None:
        self._url, self._pids = url, [os.getpid(), server]
        self._sides, self._options = sides, options
        self._version = 0

    def sync(self) -> tuple[float, float, SyncReport]:
        """Sync by a sender that has read the plan; return seconds, processor time and report."""
        held, wanted = self._sides
        with DeltaSender(
            self._url,
            held.items(),
            base_version=self._version,
            encoding=self._options.encoding,
            bucket_bytes=self._options.bucket_bytes,
            posts_in_flight=self._options.posts_in_flight,
        ) as sender:
            sender.sync(held.items())  # without changes; it also opens a connection
            start, before = time.perf_counter(), processor_time(self._pids)
            report = sender.sync(wanted.items())
            processors = processor_time(self._pids) - before
            seconds = time.perf_counter() - start
        self._version = report.version
        self._sides.reverse()
        return seconds, processors, report


def make_tensors(bits: synthetic_weights.Bits) -> Tensors:
    """Return weights as a trainer's tensors."""
    weights = synthetic_weights.as_tensor(bits)
    tensors = {}
    for number, start in enumerate(range(0, bits.size, _PARAM)):
        tensors[f"model.layers.{number}.norm.weight"] = weights[start : start + _NORM]
        tensors[f"model.layers.{number}.mlp.weight"] = weights[start + _NORM : start + _PARAM]
    return tensors


def processor_time(pids: Sequence[int]) -> float:
    """Return the seconds of processor time that processes have taken."""
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")


def measure(
    megabytes_per_s: int, sides: list[Tensors], options: argparse.Namespace
) -> dict[str, Any]:
    """Time stages and syncs over a link of one speed."""
    old, new = sides
    speed, round_trip = megabytes_per_s * 1e6, options.round_trip / 1e3
    ours = Stages(old, new, options)
    bodies = ours.encode()[1]
    theirs = pipeline_receiver.Stages(old, bodies)
    nbytes = sum(map(len, bodies))
    stages: dict[str, list[float]] = {name: [] for name in STAGES}
    syncs: list[float] = []
    with (
        process(pipeline_receiver.serve, old) as (port, server),
        process(pipeline_link.serve, port, speed, round_trip) as ((port, sink), _),
    ):
        url = f"http://{pipeline_link.HOST}:{port}"
        syncing = Syncs(url, server, [old, new], options)
        for _ in range(options.repeats):
            stages["diff"].append(ours.diff())
            stages["encode"].append(ours.encode()[0])
            stages["link"].append(pipeline_link.send_through(sink, nbytes))
            stages["receive"].append(theirs.receive())
            stages["stage"].append(theirs.stage())
            seconds, processors, report = syncing.sync()
            syncs.append(seconds)
            stages["cores"].append(processors / usable_cores())
            if report.parts != len(bodies):
                raise RuntimeError(f"{report.parts} parts, not {len(bodies)}")
    theirs.close()
    least = {name: min(times) for name, times in stages.items()}
    slowest = max(least[name] for name in STAGES if name != "cores")
    return {
        "bytes": nbytes,
        "parts": len(bodies),
        "stages_ms": {name: round(seconds * 1e3, 1) for name, seconds in least.items()},
        "wall_ms": round(min(syncs) * 1e3, 1),
        "over_slowest": round(min(syncs) / slowest, 2),
    }


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = frame.make_parser("pipeline", __doc__)
    add = parser.add_argument
    add("--elements", type=int, default=200_000_000, help="weights (default: %(default)s)")
    add("--density", type=float, default=0.2, help="share that changes (default: %(default)s)")
    add("--encoding", default="deltas_zstd", choices=ENCODINGS, help="(default: %(default)s)")
    bucket_help = "bytes of a part before compression (default: %(default)s)"
    add("--bucket-bytes", type=int, default=8 << 20, help=bucket_help)
    speed_help = "of the link in each direction; repeatable (default: 50 and 200)"
    add("--megabytes-per-second", type=int, action="append", metavar="N", help=speed_help)
    posts_help = "parts that are posted at once (default: %(default)s)"
    add("--posts-in-flight", type=command_line.at_least(1), default=4, help=posts_help)
    trip_help = "milliseconds there and back (default: %(default)s)"
    add("--round-trip", type=float, default=40.0, help=trip_help)
    add("--repeats", type=command_line.at_least(1), default=5, help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    options.elements = max(1, options.elements // _PARAM) * _PARAM  # whole layers
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    options = parse_arguments(arguments)
    return frame.run(options, lambda _: run(options))


def run(options: argparse.Namespace) -> dict[int, dict[str, Any]]:
    """Measure and print; return the figures by the link's speed."""
    old = synthetic_weights.make_weights(options.elements, np.random.default_rng(0))
    new = synthetic_weights.change(old, options.density, np.random.default_rng(1))
    sides = [make_tensors(old), make_tensors(new)]
    speeds = options.megabytes_per_second or SPEEDS
    found = {speed: measure(speed, sides, options) for speed in speeds}
    rows = []
    for speed, one in found.items():
        rows.append([f"{speed} MB/s", str(one["parts"]), f"{one['bytes']:,}"])
        rows[-1] += [f"{one['stages_ms'][name]:.0f}" for name in STAGES]
        rows[-1] += [f"{one['wall_ms']:.0f}", f"{one['over_slowest']:.2f}"]
    frame.show(
        f"{options.elements:,} weights, {options.density:.0%} changed, {options.encoding}, round "
        f"trip {options.round_trip:g} ms, {usable_cores()} cores",
        ("link", "parts", "bytes", *(f"{n} ms" for n in STAGES), "wall ms", "/ slowest stage"),
        rows,
    )
    return found


if __name__ == "__main__":
    raise SystemExit(main())
