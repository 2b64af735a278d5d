"""The gate of benchmarks: what is worse than in an earlier commit fails, by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from scripts.bench import gate

ROOT = Path(__file__).parents[3]
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
        ([RUN], 0, "3 ratios, 0 worse than in HEAD"),
        ([slower(1.4)], 0, "0 worse"),
        ([slower(3.0), RUN, RUN], 0, "0 worse"),  # the median of the runs counts
        ([slower(1.6)], 1, "gap8_exp: time to decode and write / to write: 6.4, above 6; it was 4"),
        ([slower(1.6)], 1, "in plain torch: 0.32, above 0.3; it was 0.2"),
        ([slower(1.0, nbytes=2.23)], 1, "gap8_exp: bytes per changed element: 2.23, above 2.22"),
        ([{**RUN, "bytes_per_element": {}}], 1, "not measured; it was 2.2"),
    ],
)
def test_what_is_worse_fails_by_name(
    runs: list[dict[str, Any]], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = iter(runs)

    def measure(tree: Path, cache: Path) -> Mapping[str, Any]:
        assert (tree / "scripts" / "bench" / "codec.py").exists()
        return next(measured) if tree == ROOT else RUN

    arguments = ["--against", "HEAD", "--runs", str(len(runs))]
    assert gate.main(arguments, measure) == status
    printed = capsys.readouterr()
    assert says in printed.out + printed.err


def test_a_commit_that_git_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert gate.main(["--against", "no-such-commit"]) == 1
    assert "name a commit with --against" in capsys.readouterr().err


@pytest.mark.slow
def test_a_commits_own_benchmark_is_run(tmp_path: Path) -> None:
    gate.unpack("HEAD", tmp_path / "tree")
    found = gate.ratios([gate.measure(tmp_path / "tree", tmp_path / "cache")])
    assert len(found) == 11
    assert found["gap8_ulp: bytes per changed element"] < 1.2
