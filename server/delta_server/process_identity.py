"""Names of an engine's HTTP processes, from which every other process sees whether one lives.

All processes of one engine's HTTP side run on one host.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

_STATE, _START_TIME = 0, 19  # fields of /proc/PID/stat after the command


def new_name() -> str:
    """Return a unique name that identifies this process even if its pid is used again."""
    return f"{os.getpid()}:{_start_time(os.getpid())}:{uuid.uuid4().hex}"


def is_alive(name: str) -> bool:
    """Return whether the process that made this name with `new_name` still runs."""
    pid, start_time, _ = name.split(":")
    return _start_time(int(pid)) == start_time


def pid_of(name: str) -> int:
    """Return the id of the process that made this name with `new_name`."""
    return int(name.partition(":")[0])


def _start_time(pid: int) -> str | None:
    """Return a process's start in clock ticks since boot; None if it is dead or a zombie.

    `psutil.Process.create_time` is wall-clock time instead. It changes when the host's clock is
    set, and a living process would then be taken for dead.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The command is in parentheses and can contain some itself.
    fields = stat.rpartition(")")[2].split()
    return None if fields[_STATE] in "ZX" else fields[_START_TIME]
