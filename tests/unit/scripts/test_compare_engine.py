"""The fate of an engine's names, over two small releases of it and a package that uses them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts.compare_engine import ORDER, ROOT, Package, compared, uses_of

pytestmark = pytest.mark.slow

USER = """
from vllm.config import Config, gone, kept
from vllm.lazy import Late
from vllm.base import Engine
from vllm import envs

FEATURE = "vllm.base:Engine.new_shape"
WORKER = "vllm.worker:Worker"

def use() -> None:
    envs.FLAG
    kept.attribute = 1
    setattr(Engine, "replaced", None)

class Mine(Engine):
    def hook(self) -> None: ...
"""
OLD = {
    "vllm/__init__.py": "",
    "vllm/envs.py": "def __getattr__(name): ...\nVARIABLES = {'FLAG': 1}\n",
    "vllm/config.py": "from vllm.inner import Config\ndef gone(): ...\nclass kept: attribute = 0\n",
    "vllm/inner.py": "class Config: ...\n",
    "vllm/lazy.py": "_NAMES = ['Late']\ndef __getattr__(name): ...\n",
    "vllm/worker.py": "class Worker:\n    x = 1\n",
    "vllm/base.py": (
        "class Root:\n    def replaced(self): return 1\n"
        "class Engine(Root):\n    def hook(self): ...\n    def new_shape(self): ...\n"
    ),
}
NEW = {
    **OLD,
    "vllm/envs.py": "def __getattr__(name): ...\nVARIABLES = {}\n",
    "vllm/config.py": "from vllm.other import Config\nclass kept: attribute = 0\n",
    "vllm/other.py": "class Config: ...\n",
    "vllm/base.py": (
        "class Root:\n    def replaced(self): return 2\n"
        "class Engine(Root):\n    def new_shape(self, more): ...\n"
    ),
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A package that uses the engine."""
    source = tmp_path / "project" / "engine_ext" / "adapters" / "user.py"
    source.parent.mkdir(parents=True)
    source.write_text(USER)
    return tmp_path / "project"


def wheel(path: Path, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_each_use_is_compared_worst_first(project: Path, tmp_path: Path) -> None:
    old = Package(wheel(tmp_path / "old.whl", OLD))
    new = Package(wheel(tmp_path / "new.whl", NEW))
    rows = compared(old, new, uses_of("vllm", project))
    found = [(changed.partition(":")[0], f"{use.module}:{use.path}") for changed, use in rows]
    assert found == sorted(found, key=lambda row: ORDER.index(row[0]))
    assert {name: kind for kind, name in found} == {
        "vllm:envs": "same",
        "vllm:envs.FLAG": "gone",
        "vllm.config:gone": "gone",
        "vllm.base:Engine.hook": "gone",
        "vllm.base:Engine.new_shape": "signature",
        "vllm.base:Engine.replaced": "body",
        "vllm.base:Engine": "body",
        "vllm.config:Config": "moved",
        "vllm.config:kept": "same",
        "vllm.config:kept.attribute": "same",
        "vllm.lazy:Late": "same",
        "vllm.worker:Worker": "same",
    }


def test_folder_without_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no vllm or sglang in it"):
        Package(tmp_path)


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
