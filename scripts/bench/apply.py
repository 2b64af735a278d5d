"""Time how one rank applies a delta on a live vLLM: scatter, masked, and vLLM's own way.

    python -m scripts.bench.apply
    python -m scripts.bench.apply --layers 1 --runs 1      # to see whether it works
    python -m scripts.bench.apply --without-engine --device cuda

Builds a random Qwen3 with bf16 weights in a temporary folder, loads it with vLLM in this process,
traces and certifies it as the plugin does, and applies the same random deltas in each way. A
measurement starts with decoded (indices, values) and ends with written weights, without HTTP: it
locates, gathers old values, and writes. Every time is the shortest of --runs runs; the ways take
turns, each from the same weights. The first run of each way must leave the model, bit for bit, as
vLLM's own load of the changed checkpoint does. PyTorch and engine_ext use the same number of
threads.

ways:
  scatter               engine_ext's, staged and committed as an engine does, but with the digest
                        off: old values are only gathered for the undo, by the pass that writes
  scatter, with digest  as in an engine: old values are gathered and digested while staging,
                        compared again by the pass that overwrites them
  masked                engine_ext.sync.masked.apply_masked
  vLLM's own            load_checkpoint_weight_patches, with its defaults; not --without-engine
columns:
  density, nnz          changed elements / elements, and changed elements
  ms, stage, commit     milliseconds of the whole apply and of its two phases
  x masked, x vLLM      how many times faster than these ways
  / scatter             share of the scatter's speed
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from scripts.bench import frame

if TYPE_CHECKING:
    from scripts.bench.live_vllm import Bench

_DENSITIES: Final = (0.006, 0.02, 0.03)
_PHASES: Final = ("total", "stage", "commit")
_COMPARED: Final = ("masked", "vLLM's own", "scatter")
_EPILOG: Final = """\
With --json the last line on stdout is one JSON object: scatter_vs_masked, scatter_vs_vllm,
served_vs_masked, served_vs_vllm and served_vs_scatter (density to how many times faster the first
is; "served" is with digest).

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
    stopped = "interrupted; the model is deleted"
    return frame.run(options, lambda folder: run(options, folder), (Exception,), stopped)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = frame.make_parser("apply", __doc__, _EPILOG)
    frame.add_model_options(parser, runs=9, layers=13)
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cpu", help="of the model (%(default)s)")
    without_help = "load the models by a plain loop instead of vLLM, which need not be installed"
    add("--without-engine", action="store_true", help=without_help)
    add("--seed", type=int, metavar="N", default=0, help="of weights and deltas (%(default)s)")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Build, load, measure and print; return the JSON object."""
    steps = len(_DENSITIES) * (options.runs + 1) + 2
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    errors = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    with Progress(*columns, TimeElapsedColumn(), console=errors) as progress:
        task = progress.add_task("building the model", total=steps)

        def step(description: str) -> None:
            progress.update(task, description=description, advance=1)

        bench = _bench(options, folder, step)
        times = {density: bench.compare(density) for density in _DENSITIES}
    return report(options, bench, times)


def _bench(options: argparse.Namespace, folder: Path, step: Callable[[str], None]) -> Bench:
    import torch

    from scripts.bench.live_vllm import Bench, make_live_model, make_plain_model, start
    from scripts.bench.sender_device import missing_device
    from scripts.bench.synthetic_weights import QWEN3_SIZES
    from scripts.live_engine import tiny_models

    if missing := missing_device(options.device):
        raise RuntimeError(missing)
    step(f"building a model of {options.layers} layers")
    if options.without_engine:
        torch.set_num_threads(options.threads)
        plain = make_plain_model(options.layers, options.device, options.seed, options.threads)
        return Bench(plain, options.runs, options.seed, step)
    if options.device == "cpu" and torch.cuda.is_available():
        raise RuntimeError(
            "--device cpu, but vLLM would use this machine's CUDA device: measure it with "
            "--device cuda, or hide it with CUDA_VISIBLE_DEVICES= and a vLLM built for CPUs"
        )
    sizes = {**QWEN3_SIZES, "num_hidden_layers": options.layers}
    path = tiny_models.build("qwen3", folder / "model", seed=options.seed, **sizes)
    step("loading the model")
    llm, learner = start(path)
    if torch.get_num_threads() != options.threads:
        raise RuntimeError(f"PyTorch has {torch.get_num_threads()} threads, not {options.threads}")
    live = make_live_model(llm, learner, options.threads)
    return Bench(live, options.runs, options.seed, step)


def report(
    options: argparse.Namespace,
    bench: Bench,
    times: dict[float, dict[str, dict[str, float]]],
) -> dict[str, Any]:
    """Print the tables; return the JSON object."""
    live = bench.model
    numel = sum(tensor.numel() for tensor in live.base.values())
    rows = []
    for density, found in times.items():
        for name, phases in found.items():
            cells = [f"{density:.1%}", f"{bench.nnz[density]:,}", name]
            cells += [f"{phases[p] * 1e3:.1f}" if p in phases else "" for p in _PHASES]
            for way in _COMPARED:
                faster = found[way]["total"] / phases["total"] if way in found else None
                digits = 2 if way == "scatter" else 1
                cells.append("" if faster is None else f"{faster:.{digits}f}")
            rows.append(cells)
    frame.show(
        f"Qwen3, {numel / 1e6:.0f} million parameters, {live.nbytes / 1e6:.0f} MB, on "
        f"{options.device}; {options.threads} threads, fastest of {options.runs} runs; "
        "all ways leave a load's bits",
        ("density", "nnz", "way", "ms", "stage", "commit", "x masked", "x vLLM", "/ scatter"),
        rows,
    )
    result: dict[str, Any] = {}
    ways = {"scatter": "scatter", "served": "scatter, with digest"}
    for short, way in ways.items():
        others = {"masked": "masked", "vllm": "vLLM's own"}
        for name, other in (others if short == "scatter" else {**others, **ways}).items():
            if other != way and all(other in found for found in times.values()):
                result[f"{short}_vs_{name}"] = {
                    str(density): round(found[other]["total"] / found[way]["total"], 2)
                    for density, found in times.items()
                }
    return result


if __name__ == "__main__":
    raise SystemExit(main())
