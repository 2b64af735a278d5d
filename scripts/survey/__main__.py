"""Find out for many architectures which of their tensors can be updated exactly on vLLM.

    python -m scripts.survey                      # all of them: about ten minutes
    python -m scripts.survey --only MambaForCausalLM --only JambaForCausalLM
    python -m scripts.survey --tensor-parallel-size 2

For each architecture a small random checkpoint is made, and planned as `delta-plan DIR` does: vLLM
loads it, its loader is traced, and live memory compared with every byte. Flags that are not listed
here are passed to vLLM.

columns:
  exact, cast, rebuilt  tensors that are updated exactly; docs/supported-models.md explains each
  ignored               tensors that vLLM's loader drops
  refused               tensors that cannot be updated
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from scripts import command_line
from scripts.survey.architectures import ARCHITECTURES
from scripts.survey.planning import plan_all
from scripts.survey.results import Result, shown, store, summary

_EPILOG: Final = """\
exit status:
  0    every tensor of the models that vLLM loads is updated, ignored, or refused for an accepted
       reason
  1    some tensor is refused for another reason
  2    bad usage
  130  interrupted
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the survey; return the exit status."""
    options, flags = parse_arguments(arguments)

    def program() -> int:
        with command_line.working_folder(options.keep, "delta-survey-") as folder:
            return run(options, flags, folder)

    return command_line.run(program, (), "interrupted; vLLM's processes are stopped")


def parse_arguments(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and vLLM's flags."""
    parser = command_line.make_parser("scripts.survey", __doc__, _EPILOG)
    add = parser.add_argument
    positive = command_line.at_least(1)
    add("--only", action="append", metavar="NAME", help="only this architecture; repeatable")
    add("--jobs", type=positive, metavar="N", default=1, help="models at a time (%(default)s)")
    timeout_help = "longest time for one model (%(default)s)"
    add("--timeout", type=positive, metavar="SECONDS", default=180, help=timeout_help)
    add("--json", action="store_true", help="print the results as JSON")
    store_help = "store the results in scripts/survey/results.json, which docs/ has a table of"
    add("--store", action="store_true", help=store_help)
    keep_help = "keep the checkpoints and vLLM's logs in this new or empty folder"
    add("--keep", type=Path, metavar="DIR", help=keep_help)
    options, flags = parser.parse_known_args(arguments)
    unknown = sorted(set(options.only or ()) - ARCHITECTURES.keys())
    if unknown:
        parser.error(f"--only: not surveyed: {', '.join(unknown)}")
    if options.keep and options.keep.exists() and any(options.keep.iterdir()):
        parser.error(f"--keep: {options.keep} is not empty")
    if options.store and flags:
        parser.error(f"--store keeps results without flags of vLLM: {' '.join(flags)}")
    return options, flags


def run(options: argparse.Namespace, flags: Sequence[str], folder: Path) -> int:
    """Plan the architectures and show what was found; return the exit status."""
    names = [name for name in ARCHITECTURES if not options.only or name in options.only]
    console = Console(stderr=options.json, markup=False, highlight=False, soft_wrap=True)
    results: list[Result] = []
    with _progress(console) as progress:
        task = progress.add_task("importing vLLM", total=len(names))
        planned = plan_all(names, folder, flags, jobs=options.jobs, timeout=options.timeout)
        with contextlib.closing(planned):
            for result in planned:
                results.append(result)
                progress.console.print(line(result))
                for tensor, reason in result.unexplained.items():
                    progress.console.print(f"    {tensor}: {reason}")
                progress.update(task, advance=1, description="planning")
    results.sort(key=lambda result: names.index(result.name))
    console.print(summary(results))
    if options.json:
        print(json.dumps(msgspec.to_builtins(results), indent=1))
    if options.store:
        store(results)
    return int(any(result.unexplained for result in results))


def line(result: Result) -> str:
    """Return one line about a result."""
    if result.failure:
        return f"{result.name}: not loaded: {result.failure}"
    counts = ", ".join(f"{count} {shown(status)}" for status, count in result.counts.items())
    return f"{result.name}: {counts}"


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    shown = console.is_terminal
    return Progress(*columns, TimeRemainingColumn(), console=console, disable=not shown)


if __name__ == "__main__":
    sys.exit(main())
