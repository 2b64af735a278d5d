"""What the tests of the patch tool share: a small engine, and patches for it."""

from __future__ import annotations

from pathlib import Path

import pytest

import apply_patches
from tests.patches import fake_engine


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
