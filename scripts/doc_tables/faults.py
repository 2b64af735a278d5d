"""The faults that live engines are tested with, and their outcomes; the rows of tests/faults."""

from __future__ import annotations

import importlib
from typing import Final

from scripts.doc_tables.markdown import table

_SURVIVED: Final = {
    "old": "old version",
    "new": "new version",
    "either": "one of the two",
    "uncertain": "uncertain: 503 until a full sync, which the sender sends",
}
_RESTARTED: Final = {
    "old": "nothing; after a restart: old version",
    "new": "nothing; after a restart: new version",
    "log": "nothing; after a restart: the newest version in the log",
}


def markdown() -> str:
    """Return one row per kind of fault: what it is, the answer, what the engine holds then."""
    deaths = importlib.import_module("tests.faults.process_deaths")
    survived = [*importlib.import_module("tests.faults.survivable").FAULTS, *deaths.RESPAWNS]
    rows = dict.fromkeys(
        [
            *((fault.what, fault.told, _SURVIVED[fault.ends]) for fault in survived),
            *((death.what, death.told, _RESTARTED[death.ends]) for death in deaths.DEATHS),
        ]
    )
    return table(["fault", "answer to the sender", "the engine holds"], rows)
