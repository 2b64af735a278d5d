"""Measure how many elements change after quantisation if some weights of a bf16 trainer change.

    python -m scripts.bench.quantised_density
    python -m scripts.bench.quantised_density --rows 8192 --columns 8192 --density 0.01 --json

See scripts/bench/synthetic_weights.py for the weights and their changes, which are those of small
steps: nearly all by one unit in the last place. Each form compares the quantised matrix before and
after; see trainer/delta_sender/diff/quantize.py for the forms.

columns:
  bf16      changed weights / weights, in bfloat16
  form      how the weights are quantised
  weight    changed elements / elements of the quantised weight
  scale     changed elements / elements of the scale
  bytes     of the parts with both, over that of the changes in bfloat16
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from delta_sender import quantize_weight
from delta_sender.diff.compare import compare
from delta_sender.diff.quantize import FORMS
from engine_ext.dtypes import NAME_OF_TORCH, bits_dtype
from engine_ext.format import ENCODINGS, ParamDelta, encode_part
from scripts import command_line
from scripts.bench import frame
from scripts.bench.synthetic_weights import as_tensor, change, make_weights

DENSITIES = (0.005, 0.01, 0.02, 0.03)
Tensors = Mapping[str, torch.Tensor]


def deltas_of(old: Tensors, new: Tensors) -> list[ParamDelta]:
    """Return the changes of some tensors."""
    deltas = []
    for suffix, tensor in old.items():
        dtype = NAME_OF_TORCH[tensor.dtype]
        before, after = (
            one[suffix].contiguous().view(-1).view(torch.uint8).numpy().view(bits_dtype(dtype))
            for one in (old, new)
        )
        found = compare(before, after, streams=True)
        shape, stream = tuple(tensor.shape), found.stream
        name = f"model.layers.0.mlp.up_proj.weight{suffix}"
        deltas.append(ParamDelta(name, dtype, shape, found.indices, found.new, stream=stream))
    return deltas


def part_bytes(deltas: Sequence[ParamDelta], encoding: str) -> int:
    """Return the size of the parts, one per dtype, of those deltas that change anything."""
    some = ([delta] for delta in deltas if delta.nnz)
    return sum(len(encode_part(one, encoding=encoding, current_version=1)) for one in some)


def measure(old: torch.Tensor, new: torch.Tensor, form: str, encoding: str) -> dict[str, float]:
    """Return the figures of one form, by column."""
    before, after = (quantize_weight(weight, form) for weight in (old, new))
    deltas = deltas_of(before, after)
    weight, scale = (delta.nnz / delta.numel for delta in deltas)
    size = part_bytes(deltas, encoding)
    return {
        "bf16": (old != new).float().mean().item(),
        "weight": weight,
        "scale": scale,
        "bytes": size / part_bytes(deltas_of({"": old}, {"": new}), encoding),
    }


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = frame.make_parser("quantised_density", __doc__)
    add, positive = parser.add_argument, command_line.at_least(1)
    add("--rows", type=positive, default=4096, help="of the matrix (default: %(default)s)")
    add("--columns", type=positive, default=4096, help="of the matrix (default: %(default)s)")
    density_help = "share of the weights that change; repeatable (default: 0.5 %% to 3 %%)"
    add("--density", type=float, action="append", help=density_help)
    add("--encoding", choices=ENCODINGS, default="deltas_zstd", help="(default: %(default)s)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    options = parse_arguments(arguments)
    return frame.run(options, lambda _: run(options))


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure and print; return the rows of the table."""
    torch.set_num_threads(1)
    shape = options.rows, options.columns
    weights = make_weights(options.rows * options.columns, np.random.default_rng(0))
    old = as_tensor(weights).view(shape)
    found: list[dict[str, Any]] = []
    for number, density in enumerate(options.density or DENSITIES):
        new = as_tensor(change(weights, density, np.random.default_rng([0, number]))).view(shape)
        found += [{"form": form, **measure(old, new, form, options.encoding)} for form in FORMS]
    rows = []
    for row in found:
        shares = (f"{row[column]:.2%}" for column in ("weight", "scale"))
        rows.append([f"{row['bf16']:.2%}", row["form"], *shares, f"{row['bytes']:.2f}"])
    title = f"{options.rows} x {options.columns} weights, {options.encoding}"
    frame.show(title, ("bf16", "form", "weight", "scale", "bytes"), rows)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
