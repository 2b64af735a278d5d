"""The data of the benchmarks: weights, the changes of a step, and the entropy of these changes.

The weights are bfloat16, N(0, 0.02). Each changes with the same probability, up or down,
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

from delta_sender.diff.compare import Comparisons, Difference
from engine_ext.format import ParamDelta
from engine_ext.kernels import bits_of, gather_scatter, host_bits

DENSITIES = (0.001, 0.006, 0.02, 0.03, 0.1)
SIGMA = 0.02
PARAM = 1 << 24  # elements of one param
Bits = NDArray[np.uint16]
Tensors = dict[str, torch.Tensor]
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


def make_weights(elements: int, rng: np.random.Generator) -> Bits:
    """Draw weights; return the bit patterns [elements]."""
    weights = np.empty(elements, np.uint16)
    for param in params(weights):
        normal = rng.standard_normal(weights[param].size, np.float32) * np.float32(SIGMA)
        bits = torch.from_numpy(normal).bfloat16().view(torch.int16)
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


def as_tensor(bits: Bits) -> torch.Tensor:
    """Return weights as a trainer's tensor."""
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def change_tensors(tensors: Tensors, density: float) -> Tensors:
    """Return tensors with this share of their elements changed."""
    rng, changed = np.random.default_rng(0), {}
    for name, tensor in tensors.items():
        bits = change(host_bits(bits_of(tensor.reshape(-1))), density, rng)
        changed[name] = as_tensor(bits).view(tensor.shape)
    return changed


def compare(
    old: Bits, new: Bits, pool: ThreadPoolExecutor, *, digested: bool = False
) -> list[Difference]:
    """Compare two copies of the weights as a sender does.

    Args:
        digested: whether the changes are digested, as in a sync.
    """
    comparisons = Comparisons(pool, streams=True)
    begun = [
        comparisons.begin(
            gather_scatter.signed(old[param]),
            gather_scatter.signed(new[param]),
            f"model.layers.{number}.weight" if digested else None,
        )
        for number, param in enumerate(params(old))
    ]
    return [wait() for wait in begun]


def deltas_of(old: Bits, new: Bits, threads: int) -> list[ParamDelta]:
    """Compare two copies of the weights as a sender does."""
    with ThreadPoolExecutor(threads) as pool:
        found = compare(old, new, pool)
    names = (f"model.layers.{number}.weight" for number in range(len(found)))
    return [
        ParamDelta(name, "bfloat16", (new[param].size,), one.indices, one.new, stream=one.stream)
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
