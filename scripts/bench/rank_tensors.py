"""Time a rank's work for a sync of many tensors: decode, stage and commit.

    python -m scripts.bench.rank_tensors               # as many as a 30B mixture of experts has
    python -m scripts.bench.rank_tensors --json        # the last line is JSON

The rank is a module in this process that holds half of each tensor: two of three by rows, one by
columns. One element in fifty changes, at least one. Everything runs in one thread, as far as it
does on a rank with one core. Times are the fastest of --repeats syncs.

columns:
  elements       of a tensor
  decode, stage, commit
                 microseconds for each tensor; the commit is what generation is paused for
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from engine_ext.format import ENCODINGS, ParamDelta, decode_part, encode_part
from engine_ext.resources import no_full_collections
from scripts import command_line
from scripts.bench.scaling.measure_rank import Rank
from scripts.bench.tensor_sizes import make_parser, tensors_of

SIZES: Final = (1 << 19, 1 << 14, 1 << 9)
_EVERY: Final = 50
_COLUMNS: Final = 32


def measure(
    elements: int, tensors: int, parts: int, encoding: str, repeats: int
) -> dict[str, float]:
    """Return seconds of decoding, staging and committing a sync of some tensors of one size."""
    generator = np.random.default_rng(0)
    shape = elements // _COLUMNS, _COLUMNS
    bits = generator.integers(0, 1 << 14, (tensors, *shape), np.int16)
    names = [f"model.layers.{number}.weight" for number in range(tensors)]
    weights = {
        name: torch.from_numpy(own).view(torch.bfloat16)
        for name, own in zip(names, bits, strict=True)
    }
    places = np.arange(_EVERY // 2, elements, _EVERY)
    differs = encoding == "gap8_ulp"
    deltas = []
    for name, own in zip(names, bits, strict=True):
        old = own.reshape(-1)[places].view(np.uint16)
        values = (old ^ 1) - old if differs else old ^ 1
        deltas.append(ParamDelta(name, "bfloat16", shape, places, values, differences=differs))
    bodies = [
        encode_part(deltas[part::parts], encoding=encoding, current_version=1, digest_part="0" * 32)
        for part in range(parts)
    ]
    rank = Rank.of(weights, 2)
    applier = rank.applier
    found: dict[str, float] = {}
    for _ in range(repeats):
        rank.load(weights)
        with no_full_collections():  # as in a receiver
            times = [time.perf_counter()]
            decoded = [decode_part(body) for body in bodies]
            times.append(time.perf_counter())
            staged = [applier.stage(part) for part in decoded]
            times.append(time.perf_counter())
            applier.check_sync(staged, full=False)
            applier.check_base(staged)
            applier.brief(staged)
            applier.write(staged)
            applier.finish(staged)
            times.append(time.perf_counter())
        for step, took in zip(("decode", "stage", "commit"), np.diff(times).tolist(), strict=True):
            found[step] = min(found.get(step, took), took)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = make_parser("scripts.bench.rank_tensors", __doc__)
    add, positive = parser.add_argument, command_line.at_least(1)
    add("--parts", type=positive, metavar="N", default=28, help="of a sync (default: %(default)s)")
    add("--encoding", choices=sorted(ENCODINGS), default="gap8_ulp", help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    table = Table("elements", "tensors", "decode", "stage", "commit", box=box.MARKDOWN)
    found = []
    for size in SIZES:
        tensors = tensors_of(size, options)
        times = measure(size, tensors, options.parts, options.encoding, options.repeats)
        each = {step: seconds / tensors * 1e6 for step, seconds in times.items()}
        found.append({"elements": size, "tensors": tensors, **each})
        table.add_row(f"{size:,}", f"{tensors:,}", *(f"{us:,.1f}" for us in each.values()))
    Console(width=100).print(table)
    if options.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
