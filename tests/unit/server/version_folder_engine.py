"""The endpoints over two ranks of a toy model, which take folders of versions by disk requests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import torch

from engine_ext.conformance.toy_models import Checkpoint, ToyModel, parameter
from tests.support.delta_bodies import VERSION
from tests.support.endpoint_rig import Rig
from tests.support.folder_writer import write_version
from tests.support.served_models import (
    Served,
    base_checkpoint,
    load,
    memory,
    serve_ranks,
    target_checkpoint,
)

NEXT = VERSION + 1
COLUMNS, ROWS, NORM, WIDE, EIGHT = "columns", "rows", "norm", "wide", "eight"


class Rank(ToyModel):
    """One of two ranks: shards of two tensors, copies of the others, one of them widened."""

    shapes: ClassVar = {COLUMNS: (3, 8), ROWS: (6, 4), NORM: (5,), WIDE: (4,), EIGHT: (2, 8)}
    dtypes: ClassVar = {ROWS: torch.float32, EIGHT: torch.float8_e4m3fn}
    rank = 0

    def build(self) -> None:
        self.columns = parameter(3, 4)
        self.rows = parameter(3, 4, dtype=torch.float32)
        self.norm, self.wide = parameter(5), parameter(4, dtype=torch.float32)
        self.eight = parameter(2, 4, dtype=torch.float8_e4m3fn)

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        dim = {COLUMNS: 1, ROWS: 0, EIGHT: 1}.get(name)
        if dim is not None:
            size = weight.shape[dim] // 2
            weight = weight.narrow(dim, self.rank * size, size)
        getattr(self, name).copy_(weight)


class Second(Rank):
    dtypes: ClassVar = Rank.dtypes
    rank = 1


MODELS = (Rank, Second)


class Engine:
    """The endpoints, over two ranks of a model, and the folder that they can read."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.root.mkdir()
        self.base = base_checkpoint(Rank)
        self.target = target_checkpoint(self.base, Rank.shapes)
        self.rig = Rig(folder / "spool", roots=(os.path.realpath(self.root),))
        self.served: list[Served] = serve_ranks(MODELS, self.base, apply="scatter")
        for receiver, served in zip(self.rig.engine.receivers, self.served, strict=True):
            receiver.adopt(served.applier)
        self.fresh = [memory(load(model, self.base)) for model in MODELS]

    def memories(self) -> list[dict[str, bytes]]:
        return [memory(served.model) for served in self.served]

    def ask(self, folder: Path, **keys: Any) -> Any:
        return self.rig.disk(folder, **keys)

    def assert_at(self, response: Any, tensors: Checkpoint, version: int = NEXT) -> None:
        """The sync was committed, and every rank is one that has loaded these tensors."""
        assert response.status_code == 200, response.text
        assert (response.json()["status"], response.json()["version"]) == ("committed", version)
        assert self.memories() == [memory(load(model, tensors)) for model in MODELS]
        assert self.rig.engine.weight_version == str(version)
        assert self.rig.spooled() == []
        scan = self.rig.get("/delta_digest", params={"scan": "true"}).json()
        assert scan["corrupted"] == []

    def assert_unchanged(self) -> None:
        """Nothing was written."""
        assert self.memories() == self.fresh
        status = self.rig.status()
        assert (status.version.number, status.staged) == (VERSION, None)
        assert (self.rig.engine.paused, self.rig.spooled()) == (False, [])

    def assert_untouched(self) -> None:
        """Nothing was written, and the next correct folder is accepted."""
        self.assert_unchanged()
        folder = write_version(self.root / "correct", NEXT, self.base, self.target)
        self.assert_at(self.ask(folder), self.target)


FILE = "model-00001-of-00001.safetensors"  # of a folder with one
