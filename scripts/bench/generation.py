"""Time generation of vLLM on CPU without delta updates, with them, and with --delta-keep-plain.

    python -m scripts.bench.generation
    python -m scripts.bench.generation --layers 1 --runs 1      # to see whether it works

Starts three servers of a random Qwen3 with bf16 weights, which take turns: in each turn one serves
all requests while the others are idle. Then the two with delta updates are synced with the same
change of 2 % of the weights.

columns:
  tokens/s    of all requests of a turn together, the median of --runs turns
  x stock     that, over the stock engine's
  sync ms     fastest sync, from the trainer's tensors to the answer
  pause ms    of it, generation was paused
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import track

from delta_sender import DeltaSender, SyncError
from engine_ext.resources import usable_cores
from scripts import command_line
from scripts.bench import frame
from scripts.bench.synthetic_weights import QWEN3_SIZES, Tensors, change_tensors
from scripts.live_engine.process import EngineError, EngineProcess
from scripts.live_engine.tiny_models import build, load_tensors
from scripts.live_engine.vllm import VllmProcess

_WAYS: Final = ("stock", "delta updates", "--delta-keep-plain")
_DENSITY: Final = 0.02


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = frame.make_parser("generation", __doc__)
    add, positive = parser.add_argument, command_line.at_least(1)
    cores = usable_cores()
    add("--threads", type=positive, metavar="N", default=cores, help="of each (%(default)s)")
    add("--runs", type=positive, metavar="N", default=5, help="turns of each (%(default)s)")
    add("--layers", type=positive, metavar="N", default=6, help="of the model (%(default)s)")
    add("--requests", type=positive, metavar="N", default=8, help="at once (%(default)s)")
    add("--tokens", type=positive, metavar="N", default=48, help="of each request (%(default)s)")
    options = parser.parse_args(arguments)
    failures, stopped = (EngineError, SyncError, OSError), "interrupted; the engines are stopped"
    return frame.run(options, lambda folder: run(options, folder), failures, stopped)


def run(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, float]]:
    """Build, start, measure and print; return the figures of each way."""
    sizes = {**QWEN3_SIZES, "num_hidden_layers": options.layers}
    model = build("qwen3", folder / "model", **sizes)
    base = load_tensors(model)
    errors = Console(stderr=True)
    with ExitStack() as stack:
        engines = {
            way: stack.enter_context(
                VllmProcess(
                    model,
                    enable_delta=way != "stock",
                    keep_plain=way == "--delta-keep-plain",
                    extra_env={"OMP_NUM_THREADS": str(options.threads)},
                    log_path=folder / f"{way}.log",
                )
            )
            for way in track(_WAYS, "starting", console=errors)
        }
        times: dict[str, list[float]] = {way: [] for way in _WAYS}
        for turn in track(range(options.runs + 1), "generating", console=errors):
            for way, engine in engines.items():
                seconds = _generate(engine, options)
                if turn:  # the first one warms up
                    times[way].append(seconds)
        tokens = options.requests * options.tokens
        found = {way: {"tokens_per_s": tokens / statistics.median(times[way])} for way in _WAYS}
        for way in _WAYS[1:]:
            found[way] |= _sync(engines[way], base, options.runs)
    numel = sum(tensor.numel() for tensor in base.values())
    rows = []
    for way, figures in found.items():
        ratio = figures["tokens_per_s"] / found["stock"]["tokens_per_s"]
        rows.append([way, f"{figures['tokens_per_s']:.1f}", f"{ratio:.2f}"])
        rows[-1] += [f"{figures[key]:.0f}" for key in ("sync_ms", "pause_ms") if key in figures]
    frame.show(
        f"Qwen3, {numel / 1e6:.0f} million parameters; {options.threads} threads; "
        f"{options.requests} requests of {options.tokens} tokens at once",
        ("vLLM", "tokens/s", "x stock", "sync ms", "pause ms"),
        rows,
    )
    return found


def _generate(engine: EngineProcess, options: argparse.Namespace) -> float:
    """Return the seconds in which an engine answers all requests of a turn."""
    arguments: dict[str, Any] = {
        "max_tokens": options.tokens,
        "temperature": 0.0,
        "ignore_eos": True,
    }
    prompts = [f"{number} the quick brown fox" for number in range(options.requests)]
    start = time.perf_counter()
    with ThreadPoolExecutor(options.requests) as threads:
        list(threads.map(lambda prompt: engine.complete(prompt, **arguments), prompts))
    return time.perf_counter() - start


def _sync(engine: EngineProcess, base: Tensors, runs: int) -> dict[str, float]:
    """Sync an engine back and forth; return the figures of the fastest sync."""
    held, other = base, change_tensors(base, _DENSITY)
    best = {"sync_ms": float("inf"), "pause_ms": 0.0}
    with DeltaSender(engine.url, held.items()) as sender:
        sender.sync(held.items())  # gets the plan and digests every tensor
        for _ in range(runs):
            held, other = other, held
            start = time.perf_counter()
            report = sender.sync(held.items())
            elapsed = (time.perf_counter() - start) * 1e3
            if elapsed < best["sync_ms"]:
                pause = float(report.engine["timings_ms"]["pause_ms"])
                best = {"sync_ms": round(elapsed, 1), "pause_ms": round(pause, 1)}
    return best


if __name__ == "__main__":
    raise SystemExit(main())
