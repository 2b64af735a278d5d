"""Define where parts go: to an engine, into a delta log, or nowhere (a dry run)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from delta_sender.publish.bandwidth import LinkSpeed
from delta_sender.results import SyncError
from delta_sender.run import Run
from engine_ext.ranks.status import EngineStatus


class Destination(Protocol):
    """A receiver of parts. The defaults here are those of one that has no plan and no status.

    Calls that talk to the receiver raise `SyncError`. `MultiSender` takes a function that makes
    destinations as `connect`.

    Attributes:
        name: What messages call it.
        speed: Speed of the link to it, estimated from the deliveries.
        highest_posted: Highest version whose last part was delivered, whether or not an answer
            came; 0 before that. Its number is not used for other weights.
        at_once: How many deliveries it takes at once. The last part of a sync is delivered alone,
            after all others were taken; with 1, all are delivered in order.
        last_number: Highest number in use where versions are kept, refused ones included.
    """

    name: str = "the engine"
    speed: LinkSpeed
    highest_posted: int
    at_once: int = 1
    last_number: int = 0

    def close(self) -> None:
        """Release connections and files; called once, after the last sync."""
        return None

    def claim(self, run: Run, *, takeover: bool) -> dict[str, Any]:
        """Make a run the receiver's owner; called before the first sync, and before full ones.

        The run can own it already.

        Args:
            takeover: Whether the run that owns it is fenced for good, if it is another one.

        Returns:
            The receiver's answer: "highest", the highest number that this run has committed, or
            None. {} if it knows no runs: it then takes parts of anyone.

        Raises:
            RunConflict: Another run owns it, or has fenced this one.
        """
        return {}

    def release(self, run: Run) -> None:
        """Drop what is staged of a run, and let others claim the receiver; called before `close`.

        Takes two seconds at most, and raises nothing.
        """
        return None

    def stop(self) -> None:
        """Deliver nothing any more: calls of `deliver` that wait or begin raise `SyncError`."""
        return None

    def announce(self, reason: str | None) -> None:
        """Note why the model is sent whole by the parts that follow; None: they are a delta."""
        return None

    def plan(self) -> Any:
        """Return for each rank a list of rows, one per checkpoint tensor; None without a plan.

        A row has "name", "status" ("ignored": not sent) and "digested" (the digest covers it).
        Without a plan every tensor is sent, and no digest is kept.
        """
        return None

    def status(self) -> EngineStatus | None:
        """Return the receiver's ``/delta_status``.

        It is asked for before the first sync, before every full one, and after an answer was lost.
        None means that it has none; a sync of unknown outcome then counts as not committed.
        """
        return None

    def may_hold(self, version: int) -> bool:
        """Return whether a version that was not acknowledged can be there all the same."""
        return False

    def catch_up(self) -> int | None:
        """Replay the delta log in the receiver; return its version then, None if it has no log."""
        return None

    def take_step(self, action: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Take one step of a commit of several receivers; return the answer.

        The receiver has staged all that was delivered, and committed nothing of it.

        Args:
            action: ``prepare``, ``record``, ``commit`` or ``abort``.
            fields: Of the request, see ``POST /delta_commit``.

        Raises:
            SyncError: It was refused, or no answer came.
        """
        raise SyncError(f"{self.name} does not commit together with others")

    def deliver(self, body: bytes, version: int, part: int, last: bool) -> dict[str, Any]:
        """Deliver one part; called from threads of its own, `at_once` of them at most.

        `highest_posted` must be at least `version` before the last part leaves: the receiver can
        commit then, whatever becomes of the answer.

        With the option ``commit="all_or_none"`` the receiver must hold what the last part
        completes, until `take_step` commits it. A destination that cannot do this refuses the
        option where it is made.

        Returns:
            The answer: "status", ``committed`` or ``already_applied`` if the last part made the
            receiver commit, and ``staged`` if it holds all; and "digest" if it keeps one (hex),
            which is compared with the sender's.

        Raises:
            SyncError: The part was not taken, or no answer came. One whose `error` has an
                "engine_state" counts as the receiver's word that it did not commit; if an earlier
                try of the same part might have arrived, `unanswered` must be set.
        """
