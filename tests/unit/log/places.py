"""Where the tests of a delta log keep it: a folder, a store in memory, a real store."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
from obstore.store import MemoryStore

from engine_ext.format import (
    DecodedPart,
    FrameReader,
    Limits,
    ParamDelta,
    decode_part,
    encode_part,
)
from engine_ext.log import DeltaLog, Entry, FolderStore, Objects, ObjectStore, verify_version


def part(version: int, base: int | None = None, **metadata: Any) -> bytes:
    """Return a part that sets two elements, or all; one of them to the version."""
    delta = ParamDelta(
        "w", "bfloat16", (9,), np.array([1, 7], np.int64), np.array([version, 2], np.uint16)
    )
    if metadata.get("full"):
        delta = ParamDelta("w", "bfloat16", (9,), None, np.full(9, version, np.uint16))
    metadata.setdefault("encoding", "deltas_zstd")
    return encode_part([delta], current_version=version, base_version=base, **metadata)


def write(log: DeltaLog, version: int, *parts: bytes) -> Path:
    """Write a version as a sender does that opens the log for it; return its entry's folder."""
    with log.writer() as writer:
        draft = writer.begin(version)
        for body in parts or (part(version, version - 1),):
            draft.add(body)
        return draft.finish()


def folders(log: Path) -> list[str]:
    """Return what a log in a folder has in it, but for its lock."""
    return sorted(path.name for path in log.iterdir() if path.name != ".lock")


def versions(log: DeltaLog) -> list[tuple[int | None, int]]:
    """Return base and version of what a reader sees."""
    return [(entry.base_version, entry.version) for entry in log.listing().entries]


def decoded(entry: Entry) -> list[DecodedPart]:
    """Return the parts of a version, which is verified, from its files on this host."""
    verify_version(entry)
    found = []
    for path in entry.paths:
        frame = FrameReader(Limits().max_part_bytes)
        container = b"".join(frame.feed(path.read_bytes()))
        frame.finish()
        found.append(decode_part(container))
    return found


def no_sleep(seconds: float) -> None:
    """Repeats follow at once."""


class Place(Protocol):
    """One log, its readers and writers, and its files past all of them."""

    takes_over: bool  # whether a second writer takes the turn, or is refused

    def open(self) -> DeltaLog:
        """Return an object of its own for the log."""
        ...

    def part_name(self, number: int, sync_id: str) -> str:
        """Return the name that a part has."""
        ...

    def names(self) -> list[str]:
        """Return the names of all files of versions, those that are being written included."""
        ...

    def read(self, name: str) -> bytes:
        """Return a file's bytes."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Write a file."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file."""
        ...


class FolderPlace:
    """A log in a folder."""

    takes_over = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def open(self) -> DeltaLog:
        return DeltaLog(FolderStore(self.folder))

    def part_name(self, number: int, sync_id: str) -> str:
        return f"rank0_flush{number:03d}.safetensors"

    def names(self) -> list[str]:
        paths = (p for p in self.folder.rglob("*") if p.is_file() and p.name != ".lock")
        return sorted(path.relative_to(self.folder).as_posix() for path in paths)

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def put(self, name: str, data: bytes) -> None:
        (self.folder / name).parent.mkdir(exist_ok=True)
        (self.folder / name).write_bytes(data)

    def remove(self, name: str) -> None:
        (self.folder / name).unlink()


class ObjectsPlace:
    """A log in an object store."""

    takes_over = True

    def __init__(self, url: str, scratch: Path, memory: MemoryStore | None = None) -> None:
        self._url, self._scratch, self._memory = url, str(scratch), memory
        self.objects = Objects(url, store=memory, sleep=no_sleep)

    def open(self) -> DeltaLog:
        objects = Objects(self._url, store=self._memory, sleep=no_sleep)
        return DeltaLog(ObjectStore(objects, scratch=self._scratch))

    def part_name(self, number: int, sync_id: str) -> str:
        return f"{sync_id}_flush{number:04d}.safetensors"

    def names(self) -> list[str]:
        found = [one.name for one in self.objects.list()]
        return [name for name in found if not name.startswith("claims/")]

    def read(self, name: str) -> bytes:
        return self.objects.read(name, 1 << 30)

    def put(self, name: str, data: bytes) -> None:
        self.objects.put(name, data)

    def remove(self, name: str) -> None:
        self.objects.delete([name])
