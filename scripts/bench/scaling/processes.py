"""The processes of an engine that take part in a sync, and their CPU time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from scripts.live_engine.process import EngineError, EngineProcess


def roles(engine: EngineProcess) -> dict[str, int]:
    """Return the process ids of ``rank 0`` and so on, and of ``server``, the first of all.

    Raises:
        EngineError: There are not as many ranks as the engine should have.
    """
    pids = sorted(engine.pids(), key=lambda pid: float(psutil.Process(pid).create_time()))
    titles = {pid: " ".join(psutil.Process(pid).cmdline()) for pid in pids}
    ranks = sorted(pid for pid in pids if engine.rank_title in titles[pid])
    if len(ranks) != engine.tp:
        raise EngineError(f"not {engine.tp} ranks among the engine's processes: {titles}")
    return {"server": pids[0], **{f"rank {number}": pid for number, pid in enumerate(ranks)}}


def cpu_seconds(watched: Mapping[str, int]) -> dict[str, float]:
    """Return CPU seconds of this process, as ``sender``, and of others by role.

    Of others those of the threads that they have now; of a rank without its main thread, in which
    an engine may wait in a loop. The system tells a process's time in hundredths, a thread's in
    nanoseconds.
    """
    found = {"sender": time.process_time()}
    for name, pid in watched.items():
        threads = {each.id for each in psutil.Process(pid).threads()}
        if name.startswith("rank"):
            threads -= {pid}
        found[name] = sum(_thread_seconds(pid, thread) for thread in threads)
    return found


def _thread_seconds(process: int, thread: int) -> float:
    try:
        text = Path(f"/proc/{process}/task/{thread}/schedstat").read_text()
    except FileNotFoundError:  # it has just ended
        return 0.0
    return int(text.split()[0]) / 1e9
