"""Which HTTP process can pause the engine, and whether generation must be resumed afterwards.

Several HTTP processes can serve one engine. Every rank keeps one `Lease` and gets the same calls in
the same order, so that all ranks answer alike, whichever process asks.
"""

from __future__ import annotations

from engine_ext.ranks.operations import LeaseGrant


class Lease:
    """An exclusive lease that is revoked when its holder is dead.

    Attributes:
        resume_owed: a commit, not the caller, has paused the engine; the holder must resume it.
    """

    def __init__(self) -> None:
        self.resume_owed = False
        self._holder: str | None = None
        self._held = False

    def acquire(self, holder: str, *, resumes: bool, instead_of: str | None) -> LeaseGrant:
        """Grant the lease, unless another process holds it.

        Args:
            holder: names the process; it can acquire a lease that it holds already.
            resumes: the process has seen the engine run, and so must resume it afterwards. Counts
                only if the grant is fresh: what was seen before might be another process's pause.
            instead_of: names a process that is known to be dead.
        """
        if self._held and self._holder not in (holder, instead_of):
            return LeaseGrant(granted=False, holder=self._holder)
        fresh = self._holder in (None, holder)
        self._holder, self._held = holder, True
        self.resume_owed = self.resume_owed or (fresh and resumes)
        return LeaseGrant(granted=True, fresh=fresh)

    def release(self, holder: str, *, owed: bool) -> None:
        """Let others acquire the lease; does nothing if `holder` has lost it.

        If `owed`, the engine must still be resumed.
        """
        if self._held and self._holder == holder:
            self._held, self.resume_owed = False, owed
