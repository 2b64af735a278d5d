"""Print what faults an engine is tested with and what comes of them, as Markdown.

The rows are those of tests/faults, where each is met by live engines.

    python scripts/doc_tables/faults.py
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
ENDS: Final = {
    "old": "old version",
    "new": "new version",
    "either": "one of the two",
    "uncertain": "uncertain: 503 until a full sync, which the sender sends",
}
AFTER_DEATH: Final = {
    "old": "nothing; started again: old version",
    "new": "nothing; started again: new version",
    "log": "nothing; started again: the newest that the log has",
}


def markdown() -> str:
    """One row per kind of fault: what it is, what the sender is told, what the engine holds."""
    deaths = importlib.import_module("tests.faults.process_deaths")
    outlived = [*importlib.import_module("tests.faults.survivable").FAULTS, *deaths.RESPAWNS]
    rows = dict.fromkeys(
        [
            *((fault.what, fault.told, ENDS[fault.ends]) for fault in outlived),
            *((death.what, death.told, AFTER_DEATH[death.ends]) for death in deaths.DEATHS),
        ]
    )
    lines = ["| fault | the sender is told | the engine holds |", "| --- " * 3 + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.parse_args(argv)
    print(markdown())


if __name__ == "__main__":
    main()
