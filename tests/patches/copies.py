"""A patched copy of an installed engine, and the environment in which Python finds it first."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import apply_patches

ROOT = Path(__file__).parents[2]


def copy_package(name: str, folder: Path) -> None:
    """Copy an installed package; its shared libraries, which nobody patches, are linked."""

    def copy(source: str, target: str) -> None:
        if source.endswith(".so"):
            os.symlink(os.path.realpath(source), target)
        else:
            shutil.copy2(source, target)

    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.submodule_search_locations
    package = Path(next(iter(spec.submodule_search_locations)))
    shutil.copytree(package, folder / name, copy_function=copy)


def patch(name: str, folder: Path) -> None:
    """Patch the copy as a user would."""
    assert apply_patches.main([name, "--target", str(folder)]) == 0


def environment(folder: Path) -> dict[str, str]:
    """Environment variables with which a new Python imports the copy and this project."""
    path = [folder, ROOT, ROOT / "server", ROOT / "scripts"]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
