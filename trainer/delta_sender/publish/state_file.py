"""Remember over a restart of the sender what engines hold: a small file, written atomically."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from delta_sender.diff.snapshot import Snapshot
from delta_sender.encode.sync_round import SyncRound
from delta_sender.run import Run
from engine_ext.files import FileLock, sync_folder, write_file
from engine_ext.format import Digest
from engine_ext.structs import prepare

logger = logging.getLogger(__name__)

_UNWRITTEN: Final = "the state file cannot be written, and is as it was during the sync: %s"


class Known(msgspec.Struct, frozen=True):
    """A version, and the digest of every tensor at it, as 32 hex digits.

    The digest is "" if an engine has committed the version and holds other bytes; its next sync is
    a full one then.
    """

    version: int
    digest: str


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The sender's run, and what is known of the engines."""

    run: str = ""
    epoch: int = 0  # openings of the run so far
    base: str = ""  # the digest of what the run began with, once something was sent
    engines: dict[str, Known] = {}  # what each acknowledged last, by url
    # About to be committed when this was written, or might have been.
    in_flight: Known | None = None
    highest: int = 0  # the highest version that was ever sent

    @property
    def known(self) -> list[Known]:
        """What engines hold, or might."""
        return [each for each in (self.in_flight, *self.engines.values()) if each is not None]

    def version_of(self, url: str | None, digest: str, otherwise: int) -> tuple[int, bool]:
        """Return the version of an engine (None: not recorded) whose weights have a digest.

        It is `otherwise` if they are not known here. Also return whether an engine at it can hold
        something else: something was sent, but nothing known has the digest; or something else has
        the same number. An engine at another version answers with a conflict.
        """
        own = self.engines.get(url) if url is not None else None
        if own is not None and own.digest == digest:
            return own.version, False
        known = self.known
        for each in known:
            if each.digest == digest:
                others = [one for one in known if one.version == each.version]
                return each.version, any(one.digest != digest for one in others)
        version = otherwise if own is None else own.version
        is_other = bool(self.engines) or self.base not in ("", digest)
        return version, is_other or any(each.version == version for each in known)


prepare(State)


def state_key(url: str) -> str:
    """Return what the file calls an engine, or an adapter in it: the root without its last slash.

    Args:
        url: As it was given, or with ``?adapter=NAME``.
    """
    return re.sub(r"/+(?=\?adapter=|$)", "", url, count=1)


def read_state(path: Path) -> State:
    """Return the content of a state file; as of a new sender if there is none.

    Raises:
        ValueError: It exists, and is not a sender's state.
    """
    try:
        state = msgspec.json.decode(path.read_bytes(), type=State)
    except FileNotFoundError:
        return State()
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a sender's state: {error}; without it the sender opens a new run"
        ) from error
    engines = {state_key(key): known for key, known in state.engines.items()}
    return msgspec.structs.replace(state, engines=engines)


class StateFile:
    """The file, which is locked against other senders until `close`; `state` is its content.

    Raises:
        BlockingIOError: Another sender has locked it.
        ValueError: It exists, and is not a sender's state.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._has_begun = False
        beside = path.with_name(f".{path.name}.lock")
        conflict = f"another sender uses the state {path}"
        self._lock = FileLock(beside, os.O_RDWR | os.O_CREAT, conflict)
        try:
            self.state = read_state(path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()

    def open_run(self) -> Run:
        """Open the file's run again, or a new one; that is on disk when this returns."""
        run = Run.opened(self.state.run, self.state.epoch)
        self._write(msgspec.structs.replace(self.state, run=run.name, epoch=run.epoch))
        return run

    def begin(self, version: int, digest: str, before: str) -> None:
        """Write what is about to be committed; it is on disk when this returns.

        Args:
            digest, before: of what is committed, and of what the sender has acknowledged.
        """
        self._has_begun = True
        highest, in_flight = max(self.state.highest, version), Known(version, digest)
        base = self.state.base or ("" if self.state.engines else before)
        changed = {"in_flight": in_flight, "highest": highest, "base": base}
        self._write(msgspec.structs.replace(self.state, **changed))

    def end(self, engines: Mapping[str, Known], *, is_unknown: bool) -> None:
        """Write what the engines have acknowledged, by url.

        If `is_unknown`, another engine might have committed what was in flight.
        """
        known = {**self.state.engines, **engines}
        highest = max([self.state.highest, *(each.version for each in engines.values())])
        # The outcome of an earlier sender's sync is still unknown.
        in_flight = self.state.in_flight if is_unknown or not self._has_begun else None
        changed = {"engines": known, "in_flight": in_flight, "highest": highest}
        self._write(msgspec.structs.replace(self.state, **changed))

    def _write(self, state: State) -> None:
        partial = self._path.with_name(f".{self._path.name}.partial")
        write_file(partial, msgspec.json.format(msgspec.json.encode(state)) + b"\n")
        os.replace(partial, self._path)
        sync_folder(self._path.parent)
        self.state = state


class StateTracker:
    """Keep a sender's state file up to date; without a file, do nothing.

    Args:
        file: As an earlier sender has left it; its run is not open yet.
        adapter: Of the engines that is updated; None: the model.
    """

    def __init__(self, file: StateFile | None, snapshot: Snapshot, adapter: str | None) -> None:
        self.file, self._snapshot, self._adapter = file, snapshot, adapter
        # What each engine has acknowledged, by key; `write` writes it.
        self._known = {} if file is None else dict(file.state.engines)
        self._sent_before = frozenset(self._known if file is not None and file.state.run else ())
        self.recompute_digest()

    def _key(self, url: str) -> str:
        """Return what the file calls an engine, or an adapter in it."""
        return state_key(url if self._adapter is None else f"{url}?adapter={self._adapter}")

    def version_of(self, url: str | None, otherwise: int) -> tuple[int, bool]:
        """See `State.version_of`, for the snapshot's digest."""
        if self.file is None:
            return otherwise, False
        key = None if url is None else self._key(url)
        return self.file.state.version_of(key, self.digest.hex(), otherwise)

    @property
    def knows_base(self) -> bool:
        """Whether the file has the version of the snapshot, as the sender found it."""
        known = () if self.file is None else self.file.state.known
        return self.digest.hex() in {each.digest for each in known}

    def had_sent_to(self, url: str | None) -> bool:
        """Return whether an earlier sender of the same run had sent the engine something."""
        return url is not None and self._key(url) in self._sent_before

    def note(self, url: str, known: Known) -> None:
        """Note what an engine has acknowledged, for `write`."""
        self._known[self._key(url)] = known

    def close(self) -> None:
        """Release the file; nothing is written from now on: another sender can use it."""
        if self.file is not None:
            self.file.close()
            self.file = None

    def recompute_digest(self) -> None:
        """Compute the digest of every tensor of the snapshot."""
        self.digest = Digest.ZERO if self.file is None else self._snapshot.digest()

    def begin(self, sync_round: SyncRound) -> None:
        """Write what is about to be committed, and let the engines commit."""
        if self.file is not None:
            digest = self.digest_after(sync_round).hex()
            self.file.begin(sync_round.version, digest, self.digest.hex())
            sync_round.note_written()

    def digest_after(self, sync_round: SyncRound) -> Digest:
        """Return the digest of the snapshot once it has advanced; zero without a file."""
        if self.file is None:
            return Digest.ZERO
        changes = (change.digest or Digest.ZERO for change in sync_round.changes.values())
        return sum(changes, start=self.digest)

    def write(self, *, is_unknown: bool) -> None:
        """Write what the engines have acknowledged; see `StateFile.end`.

        If that fails, a warning says so: the engines have committed. The file has the sync in
        flight then, and the next write has all that was noted.
        """
        if self.file is None:
            return
        try:
            self.file.end(self._known, is_unknown=is_unknown)
        except OSError as error:
            logger.warning(_UNWRITTEN, error)
