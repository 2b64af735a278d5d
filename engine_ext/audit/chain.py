"""Prove that records lead from the digest of a checkpoint to a version."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Link:
    """What a record says of one version.

    Attributes:
        source: names the record in messages.
        base_version: that it starts from; None if it is full, and starts from any.
        digest, digest_before: of the model at the version and at its base; None if not known.
        sender: who has sent it, as run, epoch, host and pid; None if it names no run.
        at: Unix time of the record.
        where: the engine that has committed it; None for a record of the sender.
        is_fold: it leads over versions that have records of their own.
    """

    source: str
    version: int
    run: str | None
    base_version: int | None
    digest_before: str | None
    digest: str | None
    nbytes: int
    sender: str | None
    at: float | None
    where: str | None = None
    is_fold: bool = False

    @property
    def name(self) -> tuple[str | None, int]:
        """What must never name two contents."""
        return self.run, self.version


@dataclass(slots=True)
class Chain:
    """The records that lead to a version.

    Attributes:
        start: version and digest that they start from; None if the first one is full.
        links: from there on.
        problems: why they prove nothing; empty if they do.
    """

    start: tuple[int, str | None] | None = None
    links: list[Link] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def prove(
    links: Sequence[Link],
    target: int,
    start_version: int | None = None,
    start_digest: str | None = None,
) -> Chain:
    """Return the chain to a version, with every gap in it and every fork.

    Args:
        links: of all versions that are known; several can lead to one version.
        start_version: of the checkpoint; the oldest base if None.
        start_digest: of the checkpoint; as the first record has it if None.
    """
    bases = [link.base_version for link in links if link.base_version is not None]
    start = min(bases, default=None) if start_version is None else start_version
    chain = Chain(problems=forks(links))
    if target == start:
        chain.start = start, start_digest
        chain.problems += _differences(links, start, start_digest)
        return chain
    by_version: dict[int, list[Link]] = {}
    for link in links:
        by_version.setdefault(link.version, []).append(link)
    at: int | None = target
    while at is not None and at != start:
        leading = by_version.get(at)
        if not leading:
            chain.problems.append(f"gap: no record leads to version {at}")
            return chain
        # The shortest step: a fold leads over others, which prove more.
        link = max(leading, key=lambda one: -1 if one.base_version is None else one.base_version)
        chain.links.insert(0, link)
        at = link.base_version
    if at is not None:
        chain.start = (at, start_digest or chain.links[0].digest_before)
    elif start_digest is not None:
        chain.problems.append(
            f"{chain.links[0].source} is full: no record connects it with the checkpoint"
        )
    _connect(chain)
    return chain


def _differences(links: Iterable[Link], version: int, digest: str | None) -> list[str]:
    """Return where records have other weights than the checkpoint for its version."""
    if digest is None:
        why = "whose digest is not known: give --digest or --base"
        return [f"gap: version {version} is the checkpoint's, {why}"]
    said: list[tuple[str, str | None]] = []
    for link in links:
        if link.version == version:
            said.append((f"{link.source} leads to", link.digest))
        if link.base_version == version:
            said.append((f"{link.source} starts from", link.digest_before))
    known = [(what, found) for what, found in said if found is not None]
    if not known:
        return [f"gap: no record has a digest of version {version}"]
    return [
        f"gap: {what} {found}, the checkpoint has {digest}"
        for what, found in known
        if found != digest
    ]


def _connect(chain: Chain) -> None:
    """Add the places at which digests do not connect."""
    digest = None if chain.start is None else chain.start[1]
    known = chain.start is not None
    for link in chain.links:
        if link.base_version is not None and known:
            if None in (link.digest_before, digest):
                if link.digest_before is None:
                    problem = f"gap: {link.source} has no digest of the weights that it starts from"
                    chain.problems.append(problem)
            elif link.digest_before != digest:
                chain.problems.append(
                    f"gap: {link.source} starts from the weights {link.digest_before}, and what "
                    f"leads there are {digest}"
                )
        if link.digest is None:
            chain.problems.append(f"gap: {link.source} has no digest of what it leads to")
        digest, known = link.digest, True


def forks(links: Iterable[Link]) -> list[str]:
    """Return where one version has two contents, or one base two successors."""
    contents: dict[tuple[str | None, int], Link] = {}
    successors: dict[int, Link] = {}
    found: list[str] = []
    for link in links:
        known = contents.setdefault(link.name, link)
        if link.run is None:  # versions of no run begin anew with each engine
            pass
        elif None not in (known.digest, link.digest) and known.digest != link.digest:
            found.append(
                f"fork: version {link.version} has the digest {known.digest} in {known.source}, "
                f"and {link.digest} in {link.source}"
            )
        # A fold starts where others do, and leads over them.
        if link.base_version is None or link.where is not None or link.is_fold:
            continue
        first = successors.setdefault(link.base_version, link)
        if first.version != link.version:
            found.append(
                f"fork: {first.source} and {link.source} both start from version "
                f"{link.base_version}"
            )
    return found
