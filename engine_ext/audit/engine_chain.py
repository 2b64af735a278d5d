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


@dataclass(slots=True)
class _State:
    """The weights of one engine since its start, as the records say."""

    version: int
    digest: str | None  # None: not known, so that only a full version can follow
    start: tuple[int, str | None]
    links: list[Link] = field(default_factory=list)
    digests: dict[int, str | None] = field(default_factory=dict)


@dataclass(slots=True)
class EngineTrail:
    """What an audit file says.

    Attributes:
        links: of all versions of the model, in order.
        reached: the versions of the model; see `chain`.
        problems: lines that were changed, and records that do not connect.
        notes: what an operator should know, though the chain holds.
        signed: how many records have a valid signature.
    """

    links: list[Link] = field(default_factory=list)
    reached: dict[int, tuple[_State, int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    signed: int = 0

    def chain(self, version: int) -> Chain | None:
        """Return the chain that led to a version last, from its engine's start; None if none."""
        if version not in self.reached:
            return None
        state, steps = self.reached[version]
        return Chain(start=state.start, links=state.links[:steps])


def read_engine_trail(path: Path, key: str | None) -> EngineTrail:
    """Read an audit file, and verify it; its signatures too if there is a key.

    Raises:
        OSError: it cannot be read.
    """
    return follow(read_lines(path), path.name, key)


def follow(lines: Iterable[Line], name: str, key: str | None) -> EngineTrail:
    """Verify the lines of an audit file, which messages call `name`."""
    trail, previous = EngineTrail(), FIRST
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
        _take(trail, states, line.record, where)
    for line in torn:
        what = "is no record" if line.is_whole else "is cut: it was being written"
        trail.problems.append(f"changed: {name}:{line.number} {what}")
    trail.problems += forks(trail.links)
    return trail


def _take(
    trail: EngineTrail,
    states: dict[tuple[str, str | None], _State],
    record: AuditRecord,
    where: str,
) -> None:
    key = record.boot, record.adapter
    state = states.get(key)
    if record.kind == "loaded" or state is None:
        start = record.version, record.digest
        if record.kind != "loaded" and record.base_version is not None:
            start = record.base_version, record.digest_before
        state = states[key] = _State(*start, start=start)
        state.digests[state.version] = state.digest
    if record.kind == "loaded":
        _remember(trail, state, record, where, is_step=False)
        return
    is_known = record.digest and (record.version, record.digest) == (state.version, state.digest)
    if is_known and (record.late or record.kind == "found") and record.changed_by is None:
        # The process that wrote the one before died before the engine knew.
        trail.notes.append(f"{where} says again what the record before it says")
        return
    if record.kind in ("committed", "rolled_back"):
        _check_step(trail, state, record, where)
    elif record.kind == "found" and record.changed_by is not None:
        trail.notes.append(
            f"{where}: {record.changed_by} changed the weights outside of delta sync"
        )
    elif record.kind == "found":
        trail.problems.append(
            f"gap: {where}: the engine was found at version {record.version} with the digest "
            f"{record.digest}, to which no record leads"
        )
    state.version, state.digest = record.version, record.digest
    _remember(trail, state, record, where, is_step=record.kind != "uncertain")


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
    trail.reached[record.version] = state, len(state.links)


def _sender(record: AuditRecord) -> str | None:
    sender = record.sender
    if sender is None:
        return None
    owner = "" if sender.host is None else f", {sender.host}:{sender.pid}"
    return f"{sender.run} (epoch {sender.epoch}{owner})"
