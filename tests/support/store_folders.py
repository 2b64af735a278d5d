"""Folders of versions in an object store."""

from __future__ import annotations

from pathlib import Path

from engine_ext.log import Objects
from engine_ext.version_folders import INDEX


def upload(store: Objects, folder: Path, *, index: bool = True) -> str:
    """Copy a version's folder into a store, its index last, or not at all; return its URL."""
    names = sorted((path.name for path in folder.iterdir()), key=lambda name: name == INDEX)
    for name in names:
        if index or name != INDEX:
            store.put(f"{folder.name}/{name}", (folder / name).read_bytes())
    return f"{store.url}/{folder.name}"
