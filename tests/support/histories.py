"""Run the histories of a state machine of hypothesis."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def run_histories(
    machine: type[RuleBasedStateMachine], examples: int, steps: int, *, fixed: int | None
) -> Counter[str]:
    """Run histories of a machine: the same ones every time for the seed `fixed`, else random ones.

    Returns:
        What the machine has counted in its `occurred`.
    """
    counted: Any = type(machine.__name__, (machine,), {"occurred": Counter[str]()})
    if fixed is not None:
        counted = seed(fixed)(counted)
    run_state_machine_as_test(
        counted,
        settings=settings(
            deadline=None,
            database=None,
            derandomize=fixed is not None,
            max_examples=examples,
            stateful_step_count=steps,
            suppress_health_check=list(HealthCheck),
        ),
    )
    found: Counter[str] = counted.occurred
    return found
