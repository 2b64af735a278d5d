"""The tables of what has run on GPUs, from the results of ``python -m scripts.gpu``."""

from __future__ import annotations

from typing import Any

from scripts.doc_tables.reference import table
from scripts.gpu.results import checks, recorded, says_exact


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


def syncs() -> str:
    """Return a line for the last sync of each encoding of the large models, the newest first."""
    return syncs_of(recorded())


def syncs_of(runs: list[dict[str, Any]]) -> str:
    """Return the table of the syncs in some runs; those of other trees are left out."""
    found = []
    for run in runs:
        for one in run.get("timing", ()):
            own = one.get("syncs", ()) if one["tree"] == "new" else ()
            last = {sync["encoding"]: sync for sync in own}
            found += [[_where(run, one), *_figures(sync)] for sync in last.values()]
    head = ["on", "encoding", "wire, MB", "wall, ms", "of it encoding", "pause", "write"]
    return table([*head, "largest token gap"], found)


def _where(run: dict[str, Any], one: dict[str, Any]) -> str:
    return f"{run['device']}, {one['weights'] / 1e9:.1f} billion weights"


def _figures(sync: dict[str, Any]) -> list[str]:
    timings = sync["timings_ms"]
    times = sync["wall_ms"], sync["encode_ms"], timings["pause_ms"], timings["commit_ms"]
    gap = sync["token_gap_ms"].get("largest")
    shown = [f"{sync['wire_bytes'] / 1e6:.0f}", *(f"{one:.0f}" for one in times)]
    return [f"`{sync['encoding']}`", *shown, "" if gap is None else f"{gap:.0f}"]


def _outcome(row: dict[str, Any]) -> list[str]:
    [counts] = row.get("certification") or [{}]
    plan = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    if "fixed" in row:
        return [plan, row["fixed"], ""]
    if "verdict" not in row:
        return [plan, f"not done: {_first_line(row.get('error', ''))}", ""]
    found = {what: one for what, one in checks(row).items() if one is not None}
    more = [what for what, one in found.items() if says_exact(one)]
    tail = f"; {' and '.join(more)} exact" if more else ""
    wrong = (f"; {what} {_first_line(one)}" for what, one in found.items() if what not in more)
    tail += "".join(wrong)
    if "error" in row:
        tail += f"; not done: {_first_line(row['error'])}"
    pauses = [row[f"sync{n}"]["pause_ms"] for n in (1, 2, 3)]
    return [plan, row["verdict"].partition(" (")[0] + tail, ", ".join(f"{p:.0f}" for p in pauses)]


def _first_line(text: str) -> str:
    return text.partition("\n")[0].replace("|", "/")[:160]
