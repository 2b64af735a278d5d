"""Read the recorded runs of ``python -m scripts.gpu``: what was exact, and on which hardware."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parent / "results"


def recorded(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """Return the recorded runs, the newest first."""
    files = sorted(folder.glob("*.json"), reverse=True)
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def as_text(facts: dict[str, Any]) -> str:
    """Return the text of a run's file: a line for each row, and for each tree that was timed."""
    parts = []
    for key, value in facts.items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def is_exact(row: dict[str, Any]) -> bool:
    """Return whether a row's weights, texts and log probabilities were those of a fresh engine.

    So they were after the rollback and the full sync, too, if these ran, and nothing failed, also
    no request next to the syncs.
    """
    later = (found for found in checks(row).values() if found is not None)
    return "error" not in row and all(says_exact(one) for one in (row.get("verdict"), *later))


def checks(row: dict[str, Any]) -> dict[str, str | None]:
    """Return what was found after a row's syncs, by what was done; None: that did not run."""
    full = row.get("full")
    return {
        "rollback": row.get("rollback"),
        "sleep": row.get("buffers"),
        "full sync": full.get("verdict") if isinstance(full, dict) else full,
        "requests": _fault_of(row.get("load")),
    }


def _fault_of(load: dict[str, Any] | None) -> str | None:
    """Return what was wrong with the requests next to the syncs; None: nothing, or none ran."""
    if load is None:
        return None
    if load["failed"]:
        return f"failed: {load['failed'][:1]}"
    return None if load["answered"] else "none was answered"


def says_exact(verdict: str | None) -> bool:
    """Return whether a verdict is that nothing differed."""
    return str(verdict).startswith("exact")


def is_sound(timing: dict[str, Any]) -> bool:
    """Return whether the timing of a tree ended, and its engine had the weights that were sent."""
    verdict = timing.get("verdict", "exact")  # without a stock engine there is none
    committed = all(sync["status"] == "committed" for sync in timing.get("syncs", ()))
    digest = timing.get("digest_as_answered") is True and not timing.get("corrupted")
    failed = not timing.keys().isdisjoint(("error", "stock_error"))
    return not failed and says_exact(verdict) and committed and digest


def by_worth(
    names: Iterable[str], runs: Iterable[dict[str, Any]], engine: str = "vllm"
) -> list[str]:
    """Return rows in the order in which to run them: first those that have never been exact.

    Args:
        names: of rows, in the order of their worth.
        runs: that were recorded.
        engine: runs of another engine do not count.
    """
    own = [run for run in runs if run["engine"].lower().startswith(engine)]
    exact = {row["row"] for run in own for row in run["rows"] if is_exact(row)}
    return sorted(names, key=lambda name: name in exact)
