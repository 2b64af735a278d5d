"""Name the lineage of weights that a sender opens: a run, and which opening of it this is."""

from __future__ import annotations

import os
import re
import socket
import time
import uuid
from typing import Any

import msgspec

from engine_ext.structs import prepare

_NOT_IN_HOSTS = re.compile(r"[^\x21-\x7e]")


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A run, as one sender process has opened it.

    Attributes:
        name: Of the run, 1 to 64 characters.
        epoch: Which opening of the run this is, from 1. An engine takes a later one in place of an
            earlier one, and refuses the earlier one from then on.
        host, pid: Of the process.
    """

    name: str
    epoch: int
    host: str
    pid: int

    @classmethod
    def opened(cls, name: str = "", epoch: int = 0) -> Run:
        """Open a run in this process, after `epoch` earlier openings; a new one without a name."""
        host = _NOT_IN_HOSTS.sub("-", socket.gethostname())[:255] or "-"
        return cls(name=name or uuid.uuid4().hex, epoch=epoch + 1, host=host, pid=os.getpid())

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata of every part of the run, as `encode_part` takes it."""
        owner = f"{self.host}:{self.pid}"
        return {"run": self.name, "run_epoch": self.epoch, "run_owner": owner}

    @property
    def request(self) -> dict[str, Any]:
        """Fields of a request to ``/delta_run``, without the action."""
        return {"run": self.name, "epoch": self.epoch, "host": self.host, "pid": self.pid}


prepare(Run)


def owner_in_words(owner: Any) -> str:
    """Return who a run's owner is, given the JSON object of an answer."""
    if not isinstance(owner, dict):
        return "a sender without a run"
    where = f"{owner.get('host') or 'an unknown host'}"
    if owner.get("pid") is not None:
        where += f", pid {owner['pid']}"
    since = owner.get("since")
    began = f", since {clock(since)}" if isinstance(since, (int, float)) else ""
    return f"run {owner.get('run')} ({where}{began})"


def clock(seconds: float) -> str:
    """Return a Unix time as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
