"""Time what delta updates add to the start of an engine, stage by stage.

    python -m scripts.bench.startup                          # 5 GB of memory
    python -m scripts.bench.startup --layers 2 --turns 1     # to see whether it works

Builds a random model of Qwen3's shape in bfloat16, writes it as a checkpoint into a temporary
folder, and loads it as vLLM does: query, key and value projection fused into one parameter, gate
and up projection into another, each shard copied by the loader of its parameter. No engine runs.
Then the model is traced, certified and digested as a rank of an engine does it. The checkpoint is
in the page cache. Each turn is a process that has imported what the engines import, and starts up
--runs times, each with a fresh model. Every time is the least of all runs.

stages:
  load                  the engine's own: read the files and copy every tensor into the model
  reading, three times  of all weights, by as many threads; memory's own speed
  before processing     the trace that an engine's load hook makes before post-load processing
  tracing               the trace of the loaded model, and what is derived from its weights
  certification         all bytes compared with the checkpoint's, and digested
  applier               the plan, and the digest of what certification has not digested
  kernels               compiled loops, loaded from numba's cache
  all that is added     before processing to kernels, together in one run
columns:
  s per GB              seconds over the weights' size
  first                 the same of each process's first start-up, as an engine's is: with what is
                        done once per process, such as loading compiled loops
  x load                over the load's time
  CPU s per GB          of all threads, which other work on the machine changes less
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from scripts import command_line
from scripts.bench import frame
from scripts.bench.loaded_model import load_weights, make_model, read_checkpoint, write_checkpoint

if TYPE_CHECKING:
    import torch

_WORDS: Final = 1 << 18  # that a thread reads at a time
_IMPORTED: Final = ("numba", "torch._dynamo")  # by both engines, before they load a model
_NOT_ADDED: Final = ("load", "reading, three times")
_ALL: Final = "all that is added"
_EPILOG: Final = """\
With --json the last line on stdout is one JSON object: bytes, threads, seconds (by stage, on the
clock and of all processors), first (the same of first start-ups).

exit status: 0 measured; 1 a tensor is not certified; 2 bad usage; 130 interrupted
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    options = parse_arguments(arguments)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # torch reads it when it is imported
    stopped = "interrupted; the checkpoint is deleted"
    return frame.run(options, lambda folder: run(options, folder), (RuntimeError,), stopped)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = frame.make_parser("startup", __doc__, _EPILOG)
    frame.add_model_options(parser, runs=3, layers=35)
    turns, turns_help = command_line.at_least(1), "processes (%(default)s)"
    parser.add_argument("--turns", type=turns, metavar="N", default=3, help=turns_help)
    return parser.parse_args(arguments)


Times = dict[str, tuple[float, float]]  # seconds on the clock, and of all processors


def measure(layers: int, folder: Path, threads: int) -> Times:
    """Load a model and make its receiver; return the seconds of each stage.

    Raises:
        RuntimeError: a tensor is not certified.
    """
    from engine_ext.placement import uncertified
    from engine_ext.ranks import SingleRank
    from engine_ext.settings import Settings
    from engine_ext.startup import (
        LaterCopies,
        LoadedModel,
        LoadingTrace,
        agree_on_plan,
        certify_model,
        trace_model,
    )
    from engine_ext.sync import assemble

    model, seconds = make_model(layers), Times()

    def now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def timed(stage: str, since: tuple[float, float]) -> tuple[float, float]:
        clock, processors = now()
        seconds[stage] = clock - since[0], processors - since[1]
        return now()

    def load(weights: Any) -> None:
        load_weights(model, weights)

    def checkpoint() -> Iterator[tuple[str, Any]]:
        return read_checkpoint(folder)

    start = now()
    load(checkpoint())
    start = timed("load", start)
    loading = LoadingTrace()
    loading.trace(model, load, checkpoint)
    start = timed("before processing", start)
    loaded = LoadedModel(
        model=model,
        load_weights=load,
        checkpoint=checkpoint,
        reload=load,
        ranks=SingleRank(),
        loading=loading,
    )
    assert loading.specs is not None
    later = LaterCopies(model, loaded.constants)
    traced = trace_model(loaded, later, loading.specs, checkpoint)
    start = timed("tracing", start)
    certify_model(loaded, traced, checkpoint)
    start = timed("certification", start)
    plan = agree_on_plan(loaded, traced)
    applier = assemble.make_delta_applier(loaded, Settings(), traced, plan, later)
    start = timed("applier", start)
    assemble.wrap_applier(loaded, Settings(), applier)
    timed("kernels", start)
    wrong = uncertified(traced.placement)
    if wrong:
        raise RuntimeError(f"not certified: {wrong}")
    reading = 3 * reading_time(model, threads)
    seconds["reading, three times"] = reading, reading * threads
    return seconds


def reading_time(model: torch.nn.Module, threads: int) -> float:
    """Return the seconds in which the threads read all weights of a model once."""
    import numpy as np

    from engine_ext.kernels import bits_of, host_bits
    from scripts.bench.memory_read import fastest, reader

    loop, halves = reader(), []
    for parameter in model.parameters():
        words = host_bits(bits_of(parameter.data.view(-1))).view(np.uint64)
        for start in range(0, words.size - 1, _WORDS):
            piece = words[start : start + _WORDS]
            middle = piece.size // 2
            halves.append((piece[:middle], piece[middle : 2 * middle]))
    with ThreadPoolExecutor(threads) as pool:
        return fastest(lambda: list(pool.map(lambda pair: loop(*pair), halves)), 3)


def one_turn(options: argparse.Namespace, folder: Path) -> list[Times]:
    """Start up from a checkpoint again and again; return the times of each run."""
    for name in _IMPORTED:
        importlib.import_module(name)
    times = []
    for _ in range(options.runs):
        found = measure(options.layers, folder, options.threads)
        added = [one for stage, one in found.items() if stage not in _NOT_ADDED]
        found[_ALL] = sum(one[0] for one in added), sum(one[1] for one in added)
        times.append(found)
    return times


def least(runs: Iterable[Times]) -> Times:
    """Return the least time of each stage, on the clock and of all processors."""
    found = Times()
    for times in runs:
        for stage, (clock, processors) in times.items():
            known = found.get(stage, (clock, processors))
            found[stage] = min(clock, known[0]), min(processors, known[1])
    return found


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Build, measure and print; return the JSON object."""
    model = make_model(options.layers)
    size = sum(one.nbytes for one in model.parameters())
    write_checkpoint(model, folder)
    del model
    turns: list[list[Times]] = []
    for _ in range(options.turns):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            turns.append(process.submit(one_turn, options, folder).result())
    found = least(one for turn in turns for one in turn)
    first = least(turn[0] for turn in turns)
    per_gb, rows = 1e9 / size, []
    for stage, (clock, processors) in found.items():
        cells = [clock * per_gb, first[stage][0] * per_gb, clock / found["load"][0]]
        rows.append([stage, *(f"{cell:.2f}" for cell in (*cells, processors * per_gb))])
    frame.show(
        f"{size / 1e9:.2f} GB of bfloat16 weights, {options.threads} threads, least of "
        f"{options.turns} processes with {options.runs} runs each",
        ("stage", "s per GB", "first", "x load", "CPU s per GB"),
        rows,
    )
    return {"bytes": size, "threads": options.threads, "seconds": found, "first": first}


if __name__ == "__main__":
    raise SystemExit(main())
