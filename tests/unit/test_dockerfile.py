"""The Dockerfile of examples/docker is sound, and names the engine versions that are supported."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "examples" / "docker" / "Dockerfile"


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_images_are_of_the_pinned_engines() -> None:
    pinned = dict(re.findall(r'"(vllm|sglang)==([\d.]+)"', (ROOT / "pyproject.toml").read_text()))
    images = re.findall(r"/(?:vllm-openai|sglang):v([\d.]+)", DOCKERFILE.read_text())
    assert sorted(set(images)) == sorted({pinned["vllm"], pinned["sglang"]})
