"""Fixtures for the tests of the patches: a small engine with patches; copies of the engines."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts import apply_patches
from tests.patches import copies, fake_engine


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an unpatched engine; the tool knows patches for it."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    fake_engine.write_source(folder)
    patches = tmp_path / "patches"
    fake_engine.write_patches(patches / "vllm" / fake_engine.VERSION, folder)
    monkeypatch.setattr(apply_patches, "PATCHES", patches)
    return folder


@pytest.fixture
def tool(source: Path, capsys: pytest.CaptureFixture[str]) -> fake_engine.Tool:
    """Runs the tool on the small engine; its exit status and all that it wrote."""

    def run(*options: str, target: Path = source) -> tuple[int, str]:
        code = apply_patches.main(["vllm", "--target", str(target), *options])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


@pytest.fixture(scope="session")
def patched_copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """The folder of a patched copy of an engine, made when it is first asked for."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp(f"patched-{name}")
            copies.copy_package(name, folder)
            copies.patch(name, folder)
            made[name] = folder
        return made[name]

    yield get
    for folder in made.values():
        shutil.rmtree(folder)  # 100 MB and more
