"""Commit, vote and undo: one sync on all ranks, or on none.

Every rank runs the same steps and meets the others three times: before the write, to see that all
of them can; after it, to see that all of them did; and, if some did not, after the undo. Nothing a
rank does alone in between can leave it waiting for the others, so each step turns what it raises
into its vote.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from engine_ext.apply.applier import Applier
from engine_ext.apply.staged import StagedPart, UndoLog
from engine_ext.errors import CommitFailed, WriteUndone, as_delta_error, from_wire
from engine_ext.ranks import Ranks

logger = logging.getLogger(__name__)


class Transaction:
    """Commits on one rank, together with the others.

    Args:
        applier: writes this rank's weights.
        ranks: the engine's ranks.
    """

    def __init__(self, applier: Applier, ranks: Ranks) -> None:
        self._applier = applier
        self._ranks = ranks

    def agree(self, prepare: Callable[[], Sequence[StagedPart]]) -> Sequence[StagedPart]:
        """Meet the other ranks before a write.

        Args:
            prepare: finds and checks what is to be written on this rank.

        Raises:
            DeltaError: some rank's `prepare` raised, or what the ranks said of the sync does not
                fit together. All ranks raise alike; nothing was written.
        """
        staged: Sequence[StagedPart] = []
        try:
            staged = prepare()
            vote: dict[str, Any] = {"brief": self._applier.brief(staged)}
        except Exception as error:
            vote = {"error": as_delta_error(error).to_wire()}
        votes = self._ranks.all_gather(vote)
        errors = [v["error"] for v in votes if "error" in v]
        if errors:
            raise from_wire(errors[0])
        self._applier.agree(staged, [v["brief"] for v in votes])
        return staged

    def write(self, staged: Sequence[StagedPart]) -> UndoLog | None:
        """Write on every rank, or put every rank back.

        Returns:
            What takes the sync back later, where the old values were kept.

        Raises:
            WriteUndone: some rank failed; all ranks hold the old values again.
            CommitFailed: some rank failed, and some rank could not be put back.
        """
        failures = self._vote(lambda: self._applier.write(staged))
        if failures:
            undo_failures = self._vote(lambda: self._applier.undo(staged))
            if not undo_failures:
                raise WriteUndone(
                    f"the write failed, and every rank was put back: {failures[0]}",
                    failed=failures,
                )
            raise CommitFailed(
                f"the write failed and could not be taken back, weights are mixed: {failures[0]}; "
                f"{undo_failures[0]}; generation answers 503 until a full sync commits",
                failed=failures,
                not_undone=undo_failures,
            )
        try:
            return self._applier.finish(staged)
        except Exception as error:
            raise CommitFailed(
                f"the sync was written, but not recorded: {type(error).__name__}: {error}"
            ) from error

    def roll_back(self, logs: Sequence[UndoLog]) -> None:
        """Take committed syncs back on every rank, the last one first.

        Raises:
            CommitFailed: some rank failed half-way.
        """

        def restore() -> None:
            for log in reversed(logs):
                self._applier.roll_back(log)

        failures = self._vote(restore)
        if failures:
            raise CommitFailed(
                f"the rollback failed, weights are mixed: {failures[0]}; generation answers 503 "
                "until a full sync commits",
                failed=failures,
            )

    def _vote(self, step: Callable[[], None]) -> list[str]:
        """Do a step and hear from every rank who failed to.

        Raises:
            CommitFailed: the others cannot be heard. They may not hear this rank either, so
                there is no further vote.
        """
        failure = None
        try:
            step()
        except Exception as error:
            logger.exception("a step of a commit failed")
            failure = f"rank {self._ranks.rank}: {type(error).__name__}: {error}"
        try:
            return [f for f in self._ranks.all_gather(failure) if f]
        except Exception as error:
            logger.exception("a vote of a commit failed")
            raise CommitFailed(
                f"rank {self._ranks.rank} cannot hear the other ranks: "
                f"{type(error).__name__}: {error}",
                failed=[failure] if failure else [],
            ) from error
