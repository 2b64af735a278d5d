"""The version that an engine serves, and the last changes of it, for all of its HTTP processes.

A request that asked for a version must not be answered with tokens of another one, so each of its
tokens is compared with this, which takes no call of the ranks: it is a page of memory. Processes of
one engine share the page, whose file they find by the ranks' board.

A change is noted after every rank has written and before generation is resumed. Generation is
paused in between, so a token of the new weights is always later than the note of their version.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import tempfile
import weakref
from collections.abc import Mapping
from typing import Final

import msgspec

from delta_server.board import SERVED, Item
from delta_server.engine import Engine
from delta_server.process_identity import is_alive, new_name
from engine_ext.structs import prepare

UNKNOWN: Final = -1
"""Instead of a version: the weights are of none, or of one that had another content before."""

_CHANGES, _VERSION, _CONTENT, _WRITING, _LAST = range(5)  # 64-bit words of the page
_KEPT: Final = 128  # last changes
_NBYTES: Final = 8 * (_LAST + _KEPT)


class ServedFiles(msgspec.Struct, frozen=True):
    """Where the page is open, by the processes that have it; the value of the item `SERVED`."""

    paths: dict[str, str] = {}


prepare(ServedFiles)


class ServedVersions:
    """What one HTTP process knows of it. Only who holds the lease of the engine changes it."""

    def __init__(self) -> None:
        self._words = memoryview(bytearray(_NBYTES)).cast("q")
        self._words[_VERSION] = UNKNOWN

    async def share(self, engine: Engine, version: int, digest: str) -> None:
        """Begin with the engine's version and digest, or with what another process has noted.

        Raises:
            OSError: no page can be made, or the page of another process cannot be opened.
        """
        self.move(version, digest)
        if not engine.shared:
            return
        item, own = Item(engine, SERVED, ServedFiles), new_name()
        while True:
            known = await item.read()
            living = {name: path for name, path in known.paths.items() if is_alive(name)}
            descriptor = _opened(living)
            if descriptor is None:
                descriptor = _made(bytes(self._words))
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
            if await item.try_put(ServedFiles({**living, own: path})):
                self._words = memoryview(mmap.mmap(descriptor, _NBYTES)).cast("q")
                weakref.finalize(self, os.close, descriptor)  # others open the page by it
                return
            os.close(descriptor)  # another process was faster

    @property
    def changes(self) -> int:
        """How many changes were noted; read it before `version`."""
        return self._words[_CHANGES]

    @property
    def version(self) -> int:
        """The version of the weights, or `UNKNOWN`."""
        return self._words[_VERSION]

    def left(self, since: int, lowest: int, highest: int) -> bool:
        """Return whether the engine has had a version out of a range after `since` changes."""
        changes = self.changes
        if changes - since > _KEPT // 2:  # who writes at this moment might replace older ones
            return True
        last = (self._words[_LAST + number % _KEPT] for number in range(since, changes))
        return any(not lowest <= version <= highest for version in last)

    def begin_write(self) -> None:
        """Note that the ranks might be writing; if this process dies, the next one notices."""
        self._words[_WRITING] = 1

    def keep(self) -> None:
        """Note that the ranks have written nothing."""
        self._words[_WRITING] = 0

    def move(self, version: int, digest: str) -> None:
        """Note that the ranks have written weights of a version."""
        content = _short(digest)
        if (version, content) != (self.version, self._words[_CONTENT]):
            self._change(version, UNKNOWN if version == self.version else version, content)
        self.keep()

    def lose(self) -> None:
        """Note that the weights are of no version."""
        if self.version != UNKNOWN or self._words[_WRITING]:
            self._change(UNKNOWN, UNKNOWN, 0)
        self.keep()

    def see(self, version: int) -> None:
        """Note what the ranks hold now: a process might have died before it did."""
        self.doubt()
        if version != self.version:
            self._change(version, version, 0)

    def doubt(self) -> None:
        """Note that it is not known what the weights are, if the ranks might have written."""
        if self._words[_WRITING]:
            self.lose()

    def _change(self, version: int, noted: int, content: int) -> None:
        changes = self.changes
        self._words[_LAST + changes % _KEPT] = noted
        self._words[_CONTENT], self._words[_VERSION] = content, version
        self._words[_CHANGES] = changes + 1


def _opened(paths: Mapping[str, str]) -> int | None:
    """Return a descriptor of the page that one of some processes has open; None if none lives."""
    for name, path in paths.items():
        try:
            return os.open(path, os.O_RDWR)
        except OSError:
            if is_alive(name):
                raise
    return None


def _made(content: bytes) -> int:
    """Return a descriptor of a new page; nothing but descriptors leads there."""
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(content)
        return os.dup(file.fileno())


def _short(digest: str) -> int:
    """Return 62 bits that another digest has otherwise; 0 for none."""
    return int.from_bytes(hashlib.blake2b(digest.encode(), digest_size=8).digest(), "big") >> 2 | 1
