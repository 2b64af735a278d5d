"""Print which loader treatments a receiver of weight updates carries exactly, as Markdown.

The rows and the receivers are those of tests/conformance, where README.md says what is judged.
vLLM's own function has a column where vLLM is installed.

    python -m scripts.doc_tables.conformance [--json] [--subject package.module:factory ...]
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import pkgutil
import sys
from collections.abc import Sequence
from typing import Any

from scripts.doc_tables.reference import table

OWN = ("tests.conformance.receivers:scatter", "tests.conformance.receivers:masked")
VLLM = "tests.conformance.vllm_checkpoint_patch:make"


def subjects(named: Sequence[str]) -> list[Any]:
    """Return the receivers' factories: this project's two, vLLM's if there is one, and those named.

    Raises:
        ImportError, AttributeError: there is none under a name that was given.
    """
    *found, vllm = [pkgutil.resolve_name(name) for name in (*OWN, VLLM)]
    try:
        vllm()
        found.append(vllm)
    except ImportError:
        print("vLLM's function for sparse patches is not installed", file=sys.stderr)
    return found + [pkgutil.resolve_name(name) for name in named]


def judge_all(factories: Sequence[Any], only: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return a row per treatment: its name, what it is, and a cell and all outcomes per receiver.

    Args:
        factories: of the receivers; their names become the columns.
        only: treatments by name; empty for all.
    """
    suite = importlib.import_module("tests.conformance.cases")
    rows = []
    for case in suite.CASES:
        if only and case.name not in only:
            continue
        columns = {}
        for make in factories:
            runs = suite.run_case(case, make)
            columns[make().name] = {
                "cell": suite.cell(runs),
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


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table."""
    names = list(rows[0]["columns"])
    lines = (
        [f"{row['name']}: {row['what']}", *(row["columns"][name]["cell"] for name in names)]
        for row in rows
    )
    return table(["the loader", *names], lines)


def default_table() -> str:
    """Return the table of the documentation.

    Raises:
        RuntimeError: vLLM, which has a column there, is not installed.
    """
    factories = subjects([])
    if len(factories) == len(OWN):
        raise RuntimeError("the table in the documentation needs vLLM: run it from .venv")
    return markdown(judge_all(factories))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="every outcome, as JSON")
    subject_help = "one more receiver, as package.module:factory; repeatable"
    parser.add_argument("--subject", action="append", default=[], help=subject_help)
    arguments = parser.parse_args(argv)
    # The table shows refusals; the log would repeat them a thousand times.
    logging.getLogger("engine_ext").setLevel(logging.ERROR)
    rows = judge_all(subjects(arguments.subject))
    print(json.dumps(rows, indent=1) if arguments.json else markdown(rows))


if __name__ == "__main__":
    main()
