"""Fixtures of all tests: a real object store."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.support.object_stores import BUCKET, StoreServer, seaweed


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
