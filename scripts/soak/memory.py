"""What the processes of an engine keep, sampled over a soak, and whether it stays flat."""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# Anonymous memory and shared memory, the latter by this process's share. Mapped files are left
# out: which of their pages are here depends on what else runs on the machine.
_COUNTED: Final = ("Pss_Anon", "Pss_Shmem", "SwapPss")

MEMORY, FILES, THREADS = "memory", "open files", "threads"


@dataclass(frozen=True)
class Use:
    """What one process keeps: bytes of memory, open files, threads."""

    memory: int
    files: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Use:
        """Raises OSError: it is gone."""
        proc = Path(f"/proc/{pid}")
        return cls(
            memory_bytes((proc / "smaps_rollup").read_text()),
            len(list((proc / "fd").iterdir())),
            len(list((proc / "task").iterdir())),
        )


@dataclass(frozen=True)
class Sample:
    """What every process keeps after so many syncs, by process id; files in the spool folder."""

    syncs: int
    processes: Mapping[int, Use]
    spooled: int

    @classmethod
    def take(cls, syncs: int, pids: Iterable[int], spool: Path) -> Sample:
        uses = {}
        for pid in pids:
            with contextlib.suppress(OSError):
                uses[pid] = Use.of(pid)
        return cls(syncs, uses, len(spooled(spool)))


@dataclass(frozen=True)
class Trend:
    """How something went: medians of the first and the last quarter of the samples.

    Attributes:
        first, last: the medians.
        syncs: between the middles of the two quarters.
        bound: most by which `last` may be above `first`.
    """

    first: float
    last: float
    syncs: float
    bound: float

    @classmethod
    def of(cls, points: Sequence[tuple[int, float]], bound: float) -> Trend:
        """Of (syncs, what was found) by syncs; at least two."""
        quarter = max(1, len(points) // 4)
        begin, end = points[:quarter], points[-quarter:]
        (begun, first), (ended, last) = map(_medians, (begin, end))
        return cls(first, last, ended - begun, bound)

    @property
    def is_flat(self) -> bool:
        return self.last - self.first <= self.bound

    @property
    def per_sync(self) -> float:
        """How much was added per sync."""
        return (self.last - self.first) / max(1.0, self.syncs)


# Most that each may grow by from the first to the last quarter of the samples. Memory: what an
# allocator holds back. Files: connections come and go. Threads: pools grow when they are needed.
BOUNDS: Final[dict[str, float]] = {MEMORY: float(8 << 20), FILES: 8.0, THREADS: 4.0}


def trends(samples: Sequence[Sample]) -> dict[int, dict[str, Trend]]:
    """What became of each process that was there all the time, by process id.

    Args:
        samples: those after the warm-up, at least two, in order.
    """
    lasting = set.intersection(*(set(sample.processes) for sample in samples))
    found: dict[int, dict[str, Trend]] = {}
    for pid in sorted(lasting):
        uses = [(sample.syncs, sample.processes[pid]) for sample in samples]
        series: dict[str, list[tuple[int, float]]] = {
            MEMORY: [(syncs, use.memory) for syncs, use in uses],
            FILES: [(syncs, use.files) for syncs, use in uses],
            THREADS: [(syncs, use.threads) for syncs, use in uses],
        }
        found[pid] = {what: Trend.of(points, BOUNDS[what]) for what, points in series.items()}
    return found


def grown(samples: Sequence[Sample], names: Mapping[int, str]) -> list[str]:
    """What is not flat, in words; processes that were started or lost on the way too.

    Args:
        samples: as of `trends`.
        names: of the processes.
    """
    problems = [
        f"{names.get(pid, pid)}: {what} grew from {trend.first:,.0f} to {trend.last:,.0f}, "
        f"{trend.per_sync:,.1f} per sync; the bound is {trend.bound:,.0f} in all"
        for pid, of_process in trends(samples).items()
        for what, trend in of_process.items()
        if not trend.is_flat
    ]
    before, after = set(samples[0].processes), set(samples[-1].processes)
    problems += [f"process {pid} was started on the way" for pid in sorted(after - before)]
    problems += [f"{names.get(pid, pid)} was lost" for pid in sorted(before - after)]
    spool = Trend.of([(sample.syncs, sample.spooled) for sample in samples], 0.0)
    if not spool.is_flat:
        problems.append(f"files in the spool grew from {spool.first:g} to {spool.last:g}")
    return problems


def names_of(pids: Iterable[int]) -> dict[int, str]:
    """What processes call themselves, by id; of those with one name the later ones are numbered."""
    found: dict[int, str] = {}
    seen: Counter[str] = Counter()
    for pid in pids:
        name = _name(pid)
        seen[name] += 1
        found[pid] = name if seen[name] == 1 else f"{name} {seen[name]}"
    return found


def _name(pid: int) -> str:
    """What a process calls itself, short."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return str(pid)
    title = words[0]
    if "::" in title:
        return title.strip()
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else " ".join(words[1:])
    return "resource tracker" if "resource_tracker" in module else f"{module[:40]}"


def memory_bytes(rollup: str) -> int:
    """Bytes of memory by the text of ``smaps_rollup``."""
    pairs = (line.split() for line in rollup.splitlines())
    return sum(int(pair[1]) << 10 for pair in pairs if pair[0].rstrip(":") in _COUNTED)


def spooled(folder: Path) -> list[Path]:
    """Files in a spool folder that hold something."""
    found = []
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):  # it may be gone by now
            if file.is_file() and file.stat().st_size:
                found.append(file)
    return found


def _medians(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    return statistics.median(p[0] for p in points), statistics.median(p[1] for p in points)
