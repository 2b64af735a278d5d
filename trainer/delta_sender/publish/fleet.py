"""Let several engines commit one sync as one: the class `FleetRound`.

The engines' side, and what becomes of a sync if the sender or an engine dies, is in
`delta_server.fleet`. Each session takes its steps in its own thread, and waits between two steps
for the others; the publisher's thread decides.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Condition
from typing import Any, Final, Literal

from delta_sender.options import SenderOptions
from delta_sender.publish.destination import Destination
from delta_sender.results import (
    EngineBusy,
    FleetOutcome,
    GroupAborted,
    PartialSyncError,
    SyncError,
    SyncReport,
)

logger = logging.getLogger(__name__)

ABORTED: Final = {"type": "GroupAborted", "engine_state": "unchanged"}
_LATE: Final = "it was not done in time"
_TAKES_PART: Final = ("committed", "failed", "prepared")  # states of a `FleetOutcome`

Evict = Callable[[str, SyncError], object]
_Phase = Literal["prepare", "record", "commit", "abort"]


@dataclass(frozen=True, slots=True)
class Unsettled:
    """The last step of a destination, which it has not answered; it is to be taken again."""

    action: Literal["commit", "abort"]
    fields: Mapping[str, Any]

    def settle(self, destination: Destination) -> None:
        """Take the step again.

        Raises:
            SyncError: No answer came, or the engine could not commit and holds the sync still. A
                refusal settles it, too, and is not raised.
        """
        try:
            destination.take_step(self.action, self.fields)
        except EngineBusy:
            raise
        except SyncError as failed:
            if failed.is_held or not failed.error.get("engine_state"):
                raise


@dataclass(slots=True)
class _Member:
    """One destination in the round."""

    state: Literal["sending", "prepared", "recorded", "committed", "aborted", "failed"] = "sending"
    has_prepared: bool = False
    takes_part: bool = False  # it had prepared when the others began to record
    error: SyncError | None = None


class FleetRound:
    """One sync that the engines commit together, or not at all.

    Args:
        version: That the sync leads to.
        members: The destinations, by url.
        absent: Urls of engines that are not sent this sync, with the reason.
        options: `quorum` counts the absent ones, too. `commit_window` is for the engines to record,
            and then to commit. They hold what they have recorded for twice as long, from the last
            time; it is recorded again while the version is being written into the log. `lag_limit`
            counts from the first one that has prepared; without it, an engine that has prepared
            waits for the others for `timeout`.

    Attributes:
        is_committed: Whether the engines that have prepared commit; None until that is decided.
    """

    def __init__(
        self,
        version: int,
        members: Mapping[str, Destination],
        absent: Mapping[str, SyncError],
        options: SenderOptions,
    ) -> None:
        self._version, self._group = version, uuid.uuid4().hex
        self._urls = {destination: url for url, destination in members.items()}
        self._members = {url: _Member() for url in members}
        for url, error in absent.items():
            self._members[url] = _Member("failed", error=error)
        self._quorum = len(self._members) if options.quorum is None else options.quorum
        self._evict, self._limit = options.evict, options.lag_limit
        self._window = options.commit_window
        patience = options.timeout if self._limit is None else self._limit
        self._lease = patience + 2 * self._window
        self._phase: _Phase = "prepare"
        self._changed = Condition()
        self._why_aborted: str | None = None  # an engine that aborts is not "failed" any more
        self.is_committed: bool | None = None

    # The sessions' threads -----------------------------------------------------------------------

    def has_prepared(self, destination: Destination) -> bool:
        """Return whether a destination has prepared, so that nothing else can be sent to it."""
        return self._member(destination).has_prepared

    def is_left_out(self, destination: Destination) -> bool:
        """Return whether the others commit without a destination; False for one out of the round.

        To be asked once `conduct` has returned.
        """
        url = self._urls.get(destination)
        return url is not None and not (
            self._members[url].takes_part or self._members[url].state == "committed"
        )

    def note_committed(self, destination: Destination) -> None:
        """Note that a destination has had the sync already."""
        member = self._member(destination)
        member.has_prepared = True
        self._move(member, "committed")

    def note_failed(self, destination: Destination, error: BaseException) -> None:
        """Note that nothing more will come of a destination in this round."""
        member = self._member(destination)
        with self._changed:
            if member.state not in ("committed", "aborted"):
                failed = error if isinstance(error, SyncError) else SyncError(str(error))
                member.state, member.error = "failed", failed
            self._changed.notify_all()

    def commit(
        self, destination: Destination, sync_id: str, note: Callable[[Unsettled | None], None]
    ) -> dict[str, Any]:
        """Prepare a destination that has all parts staged, and commit it if the others do.

        Args:
            note: Is given the last step before it is taken, and None once it is answered.

        Returns:
            The answer to the commit.

        Raises:
            SyncError: It refused, or the others do not commit, or no answer came.
        """
        member = self._member(destination)
        fields = {"group": self._group, "version": self._version, "sync_id": sync_id}
        with self._changed:
            is_late = self._phase != "prepare"
        if is_late:  # its parts are staged
            abort = Unsettled("abort", fields)
            note(abort)
            with contextlib.suppress(SyncError):  # no answer: the next sync takes it again
                abort.settle(destination)
                note(None)
            raise SyncError(f"too late for its group: {self._why()}", 409, dict(ABORTED))
        prepared = {**fields, "lease": self._lease}
        try:
            destination.take_step("prepare", prepared)
        except SyncError as failed:
            if not failed.error.get("engine_state"):  # it might hold the sync
                note(Unsettled("abort", fields))
            raise
        self._move(member, "prepared")
        while not self._is_in("record", "commit", "abort", most=self._window):
            with contextlib.suppress(SyncError):  # the next step finds out
                destination.take_step("prepare", prepared)
        if self._is_recorded_by(member):
            with self._changed:
                peers = [d.name for d, url in self._urls.items() if self._members[url].takes_part]
            recorded = {**fields, "peers": peers, "lease": 2 * self._window}
            try:
                destination.take_step("record", recorded)
            except SyncError as failed:
                self._move(member, "failed", failed)
            else:
                self._move(member, "recorded")
                # A write to the log can take long.
                while not self._is_in("commit", "abort", most=self._window):
                    with contextlib.suppress(SyncError):
                        destination.take_step("record", recorded)
        self._is_in("commit", "abort")
        with self._changed:
            commits = self._phase == "commit" and member.takes_part
        action: Literal["commit", "abort"] = "commit" if commits else "abort"
        note(Unsettled(action, fields))
        try:
            answer = self._take_step(destination, action, fields)
        except EngineBusy as failed:  # the engines settle it among themselves
            raise SyncError(str(failed), failed.status) from failed
        except SyncError as failed:
            if failed.is_held or not failed.error.get("engine_state"):
                raise
            note(None)
            if commits:
                raise
            # It has settled it with the others before the abort came.
            raise SyncError(str(failed), failed.status) from failed
        note(None)
        if not commits:
            self._move(member, "aborted")
            raise SyncError(f"prepared, and not committed: {self._why()}", 409, dict(ABORTED))
        self._move(member, "committed")
        return answer

    def _is_in(self, *phases: _Phase, most: float | None = None) -> bool:
        """Return whether the round is in one of some phases; wait for it, at most some seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._phase in phases, most)

    def _is_recorded_by(self, member: _Member) -> bool:
        """Return whether a destination that has prepared is to record what the group decides."""
        with self._changed:
            return self._phase == "record" and member.takes_part

    @staticmethod
    def _take_step(
        destination: Destination, action: _Phase, fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Take a step; if it is done but the engine has not resumed, take it once more."""
        try:
            return destination.take_step(action, fields)
        except SyncError as failed:
            if failed.error.get("engine_state") != "committed":
                raise
            return destination.take_step(action, fields)

    def _move(self, member: _Member, state: Any, error: SyncError | None = None) -> None:
        with self._changed:
            member.state, member.error = state, error
            member.has_prepared |= state == "prepared"
            self._changed.notify_all()

    def _member(self, destination: Destination) -> _Member:
        return self._members[self._urls[destination]]

    def _why(self) -> str:
        """Return why the group does not commit, or not with a late engine."""
        if self._why_aborted is not None:
            return self._why_aborted
        failed = [(url, m.error) for url, m in self._members.items() if m.state == "failed"]
        reasons = [f"{url}: {error}" for url, error in failed]
        if reasons:
            return "; ".join(reasons)
        late = [url for url, one in self._members.items() if not one.takes_part]
        return f"not ready in time: {', '.join(late)}" if late else "the sync was interrupted"

    # The publisher's thread ----------------------------------------------------------------------

    def conduct(self, write: Callable[[], None] | None = None) -> bool:
        """Wait until all have prepared, or failed, and decide; return whether they commit.

        Args:
            write: Writes the version into the delta log. It is called when all have recorded that
                they commit, so that the log has no version that none commits.

        Raises what `evict` raises; nothing is committed then.
        """
        prepared = self._wait_for_prepared()
        if len(prepared) < max(1, self._quorum):
            return self.decide(commits=False)
        for url, error in self._left_out(prepared):
            logger.warning("%s is left out of version %d: %s", url, self._version, error)
            if self._evict is not None:
                self._evict(url, error)
        with self._changed:
            self._phase = "record"
            self._changed.notify_all()
            members = [self._members[url] for url in prepared]
            recording = [one for one in members if one.state != "committed"]
            ended = ("recorded", "failed")
            self._changed.wait_for(
                lambda: all(one.state in ended for one in recording), self._window
            )
            have_recorded = all(one.state == "recorded" for one in recording)
        if have_recorded and write is not None:
            try:
                write()
            except (SyncError, OSError) as error:
                self._why_aborted = str(error)
                have_recorded = False
        return self.decide(commits=have_recorded)

    def decide(self, *, commits: bool) -> bool:
        """Let the engines that have prepared commit or not, unless it is decided; return which."""
        with self._changed:
            if self.is_committed is None:
                self.is_committed = commits
                if not commits:
                    self._why_aborted = self._why()
                self._phase = "commit" if commits else "abort"
                self._changed.notify_all()
            return self.is_committed

    def outcomes(self) -> dict[str, FleetOutcome]:
        """Return what is known of every engine, by url."""
        with self._changed:
            return {url: self._outcome(one) for url, one in self._members.items()}

    def _outcome(self, member: _Member) -> FleetOutcome:
        error = member.error or SyncError(_LATE)
        if self.is_committed and not member.takes_part and member.state != "committed":
            return FleetOutcome("left out", error)
        if member.state in ("committed", "aborted"):
            return FleetOutcome(member.state, None)
        if member.has_prepared:
            has_failed = bool(self.is_committed and error.error.get("engine_state"))
            return FleetOutcome("failed" if has_failed else "prepared", error)
        is_cut_short = error.error.get("type") == "GroupAborted"
        return FleetOutcome("aborted", None) if is_cut_short else FleetOutcome("refused", error)

    def _wait_for_prepared(self) -> list[str]:
        """Return the urls of those that have prepared in time."""
        deadline: float | None = None
        with self._changed:
            while True:
                states = {url: one.state for url, one in self._members.items()}
                ready = ("prepared", "committed")
                prepared = [url for url, state in states.items() if state in ready]
                failed = [url for url, state in states.items() if state == "failed"]
                is_lost = len(states) - len(failed) < self._quorum
                if is_lost or len(prepared) + len(failed) == len(states):
                    break
                if deadline is None and prepared and self._limit is not None:
                    deadline = time.monotonic() + self._limit
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
            if len(prepared) >= self._quorum:
                for url in prepared:
                    self._members[url].takes_part = True
            return prepared

    def _left_out(self, prepared: Sequence[str]) -> list[tuple[str, SyncError]]:
        late = SyncError("it was not ready in time")
        with self._changed:
            others = [(url, one) for url, one in self._members.items() if url not in prepared]
            return [(url, one.error or late) for url, one in others]


def check_outcomes(
    outcomes: Mapping[str, FleetOutcome],
    failures: Mapping[str, SyncError],
    reports: Mapping[str, SyncReport],
    *,
    is_committed: bool,
    evict: Evict | None,
) -> None:
    """Raise what follows from failures of a sync that engines were to commit together.

    Args:
        outcomes, failures, reports: By url.
        evict: Called for those that have not committed what the others have.

    Raises:
        GroupAborted: None has committed.
        PartialSyncError: Some of those that had prepared have not committed, or none has answered
            in time.
    """
    if not is_committed:
        found = {url: one.error for url, one in outcomes.items() if one.error is not None}
        raise GroupAborted({**found, **failures}, {})
    for url, one in outcomes.items():
        if one.error is None or one.state == "left out" or evict is None:
            continue
        try:
            evict(url, one.error)
        except Exception:  # the others have committed
            logger.exception("%s was not evicted", url)
    failures = {url: one for url, one in failures.items() if outcomes[url].state != "left out"}
    if not (failures or reports):
        taking_part = {url: one for url, one in outcomes.items() if one.state in _TAKES_PART}
        failures = {url: one.error or SyncError(_LATE) for url, one in taking_part.items()}
    if failures:
        raise PartialSyncError(failures, dict(reports))
