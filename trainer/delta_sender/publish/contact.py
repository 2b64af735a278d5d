"""Meet engines before the first sync, and release them after the last one."""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from threading import Condition, Thread
from typing import Final, Protocol
from weakref import WeakKeyDictionary

from delta_sender.publish.destination import Destination
from delta_sender.publish.session import Session
from delta_sender.results import SyncError
from delta_sender.run import Run

_AGAIN_S: Final = 1.0
_RELEASE_S: Final = 2.0  # for posts to end, and then for engines to answer


def meet_all(sessions: Sequence[Session], lag_limit: float | None) -> None:
    """Let sessions meet their engines that have not, before the next sync gets its number.

    Those that are not done `lag_limit` seconds after the first one, or fail, are left to
    `Session.sync`, which raises their error. If others have met theirs in an earlier sync, they
    have one second at most: an engine that cannot be reached must not keep those waiting.
    """
    ended, done = Condition(), dict[Session, bool]()

    def ask(session: Session) -> None:
        found = session.ask_early()
        with ended:
            done[session] = found
            ended.notify_all()

    asked = [session for session in sessions if not session.is_met]
    if len(asked) < len(sessions):
        lag_limit = _AGAIN_S if lag_limit is None else min(lag_limit, _AGAIN_S)
    for session in asked:
        Thread(target=ask, args=(session,), name="delta-meet", daemon=True).start()
    deadline: float | None = None
    with ended:
        while len(done) < len(asked):
            has_begun = any(done.values()) or len(asked) < len(sessions)
            if deadline is None and has_begun and lag_limit is not None:
                deadline = time.monotonic() + lag_limit
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            ended.wait(left)
        ready = [session for session, found in done.items() if found]
    for session in ready:
        with contextlib.suppress(SyncError):
            session.meet()


def release_all(destinations: Sequence[Destination], run: Run, posting: Iterable[Thread]) -> None:
    """Release destinations, at the same time, once the threads that post to them have ended.

    Either takes two seconds at most: an engine refuses parts of a released run that arrive later.
    """
    _join(posting)
    threads = []
    for destination in destinations:
        thread = Thread(target=destination.release, args=(run,), name="delta-release", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending, and starts no threads
            destination.release(run)
        else:
            threads.append(thread)
    _join(threads)


def _join(threads: Iterable[Thread]) -> None:
    deadline = time.monotonic() + _RELEASE_S
    for thread in threads:
        if thread.ident is not None:
            thread.join(max(0.0, deadline - time.monotonic()))


class _Sender(Protocol):
    def release(self) -> None: ...


_OPEN: WeakKeyDictionary[_Sender, int] = WeakKeyDictionary()  # and the process that opened it


def release_at_exit(sender: _Sender) -> None:
    """Release a sender that is still open when this process ends, but not when it is killed."""
    _OPEN[sender] = os.getpid()


@atexit.register
def _release_open() -> None:
    for sender, pid in [*_OPEN.items()]:
        if pid == os.getpid():  # a fork's copy is not the one that has claimed
            with contextlib.suppress(Exception):
                sender.release()
