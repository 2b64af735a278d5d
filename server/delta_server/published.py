"""What the folders of published versions show: an empty version, or files that did not arrive.

The folder of version 12 is called ``weight_v000012``, and the others are next to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

from delta_server.disk_files import list_names
from delta_server.version_folders import read_version
from engine_ext.errors import DeltaError, PartUnavailable
from engine_ext.format import signing_key
from engine_ext.ranks.operations import Delivery
from engine_ext.version_folders import INDEX

_FOLDER: Final = re.compile(r"weight_v([0-9]{1,19})")
_SUFFIX: Final = ".safetensors"
_DONE: Final = "DONE"
_MAX_GAP: Final = 4096  # versions; each is a folder that is listed


def version_of(folder: Path) -> int | None:
    """Return the version that a folder's name has, or None."""
    match = _FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else None


def beside(folder: Path, version: int) -> Path:
    """Return the folder of another version, given one whose name has a version."""
    digits = len(folder.name) - len("weight_v")
    return folder.with_name(f"weight_v{version:0{digits}d}")


def folder_of(source: Path, version: int) -> Path:
    """Return the folder of a version, below the one that a trainer publishes in."""
    return source / f"weight_v{version:06d}"


def holds_nothing(folder: Path, roots: Sequence[str]) -> bool:
    """Return whether a version's folder shows that the version is its predecessor's.

    It does if it has an index of no tensors. A folder without files shows nothing: it might
    be one that was emptied, or that is not filled yet. Nor does an index show anything where parts
    must be signed, as it has no signature.
    """
    if signing_key() is not None:
        return False
    try:
        if INDEX not in list_names(folder, roots):
            return False
        version = read_version(folder, roots)
    except DeltaError:
        return False
    one_step = version.version is not None and version.base_version == version.version - 1
    return one_step and not version.index.files


def gap_is_empty(
    folder: Path,
    first: int,
    last: int,
    roots: Sequence[str],
    bring: Callable[[Path], object] | None = None,
) -> bool:
    """Return whether the folders next to one show that the versions of a range hold nothing.

    Args:
        bring: brings what a folder has to show to this host, if it is elsewhere.
    """
    if last - first >= _MAX_GAP:
        return False
    for version in range(first, last + 1):
        other = beside(folder, version)
        if bring is not None:
            bring(other)
        if not holds_nothing(other, roots):
            return False
    return True


def not_applied(delivery: Delivery, list_folder: Callable[[str], Collection[str]]) -> list[str]:
    """Return the files of the version's folder that have not arrived, sorted.

    They are none if nothing can show any: the folder is gone, or not known.

    Args:
        list_folder: returns the names in a folder, given as it is in the delivery.

    Raises:
        PartUnavailable: the folder is in a store that cannot be read now.
    """
    if delivery.complete or delivery.folder is None:
        return []
    try:
        names = list_folder(delivery.folder)
    except PartUnavailable:
        raise
    except DeltaError:
        return []
    return sorted({n for n in names if n.endswith(_SUFFIX)} - {*delivery.files})


def is_complete(delivery: Delivery, roots: Sequence[str]) -> bool | None:
    """Return whether all of a version has arrived; None if nothing can show it.

    A folder in a store is not asked.
    """
    if delivery.complete:
        return True
    if not_applied(delivery, lambda folder: list_names(Path(folder), roots)):
        return False
    if delivery.folder is not None and (Path(delivery.folder) / _DONE).exists():
        return True  # the folder was settled, and all of its files have arrived
    return None
