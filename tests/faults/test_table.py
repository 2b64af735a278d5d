"""The table of `scripts/doc_tables/faults.py`; starts no engine."""

from __future__ import annotations

from scripts.doc_tables import faults as fault_matrix
from tests.faults.process_deaths import DEATHS, RESPAWNS
from tests.faults.survivable import FAULTS


def test_a_row_per_kind_of_fault() -> None:
    rows = fault_matrix.markdown().splitlines()
    faults = [*FAULTS, *RESPAWNS, *DEATHS]
    whats = list(dict.fromkeys(fault.what for fault in faults))
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows[2:]] == whats
    assert len({fault.name for fault in faults}) == len(faults)


def test_it_stands_in_the_readme() -> None:
    readme = (fault_matrix.ROOT / "README.md").read_text(encoding="utf-8")
    assert fault_matrix.markdown() + "\n\n" in readme
