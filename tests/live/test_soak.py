"""The soak on live engines, shorter than ``make soak``: all figures, and no problem."""

from __future__ import annotations

import json
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from delta_sender.options import CHOICES
from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from scripts.live_engine.registry import SOAK_ARGUMENTS, SOAK_ENVIRONMENT
from scripts.soak import __main__ as soak
from scripts.soak.syncs import PAUSE_MODES, Trainer
from tests.live.programs import left_in, start

# vLLM's processes spin on both cores of a small machine, so that a sync waits at every step: one
# took 1.5 s in some runs and 10 s in others.
pytestmark = pytest.mark.timeout(960)


@pytest.mark.full
def test_syncs_under_load(
    checkpoint: Callable[[str], Path], start: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    base = checkpoint("qwen3")
    arguments = [*SOAK_ARGUMENTS["vllm"], "--delta-tuning", f"spool-dir={tmp_path}"]
    engine = start("vllm", base, extra_args=arguments, extra_env=SOAK_ENVIRONMENT)
    trainer = Trainer(tiny_models.load_tensors(base), seed=0)
    found = soak.soak(engine, trainer, tmp_path, syncs=30, quiet_s=1.0)
    assert found.problems == []
    figures = found.all()
    assert (figures["syncs"], figures["digest_checks"]) == (30, 3)
    assert figures["requests"]["failed"] == 0
    assert figures["requests"]["finished"] >= 20
    assert set(figures["by_way"]) == {
        *CHOICES, *PAUSE_MODES, "flushed", "not flushed", "full", "empty",
    }  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_program(engine: str, folder: Path) -> None:
    """Run it as ``make soak`` does, with the fresh engine at the end."""
    process = start(
        "soak", folder, "--engine", engine, "--syncs", "40", "--quiet-seconds", "1", "--json"
    )
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, err[-4000:]
    figures = json.loads(out.splitlines()[-1])
    assert (figures["engine"], figures["problems"], figures["digest_checks"]) == (engine, [], 4)
    assert "VERIFIED: bit-identical" in out
    assert left_in(folder) == []


@pytest.mark.full
@pytest.mark.usefixtures("interruptible")
def test_interrupted_it_cleans_up(folder: Path) -> None:
    """While clients ask and a sync is under way, as likely as not."""
    process = start("soak", folder, "--syncs", "40", "--quiet-seconds", "1")
    watchdog = threading.Timer(240, process.kill)
    watchdog.start()
    assert process.stdout is not None
    while "4 syncs in" not in process.stdout.readline():
        assert process.poll() is None, process.communicate()[1][-4000:]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    watchdog.cancel()
    assert process.returncode == 130, err[-4000:]
    assert "interrupted" in err
    assert left_in(folder) == []


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name: paths of vLLM's sockets in it have at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        yield Path(name)
