"""Heartbeats of the engines that follow a log: which count, and what is no heartbeat."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec

from engine_ext.log import (
    FolderLog,
    Heartbeat,
    list_log,
    live_heartbeats,
    read_heartbeats,
    remove_heartbeat,
    write_heartbeat,
)
from engine_ext.log.followers import FOLDER


def heartbeat(name: str = "host-1-a", **changes: Any) -> Heartbeat:
    facts: dict[str, Any] = {"engine": "vllm", "version": 7, "newest": 9, "behind": 2}
    more = {"state": "following", "failures": 0, "at": time.time(), "expires_s": 60.0}
    return Heartbeat(name=name, **{**facts, **more, **changes})


def test_each_engine_has_one_file(tmp_path: Path) -> None:
    assert read_heartbeats(FolderLog(tmp_path)) == []
    write_heartbeat(FolderLog(tmp_path), heartbeat())
    write_heartbeat(FolderLog(tmp_path), heartbeat(version=8))
    write_heartbeat(FolderLog(tmp_path), heartbeat("host-2-b"))
    assert [(one.name, one.version) for one, _ in read_heartbeats(FolderLog(tmp_path))] == [
        ("host-1-a", 8),
        ("host-2-b", 7),
    ]
    remove_heartbeat(FolderLog(tmp_path), "host-1-a")
    remove_heartbeat(FolderLog(tmp_path), "host-1-a")
    assert [one.name for one in live_heartbeats(FolderLog(tmp_path))] == ["host-2-b"]
    assert list_log(tmp_path).damaged == {}


def test_age_is_that_of_the_file(tmp_path: Path) -> None:
    """The clock of the host that wrote it does not count."""
    write_heartbeat(FolderLog(tmp_path), heartbeat("old", at=time.time() + 1e6))
    write_heartbeat(FolderLog(tmp_path), heartbeat("new", at=0.0))
    write_heartbeat(FolderLog(tmp_path), heartbeat("of the future"))
    now = time.time()
    os.utime(tmp_path / FOLDER / "old.json", (now - 61, now - 61))
    os.utime(tmp_path / FOLDER / "of the future.json", (now + 1e6, now + 1e6))
    assert [one.name for one in live_heartbeats(FolderLog(tmp_path))] == ["new", "of the future"]


def test_what_is_no_heartbeat_is_left_out(tmp_path: Path) -> None:
    write_heartbeat(FolderLog(tmp_path), heartbeat())
    folder = tmp_path / FOLDER
    (folder / "torn.json").write_bytes(msgspec.json.encode(heartbeat())[:-5])
    (folder / "other.json").write_text("[]")
    (folder / "half.tmp").write_text("{}")
    assert [one.name for one, _ in read_heartbeats(FolderLog(tmp_path))] == ["host-1-a"]
