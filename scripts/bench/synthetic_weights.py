"""The data of the benchmarks: weights, how a step changes them, and the least bytes of that.

The weights are bfloat16 or float16, N(0, 0.02). Each changes with the same probability, by one unit
in the last place (89 %), two (5 %) or 2 + k with probability 2**-k, up or down; the seed is fixed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from delta_sender.diff_host import begin_compare
from engine_ext.wire import ParamDelta

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
DENSITIES = (0.001, 0.006, 0.02, 0.03, 0.1)
SIGMA = 0.02
PARAM = 1 << 24  # elements of one param
Bits = NDArray[np.uint16]


def params(weights: Bits) -> Iterator[slice]:
    """Where the params lie in the weights."""
    return (slice(start, start + PARAM) for start in range(0, weights.size, PARAM))


def make_weights(elements: int, rng: np.random.Generator, dtype: str = "bfloat16") -> Bits:
    """Bit patterns [elements] of one of `DTYPES`."""
    weights = np.empty(elements, np.uint16)
    for where in params(weights):
        normal = rng.standard_normal(weights[where].size, np.float32) * np.float32(SIGMA)
        bits = torch.from_numpy(normal).to(DTYPES[dtype]).view(torch.int16)
        weights[where] = bits.numpy().view(np.uint16)
    return weights


def change(weights: Bits, density: float, rng: np.random.Generator) -> Bits:
    """A copy of the weights with some changed."""
    changed = weights.copy()
    for where in params(weights):
        chosen = np.flatnonzero(rng.random(weights[where].size, np.float32) < density)
        kind = rng.random(chosen.size)
        steps = np.where(
            kind < 0.94, np.where(kind < 0.89, 1, 2), 2 + rng.geometric(0.5, kind.size)
        )
        steps = np.where(rng.random(kind.size) < 0.5, steps, -steps)
        changed[where][chosen] += steps.astype(np.int16).view(np.uint16)
    return changed


def deltas_of(old: Bits, new: Bits, threads: int, dtype: str = "bfloat16") -> list[ParamDelta]:
    """What a sender finds in two snapshots."""
    with ThreadPoolExecutor(threads) as pool:
        begun = [
            begin_compare(old[where], new[where], None, pool, streams=True) for where in params(old)
        ]
        found = [wait() for wait in begun]
    return [
        ParamDelta(
            f"model.layers.{number}.weight",
            dtype,
            (new[where].size,),
            one.indices,
            one.new,
            stream=one.stream,
        )
        for number, (where, one) in enumerate(zip(params(old), found, strict=True))
    ]


def as_differences(deltas: Sequence[ParamDelta], old: Bits) -> list[ParamDelta]:
    """The same deltas with new less old patterns."""
    return [
        replace(delta, values=delta.values - old[where][delta.indices], differences=True)
        for delta, where in zip(deltas, params(old), strict=True)
    ]


def entropy(counts: NDArray[Any]) -> float:
    """Bits per symbol of symbols that come so often."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def counts_of(bits: Bits) -> NDArray[Any]:
    """How often each pattern comes."""
    return sum(
        (np.bincount(bits[where], minlength=1 << 16) for where in params(bits)),
        np.zeros(1 << 16, np.int64),
    )


def floors(
    values: Sequence[ParamDelta], differences: Sequence[ParamDelta], model: NDArray[Any] | None
) -> dict[bool, float]:
    """Least bytes per changed element; the key says whether values travel as differences.

    Args:
        values, differences: the same changes.
        model: how often each pattern comes in the whole model, where the values are drawn from it
            and positions with one density everywhere; None: the values' own counts, and each
            tensor's own density.
    """
    nnz = sum(delta.nnz for delta in values)
    if model is not None:
        numel = sum(delta.numel for delta in values)
        positions = entropy(np.array([nnz, numel - nnz])) * numel / nnz
    else:
        own = ([delta.nnz, delta.numel - delta.nnz] for delta in values)
        positions = sum(entropy(np.array(counts)) * sum(counts) for counts in own) / nnz
        model = sum((counts_of(delta.values) for delta in values), np.zeros(1 << 16, np.int64))
    moved = sum((counts_of(d.values) for d in differences), np.zeros(1 << 16, np.int64))
    return {
        False: (positions + entropy(model)) / 8,
        True: (positions + entropy(moved)) / 8,
    }


def positions_by_exponent(pairs: Sequence[tuple[Bits, Bits]]) -> tuple[float, float]:
    """Bits of one changed element's position: by each tensor's density, and by that of the elements
    with the same exponent, which who holds the old weights may know.

    Args:
        pairs: the bfloat16 patterns of each tensor before and after.
    """
    plain = known = nnz = 0.0
    for old, new in pairs:
        exponents, changed = old >> 7 & 255, old != new
        moved = np.bincount(exponents[changed], minlength=256)
        kept = np.bincount(exponents[~changed], minlength=256)
        nnz += moved.sum()
        plain += entropy(np.array([moved.sum(), kept.sum()])) * old.size
        present = np.stack([moved, kept], 1)[moved + kept > 0]
        known += sum(entropy(counts) * counts.sum() for counts in present)
    return plain / nnz, known / nnz
