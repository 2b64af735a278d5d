"""The delta log: every version as files in a folder or an object store, so that engines replay it.

| file | what it has |
| --- | --- |
| `delta_log` | the log: list, fetch, write, delete; `open_log` opens one by its location |
| `store` | the port below it: `folder_store`, `object_store`, `peer_store` (another engine's log) |
| `objects` | the client of object stores; `claims` keeps the writers of a log in one apart |
| `catalog` | what ``DONE`` says, and the routes from one version to another |
| `writer` | a version that is being written |
| `records` | what identifies a version by its content |
| `publication` | what the sender says about a version: signed, and kept when it is pruned |
| `fold` | one delta of several versions; `merged`, `spilled` and `values` add them up |
| `shared_parts` | the parts that an engine hands on to others |
| `heartbeats` | the engines that follow a log, and how far they are behind |
| `groups` | those that take its versions together |

To list and prune a folder takes a moment, as what reads and writes parts is imported later.

Imports: `engine_ext.remote_parts`, `engine_ext.version_folders`, `engine_ext.format`,
`engine_ext.store_urls`, `engine_ext.files`, `engine_ext.resources`, `engine_ext.errors`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from engine_ext.log.catalog import (
    DONE,
    MAX_DONE_BYTES,
    CannotFold,
    Done,
    Entry,
    FileFacts,
    Listing,
    folder_name,
    parse_done,
    removable,
    route,
    version_of,
    why_not_newer,
)
from engine_ext.log.delta_log import DeltaLog, open_log
from engine_ext.log.folder_store import FolderStore, open_part
from engine_ext.log.groups import (
    HOLDER_PREFIX,
    GroupMarks,
    complete_versions,
    content_key,
    has_prepared,
    next_target,
    version_of_key,
)
from engine_ext.log.heartbeats import FOLDER as FOLLOWERS
from engine_ext.log.heartbeats import (
    FollowerState,
    Heartbeat,
    Lag,
    follower_lags,
    live_heartbeats,
    read_heartbeats,
    remove_heartbeat,
    write_heartbeat,
)
from engine_ext.log.objects import ObjectFacts, Objects
from engine_ext.log.publication import (
    done_of,
    is_signed,
    keep_publications,
    read_publications,
)

if TYPE_CHECKING:
    from engine_ext.log.fold import fold_versions, read_manifests, verify_version
    from engine_ext.log.object_store import ObjectStore, fetch_object
    from engine_ext.log.peer_store import PeerStore
    from engine_ext.log.records import (
        declared_digests,
        listed_record,
        read_digests,
        read_identities,
        read_record,
    )
    from engine_ext.log.shared_parts import SharedParts
    from engine_ext.log.writer import Draft, LogWriter

# What imports torch and all of `engine_ext.format`, by module.
_LATER: Final = {
    "fold": ("fold_versions", "read_manifests", "verify_version"),
    "object_store": ("ObjectStore", "fetch_object"),
    "records": (
        "declared_digests",
        "listed_record",
        "read_digests",
        "read_identities",
        "read_record",
    ),
    "peer_store": ("PeerStore",),
    "shared_parts": ("SharedParts",),
    "writer": ("Draft", "LogWriter"),
}

__all__ = [
    "DONE",
    "FOLLOWERS",
    "HOLDER_PREFIX",
    "MAX_DONE_BYTES",
    "CannotFold",
    "DeltaLog",
    "Done",
    "Draft",
    "Entry",
    "FileFacts",
    "FolderStore",
    "FollowerState",
    "GroupMarks",
    "Heartbeat",
    "Lag",
    "Listing",
    "LogWriter",
    "ObjectFacts",
    "ObjectStore",
    "Objects",
    "PeerStore",
    "SharedParts",
    "complete_versions",
    "content_key",
    "declared_digests",
    "done_of",
    "fetch_object",
    "fold_versions",
    "folder_name",
    "follower_lags",
    "has_prepared",
    "is_signed",
    "keep_publications",
    "listed_record",
    "live_heartbeats",
    "next_target",
    "open_log",
    "open_part",
    "parse_done",
    "read_digests",
    "read_heartbeats",
    "read_identities",
    "read_manifests",
    "read_publications",
    "read_record",
    "removable",
    "remove_heartbeat",
    "route",
    "verify_version",
    "version_of",
    "version_of_key",
    "why_not_newer",
    "write_heartbeat",
]


def __getattr__(name: str) -> Any:
    for module, names in _LATER.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
