"""Run a test file as a program that loads a live engine, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(str(_ROOT / folder) for folder in (".", "server", "trainer")),
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def run(script: str, model: Path, out: Path, *options: str) -> dict[str, Any]:
    """Run a program and return the JSON that it wrote to `out`.

    Args:
        script: its file; the arguments are `model`, `out` and `options`.
    """
    done = subprocess.run(
        [sys.executable, script, str(model), str(out), *options],
        env={**os.environ, **_ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found
