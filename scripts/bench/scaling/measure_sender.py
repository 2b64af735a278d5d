"""Measure the sender's costs: compare, encode, refresh."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from delta_sender.diff.host import compare
from delta_sender.diff.loop import Difference
from engine_ext.format import ParamDelta, change_digest, encode_part, tensor_digest
from engine_ext.kernels import gather_scatter
from engine_ext.resources import usable_cores
from scripts.bench import synthetic_weights
from scripts.bench.scaling.encodings import ENCODINGS, gap_bytes
from scripts.bench.scaling.timing import ColdCaches, fastest
from scripts.bench.sender import simulated_sender
from scripts.bench.synthetic_weights import Bits

SMALL = 512  # elements of a small tensor
SMALLS = 18_867  # as a 30B mixture of experts has: the more, the more Python collects garbage
_NAME = "model.layers.0.weight"


def measure(old: Bits, new: Bits, repeats: int) -> dict[str, Any]:
    """Return the fields of `Constants` that concern the sender alone, without encoding.

    One tensor of all elements: costs of a tensor by itself are measured on small ones.
    """
    cold, cores = ColdCaches(), usable_cores()
    changed = [compare(old[p], new[p], _NAME, streams=True) for p in synthetic_weights.params(old)]
    nnz = sum(one.indices.size for one in changed)
    found: dict[str, Any] = {}

    def all_params(one: Bits, other: Bits) -> list[Difference]:
        # As in a sync, all are kept, as new memory costs page faults; and all cores are busy,
        # which makes each of them slower.
        return [
            compare(one[param], other[param], _NAME, cores, streams=True)
            for param in synthetic_weights.params(one)
        ]

    same = old.copy()
    wide = [one.indices.astype(np.int64) for one in changed]
    times = fastest(
        {
            "diff": lambda: all_params(old, same),
            "change": lambda: all_params(old, new),
            "digest": lambda: [
                change_digest(_NAME, indices, one.old, one.new)
                for indices, one in zip(wide, changed, strict=True)
            ],
            "whole": lambda: tensor_digest(_NAME, old),
        },
        repeats,
        cold,
    )
    found["diff_ns"] = times["diff"] / old.size * 1e9
    found["change_ns"] = (times["change"] - times["diff"]) / nnz * 1e9
    found["digest_ns"] = times["digest"] / nnz * 1e9
    found["snapshot_digest_ns"] = times["whole"] / old.size * 1e9
    live = same
    refresh = fastest({"refresh": lambda: _refresh(live, changed)}, repeats, cold)
    found["refresh_ns"] = refresh["refresh"] / nnz * 1e9
    kept = sum(_kept(one) for one in changed)
    found["change_bytes"] = kept / nnz
    found["sender_param_ns"] = _small_tensors(repeats)
    return found


def deltas_of(changed: Sequence[Difference], encoding: str) -> list[ParamDelta]:
    """Return what a sender encodes of some params' differences."""
    deltas = [
        ParamDelta(
            f"model.layers.{number}.weight",
            "bfloat16",
            (synthetic_weights.PARAM,),
            one.indices,
            one.new,
            stream=one.stream,
        )
        for number, one in enumerate(changed)
    ]
    if encoding != "gap8_ulp":
        return deltas
    return [
        replace(delta, values=one.new - one.old, differences=True)
        for delta, one in zip(deltas, changed, strict=True)
    ]


def _refresh(live: Bits, changed: Sequence[Difference]) -> None:
    for param, one in zip(synthetic_weights.params(live), changed, strict=False):
        gather_scatter.write(live[param], one.indices, one.new)


def _kept(one: Difference) -> int:
    stream = 0 if one.stream is None else one.stream.nbytes
    return one.indices.nbytes + one.old.nbytes + one.new.nbytes + stream


def encoding(old: Bits, new: Bits, density: float, repeats: int) -> dict[str, Any]:
    """Return the fields of `Constants` that concern an encoding; `new` has changes.

    From differences, as a sender encodes: subtracting is included.
    """
    changed = [compare(old[p], new[p], _NAME, streams=True) for p in synthetic_weights.params(old)]
    nnz = sum(one.indices.size for one in changed)

    def encode(encoding: str) -> bytes:
        deltas = deltas_of(changed, encoding)
        return encode_part(deltas, encoding=encoding, current_version=1, digest_part="0" * 32)

    calls = {encoding: partial(encode, encoding) for encoding in ENCODINGS}
    times = fastest(calls, repeats, ColdCaches())
    sizes = {encoding: len(encode(encoding)) / nnz for encoding in ENCODINGS}
    return {
        "encode_ns": {encoding: times[encoding] / nnz * 1e9 for encoding in ENCODINGS},
        "value_bytes": {e: sizes[e] - gap_bytes(density) for e in ENCODINGS},
    }


def _small_tensors(repeats: int) -> float:
    """Return nanoseconds that a sync of small tensors with one change each takes of each."""
    tensors = {
        f"model.layers.{number}.weight": torch.zeros(SMALL, dtype=torch.bfloat16)
        for number in range(SMALLS)
    }
    times = []
    with simulated_sender(tensors, math.inf, encoding="gap8_ulp") as sender:
        for number in range(repeats + 1):  # the first one digests every tensor
            for tensor in tensors.values():
                tensor.view(torch.int16)[number % SMALL] ^= 1
            start = time.perf_counter()
            sender.sync(tensors.items())
            times.append(time.perf_counter() - start)
    return min(times[1:]) / SMALLS * 1e9
