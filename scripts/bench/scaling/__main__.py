"""Predict the time and memory of a sync from costs that are measured on this machine.

    python -m scripts.bench.scaling measure --json constants.json    # five minutes, 9 GB
    python -m scripts.bench.scaling model --constants constants.json
    python -m scripts.bench.scaling check --constants constants.json --sizes 0.1B 0.5B
    python -m scripts.bench.scaling check --constants constants.json --sizes 1.5B

measure  times each step of a sync by itself: CPU time of one core, the least of some runs in turn;
         fixed costs are those of a small live engine on two ranks, and of one on one; and how
         much sender and engine on one host wait for each other is that of a model of 0.8B
model    composes them to whole syncs (`scripts/bench/scaling/model.py` has the formulas), for three
         sizes of models, and prints the tables of docs/scaling.md
check    syncs models of up to 1.5 billion parameters to a live engine on this machine, of the kind
         that the constants are of, with two ranks or one, and prints what was measured beside what
         the model says; every live byte must be the sender's. A ratio does not change the exit
         status: other work on the machine does.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from delta_sender import SyncError
from scripts import command_line
from scripts.bench.scaling import report
from scripts.bench.scaling.check import SIZES, SYNCS, Checked, check
from scripts.bench.scaling.constants import Constants
from scripts.bench.scaling.encodings import ENCODINGS
from scripts.bench.scaling.measure import DENSITY, STEPS, measure
from scripts.bench.scaling.setups import MODELS, Setup
from scripts.bench.synthetic_weights import PARAM
from scripts.live_engine.process import EngineError
from scripts.live_engine.registry import ENGINES

_CHECK_STEPS = 4
_FAILURES = (
    EngineError, SyncError, OSError, ValueError, MemoryError, subprocess.CalledProcessError,
)  # fmt: skip
_EPILOG = "exit status: 0 done; 1 it failed, or live bytes are wrong; 2 bad usage; 130 interrupted"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line.make_parser("scripts.bench.scaling", __doc__, _EPILOG)
    commands = parser.add_subparsers(dest="command", required=True)
    positive = command_line.at_least(1)
    add = commands.add_parser("measure", help="measure the constants").add_argument
    add("--json", type=Path, metavar="FILE", required=True, help="write them to this file")
    engine_help = "whose fixed costs are measured, and which check starts (%(default)s)"
    add("--engine", choices=ENGINES, default="vllm", help=engine_help)
    params_help = "tensors of 16.8 million elements each (default: %(default)s)"
    add("--params", type=positive, metavar="N", default=12, help=params_help)
    add("--repeats", type=positive, metavar="N", default=7, help="of each (%(default)s)")

    add = commands.add_parser("model", help="print what they amount to").add_argument
    add("--constants", type=Path, metavar="FILE", required=True, help="that measure has written")
    add("--encoding", choices=ENCODINGS, default="gap8_ulp", help="(%(default)s)")
    defaults = Setup(MODELS[0], DENSITY, "gap8_ulp")
    add("--density", type=float, default=DENSITY, help="share that changes (%(default)s)")
    add("--link", type=float, metavar="GBIT", default=defaults.link_gbit, help="(%(default)s)")
    for name, text in (
        ("engines", "that get the sync"),
        ("trainer-hosts", "that share the model"),
        ("trainer-cores", "of each trainer host"),
        ("encoders", "threads that encode on each trainer host"),
        ("posts-in-flight", "of each trainer host to each engine; 1: one part after the other"),
        ("ranks", "of an engine"),
        ("engine-cores", "of an engine's host that are free for syncs"),
        ("http-processes", "of an engine"),
        ("rank-threads", "of each rank"),
    ):
        default = getattr(defaults, name.replace("-", "_"))
        add(f"--{name}", type=positive, metavar="N", default=default, help=f"{text} (%(default)s)")
    add("--decode-on-each-rank", action="store_true", help="not once on a host")
    add("--markdown", action="store_true", help="as in docs/scaling.md")

    add = commands.add_parser("check", help="compare with real syncs").add_argument
    add("--constants", type=Path, metavar="FILE", required=True, help="that measure has written")
    add("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="(default: all)")
    add("--encoding", choices=ENCODINGS, default="gap8_ulp", help="(%(default)s)")
    add("--density", type=float, default=DENSITY, help="share that changes (%(default)s)")
    add("--ranks", type=int, choices=(1, 2), default=2, help="of the engine (%(default)s)")
    add(
        "--posts-in-flight",
        type=positive,
        metavar="N",
        default=defaults.posts_in_flight,
        help="(%(default)s)",
    )
    add("--syncs", type=positive, metavar="N", default=SYNCS, help="of each size (%(default)s)")
    return parser.parse_args(arguments)


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar; yields what is called before each step with its name."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    errors = Console(stderr=True, markup=False, highlight=False)
    with Progress(*columns, TimeElapsedColumn(), console=errors, refresh_per_second=1) as bar:
        task, begun = bar.add_task("", total=total), False

        def step(name: str) -> None:
            nonlocal begun
            bar.update(task, description=name, advance=int(begun))
            begun = True

        yield step
        bar.update(task, advance=int(begun))


def run_measure(options: argparse.Namespace, console: Console) -> int:
    """Measure the constants, write and print them."""
    with tempfile.TemporaryDirectory(prefix="delta-scaling-") as scratch:
        with progress(len(STEPS) + _CHECK_STEPS) as step:
            costs = measure(
                options.params * PARAM, options.repeats, Path(scratch), step, options.engine
            )
    costs.save(options.json)
    console.print(report.constants_table(costs))
    return 0


def run_model(options: argparse.Namespace, console: Console) -> int:
    """Print the tables."""
    costs = Constants.load(options.constants)
    first = Setup(
        MODELS[0],
        options.density,
        options.encoding,
        engines=options.engines,
        link_gbit=options.link,
        trainer_hosts=options.trainer_hosts,
        trainer_cores=options.trainer_cores,
        encoders=options.encoders,
        posts_in_flight=options.posts_in_flight,
        ranks=options.ranks,
        engine_cores=options.engine_cores,
        http_processes=options.http_processes,
        rank_threads=options.rank_threads,
        decode_once=not options.decode_on_each_rank,
    )
    setups = [replace(first, model=model) for model in MODELS]
    report.show(setups, costs, console, markdown=options.markdown)
    return 0


def run_check(options: argparse.Namespace, console: Console) -> int:
    """Sync, compare and print; return 1 if some live bytes are wrong."""
    costs = Constants.load(options.constants)
    wrong = False
    with tempfile.TemporaryDirectory(prefix="delta-scaling-") as scratch:
        with progress(_CHECK_STEPS * len(options.sizes)) as step:
            for name in options.sizes:
                checked = check(
                    name,
                    Path(scratch),
                    engine=costs.engine,
                    density=options.density,
                    syncs=options.syncs,
                    ranks=options.ranks,
                    posts_in_flight=options.posts_in_flight,
                    encoding=options.encoding,
                    step=step,
                )
                console.print(check_table(checked, costs))
                exact = "every live byte is the sender's"
                if checked.wrong:
                    exact = f"WRONG: {', '.join(checked.wrong)}"
                console.print(
                    f"{name}: {checked.setup.model.tensors} tensors, {exact}; other processes had "
                    f"{checked.others:.2f} cores\n"
                )
                wrong |= bool(checked.wrong)
    return int(wrong)


def check_table(checked: Checked, costs: Constants) -> Table:
    """Return a table of measured and predicted figures."""
    columns = ("parameters", "parts", "", "measured", "model", "model / measured")
    table = Table(*columns, box=box.MARKDOWN)
    parts = str(checked.syncs[0].parts)
    for what, measured, predicted in checked.rows(costs):
        form = "{:.3f}" if what.endswith(" s") else "{:,.0f}"
        cells = [form.format(value) for value in (measured, predicted)]
        ratio = predicted / measured if measured else float("nan")
        table.add_row(checked.setup.model.name, parts, what, *cells, f"{ratio:.2f}")
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status."""
    options = parse_arguments(arguments)
    wide = not sys.stdout.isatty() or getattr(options, "markdown", False)
    console = Console(markup=False, highlight=False, width=200 if wide else None)
    run = {"measure": run_measure, "model": run_model, "check": run_check}[options.command]
    interrupted = "interrupted; the engine is stopped and its files are removed"
    return command_line.run(lambda: run(options, console), _FAILURES, interrupted)


if __name__ == "__main__":
    sys.exit(main())
