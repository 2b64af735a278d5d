"""Sync a live engine many times while clients keep asking it, and see that all stays well.

Starts an engine with a small random Qwen3, lets clients send completions without pause (short and
long prompts, shared beginnings, half of the answers streamed), and meanwhile syncs it with every
encoding, pause mode and with and without flushing the cache, from empty syncs to full ones. Every
tenth time its live memory is compared with the trainer's bytes by digest, and so are the versions.
At the end a fresh engine is started on the trainer's checkpoint: the checksums of every parameter
and buffer and greedy answers with their log probabilities must be alike.

It fails if a sync fails or a digest or version differs, if a request does not end whole (but for
those that a sync with pause mode abort ends), or if a process of the engine grows: medians of the
first and the last quarter of the samples after the warm-up are compared. Memory is anonymous and
shared memory; mapped files are left out, as their pages depend on what else runs on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from delta_sender import SyncError
from delta_sender.encoding_policy import CHOICES
from delta_sender.warm_up import warm_up as compile_for
from scripts.demo.__main__ import verify
from scripts.live_engine.fingerprint import fingerprint
from scripts.live_engine.process import EngineError, EngineProcess
from scripts.live_engine.registry import ENGINES
from scripts.live_engine.tiny_models import build, load_tensors, save_checkpoint
from scripts.soak.load import Counts, Load
from scripts.soak.memory import grown, names_of, spooled
from scripts.soak.report import Figures, show
from scripts.soak.syncs import PAUSE_MODES, Record, SoakFailed, Syncs, Trainer

_WIDTHS: Final = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
# A small KV cache is soon touched everywhere; a large one grows for as long as the load lasts.
ARGUMENTS: Final = {"vllm": ["--num-gpu-blocks-override", "64"], "sglang": []}
# Batches have hundreds of shapes, for each of which torch's CPU kernels would keep a megabyte.
ENVIRONMENT: Final = {"LRU_CACHE_CAPACITY": "16", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}
_PROMPTS: Final = ("the quick brown fox", "a reward is a number", "def add(a, b):", "In 2024 there")
_EPILOG: Final = """\
The last line of stdout with --json is one JSON object of all figures.

exit status: 0 all well; 1 something failed; 2 bad usage; 130 interrupted
"""


def soak(
    engine: EngineProcess,
    trainer: Trainer,
    spool: Path,
    *,
    syncs: int,
    clients: int = 4,
    pause_modes: tuple[str, ...] = PAUSE_MODES,
    quiet_s: float = 5.0,
    seed: int = 0,
    done: Callable[[Record, Counts], None] = lambda record, counts: None,
) -> Figures:
    """Sync a live engine under load; the judgement is in `Figures.problems`.

    Args:
        engine: live, with `ARGUMENTS`, `ENVIRONMENT` and this `spool`, at version 0 with the
            trainer's bytes.
        trainer: that it is to follow.
        spool: its spool folder.
        syncs: how many, 20 or more.
        clients: that ask it meanwhile.
        pause_modes: that take turns.
        quiet_s: seconds of load alone before the first sync.
        seed: of what clients ask for.
        done: called after every sync.

    Raises:
        SoakFailed, SyncError, EngineError: as of `Syncs.run`.
    """
    warm_up = min(100, syncs // 2)
    for encoding in CHOICES:  # or the first sync of each would wait for what numba loads
        compile_for(trainer.dtypes, encoding)
    with Load(engine.url, clients, seed) as load:
        work = Syncs(engine, trainer, load, spool, pause_modes)
        time.sleep(quiet_s)
        quiet = load.tally.counts
        record = work.run(syncs, lambda record: done(record, load.tally.counts))
        names = names_of(engine.pids())
    work.check()
    tally = load.tally
    found = Figures(record, names, warm_up, tally.counts, quiet, quiet_s, tally.seconds, [])
    found.problems += [f"a request failed: {problem}" for problem in tally.problems]
    found.problems += grown(found.judged(), names)
    found.problems += [f"left in the spool: {file}" for file in spooled(spool)]
    return found


def run(options: argparse.Namespace, folder: Path, console: Console) -> Figures:
    """Start the engine, soak it, and compare it with a fresh one."""
    kind = ENGINES[options.engine]
    base, spool = build("qwen3", folder / "base", **_WIDTHS), folder / "spool"
    spool.mkdir()
    trainer = Trainer(load_tensors(base), options.seed)
    modes = PAUSE_MODES if options.pause_mode == "all" else (options.pause_mode,)
    arguments = [*ARGUMENTS[options.engine], "--delta-spool-dir", str(spool)]
    console.print(f"starting {kind.name}")
    log = folder / "live-engine.log"
    with kind(
        base, enable_delta=True, extra_args=arguments, extra_env=ENVIRONMENT, log_path=log
    ) as engine:
        before = fingerprint(engine)
        with _progress(options.syncs, console) as done:
            found = soak(
                engine,
                trainer,
                spool,
                syncs=options.syncs,
                clients=options.clients,
                pause_modes=modes,
                quiet_s=options.quiet_seconds,
                seed=options.seed,
                done=done,
            )
        engine.post(_FLUSH[options.engine]).raise_for_status()
        live, said = fingerprint(engine), _answers(engine)
    final = save_checkpoint(base, folder / "final", trainer.tensors)
    console.print(f"starting a fresh {kind.name} on the trainer's checkpoint")
    arguments, log = ARGUMENTS[options.engine], folder / "fresh-engine.log"
    with kind(
        final, enable_delta=True, extra_args=arguments, extra_env=ENVIRONMENT, log_path=log
    ) as one:
        fresh, expected = fingerprint(one), _answers(one)
    if not verify(before, live, fresh, console):
        found.problems.append("the engine's tensors are not those of a fresh one")
    if said != expected:
        found.problems.append("the engine's greedy answers are not those of a fresh one")
    return found


# What was kept of old weights by the last sync's flush_cache=false is not to be compared.
_FLUSH: Final = {"vllm": "/reset_prefix_cache", "sglang": "/flush_cache"}


def _answers(engine: EngineProcess) -> list[Any]:
    """Greedy answers with their log probabilities."""
    options = {"max_tokens": 16, "temperature": 0.0, "logprobs": 5}
    choices = [engine.complete(prompt, **options)["choices"][0] for prompt in _PROMPTS]
    return [(choice["text"], choice["logprobs"]) for choice in choices]


@contextlib.contextmanager
def _progress(syncs: int, console: Console) -> Iterator[Callable[[Record, Counts], None]]:
    """A bar on a terminal, elsewhere a line for every tenth of the way."""
    if not console.is_terminal:

        def tell(record: Record, counts: Counts) -> None:
            if record.syncs % max(1, syncs // 10) == 0:
                console.print(f"{record.syncs} syncs in {record.seconds:.0f} s; {_said(counts)}")

        yield tell
        return
    columns = (
        TextColumn("syncs"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=syncs)
        yield lambda record, counts: progress.update(
            task, completed=record.syncs, description=_said(counts)
        )


def _said(counts: Counts) -> str:
    return f"{counts.finished} requests, {counts.aborted} aborted, {counts.failed} failed"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--engine", choices=sorted(ENGINES), default="vllm", help="which (default: %(default)s)")
    add("--syncs", type=_at_least(20), metavar="N", default=1000, help="how many (%(default)s)")
    clients_help = "that send completions without pause (%(default)s)"
    add("--clients", type=_at_least(1), metavar="N", default=4, help=clients_help)
    mode_help = "what a sync does to requests in flight; all: in turn (%(default)s)"
    add("--pause-mode", choices=(*PAUSE_MODES, "all"), default="all", help=mode_help)
    quiet_help = "seconds of load alone before the first sync (%(default)s)"
    add("--quiet-seconds", type=_at_least(1), metavar="N", default=15, help=quiet_help)
    add("--seed", type=int, metavar="N", default=0, help="of changes and prompts (%(default)s)")
    add("--json", action="store_true", help="end with one line of JSON")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak; returns the exit status."""
    options = parse_arguments(arguments)
    signal.signal(signal.SIGTERM, _terminate)
    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 120)
    errors = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    try:
        with tempfile.TemporaryDirectory(prefix="delta-soak-") as folder:
            found = run(options, Path(folder), console)
    except (SoakFailed, SyncError, EngineError, httpx.HTTPError) as error:
        errors.print(f"FAILED: {type(error).__name__}: {error}")
        return 1
    except KeyboardInterrupt:
        errors.print("interrupted; the engine is stopped")
        return 130
    show(found, console)
    for problem in found.problems:
        errors.print(f"FAILED: {problem}")
    if not found.problems:
        console.print("all well: no request failed, every digest was equal, memory is flat")
    if options.json:
        print(json.dumps({"engine": options.engine, **found.all()}), flush=True)
    return 1 if found.problems else 0


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}")
        return number

    return parse


def _terminate(number: int, frame: object) -> None:
    """SIGTERM: leave through the ``with`` blocks, so that the engine is stopped."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
