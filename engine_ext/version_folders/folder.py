"""Read the folder of one version: its index, and the bytes of its files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import BinaryIO, Final

from engine_ext.errors import MalformedPart
from engine_ext.files import INDEX
from engine_ext.format import Limits
from engine_ext.version_folders.files import FileTensor, header_bytes, parse_file
from engine_ext.version_folders.index import LENGTH_BYTES, VersionIndex, parse_index

SINGLE: Final = "model.safetensors"  # a checkpoint of one file has no index

_SUFFIX: Final = ".safetensors"
_READ_BYTES: Final = 1 << 30
_FOLDER: Final = re.compile(r"weight_v([0-9]{1,19})")

Open = Callable[[str], AbstractContextManager[BinaryIO]]


@dataclass(frozen=True, slots=True)
class Version:
    """One version: its index, and where it leads to and starts from.

    Attributes:
        version: None if neither the index nor the folder's name has it.
        base_version: None if the folder is a plain checkpoint.
    """

    index: VersionIndex
    version: int | None
    base_version: int | None


def read_version_folder(
    folder: str, names: Collection[str], open_file: Open, limits: Limits
) -> Version:
    """Read and check the index of a version's folder, which is written last.

    Args:
        folder: its name.
        names: of what is in it.
        open_file: opens a file in it, unbuffered.

    Raises:
        MalformedPart: there is no index, it is damaged, the folder has other files than it names,
            or is of another version.
        TooLarge: see `parse_index`.
    """
    files = {name for name in names if name.endswith(_SUFFIX)}
    if INDEX in names:
        with open_file(INDEX) as file:
            index = parse_index(_read(file, 0, limits.max_header_bytes + 1, short=True), limits)
    elif files == {SINGLE}:
        with open_file(SINGLE) as file:
            index = VersionIndex.of_checkpoint(SINGLE, read_header(file, limits))
    else:
        raise MalformedPart(f"{folder} has no {INDEX}: it was not published completely")
    return check_version(folder, files, index)


def check_version(folder: str, names: Collection[str], index: VersionIndex) -> Version:
    """Return the version of a folder with this index; MalformedPart if they disagree."""
    files = {name for name in names if name.endswith(_SUFFIX)}
    if not index.full and files != index.files.keys():
        odd = sorted(files ^ index.files.keys())
        raise MalformedPart(
            f"the files in {folder} are not those that its index names: {odd[:8]}", files=odd
        )
    match = _FOLDER.fullmatch(folder)
    named = int(match[1]) if match else None
    if None not in (named, index.version) and named != index.version:
        raise MalformedPart(f"the index in {folder} is of version {index.version}")
    version = named if index.version is None else index.version
    return Version(index, version, index.base_version)


def read_header(file: BinaryIO, limits: Limits) -> bytes:
    """Return the header of a safetensors file, with its length field.

    Raises:
        MalformedPart, TooLarge: see `header_bytes`.
    """
    return _read(file, 0, header_bytes(_read(file, 0, LENGTH_BYTES, short=True), limits))


def read_file(file: BinaryIO, index: VersionIndex, name: str, limits: Limits) -> list[FileTensor]:
    """Return the tensors of one file; see `engine_ext.version_folders.files.parse_file`."""
    header, size = read_header(file, limits), os.fstat(file.fileno()).st_size
    return parse_file(header, size, index, name, limits)


def read_tensor(file: BinaryIO, tensor: FileTensor) -> bytes:
    """Return the bytes of one tensor; MalformedPart if the file ends before."""
    return _read(file, tensor.begin, tensor.end)


def _read(file: BinaryIO, begin: int, end: int, *, short: bool = False) -> bytes:
    """Return some bytes of a file, which can end earlier only if `short`."""
    pieces = list[bytes]()
    at = begin
    while at < end and (piece := os.pread(file.fileno(), min(end - at, _READ_BYTES), at)):
        pieces.append(piece)
        at += len(piece)
    if at < end and not short:
        raise MalformedPart(f"the file ends after {at} bytes of {end}")
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
