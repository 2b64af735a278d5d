"""The soak on a live engine, shorter than ``make soak``: all figures, and no problem in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import soak
import tiny_models
from engine_process import EngineProcess
from sender_choice import CHOICES
from soak_syncs import PAUSE_MODES, Trainer


def test_syncs_under_load(
    checkpoint: Callable[[str], Path], start: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    base = checkpoint("qwen3")
    arguments = [*soak.ARGUMENTS["vllm"], "--delta-spool-dir", str(tmp_path)]
    engine = start("vllm", base, extra_args=arguments, extra_env=soak.ENVIRONMENT)
    trainer = Trainer(tiny_models.load_tensors(base), seed=0)
    found = soak.soak(engine, trainer, tmp_path, syncs=50, quiet_s=1.0)
    assert found.problems == []
    figures = found.all()
    assert (figures["syncs"], figures["digest_checks"]) == (50, 5)
    assert figures["requests"]["failed"] == 0
    assert figures["requests"]["finished"] >= 20
    assert set(figures["by_way"]) == {
        *CHOICES, *PAUSE_MODES, "flushed", "not flushed", "full", "empty",
    }  # fmt: skip
