"""The table of `scripts/fault_matrix.py`; starts no engine."""

from __future__ import annotations

import fault_matrix
from tests.faults.alive import FAULTS


def test_a_row_per_kind_of_fault() -> None:
    rows = fault_matrix.markdown().splitlines()
    whats = list(dict.fromkeys(fault.what for fault in FAULTS))
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows[2:]] == whats
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
