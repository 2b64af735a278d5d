"""What the reference sender remembers over its own restart: a small file, written atomically."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec


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

    def version_of(self, url: str | None, digest: str, otherwise: int) -> int:
        """The version that has this digest.

        Args:
            url: of the engine that it is asked for; None for no certain one.
            digest: of every tensor.
            otherwise: the version of weights that are not known here.
        """
        mine = self.engines.get(url) if url is not None else None
        for known in (mine, self.in_flight, *self.engines.values()):
            if known is not None and known.digest == digest:
                return known.version
        return otherwise if mine is None else mine.version

    def is_elsewhere(self, url: str | None, digest: str, version: int) -> bool:
        """Whether an engine at this version may hold something else than what has this digest.

        That is so where engines are known, and nothing known has the digest; and where something
        else has the same number. One that is at another version is found out by that.

        Args:
            url, digest: as of `version_of`.
            version: what that has returned.
        """
        mine = self.engines.get(url) if url is not None else None
        if mine is not None and mine.digest == digest:
            return False
        known = [each for each in (self.in_flight, *self.engines.values()) if each is not None]
        if self.engines and digest not in [each.digest for each in known]:
            return True
        return any(each.version == version and each.digest != digest for each in known)


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
        self.state = State()
        try:
            self.state = msgspec.json.decode(path.read_bytes(), type=State)
        except FileNotFoundError:
            pass
        except msgspec.MsgspecError as error:
            raise ValueError(
                f"{path} is not a sender's state: {error}; without it the next sync is full"
            ) from error

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
        with open(partial, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(state)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self._path)
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self.state = state
