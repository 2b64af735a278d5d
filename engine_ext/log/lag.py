"""How far the engines that follow a log lag behind it: versions, bytes and seconds."""

from __future__ import annotations

import time

import msgspec

from engine_ext.log.followers import Heartbeat, read_heartbeats
from engine_ext.log.interface import DeltaLog


class Lag(msgspec.Struct, frozen=True, kw_only=True):
    """What one follower has not applied yet, as the log is now.

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


def follower_lags(log: DeltaLog) -> list[Lag]:
    """Return the lag of every follower of a log, by name.

    Raises:
        LogDamaged, OSError: the log cannot be read.
    """
    plain = [entry for entry in log.listing().entries if "_from_" not in entry.folder.name]
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
