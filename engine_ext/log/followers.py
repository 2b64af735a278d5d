"""Heartbeats of the engines that follow a delta log: small files in the log.

::

    LOG/followers/host7-4711-9f2c.json    one engine: its version, what it waits for, its failures

An engine replaces its file at every look, and a file that is older than it says counts no more. Age
is measured by the clock of the log's file system or store alone: clocks of hosts may differ.
"""

from __future__ import annotations

import contextlib
from typing import Final, Literal

import msgspec

from engine_ext.log.interface import DeltaLog

FOLDER: Final = "followers"
_SUFFIX: Final = ".json"
_MAX_BYTES: Final = 64 << 10

FollowerState = Literal["following", "held", "pinned", "asleep", "failing", "diverged"]


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


def write_heartbeat(log: DeltaLog, heartbeat: Heartbeat) -> None:
    """Replace an engine's heartbeat.

    Raises:
        OSError: the log cannot be written.
    """
    log.write_note(FOLDER, heartbeat.name + _SUFFIX, msgspec.json.encode(heartbeat))


def remove_heartbeat(log: DeltaLog, name: str) -> None:
    """Remove an engine's heartbeat, if it has one and the log can be written."""
    with contextlib.suppress(OSError):
        log.remove_note(FOLDER, name + _SUFFIX)


def read_heartbeats(log: DeltaLog) -> list[tuple[Heartbeat, float]]:
    """Return the heartbeats in a log and their ages in seconds, by name.

    Files that are no heartbeats are left out.

    Raises:
        OSError: the log cannot be read.
    """
    found = []
    for note in log.read_notes(FOLDER, _SUFFIX, _MAX_BYTES):
        with contextlib.suppress(msgspec.MsgspecError):
            found.append((msgspec.json.decode(note.content, type=Heartbeat), note.age))
    return found


def live_heartbeats(log: DeltaLog) -> list[Heartbeat]:
    """Return the heartbeats that still count; see `read_heartbeats`."""
    return [beat for beat, age in read_heartbeats(log) if age <= beat.expires_s]
