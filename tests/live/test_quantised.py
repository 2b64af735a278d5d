"""Live engines whose weights are quantised, packed, or computed from the checkpoint as they load.

After several syncs, a rollback and a full sync, an engine has the same parameters, buffers, texts
and log probabilities as one that was started on the target checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.live_engine import quantised_checkpoints, tiny_models
from scripts.live_engine.process import EngineProcess
from tests.live.conftest import check_steps
from tests.live.quantised_cases import CASES

# One case of them is in every run, compiled: see test_compiled.py.
pytestmark = pytest.mark.full


@pytest.mark.parametrize("name", CASES)
def test_every_weight_follows(
    name: str, start: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    case = CASES[name]
    base = case.build(tmp_path / "base")
    steps = [tiny_models.load_tensors(base)]
    for seed in (1, 2):
        steps.append(quantised_checkpoints.step(steps[-1], seed))
    engine = start("vllm", base, **case.options())
    for plan in engine.get("/delta_status", params={"plan": "true"}).json()["plan"]:
        states = [row["status"] for row in plan]
        assert {state: states.count(state) for state in states} == case.planned(), plan
    last, reports = check_steps(engine, steps, case.observed)
    for report in reports:
        assert ("rebuild_ms" in report.engine["timings_ms"]) == ("rebuilt" in case.planned())
    target = tiny_models.save_checkpoint(base, tmp_path / "target", steps[2])
    engine.stop()
    fresh = start("vllm", target, **case.options())
    assert case.observed(fresh) == last
    fresh.stop()
