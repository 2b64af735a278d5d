"""The digests of an engine's tensors, summed over its ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from delta_server import metrics
from delta_server.engine import Engine, call_all_ranks
from engine_ext.format import DIGEST_ALGORITHM, Digest
from engine_ext.ranks.operations import GetDigest


async def describe_digests(engine: Engine, scan: bool) -> dict[str, Any]:
    """Return the digests of the model and of every covered tensor, as JSON.

    They are what the syncs add up to; with `scan` they are computed from live memory, and
    ``corrupted`` names the tensors whose live bytes are not what the syncs have written.
    """
    replies = await call_all_ranks(engine, GetDigest(scan=scan))
    tensors = _sum_by_name(reply.tensors for reply in replies)
    tracked = _sum_by_name(reply.tracked for reply in replies)
    total = Digest.total(tensors.values())
    found: dict[str, Any] = {
        "version": replies[0].version,
        "digest": total.hex(),
        "digest_algorithm": DIGEST_ALGORITHM,
        "scanned": scan,
        "tensors": {name: digest.hex() for name, digest in sorted(tensors.items())},
    }
    if scan:
        corrupted = {n for n in tracked if tracked[n] != tensors.get(n)}
        found["corrupted"] = sorted(corrupted.union(*(reply.corrupted for reply in replies)))
        if found["corrupted"]:
            metrics.MISMATCHES.inc()
    return found


def _sum_by_name(shares: Iterable[Mapping[str, str]]) -> dict[str, Digest]:
    """Return each tensor's digest from the shares that the ranks count."""
    total: dict[str, Digest] = {}
    for share in shares:
        for name, digest in share.items():
            total[name] = total.get(name, Digest.ZERO) + Digest.parse(digest)
    return total
