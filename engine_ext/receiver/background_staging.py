"""Stage parts in background threads, while the engine's main loop goes on serving."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from engine_ext.apply import StagedPart
from engine_ext.errors import MalformedPart
from engine_ext.wire import Limits, Part, PartId, decode_part, part_identity

StagePart = Callable[[Part], StagedPart]


class BackgroundStaging:
    """The parts of the staged sync, and the threads that read, verify and decode them."""

    def __init__(self, threads: int, limits: Limits) -> None:
        self._limits = limits
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="delta-stage")
        self._parts: dict[int, Future[StagedPart]] = {}
        # Parts of dropped syncs included; one that is done is not kept alive here.
        self._running: set[Future[StagedPart]] = set()

    def start(self, part: PartId, path: str, stage: StagePart) -> None:
        """Start staging a part from the spool file at `path`; `stage` locates it on this rank."""
        future = self._threads.submit(self._stage, path, part.identity, stage)
        self._parts[part.part] = future
        self._running.add(future)
        future.add_done_callback(self._running.discard)

    def get(self, number: int) -> Future[StagedPart] | None:
        """Return the part of this number, or None if it was forgotten."""
        return self._parts.get(number)

    def results(self, numbers: Iterable[int]) -> list[StagedPart]:
        """Return some staged parts by number; raises what staging one of them raised."""
        return [self._parts[number].result() for number in sorted(numbers)]

    def forget(self, number: int) -> None:
        """Forget the part of this number."""
        self._parts.pop(number, None)

    def clear(self) -> None:
        """Forget all parts. Threads finish the ones that they have begun."""
        self._parts.clear()

    def wait(self) -> None:
        """Wait until no thread is staging anything."""
        wait(list(self._running))

    def _stage(self, path: str, identity: str, stage: StagePart) -> StagedPart:
        with open(path, "rb") as file:
            # Nothing writes into the mapping, but torch makes no tensor of read-only memory.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        part = decode_part(data, self._limits)
        if part_identity(part.header, data) != identity:
            raise MalformedPart("the part changed between its arrival and its staging")
        return stage(part)
