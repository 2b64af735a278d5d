"""The delta log: every version as files in a folder, so that an engine can replay it.

`catalog` lists versions and finds a route between two of them, `writer` writes one durably, `fold`
makes one delta of several, `values` turns differences into values on the way.

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
from engine_ext.delta_log.values import CannotFold
from engine_ext.delta_log.writer import Draft, LogWriter, discard

__all__ = [
    "CannotFold",
    "Draft",
    "Entry",
    "Listing",
    "LogWriter",
    "digests_of",
    "discard",
    "fold_versions",
    "list_log",
    "read_version",
    "removable",
    "route",
    "verify_version",
    "version_of",
    "why_not_newer",
]
