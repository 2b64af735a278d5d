"""Read the tensors of a Hugging Face checkpoint folder, mapped from its safetensors files.

Errors name the file and what is wrong with it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:
    import torch

INDEX: Final = "model.safetensors.index.json"
# Files that folders hold next to the model's own: the same weights under Mistral's names, adapters.
_OTHERS: Final = ("consolidated*.safetensors", "adapter_model*.safetensors")
_LFS: Final = b"version https://git-lfs"


def checkpoint_entries(folder: Path) -> list[tuple[Path, str]]:
    """Return the (file, tensor name) pairs of a Hugging Face checkpoint, ordered by file.

    An index decides which files belong to it, as for the engines and transformers. Without one all
    safetensors files do, except for ``consolidated*`` (Mistral's names) and ``adapter_model*``,
    which are taken if there are no others.

    Raises:
        FileNotFoundError: There is no such folder, no tensor in it, or no file that the index
            names.
        ValueError: A file is damaged, or no safetensors file.
    """
    if not folder.is_dir():
        raise FileNotFoundError(_not_a_folder(folder))
    index = folder / INDEX
    if index.exists():
        entries = sorted((folder / file, name) for name, file in _weight_map(index).items())
        for path in {path for path, _ in entries}:
            if not path.exists():
                raise FileNotFoundError(f"{path}: {INDEX} names it, but it is not there")
        return entries
    entries = []
    for path in _own_files(folder):
        with _opened(path) as file:
            entries += [(path, name) for name in file.offset_keys()]
    if not entries:
        others = sorted(path.name for path in folder.glob("*.bin"))
        only = f", only {others[0]}, which is not read" if others else ""
        raise FileNotFoundError(f"{folder}: no {INDEX} and no tensors in *.safetensors{only}")
    return entries


def read_entries(entries: Iterable[tuple[Path, str]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor), mapped from the files and not read.

    Raises:
        ValueError: A file is damaged, or lacks a tensor.
    """
    for path, group in groupby(entries, key=lambda entry: entry[0]):
        with _opened(path) as file:
            for _, name in group:
                yield name, _tensor(file, path, name)


def read_checkpoint(folder: str | os.PathLike[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the (name, tensor) pairs of a checkpoint folder, mapped from its files and not read.

    Raises:
        FileNotFoundError, ValueError: See `checkpoint_entries` and `read_entries`.
    """
    yield from read_entries(checkpoint_entries(Path(folder)))


def _own_files(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.safetensors"))
    own = [path for path in found if not any(fnmatch(path.name, other) for other in _OTHERS)]
    return own or found


def _weight_map(index: Path) -> dict[str, str]:
    content = index.read_bytes()
    if content.startswith(_LFS):
        raise ValueError(_pointer(index))
    try:
        found = dict(json.loads(content)["weight_map"])
        if not all(isinstance(file, str) for file in found.values()):
            raise TypeError("the name of a file is no text")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index}: not an index of a checkpoint: {error!r}") from error
    return found


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        file = safe_open(path, framework="pt")
    except SafetensorError as error:
        with path.open("rb") as start:
            if start.read(len(_LFS)) == _LFS:
                raise ValueError(_pointer(path)) from error
        size = path.stat().st_size
        raise ValueError(
            f"{path}: no safetensors file, or not all of one ({size:,} bytes): {error}"
        ) from error
    with file:
        yield file


def _tensor(file: Any, path: Path, name: str) -> torch.Tensor:
    try:
        tensor: torch.Tensor = file.get_tensor(name)
    except SafetensorError as error:
        raise ValueError(f"{path}: {name}: {error}") from error
    return tensor


def _pointer(path: Path) -> str:
    return f"{path}: a Git LFS pointer, and not the file: run `git lfs pull`"


def _not_a_folder(folder: Path) -> str:
    if folder.exists():
        return f"{folder}: not a folder; give the folder that the file is in"
    parts = folder.parts
    if not folder.is_absolute() and len(parts) == 2 and not folder.parent.exists():
        return (
            f"{folder}: no such folder; names of a model hub are not looked up: give the folder "
            f"that huggingface_hub.snapshot_download({str(folder)!r}) returns"
        )
    return f"{folder}: no such folder"
