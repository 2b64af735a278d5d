"""Heartbeats of the engines that follow a delta log, and how far these lag behind it.

::

    LOG/followers/host7-4711-9f2c.json    one engine: its version, what it waits for, its failures

An engine replaces its file at every look, and a file that is older than it says counts no more. Age
is measured by the clock of the log's file system or store alone: clocks of hosts differ.
"""

from __future__ import annotations

import contextlib
import errno
import time
import uuid
from typing import Final, Literal

import msgspec

from engine_ext.errors import LogDamaged
from engine_ext.log.delta_log import DeltaLog
from engine_ext.log.store import Files
from engine_ext.structs import prepare

FOLDER: Final = "followers"
_SUFFIX: Final = ".json"
_MAX_BYTES: Final = 64 << 10
_MOST_ERROR: Final = 2000  # characters
_READINGS: Final = 5  # of a heartbeat that is listed, but not found

FollowerState = Literal[
    "following", "waiting", "held", "pinned", "asleep", "failing", "diverged"
]  # fmt: skip


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine that follows a log writes about itself."""

    name: str  # unique among the log's followers
    engine: str  # its kind
    version: int  # of its weights
    newest: int | None  # version in the log that it has seen
    behind: int  # versions in the log after its own
    state: FollowerState
    failures: int  # looks at the log that failed, since it started
    error: str | None = None  # of the last look; its beginning
    url: str | None = None  # where other engines can ask it for parts; None: it does not say
    group: str | None = None  # whose member it is; see `engine_ext.log.groups`
    prepared: str | None = None  # the version that it has prepared, by its `content_key`
    reach: int | None = None  # version that it can prepare next; its own without a newer one
    cannot: list[int] = []  # versions that it has tried to prepare lately, and could not
    at: float  # Unix time on its own clock
    expires_s: float  # seconds after which it counts no more


class Lag(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a log that one follower has not applied yet.

    Attributes:
        seen_s: age of the heartbeat in seconds.
        expired: whether that is more than it allows; the engine is probably gone.
        versions: of the log that are newer than the follower's.
        nbytes: of these.
        seconds: since the first of these was published; 0 without any.
    """

    heartbeat: Heartbeat
    seen_s: float
    expired: bool
    versions: int
    nbytes: int
    seconds: float


prepare(Heartbeat, Lag)


def write_heartbeat(log: DeltaLog, heartbeat: Heartbeat) -> None:
    """Replace an engine's heartbeat.

    Raises:
        OSError: the log cannot be written.
    """
    if heartbeat.error is not None:
        heartbeat = msgspec.structs.replace(heartbeat, error=heartbeat.error[:_MOST_ERROR])
    log.store.put(_path(heartbeat.name), msgspec.json.encode(heartbeat))


def remove_heartbeat(log: DeltaLog, name: str) -> None:
    """Remove an engine's heartbeat, if it has one and the log can be written."""
    with contextlib.suppress(OSError):
        log.store.delete([_path(name)])


def read_heartbeats(log: DeltaLog, *, strict: bool = False) -> list[tuple[Heartbeat, float]]:
    """Return the heartbeats in a log and their ages in seconds, by name.

    Files that are no heartbeats are left out. If the log cannot be written, ages are by this host's
    clock.

    Args:
        strict: raise OSError if ages are not certain, or a heartbeat that is there is not found,
            and LogDamaged if a file is no heartbeat.

    Raises:
        LogDamaged: a heartbeat is there and cannot be read.
        OSError: the log cannot be read.
    """
    store = log.store
    if not strict and FOLDER not in store.list(FOLDER):
        return []
    probe = f".now-{uuid.uuid4().hex}"
    with contextlib.nullcontext() if strict else contextlib.suppress(OSError):
        store.put(f"{FOLDER}/{probe}", b"")
    files = store.list(FOLDER).get(FOLDER)
    is_probed = files is not None and probe in files.names
    now = files.written_at(probe) if files is not None and is_probed else time.time()
    with contextlib.suppress(OSError):
        store.delete([f"{FOLDER}/{probe}"])
    if strict and not is_probed:
        raise OSError(errno.EIO, "the log does not list what was written")
    if files is None:  # the last one was removed
        return []
    found: dict[str, tuple[Heartbeat, float]] = {}
    lost = {name for name in files.names if name.endswith(_SUFFIX)}
    for _ in range(_READINGS):
        # A file that is not found was removed since, or replaced by another host meanwhile.
        names, lost = lost, set()
        for name in sorted(names):
            try:
                beat = _read(log, files, name, strict)
                if beat is not None:
                    found[name] = beat, max(0.0, now - files.written_at(name))
            except FileNotFoundError:
                lost.add(name)
        if not lost:
            break
        if (again := store.list(FOLDER).get(FOLDER)) is None:
            lost = set()
            break
        files = again
        lost &= {*files.names}
    if strict and lost:
        raise OSError(errno.ESTALE, f"{FOLDER}/{min(lost)} is listed, but not found")
    return [found[name] for name in sorted(found)]


def _read(log: DeltaLog, files: Files, name: str, strict: bool) -> Heartbeat | None:
    """Return the heartbeat in a file; None if it has none."""
    # One that cannot be read might be of an engine that needs what prune deletes.
    try:
        if files.size(name) <= _MAX_BYTES:
            return msgspec.json.decode(
                log.store.read(f"{FOLDER}/{name}", _MAX_BYTES), type=Heartbeat
            )
        why = f"it has over {_MAX_BYTES} bytes"
    except (ValueError, RecursionError) as error:
        why = str(error)
    except LogDamaged as error:
        raise LogDamaged(f"{FOLDER}: {error.message}") from error
    if strict:
        raise LogDamaged(
            f"{FOLDER}/{name} is no heartbeat of this release ({why}): remove it if no engine "
            "writes it"
        )
    return None


def live_heartbeats(log: DeltaLog, *, strict: bool = False) -> list[Heartbeat]:
    """Return the heartbeats that still count; see `read_heartbeats` for what it raises."""
    return [beat for beat, age in read_heartbeats(log, strict=strict) if age <= beat.expires_s]


def follower_lags(log: DeltaLog) -> list[Lag]:
    """Return the lag of every follower of a log, by name.

    Raises:
        LogDamaged, OSError: the log cannot be read.
    """
    plain = [entry for entry in log.listing().entries if not entry.is_fold]
    found = []
    for heartbeat, age in read_heartbeats(log):
        waiting = [entry for entry in plain if entry.version > heartbeat.version]
        began = min((entry.written_at for entry in waiting), default=None)
        found.append(
            Lag(
                heartbeat=heartbeat,
                seen_s=age,
                expired=age > heartbeat.expires_s,
                versions=len(waiting),
                nbytes=sum(entry.nbytes for entry in waiting),
                seconds=0.0 if began is None else max(0.0, time.time() - began),
            )
        )
    return found


def _path(name: str) -> str:
    return f"{FOLDER}/{name}{_SUFFIX}"
