"""Check what users give to the senders, before anything is read or sent."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import httpx
import torch
from torch import nn

from delta_sender.diff.refills import Stable
from delta_sender.diff.snapshot import NamedTensors
from engine_ext.files import read_checkpoint
from engine_ext.store_urls import is_store_url

# Tensors as (name, tensor), or by name.
Tensors = NamedTensors | Mapping[str, torch.Tensor]
# Tensors, or the folder of a checkpoint.
Base = Tensors | str | os.PathLike[str]

_FOLDERS: Final = ("/", "./", "../")  # starts of paths


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


def log_location(url: str | Path) -> str | Path | None:
    """Return the folder or URL of the delta log that a sender's url names; None for an engine's.

    The scheme says which it is, not what a path looks like.

    Raises:
        ValueError: It says neither; or a ``file://`` URL names another host, or no folder.
    """
    if isinstance(url, Path):
        return url
    if not names_log(url):
        return None
    if url.startswith(_FOLDERS):
        warnings.warn(
            f"{url!r}: give the folder of a delta log as pathlib.Path, as file:///PATH, or to "
            "LogSender (delta-send --log)",
            DeprecationWarning,
            stacklevel=3,
        )
        return Path(url)
    return log_of(url)


def names_log(url: str) -> bool:
    """Return whether a sender's url names a delta log, and not an engine.

    Raises:
        ValueError: It names neither.
    """
    scheme = urlsplit(url).scheme
    if scheme in ("http", "https"):
        return False
    if scheme == "file" or is_store_url(url) or url.startswith(_FOLDERS):
        return True
    raise ValueError(
        f"{url!r} names neither an engine nor a delta log. An engine is given by the root of its "
        "server, http://host:port; a delta log as LogSender(PATH) (delta-send --log), a "
        "pathlib.Path, file:///PATH or s3://BUCKET/PREFIX"
    )


def log_of(log: str | Path) -> str | Path:
    """Return the folder of a delta log, or its URL in an object store.

    Raises:
        ValueError: It is an engine's url; or a ``file://`` URL names another host, or no folder.
    """
    if isinstance(log, Path):
        return log
    parts = urlsplit(log)
    if parts.scheme in ("http", "https"):
        raise ValueError(f"{log!r} is no delta log; DeltaSender(url, base) sends to an engine")
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise ValueError(f"{log!r} names no folder of this host; file:///PATH does")
        return Path(unquote(parts.path))
    return log if is_store_url(log) else Path(log)


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
