"""The lines of README and pages that start an engine, load a model or run the demo, as pasted.

Folders, stores and hosts of a line become those of the test, and an engine is kept small. Lines
for 16 GPUs are left out: test_hosts and tests/verl/test_ray_executor start engines like those.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from scripts.live_engine.process import EngineProcess
from scripts.live_engine.sglang import SglangProcess
from scripts.live_engine.vllm import VllmProcess
from tests.live.vllm_serve import distribution
from tests.unit.docs.test_commands import LINES, ROOT, named

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

MODELS: Final = ("MODEL", "BASE", "$MODEL", "checkpoint", "MODEL_DIR")
SMALL: Final = ("--enforce-eager", "--max-model-len", "64")
OF_CPUS: Final = {
    **os.environ,
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two ranks, one NUMA node
}
STARTS: Final = ("vllm serve", "python -m vllm.entrypoints", "python -m sglang.launch_server")


def starts_here(words: Sequence[str]) -> bool:
    return " ".join(words).startswith(STARTS) and "16" not in words


def own(words: Sequence[str], model: Path, folder: Path) -> list[str]:
    """Return a line's words with the test's model and folders."""
    for name in ("log", "updates"):
        (folder / name).mkdir(exist_ok=True)
    places = {
        "/shared/log": f"{folder}/log",
        "s3://weights/run-7": f"{folder}/log",
        "/shared/updates": f"{folder}/updates",
        "/var/log/": f"{folder}/",
        "DRAFT_DIR": str(model),
    }
    found = []
    for word in words:
        word = str(model) if word in MODELS else word
        for shown, place in places.items():
            word = word.replace(shown, place)
        found.append(word)
    return found


class ShownVllm(VllmProcess):
    """A vLLM that a line starts."""

    words: Sequence[str]

    def _server_arguments(self) -> list[str]:
        program = ["-m", "vllm.entrypoints.cli.main"] if self.words[0] == "vllm" else []
        small = [word for word in SMALL if "--enforce-eager" not in self.words]
        return [*program, *self.words[1:], *small, "--port", str(self.port)]


class ShownSglang(SglangProcess):
    """An SGLang that a line starts."""

    words: Sequence[str]

    def _server_arguments(self) -> list[str]:
        at = self.words.index("--port")
        small = ["--device", "cpu", "--max-total-tokens", "4096", "--sleep-on-idle"]
        return [*self.words[1 : at + 1], str(self.port), *self.words[at + 2 :], *small]


@pytest.mark.parametrize("line", [one for one in LINES if starts_here(one[1])], ids=named)
def test_an_engine_starts_as_shown(
    line: tuple[str, list[str]], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    model = checkpoint("qwen3")
    kind: Any = ShownSglang if "sglang.launch_server" in line[1] else ShownVllm
    words = own(line[1], model, tmp_path)
    engine: type[EngineProcess] = type("Shown", (kind,), {"words": words})
    environment = {"DELTA_HMAC_KEY": "secret", "VLLM_SERVER_DEV_MODE": "1"}
    with engine(
        model, python_path=[distribution(tmp_path / "path")], extra_env=environment
    ) as running:
        status = running.delta_status()
        assert (status.version.number, status.health.state) == (0, "certain")
        assert running.get("/delta_ready").status_code == 200
        follows = running.get("/delta_status").json()["log"] is not None
    assert follows == ("--delta-log" in words)
    assert (tmp_path / "delta-audit.jsonl").exists() == ("--delta-audit-file" in words)


@pytest.mark.parametrize(
    "line", [one for one in LINES if one[1][:2] == ["delta-plan", "MODEL_DIR"]], ids=named
)
def test_a_plan_is_shown_of_a_folder(
    line: tuple[str, list[str]], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    words = own(line[1], checkpoint("qwen3"), tmp_path)
    command = [str(Path(sys.executable).with_name(words[0])), *words[1:]]
    done = subprocess.run(command, env=OF_CPUS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = "2 ranks" if "--tensor-parallel-size" in words else "1 rank"
    assert f" on {ranks}: " in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_demo_runs(engine: str) -> None:
    command = [sys.executable, "-m", "scripts.demo", "--engine", engine]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "VERIFIED" in done.stdout
