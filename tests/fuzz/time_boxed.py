"""Run a check on examples for some seconds; an example that hangs or takes much memory fails."""

from __future__ import annotations

import os
import signal
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from scripts.process_memory import peak_resident, reset_peak

# For all targets together; `make fuzz` runs longer.
SECONDS = float(os.environ.get("FUZZ_SECONDS", "8"))
# The same examples in every run; `make fuzz` starts with another seed.
FIRST_SEED = int(os.environ.get("FUZZ_SEED", "0"))
HANGS_S = 20
# Allowed for one example, as tracemalloc does not see zstd's own memory, for one.
_RESIDENT_BYTES = 128 << 20
ROUND = settings(
    max_examples=10, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


class Hangs(Exception):
    """An example took too long."""


def check_for(
    check: Callable[[Any], None], examples: st.SearchStrategy[Any], share: float, most_bytes: int
) -> int:
    """Check examples for a share of `SECONDS`.

    Args:
        check: the test.
        examples: what it is called with.
        share: of the time.
        most_bytes: traced memory that one example can take.

    Returns:
        The number of examples checked.

    Raises:
        Hangs, AssertionError: With the smallest example found.
    """
    count = 0

    def bounded(example: Any) -> None:
        nonlocal count
        count += 1
        if not fits(*taken(example)):  # the first time might have imported something
            traced, resident = taken(example)
            assert fits(traced, resident), f"{traced} bytes, {resident} resident"

    def fits(traced: int, resident: int) -> bool:
        return traced <= most_bytes and resident <= _RESIDENT_BYTES

    def taken(example: Any) -> tuple[int, int]:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        resident = reset_peak()
        signal.alarm(HANGS_S)
        try:
            check(example)
        finally:
            signal.alarm(0)
        return tracemalloc.get_traced_memory()[1] - before, peak_resident() - resident

    def alarmed(number: int, frame: object) -> None:
        raise Hangs(f"longer than {HANGS_S} s")

    # Untraced, as imports and compilation take several times as long while they are traced.
    seed(FIRST_SEED)(ROUND(given(examples)(check)))()
    number = FIRST_SEED
    begun = time.monotonic()
    left = SECONDS * share
    old = signal.signal(signal.SIGALRM, alarmed)
    tracemalloc.start()
    try:
        while True:
            seed(number)(ROUND(given(examples)(bounded)))()
            number += 1
            passed = time.monotonic() - begun
            if passed + passed / (number - FIRST_SEED) / 2 > left:  # another round would overrun
                break
    finally:
        tracemalloc.stop()
        signal.signal(signal.SIGALRM, old)
    return count
