"""What the reference sender remembers over its own restart: a small file, written atomically."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from engine_ext.durable_files import FileLock, sync_folder, write_file


class Known(msgspec.Struct, frozen=True):
    """A version, and the digest of every tensor of it, as 32 hex digits."""

    version: int
    digest: str


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the engines.

    Attributes:
        engines: what each acknowledged last, by url.
        in_flight: what was about to be committed when this was written, or may have been; None if
            nothing was.
        highest: the highest version that was ever sent.
    """

    engines: dict[str, Known] = {}
    in_flight: Known | None = None
    highest: int = 0

    def standing_of(self, url: str | None, digest: str, otherwise: int) -> tuple[int, bool]:
        """Where an engine stands if it holds what has this digest.

        Args:
            url: of the engine; None for one that is not known.
            digest: of every tensor.
            otherwise: the version of weights that are not known here.

        Returns:
            The version that has the digest, and whether an engine at this version may hold
            something else. That is so where engines are known, and nothing known has the digest;
            and where something else has the same number. One that is at another version is found
            out by that.
        """
        mine = self.engines.get(url) if url is not None else None
        if mine is not None and mine.digest == digest:
            return mine.version, False
        known = [each for each in (self.in_flight, *self.engines.values()) if each is not None]
        for each in known:
            if each.digest == digest:
                others = [one for one in known if one.version == each.version]
                return each.version, any(one.digest != digest for one in others)
        version = otherwise if mine is None else mine.version
        return version, bool(self.engines) or any(each.version == version for each in known)


class StateFile:
    """The file.

    Args:
        path: it need not be there.

    Raises:
        ValueError: it is there, and cannot be understood.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._has_begun = False
        self._lock: FileLock | None = None
        self.state = State()
        try:
            self.state = msgspec.json.decode(path.read_bytes(), type=State)
        except FileNotFoundError:
            pass
        except msgspec.MsgspecError as error:
            raise ValueError(
                f"{path} is not a sender's state: {error}; without it the next sync is full"
            ) from error

    @classmethod
    def taken(cls, path: Path) -> StateFile:
        """The file, of which no other sender may make use until `close`.

        Raises:
            BlockingIOError: another one does.
            OSError: its folder cannot be written.
        """
        beside = path.with_name(f".{path.name}.lock")
        conflict = f"another sender uses the state {path}"
        with contextlib.ExitStack() as stack:
            lock = stack.enter_context(FileLock(beside, os.O_RDWR | os.O_CREAT, conflict))
            file = cls(path)
            file._lock = lock
            stack.pop_all()
        return file

    def close(self) -> None:
        """Let another sender use it."""
        if self._lock is not None:
            self._lock.close()

    def begin(self, version: int, digest: str) -> None:
        """Note what is about to be committed; on disk when this returns."""
        self._has_begun = True
        self._write(
            State(
                engines=self.state.engines,
                in_flight=Known(version, digest),
                highest=max(self.state.highest, version),
            )
        )

    def end(self, engines: Mapping[str, Known], *, in_doubt: bool) -> None:
        """Note what the engines have acknowledged.

        Args:
            engines: those that have.
            in_doubt: some other may have committed what was in flight.
        """
        known = {**self.state.engines, **engines}
        highest = max([self.state.highest, *(each.version for each in engines.values())])
        # What an earlier sender had in flight is as open as before.
        in_flight = self.state.in_flight if in_doubt or not self._has_begun else None
        self._write(State(engines=known, in_flight=in_flight, highest=highest))

    def _write(self, state: State) -> None:
        partial = self._path.with_name(f".{self._path.name}.partial")
        write_file(partial, msgspec.json.format(msgspec.json.encode(state)) + b"\n")
        os.replace(partial, self._path)
        sync_folder(self._path.parent)
        self.state = state
