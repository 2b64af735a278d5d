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


def test_every_kind_of_fault_is_in_one_row() -> None:
    rows = fault_table().splitlines()
    survived: list[Any] = [*FAULTS, *IN_FLIGHT, *REBUILD_FAULTS, *HANGING, *RESPAWNS]
    faults: list[Any] = [*survived, *DEATHS, *REBUILD_DEATHS, *STORE]
    whats = {fault.what for fault in faults}
    cells = [row.removeprefix("| ").split(" | ") for row in rows[2:]]
    assert sorted(what for cell in cells for what in cell[0].split("<br>")) == sorted(whats)
    assert len({(answer, holds) for _, answer, holds in cells}) == len(cells)
    assert len({fault.name for fault in faults}) == len(faults)
