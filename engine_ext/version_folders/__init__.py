"""Read the folders that slime (since v0.3.1), vime and miles publish a version in; sans-I/O.

``docs/wire-format.md`` has the format. `parse_index` reads the index, `parse_file` the header of
one file, `find_change` the change of one tensor.

Imports: `engine_ext.wire`, and the ground floor.
"""

from engine_ext.version_folders.changes import find_change
from engine_ext.version_folders.files import FileTensor, header_bytes, parse_file
from engine_ext.version_folders.index import INDEX, LENGTH_BYTES, VersionIndex, parse_index

__all__ = [
    "INDEX",
    "LENGTH_BYTES",
    "FileTensor",
    "VersionIndex",
    "find_change",
    "header_bytes",
    "parse_file",
    "parse_index",
]
