"""The protocol between a transaction and what writes into the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from engine_ext.apply.staged import StagedPart, UndoLog
from engine_ext.placement.plan import Plan
from engine_ext.wire import Part
from engine_ext.wire.digest import Digest


class Applier(Protocol):
    """What stages and writes syncs on one rank; see `engine_ext.apply.scatter.ScatterApplier`.

    Attributes:
        name: as the answers call it.
        plan: what can be updated; None while nothing is known.
        digests: of what this rank counts, by tensor.
        digest: the sum of these.
    """

    name: str
    digests: dict[str, Digest]

    @property
    def plan(self) -> Plan | None: ...

    @property
    def digest(self) -> Digest: ...

    def stage(self, part: Part) -> StagedPart: ...

    def check_sync(self, staged: Sequence[StagedPart], *, full: bool) -> None: ...

    def check_in_place(self) -> None: ...

    def check_base(self, staged: Sequence[StagedPart]) -> None: ...

    def brief(self, staged: Sequence[StagedPart]) -> dict[str, Any]: ...

    def agree(self, staged: Sequence[StagedPart], briefs: Sequence[dict[str, Any]]) -> None: ...

    def write(self, staged: Sequence[StagedPart]) -> None: ...

    def undo(self, staged: Sequence[StagedPart]) -> None: ...

    def finish(self, staged: Sequence[StagedPart]) -> UndoLog | None: ...

    def roll_back(self, log: UndoLog) -> None: ...

    def describe(self) -> dict[str, Any]: ...
