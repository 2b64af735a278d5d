"""The tables of what has run on which hardware, from the results of ``python -m scripts.gpu``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from engine_ext.adapters.sglang import features as sglang
from engine_ext.adapters.vllm import features as vllm
from scripts.doc_tables.reference import table
from scripts.gpu.results import checks, is_exact, recorded, says_exact
from scripts.gpu.rows import rows_of as rows_that_are_there

_ENGINES: Final = (vllm.VERSIONS, sglang.VERSIONS)


def hardware() -> str:
    """Return a line for each kind of hardware: how many rows were exact, and which were not."""
    return hardware_of(recorded())


def hardware_of(runs: list[dict[str, Any]]) -> str:
    """Return the table of some runs, the newest first; of a row, the newest one counts."""
    ran = {own.engine: [v for v in own.supported if v not in own.not_run] for own in _ENGINES}
    newest = " and ".join(f"{engine} {versions[-1]}" for engine, versions in ran.items())
    older = ", ".join(f"{engine} {v}" for engine, found in ran.items() for v in found[:-1])
    tested = (
        f"{newest}: every test, up to two ranks, replicas and pipeline stages; {older}: the basics"
    )
    lines = [["CPUs (AMD EPYC, Intel Xeon)", tested]]
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for run in runs:
        rows = found.setdefault((run["device"], run["engine"]), {})
        for row in run["rows"]:
            rows.setdefault(row["row"], row)
    for (device, engine), rows in found.items():
        wrong = [row.get("title", name) for name, row in rows.items() if not is_exact(row)]
        count = f"[{len(rows) - len(wrong)} of {len(rows)} rows exact](docs/gpu.md)"
        lines.append([device, "; ".join([f"{engine}: {count}", *(f"not {one}" for one in wrong)])])
    engines = {engine.partition(" ")[0] for _, engine in found}
    missing = [f"{own.engine} on a GPU" for own in _ENGINES if own.engine not in engines]
    missing += [f"{own.engine} {v} beyond its sources" for own in _ENGINES for v in own.not_run]
    models = "large models end to end ([an estimate](docs/scaling.md))"
    lines.append(["not yet", ", ".join([*missing, models, "AMD, TPU"])])
    return table(["ran on", "what"], lines)


def not_run() -> str:
    """Return the rows of each engine that no recorded run has."""
    lines = []
    for own in _ENGINES:
        runs = [run for run in recorded() if run["engine"].startswith(own.engine)]
        names = {row["row"] for run in runs for row in run["rows"]}
        rows = rows_that_are_there(own.engine.lower())
        left = [row.title for name, row in rows.items() if name not in names]
        which = f"all {len(rows)} rows" if len(left) == len(rows) else "; ".join(left) or "none"
        lines.append(f"- {own.engine}: {which}.")
    return "\n".join(lines)


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
    for run, one in _timings(runs):
        last = {sync["encoding"]: sync for sync in one.get("syncs", ())}
        found += [[_where(run, one), *_figures(sync)] for sync in last.values()]
    head = ["on", "encoding", "wire, MB", "wall, ms", "of it encoding", "pause", "write"]
    return table([*head, "largest token gap", "processors, s: sender, engine"], found)


def compared() -> str:
    """Return what syncs are compared with, the newest run first."""
    return compared_of(recorded())


def compared_of(runs: list[dict[str, Any]]) -> str:
    """Return a line for each figure that some runs have besides their syncs."""
    found = []
    for run, one in _timings(runs):
        ways = {way["way"]: way for way in one.get("own_ways", ())}  # the last time of each
        lines = [[f"stock vLLM: {name}, ms", *_way(way)] for name, way in ways.items()]
        if "read_both_ms" in one:
            lines.append(
                ["reading both copies of the weights, ms", f"{one['read_both_ms']:.1f}", ""]
            )
        if one.get("stock_start_s") is not None and "start_s" in one:
            lines.append(
                ["start beyond stock, s", f"{one['start_s'] - one['stock_start_s']:.1f}", ""]
            )
        held = one.get("gpu_mib", {})
        if held.get("stock") is not None and "after" in held:
            lines.append(["GPU memory beyond stock, MiB", f"{held['after'] - held['stock']}", ""])
        found += [[_where(run, one), *line] for line in lines]
    if not found:
        return "No recorded run has these figures yet."
    return table(["on", "figure", "value", "largest token gap, ms"], found)


def _timings(runs: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each timing of this tree, and its run."""
    for run in runs:
        yield from ((run, one) for one in run.get("timing", ()) if one["tree"] == "new")


def _where(run: dict[str, Any], one: dict[str, Any]) -> str:
    return f"{run['device']}, {one['weights'] / 1e9:.1f} billion weights"


def _figures(sync: dict[str, Any]) -> list[str]:
    timings = sync["timings_ms"]
    times = sync["wall_ms"], sync["encode_ms"], timings["pause_ms"], timings["commit_ms"]
    shown = [f"{sync['wire_bytes'] / 1e6:.0f}", *map(_number, times)]
    spent = [f"{sync[of]:.1f}" for of in ("sender_cpu_s", "engine_cpu_s") if of in sync]
    return [f"`{sync['encoding']}`", *shown, _gap(sync), ", ".join(spent)]


def _way(way: dict[str, Any]) -> list[str]:
    if "error" in way:
        return [f"not done: {_first_line(way['error'])}", ""]
    return [_number(way["wall_ms"]), _gap(way)]


def _gap(measured: dict[str, Any]) -> str:
    gap = measured["token_gap_ms"].get("largest")
    return "" if gap is None else _number(gap)


def _number(value: float) -> str:
    return f"{value:.0f}"


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
