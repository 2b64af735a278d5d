"""Read the folders that slime (since v0.3.1), vime and miles publish a version in.

``docs/wire-format.md`` has the format. `read_version_folder` reads the index (`index`), `read_file`
the header of one file (`files`), `find_change` the change of one tensor (`changes`).

Imports: `engine_ext.format`, and the ground floor.
"""

from engine_ext.files import INDEX
from engine_ext.version_folders.changes import check_change, find_change
from engine_ext.version_folders.files import FileTensor
from engine_ext.version_folders.folder import (
    SINGLE,
    Version,
    check_version,
    read_file,
    read_header,
    read_tensor,
    read_version_folder,
)
from engine_ext.version_folders.index import VersionIndex, parse_index

__all__ = [
    "INDEX",
    "SINGLE",
    "FileTensor",
    "Version",
    "VersionIndex",
    "check_change",
    "check_version",
    "find_change",
    "parse_index",
    "read_file",
    "read_header",
    "read_tensor",
    "read_version_folder",
]
