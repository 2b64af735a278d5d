"""The table of `scripts/conformance_table.py`."""

from __future__ import annotations

import json

import conformance_table
from tests.conformance.ours import masked, scatter


def test_a_row_per_treatment_and_a_column_per_receiver() -> None:
    rows = conformance_table.judge_all([scatter, masked], only=["fused qkv", "packed away"])
    assert conformance_table.markdown(rows).splitlines() == [
        "| the loader | scatter | masked |",
        "| --- | --- | --- |",
        "| fused qkv: three tensors in one parameter | exact | exact, NaN refused |",
        "| packed away: an empty tensor is left, the weight is in a handle or gone | refused | refused |",
    ]
    outcomes = {run["sync"]: run["outcome"] for run in rows[0]["columns"]["masked"]["runs"]}
    assert outcomes["only k"] == "exact"
    assert outcomes["to NaN"] == "refused"
    details = [run["detail"] for run in rows[1]["columns"]["scatter"]["runs"]]
    assert all("weight" in detail for detail in details)
    assert json.loads(json.dumps(rows)) == rows
    assert rows == conformance_table.judge_all([scatter, masked], ["fused qkv", "packed away"])
