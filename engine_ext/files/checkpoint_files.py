"""Read the tensors of a Hugging Face checkpoint folder, mapped from its safetensors files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

if TYPE_CHECKING:
    import torch


def checkpoint_entries(folder: Path) -> list[tuple[Path, str]]:
    """Return the (file, tensor name) pairs of a Hugging Face checkpoint, ordered by file.

    Raises:
        FileNotFoundError: There is no index and no tensor.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = json.loads(index.read_bytes())["weight_map"]
        return sorted((folder / file, name) for name, file in weight_map.items())
    entries = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            entries += [(path, name) for name in file.offset_keys()]
    if not entries:
        raise FileNotFoundError(f"{folder}: no {index.name} and no tensors in *.safetensors")
    return entries


def read_entries(entries: Iterable[tuple[Path, str]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor), mapped from the files and not read."""
    for path, group in groupby(entries, key=lambda entry: entry[0]):
        with safe_open(path, framework="pt") as file:
            for _, name in group:
                yield name, file.get_tensor(name)


def read_checkpoint(folder: str | os.PathLike[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the (name, tensor) pairs of a checkpoint folder, mapped from its files and not read."""
    yield from read_entries(checkpoint_entries(Path(folder)))
