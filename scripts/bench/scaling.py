"""Estimate the stages of a sync of a large model from the costs of one machine.

    python -m scripts.bench.scaling                  # one engine
    python -m scripts.bench.scaling --engines 16     # one trainer host sends to each

Nothing is measured here. `COSTS` are what one core of an Intel Xeon with AMX took in an earlier
tree, with two ranks of a live vLLM for the fixed costs. There one rank decoded a part for all of
its host; now the HTTP process decompresses it, and every rank expands the gap streams. So `receive`
and `stage` are not those of this tree. `gap8_ulp`, parts of 64 MiB before compression; a trainer
host of 96 cores that encodes with eight threads; engines of eight ranks on one host, with 48 cores
and six threads for each rank.

columns, in seconds of all parts, as if the stage ran alone:
  GB          sent to one engine
  diff        compare all elements and digest the changed ones, on all cores of the trainer
  tensors     the sender's own code for each tensor, in one thread
  encode, send, receive, stage, commit, refresh
              as the rooms of a sync; send has a thread for each engine
  link, least at 10 and 100 Gbit/s
              the slowest stage, the link's included, then commit and refresh: no sync is faster
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Final

from delta_sender.encode.part_builder import most_bytes
from scripts import command_line
from scripts.bench import frame

# By element, tensor (`param`) and byte: nanoseconds of one core. By part and sync: seconds.
COSTS: Final = SimpleNamespace(
    diff_ns=0.396,
    change_ns=13.7,
    encode_ns=6.51,
    refresh_ns=4.75,
    sender_param_ns=3.01e4,
    send_ns=0.539,
    send_part_s=0.00187,
    receive_ns=0.735,
    receive_part_s=0.00326,
    decode_ns=6.27,
    stage_own_ns=13.7,
    stage_other_ns=2.24,
    rank_param_ns=1.44e4,
    rank_part_s=0.00174,
    commit_ns=0.338 + 5.96 + 0.194,
    commit_param_ns=6.7e3,
    sync_s=0.0452,
    value_bytes=0.231,
)
_DENSITIES: Final = (0.006, 0.02, 0.03)
_GBIT: Final = (10, 100)
_BUCKET_BYTES: Final = 64 << 20
_ELEMENT_BYTES: Final = 3  # gap and value before compression
_TRAINER_CORES, _ENCODERS = 96, 8
_RANKS, _ENGINE_CORES, _RANK_THREADS = 8, 48, 6


@dataclass(frozen=True)
class Model:
    """A model: its elements and checkpoint tensors."""

    name: str
    numel: float
    tensors: int


# Tensors as in Qwen3 30B-A3B and 235B-A22B (an expert is three tensors), and Kimi K2.
MODELS: Final = (
    Model("30B", 30.5e9, 18_867),
    Model("235B", 235e9, 36_945),
    Model("1T", 1.03e12, 69_900),
)


def gap_bytes(density: float) -> float:
    """Return the entropy, in bytes, of the gap between elements that change independently."""
    rest = 1 - density
    return (-math.log2(density) - rest / density * math.log2(rest)) / 8


def parts_of(nnz: float) -> int:
    """Return how many parts a sync of some changed elements has."""
    parts = 0
    while nnz > 0:
        nnz -= most_bytes(_BUCKET_BYTES, parts) // _ELEMENT_BYTES
        parts += 1
    return parts


def wire_bytes(model: Model, density: float) -> float:
    """Return the bytes that one engine gets: gaps at their entropy, and values as measured."""
    return float(model.numel * density * (gap_bytes(density) + COSTS.value_bytes))


def stages(model: Model, density: float) -> dict[str, float]:
    """Return the seconds of each stage, of all parts."""
    nnz, nbytes = model.numel * density, wire_bytes(model, density)
    parts, own = parts_of(nnz), nnz / _RANKS
    work = nnz * COSTS.decode_ns / _RANKS  # a part was decoded once on a host
    work += own * COSTS.stage_own_ns + (nnz - own) * COSTS.stage_other_ns
    work = work * 1e-9 + parts * COSTS.rank_part_s
    turns = model.tensors * COSTS.rank_param_ns * 1e-9
    return {
        "diff": (model.numel * COSTS.diff_ns + nnz * COSTS.change_ns) * 1e-9 / _TRAINER_CORES,
        "tensors": model.tensors * COSTS.sender_param_ns * 1e-9,
        "encode": nnz * COSTS.encode_ns * 1e-9 / _ENCODERS,
        "send": nbytes * COSTS.send_ns * 1e-9 + parts * COSTS.send_part_s,
        "receive": nbytes * COSTS.receive_ns * 1e-9 + parts * COSTS.receive_part_s,
        "stage": max(_RANKS * (work + turns) / _ENGINE_CORES, work / _RANK_THREADS, turns),
        "commit": COSTS.sync_s
        + own * COSTS.commit_ns * 1e-9 / _RANK_THREADS
        + model.tensors * COSTS.commit_param_ns * 1e-9,
        "refresh": nnz * COSTS.refresh_ns * 1e-9 / _TRAINER_CORES,
    }


def least(model: Model, density: float, gbit: float, engines: int) -> tuple[float, str]:
    """Return the least seconds of a sync over links of some Gbit/s, and its slowest stage."""
    times = stages(model, density)
    after = times.pop("commit") + times.pop("refresh")
    times["link"] = wire_bytes(model, density) * engines * 8 / (gbit * 1e9)
    bound = max(times, key=lambda name: times[name])
    return times[bound] + after, bound


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return the exit status."""
    parser: argparse.ArgumentParser = command_line.make_parser("scripts.bench.scaling", __doc__)
    parser.add_argument(
        "--engines", type=command_line.at_least(1), metavar="N", default=1, help="(%(default)s)"
    )
    engines = parser.parse_args(arguments).engines
    names = list(stages(MODELS[0], _DENSITIES[0]))
    links = [f"{gbit} Gbit/s" for gbit in _GBIT]
    rows = []
    for model in MODELS:
        for density in _DENSITIES:
            found = [least(model, density, gbit, engines) for gbit in _GBIT]
            rows.append(
                (
                    model.name,
                    f"{density:.1%}",
                    f"{wire_bytes(model, density) / 1e9:.2f}",
                    *(f"{seconds:.2f}" for seconds in stages(model, density).values()),
                    *(f"{seconds:.2f} {bound}" for seconds, bound in found),
                )
            )
    frame.show(f"{engines} engine(s)", ("model", "changed", "GB", *names, *links), rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
