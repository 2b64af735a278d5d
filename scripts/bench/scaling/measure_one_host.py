"""Measure how fast a sync is whose sender and engine share their cores, beside what the model says.

The model without this is compared with syncs of a model whose size is between those that
`scripts.bench.scaling.check` compares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from scripts.bench.scaling.check import BETWEEN, check
from scripts.bench.scaling.constants import Constants
from scripts.bench.scaling.model import predict, sync_s
from scripts.bench.scaling.setups import Setup

_SYNCS = 5


def measure(costs: Constants, folder: Path, step: Callable[[str], None]) -> float:
    """Return `Constants.one_host_speed`; that of `costs` is not looked at.

    Raises:
        EngineError: The engine did not start, or the sender failed.
        MemoryError: Too little memory is free.
    """
    checked = check(
        BETWEEN,
        folder,
        engine=costs.engine,
        density=costs.density,
        syncs=_SYNCS,
        ranks=2,
        posts_in_flight=4,
        encoding="gap8_ulp",
        step=step,
    )
    setup = replace(checked.setup, taken=checked.others)
    return speed(setup, costs, checked.fastest.seconds)


def speed(setup: Setup, costs: Constants, seconds: float) -> float:
    """Return the `Constants.one_host_speed` with which a sync takes so many seconds."""
    fixed = sync_s(setup, costs)
    said = predict(setup, replace(costs, one_host_speed=1.0))
    return (said.seconds - fixed) / (seconds - fixed)
