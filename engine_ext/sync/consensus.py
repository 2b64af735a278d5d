"""Agreement of all ranks on a sync, before anything is written.

Each rank summarises its share of the staged sync; the summaries are exchanged, and `agree` is a
pure function of the sync and of all summaries, so that every rank reaches the same result.
Together they show what no rank sees alone: that each element is held by some rank, that replicas
held the same old values, and that the digests which the parts declare are those of the weights.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from engine_ext.errors import BaseMismatch, NotUpdatable
from engine_ext.format import Digest
from engine_ext.sync.staged import StagedPart
from engine_ext.sync.totals import totals


def rank_summary(staged: Sequence[StagedPart], digest: Digest) -> dict[str, Any]:
    """Return this rank's share of a sync for the others, as JSON; `digest` is that before it."""
    return {**totals(staged).summary(), "digest": digest.hex()}


def agree(staged: Sequence[StagedPart], summaries: Sequence[dict[str, Any]]) -> None:
    """Check a sync by the `rank_summary` of every rank, in rank order.

    Raises:
        BaseMismatch: the old values are not the sender's, or differ between ranks.
        NotUpdatable: an element is on no rank.
    """
    counted = sum(answer["counted"] for answer in summaries)
    nnz = totals(staged).nnz
    if counted != nnz:
        names = sorted(totals(staged).names)
        raise NotUpdatable(
            f"{nnz - counted} of {nnz} elements of {names[:8]} are on no rank; leave out what no "
            "rank holds",
            tensors=names,
        )
    full = all(part.manifest.full for part in staged)
    if not full:
        _check_replicas(summaries)
    before = Digest.total(Digest.parse(answer["digest"]) for answer in summaries)
    for number, part in enumerate(staged):
        change = Digest.total(Digest.parse(answer["changes"][number]) for answer in summaries)
        _check_digest(
            "the digest of a part's change", part.manifest.digest_part, change, number, full
        )
        if not part.manifest.full:
            _check_digest("the model's digest", part.manifest.digest_before, before, number, full)
    # A full sync replaces everything that the digest before it covers.
    added = Digest.total(Digest.parse(answer["added"]) for answer in summaries)
    after = added if full else before + added
    for number, part in enumerate(staged):
        _check_digest("the digest after the sync", part.manifest.digest_after, after, number, full)


def _check_replicas(summaries: Sequence[dict[str, Any]]) -> None:
    """Check that ranks which hold the same elements found the same old values."""
    changes: dict[tuple[int, ...], set[str]] = defaultdict(set)
    holders: Counter[tuple[int, ...]] = Counter()
    for answer in summaries:
        for ranks, change in answer["replicas"]:
            changes[tuple(ranks)].add(change)
            holders[tuple(ranks)] += 1
    for ranks, found in changes.items():
        if len(found) > 1 or holders[ranks] != len(ranks):
            raise BaseMismatch(
                f"ranks {list(ranks)} hold different copies of the same weights; send a full sync"
            )


def _check_digest(what: str, declared: str | None, actual: Digest, part: int, full: bool) -> None:
    if declared is not None and Digest.parse(declared) != actual:
        why = (
            "send the full sync without digests, or update the sender"
            if full
            else "the engine's weights are not the ones the delta was made from; send a full sync"
        )
        raise BaseMismatch(
            f"{what} is {actual.hex()}, but part {part} declares {declared}: {why}",
            expected=declared,
            actual=actual.hex(),
        )
