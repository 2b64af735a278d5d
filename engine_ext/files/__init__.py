"""Files of checkpoints, and files that survive a crash.

`durable_files` writes, and locks; `checkpoint_files` reads.

Imports: nothing of `engine_ext`.
"""

from engine_ext.files.checkpoint_files import (
    INDEX,
    checkpoint_entries,
    read_checkpoint,
    read_entries,
)
from engine_ext.files.durable_files import (
    FileLock,
    hash_of_rest,
    is_full,
    sync_folder,
    write_file,
)

__all__ = [
    "INDEX",
    "FileLock",
    "checkpoint_entries",
    "hash_of_rest",
    "is_full",
    "read_checkpoint",
    "read_entries",
    "sync_folder",
    "write_file",
]
