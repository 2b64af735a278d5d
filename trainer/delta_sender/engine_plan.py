"""Read an engine's plan: which tensors it takes, and which of them its digest covers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from delta_sender.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The part of an engine's plan that the sender needs.

    Attributes:
        names: Every name that a full sync sends; empty until a plan was asked for.
        digested: The names that the engine's digest covers.
        ignored: Tensors of the snapshot that the engine does not hold.
        is_known: Whether the engine had a plan.
    """

    names: tuple[str, ...] = ()
    digested: frozenset[str] = frozenset()
    ignored: frozenset[str] = frozenset()
    is_known: bool = False

    @classmethod
    def read(cls, answer: Any, snapshot: Snapshot) -> EnginePlan:
        """Match a plan with the snapshot.

        A tensor of the snapshot that the plan does not name is sent nevertheless, so that the
        engine refuses it by name, unless it is tied to one that the plan names.

        Args:
            answer: For each rank a list of rows, one per checkpoint tensor; None if the engine has
                no plan.
            snapshot: The sender's snapshot.
        """
        rows = [row for rank in answer or [] for row in rank]
        held = {row["name"] for row in rows if row["status"] != "ignored"}
        known = {snapshot.key(row["name"]) for row in rows}
        every = [*snapshot, *snapshot.tied]
        names = tuple(n for n in every if n in held or (n in snapshot and n not in known))
        return cls(
            names,
            frozenset(row["name"] for row in rows if row["digested"]),
            frozenset(snapshot).difference(map(snapshot.key, names)),
            answer is not None,
        )

    @property
    def is_fully_digested(self) -> bool:
        """Whether the digest covers every tensor that is sent."""
        return self.digested == {*self.names}

    @property
    def missing(self) -> list[str]:
        """Names that the engine's digest covers and the snapshot does not hold."""
        return sorted(self.digested.difference(self.names))

    def counts(self, name: str) -> bool:
        """Return whether a tensor counts in a part's digest; without a plan, every tensor does."""
        return not self.is_known or name in self.digested
