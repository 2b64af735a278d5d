"""Runs a check on examples for some seconds; an example that hangs or takes much memory fails."""

from __future__ import annotations

import os
import signal
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

# Of all targets together; `make fuzz` takes longer.
SECONDS = float(os.environ.get("FUZZ_SECONDS", "12"))
# The same examples every time, as far as the time goes; `make fuzz` begins elsewhere.
FIRST_SEED = int(os.environ.get("FUZZ_SEED", "0"))
HANGS_S = 20
ROUND = settings(
    max_examples=30, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


class Hangs(Exception):
    """An example took longer than any may."""


def hammer(
    check: Callable[[Any], None], examples: st.SearchStrategy[Any], share: float, most_bytes: int
) -> int:
    """Check examples until a share of the time is over.

    Args:
        most_bytes: that checking one example may take beyond what was there before.

    Returns:
        How many examples were checked.

    Raises:
        Hangs, AssertionError: with the smallest example that was found.
    """
    count = 0

    def bounded(example: Any) -> None:
        nonlocal count
        count += 1
        taken = traced(example)
        if taken > most_bytes:
            taken = traced(example)  # the first time may have imported something
        assert taken <= most_bytes, f"{taken} bytes"

    def traced(example: Any) -> int:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        signal.alarm(HANGS_S)
        try:
            check(example)
        finally:
            signal.alarm(0)
        return tracemalloc.get_traced_memory()[1] - before

    def alarmed(number: int, frame: object) -> None:
        raise Hangs(f"longer than {HANGS_S} s")

    number = FIRST_SEED
    deadline = time.monotonic() + SECONDS * share
    old = signal.signal(signal.SIGALRM, alarmed)
    tracemalloc.start()
    try:
        while time.monotonic() < deadline:
            seed(number)(ROUND(given(examples)(bounded)))()
            number += 1
    finally:
        tracemalloc.stop()
        signal.signal(signal.SIGALRM, old)
    return count
