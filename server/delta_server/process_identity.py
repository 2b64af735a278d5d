"""HTTP processes of one engine, as they name themselves to the ranks; all are on one host."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

_STATE, _START_TIME = 0, 19  # fields of /proc/PID/stat behind the command


def new_name() -> str:
    """A name for something in this process, which tells whether the process still lives."""
    return f"{os.getpid()}:{_start_time(os.getpid())}:{uuid.uuid4().hex}"


def is_alive(name: str) -> bool:
    """Whether the process that made this name by `new_name` still lives."""
    pid, start_time, _ = name.split(":")
    return _start_time(int(pid)) == start_time


def _start_time(pid: int) -> str | None:
    """In clock ticks since the host's start; None where the process is dead."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The command stands in parentheses and may hold any.
    fields = stat.rpartition(")")[2].split()
    return None if fields[_STATE] in "ZX" else fields[_START_TIME]
