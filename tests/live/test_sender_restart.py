"""The sender's command line with a state file: it is killed and resumes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.live.programs import environment
from tests.support.lossy_proxy import LossyProxy
from tests.support.plain_trainer import Trainer, model_digest

KINDS = ["vllm", "sglang"]


class Program:
    """Runs the sender's command line on the trainer's checkpoints, through a proxy."""

    def __init__(self, engine: EngineProcess, proxy: LossyProxy, base: Path, folder: Path) -> None:
        self.engine, self.proxy = engine, proxy
        self.trainer = Trainer(tiny_models.load_tensors(base))
        self.state = folder / "state.json"
        self._model, self._folder, self._saved = base, folder, 0

    def save(self) -> Path:
        """The trainer's weights as a checkpoint."""
        self._saved += 1
        folder = self._folder / f"step{self._saved}"
        return tiny_models.save_checkpoint(self._model, folder, self.trainer.tensors)

    def step(self) -> Path:
        """The next checkpoint."""
        self.trainer.step()
        return self.save()

    def start(self, base: Path, target: Path, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "delta_sender"]
        command += ["--base", str(base), "--target", str(target)]
        command += ["--url", self.proxy.url, "--state", str(self.state), *more]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=environment(), stdout=pipe, stderr=pipe, text=True)

    def says(self, base: Path, target: Path) -> str:
        """Its output for a sync that went well."""
        self.proxy.recover()
        program = self.start(base, target)
        said, errors = program.communicate(timeout=120)
        assert program.returncode == 0, errors
        assert self.known()["engines"][self.proxy.url]["version"] == self.version()
        return said

    def is_killed(self, base: Path, target: Path, lost: str, *more: str, part: int = 1) -> None:
        """Let the proxy lose something, and kill the program once it has."""
        self.proxy.lose(lost, part)
        program = self.start(base, target, *more)
        try:
            assert self.proxy.lost.wait(120)
        finally:
            program.send_signal(signal.SIGKILL)
            program.communicate()

    def known(self) -> dict[str, Any]:
        """The contents of the file."""
        found: dict[str, Any] = json.loads(self.state.read_bytes())
        return found

    def version(self) -> int:
        return int(self.engine.delta_status().version.number)

    def holds(self, tensors: dict[str, torch.Tensor]) -> bool:
        scan = self.engine.get("/delta_digest", params={"scan": "true"}).json()
        return (scan["digest"], scan["corrupted"]) == (model_digest(tensors).hex(), [])


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_killed_and_goes_on(
    kind: str,
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    tmp_path: Path,
) -> None:
    """It resumes without a version on its command line and without a full sync."""
    timeout = [
        "--delta-tuning",
        "stage-timeout=2",
    ]  # until what a killed sender has staged is dropped
    engine = start(kind, checkpoint("qwen3"), extra_args=timeout)
    with LossyProxy(engine.port) as proxy:
        program = Program(engine, proxy, checkpoint("qwen3"), tmp_path)
        trainer = program.trainer
        first, second = program.save(), program.step()
        assert program.says(first, second).startswith("version 0 -> 1: committed; ")
        assert program.holds(trainer.tensors)

        held = dict(trainer.tensors)
        third = program.step()
        # A part has one tensor. The last is posted once what it commits is on disk.
        last = len(trainer.tensors)
        program.is_killed(second, third, "requests", "--bucket-bytes", "1", part=last)
        assert program.version() == program.known()["engines"][proxy.url]["version"] == 1
        assert program.holds(held)
        # 2 was about to be committed: it stands for those weights, and for no others.
        assert program.says(second, third).startswith("version 1 -> 3: committed; ")
        assert program.holds(trainer.tensors)

        fourth, fifth = program.step(), program.step()
        program.is_killed(third, fourth, "answers")
        assert (program.version(), program.known()["in_flight"]["version"]) == (4, 4)
        assert program.says(fourth, fifth).startswith("version 4 -> 5: committed; ")
        assert program.holds(trainer.tensors)
    engine.stop()
