"""Keep the state file of a sender up to date; without one, do nothing."""

from __future__ import annotations

from delta_sender.snapshot import Snapshot
from delta_sender.state_file import Known, StateFile
from delta_sender.sync_round import SyncRound
from engine_ext.wire import Digest


class StateTracker:
    """The digest of the snapshot, and what each engine has acknowledged.

    Args:
        file: The state file; None if nothing is remembered.
        snapshot: The sender's snapshot. Its digest is kept only if there is a file.
    """

    def __init__(self, file: StateFile | None, snapshot: Snapshot) -> None:
        self.file, self._snapshot = file, snapshot
        self._known = {} if file is None else dict(file.state.engines)
        self.recompute_digest()

    @property
    def highest_version(self) -> int:
        """The highest version that was ever sent, as far as is remembered."""
        return 0 if self.file is None else self.file.state.highest

    def start(self, url: str | None, base_version: int) -> tuple[int, bool]:
        """Return the version at which an engine holds the base, and whether that is doubtful."""
        if self.file is None:
            return base_version, False
        return self.file.state.version_of(url, self._digest.hex(), base_version)

    def recompute_digest(self) -> None:
        """Compute the digest of every tensor of the snapshot."""
        self._digest = Digest.ZERO if self.file is None else self._snapshot.digest()

    def begin(self, sync_round: SyncRound) -> None:
        """Write what is about to be committed, and let the engines commit."""
        if self.file is not None:
            self.file.begin(sync_round.version, self.digest_after(sync_round).hex())
            sync_round.note_written()

    def digest_after(self, sync_round: SyncRound) -> Digest:
        """Return the digest of the snapshot once it has advanced; zero without a file."""
        if self.file is None:
            return Digest.ZERO
        changes = (change.digest or Digest.ZERO for change in sync_round.changes.values())
        return sum(changes, start=self._digest)

    def advance(self, digest: Digest) -> None:
        """Take in the digest of the snapshot, which has advanced."""
        self._digest = digest

    def note(self, url: str, version: int, content: str) -> None:
        """Note what an engine has acknowledged; `write` writes it."""
        self._known[url] = Known(version, content)

    def write(self, *, is_unknown: bool) -> None:
        """Write what the engines have acknowledged; see `StateFile.end`."""
        if self.file is not None:
            self.file.end(self._known, is_unknown=is_unknown)

    def close(self) -> None:
        """Release the file."""
        if self.file is not None:
            self.file.close()
