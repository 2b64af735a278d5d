"""The fate of an engine's names, over two small releases of it and a package that uses them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts.compare_engine import ROOT, Package, uses_of

pytestmark = pytest.mark.slow


def wheel(path: Path, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_installed_engine_has_every_name_that_is_used() -> None:
    """The names that the scan finds are real: the engine that this Python has defines them."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    package = Package(Path(spec.origin).parents[1])
    missing = [
        f"{use.module}:{use.path} ({use.place})"
        for use in uses_of("vllm")
        if use.how == "imported" and package.find(use.module, use.path) is None
    ]
    assert missing == []


def test_command_fails_if_a_name_is_gone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.compare_engine"]
    files = {"vllm/__init__.py": "from vllm.x import LLM\n", "vllm/x.py": "class LLM: ...\n"}
    old = wheel(tmp_path / "old.whl", files)
    new = wheel(tmp_path / "new.whl", {"vllm/__init__.py": ""})
    for pair, status in (((old, old), 0), ((old, new), 1)):
        done = subprocess.run(
            [*command, *pair], check=False, cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == status
        assert ("gone       vllm:LLM" in done.stdout) == bool(status)
