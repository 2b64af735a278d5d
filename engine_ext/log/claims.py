"""Keep the writers of a log in an object store apart.

The newest claim is the turn to write. A claim is the object of the next number, which can be
created once: so one of two senders gets it, and the other one is out. A sender that opens a log
takes the next claim, after which the sender before it gets no more. The version that this one had
begun is settled by ``DONE``, which can be created once, too: by this one, and the version is in the
log, or by the new sender, as refused.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable
from typing import Final

import msgspec

from engine_ext.log.catalog import DONE, Done, folder_name
from engine_ext.log.objects import Objects
from engine_ext.structs import prepare

_CLAIMS: Final = "claims"
_MAX_CLAIM_BYTES: Final = 1 << 12


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a claim."""

    writer: str  # unique
    version: int | None  # that is written; None when the log was opened
    refuses: bool = False  # the version is in the log, and is marked: no engine took it


prepare(Claim)


class Claims:
    """The turn to write a log in a store, until another one is made; see `engine_ext.log.store`.

    Args:
        objects: the log's.
        refuse: marks a version's folder, given its name.

    Raises:
        BlockingIOError: another sender opened the log at the same moment.
        OSError: the store cannot be written, or lets two writers create one object.
    """

    def __init__(self, objects: Objects, refuse: Callable[[str], None]) -> None:
        self._objects, self._refuse, self._id = objects, refuse, uuid.uuid4().hex
        objects.require_creates()
        before = self._turns()
        self._turn = before[-1] if before else 0
        self._take(None)
        for turn in before:
            self._settle(turn)
        objects.delete(_name(turn) for turn in before)

    def claim(self, version: int, *, refuses: bool = False) -> None:
        """Take the next claim, for a version.

        Whoever takes over later settles that version, so what this sender begins is never lost half
        written.
        """
        turns = self._turns()
        newest = turns[-1] if turns else 0
        if newest > self._turn and self._is_own(newest):  # no answer came when it was taken
            self._turn = newest
        # Who has lost the turn leaves no claim, which the next sender would settle.
        if newest != self._turn:
            raise self._conflict()
        self._take(version, refuses=refuses)
        self._objects.delete(_name(turn) for turn in turns)

    def close(self) -> None:
        """Nothing is held: another sender takes the next claim whenever it opens the log."""

    def _turns(self) -> list[int]:
        names = (found.name.partition("/")[2] for found in self._objects.list(_CLAIMS))
        return sorted(int(name) for name in names if name.isdecimal())

    def _take(self, version: int | None, *, refuses: bool = False) -> None:
        turn = self._turn + 1
        content = msgspec.json.encode(Claim(writer=self._id, version=version, refuses=refuses))
        try:
            self._objects.create(_name(turn), content)
        except FileExistsError:
            raise self._conflict() from None
        # Past claims are deleted, and then could be created again: none must be newer than this.
        if self._turns()[-1:] != [turn]:
            self._objects.delete([_name(turn)])
            raise self._conflict()
        self._turn = turn

    def _conflict(self) -> BlockingIOError:
        return BlockingIOError(f"another sender writes into the log {self._objects.url}")

    def _is_own(self, turn: int) -> bool:
        claim = self._read(turn)
        return claim is not None and claim.writer == self._id

    def _read(self, turn: int) -> Claim | None:
        """Return a claim; None if its writer has taken the next one since it was listed."""
        try:
            text = self._objects.read(_name(turn), _MAX_CLAIM_BYTES)
        except FileNotFoundError:
            return None
        return msgspec.json.decode(text, type=Claim)

    def _settle(self, turn: int) -> None:
        """Refuse the version that was claimed, unless it is in the log and was to stay there."""
        claim = self._read(turn)
        if claim is None or claim.version is None:
            return
        folder = folder_name(claim.version)
        if claim.refuses:
            self._refuse(folder)
            return
        # A version that was folded has been published, and might have been deleted since.
        if any(found.name.startswith(f"{folder}_from_") for found in self._objects.list()):
            return
        refused = Done(version=claim.version, base_version=None, files={}, refused=True)
        with contextlib.suppress(FileExistsError):
            self._objects.create(f"{folder}/{DONE}", msgspec.json.encode(refused))


def _name(turn: int) -> str:
    return f"{_CLAIMS}/{turn:020d}"
