"""The benchmarks of start-up and full syncs measure what they say, on one layer."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.slow

pytestmark = pytest.mark.full


def bench(name: str, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", f"scripts.bench.{name}", "--layers", "1", "--runs", "1"]
    done = subprocess.run(
        [*command, "--threads", "1", "--json", *options], check=True, capture_output=True, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_startup() -> None:
    found = bench("startup", "--turns", "1")
    assert found["bytes"] > 100e6
    stages = {"load", "before processing", "tracing", "certification", "applier", "kernels"}
    assert stages < found["seconds"].keys() == found["first"].keys()


@pytest.mark.parametrize("options", [[], ["--change"]], ids=["new", "change"])
def test_full_sync(options: list[str]) -> None:
    """The script itself checks that live memory is what was sent."""
    found = bench("full_sync", *options)
    assert {"decode", "stage", "commit", "full sync"} < found["seconds"].keys()
    assert found["ratio"] > 0
