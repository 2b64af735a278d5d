"""The table of `scripts/doc_tables/conformance.py`."""

from __future__ import annotations

import json

from scripts.doc_tables import conformance
from tests.conformance.receivers import masked, scatter


def test_a_row_per_treatment_and_a_column_per_receiver() -> None:
    rows = conformance.judge_all([scatter, masked], only=["fused qkv", "truncated"])
    assert conformance.markdown(rows).splitlines() == [
        "| the loader | scatter | masked |",
        "| --- | --- | --- |",
        "| fused qkv: three tensors in one parameter | exact | exact, NaN refused |",
        "| truncated: the engine drops rows | refused | refused |",
    ]
    outcomes = {run["sync"]: run["outcome"] for run in rows[0]["columns"]["masked"]["runs"]}
    assert outcomes["only k"] == "exact"
    assert outcomes["to NaN"] == "refused"
    details = [run["detail"] for run in rows[1]["columns"]["scatter"]["runs"]]
    assert all("embed" in detail for detail in details)
    assert json.loads(json.dumps(rows)) == rows
    assert rows == conformance.judge_all([scatter, masked], ["fused qkv", "truncated"])
