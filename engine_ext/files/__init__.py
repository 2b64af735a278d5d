"""Files of checkpoints, files that survive a crash, and the files next to a part in the spool.

`durable_files` writes, and locks; `checkpoint_files` reads; `part_paths` names.

Imports: nothing of `engine_ext`.
"""

from engine_ext.files.checkpoint_files import (
    INDEX,
    checkpoint_entries,
    read_checkpoint,
    read_entries,
)
from engine_ext.files.durable_files import FileLock, sync_folder, write_file
from engine_ext.files.part_paths import (
    decoded_path,
    lock_path,
    remove_beside,
    staging_pipe,
    unfinished_path,
)

__all__ = [
    "INDEX",
    "FileLock",
    "checkpoint_entries",
    "decoded_path",
    "lock_path",
    "read_checkpoint",
    "read_entries",
    "remove_beside",
    "staging_pipe",
    "sync_folder",
    "unfinished_path",
    "write_file",
]
