"""The figures of a soak, as tables and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from scripts.soak.load import Counts
from scripts.soak.memory import MEMORY, Sample, trends
from scripts.soak.syncs import Record

_ALONE: Final = "load alone, bytes per second"


@dataclass
class Figures:
    """Results of a soak.

    Attributes:
        names: of the engine's processes, by id.
        warm_up: number of syncs after which growth is judged.
        load, quiet: outcomes of all requests, and of those before the first sync.
        quiet_s: seconds before the first sync.
        under_load: growth of memory in those, in bytes per second by process id; empty if they were
            too few.
        request_s: seconds of every request.
        problems: why the soak failed; empty if it passed.
    """

    record: Record
    names: dict[int, str]
    warm_up: int
    load: Counts
    quiet: Counts
    quiet_s: float
    under_load: dict[int, float]
    request_s: list[float]
    problems: list[str]

    def all(self) -> dict[str, Any]:
        """Return all figures, for `--json`."""
        record, load, quiet = self.record, self.load, self.quiet

        def name(pid: int) -> str:
            return self.names.get(pid, str(pid))

        return {
            "syncs": record.syncs,
            "seconds": round(record.seconds, 1),
            "syncs_per_s": round(record.syncs / record.seconds, 2),
            "by_way": record.by_way,
            "elements": record.elements,
            "wire_bytes": record.wire_bytes,
            "digest_checks": record.checks,
            "requests": {
                "finished": load.finished,
                "aborted_by_policy": load.aborted,
                "failed": load.failed,
            },
            "tokens_per_s": {
                "without_syncs": round(quiet.tokens / self.quiet_s, 1),
                "with_syncs": round((load.tokens - quiet.tokens) / record.seconds, 1),
            },
            "request_s": _percentiles(self.request_s, 3),
            "pause_ms": _percentiles(record.pauses_ms, 1),
            "parts": _percentiles(record.parts, 0),
            "warm_up": self.warm_up,
            "processes": {
                name(pid): {
                    what: [trend.first, trend.last, round(trend.slope, 1)]
                    for what, trend in of_process.items()
                }
                for pid, of_process in trends(self.judged(), self.under_load).items()
            },
            "load_alone_bytes_per_s": {
                name(pid): round(rate, 1) for pid, rate in self.under_load.items()
            },
            "memory_samples": [
                [sample.syncs, {name(pid): usage.memory for pid, usage in sample.processes.items()}]
                for sample in record.samples
            ],
            "problems": self.problems,
        }

    def judged(self) -> list[Sample]:
        """Return the samples after the warm-up."""
        return [sample for sample in self.record.samples if sample.syncs >= self.warm_up]


def show(found: Figures, console: Console) -> None:
    """Print the figures as tables."""
    figures = found.all()
    requests, rates = figures["requests"], figures["tokens_per_s"].values()
    table = Table("", "", box=box.MARKDOWN, show_header=False)
    rows = {
        "syncs": f"{figures['syncs']:,} in {figures['seconds']:,.0f} s",
        "syncs per second": f"{figures['syncs_per_s']:.2f}",
        "by kind": ", ".join(f"{count} {way}" for way, count in figures["by_way"].items()),
        "digest of live memory compared": f"{figures['digest_checks']:,} times, equal",
        "requests finished": f"{requests['finished']:,}",
        "requests aborted by policy": f"{requests['aborted_by_policy']:,}",
        "requests failed": f"{requests['failed']:,}",
        "tokens per second": "without syncs {}, with {}".format(*(f"{r:,.0f}" for r in rates)),
        "request, s": _joined(figures["request_s"]),
        "pause, ms": _joined(figures["pause_ms"]),
        "parts of a sync": _joined(figures["parts"]),
    }
    for row in rows.items():
        table.add_row(*row)
    console.print(table)
    process = f"process, after {found.warm_up} syncs"
    columns = (process, "memory, MiB", "bytes per sync", _ALONE, "open files", "threads")
    memory, alone = Table(*columns, box=box.MARKDOWN), figures["load_alone_bytes_per_s"]
    for name, of_process in figures["processes"].items():
        first, last, per_sync = of_process[MEMORY]
        others = [f"{a:g} -> {b:g}" for what, (a, b, _) in of_process.items() if what != MEMORY]
        sizes = f"{first / 2**20:.1f} -> {last / 2**20:.1f}"
        rate = f"{alone[name]:,.0f}" if name in alone else "-"
        memory.add_row(name, sizes, f"{per_sync:,.0f}", rate, *others)
    console.print(memory)


def _percentiles(values: Sequence[float], digits: int) -> dict[str, float]:
    hundredths = statistics.quantiles(values, n=100, method="inclusive")
    found = {"p50": hundredths[49], "p99": hundredths[98], "max": max(values)}
    return {name: round(value, digits) for name, value in found.items()}


def _joined(percentiles: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in percentiles.items())
