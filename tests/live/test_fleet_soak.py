"""The soak of a fleet, with one engine of each kind and few commits; it needs nginx."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.fleet_soak.plan import FAULTS
from tests.live.programs import left_in, start

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


def test_the_program(folder: Path, tmp_path: Path) -> None:
    """All faults come, so that it commits until each engine has been replaced."""
    file, engines = tmp_path / "figures.json", ["--vllm", "1", "--sglang", "1"]
    process = start("fleet_soak", folder, *engines, "--commits", "11", "--json", str(file))
    out, err = process.communicate(timeout=1700)
    assert process.returncode == 0, (out[-4000:], err[-4000:])
    figures = json.loads(file.read_text())
    assert (figures["problems"], figures["missed"]) == ([], [])
    rows = [(row["fault"], row["phase"]) for row in figures["rows"]]
    assert rows == [(fault.what, fault.phase) for fault in FAULTS]
    assert figures["commits"] >= 11
    assert figures["tokens"]["compared"] > 0
    assert left_in(folder) == []


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name: paths of vLLM's sockets in it have at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        yield Path(name)
