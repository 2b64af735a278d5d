"""Which run owns an engine's weights, and which numbers each run has used; without I/O.

A run is a lineage of weights that one sender writes, see ``docs/fault-tolerance.md``. A version is
named by its run and its number. Every rank keeps one `Runs` and gets the same calls in the same
order, so that all ranks decide alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Final

import msgspec

from engine_ext.errors import RunConflict, RunFenced
from engine_ext.format import ANONYMOUS, RunSender
from engine_ext.ranks.operations import RunOwner

_MOST: Final = 256  # runs that are remembered, and as many that are fenced


@dataclass(slots=True)
class _Known:
    """The facts that are known of a run."""

    epoch: int = 0  # the latest
    released: bool = False  # by this epoch, which has not claimed since
    highest: int | None = None  # number of a version


class Runs:
    """The owner of the weights, and what is known of the runs that have been seen.

    Attributes:
        owner: whose parts alone are taken; None takes anyone's.
    """

    def __init__(self) -> None:
        self.owner: RunOwner | None = None
        self._known: dict[str, _Known] = {}  # the one used last is last
        self._fenced: dict[str, RunOwner] = {}
        self._anonymous = 0

    def check(self, sender: RunSender | None, *, takeover: bool = False) -> None:
        """Refuse a sender that must not change the weights; None is one that names no run.

        Raises:
            RunFenced: another run has taken over from its run, or a later process has opened it.
            RunConflict: another run owns the weights, and the sender does not take over.
        """
        owner = self.owner
        if sender is not None:
            self._check_not_fenced(sender)
        if owner is None or takeover:
            return
        is_run = sender is not None and sender.run == owner.run
        if sender is not None and is_run and not is_twin(sender, owner):
            return
        copied = ", which has a copy of the same state" if is_run else ""
        raise RunConflict(
            f"{describe(owner)} has owned these weights since {clock(owner.since)}; close that "
            f"trainer{copied}, or take over with takeover=True (--takeover)",
            owner=msgspec.to_builtins(owner),
        )

    def check_not_released(self, sender: RunSender) -> None:
        """Refuse a part that was on its way when its sender released the weights.

        Raises:
            RunFenced: the sender has released them, and not claimed them since.
        """
        known = self._known.get(sender.run)
        if known is None or not known.released or sender.epoch > known.epoch:
            return
        raise RunFenced(
            f"epoch {sender.epoch} of run {sender.run} has released these weights, so that its "
            "parts are not taken any more; claim them again, or end this trainer",
            owner=None if self.owner is None else msgspec.to_builtins(self.owner),
        )

    def own(self, sender: RunSender, at: float) -> None:
        """Make a sender the owner, which `check` has passed; another run is fenced."""
        before = self.owner
        known = self._touch(sender.run)
        known.epoch, known.released = sender.epoch, False
        is_same = before is not None and (before.run, before.epoch) == (sender.run, sender.epoch)
        if before is not None and is_same and not is_twin(sender, before):
            return
        self.owner = owner_of(sender, at)
        if before is not None and before.run != sender.run:
            self._fenced[before.run] = self.owner
            if len(self._fenced) > _MOST:
                del self._fenced[next(iter(self._fenced))]

    def release(self, sender: RunSender) -> bool:
        """Leave the weights without an owner, if this process owns them; return whether it did."""
        owner = self.owner
        if owner is None or (owner.run, owner.epoch) != (sender.run, sender.epoch):
            return False
        if is_twin(sender, owner):
            return False
        self.owner = None
        known = self._touch(sender.run)
        known.epoch, known.released = sender.epoch, True
        return True

    def highest(self, run: str | None) -> int | None:
        """Return the highest number of the run's versions; None if it has none."""
        known = None if run is None else self._known.get(run)
        return None if known is None else known.highest

    def is_used(self, run: str | None, number: int) -> bool:
        """Return whether the run has had a version of this number, or a later one."""
        highest = self.highest(run)
        return highest is not None and number <= highest

    def new_anonymous(self) -> str:
        """Return a run for senders that name none."""
        self._anonymous += 1
        return f"{ANONYMOUS}{self._anonymous}"

    def use(self, run: str, number: int) -> None:
        """Record that the run has had a version of this number."""
        known = self._touch(run)
        known.highest = max(number, -1 if known.highest is None else known.highest)

    def _check_not_fenced(self, sender: RunSender) -> None:
        by = self._fenced.get(sender.run)
        if by is not None:
            raise RunFenced(
                f"run {sender.run} cannot write any more: {describe(by)} took over at "
                f"{clock(by.since)}; end this trainer",
                owner=msgspec.to_builtins(by),
            )
        known = self._known.get(sender.run)
        if known is None or sender.epoch >= known.epoch:
            return
        owner = self.owner if self.owner is not None and self.owner.run == sender.run else None
        by_whom = "" if owner is None else f" by {describe(owner)} at {clock(owner.since)}"
        raise RunFenced(
            f"run {sender.run} was opened again{by_whom}, so that its epoch {sender.epoch} "
            f"cannot write any more: the latest is {known.epoch}; end this trainer",
            owner=None if owner is None else msgspec.to_builtins(owner),
        )

    def _touch(self, run: str) -> _Known:
        known = self._known.pop(run) if run in self._known else _Known()
        self._known[run] = known
        if len(self._known) > _MOST:
            del self._known[next(iter(self._known))]
        return known


def is_twin(sender: RunSender, owner: RunSender | RunOwner) -> bool:
    """Return whether two processes have opened a run as the same epoch, from copies of its state.

    A host and a process id that a sender does not name might be the other's.
    """
    pairs = ((sender.host, owner.host), (sender.pid, owner.pid))
    differ = any(None not in pair and pair[0] != pair[1] for pair in pairs)
    return differ and (sender.run, sender.epoch) == (owner.run, owner.epoch)


def is_anonymous(run: str | None) -> bool:
    """Return whether a run is one of senders that name none."""
    return run is not None and run.startswith(ANONYMOUS)


def owner_of(sender: RunSender, since: float) -> RunOwner:
    """Return a sender as the owner since a Unix time."""
    return RunOwner(since=since, **msgspec.structs.asdict(sender))


def describe(owner: RunOwner) -> str:
    """Return which run and process an owner is, as text."""
    process = "" if owner.pid is None else f" of process {owner.pid}"
    host = "" if owner.host is None else f" on {owner.host}"
    return f"run {owner.run}{process}{host}"


def clock(at: float) -> str:
    """Return a Unix time as text."""
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
