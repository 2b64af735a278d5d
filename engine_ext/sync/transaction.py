"""Commit, vote and undo: one sync on all ranks, or on none.

Every rank runs the same steps and exchanges votes three times: before the write, whether every rank
can write; after it, whether every rank did; and if some rank did not, after the undo. An exception
on one rank must not leave the others waiting, so each step turns what it raises into its vote.

The pass that writes is also the one that compares old values with those that were staged. If they
differ on some rank, every rank undoes what it wrote, and the sync is refused as it would have been
before the write.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from engine_ext.errors import BaseMismatch, CommitFailed, WriteUndone, as_delta_error, from_wire
from engine_ext.model import TracingError
from engine_ext.ranks import RankGroup
from engine_ext.sync.applier import Applier
from engine_ext.sync.staged import StagedPart, UndoLog

logger = logging.getLogger(__name__)


class Transaction:
    """Commits on one rank, together with the other ranks of the engine."""

    def __init__(self, applier: Applier, ranks: RankGroup) -> None:
        self._applier = applier
        self._ranks = ranks

    def agree(self, prepare: Callable[[], Sequence[StagedPart]]) -> Sequence[StagedPart]:
        """Agree with the other ranks that a sync can be written.

        `prepare` returns the staged and checked sync of this rank, which is returned.

        Raises:
            CommitFailed: `prepare` has changed the model on some rank. The engine is uncertain.
            DeltaError: some rank's `prepare` raised, or the briefs of the ranks contradict each
                other. Nothing was written. All ranks raise the same error.
        """
        staged: Sequence[StagedPart] = []
        changed: CommitFailed | None = None
        try:
            staged = prepare()
            vote: dict[str, Any] = {"brief": self._applier.brief(staged)}
        except TracingError as error:
            logger.exception("checking a sync has changed the model")
            changed = CommitFailed(
                f"checking the sync has changed the model on rank {self._ranks.rank}: {error}; "
                "generation answers 503 until a full sync commits"
            )
            vote = {"error": changed.to_wire()}
        except Exception as error:
            vote = {"error": as_delta_error(error).to_wire()}
        try:
            votes = self._ranks.all_gather(vote)
        except Exception as error:
            raise changed or error from None
        errors = [v["error"] for v in votes if "error" in v]
        if errors:  # a rank whose model has changed outweighs those that merely refuse
            raise from_wire(min(errors, key=lambda e: bool(e["engine_state"] == "unchanged")))
        self._applier.agree(staged, [v["brief"] for v in votes])
        return staged

    def write(
        self, staged: Sequence[StagedPart], given_up: Sequence[UndoLog] = ()
    ) -> UndoLog | None:
        """Write on every rank, or restore every rank.

        Args:
            given_up: undo logs of this rank that can not be used any more, see `Applier.write`.

        Returns:
            The undo log that rolls the sync back later, or None if the old values were not kept.

        Raises:
            BaseMismatch: some rank has found other old values than were staged, and none failed
                otherwise; all ranks have again what they had.
            WriteUndone: some rank failed; all ranks have the old values again.
            CommitFailed: some rank failed, and some rank could not be restored. The engine is
                uncertain.
            Exception: every rank has written, but this one could not record it.
        """
        votes = self._vote(lambda: self._applier.write(staged, given_up))
        if votes:
            failures = _texts(votes)
            undo_failures = _texts(self._vote(lambda: self._applier.undo(staged)))
            if not undo_failures:
                if all(vote["mismatch"] for vote in votes):
                    raise from_wire(votes[0]["mismatch"])
                raise WriteUndone(
                    f"the write failed, and every rank was restored: {failures[0]}", failed=failures
                )
            raise CommitFailed(
                f"the write failed and could not be undone, the weights are mixed: {failures[0]}; "
                f"{undo_failures[0]}; generation answers 503 until a full sync commits",
                failed=failures,
                not_undone=undo_failures,
            )
        return self._applier.finish(staged)

    def roll_back(self, logs: Sequence[UndoLog]) -> None:
        """Undo committed syncs on every rank, the last one first.

        Raises:
            CommitFailed: some rank failed. The engine is uncertain.
        """

        def restore() -> None:
            for log in reversed(logs):
                self._applier.roll_back(log)

        failures = _texts(self._vote(restore))
        if failures:
            raise CommitFailed(
                f"the rollback failed, the weights are mixed: {failures[0]}; generation answers "
                "503 until a full sync commits",
                failed=failures,
            )

    def _vote(self, step: Callable[[], None]) -> list[dict[str, Any]]:
        """Run a step and return the failures of all ranks.

        Each is its ``text``, and as ``mismatch`` the error if it is a BaseMismatch, else None.

        If the exchange fails, CommitFailed is raised: the other ranks might not have got this
        rank's vote either, so there is no further one.
        """
        failure: dict[str, Any] | None = None
        try:
            step()
        except Exception as error:
            logger.exception("a step of a commit failed")
            text = f"rank {self._ranks.rank}: {type(error).__name__}: {error}"
            mismatch = error.to_wire() if isinstance(error, BaseMismatch) else None
            failure = {"text": text, "mismatch": mismatch}
        try:
            return [vote for vote in self._ranks.all_gather(failure) if vote]
        except Exception as error:
            logger.exception("a vote of a commit failed")
            raise CommitFailed(
                f"rank {self._ranks.rank} did not get the votes of the other ranks: "
                f"{type(error).__name__}: {error}",
                failed=_texts([failure] if failure else []),
            ) from error


def _texts(failures: Sequence[dict[str, Any]]) -> list[str]:
    return [failure["text"] for failure in failures]
