"""Measure how much slower a sync's work is beside threads that wait in a loop and yield.

The work is the sender's own on one host: all tensors of a small model are compared with a snapshot,
which is then brought up to date. Its threads take turns often, and each time the system may prefer
a thread that waits.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch

from delta_sender.diff.snapshot import Snapshot
from engine_ext.resources import usable_cores
from scripts.bench import synthetic_weights
from scripts.bench.scaling.timing import beside

_ROWS, _COLUMNS, _TENSORS = 1024, 1024, 64
_WAITING = "scripts.bench.scaling.waiting_thread"


def measure(density: float, repeats: int) -> dict[str, float]:
    """Return the fields of `Constants` that concern threads that wait."""
    generator = np.random.default_rng(0)
    tensors = {}
    for number in range(_TENSORS):
        bits = synthetic_weights.make_weights(_ROWS * _COLUMNS, generator)
        tensors[f"model.{number}.weight"] = (
            torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).view(_ROWS, _COLUMNS)
        )
    snapshot = Snapshot(tensors.items(), "gap8_ulp")
    _syncs(snapshot, tensors, density, 1)  # takes the memory that the others use
    alone = _syncs(snapshot, tensors, density, repeats)
    with beside(_WAITING, usable_cores()):
        waiting = _syncs(snapshot, tensors, density, repeats)
    return {"waiting_share": min(1.0, waiting / alone)}


def _syncs(
    snapshot: Snapshot, tensors: dict[str, torch.Tensor], density: float, repeats: int
) -> float:
    """Return how many cores were at work, the median of some syncs."""
    generator, cores = np.random.default_rng(1), []
    for _ in range(repeats):
        for tensor in tensors.values():
            bits = tensor.view(-1).view(torch.int16).numpy().view(np.uint16)
            bits[:] = synthetic_weights.change(bits, density, generator)
        cpu, start = time.process_time(), time.perf_counter()
        changes = {
            key: change
            for key, change in snapshot.read(tensors.items(), digests=True)
            if change is not None
        }
        snapshot.advance(changes)
        cores.append((time.process_time() - cpu) / (time.perf_counter() - start))
    return statistics.median(cores)
