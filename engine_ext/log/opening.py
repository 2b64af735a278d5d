"""Open a delta log by its location: a folder, or a URL of an object store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from engine_ext.log.folder_log import FolderLog
from engine_ext.log.interface import DeltaLog
from engine_ext.object_store import STREAMS, ObjectStore, is_store_url, store_url

if TYPE_CHECKING:
    from engine_ext.remote_parts import PartCache
    from engine_ext.resources import RateLimit


def open_log(
    location: str | Path,
    *,
    cache: PartCache | None = None,
    scratch: str | None = None,
    streams: int = STREAMS,
    limit: RateLimit | None = None,
) -> DeltaLog:
    """Return the log in a folder, or below the URL of an object store.

    Args:
        cache: keeps what is fetched from a store, for all engines of this host.
        scratch: folder for what is fetched from a store without a cache; the temporary folder if
            None.
        streams: requests at once for one object of a store.
        limit: of the bytes that are fetched from a store.

    Raises:
        ValueError: it is a URL that is not valid.
        OSError: the configuration of the store's client is not valid.
    """
    if not is_store_url(location):
        return FolderLog(Path(location))
    from engine_ext.log.store_log import StoreLog

    store = ObjectStore(store_url(str(location)), streams=streams, limit=limit)
    return StoreLog(store, cache, scratch)
