"""The interface between the steps of a sync and the code that writes the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from engine_ext.format import DecodedPart, Digest, UnpackedPart, expand_part
from engine_ext.placement import Plan
from engine_ext.sync.staged import StagedPart, UndoLog
from engine_ext.sync.unwritten import Unwritten


class Scan(NamedTuple):
    """What a rank has found in live memory.

    Attributes:
        digests: as `Applier.digests`.
        corrupted: the tensors that have moved, or whose modules are not what processing makes.
        copies: by tensor and box of elements the digests, in hex, of the copies on this rank of
            what is held more than once; see `engine_ext.placement.plan.Plan.scan_all`.
    """

    digests: dict[str, Digest]
    corrupted: list[str]
    copies: dict[tuple[str, str], set[str]]


class Applier(Protocol):
    """Stages and writes syncs on one rank.

    `engine_ext.sync.delta_applier.DeltaApplier` implements it for a model whose placement is
    certified. `engine_ext.sync.initial_sync.InitialSyncApplier`, for a model without known weights,
    inherits from it: the methods that return something here are those of an applier that knows no
    placement.
    A sync goes through `stage` (once per part), `check_sync`, `prepare` until it is done,
    `check_base`, `rank_summary`, `agree` and `write`, then through `finish`, or through `undo` if
    some rank's write failed. Whatever a step before `write` raises refuses the sync and leaves the
    model unchanged, except a `TracingError` of `check_sync`: its dry run of the engine's loader has
    changed the model. A BaseMismatch of `write` refuses it, too, once every rank has undone its
    writes; the staged sync is of no use then.

    Attributes:
        name: the apply mode in answers and metrics.
        copies: the digest of the elements that this rank holds and another rank counts, for the
            tensors where it is known: scrubbing adds it.
    """

    name: str
    copies: dict[str, Digest]

    @property
    def plan(self) -> Plan | None:
        """The certified placement; None before the initial sync."""

    @property
    def digests(self) -> Mapping[str, Digest]:
        """The digest of the elements that this rank counts, by checkpoint tensor."""

    @property
    def digest(self) -> Digest:
        """The sum of `digests`."""

    def stage(self, part: DecodedPart) -> StagedPart:
        """Check a part and prepare its writes; can run in several threads at once."""

    def stage_unpacked(self, part: UnpackedPart) -> StagedPart:
        """Do the same with a part whose positions are not expanded."""
        return self.stage(expand_part(part))

    def check_sync(self, staged: Sequence[StagedPart], *, full: bool) -> None:
        """Check what only all parts of a sync together show on this rank."""

    def prepare(self, staged: Sequence[StagedPart], *, full: bool) -> bool:
        """Do a share of what must precede the commit; return whether all is done."""
        return True

    def is_prepared(self, staged: Sequence[StagedPart]) -> bool:
        """Return whether `prepare` is done with a sync."""
        return True

    def scan(self) -> Scan:
        """Read the weights in live memory; those of tensors that have moved are left out."""

    def search_again(self) -> bool:
        """Refuse weights that the engine has copied since start-up.

        An engine can make some when it first generates. Return whether it could be searched.
        """
        return True

    def has_grown(self) -> bool:
        """Return whether modules have attributes that they lacked at the last search."""
        return False

    def moved(self) -> list[str]:
        """Return the tensors that are not where they were when they were placed, sorted.

        Those of the checkpoint, or live ones that hold none of it.
        """
        return []

    def check_rollback(self, logs: Sequence[UndoLog]) -> None:
        """Check that committed syncs can be undone.

        Raises:
            BaseMismatch: something has moved; the names are in ``moved``.
            NotUpdatable: the engine has come to keep copies of what they have written.
        """

    def place_again(self) -> None:
        """Let a ``full`` sync be written to where the live tensors are now.

        Must come before the sync's first part is staged.

        Raises:
            NotUpdatable: a tensor cannot be followed there. Nothing was changed.
            TracingError: the dry run of the engine's loader has changed the model.
        """
        return

    def check_base(self, staged: Sequence[StagedPart]) -> None:
        """Check old values read while staging, as far as `write` does not."""

    def rank_summary(self, staged: Sequence[StagedPart]) -> dict[str, Any]:
        """Return what the other ranks need to know of this rank's share of a sync, as JSON."""

    def agree(self, staged: Sequence[StagedPart], summaries: Sequence[dict[str, Any]]) -> None:
        """Check a sync by the summaries of all ranks; every rank reaches the same result."""

    def write(self, staged: Sequence[StagedPart], given_up: Sequence[UndoLog] = ()) -> None:
        """Write a sync. If it raises, some elements might have been written.

        Args:
            given_up: undo logs that are of no use any more; it can keep old values in their memory.

        Raises:
            BaseMismatch: an old value read while staging is not in live memory any more.
        """

    def undo(self, staged: Sequence[StagedPart]) -> None:
        """Write the old values back after `write` succeeded or failed."""

    def finish(self, staged: Sequence[StagedPart]) -> UndoLog | None:
        """Record a written sync; return what rolls it back, or None if that was not kept."""

    def roll_back(self, log: UndoLog) -> None:
        """Restore the weights and digests from before a committed sync."""

    def unwritten(self) -> Unwritten:
        """Copy what a full sync does not write, before the model's memory is discarded."""

    def forget(self) -> None:
        """Learn that something else than a sync has changed the weights, or that one has failed."""
        return

    def describe(self) -> dict[str, Any]:
        """Return the apply mode, certification summary and digest of this rank, as JSON."""
