"""Write every version into a delta log, as one more destination."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Final

from delta_sender.encode.acked_state import AckedState
from delta_sender.publish.bandwidth import LinkSpeed
from delta_sender.publish.destination import Destination
from delta_sender.publish.session import Session
from delta_sender.results import SyncError
from engine_ext.errors import LogDamaged
from engine_ext.format import Digest, sign
from engine_ext.log import DeltaLog, Draft, Listing, LogWriter, version_of

logger = logging.getLogger(__name__)

_PLAN_S: Final = 30.0  # to wait for a plan
_NEXT_S: Final = 2.0  # until one more engine is asked for it
_END: Final = object()  # in place of an answer: it is waited for no longer


class LogDestination(Destination):
    """Take parts like an engine, and write them into a delta log.

    Its parts should apply to any engine, so it gets differences only with ``log_differences``. No
    part is delivered before `take_turn`.

    Args:
        log: The log.
        engines: Asked for their plan, until one answers; without any there is no plan.
        hmac_key: Signs the parts.
        settles: Whether it must be known what has become of a version, as engines go by that.
    """

    def __init__(
        self,
        log: DeltaLog,
        engines: Sequence[Destination],
        hmac_key: str | None,
        *,
        settles: bool = False,
    ) -> None:
        self.speed = LinkSpeed()
        self.highest_posted = 0
        self.log = log
        self._writer: LogWriter | None = None
        self._engines, self._hmac_key, self._settles = engines, hmac_key, settles
        self._plans: list[Any] = []  # the last one; an engine can answer that it has none
        self._draft: Draft | None = None
        self._as_opened: Listing | None = None  # until it is known which version the base is
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._is_stopped = self._is_interrupted = False

    def take_turn(self) -> None:
        """Become the log's only writer; the log is made if it is missing.

        In an object store, a sender that has the turn loses it.

        Raises:
            BlockingIOError: Another sender writes into the log.
            OSError: It cannot be written.
        """
        self._writer = self.log.writer()

    @property
    def writer(self) -> LogWriter:
        """The log's writer, after `take_turn`."""
        assert self._writer is not None
        return self._writer

    @property
    def last_number(self) -> int:  # type: ignore[override]
        """The highest version number in use, refused ones included; -1 in an empty log."""
        return self.writer.last_number

    def may_hold(self, version: int) -> bool:
        """Return whether readers can see a version that could not be finished."""
        is_unsure = self._draft is not None and self._draft.may_be_visible
        return is_unsure or self.writer.last_number >= version

    def continues_from(self, version: int, run: str | None = None) -> bool:
        """Return whether a delta from a version, of a run if that matters, continues the log.

        It also does if it begins the log.
        """
        entries = self.listing().entries
        own = [e for e in entries if run is None or (e.publication and e.publication.run == run)]
        return not entries or any(version in (e.version, e.base_version) for e in own)

    def note_base(self, state: AckedState, run: str | None) -> None:
        """Note the version of the base before the first sync, so that the log continues from there.

        Args:
            state: The log's. The next version is full if the log does not have the base's.
            run: Whose version the state has; None: `find_base` is to find out which it is.
        """
        if state.needs_full:
            return
        if run is None:
            self._as_opened = self.listing()
        elif not self.continues_from(state.version, run):
            state.full_reason = "restarted: the log does not lead to the base"

    def find_base(self, state: AckedState, sessions: Sequence[Session]) -> None:
        """Find out which version of the log the base is, unless that is known.

        The digest of the base shows it. In an empty log, an engine that holds the base does, and if
        none is known to, `state` stays. If nothing shows it, the next version is full.

        Args:
            state: The log's.
            sessions: Those of engines. If none was met, the next sync looks for it again.
        """
        log, engines = self._as_opened, [one.state for one in sessions if one.is_met]
        if log is None or state.is_known:
            return
        if engines:
            self._as_opened = None
        if log.newest is None:
            holding = [engine for engine in engines if engine.base_digest is not None]
            if holding:
                first = min(holding, key=lambda engine: engine.version)
                state.version, state.unproven = first.version, first.unproven
            return
        plans = {
            engine.digest.hex(): engine.plan
            for engine in engines
            if engine.digest not in (None, Digest.ZERO) and not engine.missed
        }
        found = [one for one in _versions_by_digest(log) if one[1] in plans]
        if not found:
            state.full_reason = "restarted: no digest shows which version of the log the base is"
            return
        state.version, digest = max(found)
        state.unproven = frozenset(plans[digest].names).difference(plans[digest].digested)
        state.full_reason = None

    def warn_unproven(self, *, digest: bool) -> None:
        """Warn if versions carry no digests although they are to: no engine is asked for a plan."""
        if digest and not self._engines:
            logger.warning(
                "no engine is asked (notify=, --notify), so the versions carry no digests: an "
                "engine that holds other weights takes them"
            )

    def listing(self) -> Listing:
        """Return the content of the log, which is empty if its folder is missing.

        Raises:
            LogDamaged: It cannot be read.
        """
        try:
            return self.log.listing()
        except LogDamaged as error:
            if self.log.store.drafts_are_hidden and isinstance(error.__cause__, FileNotFoundError):
                return Listing()
            raise

    def require_newest(self, version: int | None) -> None:
        """Check which version is the log's newest; None if it has none.

        Raises:
            BlockingIOError: It is another one: another sender writes into the log.
            LogDamaged: The log cannot be read.
        """
        if self.listing().newest != version:
            raise BlockingIOError(f"another sender writes into the log {self.log.location}")

    def close(self) -> None:
        """Drop what is not complete, and let another sender write."""
        draft, self._draft = self._draft, None  # another sender can write it after this
        if draft is not None:
            with contextlib.suppress(OSError):
                self._end_draft(draft)
        if self._writer is not None:
            self._writer.close()

    def stop(self) -> None:
        """See `Destination.stop`; a wait for a plan ends, too."""
        self._is_stopped = True
        self._answers.put(_END)

    @contextlib.contextmanager
    def interrupted(self) -> Iterator[None]:
        """Inside the block nobody waits for a plan: that raises `SyncError`."""
        self._is_interrupted = True
        self._answers.put(_END)
        try:
            yield
        finally:
            self._is_interrupted = False

    def plan(self) -> Any:
        """Return the plan of an engine: the first one's, or another's if it does not answer soon.

        If none does, it is the plan that an engine had before: the log can be written without
        asking an engine again.

        Raises:
            SyncError: None does, and none has before; or it is stopped or interrupted.
        """
        answers = self._answers = SimpleQueue()
        if self._is_stopped or self._is_interrupted:
            answers.put(_END)
        failure = SyncError(f"no engine that is to be notified has answered in {_PLAN_S:.0f} s")
        end = time.monotonic() + _PLAN_S
        left, todo, asked = _PLAN_S, deque(self._engines), 0
        while (todo or asked) and left > 0:
            if todo:
                engine = todo.popleft()
                Thread(target=_ask, args=(engine, answers), name="delta-plan", daemon=True).start()
                asked += 1
            with contextlib.suppress(Empty):
                answer = answers.get(timeout=min(left, _NEXT_S) if todo else left)
                if answer is _END:
                    raise SyncError("the sync has ended")
                if not isinstance(answer, SyncError):
                    self._plans = [answer]
                    return answer
                asked, failure = asked - 1, answer
            left = end - time.monotonic()
        if self._engines and not self._plans:
            raise failure
        return self._plans[0] if self._plans else None

    def deliver(self, body: bytes, version: int, part: int, last: bool) -> dict[str, Any]:
        """Write one part; the last one makes the version visible.

        Raises:
            OSError: It cannot be written.
            SyncError: It is stopped.
        """
        if self._is_stopped:
            raise SyncError("the sender is closed")
        if part == 0:
            if self._draft is not None:
                self._end_draft(self._draft)
                self._draft = None
            self._draft = self.writer.begin(version)
        assert self._draft is not None
        self._draft.add(body, None if self._hmac_key is None else sign(self._hmac_key, body))
        if not last:
            return {"status": "staged"}
        folder, self._draft = self._finish(self._draft), None
        self.highest_posted = version
        return {"status": f"saved in {self.log.location}/{folder.name}"}

    def _finish(self, draft: Draft) -> Path:
        try:
            return draft.finish(self._hmac_key)
        except BlockingIOError:
            raise
        except OSError:
            folder = draft.settle() if self._settles and draft.may_be_visible else None
            if folder is None:
                raise
            return folder

    def _end_draft(self, draft: Draft) -> None:
        """Take back a version that no engine has committed."""
        if self._settles and draft.may_be_visible and (folder := draft.settle()) is not None:
            version = version_of(folder.name)
            assert version is not None
            self.writer.refuse(version)
        draft.drop()


def _versions_by_digest(log: Listing) -> Iterator[tuple[int, str]]:
    """Yield versions with the digest that a version's sender has declared for them."""
    for entry in log.entries:
        said = entry.publication
        if said is not None and said.digest_after is not None:
            yield entry.version, said.digest_after
        if said is not None and said.digest_before is not None and entry.base_version is not None:
            yield entry.base_version, said.digest_before


def _ask(engine: Destination, answers: SimpleQueue[Any]) -> None:
    try:
        answers.put(engine.plan())
    except Exception as error:
        failed = error if isinstance(error, SyncError) else SyncError(str(error))
        answers.put(failed)
