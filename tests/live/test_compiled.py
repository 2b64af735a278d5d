"""vLLM as users start it: compiled, not eager.

After several syncs, a rollback and a full sync, a compiled engine has the same parameters, buffers,
texts and log probabilities as a compiled one that was started on the target checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from scripts.live_engine import quantised_checkpoints, tiny_models
from scripts.live_engine.process import EngineProcess
from tests.live.conftest import check_steps
from tests.live.quantised_cases import CASES, Case

COMPILED: Final = "--no-enforce-eager"
MODELS: Final = {
    "qwen3": Case("qwen3", {"exact": 25}),
    # Gates and shared experts have second names in the engine, which are ignored.
    "qwen3_moe": Case("qwen3_moe", {"exact": 45, "ignored": 2}),
    "qwen3_next": Case(
        "qwen3_next", {"exact": 52, "rebuilt": 1, "cast": 1, "ignored": 6}, convolutions=1
    ),
    "online-fp8": CASES["online-fp8"],
    "online-fp8-2-ranks": CASES["online-fp8-2-ranks"],
}

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # two engines compile


@pytest.mark.parametrize("name", MODELS)
def test_compiled_engine_follows_every_sync(
    name: str, start: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    case = MODELS[name]
    base = case.build(tmp_path / "base")
    steps = [tiny_models.load_tensors(base)]
    for seed in (1, 2):
        steps.append(quantised_checkpoints.step(steps[-1], seed))
    engine = start("vllm", base, **case.options(COMPILED))
    for plan in engine.get("/delta_status", params={"plan": "true"}).json()["plan"]:
        states = [row["status"] for row in plan]
        assert {state: states.count(state) for state in states} == case.planned(), plan
    last, _ = check_steps(engine, steps, case.observed)
    target = tiny_models.save_checkpoint(base, tmp_path / "target", steps[2])
    engine.stop()
    fresh = start("vllm", target, **case.options(COMPILED))
    assert case.observed(fresh) == last
    log = fresh.log_path.read_text()
    assert "enforce_eager=False" in log
    assert "Warming up model for the compilation" in log
    fresh.stop()
