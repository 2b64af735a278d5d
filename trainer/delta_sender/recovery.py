"""Choose what to send after an answer was lost or a sync was refused."""

from __future__ import annotations

import logging
from dataclasses import replace

from delta_sender.acked_state import AckedState
from delta_sender.destination import Destination
from delta_sender.encoding_policy import EncodingPolicy
from delta_sender.results import SyncError
from delta_sender.sync_round import Attempt, SyncRound

logger = logging.getLogger(__name__)


class Recovery:
    """The attempts at one round with one destination.

    If an earlier answer was lost, the destination is asked first whether it has committed. After a
    refusal, in this order:

    1. Its old values are not those of the differences: the new values are sent, once, if a digest
       proves all that they lead to.
    2. It is at another version, holds other bytes or is ``uncertain``: the delta log is replayed,
       if it is behind in it; otherwise the whole model is sent, once.
    3. It has no plan yet, and names tensors that it ignores: the model is sent without them.
    4. It refuses differences (it casts a tensor, or writes by another way): values are sent, and
       from then on if it takes them.

    If it `has_log`, what the destination lacks may be in a delta log.
    """

    def __init__(
        self, state: AckedState, destination: Destination, sync_round: SyncRound, *, has_log: bool
    ) -> None:
        self._state, self._destination, self._round = state, destination, sync_round
        self._may_catch_up = has_log

    def first(self, policy: EncodingPolicy) -> Attempt:
        """Return the first attempt, after resolving an unknown outcome.

        Raises:
            SyncError: The destination could not be asked.
        """
        self._state.forget_ignored()
        unknown = self._state.unknown_outcome
        if unknown is not None and unknown.posted is not None:
            status = self._destination.status()
            with self._round.reading():
                self._state.resolve(status)
        full, version = self._round.full or self._state.needs_full, self._round.version
        if full or not self._state.is_proven:  # that another sync led there would not be noticed
            version = max(version, self._destination.highest_posted + 1)
        return Attempt(version, full, policy, policy)

    def after(self, attempt: Attempt, error: SyncError) -> Attempt | None:
        """Return the attempt after one that has failed; None if nothing else can help."""
        # An engine without a plan finds out by a full sync what it ignores.
        if self._state.note_ignored(error.error.get("ignored", ())):
            return attempt
        if attempt.full:
            return None
        policy, kind = attempt.next_policy, error.error.get("type")
        can_overwrite = policy.may_send_differences and not attempt.policy.any_base
        # A digest has shown that the old values are not the snapshot's.
        has_other_values = kind == "BaseMismatch" and "actual" in error.error
        if has_other_values and can_overwrite and self._state.is_proven:
            logger.warning("sending new values, whatever the old ones are, after: %s", error)
            return replace(attempt, policy=policy.over_any_base())
        is_uncertain = error.error.get("engine_state") == "uncertain"
        if is_uncertain or kind in ("VersionConflict", "BaseMismatch"):
            return self._caught_up_or_full(attempt, error.error.get("actual"))
        if attempt.policy.may_send_differences and kind == "NotUpdatable":
            logger.warning("sending values in place of differences, after: %s", error)
            values = policy.values_only()
            return replace(attempt, policy=values, next_policy=values)
        return None

    def _caught_up_or_full(self, attempt: Attempt, actual: object) -> Attempt:
        version = actual if isinstance(actual, int) else None
        catches_up, self._may_catch_up = self._may_catch_up, False
        if catches_up and version is not None and self._is_caught_up(version):
            # By now the log may hold this round too, as values.
            return replace(attempt, policy=attempt.next_policy.values_only())
        above = attempt.version if version is None else max(attempt.version, version + 1)
        return replace(attempt, version=above, full=True, policy=attempt.next_policy)

    def _is_caught_up(self, actual: int) -> bool:
        """Return whether the delta log has led the destination to where the round starts."""
        state = self._state
        state.plan_is_current = False  # it may be another engine by now
        try:
            if actual > state.version:  # it has restarted, and replayed the log
                status = self._destination.status()
                with self._round.reading():
                    return state.resolve_latest(status)
            return (self._destination.catch_up() or 0) >= state.version
        except SyncError as failure:
            logger.warning("the delta log was not replayed: %s", failure)
            return False
