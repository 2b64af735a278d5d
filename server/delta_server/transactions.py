"""Facts that the folders of published versions add to the parts that are from them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from delta_server.engine import Engine, rank_states
from delta_server.published import gap_is_empty, version_of
from engine_ext.format import PartId, Unproven


def located(parts: Sequence[PartId], paths: Sequence[Path], url: str | None = None) -> list[PartId]:
    """Return parts without numbers with the folders of their version that they are from.

    Args:
        paths: of the parts, or one folder that all are from.
        url: what their folder is a copy of, if they were fetched.
    """
    if len(paths) != len(parts) or os.path.isdir(paths[0]):
        return list(parts)
    return [
        msgspec.structs.replace(
            part, unproven=Unproven(folder=url or str(path.parent), file=path.name)
        )
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
    [state, *_] = await rank_states(engine)
    current, base = state.version, first.base_version
    if base <= current or any(part.base_version != base for part in parts):
        return list(parts)
    if not await asyncio.to_thread(gap_is_empty, folder, current + 1, base, roots, bring):
        return list(parts)
    return [msgspec.structs.replace(part, base_version=current) for part in parts]
