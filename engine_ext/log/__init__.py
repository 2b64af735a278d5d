"""The delta log: every version as files in a folder or a store, so that an engine can replay it.

`opening` opens one by its location. `interface` is what both kinds offer: `folder_log` with
`writer` in a folder, `store_log` with `store_writer` in an object store. `catalog` lists versions
and finds a route between two of them, `fold` makes one delta of several, `values` turns differences
into values on the way, `merged` adds up deltas of one tensor. `records` has what identifies a
version. `followers` has the heartbeats of the engines that follow a log, `lag` how
far they are behind it.

To list and prune a folder takes a moment, as what reads and writes parts is imported later.

Imports: `engine_ext.remote_parts`, `engine_ext.object_store`, `engine_ext.version_folders`,
`engine_ext.format`, `engine_ext.files`, `engine_ext.resources`, `engine_ext.errors`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from engine_ext.log.catalog import (
    DONE,
    Entry,
    FileFacts,
    Listing,
    list_log,
    removable,
    route,
    version_of,
    why_not_newer,
)
from engine_ext.log.folder_log import FolderLog, discard
from engine_ext.log.followers import (
    FollowerState,
    Heartbeat,
    live_heartbeats,
    read_heartbeats,
    remove_heartbeat,
    write_heartbeat,
)
from engine_ext.log.interface import CannotFold, DeltaLog, Draft, Writer
from engine_ext.log.lag import Lag, follower_lags
from engine_ext.log.opening import open_log

if TYPE_CHECKING:
    from engine_ext.log.fold import digests_of, fold_versions, read_version, verify_version
    from engine_ext.log.records import (
        listed_record,
        read_digests,
        read_identities,
        read_record,
    )
    from engine_ext.log.store_fetch import fetch_object, read_done
    from engine_ext.log.store_log import StoreLog
    from engine_ext.log.store_writer import StoreWriter
    from engine_ext.log.writer import LogWriter

# What imports torch and all of `engine_ext.format`, by module.
_LATER: Final = {
    "fold": ("digests_of", "fold_versions", "read_version", "verify_version"),
    "records": ("listed_record", "read_digests", "read_identities", "read_record"),
    "store_fetch": ("fetch_object", "read_done"),
    "store_log": ("StoreLog",),
    "store_writer": ("StoreWriter",),
    "writer": ("LogWriter",),
}

__all__ = [
    "DONE",
    "CannotFold",
    "DeltaLog",
    "Draft",
    "Entry",
    "FileFacts",
    "FolderLog",
    "FollowerState",
    "Heartbeat",
    "Lag",
    "Listing",
    "LogWriter",
    "StoreLog",
    "StoreWriter",
    "Writer",
    "digests_of",
    "discard",
    "fetch_object",
    "fold_versions",
    "follower_lags",
    "list_log",
    "listed_record",
    "live_heartbeats",
    "open_log",
    "read_digests",
    "read_done",
    "read_heartbeats",
    "read_identities",
    "read_record",
    "read_version",
    "removable",
    "remove_heartbeat",
    "route",
    "verify_version",
    "version_of",
    "why_not_newer",
    "write_heartbeat",
]


def __getattr__(name: str) -> Any:
    for module, names in _LATER.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
