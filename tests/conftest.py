"""Fixtures and hooks of all tests: a real object store, and modules that are not imported."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.object_stores import BUCKET, StoreServer, seaweed

ROOT = Path(__file__).parent
WITH_ENGINES = {ROOT / "live", ROOT / "faults"}


def starts_engines(module: Path) -> bool:
    """Whether all tests of a module start an engine, by the folder that it is in."""
    return not WITH_ENGINES.isdisjoint(module.parents) and module.stem != "test_table"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if starts_engines(item.path):
            item.add_marker(pytest.mark.engine)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no module whose tests are all left out: some import engines, which takes seconds."""
    marks = config.getoption("markexpr").split(" and ")
    left_out = "not engine" in marks and not any(" or " in mark for mark in marks)
    is_test = collection_path.name.startswith("test_")
    return True if left_out and is_test and starts_engines(collection_path) else None


@pytest.fixture(scope="session")
def store_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    """A real object store."""
    with seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def store_url(store_server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty prefix in a real store, which the environment leads to."""
    for name, value in store_server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"
