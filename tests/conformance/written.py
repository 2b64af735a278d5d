"""A program: what every sync of the suite changes in the memory of every toy model.

`python -m tests.conformance.written FILE` writes it as JSON; `scripts.freeze.writes` compares it
with that of another tree.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine_ext.conformance import memory
from engine_ext.conformance.cases import CASES
from engine_ext.conformance.receivers import Project
from engine_ext.conformance.sending import Refused
from engine_ext.conformance.subject import Rank
from engine_ext.conformance.syncs import Setup, Sync, checkpoints, deltas_of
from engine_ext.conformance.toy_models import ToyModel
from scripts.freeze.recording import Memory, changes, memory_of

# `gap8_ulp` carries differences, and intake unwraps `deltas_zstd`: live models record both.
ENCODINGS = ("deltas", "indices", "gap8_exp")


def written(setup: Setup, sync: Sync, project: Project) -> Any:
    """Return the changes of a sync by rank and name, or the error that refuses it."""
    base, target = checkpoints(setup, sync)
    models = [cls() for cls in setup]
    ranks = [_starting(model, base) for model in models]
    try:
        project.serve(ranks)
    except Exception as error:
        return f"not served: {type(error).__name__}"
    before = [_memory(model) for model in models]
    refused = None
    try:
        project.apply(deltas_of(sync, base, target))
    except Refused as error:
        refused = f"refused: {str(error).partition(':')[0]}"
    found = {
        f"rank{rank}:{name}": row
        for rank, model in enumerate(models)
        for name, row in changes(before[rank], _memory(model)).items()
    }
    return found if refused is None else {"refused": refused, **found}


def _starting(model: ToyModel, base: dict[str, torch.Tensor]) -> Rank:
    @torch.no_grad()
    def load() -> None:
        model.load_weights((name, tensor.clone()) for name, tensor in base.items())

    @torch.no_grad()
    def process() -> None:
        model.after_loading()

    return Rank(model, {name: tensor.clone() for name, tensor in base.items()}, load, process)


def _memory(model: ToyModel) -> Memory:
    return memory_of(memory.tensors(model))


def record(cases: Sequence[Any] = CASES) -> dict[str, Any]:
    """Return the written elements, by case, models, sync, and way of sending it."""
    found: dict[str, Any] = {}
    for case in cases:
        for setup, sync in case.runs():
            models = "+".join(cls.__name__ for cls in setup)
            # Not every sync has to come in every encoding.
            encodings = ENCODINGS if sync.name in ("sparse 40 %", "dense") else ENCODINGS[:1]
            for encoding in encodings:
                key = f"{case.name}/{models}/{sync.name}/{encoding}"
                found[key] = written(setup, sync, Project("scatter", encoding))
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(record()))
