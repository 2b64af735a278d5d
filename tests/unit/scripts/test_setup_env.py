"""When an environment is made anew. Nothing is installed: the interpreter and uv are stand-ins."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = """#!/usr/bin/env bash
case $* in
    "-m venv .venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$0" "$3/bin/uv" ;;
    *version*) echo 3.11 ;;
esac
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the project, with an environment that is current."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/setup_env.sh", tmp_path / "scripts")
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    assert makes_anew(tmp_path)
    return tmp_path


def set_up(folder: Path, *name: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(folder / "scripts/setup_env.sh"), *name]
    known = {**os.environ, "PYTHON": str(folder / "python"), **environment}
    return subprocess.run(
        command, env=known, capture_output=True, text=True, timeout=60, check=False
    )


def makes_anew(folder: Path, *name: str) -> bool:
    done = set_up(folder, *name)
    assert done.returncode == 0, done.stderr
    return "making .venv" in done.stdout


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


INSTALLED = [
    ("pyproject.toml", '"hatchling>=1.27"]', '"hatchling>=1.28"]'),  # what builds
    ("pyproject.toml", '"numpy>=1.26"', '"numpy>=2"'),
    ("pyproject.toml", "delta-send =", "delta-push ="),
    ("pyproject.toml", "register", "enlist"),
    ("pyproject.toml", '[".", "server", "trainer"]', '["."]'),
    ("requirements/dev.lock", "ruff==", "ruff>="),
    ("requirements/vllm-cpu.lock", "numpy==", "numpy>="),
]


def test_what_is_installed_makes_environment_anew(folder: Path) -> None:
    assert not makes_anew(folder)
    for path, old, new in INSTALLED:
        edit(folder / path, old, new)
        assert makes_anew(folder), new
    assert not makes_anew(folder)


@pytest.mark.slow
def test_environment_half_deleted_is_made_anew(folder: Path) -> None:
    """Its deletion is killed, and then the lock is as it was again."""
    lock = folder / "requirements/dev.lock"
    before = lock.read_text()
    lock.write_text(before + "\n")
    refuses = "[[ $1 != -rf ]] || exit 1"
    (folder / "rm").write_text(f'#!/usr/bin/env bash\n{refuses}\nexec /bin/rm "$@"\n')
    (folder / "rm").chmod(0o755)
    assert set_up(folder, PATH=f"{folder}:{os.environ['PATH']}").returncode == 1
    lock.write_text(before)
    (folder / "rm").unlink()
    assert makes_anew(folder)
