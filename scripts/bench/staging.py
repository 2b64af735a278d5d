"""Measure what the ranks of one host spend on staging parts together.

    python -m scripts.bench.staging
    python -m scripts.bench.staging --layers 1 --runs 1      # to see whether it works

Starts a process for each of --ranks ranks. Each holds its slice of every tensor: half of the
tensors are split by rows and half by columns. This process verifies and decompresses parts, as an
engine's HTTP process does once they have arrived; then all ranks stage them. Nothing is committed.
The ways take turns, and each figure is the least of --runs runs.

rows:
  one part            all changes in one part
  one after another   the same changes in several parts
  side by side        the ranks stage several parts at once
columns:
  intake ms           verifying, decompressing and writing all parts for the ranks
  CPU s               of all ranks together
  wall ms             intake, and until every rank has staged all parts
  peak MB             the ranks' own memory, above what they had before
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from engine_ext.format import (
    Limits,
    ParamDelta,
    PartId,
    encode_part,
    read_container,
    verify_container,
)
from engine_ext.model import StorageIndex
from engine_ext.placement import TensorSpec, certify_placement, make_plan
from engine_ext.ranks import GroupRanks, RankGroup, cores_per_rank
from engine_ext.ranks.operations import BeginPart
from engine_ext.resources import usable_cores
from engine_ext.startup import LoaderDryRun
from engine_ext.sync import BackgroundStaging, DeltaApplier
from scripts import command_line
from scripts.bench import frame

_ROWS: Final = 4096
_COLUMNS: Final = 3072
_SAMPLE_S: Final = 0.005

_Weights = dict[str, torch.Tensor]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = frame.make_parser("staging", __doc__)
    add, positive = parser.add_argument, command_line.at_least(1)
    add("--ranks", type=positive, metavar="N", default=8, help="(%(default)s)")
    add("--runs", type=positive, metavar="N", default=5, help="of each way (%(default)s)")
    add("--layers", type=positive, metavar="N", default=8, help="25 million weights each (8)")
    add("--parts", type=positive, metavar="N", default=8, help="in the second table (%(default)s)")
    add("--density", type=float, metavar="X", default=0.02, help="changed (%(default)s)")
    add("--encoding", default="gap8_exp", help="of the parts (%(default)s)")
    add("--read-workers", type=positive, metavar="N", default=4, help="of a rank (%(default)s)")
    options = parser.parse_args(arguments)
    return frame.run(options, lambda _: _run(options), (RuntimeError, OSError))


def _folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


# The weights and their parts ------------------------------------------------------------------


def _weights(layers: int) -> _Weights:
    generator = torch.Generator().manual_seed(0)
    return {
        f"layers.{layer}.{split}": torch.randn((_ROWS, _COLUMNS), generator=generator)
        .mul_(0.02)
        .bfloat16()
        for layer in range(layers)
        for split in ("rows", "columns")
    }


def _bodies(weights: _Weights, options: argparse.Namespace, parts: int) -> list[bytes]:
    """Return the same changes in so many parts."""
    random = np.random.default_rng(1)
    deltas = []
    for name, tensor in weights.items():
        indices = np.flatnonzero(random.random(tensor.numel()) < options.density)
        values = tensor.view(torch.int16).numpy().view(np.uint16).reshape(-1)[indices] ^ 1
        deltas.append(ParamDelta(name, "bfloat16", tuple(tensor.shape), indices, values))
    return [
        encode_part(deltas[number::parts], encoding=options.encoding, current_version=1)
        for number in range(min(parts, len(deltas)))
    ]


class _Slice(torch.nn.Module):
    """The slices of every tensor that one rank holds."""

    def __init__(self, weights: _Weights, rank: int, ranks: int) -> None:
        super().__init__()
        self._rank, self._ranks = rank, ranks
        for name, tensor in weights.items():
            own = torch.empty_like(self._own(name, tensor), memory_format=torch.contiguous_format)
            self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(own, False))

    def _own(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        axis = 0 if name.endswith("rows") else 1
        size = tensor.shape[axis] // self._ranks
        return tensor.narrow(axis, self._rank * size, size)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            self.get_parameter(name.replace(".", "_")).data.copy_(self._own(name, tensor))


# One rank -------------------------------------------------------------------------------------


class _Rank:
    """One rank's applier, and how it stages parts."""

    def __init__(self, weights: _Weights, ranks: RankGroup, workers: int) -> None:
        model = _Slice(weights, ranks.rank, len(ranks.all_gather(None)))
        model.load_weights(weights.items())
        index = StorageIndex(model)
        specs = [TensorSpec(n, tuple(t.shape), t.dtype) for n, t in weights.items()]
        placement = LoaderDryRun(model, model.load_weights, index).trace(specs)
        certify_placement(placement, weights.items())
        plan, threads = make_plan(placement, ranks), cores_per_rank(ranks)
        self._applier = DeltaApplier(model, index, plan, undo_bytes=1 << 40, threads=threads)
        self._ranks, self._workers = ranks, workers

    def stage(self, paths: list[str], *, at_once: bool) -> float:
        """Stage some parts; return the CPU seconds that this rank has spent."""
        staging = BackgroundStaging(self._workers)
        self._ranks.all_gather(None)
        start = time.process_time()
        for number, path in enumerate(paths):
            identity = Path(path).name.removesuffix(".safetensors")
            part = PartId(version=1, base_version=0, identity=identity, part=number)
            staging.start(BeginPart(part=part, path=path, now=0.0), self._applier.stage_unpacked)
            if not at_once:
                staging.results([number])
                self._ranks.all_gather(None)
        staging.results(range(len(paths)))
        spent = time.process_time() - start
        self._ranks.all_gather(None)
        return spent


def _serve(
    rank: int, options: argparse.Namespace, weights: _Weights, store: str, pipe: Any
) -> None:
    """Stage in a process of its own what the benchmark asks for."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks
    )
    own = _Rank(weights, GroupRanks(torch.distributed.group.WORLD), options.read_workers)
    pipe.send(None)
    while (asked := pipe.recv()) is not None:
        pipe.send(own.stage(asked[0], **asked[1]))


# All of them ----------------------------------------------------------------------------------


class _Rig:
    """The processes of all ranks, and a spool folder."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        torch.set_num_threads(1)  # a process with OpenMP's threads cannot be forked
        self._folder, weights = folder, _weights(options.layers)
        self.weights, context = weights, multiprocessing.get_context("fork")
        self._pipes, self._processes = [], []
        for rank in range(options.ranks):
            pipe, other = context.Pipe()
            arguments = (rank, options, weights, str(folder / "store"), other)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._pipes.append(pipe)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()

    def measure(self, bodies: Sequence[bytes], **how: bool) -> dict[str, float]:
        """Take some parts in, and let all ranks stage them."""
        before, peak, done = self._memory(), 0, threading.Event()

        def sample() -> None:
            nonlocal peak
            while not done.wait(_SAMPLE_S):
                peak = max(peak, self._memory() - before)

        sampling = threading.Thread(target=sample)
        sampling.start()
        start = time.perf_counter()
        paths = [_take_in(body, self._folder) for body in bodies]
        intake = time.perf_counter() - start
        for pipe in self._pipes:
            pipe.send(([str(path) for path in paths], how))
        spent = [pipe.recv() for pipe in self._pipes]
        wall = time.perf_counter() - start
        done.set()
        sampling.join()
        for path in paths:
            path.unlink()
        return {
            "intake_ms": intake * 1e3,
            "cpu_s": sum(spent),
            "wall_ms": wall * 1e3,
            "peak_mb": peak / 1e6,
        }

    def _memory(self) -> int:
        """Return the bytes that the ranks have of their own."""
        total = 0
        for process in self._processes:
            status = Path(f"/proc/{process.pid}/status").read_text()
            total += next(
                int(line.split()[1]) << 10 for line in status.splitlines() if "RssAnon" in line
            )
        return total


def _take_in(body: bytes, folder: Path) -> Path:
    """Verify and decompress a part; write what ranks map, to a file named after its identity."""
    contents = verify_container(read_container(body, Limits())[0], body)
    path = folder / f"{contents.identity}.safetensors"
    with path.open("wb") as file:
        file.writelines([*(() if contents.replaces else (body,)), *contents.pieces])
    return path


def _run(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="delta-bench-", dir=_folder()) as folder:
        found = _measure(_Rig(options, Path(folder)), options)
    figures = ("intake_ms", "cpu_s", "wall_ms", "peak_mb")
    frame.show(
        f"{found['elements'] / 1e6:.0f} million weights on {options.ranks} ranks, "
        f"{options.density:.1%} changed, {found['bytes'] / 1e6:.1f} MB of {options.encoding}; "
        f"{usable_cores()} cores, least of {options.runs} runs",
        (f"of {found['parts']} parts", *(one.replace("_", " ") for one in figures)),
        (
            (way, *(f"{found[way][figure]:.{2 * (figure == 'cpu_s')}f}" for figure in figures))
            for way in ("one part", "one after another", "side by side")
        ),
    )
    return found


def _measure(rig: _Rig, options: argparse.Namespace) -> dict[str, Any]:
    one, several = (_bodies(rig.weights, options, parts) for parts in (1, options.parts))
    ways: dict[str, Callable[[], dict[str, float]]] = {
        "one part": lambda: rig.measure(one, at_once=True),
        "one after another": lambda: rig.measure(several, at_once=False),
        "side by side": lambda: rig.measure(several, at_once=True),
    }
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for run in range(options.runs + 1):
        for way, measure in ways.items():
            figures = measure()
            if run:  # the first one compiles
                runs[way].append(figures)
    rig.close()
    least = {
        way: {figure: min(one[figure] for one in found) for figure in found[0]}
        for way, found in runs.items()
    }
    numel = sum(tensor.numel() for tensor in rig.weights.values())
    return {"elements": numel, "bytes": sum(map(len, one)), "parts": len(several), **least}


if __name__ == "__main__":
    raise SystemExit(main())
