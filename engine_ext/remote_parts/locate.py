"""Find the file of a part on this host."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

from engine_ext.ranks.operations import PartSource
from engine_ext.remote_parts.cache import PartCache
from engine_ext.settings import Settings

Locate = Callable[[str, PartSource | None], str]


def locator(settings: Settings, *, several_hosts: bool) -> Locate | None:
    """Return a locator of parts on this rank's host; None if the engine has one host.

    Args:
        several_hosts: whether ranks can be on other hosts than the server's process.

    Raises:
        PermissionError, OSError: see `PartCache`.
    """
    if not several_hosts:
        return None
    return PartLocator(PartCache(settings.cache_dir, settings.cache_bytes)).locate


class PartLocator:
    """Finds parts for one rank: in the spool if that is on its host, else in the host's cache."""

    def __init__(self, cache: PartCache) -> None:
        self._cache = cache

    def locate(self, path: str, source: PartSource | None) -> str:
        """Return the file that holds a part, to be mapped at once.

        Args:
            path: the part in the spool, on the host of the server's process.
            source: where other hosts get it; None if there are none.

        Raises:
            DeltaError: it cannot be fetched, see `PartCache.get` and `fetch_part`.
            OSError: the cache cannot be written.
        """
        if source is None or _is_the_servers(path, source):
            return path
        # Needs packages that an engine on one host can do without.
        from engine_ext.remote_parts.fetch import fetch_part

        fetch = functools.partial(fetch_part, source)
        return str(self._cache.get(source.content, source.size, fetch, delivery=source.url))


def _is_the_servers(path: str, source: PartSource) -> bool:
    """Return whether this host has the server's own file at a path, and not one of its own."""
    try:
        found = os.stat(path)
    except OSError:
        return False
    expected = (source.size, source.inode, source.modified_ns)
    return (found.st_size, found.st_ino, found.st_mtime_ns) == expected
