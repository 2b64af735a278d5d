"""Scripts that tests start as a user would, with their temporary folders in one of the test's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start(name: str, folder: Path, *options: str) -> subprocess.Popen[str]:
    """Start a module of ``scripts``, with its temporary folders in `folder`."""
    paths = os.pathsep.join(str(ROOT / each) for each in (".", "server", "trainer"))
    return subprocess.Popen(
        [sys.executable, "-u", "-m", f"scripts.{name}", *options],
        env={**os.environ, "PYTHONPATH": paths, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def left_in(folder: Path) -> list[str]:
    """What a benchmark has left behind."""
    return [path.name for path in folder.glob("delta-bench-*")]
