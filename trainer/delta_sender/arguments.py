"""Check what users give to the senders, before anything is read or sent."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from delta_sender.diff.refills import Stable
from delta_sender.diff.snapshot import NamedTensors
from engine_ext.files import read_checkpoint

# Tensors as (name, tensor), or by name.
Tensors = NamedTensors | Mapping[str, torch.Tensor]
# Tensors, or the folder of a checkpoint.
Base = Tensors | str | os.PathLike[str]


def check_urls(urls: Any) -> None:
    """Check the type of several urls.

    Raises:
        TypeError: They are no collection of strings.
    """
    if isinstance(urls, (str, bytes)) or not isinstance(urls, Iterable):
        raise TypeError("the urls of several engines are a list; DeltaSender takes one url")
    for url in urls:
        if not isinstance(url, str):
            raise TypeError(f"an engine's url is a string, and not {_kind(url)}")


def named_pairs(tensors: Any) -> NamedTensors:
    """Return tensors as (name, tensor) pairs; those of a dict are its items.

    A collection is checked now, an iterator while it is read.

    Raises:
        TypeError: It is something else.
    """
    if isinstance(tensors, Mapping):
        tensors = list(tensors.items()) if isinstance(tensors, dict) else tensors.items()
    if isinstance(tensors, nn.Module):
        raise TypeError(
            "a model is given as named_tensors(model, base), which has the checkpoint's names"
        )
    if isinstance(tensors, (str, bytes)) or not isinstance(tensors, Iterable):
        raise TypeError(f"tensors are given as (name, tensor) pairs, not as {_kind(tensors)}")
    if isinstance(tensors, Stable):  # one of this package's, which the snapshot knows
        return tensors
    if not isinstance(tensors, Collection):
        return _checked(tensors)
    if isinstance(tensors, (list, tuple, type({}.items()))):
        for _ in _checked(tensors):
            pass
    return tensors


def tensors_of(base: Base) -> NamedTensors:
    """Return the tensors of a base.

    Raises:
        TypeError: It is something else.
        FileNotFoundError, ValueError: The folder cannot be read.
    """
    if isinstance(base, (str, os.PathLike)):
        return read_checkpoint(base)
    return named_pairs(base)


def _checked(tensors: Iterable[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for pair in tensors:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
            raise TypeError(f"tensors are given as (name, tensor) pairs, not as {_kind(pair)}")
        name, tensor = pair
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: a torch.Tensor is needed, and not {_kind(tensor)}")
        yield name, tensor


def _kind(given: object) -> str:
    module = type(given).__module__
    prefix = "" if module == "builtins" else f"{module}."
    return f"a {prefix}{type(given).__qualname__}"
