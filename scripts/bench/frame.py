"""What the benchmarks share: their options, how they run, and their tables."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from engine_ext.resources import usable_cores
from scripts import command_line


def make_parser(name: str, doc: str | None, epilog: str | None = None) -> argparse.ArgumentParser:
    """Make the parser of ``scripts.bench.NAME`` from its docstring, with ``--json``."""
    parser = command_line.make_parser(f"scripts.bench.{name}", doc, epilog)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    return parser


def add_model_options(parser: argparse.ArgumentParser, *, runs: int, layers: int) -> None:
    """Add the options of a benchmark that builds a model: threads, runs, layers.

    Args:
        runs: the default of ``--runs``.
        layers: the default of ``--layers``.
    """
    add, positive, cores = parser.add_argument, command_line.at_least(1), usable_cores()
    add("--threads", type=positive, metavar="N", default=cores, help="(%(default)s)")
    add("--runs", type=positive, metavar="N", default=runs, help="of each way (%(default)s)")
    layers_help = "of 12.6 million parameters each, besides 66 million others (%(default)s)"
    add("--layers", type=positive, metavar="N", default=layers, help=layers_help)


def run(
    options: argparse.Namespace,
    measure: Callable[[Path], object],
    failures: tuple[type[Exception], ...] = (),
    interrupted: str = "interrupted",
) -> int:
    """Measure, and end with a line of JSON if that was asked for; return the exit status.

    Args:
        measure: prints its tables, and returns what the JSON has; it is given a temporary folder.
        failures, interrupted: see `command_line.run`.
    """

    def program() -> int:
        with tempfile.TemporaryDirectory(prefix="delta-bench-") as folder:
            found = measure(Path(folder))
        if options.json:
            print(json.dumps(found), flush=True)
        return 0

    return command_line.run(program, failures, interrupted)


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table below its title; every column but the first has figures."""
    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 200)
    table = Table(box=box.MARKDOWN)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console.print(title)
    console.print(table)
