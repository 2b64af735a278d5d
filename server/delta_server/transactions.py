"""Make one transaction of files or bodies that have no numbers, and find where it starts from."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import xxhash

from delta_server.commit import call_all_ranks
from delta_server.engine import Engine
from delta_server.intake import VerifiedPart
from delta_server.published import gap_is_empty, version_of
from engine_ext.format import Manifest, PartId
from engine_ext.ranks.operations import FindUnseen, GetState


async def as_transaction(
    engine: Engine, parts: Sequence[PartId], spooled: Sequence[VerifiedPart]
) -> tuple[list[PartId], list[VerifiedPart]]:
    """Number the files of one request as parts of one sync; leaves out those seen before."""
    by_identity = {part.identity: (part, s) for part, s in zip(parts, spooled, strict=True)}
    version = parts[0].version
    request = FindUnseen(version=version, run=run_of(parts[0]), identities=list(by_identity))
    unseen = {one for reply in await call_all_ranks(engine, request) for one in reply.unseen}
    fresh = [one for one in by_identity if one in unseen] or list(by_identity)[:1]
    sync_id = "files:" + xxhash.xxh3_128_hexdigest("".join(sorted(fresh)).encode())
    chosen = [by_identity[identity] for identity in fresh]
    numbered = [
        msgspec.structs.replace(
            part,
            sync_id=part.sync_id or sync_id,
            part=number,
            num_parts=len(fresh),
            counted=_is_counted(one.manifest),
            continues=part.sender is None and not _is_counted(one.manifest),
        )
        for number, (part, one) in enumerate(chosen)
    ]
    return numbered, [s for _, s in chosen]


def run_of(part: PartId) -> str | None:
    """Return the run that a part names, or None."""
    return None if part.sender is None else part.sender.run


def _is_counted(manifest: Manifest) -> bool:
    """Return whether something shows that an unnumbered part's version is complete.

    A full sync must cover the model, and the folder of a delta that proves states has an index.
    """
    return manifest.full or manifest.proves_states


def located(parts: Sequence[PartId], paths: Sequence[Path], url: str | None = None) -> list[PartId]:
    """Return the parts with the folders of their version that they are from.

    Args:
        paths: of the parts, or one folder that all are from.
        url: what their folder is a copy of, if they were fetched.
    """
    if len(paths) != len(parts) or os.path.isdir(paths[0]):
        return list(parts)
    return [
        msgspec.structs.replace(part, folder=url or str(path.parent), file=path.name)
        if version_of(path.parent) == part.version
        else part
        for part, path in zip(parts, paths, strict=True)
    ]


async def after_gap(
    engine: Engine,
    parts: Sequence[PartId],
    path: Path,
    roots: Sequence[str],
    bring: Callable[[Path], object] | None = None,
) -> list[PartId]:
    """Return the parts of a delta as starting from the engine's version, if that is shown.

    A trainer counts up in steps without changes, too. If the folders of the versions between show
    that these hold nothing, the delta starts from the engine's version. Else it is left alone, and
    will be refused.

    Args:
        path: of the first part, or the folder that all are from.
        bring: see `gap_is_empty`.
    """
    first = parts[0]
    folder = path if os.path.isdir(path) else path.parent
    if first.full or first.base_version is None or version_of(folder) != first.version:
        return list(parts)
    [state, *_] = await call_all_ranks(engine, GetState())
    current, base = state.version, first.base_version
    if base <= current or any(part.base_version != base for part in parts):
        return list(parts)
    if not await asyncio.to_thread(gap_is_empty, folder, current + 1, base, roots, bring):
        return list(parts)
    return [msgspec.structs.replace(part, base_version=current) for part in parts]
