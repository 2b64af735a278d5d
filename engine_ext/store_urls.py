"""URLs of prefixes in an object store: ``s3://bucket/prefix``, ``gs://``, ``az://``."""

from __future__ import annotations

import importlib.util
import re
from typing import Final

_SCHEMES: Final = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss")
_URL: Final = re.compile(r"([a-z0-9]+)://([^/]+)((?:/[^/]+)*)/?")


def is_store_url(location: object) -> bool:
    """Return whether a location is a URL rather than a path; `store_url` says if it is valid."""
    return (
        isinstance(location, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", location) is not None
    )


def store_url(text: str) -> str:
    """Return a URL without a trailing slash.

    Raises:
        ValueError: it is no URL of a store, has credentials or a query in it, or the package that
            reads stores is missing.
    """
    match = _URL.fullmatch(text)
    if match is None or match[1] not in _SCHEMES:
        schemes = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
        shown = text.rpartition("@")[2]  # without credentials
        folder = "; a folder is its path alone" if text.startswith("file:") else ""
        raise ValueError(
            f"not the URL of an object store: {shown!r} (BUCKET/PREFIX after {schemes}{folder})"
        )
    if not text.isprintable():
        raise ValueError(f"{text!r} has characters that cannot be printed")
    names = match[3].split("/")[1:]
    if any(one in match[2] for one in "@:?#") or any(one in match[3] for one in "?#\0"):
        raise ValueError(
            "the URL of an object store has a bucket and a prefix alone; credentials and endpoints "
            "are taken from the client's environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...)"
        )
    if {".", ".."} & {*names, match[2]}:
        raise ValueError(f"{text!r} has a name that is . or ..")
    if importlib.util.find_spec("obstore") is None:
        raise ValueError(
            f"{match[1]}:// needs obstore: pip install obstore, or this package with its extra "
            "'store'"
        )
    return f"{match[1]}://{'/'.join([match[2], *names])}"


def is_within(url: str, root: str) -> bool:
    """Return whether a URL of `store_url` is another one, or below it."""
    return url == root or url.startswith(root + "/")
