from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_ext.conformance.toy_models.base import DEVICE
from engine_ext.settings import API_KEY_ENVIRONMENT, HMAC_KEY_ENVIRONMENT
from tests.support.endpoint_rig import Rig


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With the toy models on another device, leave out what is so in host memory only."""
    if DEVICE.type != "cpu":
        of_host = [item for item in items if item.get_closest_marker("host_memory")]
        config.hook.pytest_deselected(items=of_host)
        items[:] = [item for item in items if item not in of_host]


@pytest.fixture(scope="session", autouse=True)
def no_keys() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in (API_KEY_ENVIRONMENT, HMAC_KEY_ENVIRONMENT):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(autouse=True)
def same_loggers() -> Iterator[None]:
    """Hooks of an engine let it print the product's log lines, which then reach no other test."""
    loggers = [logging.getLogger(name) for name in ("engine_ext", "delta_server")]
    before = [(one.propagate, one.level, [*one.handlers]) for one in loggers]
    yield
    for one, (propagate, level, handlers) in zip(loggers, before, strict=True):
        one.propagate, one.level, one.handlers = propagate, level, handlers


@pytest.fixture
def quick_collections() -> Iterator[None]:
    """A garbage collection looks only at what the test has made."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Makes a server with some settings; all are closed after the test."""
    rigs: list[Rig] = []

    def make(**settings: Any) -> Rig:
        rigs.append(Rig(tmp_path / "spool", **settings))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    """A server with no disk root, at version 7."""
    return make_rig()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The folder below which disk requests can read."""
    folder = Path(os.path.realpath(tmp_path)) / "root"
    folder.mkdir()
    return folder


@pytest.fixture
def disk_rig(make_rig: Callable[..., Rig], root: Path) -> Rig:
    """A server that takes disk requests below `root`."""
    return make_rig(roots=(str(root),))


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Tenacity's sleeps, in seconds, recorded and not slept."""
    slept: list[float] = []
    monkeypatch.setattr("tenacity.nap.time.sleep", slept.append)
    return slept
