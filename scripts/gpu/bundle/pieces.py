"""Pack a folder into pieces that travel, and unpack them side by side.

Only the standard library: the host that unpacks has nothing else yet. A piece is a part of a
tar file that is compressed with xz: ``NAME.tar.xz.00``, ``NAME.tar.xz.01``, ...
"""

from __future__ import annotations

import itertools
import lzma
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any, Final

MOST_BYTES: Final = 90_000_000  # of a piece
_LARGE: Final = 8 << 20  # a file of this size is a piece of its own
_THREADS: Final = 8
_PRESET: Final = 9


def pack(folder: Path, pieces: Path, *, threads: int, most: int = MOST_BYTES) -> list[Path]:
    """Pack all files of a folder; return the pieces, in order. Earlier pieces there are removed."""
    pieces.mkdir(parents=True, exist_ok=True)
    for old in pieces.glob("*.tar.xz.*"):
        old.unlink()
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    large = [path for path in files if path.stat().st_size >= _LARGE]
    small = [path for path in files if path.stat().st_size < _LARGE]
    groups = [("files", small), *((f"{n:02}-{path.stem}", [path]) for n, path in enumerate(large))]

    def one(group: tuple[str, Sequence[Path]]) -> list[Path]:
        name, members = group
        whole = pieces / f"{name}.tar.xz"
        with lzma.open(whole, "wb", preset=_PRESET) as file, tarfile.open(None, "w|", file) as tar:
            for path in members:
                tar.add(path, path.relative_to(folder), recursive=False)
        return _cut(whole, most)

    with ThreadPoolExecutor(threads) as pool:
        return sorted(itertools.chain.from_iterable(pool.map(one, groups)))


def unpack(pieces: Path, folder: Path) -> int:
    """Unpack all pieces into a folder; return how many tar files there were.

    Raises:
        FileNotFoundError: there are no pieces.
        lzma.LZMAError, tarfile.TarError, EOFError: a piece is damaged or missing.
    """
    found = sorted(pieces.glob("*.tar.xz.*"))
    if not found:
        raise FileNotFoundError(f"no pieces of a bundle in {pieces}")
    groups = [[*own] for _, own in itertools.groupby(found, lambda path: path.stem)]
    folder.mkdir(parents=True, exist_ok=True)

    def one(group: Sequence[Path]) -> None:
        joined = BufferedReader(_Joined(group), 1 << 20)
        with lzma.open(joined) as file, tarfile.open(None, "r|", file) as tar:
            for member in tar:
                checked = tarfile.data_filter(member, str(folder))
                # Another thread can make the same folder, which `tarfile` takes for an error.
                (folder / checked.name).parent.mkdir(parents=True, exist_ok=True)
                tar.extract(checked, folder, filter="data")

    with ThreadPoolExecutor(_THREADS) as pool:
        [*pool.map(one, groups)]
    return len(groups)


def _cut(whole: Path, most: int) -> list[Path]:
    found = []
    with whole.open("rb") as file:
        for number in itertools.count():
            data = file.read(most)
            if not data and number:
                break
            found.append(whole.with_name(f"{whole.name}.{number:02}"))
            found[-1].write_bytes(data)
    whole.unlink()
    return found


class _Joined(RawIOBase):
    """Some files, read as one."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._chunks = self._read(paths)
        self._left = memoryview(b"")

    @staticmethod
    def _read(paths: Iterable[Path]) -> Iterator[bytes]:
        for path in paths:
            with path.open("rb") as file:
                while chunk := file.read(1 << 20):
                    yield chunk

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._left:
            self._left = memoryview(next(self._chunks, b""))
        size = min(len(buffer), len(self._left))
        buffer[:size] = self._left[:size]
        self._left = self._left[size:]
        return size
