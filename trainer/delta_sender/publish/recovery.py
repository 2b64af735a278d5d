"""Choose what to send after an answer was lost or a sync was refused."""

from __future__ import annotations

import logging
from dataclasses import replace

from delta_sender.encode.acked_state import AckedState
from delta_sender.encode.encoding_policy import EncodingPolicy
from delta_sender.encode.sync_round import Attempt, SyncRound
from delta_sender.publish.destination import Destination
from delta_sender.publish.full_sync import REQUESTED, FullSyncGuard
from delta_sender.results import SyncError
from engine_ext.ranks.status import EngineStatus

logger = logging.getLogger(__name__)


class Recovery:
    """The attempts at one round with one destination.

    If an earlier answer was lost, the destination is asked first whether it has committed. After a
    refusal, in this order:

    1. Its old values are not those of the differences: the new values are sent, once, if a digest
       proves all that they lead to.
    2. It is at another version, holds other bytes or is ``uncertain``: the delta log is replayed,
       if it is behind in it. If its digest is that of what it should hold, whatever its version,
       the changes are sent from there; if it is that of what the round leads to, none. Otherwise
       the whole model is sent, once, if `FullSyncGuard` lets it.
    3. It has no plan yet, and names tensors that it ignores: the model is sent without them.
    4. It refuses differences (it casts a tensor, or writes by another way): values are sent, and
       from then on if it takes them.
    5. The number was used before in this run: the same is sent under the next one.

    If it `has_log`, what the destination lacks might be in a delta log. Without a `guard`, the
    model can always be sent whole.
    """

    def __init__(
        self,
        state: AckedState,
        destination: Destination,
        sync_round: SyncRound,
        guard: FullSyncGuard | None,
        *,
        has_log: bool,
    ) -> None:
        self._state, self._destination, self._round = state, destination, sync_round
        self._guard, self._may_catch_up = guard, has_log
        self._may_look = self._may_renumber = True

    def first(self, policy: EncodingPolicy) -> Attempt:
        """Return the first attempt, after resolving an unknown outcome.

        Raises:
            FullSyncRefused: Only a full sync would help, and it would replace others' weights.
            SyncError: The destination could not be asked.
        """
        state = self._state
        state.forget_ignored()
        unknown = state.unknown_outcome
        if unknown is not None and unknown.posted is not None:
            status = self._destination.status()
            with self._round.reading():
                state.resolve(status)
        full, version = self._round.full or state.needs_full, self._round.version
        if full or not state.is_proven:  # that another sync led there would not be noticed
            version = max(version, self._destination.highest_posted + 1)
        attempt = Attempt(max(version, state.version + 1), False, policy, policy)
        if self._round.full:
            return self._full(attempt, *self._requested())
        if state.full_reason is not None:
            return self._full(attempt, *self._checked(state.full_reason))
        found, state.found_other = state.found_other, None
        if found is None:
            return attempt
        # Do what follows the answer that the destination would give.
        return self.after(attempt, _refusal(state, found)) or attempt

    def after(self, attempt: Attempt, error: SyncError) -> Attempt | None:
        """Return the attempt after one that has failed; None if nothing else can help.

        Raises:
            FullSyncRefused: See `first`.
        """
        # An engine without a plan finds out by a full sync what it ignores.
        if self._state.note_ignored(error.error.get("ignored", ())):
            return attempt
        policy, kind = attempt.next_policy, error.error.get("type")
        highest = error.error.get("highest")
        if kind == "VersionConflict" and isinstance(highest, int) and self._may_renumber:
            is_at_base = attempt.full or error.error.get("actual") == self._state.version
            if is_at_base and attempt.version <= highest:
                self._may_renumber = False
                return replace(attempt, version=highest + 1)
        if attempt.full:
            return None
        can_overwrite = policy.may_send_differences and not attempt.policy.any_base
        # A digest has shown that the old values are not the snapshot's.
        has_other_values = kind == "BaseMismatch" and "actual" in error.error
        if has_other_values and can_overwrite and self._state.is_proven:
            logger.warning("sending new values, whatever the old ones are, after: %s", error)
            return replace(attempt, policy=policy.over_any_base())
        is_uncertain = error.error.get("engine_state") == "uncertain"
        if is_uncertain or kind in ("VersionConflict", "BaseMismatch"):
            return self._caught_up_or_full(attempt, error, is_uncertain=is_uncertain)
        if attempt.policy.may_send_differences and kind == "NotUpdatable":
            logger.warning("sending values in place of differences, after: %s", error)
            values = policy.values_only()
            return replace(attempt, policy=values, next_policy=values)
        return None

    def _caught_up_or_full(
        self, attempt: Attempt, error: SyncError, *, is_uncertain: bool
    ) -> Attempt:
        actual = error.error.get("actual")
        version = actual if isinstance(actual, int) else None
        catches_up, self._may_catch_up = self._may_catch_up, False
        if catches_up and version is not None and self._is_caught_up(version):
            # By now the log can hold this round too, as values.
            return replace(attempt, policy=attempt.next_policy.values_only())
        above = attempt.version if version is None else max(attempt.version, version + 1)
        attempt = replace(attempt, version=above)
        if self._guard is None:
            return self._full(attempt, _why(self._state, None, error, is_uncertain), None)
        status = self._guard.status()
        is_other = version not in (None, self._state.version) or not self._state.is_known
        looks, self._may_look = self._may_look and is_other, False
        if looks and (self._is_at_base(status) or self._is_at_target(status)):
            return replace(attempt, version=max(attempt.version, self._state.version + 1))
        reason = _why(self._state, status, error, is_uncertain)
        return self._full(attempt, *self._guard.check(reason, status, error))

    def _requested(self) -> tuple[str, int | None]:
        return (REQUESTED, None) if self._guard is None else self._guard.pass_requested()

    def _checked(self, reason: str) -> tuple[str, int | None]:
        if self._guard is None:
            return reason, None
        return self._guard.check(reason, self._guard.status())

    def _full(self, attempt: Attempt, reason: str, replaced: int | None) -> Attempt:
        return replace(
            attempt, full=True, policy=attempt.next_policy, reason=reason, replaced=replaced
        )

    def _is_at_base(self, status: EngineStatus | None) -> bool:
        with self._round.reading():
            found = self._state.find_base(status, self._round.run.name)
        self._state.found_other = None  # it is asked again before anything else is decided
        return found

    def _is_at_target(self, status: EngineStatus | None) -> bool:
        """Return whether the destination holds what the round leads to: it is sent again."""
        if self._state.is_known:
            return False
        for _ in self._round.tensors():
            pass  # until all is read
        with self._round.reading():
            return self._state.find_target(status, self._round.run.name, self._round.changes)

    def _is_caught_up(self, actual: int) -> bool:
        """Return whether the delta log has led the destination to where the round starts."""
        state = self._state
        state.plan_is_current = False  # it might be another engine by now
        try:
            if actual > state.version:  # it has restarted, and replayed the log
                status = self._destination.status()
                with self._round.reading():
                    return state.resolve_latest(status)
            reached = (self._destination.catch_up() or 0) >= state.version
            return reached and (state.is_known or self._is_at_base(self._destination.status()))
        except SyncError as failure:
            logger.warning("the delta log was not replayed: %s", failure)
            return False


def _refusal(state: AckedState, status: EngineStatus) -> SyncError:
    """Return how a destination with this status refuses a delta, as it holds something else."""
    version, digest = status.version.number, status.version.digest
    if state.digest is not None and digest == state.digest.hex():
        text = "no digest covers some tensors, so what the engine holds there is not known"
        facts = {"type": "VersionConflict", "expected": state.version, "actual": version}
    elif version != state.version:
        text = f"the engine is at version {version}, not at {state.version}"
        facts = {"type": "VersionConflict", "expected": state.version, "actual": version}
    else:
        text = f"the engine's digest is {digest}, not {state.digest}"
        facts = {"type": "BaseMismatch", "actual": digest}
    return SyncError(text, 409, {**facts, "engine_state": "unchanged"})


def _why(
    state: AckedState, status: EngineStatus | None, error: SyncError, is_uncertain: bool
) -> str:
    """Return why no delta fits, given the engine's status and its refusal of one."""
    actual = error.error.get("actual")
    if is_uncertain:
        return "uncertain: a write failed half-way"
    if status is not None and (by := status.health.changed_externally) is not None:
        return f"changed: {by} changed the weights"
    if error.error.get("type") == "BaseMismatch":
        return "changed: the engine holds other weights than those the changes start from"
    if actual == state.version:
        return f"changed: version {actual} is there, but not known to be the one of the changes"
    if status is not None and status.version.loaded:
        return f"restarted: the engine is at version {actual}, not at {state.version}"
    return f"behind: the engine is at version {actual}, not at {state.version}"
