"""Start the project's programs as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from scripts.live_engine.registry import ENGINES
from scripts.live_engine.sglang import SglangProcess

ROOT = Path(__file__).parents[2]
_SGLANG_SHIMS = ROOT / "tests" / "shims" / "sglang_cpu"


def environment() -> dict[str, str]:
    """Return an environment in which ``python -m`` finds the packages of this checkout."""
    paths = [str(ROOT / folder) for folder in (".", "server", "trainer")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def python(engine: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run an engine's Python; `environment` are further variables."""
    paths = os.pathsep.join(filter(None, [str(_SGLANG_SHIMS), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": paths, "SGLANG_USE_CPU_ENGINE": "1"}
    env |= SglangProcess.loop_cache()
    return subprocess.run(
        [str(ENGINES[engine].interpreter()), *arguments],
        env={**env, **environment} if engine == "sglang" else {**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def start(name: str, folder: Path, *options: str) -> subprocess.Popen[str]:
    """Start ``python -m scripts.NAME``, with its temporary folders in `folder`."""
    return subprocess.Popen(
        [sys.executable, "-u", "-m", f"scripts.{name}", *options],
        env={**environment(), "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def left_in(folder: Path) -> list[str]:
    """List the files that a program left in its folder for temporary files."""
    return [path.name for what in ("delta-*", "engine-*") for path in folder.glob(what)]
