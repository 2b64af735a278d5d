"""The survey's own logic, without vLLM: results, their file and table, and the program."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.survey import __main__ as program
from scripts.survey import results
from scripts.survey.architectures import ARCHITECTURES
from scripts.survey.results import Result

LLAMA, MAMBA = "LlamaForCausalLM", "MambaForCausalLM"


def row(name: str, status: str, reason: str = "") -> dict[str, Any]:
    return {"name": name, "status": status, "reason": reason}


ROWS = [row("a", "exact"), row("b", "cast"), row("c", "rebuilt"), row("d", "ignored")]
REFUSED = row("layers.3.bias", "uncertified", "the loader moves it")


def test_a_plan_is_counted() -> None:
    found = results.from_plan(LLAMA, "Llama", [*ROWS, row("e", "exact"), REFUSED])
    counts = {"exact": 2, "cast": 1, "rebuilt": 1, "ignored": 1, "uncertified": 1}
    refused = {"layers.3.bias": "the loader moves it"}
    assert found == Result(LLAMA, "Llama", counts, refused, ["d"])
    assert found.unexplained == refused
    assert results.summary([found, Result(MAMBA, failure="no")]) == (
        "1 of 2 architectures loaded: 6 tensors: 2 exact, 1 cast, 1 rebuilt, 1 ignored, 1 refused"
    )


def test_a_tied_tensor_counts_once() -> None:
    tied = {**row("lm_head.weight", "ignored"), "tied_to": "a"}
    assert results.from_plan(LLAMA, "", [*ROWS, tied]) == results.from_plan(LLAMA, "", ROWS)


def test_a_cpu_decides_only_what_is_rebuilt() -> None:
    one = results.from_plan(LLAMA, "", ROWS)
    two = results.from_plan(LLAMA, "", [row("a", "rebuilt"), *ROWS[1:]])
    three = results.from_plan(LLAMA, "", [*ROWS[:3], REFUSED])
    assert one != two
    assert one.signature == two.signature != three.signature
    assert Result(LLAMA, failure="a").signature == Result(LLAMA, failure="b").signature


def test_stored_results_cover_and_explain_all_architectures() -> None:
    found = results.stored()
    assert [result.name for result in found] == list(ARCHITECTURES)
    assert {r.name: r.unexplained for r in found if r.unexplained} == {}
    assert sum(not result.failure for result in found) >= 50
    for result in found:
        for pattern in ARCHITECTURES[result.name].accepted:
            assert fnmatch.filter(result.refused, pattern), f"{result.name}: {pattern}"


# --- the program ---


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], list[str]]]:
    """Replace vLLM by results of two architectures; return what was asked for."""
    asked: list[tuple[list[str], list[str]]] = []
    known = {
        LLAMA: results.from_plan(LLAMA, "", ROWS),
        MAMBA: results.from_plan(MAMBA, "", [*ROWS, REFUSED]),
    }

    def plan_all(
        names: Sequence[str], folder: Path, flags: Sequence[str], *, jobs: int, timeout: float
    ) -> Iterator[Result]:
        asked.append((list(names), list(flags)))
        # With several jobs the order is another one.
        for name in reversed(names):
            yield known.get(name, Result(name, failure="none"))

    monkeypatch.setattr(program, "plan_all", plan_all)
    return asked


def test_a_refused_tensor_is_told_by_the_exit_status(
    planned: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(["--only", LLAMA, "--quantization", "fp8"]) == 0
    assert planned == [([LLAMA], ["--quantization", "fp8"])]
    shown = capsys.readouterr().out
    assert "LlamaForCausalLM: 1 exact, 1 cast, 1 rebuilt, 1 ignored\n" in shown
    assert program.main(["--only", LLAMA, "--only", MAMBA]) == 1
    shown = capsys.readouterr().out
    assert "    layers.3.bias: the loader moves it\n" in shown
    assert shown.index(MAMBA) < shown.index(LLAMA)
    assert shown.endswith(
        "2 of 2 architectures loaded: 9 tensors: 2 exact, 2 cast, 2 rebuilt, 2 ignored, 1 refused\n"
    )
