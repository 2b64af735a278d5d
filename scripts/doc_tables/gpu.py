"""The table of what has run on GPUs, from the results of ``python -m scripts.gpu``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from scripts.doc_tables.reference import table

RESULTS: Final = Path(__file__).resolve().parents[1] / "gpu" / "results"


def rows() -> str:
    """Return a line for each model that ran, the newest run first."""
    found = []
    for file in sorted(RESULTS.glob("*.json"), reverse=True):
        run = json.loads(file.read_text(encoding="utf-8"))
        where = f"{run['device']}, {run['engine']}"
        found += [[row.get("title", row["row"]), where, *_outcome(row)] for row in run["rows"]]
    return table(["model", "on", "plan", "outcome", "pause of a sync, ms"], found)


def _outcome(row: dict[str, Any]) -> list[str]:
    plan = ", ".join(f"{count} {kind}" for kind, count in row["certification"][0].items())
    if "fixed" in row:
        return [plan, row["fixed"], ""]
    more = ["rollback"] * (row.get("rollback") == "exact")
    more += ["full sync"] * str(row.get("full", {}).get("verdict")).startswith("exact")
    tail = f"; {' and '.join(more)} exact" if more else ""
    pauses = [row[f"sync{n}"]["pause_ms"] for n in (1, 2, 3)]
    return [plan, row["verdict"].partition(" (")[0] + tail, ", ".join(f"{p:.0f}" for p in pauses)]
