"""What staging makes of a part on this rank, and what undoes a committed sync.

A part becomes a `StagedPart` of `StagedParam`s, and these a list of `Write`s: flat checkpoint
indices have become offsets in live memory, the new values have the live dtype, and the old values
that the commit checks are read. `engine_ext.sync.stager` makes them. Values are integers (bit
patterns) throughout.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_ext.errors import BaseMismatch
from engine_ext.format import Digest, Manifest, ParamDelta
from engine_ext.kernels import ElementTable
from engine_ext.placement import (
    DeviceBatch,
    DeviceRows,
    HostElements,
    Lease,
    LiveElements,
    WholeBox,
)
from engine_ext.sync.digest_table import Sums, total_of

CHANGED: Final = "a weight changed between staging and commit; send the sync again"


def copies_differ(name: str) -> BaseMismatch:
    """Return the error that a rank's copies of a tensor's elements hold other bits."""
    return BaseMismatch(
        f"{name}: the copies of it on this rank differ; send a full sync", tensor=name
    )


class Write(msgspec.Struct, eq=False, gc=False):
    """Elements of live memory, with their old and new bits.

    Attributes:
        new: the new bits, in the live dtype; those of elements on devices are there, or in pinned
            host memory.
        live: the live tensor's name; empty if the engine's own processing computes it, or if
            `elements` are of many and have their names.
        keep: whether the old bits are kept for an undo.
        old: the old bits, in host memory; None until `read_old` or `put`.
        batch: of elements on devices, what has read `old` if that is known, and what writes.
        digest: of `old`, if it is a box on a device.
        lease: of the memory of `new`, see `engine_ext.placement.device_memory`.
        memory: where the old bits of a box can be kept.
        written: whether `undo` must restore the old bits.
    """

    elements: LiveElements
    new: Any
    live: str
    keep: bool = True
    old: Any = None
    memory: Any = None
    batch: DeviceBatch | None = None
    digest: Digest | None = None
    lease: Lease | None = None
    written: bool = False

    @property
    def live_names(self) -> Sequence[str]:
        """The names of the live tensors."""
        elements = self.elements
        return elements.names if isinstance(elements, DeviceRows) else (self.live,)

    @property
    def comparable(self) -> bool:
        """Whether `put` can compare the old bits in the pass that writes."""
        known = self.old is not None and isinstance(self.elements, HostElements)
        return known and bool(self.live)

    @property
    def undo_bytes(self) -> int:
        """Host memory that the undo takes."""
        return int(self.new.nbytes) + self.elements.nbytes if self.keep else 0

    def read_old(self) -> None:
        """Read the old bits, unless they are known or not to be kept."""
        if self.keep and self.old is None:
            memory, self.memory = self.memory, None
            box = self.elements
            self.old = box.read(memory) if isinstance(box, WholeBox) else box.read()

    def unchanged(self) -> bool:
        """Return whether live memory still holds the old bits, as far as they are known."""
        return self.old is None or self.elements.holds(self.old)

    def seems_unchanged(self) -> bool:
        """Like `unchanged`, by a sample if `put` can compare the old bits."""
        if self.comparable and isinstance(self.elements, HostElements):
            return self.elements.seems_to_hold(self.old)
        return self.unchanged()

    def holds(self) -> bool:
        """Return whether live memory holds the new bits."""
        return self.elements.holds(self.new)

    def put(self, compares: bool = False) -> None:
        """Write the new bits; read the old ones first if they are to be kept.

        Args:
            compares: whether known old bits are compared with those that are overwritten, if they
                are `comparable`. Another write of the sync must not be to the same memory then.

        Raises:
            BaseMismatch: other old bits were there. The new ones are written; `undo` restores what
                was there.
        """
        elements = self.elements
        if compares and self.comparable and isinstance(elements, HostElements):
            self.written = True
            if not elements.swap_checked(self.new, self.old):
                raise BaseMismatch(CHANGED)
            return
        reads = self.keep and self.old is None
        if reads and isinstance(elements, HostElements):
            self.old = elements.swap(self.new)
            self.written = True
            return
        if reads and isinstance(elements, WholeBox) and elements.swaps(self.new):
            memory, self.memory = self.memory, None
            self.old = elements.swap(self.new, memory)
            self.written = True
            return
        self.read_old()
        self.written = True
        elements.put(self.new)

    def undo(self) -> None:
        """Write the old bits back if any new ones were written.

        Memory not written might hold other bits than the old ones, which are not ours to restore.
        """
        if self.written:
            self.elements.put(self.old)
            self.written = False


class StagedParam(msgspec.Struct, eq=False, gc=False):
    """One param of a part, or a piece of it, ready to be written on this rank.

    Attributes:
        name: of the checkpoint's tensor.
        nnz: elements that the part sends of it, on all ranks together.
        dense: whether these are all, in order.
        delta: the param as it was sent, for an applier that writes through the model's loader. It
            keeps the whole part's memory alive.
        writes: the writes on this rank of elements of this param alone.
        rows: if it was streamed, its rows of elements of many params.
        counted: elements of the delta that this rank counts (see `engine_ext.placement.ownership`).
        change: digest of the counted elements, new minus old; in a full sync, of the new values.
        replaced: in a full sync whose parts declare a ``digest_part``, digest of the old values.
        replicas: by set of ranks that hold the same elements, the digest of their change.
        tied: whether its memory is another tensor's, which a sync must give the same values. Its
            writes are compared with that one's, and not made.
    """

    name: str
    nnz: int
    dense: bool
    delta: ParamDelta | None = None
    writes: list[Write] = []
    rows: list[tuple[DeviceRows, int]] = []
    counted: int = 0
    change: Digest = Digest.ZERO
    replaced: Digest = Digest.ZERO
    replicas: dict[tuple[int, ...], Digest] = {}
    tied: bool = False

    @classmethod
    def of(cls, delta: ParamDelta, *, keep: bool = False) -> StagedParam:
        """Return a param without writes; with `keep` it has its `delta`."""
        return cls(delta.name, delta.nnz, delta.indices is None, delta if keep else None)

    def absorb(self, other: StagedParam) -> None:
        """Add another piece of the same param."""
        self.writes += other.writes
        self.counted += other.counted
        if other.change is not Digest.ZERO:
            self.change += other.change
            self.replaced += other.replaced
        for ranks, change in other.replicas.items():
            self.replicas[ranks] = self.replicas.get(ranks, Digest.ZERO) + change


class StreamedParams:
    """Params of a part whose streams were expanded on devices, as arrays.

    Objects are made of those alone that a check has to look at.

    Args:
        names: of the checkpoint's tensors, each once.
        nnz: elements that the part sends of each, int64 [params].
        numel: elements of each tensor, int64 [params].

    Attributes:
        names, nnz, numel: see above.
        counted: elements of each that this rank counts, int64 [params].
        change: digest of these, new minus old; uint64 [params, 2].
        rows: elements of many params, and the place in `names` of each row's, int64 [rows].
    """

    __slots__ = ("_numbers", "_replicas", "change", "counted", "names", "nnz", "numel", "rows")

    def __init__(
        self, names: Sequence[str], nnz: NDArray[np.int64], numel: NDArray[np.int64]
    ) -> None:
        self.names, self.nnz, self.numel = names, nnz, numel
        self.counted = np.zeros_like(nnz)
        self.change: Sums = np.zeros((nnz.size, 2), np.uint64)
        self.rows: list[tuple[DeviceRows, NDArray[np.int64]]] = []
        self._replicas: dict[tuple[int, ...], tuple[Sums, NDArray[np.bool_]]] = {}
        self._numbers: dict[str, int] = {}

    def add(
        self,
        elements: DeviceRows,
        places: NDArray[np.int64],
        sums: Sums,
        counted: NDArray[np.bool_],
    ) -> None:
        """Add rows of elements.

        Args:
            places: of the param of each row in `names`, int64 [rows].
            sums: digest of each row's change, uint64 [rows, 2].
            counted: whether this rank counts the row's elements, [rows].
        """
        self.rows.append((elements, places))
        np.add.at(self.counted, places[counted], elements.counts[counted])
        np.add.at(self.change, places[counted], sums[counted])

    def add_replicas(self, ranks: tuple[int, ...], places: NDArray[np.int64], sums: Sums) -> None:
        """Add rows whose elements these ranks hold; other arguments as for `add`."""
        if ranks not in self._replicas:
            held = np.zeros(self.nnz.size, np.bool_)
            self._replicas[ranks] = np.zeros_like(self.change), held
        added, held = self._replicas[ranks]
        np.add.at(added, places, sums)
        held[places] = True

    def replicas(self) -> dict[tuple[int, ...], Digest]:
        """By set of ranks that hold the same elements, the digest of their change in all params."""
        return {ranks: total_of(added) for ranks, (added, _) in self._replicas.items()}

    def replicas_of(self, name: str) -> dict[tuple[int, ...], Digest]:
        """Return the same of one tensor, empty if it is not here."""
        if self._replicas and not self._numbers:
            self._numbers = {own: number for number, own in enumerate(self.names)}
        number = self._numbers.get(name)
        return {
            ranks: Digest(*added[number].tolist())
            for ranks, (added, held) in self._replicas.items()
            if number is not None and held[number]
        }

    def params(self, names: Container[str] | None = None) -> list[StagedParam]:
        """Return the params of these names as objects; None: of all names."""
        chosen = [n for n, name in enumerate(self.names) if names is None or name in names]
        found = {
            number: StagedParam(
                self.names[number],
                int(self.nnz[number]),
                False,
                counted=int(self.counted[number]),
                change=Digest(*self.change[number].tolist()),
                replicas=self.replicas_of(self.names[number]),
            )
            for number in chosen
        }
        for elements, places in self.rows:
            for row in np.flatnonzero(np.isin(places, chosen)).tolist():
                found[int(places[row])].rows.append((elements, row))
        return [*found.values()]


NO_PARAMS: Final = StreamedParams((), np.zeros(0, np.int64), np.zeros(0, np.int64))


@dataclass(frozen=True, slots=True)
class StagedModule:
    """A module that was rebuilt for a sync; see `engine_ext.startup.recomputed.RebuildResult`."""

    writes: list[Write]
    fingerprints: dict[str, str]


@dataclass(slots=True)
class StagedPart:
    """A part, ready to be written on this rank.

    Attributes:
        params: in the part's order, without those that the stream table has staged.
        streamed: these.
        together: the writes of these.
        skipped: the params that are left out because no rank makes anything of them: how many
            elements of each the part sends, by name.
        compared: of those, the ones that are tied to a tensor of the checkpoint.
        unproven: the changes, by tensor, whose ``new_checksum`` this rank cannot verify alone.
        gathering: those of them that no rank can, while they are verified; None before.
        proven: whether all new checksums of the part are verified; the same on every rank.
        own, totals: sums of the part, and of the whole sync with the modules that were rebuilt for
            it, if it is its first part; `engine_ext.sync.totals` makes and reads them.
    """

    manifest: Manifest
    params: list[StagedParam]
    streamed: StreamedParams = NO_PARAMS
    together: list[Write] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    compared: list[StagedParam] = field(default_factory=list)
    unproven: dict[str, ParamDelta] = field(default_factory=dict)
    gathering: deque[Any] | None = None
    proven: bool = False
    own: Any = None
    totals: Any = None

    @property
    def nnz(self) -> int:
        """Elements that the part changes, on all ranks together; without those skipped."""
        return sum(param.nnz for param in self.params) + int(self.streamed.nnz.sum())

    def params_of(self, names: Container[str] | None = None) -> list[StagedParam]:
        """Return the params of these names; None: of all. Those streamed are made for it."""
        found = [param for param in self.params if names is None or param.name in names]
        return found + self.streamed.params(names)


class UndoTable(NamedTuple):
    """Elements of live host memory that one compiled call restores.

    Attributes:
        elements: it has the addresses of `pairs`.
        pairs: the elements with their old bits.
    """

    elements: ElementTable
    pairs: list[tuple[LiveElements, Any]]


@dataclass(slots=True)
class UndoLog:
    """What rolls a committed sync back on this rank.

    All that a rollback writes by is there: it must not make it while generation is paused.

    Attributes:
        writes: elements of live memory, with their old bits; of those that are in nothing below.
        tables: of small writes to host memory.
        batches: that have written elements on devices, and restore them.
        numbers, sums: how much the sync changed the digests of checkpoint tensors, see
            `DigestTable.plus`.
        live_names: the live tensors that it wrote to.
        rebuilt: what rebuilding its modules gave before it; see `PostLoad.committed`.
        nbytes: host memory that the log takes.
    """

    writes: list[tuple[LiveElements, Any]] = field(default_factory=list)
    tables: list[UndoTable] = field(default_factory=list)
    batches: list[DeviceBatch] = field(default_factory=list)
    numbers: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    sums: Sums = field(default_factory=lambda: np.empty((0, 2), np.uint64))
    live_names: frozenset[str] = frozenset()
    rebuilt: Mapping[str, Mapping[str, str] | None] = field(default_factory=dict)
    nbytes: int = 0

    def lists(self) -> list[list[Any]]:
        """Return the lists that hold the log: emptied, they keep nothing of it in memory."""
        pairs = [table.pairs for table in self.tables]
        return [self.writes, *pairs, self.tables, self.batches]
