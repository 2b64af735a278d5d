"""Sync a live engine many times under load, and check that its weights and resources stay right.

    python -m scripts.soak                        # vLLM, 1000 syncs
    python -m scripts.soak --engine sglang --syncs 200

Starts an engine with a small random Qwen3. Clients send completions without pause (short and long
prompts, shared prefixes, half of the answers streamed), while the engine is synced with every
encoding and pause mode, with and without flushing the cache, from empty syncs to full ones. After
every tenth sync the engine's live memory is compared with the trainer's by digest, and so are the
versions. At the end a fresh engine is started on the trainer's checkpoint: the checksums of every
parameter and buffer, and greedy answers with their log probabilities, must be equal.

The soak fails if a sync fails, a digest or version differs, a request does not finish (except when
a sync with pause mode abort ends it), or a process of the engine grows by more than under load
alone: engines keep some memory of every request, which is measured before the first sync.

rows of the first table:
  by kind                         number of syncs by encoding, pause mode, flush, full and empty
  digest of live memory compared  how often the engine's weights were checked against the trainer's
  tokens per second               generated before the first sync, and while syncs ran
  request, s                      duration of a completion request
  pause, ms                       time for which a sync paused generation
  parts of a sync                 up to four of them are in flight
columns of the second table, a row per process, medians of the first and the last quarter of the
samples after the warm-up:
  memory, MiB                     anonymous and shared memory, swapped or not; mapped files are left
                                  out, as their pages depend on what else runs on the machine
  bytes per sync                  growth of it
  load alone, bytes per second    growth of it before the first sync, if that was a minute or more
  open files, threads             number of them
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from delta_sender import SyncError
from delta_sender.encode.warm_up import warm_up as compile_for
from delta_sender.options import CHOICES
from scripts import command_line
from scripts.live_engine.fingerprint import fingerprint, verify
from scripts.live_engine.process import EngineError, EngineProcess
from scripts.live_engine.registry import ENGINES, SOAK_ARGUMENTS, SOAK_ENVIRONMENT
from scripts.live_engine.tiny_models import build, load_tensors, save_checkpoint
from scripts.soak.load import Counts, Load
from scripts.soak.memory import Sample, grown, growth_under_load, names_of, spooled
from scripts.soak.report import Figures, show
from scripts.soak.syncs import Record, SoakFailed, Syncs, Trainer

_WIDTHS: Final = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
_PROMPTS: Final = ("the quick brown fox", "a reward is a number", "def add(a, b):", "In 2024 there")
_EPILOG: Final = """\
The last line of stdout with --json is one JSON object of all figures.

exit status: 0 passed; 1 something failed; 2 bad usage; 130 interrupted
"""


def soak(
    engine: EngineProcess,
    trainer: Trainer,
    spool: Path,
    *,
    syncs: int,
    clients: int = 4,
    quiet_s: float = 5.0,
    seed: int = 0,
    done: Callable[[Record, Counts], None] = lambda record, counts: None,
) -> Figures:
    """Sync a live engine under load; it passed if `Figures.problems` is empty.

    Args:
        engine: live, with `SOAK_ARGUMENTS`, `SOAK_ENVIRONMENT` and this `spool`, at version 0 with
            the trainer's weights.
        trainer: whose steps are sent.
        spool: the engine's spool folder.
        syncs: number of syncs, 20 or more.
        clients: number of clients that send requests.
        quiet_s: seconds of load without syncs before the first one. From 60 on, growth of memory
            in their second half is taken as the load's own.
        seed: of the clients' requests.
        done: called after every sync.

    Raises:
        SoakFailed, SyncError, EngineError: see `Syncs.run`.
    """
    warm_up = min(100, syncs // 2)
    for encoding in CHOICES:  # otherwise numba would compile during the first sync of each
        compile_for(trainer.dtypes, encoding)
    with Load(engine.url, clients, seed) as load:
        task = Syncs(engine, trainer, load, spool)
        without = _wait(quiet_s, engine, spool)
        quiet = load.tally.counts
        record = task.run(syncs, lambda record: done(record, load.tally.counts))
        names = names_of(engine.pids())
    task.check()
    tally = load.tally
    found = Figures(
        record=record,
        names=names,
        warm_up=warm_up,
        load=tally.counts,
        quiet=quiet,
        quiet_s=quiet_s,
        under_load=growth_under_load(without),
        request_s=tally.seconds,
        problems=[],
    )
    found.problems += [f"a request failed: {problem}" for problem in tally.problems]
    found.problems += grown(found.judged(), names, found.under_load)
    found.problems += [f"left in the spool: {file}" for file in spooled(spool)]
    return found


def _wait(seconds: float, engine: EngineProcess, spool: Path) -> list[Sample]:
    """Let the clients ask for some time; return samples of what the engine uses meanwhile."""
    end, samples = time.monotonic() + seconds, []
    while (left := end - time.monotonic()) > 0:
        samples.append(Sample.take(0, engine.pids(), spool))
        time.sleep(min(left, 1.0))
    return samples


def run(options: argparse.Namespace, folder: Path, console: Console) -> Figures:
    """Start the engine, soak it, and compare it with a fresh one."""
    kind = ENGINES[options.engine]
    base, spool = build("qwen3", folder / "base", **_WIDTHS), folder / "spool"
    spool.mkdir()
    trainer = Trainer(load_tensors(base), options.seed)
    arguments = SOAK_ARGUMENTS[options.engine]
    start = partial(kind, enable_delta=True, extra_env=SOAK_ENVIRONMENT)
    console.print(f"starting {kind.name}")
    log, spooling = folder / "live-engine.log", ["--delta-tuning", f"spool-dir={spool}"]
    with start(base, extra_args=[*arguments, *spooling], log_path=log) as engine:
        before = fingerprint(engine)
        console.print(f"{options.quiet_seconds} s of load alone, then {options.syncs:,} syncs")
        with _progress(options.syncs, console) as done:
            found = soak(
                engine,
                trainer,
                spool,
                syncs=options.syncs,
                clients=options.clients,
                quiet_s=options.quiet_seconds,
                seed=options.seed,
                done=done,
            )
        engine.post(_FLUSH[options.engine]).raise_for_status()
        live, answers = fingerprint(engine), _answers(engine)
    final = save_checkpoint(base, folder / "final", trainer.tensors)
    console.print(f"starting a fresh {kind.name} on the trainer's checkpoint")
    log = folder / "fresh-engine.log"
    with start(final, extra_args=arguments, log_path=log) as engine:
        fresh, expected = fingerprint(engine), _answers(engine)
    if not verify(before, live, fresh, console):
        found.problems.append("the engine's tensors are not those of a fresh one")
    if answers != expected:
        found.problems.append("the engine's greedy answers are not those of a fresh one")
    return found


# The last sync might have kept KV entries of old weights (flush_cache=false).
_FLUSH: Final = {"vllm": "/reset_prefix_cache", "sglang": "/flush_cache"}


def _answers(engine: EngineProcess) -> list[Any]:
    """Ask for greedy completions with their log probabilities."""
    options = {"max_tokens": 16, "temperature": 0.0, "logprobs": 5}
    choices = [engine.complete(prompt, **options)["choices"][0] for prompt in _PROMPTS]
    return [(choice["text"], choice["logprobs"]) for choice in choices]


@contextlib.contextmanager
def _progress(syncs: int, console: Console) -> Iterator[Callable[[Record, Counts], None]]:
    """Show a bar on a terminal, elsewhere a line after every tenth of the syncs."""
    if not console.is_terminal:

        def show_line(record: Record, counts: Counts) -> None:
            if record.syncs % max(1, syncs // 10) == 0:
                console.print(f"{record.syncs} syncs in {record.seconds:.0f} s; {_text(counts)}")

        yield show_line
        return
    columns = (TextColumn("syncs"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    text = TextColumn("{task.description}")
    with Progress(*columns, text, console=console, transient=True) as progress:
        task = progress.add_task("", total=syncs)
        yield lambda record, counts: progress.update(
            task, completed=record.syncs, description=_text(counts)
        )


def _text(counts: Counts) -> str:
    return f"{counts.finished} requests, {counts.aborted} aborted, {counts.failed} failed"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line.make_parser("scripts.soak", __doc__, _EPILOG)
    add, at_least = parser.add_argument, command_line.at_least
    add("--engine", choices=sorted(ENGINES), default="vllm", help="engine to sync (%(default)s)")
    syncs_help = "number of syncs (%(default)s)"
    add("--syncs", type=at_least(20), metavar="N", default=1000, help=syncs_help)
    clients_help = "clients that send completions without pause (%(default)s)"
    add("--clients", type=at_least(1), metavar="N", default=4, help=clients_help)
    quiet_help = (
        "seconds of load without syncs before the first one; 60 or more show how much memory the "
        "engine keeps of the load alone (%(default)s)"
    )
    add("--quiet-seconds", type=at_least(1), metavar="N", default=240, help=quiet_help)
    add("--seed", type=int, metavar="N", default=0, help="of changes and prompts (%(default)s)")
    add("--json", action="store_true", help="end with one line of JSON")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak; return the exit status."""
    options = parse_arguments(arguments)

    def program() -> int:
        console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 120)
        with tempfile.TemporaryDirectory(prefix="delta-soak-") as folder:
            found = run(options, Path(folder), console)
        show(found, console)
        for problem in found.problems:
            print(f"FAILED: {problem}", file=sys.stderr)
        if not found.problems:
            console.print("passed: no request failed, every digest was equal, memory is flat")
        if options.json:
            print(json.dumps({"engine": options.engine, **found.all()}), flush=True)
        return 1 if found.problems else 0

    failures = (SoakFailed, SyncError, EngineError, httpx.HTTPError)
    return command_line.run(program, failures, "interrupted; the engine is stopped")


if __name__ == "__main__":
    sys.exit(main())
