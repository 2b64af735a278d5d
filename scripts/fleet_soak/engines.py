"""The engines of the fleet: started together, killed, and started again on the same port."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx

from engine_ext.ranks.status import EngineStatus
from scripts.live_engine.process import EngineError, EngineProcess
from scripts.live_engine.registry import ENGINES, SOAK_ARGUMENTS, SOAK_ENVIRONMENT


class Member:
    """One engine of the fleet.

    Attributes:
        name: in the tables.
        url, port: always the same.
        begun: when the process that runs now was started (`time.monotonic`).
        is_live: it has started, and was not killed since.
    """

    def __init__(self, kind: str, name: str, model: Path, folder: Path) -> None:
        self.kind, self.name = kind, name
        self._model, self._folder, self._starts = model, folder, 0
        self._process = self._made(None)
        self.url, self.port = self._process.url, self._process.port
        self.begun = 0.0
        self.is_live = False

    def _made(self, port: int | None) -> EngineProcess:
        log = self._folder / f"{self.name.replace(' ', '-')}.{self._starts}.log"
        self._starts += 1
        return ENGINES[self.kind](
            self._model,
            port=port,
            enable_delta=True,
            extra_args=SOAK_ARGUMENTS[self.kind],
            extra_env=SOAK_ENVIRONMENT,
            log_path=log,
        )

    @property
    def group(self) -> int:
        """The process group, for a kill."""
        return os.getpgid(self._process.pids()[0])

    def start(self) -> None:
        """Start the engine, and return when it is healthy.

        Raises:
            EngineError: It did not start.
        """
        self.begun = time.monotonic()
        self._process.__enter__()
        self.is_live = True

    def stop(self, grace_s: float = 15.0) -> None:
        """Stop the engine; with 0 s of grace also what is left of a killed one."""
        self.is_live = False
        self._process.stop(grace_s)

    def renew(self) -> None:
        """Make a fresh process for the same port, to be started; the one before was stopped."""
        self._process = self._made(self.port)

    def status(self) -> EngineStatus:
        """Return the answer of ``GET /delta_status``."""
        return self._process.delta_status()

    def scan(self) -> tuple[str, list[str]]:
        """Return the digest of live memory, and the tensors that something else has changed."""
        found = self._process.get("/delta_digest", params={"scan": "true"}).json()
        return found["digest"], found["corrupted"]


class Engines:
    """All engines, within the ``with`` block.

    Args:
        members: kind and name of each.
        model: checkpoint that they start with.
        folder: for their logs.
    """

    def __init__(self, members: Sequence[tuple[str, str]], model: Path, folder: Path) -> None:
        self.members = [Member(kind, name, model, folder) for kind, name in members]
        self._starts = ThreadPoolExecutor(len(members))
        self._starting: dict[str, Future[None]] = {}
        self._lock, self._is_closed = threading.Lock(), False

    def __enter__(self) -> Engines:
        try:
            for one in [self._starts.submit(self._start, member) for member in self.members]:
                one.result()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop all, also those that are starting."""
        self._is_closed = True
        for member in self.members:
            member.stop(2.0)
        self._starts.shutdown(wait=True, cancel_futures=True)
        for member in self.members:  # one can have been started just now
            member.stop(0.0)

    @property
    def live(self) -> list[Member]:
        """The engines that have started and were not killed."""
        return [member for member in self.members if member.is_live]

    def named(self, url: str) -> str:
        """Return an engine's name."""
        return next(member.name for member in self.members if member.url == url)

    def replace(self, member: Member, grace_s: float) -> None:
        """Stop an engine, and start a fresh one in its place, in the background."""
        member.stop(grace_s)
        member.renew()
        self._starting[member.url] = self._starts.submit(self._start, member)

    def check_starts(self) -> None:
        """Raise what a start in the background has raised.

        Raises:
            EngineError: An engine did not start.
        """
        for url, one in list(self._starting.items()):
            if one.done():
                del self._starting[url]
                one.result()

    def _start(self, member: Member) -> None:
        if self._is_closed:
            raise EngineError("the soak has ended")
        member.start()


def statuses(members: Sequence[Member]) -> dict[str, EngineStatus]:
    """Return the status of engines by url, without those that do not answer."""
    found = {}
    for member in members:
        try:
            found[member.url] = member.status()
        except (httpx.TransportError, EngineError):
            continue
    return found
