from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from delta_server import recent
from engine_ext.log import DeltaLog
from tests.support.endpoint_rig import Rig
from tests.unit.server.other_process import Process


@pytest.fixture
def other(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    """Another HTTP process of the engine of `rig`; both ask the ranks at every request."""
    monkeypatch.setattr(recent, "_ASKED_EVERY_S", 0.0)
    rig.engine.shared = True
    process = Process(rig)
    yield process
    process.service.intake.close()


@pytest.fixture
def removes_in_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The folders that are removed; none by the thread of the event loop, which answers others."""
    removed, in_loop, rmtree = list[str](), list[str](), shutil.rmtree

    def noted(path: Any, *options: Any, **named: Any) -> None:
        if Path(path).exists() and Path(path).is_relative_to(tmp_path):  # not another test's
            by_loop = threading.current_thread() is threading.main_thread()
            (in_loop if by_loop else removed).append(str(path))
        rmtree(path, *options, **named)

    monkeypatch.setattr(shutil, "rmtree", noted)
    yield removed
    monkeypatch.undo()
    assert removed
    assert in_loop == []


@pytest.fixture
def log(tmp_path: Path) -> Path | DeltaLog:
    """An empty log."""
    folder = tmp_path / "log"
    folder.mkdir()
    return folder


@pytest.fixture
def log_settings() -> dict[str, Any]:
    """How the engines that are `started` take the log's versions."""
    return {}


@pytest.fixture
def started(
    tmp_path: Path, log: Path | DeltaLog, log_settings: dict[str, Any]
) -> Iterator[Callable[..., Rig]]:
    """Starts engines that have the log."""
    rigs: list[Rig] = []

    def start(**settings: Any) -> Rig:
        location = log.location if isinstance(log, DeltaLog) else str(log)
        given = {"log": location, "cache_dir": str(tmp_path / "cache"), **log_settings}
        rigs.append(Rig(tmp_path / f"spool{len(rigs)}", **(given | settings)))
        return rigs[-1]

    yield start
    for rig in rigs:
        rig.close()
