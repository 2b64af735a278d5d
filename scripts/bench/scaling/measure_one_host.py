"""Measure how fast parts follow each other if sender and engine share their cores.

The model without this is compared with syncs of a model whose size is between those that
`scripts.bench.scaling.check` compares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from scripts.bench.scaling.check import BETWEEN, SYNCS, check
from scripts.bench.scaling.constants import Constants
from scripts.bench.scaling.model import Prediction, predict


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
        syncs=SYNCS,
        ranks=2,
        posts_in_flight=4,
        encoding="gap8_ulp",
        step=step,
    )
    setup = replace(checked.setup, taken=checked.others)
    said = predict(setup, replace(costs, one_host_speed=1.0))
    return speed(said, checked.fastest.seconds)


def speed(said: Prediction, seconds: float) -> float:
    """Return the `Constants.one_host_speed` with which a sync takes so many seconds.

    Args:
        said: what the model says of it with a speed of 1.
    """
    slower = max(0.0, seconds - said.seconds)
    return said.further_s / (said.further_s + slower)
