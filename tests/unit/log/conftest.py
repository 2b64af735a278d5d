"""A delta log in each kind of store."""

from __future__ import annotations

from pathlib import Path

import pytest
from obstore.store import MemoryStore

from engine_ext.log import DeltaLog
from tests.unit.log.places import FolderPlace, ObjectsPlace, Place

REAL = pytest.param("store", marks=pytest.mark.slow)


@pytest.fixture(params=["folder", "memory", REAL])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """An empty log in a folder, in a store in memory, or in a real store."""
    if request.param == "folder":
        return FolderPlace(tmp_path / "log")
    if request.param == "memory":
        return ObjectsPlace("s3://test/log", tmp_path, MemoryStore())
    return ObjectsPlace(request.getfixturevalue("store_url"), tmp_path)


@pytest.fixture
def log(place: Place) -> DeltaLog:
    """The empty log of `place`."""
    return place.open()
