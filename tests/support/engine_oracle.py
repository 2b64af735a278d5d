"""What an engine must hold and answer, written a second time over dicts and numpy arrays.

`Known` follows docs/wire-format.md, docs/http-api.md and docs/fault-tolerance.md: versions and
runs, who owns the weights, what is staged, the way back, and the bits of every tensor. Each method
takes what happens to the engine and returns the answer that must come; where several rules refuse a
part, any of their errors will do.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Bits = dict[str, NDArray[Any]]
Changes = Mapping[str, tuple[NDArray[np.int64] | None, NDArray[Any]]]
Origin = Literal["sender", "log", "engine"]
Sender = tuple[str, int]  # run and epoch
Errors = frozenset[str]
Answer = str | Errors  # the status of a success, or the set of errors that are allowed
# What a rank or the engine does with a part or with the sync that it completes.
Fault = Literal[
    "refused", "broken", "unprocessed", "undone", "mixed", "lost", "unpaused", "unpublished"
]

TIMEOUT = 60.0
LOG: Sender = ("log", 1)
ANONYMOUS = "anonymous-"


@dataclass(frozen=True)
class Part:
    """One part as it is sent.

    Attributes:
        base: None for a full sync.
        names_base: whether it names its base; otherwise that is the version before its own.
        bare: it names nothing but its version, so that it can be the rest of an unfinished one.
    """

    body: bytes
    changes: Changes
    version: int
    base: int | None
    sync_id: str | None = None
    full: bool = False
    number: int = 0
    count: int | None = 1
    sender: Sender | None = None
    origin: Origin = "sender"
    bare: bool = False
    names_base: bool = True

    @property
    def is_malformed(self) -> bool:
        """Whether it names a base that no version can be."""
        names_base = self.names_base and not self.bare and self.origin == "sender"
        return names_base and self.base is not None and self.base < 0

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for parts that write the same."""
        return tuple(
            (name, None if indices is None else indices.tobytes(), values.tobytes())
            for name, (indices, values) in self.changes.items()
        )

    @property
    def process(self) -> tuple[Any, ...]:
        """What the parts of one sync share."""
        bare = self.identity if self.bare else None
        return (self.version, self.sync_id, self.sender, bare)


@dataclass
class Staged:
    """The staged sync: its first part, and all parts by number."""

    first: Part
    last: float
    parts: dict[int, Part] = field(default_factory=dict)
    count: int | None = None

    @property
    def complete(self) -> bool:
        return len(self.parts) == self.count


@dataclass
class Committed:
    """The known facts about a version."""

    version: int
    bits: Bits
    run: str | None = None
    identities: frozenset[Any] = frozenset()
    tensors: frozenset[str] = frozenset()
    whole: bool = True  # nothing of the version can be missing


@dataclass
class Known:
    """An engine of any number of ranks."""

    at: Committed
    names: frozenset[str]
    before: Committed | None = None
    staged: Staged | None = None
    uncertain: bool = False
    mismatched: bool = False
    foreign: bool = False
    asleep: bool = False
    loaded: bool = True
    paused: bool = False
    published: str = "0"  # the engine's own weight version
    owner: Sender | None = None
    fenced: set[str] = field(default_factory=set)
    epochs: dict[str, int] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)
    highest: dict[str, int] = field(default_factory=dict)
    anonymous: int = 0
    now: float = 0.0
    commits: int = 0

    # What shows --------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        if self.uncertain:
            return "uncertain"
        return "mismatched" if self.mismatched else "certain"

    @property
    def certain(self) -> bool:
        """Whether the bits of the version are in memory, as far as the engine knows."""
        return self.state == "certain" and not self.foreign

    def facts(self) -> dict[str, Any]:
        """What ``GET /delta_status`` must say."""
        staged = self.staged
        return {
            "version": self.at.version,
            "run": self.at.run,
            "owner": self.owner,
            "state": self.state,
            "foreign": self.foreign,
            "asleep": self.asleep,
            "loaded": self.loaded,
            "rolls_back": self.before is not None,
            "published": self.published,
            "staged": None
            if staged is None
            else {
                "version": staged.first.version,
                "base_version": staged.first.base,
                "full": staged.first.full,
                "num_parts": staged.count,
                "parts": sorted(staged.parts),
                "owner": staged.first.sender,
            },
        }

    # Parts -------------------------------------------------------------------------------------

    def is_staged(self, part: Part) -> bool:
        return self.staged is not None and self.staged.first.process == part.process

    def is_seen(self, part: Part) -> bool:
        """Whether the part is of the version that the engine holds."""
        if not self.certain or part.version != self.at.version:
            return False
        if part.identity not in self.at.identities:
            return False
        return is_anonymous(self.at.run) if part.sender is None else part.sender[0] == self.at.run

    def shut_out(self, sender: Sender | None, *, takeover: bool = False) -> Errors:
        """Return the errors for which a sender must not change the weights."""
        if sender is not None and self.is_replaced(sender):
            return frozenset({"RunFenced"})
        if self.owner is None or takeover:
            return frozenset()
        is_owner = sender is not None and sender[0] == self.owner[0]
        return frozenset() if is_owner else frozenset({"RunConflict"})

    def is_replaced(self, sender: Sender) -> bool:
        """Whether a takeover, or a later process of its run, has replaced a sender."""
        return sender[0] in self.fenced or sender[1] < self.epochs.get(sender[0], 0)

    def gives_way(self, part: Part) -> bool:
        """Whether the staged sync gives way to a part of another one."""
        staged = self.staged
        if staged is None or self.is_staged(part):
            return False
        if self.now - staged.last >= TIMEOUT:
            return True
        ours, theirs = part.sender, staged.first.sender
        if ours is None or theirs is None or ours[0] != theirs[0]:
            return False
        later = (ours[1], part.version) >= (theirs[1], staged.first.version)
        return later and part.origin == staged.first.origin == "sender"

    def named_with(self, part: Part) -> set[str]:
        """The tensors of a part, and of the staged sync that it is of."""
        staged = self.staged.parts.values() if self.staged and self.is_staged(part) else ()
        return {name for one in (part, *staged) for name in one.changes}

    def unwritable(self, *, full: bool) -> set[str]:
        """Why a sync cannot be written into the weights as they are."""
        found = {"WeightsAsleep"} if self.asleep else set[str]()
        if not full:
            found |= {"EngineUncertain"} if self.uncertain else set()
            found |= {"BaseMismatch"} if self.foreign or self.mismatched else set()
        return found

    def named_run(self, part: Part) -> str | None:
        """The run of a part, before its number is looked at."""
        if part.sender is not None:
            return part.sender[0]
        stays = self.owner is not None and self.owner[0] == self.at.run
        stays = stays and part.origin == "engine"
        return self.at.run if stays or is_anonymous(self.at.run) else None

    def continues(self, part: Part) -> bool:
        """Whether a part without numbers can be the rest of the version that the engine holds."""
        is_named = not (self.at.run is None or is_anonymous(self.at.run))
        return part.bare and part.version == self.at.version and not (self.at.whole or is_named)

    def wrong_base(self, part: Part) -> set[str]:
        """Why a part cannot begin a sync."""
        if self.continues(part):
            return set()
        run, found = self.named_run(part), set[str]()
        if not part.full:
            if part.base is None or part.base < 0:
                found.add("MalformedPart")
            elif part.base != self.at.version:
                found.add("VersionConflict")
            if part.base is not None and part.version <= part.base:
                found.add("MalformedPart")
            if part.sender is not None and part.origin == "sender":
                is_other = self.at.run not in (None, part.sender[0])
                if is_other and (self.owner is None or self.owner[0] != part.sender[0]):
                    found.add("VersionConflict")
        is_used = run is not None and part.version <= self.highest.get(run, -1)
        if part.origin != "log" and not is_anonymous(run) and is_used:
            found.add("VersionConflict")
        return found

    def unfitting(self, part: Part, staged: Staged) -> set[str]:
        """Why a part cannot join the sync that is staged."""
        first, found = staged.first, set[str]()
        if (part.base, part.full) != (first.base, first.full):
            found.add("MalformedPart")
        counts = {count for count in (part.count, staged.count) if count is not None}
        if len(counts) > 1 or any(max([part.number, *staged.parts]) >= n for n in counts):
            found.add("MalformedPart")
        known = staged.parts.get(part.number)
        if known is not None and known.identity != part.identity:
            found.add("Conflict")
        return found

    def take(self, part: Part, fault: Fault | None = None) -> tuple[Answer, list[Known]]:
        """Take a part; return the answer, and the states that the engine can have then."""
        if part.is_malformed:
            return frozenset({"MalformedPart"}), [self]
        if part.origin == "sender" and (out := self.shut_out(part.sender)):
            return out, [self]
        if self.is_seen(part) and not self.is_staged(part):
            self.publish()
            return "already_applied", [self]
        kept = copy.deepcopy(self)
        found = self.unwritable(full=part.full)
        if part.origin == "sender" and part.sender is not None and self.is_late(part.sender):
            found.add("RunFenced")
        stale = self.gives_way(part)
        if self.staged is not None and not stale:
            if not self.is_staged(part):
                return frozenset({*found, "SyncInProgress"}), [self]
            if found := found | self.unfitting(part, self.staged):
                return frozenset(found), [self]
        else:
            self.staged = None
            if found := found | self.wrong_base(part):
                return frozenset(found), [kept, self]
        if part.origin == "sender" and part.sender is not None:
            self.own(part.sender)
        return self.stage(part, fault), [self]

    def is_late(self, sender: Sender) -> bool:
        """Whether a part comes after its sender has released the weights."""
        return sender[0] in self.released and sender[1] <= self.epochs[sender[0]]

    def own(self, sender: Sender) -> None:
        run, epoch = sender
        before, self.owner = self.owner, sender
        self.epochs[run] = epoch
        self.released.discard(run)
        if before is not None and before[0] != run:
            self.fenced.add(before[0])
        if self.staged is not None and self.staged.first.sender not in (None, sender, LOG):
            self.staged = None

    def stage(self, part: Part, fault: Fault | None) -> Answer:
        staged = self.staged = self.staged or Staged(part, self.now)
        staged.last = self.now
        staged.count = part.count if part.count is not None else staged.count
        if part.number not in staged.parts:
            staged.parts[part.number] = part
            if fault == "refused":
                self.staged = None
                return frozenset({"NotUpdatable"})
            if fault == "broken":
                del staged.parts[part.number]
                self.staged = staged if staged.parts else None
                return frozenset({"DeltaError"})
        if not staged.complete:
            return "staged"
        if found := self.unfinished(staged):
            self.staged = None
            return frozenset(found)
        if fault == "unprocessed":
            self.staged = None
            return frozenset({"NotUpdatable"})
        return self.commit(staged, fault)

    def unfinished(self, staged: Staged) -> set[str]:
        """Why a complete sync cannot be committed."""
        named = [name for part in staged.parts.values() for name in part.changes]
        if len(set(named)) < len(named):
            return {"NotUpdatable", "MalformedPart"}
        if staged.first.full and set(named) != self.names:
            return {"NotUpdatable"}
        if self.continues(staged.first) and self.at.tensors.intersection(named):
            return {"VersionConflict"}
        return set()

    # Commits -----------------------------------------------------------------------------------

    def commit(self, staged: Staged, fault: Fault | None) -> Answer:
        first, self.staged = staged.first, None
        continued = self.continues(first)
        if fault == "unpaused":
            self.resume()
            return frozenset({"DeltaError"})
        if first.full and fault in ("undone", "mixed"):
            self.before = None  # its memory was used
        if fault == "undone":
            self.resume()
            return frozenset({"WriteUndone"})
        run = self.run_of(first, continued)
        if fault == "mixed":
            self.mix(run)
            return frozenset({"CommitFailed"})
        bits = {name: values.copy() for name, values in self.at.bits.items()}
        for part in staged.parts.values():
            for name, (indices, values) in part.changes.items():
                bits[name][slice(None) if indices is None else indices] = values
        old, certain = self.at, self.certain
        identities = frozenset(part.identity for part in staged.parts.values())
        tensors = frozenset(name for part in staged.parts.values() for name in part.changes)
        self.at = Committed(first.version, bits, run, identities, tensors, not first.bare)
        if continued:
            self.at = replace(
                self.at,
                identities=old.identities | identities,
                tensors=old.tensors | tensors,
                whole=False,
            )
            self.before = self.before if certain else None
        else:
            self.before = old if certain else None
        self.commits += 1
        self.highest[run] = max(first.version, self.highest.get(run, -1))
        self.uncertain = self.foreign = self.loaded = False
        self.mismatched = self.mismatched and not first.full
        if fault in ("lost", "unpublished"):
            self.paused = True
            return frozenset({"CommitFailed" if fault == "lost" else "CommittedNotResumed"})
        self.publish()
        return "committed"

    def run_of(self, first: Part, continued: bool) -> str:
        run = self.named_run(first)
        is_used = run is not None and first.version <= self.highest.get(run, -1)
        if run is None or (is_anonymous(run) and is_used and not continued):
            self.anonymous += 1
            return f"{ANONYMOUS}{self.anonymous}"
        return run

    def mix(self, run: str | None) -> None:
        """A write has failed half-way, and could not be undone."""
        self.uncertain, self.foreign, self.mismatched, self.loaded = True, False, False, False
        self.before, self.paused = None, True
        self.at = Committed(self.at.version, self.at.bits, run)

    def resume(self) -> None:
        """A commit has failed with every rank as it was; what an earlier one owes is published."""
        if self.paused and not self.uncertain:
            self.publish()

    def publish(self) -> None:
        """The version is published again, for a sender that did not get its answer."""
        self.published, self.paused = str(self.at.version), False

    def roll_back(self, fault: Fault | None = None) -> Answer:
        found = self.unwritable(full=False) | (set() if self.before is not None else {"Conflict"})
        if found:
            self.resume()
            return frozenset(found)
        assert self.before is not None
        self.staged = None
        if fault == "mixed":
            self.mix(self.at.run)
            return frozenset({"CommitFailed"})
        self.at, self.before = self.before, None
        self.publish()
        return "rolled_back"

    # What else happens -------------------------------------------------------------------------

    def advance(self, part: Part) -> tuple[Answer, list[Known]]:
        """``POST /update_weight_version``: a version without changes."""
        if self.uncertain:
            return frozenset({"EngineUncertain"}), [self]
        if self.foreign:
            self.published = str(part.version)
            return "committed", [self]
        if self.mismatched:
            return frozenset({"BaseMismatch"}), [self]
        if part.version < self.at.version:
            return frozenset({"VersionConflict"}), [self]
        if part.version == self.at.version:
            self.publish()
            return "already_applied", [self]
        return self.take(part)

    def claim(self, sender: Sender, *, takeover: bool) -> Answer:
        if out := self.shut_out(sender, takeover=takeover):
            return out
        if self.staged is not None and self.staged.first.sender is None:
            if not takeover and self.now - self.staged.last < TIMEOUT:
                return frozenset({"SyncInProgress"})
            self.staged = None
        self.own(sender)
        return "claimed"

    def release(self, sender: Sender) -> Answer:
        if self.owner != sender:
            return "not_owner"
        self.owner = None
        self.epochs[sender[0]] = sender[1]
        self.released.add(sender[0])
        if self.staged is not None and self.staged.first.sender is not None:
            self.staged = None
        return "released"

    def overwrite(self) -> None:
        """Something else has changed the weights, and the engine has noticed."""
        self.foreign, self.before, self.staged = True, None, None

    def fall_asleep(self) -> None:
        self.asleep, self.staged = True, None


def is_anonymous(run: str | None) -> bool:
    return run is not None and run.startswith(ANONYMOUS)
