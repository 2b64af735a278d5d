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


def is_exact(row: dict[str, Any]) -> bool:
    """Return whether a row's weights, texts and log probabilities were those of a fresh engine."""
    return str(row.get("verdict")).startswith("exact")


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


def exact_rows(runs: Iterable[dict[str, Any]], engine: str = "vllm") -> int:
    """Return how many rows of an engine have been exact, each counted once."""
    own = [run for run in runs if run["engine"].lower().startswith(engine)]
    return len({row["row"] for run in own for row in run["rows"] if is_exact(row)})
