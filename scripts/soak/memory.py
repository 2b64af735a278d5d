"""Resources of an engine's processes, sampled over a soak, and whether their use stays flat."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import psutil

from delta_server.spool_files import UNUSED_SUFFIX
from scripts.process_memory import unmapped_bytes

MEMORY, FILES, THREADS = "memory", "open files", "threads"
_FIGURES: Final = {MEMORY: "memory", FILES: "files", THREADS: "threads"}  # fields of Usage


@dataclass(frozen=True)
class Usage:
    """The resources of one process: bytes of memory that no file backs, open files, threads."""

    memory: int
    files: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        """Measure a process.

        Raises:
            OSError, psutil.Error: It has ended.
        """
        process = psutil.Process(pid)
        return cls(unmapped_bytes(pid), process.num_fds(), process.num_threads())


@dataclass(frozen=True)
class Sample:
    """Usage of every process after some number of syncs, by process id; files in the spool.

    Attributes:
        at: seconds of a clock that only goes forward.
    """

    syncs: int
    processes: Mapping[int, Usage]
    spooled: int
    at: float = 0.0

    @classmethod
    def take(cls, syncs: int, pids: Iterable[int], spool: Path) -> Sample:
        """Measure all processes that still run."""
        usage, at = {}, time.monotonic()
        for pid in pids:
            with contextlib.suppress(OSError, psutil.Error):
                usage[pid] = Usage.of(pid)
        return cls(syncs, usage, len(spooled(spool)), at)


@dataclass(frozen=True)
class Trend:
    """Growth of one figure from the first to the last quarter of the samples.

    Attributes:
        first, last: the quarters' medians.
        span: number of syncs, or seconds, between the middles of the two quarters.
        bound: the largest allowed `last - first`.
    """

    first: float
    last: float
    span: float
    bound: float

    @classmethod
    def of(cls, points: Sequence[tuple[float, float]], bound: float) -> Trend:
        """Compute the trend of at least two (number of syncs or seconds, figure), in order."""
        quarter = max(1, len(points) // 4)
        first_syncs, first = _medians(points[:quarter])
        last_syncs, last = _medians(points[-quarter:])
        return cls(first, last, last_syncs - first_syncs, bound)

    @property
    def is_flat(self) -> bool:
        return self.last - self.first <= self.bound

    @property
    def slope(self) -> float:
        """Return the growth per sync, or per second."""
        return (self.last - self.first) / max(1.0, self.span)


# The largest allowed growth from the first to the last quarter of the samples. Memory: allocators
# keep freed memory. Files: connections come and go. Threads: pools grow when they are needed.
BOUNDS: Final[dict[str, float]] = {MEMORY: float(8 << 20), FILES: 8.0, THREADS: 4.0}


_SHORTEST_CONTROL_S: Final = 60.0


def growth_under_load(samples: Sequence[Sample]) -> dict[int, float]:
    """Compute how fast memory grows without syncs, in bytes per second by process id.

    vLLM's worker keeps about half a kilobyte of every request that it serves, without this
    extension, too. That is no growth by syncs.

    Args:
        samples: under load, before the first sync, in order. The first half is warm-up.

    Returns:
        Nothing if the samples span less than a minute, in which memory only settles.
    """
    if not samples or samples[-1].at - samples[0].at < _SHORTEST_CONTROL_S:
        return {}
    settled = samples[len(samples) // 2 :]
    found = {}
    for pid in _lasting(settled):
        points = [(sample.at, sample.processes[pid].memory) for sample in settled]
        found[pid] = max(0.0, Trend.of(points, 0.0).slope)
    return found


def trends(
    samples: Sequence[Sample], under_load: Mapping[int, float] | None = None
) -> dict[int, dict[str, Trend]]:
    """Compute, by process id, the trends of every process that is in all samples.

    Args:
        samples: those after the warm-up, at least two, in order.
        under_load: growth of memory without syncs, which is allowed in addition to the bound.
    """
    seconds = Trend.of([(sample.at, 0.0) for sample in samples], 0.0).span
    found = {}
    for pid in _lasting(samples):
        measured = [(sample.syncs, sample.processes[pid]) for sample in samples]
        of_process = {
            what: Trend.of([(syncs, getattr(use, figure)) for syncs, use in measured], BOUNDS[what])
            for what, figure in _FIGURES.items()
        }
        allowed = BOUNDS[MEMORY] + seconds * (under_load or {}).get(pid, 0.0)
        of_process[MEMORY] = replace(of_process[MEMORY], bound=allowed)
        found[pid] = of_process
    return found


def _lasting(samples: Sequence[Sample]) -> list[int]:
    return sorted(set.intersection(*(set(sample.processes) for sample in samples)))


def grown(
    samples: Sequence[Sample],
    names: Mapping[int, str],
    under_load: Mapping[int, float] | None = None,
) -> list[str]:
    """Describe every figure that grew, and every process that was started or lost; see `trends`."""
    problems = [
        f"{names.get(pid, pid)}: {what} grew from {trend.first:,.0f} to {trend.last:,.0f}, "
        f"{trend.slope:,.1f} per sync; the bound is {trend.bound:,.0f} in all"
        for pid, of_process in trends(samples, under_load).items()
        for what, trend in of_process.items()
        if not trend.is_flat
    ]
    before, after = set(samples[0].processes), set(samples[-1].processes)
    problems += [f"process {pid} was started during the soak" for pid in sorted(after - before)]
    problems += [f"{names.get(pid, pid)} was lost" for pid in sorted(before - after)]
    spool = Trend.of([(sample.syncs, sample.spooled) for sample in samples], 0.0)
    if not spool.is_flat:
        problems.append(f"files in the spool grew from {spool.first:g} to {spool.last:g}")
    return problems


def names_of(pids: Iterable[int]) -> dict[int, str]:
    """Return short names of processes by id; repeated names are numbered."""
    found: dict[int, str] = {}
    seen: Counter[str] = Counter()
    for pid in pids:
        name = _name(pid)
        seen[name] += 1
        found[pid] = name if seen[name] == 1 else f"{name} {seen[name]}"
    return found


def _name(pid: int) -> str:
    """Return a process's title or the module that it runs."""
    try:
        command = psutil.Process(pid).cmdline() or [""]
    except psutil.Error:
        return str(pid)
    title: str = command[0]
    if "::" in title:
        return title.strip()
    ours = "-m" in command[:-1]
    module: str = command[command.index("-m") + 1] if ours else " ".join(command[1:])
    return "resource tracker" if "resource_tracker" in module else module[:40]


def spooled(folder: Path) -> list[Path]:
    """List the files in a spool folder that are not empty, but those to be written again."""
    found = []
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):  # it might be gone by now
            if file.suffix != UNUSED_SUFFIX and file.is_file() and file.stat().st_size:
                found.append(file)
    return found


def _medians(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return statistics.median(p[0] for p in points), statistics.median(p[1] for p in points)
