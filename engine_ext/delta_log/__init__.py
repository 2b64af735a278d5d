"""The delta log: every version as files in a folder, so that an engine can replay it.

`catalog` lists versions and finds a route between two of them, `writer` writes one durably, `fold`
makes one delta of several, `values` turns differences into values on the way. `followers` has the
heartbeats of the engines that follow a log, `lag` how far they are behind it.

Imports: `engine_ext.version_folders`, `engine_ext.wire`, `engine_ext.durable_files`,
`engine_ext.checkpoint_files`, `engine_ext.errors`.
"""

from engine_ext.delta_log.catalog import (
    Entry,
    Listing,
    list_log,
    removable,
    route,
    version_of,
    why_not_newer,
)
from engine_ext.delta_log.fold import (
    digests_of,
    fold_versions,
    read_version,
    verify_version,
)
from engine_ext.delta_log.followers import (
    FollowerState,
    Heartbeat,
    live_heartbeats,
    read_heartbeats,
    remove_heartbeat,
    write_heartbeat,
)
from engine_ext.delta_log.lag import Lag, follower_lags
from engine_ext.delta_log.values import CannotFold
from engine_ext.delta_log.writer import Draft, LogWriter, discard

__all__ = [
    "CannotFold",
    "Draft",
    "Entry",
    "FollowerState",
    "Heartbeat",
    "Lag",
    "Listing",
    "LogWriter",
    "digests_of",
    "discard",
    "fold_versions",
    "follower_lags",
    "list_log",
    "live_heartbeats",
    "read_heartbeats",
    "read_version",
    "removable",
    "remove_heartbeat",
    "route",
    "verify_version",
    "version_of",
    "why_not_newer",
    "write_heartbeat",
]
