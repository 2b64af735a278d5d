"""Measure what a sync costs an engine by itself, without elements to speak of.

A small engine, on two ranks and on one, gets syncs of one element, of one element in each tensor,
and of the same in one part for each tensor.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from delta_sender import DeltaSender
from scripts.bench.scaling.processes import cpu_seconds, roles
from scripts.bench.scaling.timing import wait_until_idle
from scripts.live_engine.registry import ENGINES
from scripts.live_engine.tiny_models import build, load_tensors

_LAYERS = 4
_WARM = 2  # syncs that do not count


def measure(folder: Path, repeats: int, engine: str) -> dict[str, Any]:
    """Start the engines in `folder`, and return the fields of `Constants` that concern them.

    Raises:
        EngineError: It did not start.
        SyncError: It refused a sync.
    """
    path = build("qwen3", folder / "small", num_hidden_layers=_LAYERS)
    several = _measure(engine, path, 2, repeats)
    alone = _measure(engine, path, 1, repeats)
    return {**several, **{f"alone_{name}": value for name, value in alone.items()}}


def _measure(engine: str, path: Path, ranks: int, repeats: int) -> dict[str, Any]:
    """Return the fields of `Constants` of an engine with several ranks, for one with so many."""
    tensors = {name: tensor.clone() for name, tensor in load_tensors(path).items()}
    log = path.with_suffix(f".{ranks}.log")
    version, least = 0, dict.fromkeys(("one", "all", "parts"), float("inf"))
    pause_ms = float("inf")
    cpu: dict[str, dict[str, float]] = {way: {} for way in least}
    with ENGINES[engine](path, tp=ranks, enable_delta=True, log_path=log) as process:
        watched = roles(process)
        for way in least:
            changed = list(tensors.values())[: 1 if way == "one" else None]
            with DeltaSender(
                process.url,
                tensors.items(),
                base_version=version,
                encoding="gap8_ulp",
                bucket_bytes=1 if way == "parts" else 64 << 20,
                posts_in_flight=1,
            ) as sender:
                for number in range(repeats + _WARM):
                    for tensor in changed:
                        tensor.view(-1)[number].view(torch.int16).bitwise_xor_(1)
                    wait_until_idle()  # as `check` does
                    before, start = cpu_seconds(watched), time.perf_counter()
                    report = sender.sync(tensors.items())
                    seconds, after = time.perf_counter() - start, cpu_seconds(watched)
                    if number >= _WARM:
                        pause_ms = min(pause_ms, report.engine["timings_ms"]["pause_ms"])
                        least[way] = min(least[way], seconds)
                        for name in after:
                            used = after[name] - before[name]
                            cpu[way][name] = min(cpu[way].get(name, used), used)
                version = sender.version
    more = len(tensors) - 1
    part = max(least["parts"] - least["all"], 0.0) / more
    by_process = {n: max(cpu["parts"][n] - cpu["all"][n], 0.0) / more for n in cpu["all"]}
    on_ranks = [by_process.pop(f"rank {number}") for number in range(ranks)]
    return {
        "part_s": part,
        "sync_s": max(least["one"] - part, 0.0),
        "pause_s": pause_ms / 1e3,
        "part_cpu": {**by_process, "rank": sum(on_ranks) / ranks},
    }
