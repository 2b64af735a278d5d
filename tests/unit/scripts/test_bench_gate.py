"""The gate of benchmarks: what is worse than stored fails, by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.bench import gate

RUN: dict[str, Any] = {
    "bytes_per_element": {"gap8_exp": {"0.02": 2.2}},
    "decode_and_scatter_vs_scatter": {"gap8_exp": {"0.02": 4.0}},
    "encode_vs_plain_torch": 5.0,
}


def slower(factor: float, nbytes: float = 2.2) -> dict[str, Any]:
    return {
        "bytes_per_element": {"gap8_exp": {"0.02": nbytes}},
        "decode_and_scatter_vs_scatter": {"gap8_exp": {"0.02": 4.0 * factor}},
        "encode_vs_plain_torch": 5.0 / factor,
    }


@pytest.mark.parametrize(
    ("runs", "status", "says"),
    [
        ([RUN], 0, "3 ratios, 0 worse"),
        ([slower(1.4)], 0, "0 worse"),
        ([slower(3.0), RUN, RUN], 0, "0 worse"),  # the median of the runs counts
        ([slower(1.6)], 1, "gap8_exp: time to decode and write / to write: 6.4, above 6; it was 4"),
        ([slower(1.6)], 1, "in plain torch: 0.32, above 0.3; it was 0.2"),
        ([slower(1.0, nbytes=2.23)], 1, "gap8_exp: bytes per changed element: 2.23, above 2.22"),
        ([{**RUN, "bytes_per_element": {}}], 1, "not measured; it was 2.2"),
    ],
)
def test_what_is_worse_fails_by_name(
    runs: list[dict[str, Any]],
    status: int,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stored = tmp_path / "ratios.json"
    assert gate.main(["--store"], stored, lambda _: [RUN]) == 0
    assert gate.main([], stored, lambda _: runs) == status
    printed = capsys.readouterr()
    assert says in printed.out + printed.err


@pytest.mark.slow
def test_stored_ratios_are_those_that_are_measured() -> None:
    assert json.loads(gate.STORED.read_text()).keys() == gate.ratios(gate.measure(1)).keys()
