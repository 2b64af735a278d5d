"""The conformance suite through the kernels; run as `test_triton` says.

Weights on the CPU are taken for those of a device, from the plan on, in Triton's interpreter.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from triton.runtime.interpreter import GridExecutor

from engine_ext.conformance.cases import CASES
from engine_ext.conformance.judge import EXACT, REFUSED, judge
from engine_ext.conformance.receivers import Project
from engine_ext.conformance.syncs import Setup, Sync
from engine_ext.format import digest_on_device
from engine_ext.kernels import triton as device
from engine_ext.placement import device_batch, device_memory, targets
from engine_ext.sync import stream_table

# A case takes half a second in the interpreter.
_QUICK = "sparse 40 %"
RUNS = [
    pytest.param(
        *(setup, sync, "scatter" in case.carried),
        id=f"{case.name}-{setup[0].__name__}-{sync.name}",
        marks=() if sync.name == _QUICK else pytest.mark.full,
    )
    for case in CASES
    for setup, sync in case.runs()
]


@pytest.fixture(autouse=True, scope="module")
def _device() -> Iterator[None]:
    launch, one_at_a_time = GridExecutor.__call__, threading.Lock()

    def launched(*arguments: Any, **options: Any) -> None:
        with one_at_a_time:  # ranks are threads here, and the interpreter is for one
            launch(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", launched)
        patch.setitem(sys.modules, "numba", None)
        for module in (
            *(device, device_batch, device_memory, targets, digest_on_device, stream_table),
        ):
            patch.setattr(module, "runs_kernels", lambda device: True)
        patch.setattr(targets, "host_bits", lambda flat: None)
        yield


@pytest.mark.parametrize(("setup", "sync", "carried"), RUNS)
def test_exact_or_refused(setup: Setup, sync: Sync, carried: bool) -> None:
    verdict = judge(setup, sync, partial(Project, "scatter", "gap8_exp"))
    assert verdict.outcome in (EXACT, REFUSED), verdict.detail
    if carried and sync.group == "sparse":
        assert verdict.outcome == EXACT, verdict.detail
