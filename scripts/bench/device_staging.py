"""Time how one rank stages a part whose weights are on an accelerator.

    python -m scripts.bench.device_staging
    python -m scripts.bench.device_staging --device cpu --elements 2000000   # to see if it works

Half of the weights are large matrices, the other half are experts' small ones. The part is as
intake leaves it. Both ways must find the same change; each figure is the least of --runs runs.

ways:
  streams      gap streams and values cross the bus, kernels do the rest
  positions    the host expands the streams and finds the offsets
columns:
  wall ms, CPU ms   of one staging, with the copy of the old values; CPU of all threads
  GPU MB            beyond what is reserved, at most
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch

from engine_ext.format import (
    Limits,
    ParamDelta,
    UnpackedPart,
    encode_part,
    expand_part,
    read_container,
    read_unpacked,
    verify_container,
)
from engine_ext.kernels.triton import runs_kernels
from engine_ext.model import StorageIndex
from engine_ext.placement import DeviceMemory, TensorSpec, certify_placement, make_plan
from engine_ext.ranks import SingleRank
from engine_ext.resources import usable_cores
from engine_ext.startup import LoaderDryRun
from engine_ext.sync import DeltaApplier, StagedPart
from scripts import command_line
from scripts.bench import frame
from scripts.bench.sender_device import missing_device

_MATRIX: Final = (1024, 4096)
_EXPERT: Final = (768, 256)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = frame.make_parser("device_staging", __doc__)
    add, positive = parser.add_argument, command_line.at_least(1)
    add("--elements", type=positive, metavar="N", default=4 << 30, help="weights (%(default)s)")
    add("--runs", type=positive, metavar="N", default=5, help="of each way (%(default)s)")
    add("--density", type=float, metavar="X", default=0.02, help="changed (%(default)s)")
    add("--encoding", default="gap8_ulp", help="of the part (%(default)s)")
    add("--reserved", type=positive, metavar="MB", default=1024, help="on it (%(default)s)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="of the weights (%(default)s)")
    options = parser.parse_args(arguments)
    if missing := missing_device(options.device):
        parser.error(missing)
    return frame.run(options, lambda _: _measure(options), (RuntimeError,))


class _Model(torch.nn.Module):
    """Matrices of their own, and experts that are stacked."""

    def __init__(self, elements: int, device: torch.device) -> None:
        super().__init__()
        self.matrices = max(1, elements // 2 // int(np.prod(_MATRIX)))
        self.experts = max(1, elements // 2 // int(np.prod(_EXPERT)))
        for number in range(self.matrices):
            self.register_parameter(f"matrix{number}", _parameter(_MATRIX, device))
        self.stacked = _parameter((self.experts, *_EXPERT), device)

    def names(self) -> dict[str, tuple[int, ...]]:
        return {
            **{f"matrix{number}": _MATRIX for number in range(self.matrices)},
            **{f"expert{number}": _EXPERT for number in range(self.experts)},
        }

    def own(self, name: str) -> torch.Tensor:
        if name.startswith("matrix"):
            return self.get_parameter(name)
        return self.stacked[int(name.removeprefix("expert"))]

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            self.own(name).data.copy_(tensor)


def _parameter(shape: tuple[int, ...], device: torch.device) -> torch.nn.Parameter:
    value = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02)
    return torch.nn.Parameter(value, requires_grad=False)


def _part(model: _Model, density: float, encoding: str) -> UnpackedPart:
    random, deltas = np.random.default_rng(1), []
    for name, shape in model.names().items():
        numel = int(np.prod(shape))
        gaps = random.geometric(density, int(numel * density))
        indices = np.cumsum(gaps) - 1
        indices = indices[: np.searchsorted(indices, numel)]
        values = np.ones(indices.size, np.uint16)
        differences = encoding == "gap8_ulp"
        deltas.append(ParamDelta(name, "bfloat16", shape, indices, values, differences=differences))
    body = encode_part(deltas, encoding=encoding, current_version=1, digest_part="0" * 32)
    contents = verify_container(read_container(body, Limits())[0], body)
    pieces = [] if contents.replaces else [body]
    part = read_unpacked(b"".join([*pieces, *contents.pieces]), contents.identity)
    assert part is not None
    return part


def _measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Print and return the figures of each way.

    Raises:
        RuntimeError: the kernels do not run on the device, or the ways disagree.
    """
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda" and not runs_kernels(device):
        raise RuntimeError("the Triton kernels do not run on this device")
    model = _Model(options.elements, device)
    index = StorageIndex(model)
    specs = [TensorSpec(name, shape, torch.bfloat16) for name, shape in model.names().items()]
    placement = LoaderDryRun(model, model.load_weights, index).trace(specs)
    weights = ((name, model.own(name).detach().cpu()) for name in model.names())
    certify_placement(placement, weights)
    threads = usable_cores()
    memory = DeviceMemory(options.reserved << 20, [device] if device.type == "cuda" else [])
    applier = DeltaApplier(
        *(model, index, make_plan(placement, SingleRank())),
        undo_bytes=1 << 40,
        threads=threads,
        memory=memory,
    )
    part = _part(model, options.density, options.encoding)
    ways: dict[str, Callable[[], StagedPart]] = {
        "streams": lambda: applier.stage_unpacked(part),
        "positions": lambda: applier.stage(expand_part(part, threads)),
    }
    found: dict[str, dict[str, float]] = {}
    changes: list[dict[str, Any]] = []
    for way, stage in ways.items():
        changes.append(applier.rank_summary([stage()]))  # compiles
        runs = []
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        for _ in range(options.runs):
            wall, spent = time.perf_counter(), time.process_time()
            staged = stage()
            runs.append((time.perf_counter() - wall, time.process_time() - spent))
            del staged
        peak = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0
        walls, cpus = zip(*runs, strict=True)
        found[way] = {"wall ms": min(walls) * 1e3, "CPU ms": min(cpus) * 1e3, "GPU MB": peak / 1e6}
    if any(change != changes[0] for change in changes):
        raise RuntimeError(f"the ways disagree: {changes}")
    frame.show(
        f"{options.elements:,} weights; {options.density:.1%} changed, {options.encoding}",
        ("way", *found["streams"]),
        ((way, *(f"{one:.1f}" for one in figures.values())) for way, figures in found.items()),
    )
    return found


if __name__ == "__main__":
    raise SystemExit(main())
