"""Check what users give to the senders, before anything is read or sent."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import httpx
import torch
from torch import nn

from delta_sender.diff.refills import Stable

Pairs = Iterable[tuple[str, torch.Tensor]]


def engine_root(url: str) -> str:
    """Return the root of an engine's server, without a slash at its end.

    Raises:
        ValueError: It is not ``http://host:port`` or ``https://host:port``, maybe with a path that
            a proxy takes away.
    """
    wanted = "an engine is given by the root of its server, http://host:port"
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"{url!r}: {error}; {wanted}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"{url!r}: {wanted}")
    if re.search(r"/v1(/.*)?$", parsed.path):
        raise ValueError(f"{url!r}: {wanted}, without the path of the OpenAI API")
    return url.rstrip("/")


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


def named_pairs(tensors: Any) -> Pairs:
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
