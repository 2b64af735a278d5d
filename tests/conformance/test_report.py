"""The rows and the table of the suite, `engine_ext.conformance.report`."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from engine_ext.conformance import report
from engine_ext.conformance.receivers import masked, scatter
from engine_ext.conformance.subject import Delta, Rank

pytestmark = pytest.mark.slow


class Careless:
    """Serves, and writes nothing."""

    name = "careless"

    def serve(self, ranks: Sequence[Rank]) -> None:
        for rank in ranks:
            rank.load()
            rank.process()

    def apply(self, deltas: Sequence[Delta]) -> None:
        pass


def test_table_has_row_per_treatment_and_column_per_receiver() -> None:
    judged: list[tuple[str, str]] = []
    only = ["fused qkv", "truncated"]
    rows = report.judge_all([scatter, masked], only, lambda *names: judged.append(names))
    assert report.markdown(rows).splitlines() == [
        "| the loader | scatter | masked |",
        "| --- | --- | --- |",
        "| fused qkv: three tensors in one parameter | exact | exact, NaN refused |",
        "| truncated: the engine drops rows | refused | refused |",
    ]
    assert judged == [(case, receiver) for case in only for receiver in ("scatter", "masked")]
    outcomes = {run["sync"]: run["outcome"] for run in rows[0]["columns"]["masked"]["runs"]}
    assert outcomes["only k"] == "exact"
    assert outcomes["to NaN"] == "refused"
    details = [run["detail"] for run in rows[1]["columns"]["scatter"]["runs"]]
    assert all("embed" in detail for detail in details)
    assert report.violations(rows) == []
    assert json.loads(json.dumps(rows)) == rows
    assert rows == report.judge_all([scatter, masked], only)


def test_violations_name_receiver_case_and_tensor() -> None:
    found = report.violations(report.judge_all([Careless], ["fused qkv"]))
    assert found[0] == "careless: fused qkv, FusedQkv, sparse 0.5 %: WRONG: rank 0: qkv"


def test_receivers_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="same name: careless, careless"):
        report.judge_all([Careless, Careless])
