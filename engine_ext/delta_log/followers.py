"""Heartbeats of the engines that follow a delta log: small files in the log.

::

    LOG/followers/host7-4711-9f2c.json    one engine: its version, what it waits for, its failures

An engine replaces its file at every look, and a file that is older than it says counts no more. Age
is measured by the clock of the log's file system alone, so that clocks of hosts may differ.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Final, Literal

import msgspec

FOLDER: Final = "followers"
_SUFFIX: Final = ".json"
_MAX_BYTES: Final = 64 << 10

FollowerState = Literal["following", "held", "pinned", "asleep", "failing"]


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine that follows a log writes about itself."""

    name: str  # unique among the log's followers
    engine: str  # its kind
    version: int  # of its weights
    newest: int | None  # version in the log that it has seen
    behind: int  # versions in the log after its own
    state: FollowerState
    failures: int  # looks at the log that failed, since it started
    error: str | None = None  # of the last look
    at: float  # Unix time on its own clock
    expires_s: float  # seconds after which it counts no more


def write_heartbeat(log: Path, heartbeat: Heartbeat) -> None:
    """Replace an engine's heartbeat.

    Raises:
        OSError: the log cannot be written.
    """
    folder = log / FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / f"{heartbeat.name}{_SUFFIX}"
    draft = path.with_suffix(".tmp")
    draft.write_bytes(msgspec.json.encode(heartbeat))
    draft.replace(path)


def remove_heartbeat(log: Path, name: str) -> None:
    """Remove an engine's heartbeat, if it has one and the log can be written."""
    with contextlib.suppress(OSError):
        (log / FOLDER / f"{name}{_SUFFIX}").unlink()


def read_heartbeats(log: Path) -> list[tuple[Heartbeat, float]]:
    """Return the heartbeats in a log and their ages in seconds, by name.

    Files that are no heartbeats are left out. If the log cannot be written, ages are by this host's
    clock.

    Raises:
        OSError: the log cannot be read.
    """
    folder = log / FOLDER
    if not folder.is_dir():
        return []
    now = _now(folder)
    found = []
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
            with path.open("rb") as file:
                written = os.fstat(file.fileno()).st_mtime
                heartbeat = msgspec.json.decode(file.read(_MAX_BYTES), type=Heartbeat)
            found.append((heartbeat, max(0.0, now - written)))
    return found


def live_heartbeats(log: Path) -> list[Heartbeat]:
    """Return the heartbeats that still count; see `read_heartbeats`."""
    return [beat for beat, age in read_heartbeats(log) if age <= beat.expires_s]


def _now(folder: Path) -> float:
    """Return the time by the clock that stamps the files of a folder."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".now-") as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        with tempfile.NamedTemporaryFile(prefix="delta-now-") as file:
            return os.fstat(file.fileno()).st_mtime
