"""Blank the device code in a shared library that one kind of GPU never loads.

An engine's libraries hold the same kernels for ten architectures, in "fat binaries" that are not
compressed well. Zeros are: a library of 300 MB becomes one of 14.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

_SECTION: Final = ".nv_fatbin"
_MAGIC: Final = 0xBA55ED50
_ALIGNMENT: Final = 8
_PTX: Final = 1
_MACHINE_CODE: Final = 2


class Kernels(NamedTuple):
    """One entry of a fat binary.

    Attributes:
        kind: PTX or machine code.
        arch: of the GPU, such as 90.
        start, size: of its bytes, in the file.
    """

    kind: int
    arch: int
    start: int
    size: int


def blank(library: Path, arch: int) -> int:
    """Overwrite by zeros what GPUs of an architecture do not load; return how many bytes.

    A fat binary without machine code for it keeps the newest PTX that can be compiled for it. A
    library without device code is left as it is.
    """
    data = bytearray(library.read_bytes())
    blanked = 0
    for entries in _fat_binaries(bytes(data)):
        own = [one for one in entries if (one.kind, one.arch) == (_MACHINE_CODE, arch)]
        usable = [one for one in entries if one.kind == _PTX and one.arch <= arch]
        kept = own or sorted(usable, key=lambda one: one.arch)[-1:]
        for one in entries:
            if one not in kept:
                data[one.start : one.start + one.size] = bytes(one.size)
                blanked += one.size
    if blanked:
        library.write_bytes(data)
    return blanked


def _fat_binaries(data: bytes) -> Iterator[list[Kernels]]:
    """Yield the entries of each fat binary in an ELF file of 64 bits."""
    at, end = _section(data)
    while at + 16 <= end:
        magic, _, header, size = struct.unpack_from("<IHHQ", data, at)
        if magic != _MAGIC:
            at += _ALIGNMENT
            continue
        stop = at + header + size
        yield [*_entries(data, at + header, stop)]
        at = stop


def _entries(data: bytes, at: int, stop: int) -> Iterator[Kernels]:
    while at < stop:
        kind, _, header, size = struct.unpack_from("<HHIQ", data, at)
        [arch] = struct.unpack_from("<I", data, at + 28)
        yield Kernels(kind, arch, at + header, size)
        at += header + size


def _section(data: bytes) -> tuple[int, int]:
    """Return where the section of fat binaries starts and ends; an empty range if there is none."""
    if not data.startswith(b"\x7fELF\x02"):
        return 0, 0
    [headers] = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    found = [struct.unpack_from("<IIQQQQ", data, headers + n * size) for n in range(count)]
    texts = found[names][4] if found else 0
    for name, _, _, _, offset, length in found:
        start = texts + name
        if data[start : data.index(b"\0", start)].decode() == _SECTION:
            return offset, offset + length
    return 0, 0
