"""Which HTTP process pauses the engine, and whether generation is to go on after that.

Several HTTP processes may serve one engine. Every rank keeps one `Lease` and is told the same
things in the same order, so that all of them answer alike, whichever process asks.
"""

from __future__ import annotations

from typing import Any


class Lease:
    """One rank's knowledge of who pauses the engine.

    Attributes:
        owed: the engine is paused by a commit, not by the caller; who holds it lets it go on.
    """

    def __init__(self) -> None:
        self.owed = False
        self._holder: str | None = None
        self._held = False

    def take(self, holder: str, *, resumes: bool, instead_of: str | None) -> dict[str, Any]:
        """Let one process change whether the engine is paused, and no other.

        Args:
            holder: names the process; one that holds it already may take it again.
            resumes: it has seen the engine run, and so owes that it runs afterwards.
            instead_of: names a process that is known to be dead.

        Returns:
            ``granted``; if not, ``holder`` who has it. If it is, ``fresh`` says that no other
            process has had it since this one: only then `resumes` counts, as what was seen before
            may be another's pause.
        """
        if self._held and self._holder not in (holder, instead_of):
            return {"granted": False, "holder": self._holder}
        fresh = self._holder in (None, holder)
        self._holder, self._held = holder, True
        self.owed = self.owed or (fresh and resumes)
        return {"granted": True, "fresh": fresh}

    def release(self, holder: str, *, owed: bool) -> None:
        """Let others take it; `owed` is still to be done. Nothing, if `holder` has lost it."""
        if self._held and self._holder == holder:
            self._held, self.owed = False, owed
