"""The chain of a delta log: what its senders have said about each version, also of pruned ones."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_ext.audit.chain import Link
from engine_ext.errors import LogDamaged
from engine_ext.log import (
    DeltaLog,
    Done,
    Entry,
    declared_digests,
    done_of,
    folder_name,
    is_signed,
    read_manifests,
    read_publications,
)


@dataclass(slots=True)
class LogTrail:
    """What a log says of its versions.

    Attributes:
        links: by version.
        problems: signatures that are wrong, and what cannot be read.
        signed: how many records have a valid signature.
    """

    links: list[Link] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    signed: int = 0


def read_log_trail(log: DeltaLog, key: str | None) -> LogTrail:
    """Read the records of a log, and verify their signatures if there is a key.

    If the sender has written none, the parts say what they can; that is not signed.

    Raises:
        OSError: the log cannot be read; the message names it.
        LogDamaged: the records of its pruned versions cannot be read.
    """
    trail = LogTrail()
    try:
        listing = log.listing()
    except LogDamaged as error:
        raise OSError(f"{log.location}: {error.message}") from error
    trail.problems += [f"gap: {name}: {why}" for name, why in listing.damaged.items()]
    present = {entry.folder.name: done_of(entry) for entry in listing.entries}
    for done in read_publications(log.store):
        name = folder_name(done.version)
        if done != present.get(name):  # else it was not pruned after all
            _add(trail, f"{name} (pruned)", done, key)
    for entry in listing.entries:
        done_or_none = present[entry.folder.name]
        if done_or_none is not None:
            _add(trail, entry.folder.name, done_or_none, key, is_fold=entry.is_fold)
        else:
            _add_unsaid(trail, log, entry, key)
    trail.links.sort(key=lambda link: (link.version, link.source))
    return trail


def _add(
    trail: LogTrail, source: str, done: Done, key: str | None, *, is_fold: bool = False
) -> None:
    said = done.publication
    assert said is not None
    if key is not None:
        if is_signed(done, key):
            trail.signed += 1
        else:
            why = "has no signature" if said.signature is None else "was changed: its signature"
            why += "" if said.signature is None else " is of something else, or by another key"
            trail.problems.append(f"signature: {source} {why}")
    trail.links.append(
        Link(
            source=source,
            version=done.version,
            run=said.run,
            base_version=done.base_version,
            digest_before=said.digest_before,
            digest=said.digest_after,
            nbytes=sum(facts.bytes for facts in done.files.values()),
            sender=_sender(said.run, said.epoch, said.owner),
            at=said.at,
            is_fold=is_fold,
        )
    )


def _add_unsaid(trail: LogTrail, log: DeltaLog, entry: Entry, key: str | None) -> None:
    source = entry.folder.name
    if key is not None:
        trail.problems.append(f"signature: {source} has no record of its sender")
    run = epoch = owner = before = after = None
    if not entry.foreign:
        try:
            with log.fetched(entry):
                manifests = read_manifests(entry)
        except LogDamaged as error:
            trail.problems.append(f"gap: {source}: {error.message}")
            return
        digests, first = declared_digests(manifests), manifests[0]
        before, after = digests.before, digests.after
        run, epoch, owner = first.run, first.run_epoch, first.run_owner
    trail.links.append(
        Link(
            source=source,
            version=entry.version,
            run=run,
            base_version=entry.base_version,
            digest_before=before,
            digest=after,
            nbytes=entry.nbytes,
            sender=_sender(run, epoch, owner),
            at=entry.written_at,
            is_fold=entry.is_fold,
        )
    )


def _sender(run: str | None, epoch: int | None, owner: str | None) -> str | None:
    if run is None:
        return None
    return f"{run} (epoch {epoch or 1}{', ' + owner if owner else ''})"
