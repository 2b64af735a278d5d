"""The chain of an audit file: each record follows from the one before, since an engine's start.

The hash of the line before is in each line, so a line that was changed, added, removed or moved
shows at the next one. The last line has no next one: a signature shows its change, and only what is
known from elsewhere that it is missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from engine_ext.audit.audit_file import Line, read_lines
from engine_ext.audit.chain import Chain, Link, forks
from engine_ext.audit.record import FIRST, AuditRecord, hash_of, is_signed


@dataclass(frozen=True, slots=True)
class Reached:
    """A version that an engine has reached since one of its starts.

    Attributes:
        source: names the last record of the version.
        digest: of the weights there; None if they are not known.
        chain: what led there, from the engine's start.
        is_past: all records of this start precede those of another one that reached the version.
    """

    source: str
    digest: str | None
    chain: Chain
    is_past: bool


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a start of an engine reached a version; as `Reached`."""

    source: str
    digest: str | None
    steps: int  # links that led there
    problems: tuple[str, ...]


@dataclass(slots=True)
class _State:
    """The weights of one engine since its start, as the records say."""

    version: int
    digest: str | None  # None: not known, so that only a full version can follow
    start: tuple[int, str | None]
    began: int  # lines of the first record and of the last
    ended: int
    links: list[Link] = field(default_factory=list)
    digests: dict[int, str | None] = field(default_factory=dict)
    gaps: list[str] = field(default_factory=list)  # since the last full version
    places: dict[int, _Place] = field(default_factory=dict)  # by version
    failed: str | None = None  # names the last record, if it is of a failed write


@dataclass(slots=True)
class EngineTrail:
    """What an audit file says.

    Attributes:
        name: of the file.
        links: of all versions of the model, in order.
        problems: lines that were changed, and records that do not connect.
        notes: what an operator should know, though the chain holds.
        signed: how many records have a valid signature.
    """

    name: str = ""
    links: list[Link] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    signed: int = 0
    _starts: list[_State] = field(default_factory=list)

    def reached(self, version: int) -> list[Reached]:
        """Return how each start of an engine reached a version; the one that began last is last."""
        states = [state for state in self._starts if version in state.places]
        last = max((state.began for state in states), default=0)
        found = []
        for state in states:
            place = state.places[version]
            chain = Chain(state.start, state.links[: place.steps], [*place.problems])
            found.append(Reached(place.source, place.digest, chain, state.ended < last))
        return found


def read_engine_trail(path: Path, key: str | None) -> EngineTrail:
    """Read an audit file, and verify it; its signatures too if there is a key.

    Raises:
        OSError: it cannot be read.
    """
    return follow(read_lines(path), path.name, key)


def follow(lines: Iterable[Line], name: str, key: str | None) -> EngineTrail:
    """Verify the lines of an audit file, which messages call `name`."""
    trail, previous = EngineTrail(name), FIRST
    states: dict[tuple[str, str | None], _State] = {}
    torn: list[Line] = []
    for line in lines:
        where = f"{name}:{line.number}"
        if line.record is None:
            torn.append(line)
            if line.is_whole and not line.text:
                trail.problems.append(f"changed: {where} is empty")
            continue
        if line.record.previous != previous:
            trail.problems.append(
                f"changed: what precedes {where} is not what it was written after"
            )
        elif torn:
            trail.notes.append(f"{name}:{torn[0].number} was cut while it was written")
        torn = []
        previous = hash_of(line.text)
        if key is not None and is_signed(line.record, key):
            trail.signed += 1
        elif key is not None:
            trail.problems.append(f"signature: {where} has none by this key")
        _take(trail, states, line.record, where, line.number)
    for line in torn:
        what = "is no record" if line.is_whole else "is cut: it was being written"
        trail.problems.append(f"changed: {name}:{line.number} {what}")
    trail.problems += forks(trail.links)
    trail.notes += [
        f"{state.failed}: a write failed half-way; what the engine holds since then is not known"
        for state in states.values()
        if state.failed is not None
    ]
    return trail


def _take(
    trail: EngineTrail,
    states: dict[tuple[str, str | None], _State],
    record: AuditRecord,
    where: str,
    number: int,
) -> None:
    key = record.boot, record.adapter
    state = states.get(key)
    if record.kind == "loaded" or state is None:
        start = record.version, record.digest
        if record.kind != "loaded" and record.base_version is not None:
            start = record.base_version, record.digest_before
        state = states[key] = _State(*start, start=start, began=number, ended=number)
        state.digests[state.version] = state.digest
        if record.adapter is None:
            trail._starts.append(state)
    state.ended, state.failed = number, None
    if record.kind == "loaded":
        _remember(trail, state, record, where, is_step=False)
        return
    is_known = record.digest and (record.version, record.digest) == (state.version, state.digest)
    if is_known and (record.late or record.kind == "found") and record.changed_by is None:
        # The process that wrote the one before died before the engine knew.
        trail.notes.append(f"{where} says again what the record before it says")
        return
    if record.kind == "uncertain":
        # The record's version is the one before the write, which was reached all the same.
        state.version, state.digest, state.failed = record.version, None, where
        state.digests[record.version] = None
        return
    if record.full:
        state.gaps.clear()  # nothing of what was there before is left
    if record.kind in ("committed", "rolled_back"):
        _check_step(trail, state, record, where)
    elif record.changed_by is not None:
        trail.notes.append(
            f"{where}: {record.changed_by} changed the weights outside of delta sync"
        )
        state.gaps.append(f"gap: {where}: {record.changed_by} changed the weights, by no version")
    else:
        trail.problems.append(
            f"gap: {where}: the engine was found at version {record.version} with the digest "
            f"{record.digest}, to which no record leads"
        )
    state.version, state.digest = record.version, record.digest
    _remember(trail, state, record, where, is_step=True)


def _check_step(trail: EngineTrail, state: _State, record: AuditRecord, where: str) -> None:
    if record.base_version != state.version and state.digest is not None:
        trail.problems.append(
            f"gap: {where} starts from version {record.base_version}, the record before it ends "
            f"at {state.version}"
        )
    elif record.digest_before != state.digest:
        trail.problems.append(
            f"gap: {where} starts from the weights {record.digest_before}, the record before it "
            f"ends at {state.digest}"
        )
    elif state.digest is None and not record.full:
        trail.problems.append(f"gap: {where} is no full version, and starts from unknown weights")
    if record.digest is None:
        trail.problems.append(f"gap: {where} has no digest of what it leads to")
    known = state.digests.get(record.version)
    if record.kind == "rolled_back" and known not in (None, record.digest):
        trail.problems.append(
            f"fork: {where} goes back to version {record.version} with the digest {record.digest}, "
            f"which had {known}"
        )


def _remember(
    trail: EngineTrail, state: _State, record: AuditRecord, where: str, *, is_step: bool
) -> None:
    state.digests[record.version] = record.digest
    if record.adapter is not None:
        return
    if is_step:
        link = Link(
            source=where,
            version=record.version,
            run=record.run,
            base_version=None if record.full else record.base_version,
            digest_before=record.digest_before,
            digest=record.digest,
            nbytes=record.bytes,
            sender=_sender(record),
            at=record.at,
            where=f"{record.engine} {record.host}:{record.pid}",
        )
        state.links.append(link)
        trail.links.append(link)
    problems = [*state.gaps]
    if record.digest is None:
        problems.append(f"gap: {where} has no digest of the weights at version {record.version}")
    place = _Place(where, record.digest, len(state.links), tuple(problems))
    state.places[record.version] = place


def _sender(record: AuditRecord) -> str | None:
    sender = record.sender
    if sender is None:
        return None
    owner = "" if sender.host is None else f", {sender.host}:{sender.pid}"
    return f"{sender.run} (epoch {sender.epoch}{owner})"
