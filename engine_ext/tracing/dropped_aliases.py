"""Find names of tied tensors that the loader takes and drops.

A trainer may send a tied tensor under both of its names (Megatron's pipeline stages each hold a
copy), while the checkpoint holds it under one. What is sent under the other name may be skipped
only if the engine would not have used it, whatever its values: its own loader shows that.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import torch

from engine_ext.model import StorageIndex
from engine_ext.placement import Placement, TensorSpec
from engine_ext.tracing.trace import LoadWeights, drops

# The head's name in nearly all checkpoints, whatever the engine calls it.
_HEAD = "lm_head.weight"
_MOST = 8  # each is traced with the whole checkpoint


def dropped_aliases(
    model: torch.nn.Module, load_weights: LoadWeights, placement: Placement, index: StorageIndex
) -> dict[str, TensorSpec]:
    """Return the other names of tied tensors that the loader drops, with the tensor's spec.

    Args:
        placement: traced with the same model and loader.
        index: of the model.

    Raises:
        TracingError: see `engine_ext.tracing.trace.rehearse`.
    """
    writers: dict[str, set[str]] = defaultdict(set)
    for name, placed in placement.items():
        for segment in placed.segments:
            writers[segment.live.name].add(name)
    candidates: dict[str, TensorSpec] = {}
    for entry in index.entries:
        written_by = writers.get(entry.name, set())
        if entry.aliases and len(written_by) == 1:
            tied = placement[next(iter(written_by))].spec
            for name in (entry.name, *entry.aliases, _HEAD):
                if name not in placement:
                    candidates.setdefault(name, replace(tied, name=name))
    if len(candidates) > _MOST:
        return {}
    return {
        name: spec
        for name, spec in candidates.items()
        if drops(model, load_weights, spec, placement, index)
    }
