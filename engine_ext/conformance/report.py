"""The outcomes of the suite as rows, and rows as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from engine_ext.conformance.cases import CASES, cell, run_case
from engine_ext.conformance.judge import TORN, WRONG
from engine_ext.conformance.subject import SubjectFactory

Row = dict[str, Any]


def judge_all(
    factories: Sequence[SubjectFactory],
    only: Sequence[str] = (),
    report: Callable[[str, str], None] = lambda case, subject: None,
) -> list[Row]:
    """Return a row per treatment: its name, what it is, and a cell and all outcomes per receiver.

    Args:
        factories: of the receivers; their names become the columns.
        only: treatments by name; empty for all.
        report: called with the names of a treatment and a receiver before they are judged.

    Raises:
        ValueError: two receivers have the same name.
        RuntimeError: a receiver did not load and process every rank once.
    """
    names = [make().name for make in factories]
    if len(set(names)) < len(names):
        raise ValueError(f"receivers with the same name: {', '.join(names)}")
    rows = []
    for case in CASES:
        if only and case.name not in only:
            continue
        columns: dict[str, Any] = {}
        for name, make in zip(names, factories, strict=True):
            report(case.name, name)
            runs = run_case(case, make)
            columns[name] = {
                "cell": cell(runs),
                "runs": [
                    {
                        "model": run.setup[0].__name__,
                        "ranks": len(run.setup),
                        "sync": run.sync.name,
                        "outcome": run.verdict.outcome,
                        "detail": run.verdict.detail,
                    }
                    for run in runs
                ],
            }
        rows.append({"name": case.name, "what": case.what, "columns": columns})
    return rows


def violations(rows: Iterable[Row]) -> list[str]:
    """Return a line for every sync that was torn or wrong."""
    return [
        f"{name}: {row['name']}, {run['model']}, {run['sync']}: {run['outcome']}: {run['detail']}"
        for row in rows
        for name, column in row["columns"].items()
        for run in column["runs"]
        if run["outcome"] in (TORN, WRONG)
    ]


def markdown(rows: Sequence[Row]) -> str:
    """Return the rows as a table in Markdown."""
    head, body = cells(rows)
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the table's header and lines, as text."""
    names = list(rows[0]["columns"]) if rows else []
    lines = [
        [f"{row['name']}: {row['what']}", *(row["columns"][name]["cell"] for name in names)]
        for row in rows
    ]
    return ["the loader", *names], lines
