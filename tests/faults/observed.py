"""A live engine with two ranks; a test sees its version, its checksums and its answers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from scripts.live_engine.process import EngineProcess
from tests.support.armed_faults import arm
from tests.support.plain_trainer import model_digest

SHIMS = Path(__file__).parents[1] / "shims"
PLUGIN = SHIMS / "faults"
RANKS = 2
FIRST = 5  # version of the checkpoint


@dataclass(frozen=True)
class Kind:
    """An engine of the matrix, with two ranks."""

    engine: str
    arguments: tuple[str, ...] = ()
    tp: int = RANKS
    replicas: int = 1
    python_path: tuple[Path, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


KINDS = {
    "vllm": Kind("vllm"),
    "sglang": Kind("sglang"),
    # Its modules are rebuilt when weights change.
    "vllm-rebuilt": Kind("vllm", ("--quantization", "fp8_per_channel")),
    # The ranks are pipeline stages.
    "vllm-stages": Kind(
        "vllm", ("--pipeline-parallel-size", "2"), 1, python_path=(SHIMS / "vllm_cpu_pp",)
    ),
    "sglang-stages": Kind(
        "sglang", ("--pp-size", "2"), 1, environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    ),
    # Each rank is a replica with the whole model.
    "vllm-replicas": Kind("vllm", ("--data-parallel-size", "2"), 1, 2),
    "sglang-replicas": Kind(
        "sglang", ("--dp-size", "2"), 1, 2, environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    ),
}


class ObservedEngine:
    """An engine that runs with the plugin of ``tests/shims/faults``.

    Args:
        engine: serves.
        kind: of the engine.
        folder: for the files that arm faults, ``DELTA_FAULTS``.
    """

    def __init__(self, engine: EngineProcess, kind: Kind, folder: Path) -> None:
        self.engine, self.kind, self.folder = engine, kind, folder

    def arm(self, fault: str, rank: int, text: str = "") -> None:
        arm(self.folder, fault, rank, text)

    def version(self) -> int:
        return int(self.engine.delta_status().version.number)

    def prints(self) -> dict[str, Any]:
        """Return the engine's own checksums, and those of the whole model on every rank."""
        for rank in range(RANKS):
            self.arm("hash_model", rank)
        self.engine.delta_status()
        hashed = [self.folder / f"hashed-{rank}" for rank in range(RANKS)]
        return {
            "engine": self.engine.checksums(),
            "buffers": self.engine.buffer_checksums(),
            "model": [json.loads(file.read_text()) for file in hashed],
        }

    def holds(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Return whether the digest of live memory is that of `tensors`."""
        found = self.engine.get("/delta_digest", params={"scan": "true"}).json()
        return (found["digest"], found["corrupted"]) == (model_digest(tensors).hex(), [])

    def generates(self) -> int:
        """Return the HTTP status of a small completion; of several replicas the highest."""
        return max(map(self.generates_on, range(self.kind.replicas)))

    def generates_on(self, replica: int, timeout: float = 60) -> int:
        """Return the HTTP status of a small completion by one replica."""
        request = {"prompt": "a", "max_tokens": 2}
        chosen = {"X-data-parallel-rank": str(replica)} if self.kind.replicas > 1 else {}
        answer = self.engine.post("/v1/completions", json=request, headers=chosen, timeout=timeout)
        return answer.status_code


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.05)


def fill(folder: Path) -> Path:
    """Fill a file system; return the file that does."""
    file = folder / "filler"
    with file.open("wb", buffering=0) as out:
        try:
            while True:
                out.write(os.urandom(1 << 16))
        except OSError:
            return file
