"""Measure the constants of the model on this machine."""

from __future__ import annotations

import platform
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from delta_sender.diff.host import compare
from engine_ext.format import decode_part, encode_part
from scripts.bench import synthetic_weights
from scripts.bench.scaling import (
    measure_http,
    measure_live,
    measure_one_host,
    measure_rank,
    measure_sender,
    measure_waiting,
)
from scripts.bench.scaling.constants import Constants
from scripts.bench.scaling.timing import take_new_pages

STEPS = (
    "drawing weights", "encodings", "sender", "memory",
    "rank", "posts", "waiting threads", "a live engine",
)  # fmt: skip
_LIVE_REPEATS = 12
_WAITING_REPEATS = 15
DENSITY = 0.02


def measure(
    elements: int, repeats: int, folder: Path, step: Callable[[str], None], engine: str
) -> Constants:
    """Measure everything; takes minutes, and 12 bytes of memory per element, or 9 GiB if more.

    Args:
        elements: of the synthetic weights; a multiple of `synthetic_weights.PARAM`.
        folder: for the live engine.
        step: called before each of `STEPS`, and before those of `check`.
        engine: of `scripts.live_engine.registry`.
    """
    step(STEPS[0])
    old = synthetic_weights.make_weights(elements, np.random.default_rng(0))
    new = synthetic_weights.change(old, DENSITY, np.random.default_rng(1))
    found: dict[str, Any] = {"machine": machine(), "engine": engine, "density": DENSITY}
    step(STEPS[1])
    # What a part needs only while it is encoded or decoded is given to the next one.
    found |= measure_sender.encoding(old, new, DENSITY, repeats)
    found |= measure_rank.decoding(old, new, repeats)
    take_new_pages()
    step(STEPS[2])
    found |= measure_sender.measure(old, new, repeats)
    step(STEPS[3])
    found |= working_bytes(old, new)
    step(STEPS[4])
    found |= measure_rank.measure(old, new, repeats)
    found |= measure_rank.alone(old, new, repeats)
    del old, new
    step(STEPS[5])
    found |= measure_http.measure(repeats)
    step(STEPS[6])
    found |= measure_waiting.measure(DENSITY, _WAITING_REPEATS)
    step(STEPS[7])
    found |= measure_live.measure(folder, _LIVE_REPEATS, engine)
    costs = Constants(**found, one_host_speed=1.0)
    return replace(costs, one_host_speed=measure_one_host.measure(costs, folder, step))


def working_bytes(old: synthetic_weights.Bits, new: synthetic_weights.Bits) -> dict[str, float]:
    """Return the bytes per changed element that encoding and decoding a part take at their peak."""
    one = next(synthetic_weights.params(old))
    changed = [compare(old[one], new[one], streams=True)]
    nnz = changed[0].indices.size
    deltas = measure_sender.deltas_of(changed, "gap8_exp")
    tracemalloc.start()
    try:
        body = encode_part(deltas, encoding="gap8_exp", current_version=1)
        encoding = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        decode_part(body)
        decoding = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    return {"encode_bytes": encoding / nnz, "decode_bytes": (decoding + len(body)) / nnz}


def machine() -> str:
    """Return the name of this machine's CPU."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
