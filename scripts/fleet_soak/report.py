"""The figures of the soak, as tables."""

from __future__ import annotations

import statistics
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from scripts.fleet_soak.run import Figures, Row


def show(found: Figures, console: Console) -> None:
    """Print the figures as tables."""
    faults = Table(
        "fault", "phase", "engine", "at each engine", "version", "settled, s", "ready again, s",
        box=box.MARKDOWN,
    )  # fmt: skip
    for row in found.rows:
        faults.add_row(*cells(row))
    console.print(faults)
    requests = Table("X-Weight-Version", "requests", box=box.MARKDOWN)
    for kind, states in sorted(found.requests.items()):
        requests.add_row(kind, ", ".join(f"{n} {state}" for state, n in sorted(states.items())))
    console.print(requests)
    for name, value in summary(found).items():
        console.print(f"{name}: {value}")


def cells(row: Row) -> list[str]:
    """Return a row of the table of faults; engines that ended alike are named together."""
    alike: dict[str, list[str]] = {}
    for name, state in row.outcome.items():
        alike.setdefault(state, []).append(name)
    ended = "; ".join(f"{state}: {', '.join(names)}" for state, names in sorted(alike.items()))
    version = f"{row.before} -> {row.after}" if row.after != row.before else f"{row.before}"
    ready = "" if row.ready_s is None else f"{row.ready_s:.0f}"
    return [row.fault, row.phase, row.engine or "", ended, version, f"{row.settled_s:.1f}", ready]


def summary(found: Figures) -> dict[str, Any]:
    """Return the figures that are no table, in words."""
    tokens, times = found.tokens, found.sync_s or [0.0]
    states = ", ".join(f"{count} {state}" for state, count in sorted(found.states.items()))
    return {
        "commits": f"{found.commits} in {found.seconds:.0f} s, {found.aborts} by no engine",
        "of engines": states,
        "commit of all engines, s": f"median {statistics.median(times):.2f}, max {max(times):.2f}",
        "tokens compared": (
            f"{tokens.compared:,} of {tokens.answers:,} answers, {tokens.wrong} wrong; largest "
            f"difference {tokens.largest:.3f}"
        ),
        "changes of the version within an answer": (
            f"{tokens.boundaries}; {tokens.seen} of the {2 * tokens.boundaries} tokens at them "
            "would be seen at the wrong side"
        ),
        "reloads of the router": found.reloads,
        "not reached": ", ".join(found.missed) or "nothing",
    }
