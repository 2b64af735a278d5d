"""What a staged delta will write on this rank, and how to take it back.

A `Write` is made while staging (see `engine_ext.apply.stager`): flat checkpoint indices have become
offsets in live memory, the new values have the live dtype, and old values that are to be checked
are gathered, so that the commit has nothing left to compute. Values move as integers throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_ext.placement.live_elements import DeviceElements, HostElements, LiveElements
from engine_ext.placement.targets import Target
from engine_ext.wire import Manifest, ParamDelta
from engine_ext.wire.digest import Digest

# Elements that are staged and written at a time by one thread. On the CPU the temporaries stay in
# a core's cache, and the threads' shares come out even; elsewhere each piece costs some launches.
_HOST_SPAN = 1 << 16
_DEVICE_SPAN = 1 << 22
# Of a dense param that lies as it came nothing is gathered, so that there are no temporaries.
_RUN_SPAN = 1 << 20


@dataclass(slots=True)
class Write:
    """Elements of one live tensor, with their old and new bits.

    Attributes:
        place: where they lie.
        new: their new bits, in the live dtype.
        keep: whether the old ones are kept.
        old: in host memory; None until `remember`, at the latest until `put`.
    """

    place: LiveElements
    new: Any
    keep: bool = True
    old: Any = None

    @property
    def undo_bytes(self) -> int:
        """Host memory that it takes to know the old bits."""
        return int(self.new.nbytes) + self.place.nbytes if self.keep else 0

    def remember(self) -> None:
        """Gather the old bits, if they are to be kept and are not yet."""
        if self.keep and self.old is None:
            self.old = self.place.read()

    def unchanged(self) -> bool:
        """Whether live memory still holds the old bits, where these were remembered."""
        return self.old is None or self.place.holds(self.old)

    def holds(self) -> bool:
        """Whether live memory holds the new bits."""
        return self.place.holds(self.new)

    def put(self) -> None:
        """Write the new bits."""
        place = self.place
        if self.keep and self.old is None and isinstance(place, (HostElements, DeviceElements)):
            self.old = place.swap(self.new)
        else:
            self.remember()
            place.put(self.new)

    def undo(self) -> None:
        """Write the old bits; before `put` that may be nothing to do."""
        if self.old is not None:
            self.place.put(self.old)


@dataclass(slots=True)
class StagedParam:
    """One param of a part, or some elements of it, ready to be written on this rank.

    Attributes:
        delta: the decoded param.
        writes: what is written here; empty where this rank holds none of its elements.
        counted: elements of the delta that this rank counts (see `engine_ext.placement.ownership`).
        change: digest of those elements, new minus old; in a full sync of the new alone.
        replaced: in a full sync that of the old, where a part tells how much they change.
        replicas: for each set of ranks that hold the same elements, the digest of this rank's.
    """

    delta: ParamDelta
    writes: list[Write] = field(default_factory=list)
    counted: int = 0
    change: Digest = Digest.ZERO
    replaced: Digest = Digest.ZERO
    replicas: dict[tuple[int, ...], Digest] = field(default_factory=dict)

    def absorb(self, other: StagedParam) -> None:
        """Add other elements of the same param."""
        self.writes += other.writes
        self.counted += other.counted
        if other.change is not Digest.ZERO:
            self.change += other.change
            self.replaced += other.replaced
        for ranks, change in other.replicas.items():
            self.replicas[ranks] = self.replicas.get(ranks, Digest.ZERO) + change


def spans(delta: ParamDelta, targets: Sequence[Target]) -> list[tuple[int, int]]:
    """The pieces in which a param is staged: ranges of its values."""
    if not targets:
        return []
    if delta.indices is None and all(target.is_run for target in targets):
        step = _RUN_SPAN
    else:
        step = _DEVICE_SPAN if targets[0].host is None else _HOST_SPAN
    return [(start, min(start + step, delta.nnz)) for start in range(0, delta.nnz, step)]


@dataclass(slots=True)
class StagedPart:
    """A part, ready to be written on this rank.

    Attributes:
        manifest: what the part says.
        params: its params, in the part's order.
    """

    manifest: Manifest
    params: list[StagedParam]

    @property
    def nnz(self) -> int:
        """Elements of the delta, on whatever rank."""
        return sum(param.delta.nnz for param in self.params)

    @property
    def names(self) -> set[str]:
        return {param.delta.name for param in self.params}

    @property
    def writes(self) -> list[Write]:
        return [write for param in self.params for write in param.writes]


@dataclass(slots=True)
class UndoLog:
    """What takes a committed sync back on this rank.

    Attributes:
        writes: places, and their old bits.
        changes: by how much each tensor's digest had moved.
        live: names of the live tensors that were written to.
    """

    writes: list[tuple[LiveElements, Any]]
    changes: dict[str, Digest]
    live: frozenset[str] = frozenset()

    @property
    def nbytes(self) -> int:
        """Host memory that it takes."""
        return sum(int(old.nbytes) + place.nbytes for place, old in self.writes)
