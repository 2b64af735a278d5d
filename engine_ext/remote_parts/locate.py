"""Find the file of a part on this host."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

from engine_ext.errors import ChecksumMismatch, PartUnavailable
from engine_ext.ranks.operations import PartSource
from engine_ext.remote_parts.cache import PartCache
from engine_ext.settings import Settings

Locate = Callable[[str, PartSource | None], str]


def locator(settings: Settings, *, several_hosts: bool) -> Locate | None:
    """Return what finds parts on this rank's host; None if the engine has one host.

    Args:
        several_hosts: whether ranks can be on other hosts than the server's process.

    Raises:
        PermissionError, OSError: see `PartCache`.
    """
    if not several_hosts:
        return None
    return functools.partial(locate_part, PartCache(settings.cache_dir, settings.cache_bytes))


def locate_part(cache: PartCache, path: str, source: PartSource | None) -> str:
    """Return the file that holds a part, to be mapped at once: in the spool, or in the cache.

    Args:
        cache: of this rank's host.
        path: the part in the spool, on the host of the server's process.
        source: where other hosts get it; None if there are none.

    Raises:
        PartUnavailable: it cannot be fetched, or other bytes come.
        SpoolFull: the cache has no room.
        OSError: the cache cannot be written.
    """
    if source is None or _is_the_servers(path, source):
        return path
    # Needs packages that an engine on one host can do without.
    from engine_ext.remote_parts.fetch import fetch_part

    fetch = functools.partial(fetch_part, source)
    try:
        return str(cache.get(source.content, source.size, fetch, delivery=source.url))
    except ChecksumMismatch as error:  # intake has verified what the sender sent
        why = f"a part changed on its way here, from {source.url}; send it again"
        raise PartUnavailable(why) from error


def _is_the_servers(path: str, source: PartSource) -> bool:
    """Return whether this host has the server's own file at a path, and not one of its own."""
    try:
        found = os.stat(path)
    except OSError:
        return False
    expected = (source.size, source.inode, source.modified_ns)
    return (found.st_size, found.st_ino, found.st_mtime_ns) == expected
