"""Stage parts in background threads, while the engine's main loop goes on serving."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from engine_ext.files import staging_pipe
from engine_ext.format import Limits, Part, PartId
from engine_ext.ranks.operations import PartSource
from engine_ext.remote_parts import Locate
from engine_ext.resources import no_full_collections
from engine_ext.sync.shared_decoding import read_part
from engine_ext.sync.staged import StagedPart

StagePart = Callable[[Part], StagedPart]


class BackgroundStaging:
    """The parts of the staged sync, and the threads that read, verify and decode them.

    Args:
        threads: how many parts are staged at once.
        shared: whether other ranks of this host stage the same parts.
        locate: see `engine_ext.remote_parts.PartLocator.locate`; None if all ranks are on the host
            of the spool.
    """

    def __init__(
        self, threads: int, limits: Limits, *, shared: bool, locate: Locate | None = None
    ) -> None:
        self._limits, self._shared, self._locate = limits, shared, locate
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="delta-stage")
        self._parts: dict[int, Future[StagedPart]] = {}
        # Parts of dropped syncs included; one that is done is not kept alive here.
        self._running: set[Future[StagedPart]] = set()

    def start(
        self, part: PartId, path: str, stage: StagePart, source: PartSource | None = None
    ) -> None:
        """Start staging a part from the spool file at `path`; `stage` locates it on this rank.

        The HTTP side sees when it has ended on every rank of its host, or one of them has died: the
        pipe beside the file has no writer then.
        """
        pipe = _open_pipe(path)
        future = self._threads.submit(self._stage, path, source, part.identity, stage)
        self._parts[part.part] = future
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        if pipe is not None:
            future.add_done_callback(lambda _: os.close(pipe))

    def get(self, number: int) -> Future[StagedPart] | None:
        """Return the part of this number, or None if it was forgotten."""
        return self._parts.get(number)

    def results(self, numbers: Iterable[int]) -> list[StagedPart]:
        """Return some staged parts by number; raises what staging one of them raised."""
        return [self._parts[number].result() for number in sorted(numbers)]

    def forget(self, number: int) -> None:
        """Forget the part of this number; a thread that has begun it finishes it."""
        future = self._parts.pop(number, None)
        if future is not None:
            future.cancel()

    def clear(self) -> None:
        """Forget all parts. Threads finish the ones that they have begun."""
        for number in list(self._parts):
            self.forget(number)

    def wait(self) -> None:
        """Wait until no thread is staging anything."""
        wait(list(self._running))

    @no_full_collections()
    def _stage(
        self, path: str, source: PartSource | None, identity: str, stage: StagePart
    ) -> StagedPart:
        if self._locate is not None:
            path = self._locate(path, source)
        return stage(read_part(path, identity, self._limits, shared=self._shared))


def _open_pipe(path: str) -> int | None:
    """Open the pipe beside a part for writing; None if no process of the HTTP side reads it."""
    with contextlib.suppress(OSError):
        return os.open(staging_pipe(path), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    return None
