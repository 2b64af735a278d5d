"""Time what one rank spends on the params of a part, whatever their elements take.

    python -m scripts.bench.param_share --base ../other-tree
    python -m scripts.bench.param_share --params 50 --runs 1      # to see if it works

A mixture of experts has tens of thousands of small params. One part changes --changed elements of
each of them, and one rank holds all. The trees take turns, and each figure is the CPU seconds of
the least of --runs runs.

rows:
  device      weights of a device whose kernels are stubs, so that the host's work is left
  host        weights in host memory, with the compiled loops
columns:
  open        finding what is in the file that intake leaves
  stage       see `DeltaApplier.stage_unpacked`
  check       what comes before the write, and the digests after it
  rollback    what a rollback does while generation is paused
  free        what was staged
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from engine_ext.format import (
    Limits,
    ParamDelta,
    encode_part,
    read_container,
    read_unpacked,
    verify_container,
)
from engine_ext.model import StorageIndex
from engine_ext.placement import TensorSpec, certify_placement, device_batch, make_plan
from engine_ext.ranks import SingleRank
from engine_ext.startup import LoaderDryRun
from engine_ext.sync import DeltaApplier, stream_table
from scripts import command_line

_TREE: Final = Path(__file__).parents[2]
_SHAPE: Final = (8, 1024)
_COLUMNS: Final = ("open", "stage", "check", "rollback", "free")

_Figures = dict[str, dict[str, float]]  # seconds by column, by row


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = command_line.make_parser("scripts.bench.param_share", __doc__)
    add, positive = parser.add_argument, command_line.at_least(1)
    add("--params", type=positive, metavar="N", default=18_000, help="of the part (%(default)s)")
    add("--changed", type=positive, metavar="N", default=300, help="elements of each (%(default)s)")
    add("--runs", type=positive, metavar="N", default=5, help="turns of each (%(default)s)")
    add("--base", type=Path, metavar="TREE", help="a source tree to compare with")
    add("--serve", action="store_true", help=argparse.SUPPRESS)
    add("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(arguments)
    if options.serve:
        return _serve(options)

    def program() -> int:
        found = _run(options)
        _print(found, options)
        if options.json:
            print(json.dumps(found), flush=True)
        return 0

    return command_line.run(program, (OSError, ValueError), "interrupted")


def _run(options: argparse.Namespace) -> dict[str, _Figures]:
    """Let the trees take turns; return the least figures of each."""
    trees = {"base": options.base, "this tree": _TREE}
    servers = {way: _Server(tree, options) for way, tree in trees.items() if tree is not None}
    turns: dict[str, list[_Figures]] = {way: [] for way in servers}
    for turn in range(options.runs + 1):
        for way, server in servers.items():
            figures = server.take()
            if turn:  # the first one warms up
                turns[way].append(figures)
    for server in servers.values():
        server.close()
    return {
        way: {
            row: {name: min(one[row][name] for one in found) for name in _COLUMNS}
            for row in found[0]
        }
        for way, found in turns.items()
    }


class _Server:
    """A process that measures with the modules of a tree, whenever it gets a line."""

    def __init__(self, tree: Path, options: argparse.Namespace) -> None:
        path = os.pathsep.join([str(tree.resolve()), str(_TREE)])
        counts = "--params", str(options.params), "--changed", str(options.changed)
        # -P: the modules next to this file must not hide others of the same name.
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, "--serve", *counts],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def take(self) -> _Figures:
        """Return the figures of a turn; ValueError if the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        figures: _Figures = json.loads(self._process.stdout.readline())
        return figures

    def close(self) -> None:
        self._process.communicate()


# In a process for each tree -------------------------------------------------------------------


class _Experts(torch.nn.Module):
    """Experts that are stacked."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._numbers = {name: number for number, name in enumerate(names)}
        weights = torch.zeros((len(names), *_SHAPE), dtype=torch.bfloat16).normal_(0, 0.02)
        self.stacked = torch.nn.Parameter(weights, requires_grad=False)

    def own(self, name: str) -> torch.Tensor:
        return self.stacked[self._numbers[name]]

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            self.own(name).data.copy_(tensor)


def _serve(options: argparse.Namespace) -> int:
    names = [f"layers.{n // 384}.mlp.experts.{n % 384}.up.weight" for n in range(options.params)]
    model = _Experts(names)
    index = StorageIndex(model)
    specs = [TensorSpec(name, _SHAPE, torch.bfloat16) for name in names]
    placement = LoaderDryRun(model, model.load_weights, index).trace(specs)
    certify_placement(placement, ((name, model.own(name).detach().clone()) for name in names))
    plan, file = make_plan(placement, SingleRank()), _file(names, options.changed)

    def applier(own: Any) -> DeltaApplier:
        return DeltaApplier(model, index, own, undo_bytes=1 << 40, threads=1)

    targets = {n: tuple(replace(t, host=None) for t in ts) for n, ts in plan.targets.items()}
    on_host = applier(plan)
    with _stubs():
        on_device = applier(replace(plan, targets=targets))
        for _ in sys.stdin:
            found = {"device": _measure(on_device, *file), "host": _measure(on_host, *file)}
            print(json.dumps(found), flush=True)
    return 0


def _file(names: Sequence[str], changed: int) -> tuple[bytes, str]:
    """Return what intake leaves of a part, and its identity."""
    random, deltas = np.random.default_rng(1), []
    for name in names:
        indices = np.sort(random.choice(int(np.prod(_SHAPE)), changed, replace=False))
        deltas.append(ParamDelta(name, "bfloat16", _SHAPE, indices, np.ones(changed, np.uint16)))
    body = encode_part(deltas, encoding="gap8_exp", current_version=1)
    contents = verify_container(read_container(body, Limits())[0], body)
    pieces = [] if contents.replaces else [body]
    return b"".join([*pieces, *contents.pieces]), contents.identity


@contextmanager
def _stubs() -> Iterator[None]:
    """Let weights in host memory pass for those of a device; the kernels find and write nothing."""
    from engine_ext.kernels.triton import gap_expand, gather_scatter

    def locate(boxes: Any, symbols: Any, programs: Any, items: Any) -> Any:
        counts = items[:, 6]
        found = torch.stack([counts, torch.zeros_like(counts), counts], 1)
        return SimpleNamespace(found=found, items=items)

    def stage(located: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        return torch.zeros((located.items.shape[0], 2), dtype=torch.int64)

    with (
        mock.patch.object(stream_table, "runs_kernels", return_value=True),
        mock.patch.object(device_batch, "runs_kernels", return_value=True),
        mock.patch.object(gather_scatter, "visit"),
        mock.patch.object(gap_expand, "locate", locate),
        mock.patch.object(gap_expand, "stage", stage),
    ):
        yield


def _measure(applier: DeltaApplier, file: bytes, identity: str) -> dict[str, float]:
    seconds = dict.fromkeys(_COLUMNS, 0.0)

    def timed(name: str, work: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = work()
        seconds[name] += time.process_time() - start
        return result

    def check() -> None:
        applier.check_sync(staged, full=False)
        applier.agree(staged, [applier.rank_summary(staged)])

    def roll_back() -> None:
        applier.check_rollback(log)
        applier.roll_back(log[0])

    gc.collect()
    gc.disable()  # as while an engine stages
    found = [timed("open", lambda: read_unpacked(file, identity))]
    staged = [timed("stage", lambda: applier.stage_unpacked(found.pop()))]
    timed("check", check)
    applier.put(staged, compares=False)
    log = [timed("check", lambda: applier.finish(staged))]
    timed("rollback", roll_back)

    def free() -> None:
        staged.clear()
        log.clear()

    timed("free", free)
    gc.enable()
    return seconds


def _print(found: dict[str, _Figures], options: argparse.Namespace) -> None:
    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 110)
    console.print(
        f"CPU ms of {options.params} params of {options.changed} changed elements each; "
        f"least of {options.runs} runs"
    )
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("", "", *_COLUMNS, "all", "x base"):
        table.add_column(column, justify="right" if column else "left")
    sums = {way: {r: sum(f.values()) for r, f in rows.items()} for way, rows in found.items()}
    for way, rows in found.items():
        for row, figures in rows.items():
            cells = [f"{figures[name] * 1e3:.1f}" for name in _COLUMNS]
            cells.append(f"{sums[way][row] * 1e3:.1f}")
            if way == "this tree" and "base" in found:
                cells.append(f"{sums[way][row] / sums['base'][row]:.2f}")
            table.add_row(way, row, *cells)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
