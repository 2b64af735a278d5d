"""Decide whether the whole model can be sent over what an engine holds, and say so first."""

from __future__ import annotations

import logging
from typing import Any, Final

import msgspec

from delta_sender.encode.acked_state import AckedState
from delta_sender.publish.destination import Destination
from delta_sender.results import FullSyncRefused, SyncError
from delta_sender.run import Run
from engine_ext.ranks.status import EngineStatus

logger = logging.getLogger(__name__)

REQUESTED: Final = "requested"
_WAYS_OUT: Final = (
    "give the checkpoint that the engine holds as base; or, to replace its weights, pass "
    'full="allow" (--allow-full), or call sync_full() (--full)'
)
# The engine takes no full sync of it either.
_OTHER_CHECKPOINT: Final = (
    "give the tensors of the checkpoint that the engine was started with as base; these are not"
)


class FullSyncGuard:
    """Keeps a sender from replacing weights that are not its own.

    A full sync that nobody asked for replaces only weights that this run has sent, the base that a
    digest has proven, what an engine was started with if it had taken something of this run before,
    and what is there if the engine has no weights to lose.

    Args:
        allow: Whether anything can be replaced.
    """

    def __init__(
        self, destination: Destination, state: AckedState, run: Run, *, allow: bool
    ) -> None:
        self._destination, self._state, self._run, self._allow = destination, state, run, allow

    def pass_requested(self) -> tuple[str, int | None]:
        """Say what a full sync that was asked for replaces.

        Returns:
            Its reason, and the engine's version, if it says it.

        Raises:
            SyncError: As `status`.
        """
        return self._warn(REQUESTED, self.status())

    def status(self) -> EngineStatus | None:
        """Claim the engine, and return its status, which only this run can change from then on.

        An engine that was restarted has no owner: without the claim others could come in after the
        status, and be replaced unseen.

        Raises:
            RunConflict: Another run owns it.
            SyncError: It could not be asked.
        """
        self._destination.claim(self._run, takeover=False)
        return self._destination.status()

    def check(
        self, reason: str, status: EngineStatus | None, cause: SyncError | None = None
    ) -> tuple[str, int | None]:
        """Check that the model can be sent whole, and say what it replaces.

        Args:
            reason: Why no delta fits.
            status: The engine's, of `status`.
            cause: The refusal that led here.

        Returns:
            As `pass_requested`.

        Raises:
            FullSyncRefused: It must not be; the engine is unchanged.
        """
        if not self._state.plan.is_known and (status is None or status.version.loaded):
            return self._warn("first: the engine was started without weights", status)
        if not (self._allow or self._is_own(status)):
            raise self._refused(reason, status) from cause
        return self._warn(reason, status)

    def _is_own(self, status: EngineStatus | None) -> bool:
        """Return whether what the engine holds is this sender's to replace."""
        state = self._state
        if status is None:
            return state.is_known
        held = status.version
        if held.run == self._run.name or (held.loaded and state.was_sent):
            return True
        return state.is_known and held.digest == state.base_digest

    def _warn(self, reason: str, status: EngineStatus | None) -> tuple[str, int | None]:
        if status is None:
            return reason, None
        name, held = self._destination.name, described(status)
        logger.warning("%s: sending the whole model over %s; %s", name, held, reason)
        return reason, status.version.number

    def _refused(self, reason: str, status: EngineStatus | None) -> FullSyncRefused:
        digest = self._state.digest
        held = "unknown weights" if status is None else described(status)
        _, _, why = reason.partition(": ")
        ways_out = _WAYS_OUT
        if unlike := self._state.unlike:
            ways_out = f"{_OTHER_CHECKPOINT}: {unlike}"
        message = (
            f"{self._destination.name} holds {held}, which this sender has not sent, "
            f"and no delta leads from there ({why}). The engine is unchanged. What can be done: "
            f"{ways_out}"
        )
        facts = {} if status is None else _facts(status)
        base = None if digest is None else digest.hex()
        kind = {"type": "FullSyncRefused", "message": message, "engine_state": "unchanged"}
        return FullSyncRefused(message, 409, {**kind, **facts, "base_digest": base})


def _facts(status: EngineStatus) -> dict[str, Any]:
    version, owner = status.version, msgspec.to_builtins(status.owner)
    return {"version": version.number, "run": version.run, "owner": owner, "digest": version.digest}


def described(status: EngineStatus) -> str:
    """Return what an engine holds, in words, given its status."""
    version, by = status.version, status.health.changed_externally
    number = f"version {version.number}"
    held, notes = ("the weights that it was started with", [number])
    if not version.loaded:
        held, notes = number, []
    if version.run is not None:
        notes.append(f"of run {version.run}")
    notes.append(f"digest {version.digest}")
    if by is not None:
        notes.append(f"changed by {by}")
    return f"{held} ({', '.join(notes)})"
