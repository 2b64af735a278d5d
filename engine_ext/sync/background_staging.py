"""Stage parts in background threads, while the engine's main loop continues to serve."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from engine_ext.errors import MalformedPart
from engine_ext.format import UnpackedPart, read_unpacked
from engine_ext.kernels import same_device
from engine_ext.ranks.operations import BeginPart, FileStamp
from engine_ext.remote_parts import Locate
from engine_ext.resources import no_full_collections
from engine_ext.sync.staged import StagedPart

StagePart = Callable[[UnpackedPart], StagedPart]


class BackgroundStaging:
    """The parts of the staged sync, and the threads that expand and locate them.

    Args:
        threads: how many parts are staged at once.
        locate: see `engine_ext.remote_parts.locate_part`; None if all ranks are on the host
            of the spool.
    """

    def __init__(self, threads: int, locate: Locate | None = None) -> None:
        self._locate = locate
        self._threads = ThreadPoolExecutor(
            threads, thread_name_prefix="delta-stage", initializer=same_device()
        )
        self._parts: dict[int, Future[StagedPart]] = {}
        # Parts of dropped syncs included; one that is done is not kept alive here.
        self._running: set[Future[StagedPart]] = set()

    def start(self, begun: BeginPart, stage: StagePart) -> None:
        """Start staging a part from its verified file; see `Applier.stage_unpacked` for `stage`.

        The HTTP side sees when it has ended on every rank of its host, or one of them has died: the
        part's pipe has no writer then.
        """
        future = self._threads.submit(self._stage, begun, stage)
        pipe = _open_pipe(begun.pipe)
        self._parts[begun.part.part] = future
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
    def _stage(self, begun: BeginPart, stage: StagePart) -> StagedPart:
        path, stamp = begun.path, begun.stamp
        if self._locate is not None:
            path = self._locate(path, begun.source)
            stamp = stamp if path == begun.path else None  # another host's file
        part = read_unpacked(map_part(path, stamp), begun.part.identity)
        if part is None:
            raise MalformedPart("the part changed between its arrival and its staging")
        return stage(part)


def map_part(path: str, stamp: FileStamp | None = None) -> mmap.mmap:
    """Map the file of a part; its bytes stay as they are while the mapping lives.

    Args:
        stamp: that intake has left on the file.

    The HTTP process writes a file again, under another name, only if it can lock it exclusively.
    So a shared lock is held while the mapping lives: the mapping has a descriptor of the open file,
    and the kernel releases the lock with the last one. Nobody waits for it.

    Raises:
        FileNotFoundError: the part was removed.
        MalformedPart: something has written to the file since intake has verified it.
    """
    with open(path, "rb", buffering=0) as file:
        removed = FileNotFoundError(errno.ENOENT, "the part was removed", path)
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # the file is being written again
            raise removed from None
        except OSError:  # a file system without locks, where intake writes no file again
            pass
        found = os.fstat(file.fileno())
        if not os.path.samestat(os.stat(path), found):
            raise removed
        if stamp is not None and stamp != FileStamp.of(found):
            raise MalformedPart("the part changed between its arrival and its staging")
        # Nothing writes into the mapping, but torch makes no tensor of read-only memory.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _open_pipe(pipe: str | None) -> int | None:
    """Open a part's pipe for writing; None if no process of the HTTP side reads it."""
    if pipe is not None:
        with contextlib.suppress(OSError):
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    return None
