"""The table of `scripts.doc_tables.reference`; starts no engine."""

from __future__ import annotations

from typing import Any

from scripts.doc_tables.reference import fault_table
from tests.faults.hanging import HANGING
from tests.faults.in_flight import IN_FLIGHT
from tests.faults.process_deaths import DEATHS, RESPAWNS
from tests.faults.rebuilding import REBUILD_DEATHS, REBUILD_FAULTS
from tests.faults.store import STORE
from tests.faults.survivable import FAULTS


def test_a_row_per_kind_of_fault() -> None:
    rows = fault_table().splitlines()
    survived: list[Any] = [*FAULTS, *IN_FLIGHT, *REBUILD_FAULTS, *HANGING, *RESPAWNS]
    faults: list[Any] = [*survived, *DEATHS, *REBUILD_DEATHS, *STORE]
    whats = list(dict.fromkeys(fault.what for fault in faults))
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows[2:]] == whats
    assert len({fault.name for fault in faults}) == len(faults)
