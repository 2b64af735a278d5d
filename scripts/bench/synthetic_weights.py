"""The data of the benchmarks: weights, the changes of a step, and the entropy of these changes.

The weights are bfloat16 or float16, N(0, 0.02). Each changes with the same probability, up or down,
by one unit in the last place (89 %), two (5 %), or 2 + k, k >= 1, with probability 2**-k (6 %). The
seed is fixed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from delta_sender.diff.compare import Comparisons
from engine_ext.format import ParamDelta
from engine_ext.kernels import gather_scatter

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
DENSITIES = (0.001, 0.006, 0.02, 0.03, 0.1)
SIGMA = 0.02
PARAM = 1 << 24  # elements of one param
Bits = NDArray[np.uint16]
# Of the random Qwen3 that live engines serve in benchmarks: 12.6 million parameters per layer.
QWEN3_SIZES = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}


def params(weights: Bits) -> Iterator[slice]:
    """Split the weights into params of `PARAM` elements."""
    return (slice(start, start + PARAM) for start in range(0, weights.size, PARAM))


def make_weights(elements: int, rng: np.random.Generator, dtype: str = "bfloat16") -> Bits:
    """Draw weights; return the bit patterns [elements] of one of `DTYPES`."""
    weights = np.empty(elements, np.uint16)
    for param in params(weights):
        normal = rng.standard_normal(weights[param].size, np.float32) * np.float32(SIGMA)
        bits = torch.from_numpy(normal).to(DTYPES[dtype]).view(torch.int16)
        weights[param] = bits.numpy().view(np.uint16)
    return weights


def change(weights: Bits, density: float, rng: np.random.Generator) -> Bits:
    """Return a copy of the weights with this share of them changed."""
    changed = weights.copy()
    for param in params(weights):
        chosen = np.flatnonzero(rng.random(weights[param].size, np.float32) < density)
        kind = rng.random(chosen.size)
        large = 2 + rng.geometric(0.5, kind.size)
        steps = np.where(kind < 0.94, np.where(kind < 0.89, 1, 2), large)
        steps = np.where(rng.random(kind.size) < 0.5, steps, -steps)
        changed[param][chosen] += steps.astype(np.int16).view(np.uint16)
    return changed


def deltas_of(old: Bits, new: Bits, threads: int, dtype: str = "bfloat16") -> list[ParamDelta]:
    """Compare two copies of the weights as a sender does."""
    with ThreadPoolExecutor(threads) as pool:
        comparisons = Comparisons(pool, streams=True)
        begun = [
            comparisons.begin(
                gather_scatter.signed(old[param]), gather_scatter.signed(new[param]), None
            )
            for param in params(old)
        ]
        found = [wait() for wait in begun]
    names = (f"model.layers.{number}.weight" for number in range(len(found)))
    return [
        ParamDelta(name, dtype, (new[param].size,), one.indices, one.new, stream=one.stream)
        for name, param, one in zip(names, params(old), found, strict=True)
    ]


def as_differences(deltas: Sequence[ParamDelta], old: Bits) -> list[ParamDelta]:
    """Return the same deltas with differences, new minus old bit patterns, as values."""
    return [
        replace(delta, values=delta.values - old[param][delta.indices], differences=True)
        for delta, param in zip(deltas, params(old), strict=True)
    ]


def entropy(counts: NDArray[Any]) -> float:
    """Return the entropy, in bits per symbol, of symbols with these frequencies."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def counts_of(bits: Bits) -> NDArray[Any]:
    """Count each bit pattern; int64 [65536]."""
    return sum(
        (np.bincount(bits[param], minlength=1 << 16) for param in params(bits)),
        np.zeros(1 << 16, np.int64),
    )


def floors(
    values: Sequence[ParamDelta], differences: Sequence[ParamDelta], model: NDArray[Any] | None
) -> dict[bool, float]:
    """Return the least possible bytes per changed element, by whether differences are sent.

    Args:
        values, differences: the same changes in both forms.
        model: frequency of each pattern in the whole model, if the values are drawn from it and the
            density is the same everywhere; None takes the values' own frequencies and each tensor's
            own density.
    """
    nnz = sum(delta.nnz for delta in values)
    if model is not None:
        numel = sum(delta.numel for delta in values)
        positions = entropy(np.array([nnz, numel - nnz])) * numel / nnz
    else:
        own = ([delta.nnz, delta.numel - delta.nnz] for delta in values)
        positions = sum(entropy(np.array(counts)) * sum(counts) for counts in own) / nnz
        model = sum((counts_of(delta.values) for delta in values), np.zeros(1 << 16, np.int64))
    steps = sum((counts_of(d.values) for d in differences), np.zeros(1 << 16, np.int64))
    return {False: (positions + entropy(model)) / 8, True: (positions + entropy(steps)) / 8}


def positions_by_exponent(pairs: Sequence[tuple[Bits, Bits]]) -> tuple[float, float]:
    """Return the entropy, in bits, of a changed element's position.

    Args:
        pairs: each tensor's bfloat16 patterns before and after.

    Returns:
        With each tensor's density alone; and with the density among the elements of the same
        exponent, which a receiver knows because it holds the old weights.
    """
    plain = known = nnz = 0.0
    for old, new in pairs:
        exponents, changed = old >> 7 & 255, old != new
        changes = np.bincount(exponents[changed], minlength=256)
        kept = np.bincount(exponents[~changed], minlength=256)
        nnz += changes.sum()
        plain += entropy(np.array([changes.sum(), kept.sum()])) * old.size
        present = np.stack([changes, kept], 1)[changes + kept > 0]
        known += sum(entropy(counts) * counts.sum() for counts in present)
    return plain / nnz, known / nnz
