"""The Dockerfile of examples/docker is sound, and names the engine versions that are supported."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from engine_ext.adapters.sglang.features import VERSIONS as SGLANG
from engine_ext.adapters.vllm.features import VERSIONS as VLLM

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "examples" / "docker" / "Dockerfile"


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_images_are_of_the_newest_engines_that_ran() -> None:
    images = dict(re.findall(r"/(vllm|sglang)(?:-openai)?:v([\d.]+)", DOCKERFILE.read_text()))
    for engine, versions in (("vllm", VLLM), ("sglang", SGLANG)):
        *_, newest = (one for one in versions.supported if one not in versions.not_run)
        assert versions.require(images[engine]) == newest
