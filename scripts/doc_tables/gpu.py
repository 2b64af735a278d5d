"""The tables of what has run on GPUs, from the results of ``python -m scripts.gpu``."""

from __future__ import annotations

from typing import Any

from scripts.doc_tables.reference import table
from scripts.gpu.results import recorded


def rows() -> str:
    """Return a line for each model that ran, the newest run first."""
    return rows_of(recorded())


def rows_of(runs: list[dict[str, Any]]) -> str:
    """Return the table of some runs."""
    found = []
    for run in runs:
        where = f"{run['device']}, {run['engine']}"
        found += [[row.get("title", row["row"]), where, *_outcome(row)] for row in run["rows"]]
    return table(["model", "on", "plan", "outcome", "pause of a sync, ms"], found)


def _outcome(row: dict[str, Any]) -> list[str]:
    [counts] = row.get("certification") or [{}]
    plan = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    if "fixed" in row:
        return [plan, row["fixed"], ""]
    if "verdict" not in row:
        return [plan, f"not done: {_first_line(row.get('error', ''))}", ""]
    more = ["rollback"] * (row.get("rollback") == "exact")
    more += ["full sync"] * str(row.get("full", {}).get("verdict")).startswith("exact")
    tail = f"; {' and '.join(more)} exact" if more else ""
    pauses = [row[f"sync{n}"]["pause_ms"] for n in (1, 2, 3)]
    return [plan, row["verdict"].partition(" (")[0] + tail, ", ".join(f"{p:.0f}" for p in pauses)]


def _first_line(text: str) -> str:
    return text.partition("\n")[0].replace("|", "/")[:160]
