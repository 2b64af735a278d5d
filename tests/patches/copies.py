"""A patched copy of an installed engine, and the environment in which Python finds it first."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts import apply_patches
from scripts.apply_patches import State
from scripts.live_engine.sglang import SglangProcess

ROOT = Path(__file__).parents[2]
SHIMS = ROOT / "tests" / "shims" / "sglang_cpu"
_FIND = "import importlib.util, sys; print(importlib.util.find_spec(sys.argv[1]).origin)"


def python_of(name: str) -> Path:
    """The interpreter whose environment has an engine."""
    return SglangProcess.interpreter() if name == "sglang" else Path(sys.executable)


def installed(name: str) -> Path:
    """The folder of an engine's installed package, in the environment that has it."""
    command = [str(python_of(name)), "-c", _FIND, name]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return Path(found.stdout.strip()).parent


def copy_package(name: str, folder: Path) -> None:
    """Copy an installed package; its shared libraries, which nobody patches, are linked."""

    def copy(source: str, target: str) -> None:
        if source.endswith(".so"):
            os.symlink(os.path.realpath(source), target)
        else:
            shutil.copy2(source, target)

    shutil.copytree(installed(name), folder / name, copy_function=copy)


def patch(name: str, folder: Path) -> None:
    """Patch the copy as a user would."""
    assert apply_patches.main([name, "--target", str(folder)]) == 0


def environment(folder: Path) -> dict[str, str]:
    """Environment variables with which a new Python imports vLLM's copy and this project."""
    path = [folder, ROOT, ROOT / "server", ROOT / "trainer"]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def sglang_environment(folder: Path) -> dict[str, str]:
    """As `environment`, for SGLang's own Python, and for tests that start that."""
    found = environment(folder)
    found["PYTHONPATH"] += os.pathsep + str(SHIMS)
    found["SGLANG_USE_CPU_ENGINE"] = "1"
    # Without this the copy would be found in this Python, which has not what SGLang needs.
    found["SGLANG_PYTHON"] = str(SglangProcess.interpreter())
    return found


def run(
    name: str, folder: Path, *arguments: str, **more: str | None
) -> subprocess.CompletedProcess[str]:
    """Run an engine's Python on its copy; `more` are environment variables, None removes one."""
    known = sglang_environment(folder) if name == "sglang" else environment(folder)
    env = {**known, **more}
    return subprocess.run(
        [str(python_of(name)), *arguments],
        env={key: value for key, value in env.items() if value is not None},
        capture_output=True,
        text=True,
        check=False,
    )


def facts(name: str, folder: Path, script: str, out: Path, plugins: str | None) -> dict[str, Any]:
    """The results of a script in a copy.

    Args:
        name: the engine's.
        folder: of the copy.
        script: a file; it writes JSON into the file that is its argument.
        out: that file.
        plugins: names of the plugins that the engine can load, None for all.
    """
    done = run(name, folder, script, str(out), **{f"{name.upper()}_PLUGINS": plugins})
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@contextlib.contextmanager
def half_patched(name: str, folder: Path, path: str) -> Iterator[None]:
    """Let one file of a patched copy, by its path in it, be as it was released."""
    patches = apply_patches.choose(apply_patches.find(name, folder))
    (folder / path).write_bytes(patches.rewritten(path, State.ORIGINAL))
    try:
        yield
    finally:
        (folder / path).write_bytes(patches.contents[path])


def touched(name: str, folder: Path) -> dict[str, bytes]:
    """The content of every file of a source that the patches touch, by its path."""
    return apply_patches.choose(apply_patches.find(name, folder)).contents
