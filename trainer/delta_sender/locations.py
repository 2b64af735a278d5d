"""Addresses of engines and of delta logs, as users give them."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from engine_ext.store_urls import is_store_url

_FOLDERS: Final = ("/", "./", "../")  # starts of paths


def engine_root(url: str) -> str:
    """Return the root of an engine's server, without a slash at its end.

    Raises:
        ValueError: It is not ``http://host:port`` or ``https://host:port``, maybe with a path that
            a proxy takes away.
    """
    import httpx

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
