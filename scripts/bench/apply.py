"""Time how one rank applies a delta on a live vLLM: scatter, masked, and vLLM's own way.

    python -m scripts.bench.apply
    python -m scripts.bench.apply --layers 1 --runs 1      # to see whether it works

Builds a random Qwen3 with bf16 weights (and one with twice the layers) in a temporary folder,
loads both with vLLM in this process, traces and certifies them as the plugin does, and applies
the same random deltas in each way. A measurement starts with decoded (indices, values) and ends
with written weights, without HTTP: it locates, gathers old values, and writes. Every time is the
shortest of --runs runs; the ways take turns, each from the same weights. The first run of each way
must leave the model, bit for bit, as vLLM's own load of the changed checkpoint does. PyTorch and
engine_ext use the same number of threads.

ways:
  scatter               engine_ext's, staged and committed as an engine does, but with the digest
                        off: old values are only gathered for the undo, by the pass that writes
  scatter, with digest  as in an engine: old values are gathered and digested while staging,
                        compared again at the commit, then overwritten
  masked                engine_ext.apply.masked.apply_masked
  vLLM's own            load_checkpoint_weight_patches, with its defaults
columns:
  density, nnz          changed elements / elements, and changed elements
  ms, stage, commit     milliseconds of the whole apply and of its two phases
  x masked, x vLLM      how many times faster than these ways
  wanted                the target for "x masked"
lines below the table:
  doubling              commit of the same delta (with digest) in the model with twice the layers,
                        over that in the model
  extra memory          the peak above the model's memory, over nnz: decoded indices and undo log
                        are included, the container is not; the larger of what tracemalloc sees
                        (Python's and numpy's memory) and of the growth of resident memory
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import tempfile
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from scripts import command_line
from scripts.process_memory import peak_resident, reset_peak

if TYPE_CHECKING:
    from engine_ext.wire import ParamDelta
    from scripts.bench.live_vllm import LiveModel

_DENSITIES: Final = (0.006, 0.02, 0.03)
_WANTED: Final = {0.006: 40, 0.02: 20}
_MEMORY_DENSITY: Final = 0.02
_CHUNK_BYTES: Final = 512 << 20  # vLLM's default, and ours
_PHASES: Final = ("total", "stage", "commit")
_EPILOG: Final = """\
With --json the last line on stdout is one JSON object: scatter_vs_masked and scatter_vs_vllm
(density to how many times faster scatter is), doubling, extra_bytes_per_nnz.

exit status: 0 measured and verified; 1 a way left other weights than a load, or vLLM failed;
2 bad usage; 130 interrupted
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    options = parse_arguments(arguments)
    # torch reads these when it is imported.
    os.environ.update(
        OMP_NUM_THREADS=str(options.threads),
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )

    def program() -> int:
        with tempfile.TemporaryDirectory(prefix="delta-bench-") as folder:
            result = run(options, Path(folder))
        if options.json:
            print(json.dumps(result), flush=True)
        return 0

    return command_line.run(program, (Exception,), "interrupted; the models are deleted")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line.make_parser("scripts.bench.apply", __doc__, _EPILOG)
    add, positive = parser.add_argument, command_line.at_least(1)
    cores = len(os.sched_getaffinity(0))
    add("--device", choices=["cpu", "cuda"], default="cpu", help="of the model (%(default)s)")
    add("--threads", type=positive, metavar="N", default=cores, help="(%(default)s)")
    add("--runs", type=positive, metavar="N", default=9, help="of each way (%(default)s)")
    layers_help = "of 12.6 million parameters each, besides 66 million others (%(default)s)"
    add("--layers", type=positive, metavar="N", default=13, help=layers_help)
    add("--seed", type=int, metavar="N", default=0, help="of weights and deltas (%(default)s)")
    add("--json", action="store_true", help="end with one line of JSON")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Build, load, measure and print; return the JSON object."""
    steps = len(_DENSITIES) * (options.runs + 1) + options.runs + 5
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    errors = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    with Progress(*columns, TimeElapsedColumn(), console=errors) as progress:
        task = progress.add_task("building the models", total=steps)

        def step(description: str, done: int = 1) -> None:
            progress.update(task, description=description, advance=done)

        models = _models(options, folder, step)
        bench = Bench(models, options, step)
        times = {density: bench.compare(density) for density in _DENSITIES}
        commits = bench.doubling()
        extra = bench.extra_bytes()
    width = None if sys.stdout.isatty() else 110
    console = Console(markup=False, highlight=False, width=width)
    return report(console, bench, times, commits, extra)


def _models(options: argparse.Namespace, folder: Path, step: Any) -> list[LiveModel]:
    import torch

    from scripts.bench.live_vllm import make_live_model, start
    from scripts.bench.sender_device import missing_device
    from scripts.bench.synthetic_weights import QWEN3_SIZES
    from scripts.live_engine import tiny_models

    if missing := missing_device(options.device):
        raise RuntimeError(missing)
    if options.device == "cpu" and torch.cuda.is_available():
        raise RuntimeError(
            "--device cpu, but vLLM would use this machine's CUDA device: measure it with "
            "--device cuda, or hide it with CUDA_VISIBLE_DEVICES= and a vLLM built for CPUs"
        )
    started = []
    for layers in (options.layers, 2 * options.layers):
        step(f"building a model of {layers} layers")
        sizes = {**QWEN3_SIZES, "num_hidden_layers": layers}
        path = tiny_models.build("qwen3", folder / str(layers), seed=options.seed, **sizes)
        step(f"loading a model of {layers} layers")
        started.append(start(path))
    if torch.get_num_threads() != options.threads:
        raise RuntimeError(f"PyTorch has {torch.get_num_threads()} threads, not {options.threads}")
    return [make_live_model(llm, learner, options.threads) for llm, learner in started]


class Bench:
    """The measurements.

    Args:
        models: a model, and one with twice its layers.
        options: of the command line.
        step: advances the progress bar.
    """

    def __init__(self, models: Sequence[LiveModel], options: argparse.Namespace, step: Any) -> None:
        self.model, self.double = models
        self.options = options
        self.nnz: dict[float, int] = {}
        self._step = step

    def deltas(self, density: float) -> list[ParamDelta]:
        from scripts.bench.live_vllm import random_deltas

        return random_deltas(self.model.base, density, self.options.seed)

    def compare(self, density: float) -> dict[str, dict[str, float]]:
        """Return the shortest seconds of every way, in total and by phase.

        Raises:
            RuntimeError: A way leaves other bits than a load of the changed checkpoint.
        """
        from scripts.bench.live_vllm import as_part, reverse, scatter_apply, ways

        deltas = self.deltas(density)
        self.nnz[density] = sum(delta.nnz for delta in deltas)
        _, part = as_part(deltas)
        undo = reverse(deltas)
        expected = self._loaded(deltas)
        found: dict[str, dict[str, float]] = {}
        todo = list(ways(self.model, part, deltas, _CHUNK_BYTES))
        for number in range(self.options.runs):
            self._step(f"applying to {density:.1%} of the elements")
            for name, apply in todo:
                times = apply()
                if number == 0 and self.model.checksum() != expected:
                    raise RuntimeError(f"{name} leaves other bits than a load at {density:.1%}")
                known = found.setdefault(name, times)
                found[name] = {phase: min(known[phase], times[phase]) for phase in times}
                scatter_apply(self.model.plain, undo)
        return found

    def _loaded(self, deltas: Sequence[ParamDelta]) -> str:
        """Return the model's checksum after the engine loads the changed tensors.

        The base weights are loaded again afterwards.
        """
        import torch

        from engine_ext.kernels import bits_of, host_bits

        self._step("loading the changed checkpoint")
        changed = {}
        for delta in deltas:
            tensor = self.model.base[delta.name].clone().reshape(-1)
            host_bits(bits_of(tensor))[delta.indices] = delta.values
            changed[delta.name] = tensor.reshape(delta.shape)
        with torch.no_grad():
            self.model.load_weights(iter(changed.items()))
            checksum = self.model.checksum()
            self.model.load_weights(iter(self.model.base.items()))
        return checksum

    def doubling(self) -> list[float]:
        """Return the shortest seconds of one commit in both models; each is rolled back."""
        import time

        from scripts.bench.live_vllm import as_part, commit

        _, part = as_part(self.deltas(_MEMORY_DENSITY))
        found = [float("inf"), float("inf")]
        for _ in range(self.options.runs):
            self._step("twice the layers")
            for number, live in enumerate((self.model, self.double)):
                staged = [live.scatter.stage(part)]
                start = time.perf_counter()
                log = commit(live.scatter, staged)
                found[number] = min(found[number], time.perf_counter() - start)
                live.scatter.roll_back(log)
        return found

    def extra_bytes(self) -> dict[str, float]:
        """Return a sync's peak bytes per changed element, without the container."""
        from engine_ext.wire import decode_part
        from scripts.bench.live_vllm import as_part, commit

        self._step("memory")
        deltas = self.deltas(_MEMORY_DENSITY)
        nnz = sum(delta.nnz for delta in deltas)
        body, _ = as_part(deltas)
        del deltas
        applier = self.model.scatter

        def sync() -> Any:
            return commit(applier, [applier.stage(decode_part(body))])

        ctypes.CDLL(None).malloc_trim(0)  # memory freed earlier would hide what the sync takes
        before = reset_peak()
        log = sync()
        resident = peak_resident() - before
        applier.roll_back(log)
        tracemalloc.start()
        log = sync()
        traced = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        applier.roll_back(log)
        return {"resident": resident / nnz, "traced": traced / nnz}


def report(
    console: Console,
    bench: Bench,
    times: dict[float, dict[str, dict[str, float]]],
    commits: Sequence[float],
    extra: dict[str, float],
) -> dict[str, Any]:
    """Print the tables; return the JSON object."""
    import torch

    live, options = bench.model, bench.options
    numel = sum(tensor.numel() for tensor in live.base.values())
    console.print(
        f"Qwen3, {numel / 1e6:.0f} million parameters, {live.nbytes / 1e6:.0f} MB, on "
        f"{options.device}; {torch.get_num_threads()} threads, fastest of {options.runs} runs; "
        "all ways leave a load's bits"
    )
    table = Table("density", "nnz", "way", "ms", "stage", "commit", "x masked", "x vLLM", "wanted")
    table.box = box.SIMPLE_HEAD
    for column in table.columns:
        column.justify = "right"
    for density, found in times.items():
        for name, phases in found.items():
            cells = [f"{phases[p] * 1e3:.1f}" if p in phases else "" for p in _PHASES]
            ratios = [
                f"{found[w]['total'] / phases['total']:.1f}" for w in ("masked", "vLLM's own")
            ]
            wanted = str(_WANTED.get(density, "")) if name == "scatter" else ""
            table.add_row(
                f"{density:.1%}", f"{bench.nnz[density]:,}", name, *cells, *ratios, wanted
            )
    console.print(table)
    doubling, extra_bytes = commits[1] / commits[0], max(extra.values())
    for density, found in times.items():
        with_digest, without = found["scatter, with digest"], found["scatter"]
        share = 1 - without["stage"] / with_digest["stage"]
        console.print(
            f"{density:.1%}: commit {with_digest['commit'] / bench.nnz[density] * 1e9:.1f} ns per "
            f"element; gathering and digesting old values is {share:.0%} of staging"
        )
    console.print(
        f"doubling: commit {commits[0] * 1e3:.1f} ms, with twice the layers "
        f"{commits[1] * 1e3:.1f} ms: {doubling:.2f} times (wanted: at most 1.10)"
    )
    console.print(
        f"extra memory per changed element: {extra['traced']:.1f} bytes traced, "
        f"{extra['resident']:.1f} resident (wanted: at most 16)"
    )
    for name, seconds in live.timings.items():
        console.print(f"{name}: {seconds:.2f} s, {seconds / live.nbytes * 1e9:.2f} s per GB")
    against = {
        way: {
            str(density): round(found[way]["total"] / found["scatter"]["total"], 1)
            for density, found in times.items()
        }
        for way in ("masked", "vLLM's own")
    }
    return {
        "scatter_vs_masked": against["masked"],
        "scatter_vs_vllm": against["vLLM's own"],
        "doubling": round(doubling, 3),
        "extra_bytes_per_nnz": round(extra_bytes, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
