"""Time what delta updates add to the start of an engine, stage by stage.

    python -m scripts.bench.startup
    python -m scripts.bench.startup --layers 2 --runs 1      # to see whether it works

Builds a random model of Qwen3's shape in bfloat16, writes it as a checkpoint into a temporary
folder, and loads it as vLLM does: query, key and value projection fused into one parameter, gate
and up projection into another, each shard copied by the loader of its parameter. No engine runs.
Then the model is traced, certified and digested as a rank of an engine does it. The checkpoint is
in the page cache. Every time is the shortest of --runs runs, each on a fresh model.

stages:
  load                  the engine's own: read the files and copy every tensor into the model
  reading, three times  of all weights, by as many threads; memory's own speed
  before processing     the trace that an engine's load hook makes before post-load processing
  tracing               the trace of the loaded model, and what is derived from its weights
  certification         all bytes compared with the checkpoint's, and digested
  applier               the plan, and the digest of what certification has not digested
  kernels               compiled loops, loaded from numba's cache
columns:
  s, s per GB           seconds, and over the weights' size
  x load                over the load's time
  CPU s per GB          of all threads, the least of the runs: what other work on the machine
                        changes less
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from scripts import command_line

if TYPE_CHECKING:
    import torch

_FUSED: Final = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
_WORDS: Final = 1 << 18  # that a thread reads at a time
_EPILOG: Final = """\
With --json the last line on stdout is one JSON object: bytes, threads, seconds (by stage, on the
clock and of all processors).

exit status: 0 measured; 1 a tensor is not certified; 2 bad usage; 130 interrupted
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    options = parse_arguments(arguments)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # torch reads it when it is imported

    def program() -> int:
        with tempfile.TemporaryDirectory(prefix="delta-bench-") as folder:
            result = run(options, Path(folder))
        if options.json:
            print(json.dumps(result), flush=True)
        return 0

    return command_line.run(program, (RuntimeError,), "interrupted; the checkpoint is deleted")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line.make_parser("scripts.bench.startup", __doc__, _EPILOG)
    command_line.add_model_options(parser, runs=5, layers=35)
    return parser.parse_args(arguments)


def make_model(layers: int) -> torch.nn.Module:
    """Return a model with the parameters of Qwen3 as an engine has them, without their values."""
    import torch
    from torch import nn

    from scripts.bench.synthetic_weights import QWEN3_SIZES as sizes

    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    width = sizes["head_dim"]

    def weight(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, dtype=torch.bfloat16), requires_grad=False)

    def layer(*shards: int, columns: int) -> nn.Module:
        module = nn.Module()
        module.weight = weight(sum(shards), columns)
        vars(module)["shards"] = shards
        return module

    def norm(length: int) -> nn.Module:
        module = nn.Module()
        module.weight = weight(length)
        return module

    def block() -> nn.Module:
        block, attention, mlp = nn.Module(), nn.Module(), nn.Module()
        queries, keys = heads * width, kv_heads * width
        attention.qkv_proj = layer(queries, keys, keys, columns=hidden)
        attention.o_proj = layer(hidden, columns=queries)
        attention.q_norm, attention.k_norm = norm(width), norm(width)
        mlp.gate_up_proj, mlp.down_proj = (
            layer(inner, inner, columns=hidden),
            layer(hidden, columns=inner),
        )
        block.self_attn, block.mlp = attention, mlp
        block.input_layernorm, block.post_attention_layernorm = norm(hidden), norm(hidden)
        return block

    model = nn.Module()
    model.model = nn.Module()
    model.model.embed_tokens = layer(sizes["vocab_size"], columns=hidden)
    model.model.layers = nn.ModuleList(block() for _ in range(layers))
    model.model.norm = norm(hidden)
    model.lm_head = layer(sizes["vocab_size"], columns=hidden)
    return model


def load_weights(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy a checkpoint's tensors into the model, as the loaders of vLLM's models do."""
    import torch

    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in weights:
            *path, last, kind = name.split(".")
            fused, shard = _FUSED.get(last, (last, 0))
            target = ".".join([*path, fused, kind])
            parameter = parameters[target]
            shards = getattr(model.get_submodule(target.rpartition(".")[0]), "shards", None)
            if shards is None:
                parameter.data.copy_(tensor)
            else:
                parameter.data.narrow(0, sum(shards[:shard]), shards[shard]).copy_(tensor)


def checkpoint_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield copies of the model's weights under the names and shapes that a checkpoint has."""
    import torch

    parts: Mapping[str, list[str]] = {
        fused: [name for name, (other, _) in _FUSED.items() if other == fused]
        for fused, _ in _FUSED.values()
    }
    for name, parameter in model.named_parameters():
        *path, last, kind = name.split(".")
        shards = getattr(model.get_submodule(name.rpartition(".")[0]), "shards", None)
        sizes = [len(parameter)] if shards is None else list(shards)
        pieces = torch.split(parameter.data, sizes)
        for one, piece in zip(parts.get(last, [last]), pieces, strict=True):
            yield ".".join([*path, one, kind]), piece.clone()


def write_checkpoint(model: torch.nn.Module, folder: Path) -> None:
    """Give the model random weights, and write them as a checkpoint of several files."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape).mul_(0.02))
    files: dict[str, dict[str, torch.Tensor]] = {}
    for number, (name, tensor) in enumerate(checkpoint_of(model)):
        files.setdefault(f"{number // 100:05}.safetensors", {})[name] = tensor
    for file_name, tensors in files.items():
        save_file(tensors, folder / file_name)


def read_checkpoint(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a checkpoint's tensors, as vLLM's reader of safetensors does."""
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)


Times = dict[str, tuple[float, float]]  # seconds on the clock, and of all processors


def measure(layers: int, folder: Path, threads: int) -> Times:
    """Load a model and make its receiver; return the seconds of each stage.

    Raises:
        RuntimeError: a tensor is not certified.
    """
    from engine_ext.placement import uncertified
    from engine_ext.ranks import SingleRank
    from engine_ext.receiver import LoadedModel, startup
    from engine_ext.settings import Settings
    from engine_ext.tracing import LoadingTrace

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
    traced = startup._trace(loaded, loading.specs, checkpoint)
    start = timed("tracing", start)
    startup._certify(loaded, traced, checkpoint)
    start = timed("certification", start)
    applier = startup._delta_applier(loaded, Settings(), traced)
    start = timed("applier", start)
    startup._receiver(loaded, Settings(), applier)
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


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Build, measure and print; return the JSON object."""
    model = make_model(options.layers)
    size = sum(one.nbytes for one in model.parameters())
    write_checkpoint(model, folder)
    del model
    found = Times()
    for _ in range(options.runs):
        for stage, seconds in measure(options.layers, folder, options.threads).items():
            clock, processors = found.get(stage, seconds)
            found[stage] = min(clock, seconds[0]), min(processors, seconds[1])
    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 110)
    console.print(
        f"{size / 1e9:.2f} GB of bfloat16 weights, {options.threads} threads, fastest of "
        f"{options.runs} runs"
    )
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("stage", "s", "s per GB", "x load", "CPU s per GB"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    ours = [one for stage, one in found.items() if stage not in ("load", "reading, three times")]
    found["all that is added"] = sum(one[0] for one in ours), sum(one[1] for one in ours)
    for stage, (clock, processors) in found.items():
        per_gb = 1e9 / size
        cells = (clock, clock * per_gb, clock / found["load"][0], processors * per_gb)
        table.add_row(stage, *(f"{cell:.2f}" for cell in cells))
    console.print(table)
    return {"bytes": size, "threads": options.threads, "seconds": found}


if __name__ == "__main__":
    sys.exit(main())
