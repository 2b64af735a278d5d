"""Paths of the files next to a part in the spool while the ranks of the host stage it.

All of them are named after the part, are private as it is, and are removed with it. The name of a
part's file is never used again, although its memory can be (`delta_server.spool_files`).
"""

from __future__ import annotations

import os
from pathlib import Path


def decoded_path(part: str | os.PathLike[str]) -> Path:
    """Return where the rank that decodes a part leaves the result for the others."""
    return Path(f"{os.fspath(part)}.decoded")


def unfinished_path(part: str | os.PathLike[str]) -> Path:
    """Return where that rank writes the result, before `decoded_path` names it."""
    return Path(f"{os.fspath(part)}.decoding")


def lock_path(part: str | os.PathLike[str]) -> Path:
    """Return the file that a rank locks while it decodes a part."""
    return Path(f"{os.fspath(part)}.lock")


def staging_pipe(part: str | os.PathLike[str]) -> Path:
    """Return the named pipe that a rank holds open for writing while it stages a part."""
    return Path(f"{os.fspath(part)}.staging")


def remove_beside(part: str | os.PathLike[str]) -> None:
    """Remove the files next to a part, after the part.

    In this order, a rank that finds the part gone removes its own files.
    """
    for named in (decoded_path, unfinished_path, lock_path, staging_pipe):
        named(part).unlink(missing_ok=True)
