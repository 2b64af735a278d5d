"""``delta-conformance``: judge a receiver, or a model on an installed engine, sync by sync.

``python -m engine_ext.cli.conformance`` is the same command. Without ``--model`` it runs the cases
of `engine_ext.conformance.cases`; with it, an engine loads a model and takes the kinds of syncs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engine_ext.commands import (
    CommandParser,
    leaving_at_once,
    output_may_be_unread,
    output_on_stderr,
    without_traceback,
)

if TYPE_CHECKING:
    from engine_ext.conformance import installed, subject

_PROG: Final = "delta-conformance"
_OWN: Final = (
    "engine_ext.conformance.receivers:scatter",
    "engine_ext.conformance.receivers:masked",
)
_ENGINES: Final = ("vllm",)
_DESCRIPTION: Final = """\
Judge what becomes of weight updates, by all memory, bit by bit.

  exact    the sync returned, and memory is that of a fresh load of the target checkpoint
  refused  it failed, and no bit has changed
  TORN     it failed after it had changed something
  WRONG    it returned, and some bit is not the target's
  not run  it was not sent, or not compared; the detail says why (--model)

Without --model: of small models, one for each way in which a loader treats a weight, for each
receiver. With --model: of one model, as the installed engine loads it; flags that are not listed
here are passed to the engine. A folder or file without weights gets random ones.
"""
_EPILOG: Final = """\
examples:
  delta-conformance                                     this project's receivers
  delta-conformance --subject my_project.receiver:make  yours
  delta-conformance --only "fused qkv" --only AWQ --json
  delta-conformance --model /models/Qwen3-8B --tensor-parallel-size 2
  delta-conformance --model config.json --only dense    random weights, one kind of sync
  delta-conformance --subject engine_ext.conformance.vllm_checkpoint_patch:make

exit status:
  0    every sync is exact or refused
  1    some sync is torn or wrong, no sync was judged, or there is no report: the engine or the
       receiver failed
  2    wrong usage
  130  interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report, and return the exit status."""
    return without_traceback(_PROG, lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = _parser()
    options, engine_flags = parser.parse_known_args(argv)
    if options.model is None and engine_flags:
        parser.error(f"engine flags are only for --model: {' '.join(engine_flags)}")
    if options.model is not None and options.subject:
        parser.error("--subject is of the suite, not of --model")
    if options.model is not None and not options.model.exists():
        parser.error(f"--model: no such folder or file: {options.model}")
    with leaving_at_once(_PROG):
        importlib.import_module("rich")  # what a table needs at the end is there from the start
    # The report shows refusals; the log would repeat them a thousand times.
    logging.getLogger("engine_ext").setLevel(logging.ERROR)
    try:
        if options.model is None:
            return _suite(parser, options)
        return _model(parser, options, engine_flags)
    except Exception as error:
        kind = "" if type(error) is RuntimeError else f"{type(error).__name__}: "
        print(f"{_PROG}: {kind}{error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(_PROG, description=_DESCRIPTION, epilog=_EPILOG)
    add = parser.add_argument
    help = "a receiver, as module:function that makes it; repeatable (default: this project's two)"
    add("--subject", action="append", metavar="MODULE:FUNCTION", help=help)
    help = "only this case, with --model this kind of sync, by its name in the table; repeatable"
    add("--only", action="append", default=[], metavar="CASE", help=help)
    help = "a checkpoint's folder, or a folder or config.json without weights"
    add("--model", type=Path, metavar="DIR_OR_CONFIG", help=help)
    add("--engine", choices=_ENGINES, default="vllm", help="that loads the model (default: vllm)")
    help = "ranks of the engine"
    add("--tensor-parallel-size", type=int, metavar="N", help=help)
    help = "load the model as a server with this flag would"
    add("--delta-keep-plain", action="store_true", help=help)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print every outcome, as JSON")
    form.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    return parser


# The suite -----------------------------------------------------------------------------------


def _suite(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    with leaving_at_once(_PROG):
        from engine_ext.conformance import cases, report

    names = [case.name for case in cases.CASES]
    _check_names(parser, options.only, names)
    factories = [_factory(parser, named) for named in options.subject or _OWN]
    with _progress(len(options.only or names) * len(factories)) as step:
        rows = report.judge_all(
            factories, options.only, lambda case, receiver: step(f"{case}: {receiver}")
        )
    with output_may_be_unread():
        if options.json:
            print(json.dumps(rows, indent=1))
        elif options.markdown:
            print(report.markdown(rows))
        else:
            _print_table(*report.cells(rows))
    found = report.violations(rows)
    for line in found:
        print(line, file=sys.stderr)
    syncs = sum(len(column["runs"]) for row in rows for column in row["columns"].values())
    print(f"{syncs} syncs: {len(found)} torn or wrong", file=sys.stderr)
    return int(bool(found))


def _check_names(
    parser: argparse.ArgumentParser, only: Sequence[str], names: Sequence[str]
) -> None:
    for name in only:
        if name not in names:
            near = get_close_matches(name, names, n=3) or names
            parser.error(f"--only: no case {name!r}; there are: {', '.join(near)}")


def _factory(parser: argparse.ArgumentParser, named: str) -> subject.SubjectFactory:
    module, _, function = named.partition(":")
    if not module or not function:
        parser.error(f"--subject: not module:function: {named}")
    if os.getcwd() not in sys.path:  # as for `python -m`
        sys.path.insert(0, os.getcwd())
    found: Any = importlib.import_module(module)
    for part in function.split("."):
        found = getattr(found, part)
    make: subject.SubjectFactory = found
    return make


# A model -------------------------------------------------------------------------------------


def _model(
    parser: argparse.ArgumentParser, options: argparse.Namespace, engine_flags: list[str]
) -> int:
    with leaving_at_once(_PROG):
        from engine_ext.cli.plan import merge, summary
        from engine_ext.conformance import installed, random_weights

    _check_names(parser, options.only, installed.KINDS)
    flags = list(engine_flags)
    if options.tensor_parallel_size is not None:
        flags += ["--tensor-parallel-size", str(options.tensor_parallel_size)]
    with tempfile.TemporaryDirectory(prefix=f"{_PROG}-") as folder, output_on_stderr():
        work, model = Path(folder), options.model
        _say("needs the model's size in memory and on disk about twice over, and several loads")
        if not (model.is_dir() and random_weights.has_weights(model)):
            _say("making random weights")
            random_weights.write_random(model, work / "random")
            model = work / "random"
        found = installed.judge_model(
            model,
            _starter(options, flags),
            work,
            merge=merge,
            only=options.only,
            plain=not options.delta_keep_plain,
            say=_say,
        )
    with output_may_be_unread():
        if options.json:
            syncs = [dataclasses.asdict(one) for one in found.judged]
            facts = {"ranks": found.ranks, "plan": found.plan, "unsteady": found.unsteady}
            print(json.dumps({**facts, "syncs": syncs}, indent=1))
        else:
            head = ["sync", "outcome", "tensors", "detail"]
            lines = [[one.sync, one.outcome, str(one.tensors), one.detail] for one in found.judged]
            if options.markdown:
                print("\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * 4, *lines]))
            else:
                _print_table(head, lines)
            print(summary(found.plan, found.ranks))
            for row in found.plan:
                if row["status"] == "uncertified":
                    print(f"  {row['name']}: {row['reason']}")
            if found.unsteady:
                print(f"not judged, differ between two loads of one checkpoint: {found.unsteady}")
    if found.is_empty:
        _say("no sync was judged")
    return int(found.violated or found.is_empty)


def _starter(
    options: argparse.Namespace, flags: list[str]
) -> Callable[[Path, bool], installed.Engine]:
    from engine_ext.settings import ENVIRONMENT, Settings

    try:
        offline = importlib.import_module(f"engine_ext.adapters.{options.engine}.offline_engine")
        importlib.import_module(options.engine)
    except ModuleNotFoundError as error:
        if error.name != options.engine:
            raise
        raise RuntimeError(f"--model needs {options.engine}, which is not installed") from error

    def start(folder: Path, syncs: bool) -> installed.Engine:
        os.environ.pop(ENVIRONMENT, None)
        if syncs:
            Settings(keep_plain=options.delta_keep_plain).export()
        own = [] if any(folder.glob("tokenizer*")) else ["--skip-tokenizer-init"]
        engine: installed.Engine = offline.OfflineEngine(str(folder), [*own, *flags], prog=_PROG)
        return engine

    return start


# What is shown -------------------------------------------------------------------------------


def _say(text: str) -> None:
    print(f"{_PROG}: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """Yield a function that is called with what comes next; shown on a terminal only."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        done = -1

        def step(text: str) -> None:
            nonlocal done
            done += 1
            progress.update(task, completed=done, description=text)

        yield step
        progress.update(task, completed=total, description="")


def _print_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*head)
    for line in lines:
        table.add_row(*(Text(cell.replace("**", ""), style=_style(cell)) for cell in line))
    # Wide enough for whole cells if the output is not a terminal.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _style(cell: str) -> str:
    bad = any(word in cell for word in ("**", "TORN", "WRONG"))
    return "red" if bad else "green" if cell == "exact" else ""


if __name__ == "__main__":
    sys.exit(main())
