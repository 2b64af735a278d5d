"""Files of a request: parts, or the folder of one version that another trainer has published."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager

import msgspec

from delta_server.intake import VerifiedPart
from delta_server.request_options import Options
from delta_server.request_record import RequestRecord
from delta_server.sources import Inlet, Source
from delta_server.sources.folders import gap_is_empty, spool_request, version_of
from delta_server.sources.numbering import as_one_sync, part_id
from delta_server.sources.store_files import ResolvedFiles
from delta_server.staging import NumberedPart
from engine_ext.errors import MalformedPart
from engine_ext.format import PartId, Unproven


class Files(Source):
    """A source of the parts in some files.

    Files whose metadata have no part numbers are one transaction. If they name the version
    that the engine is at, those not seen before are applied as its continuation.

    Args:
        files: has the files while it is entered; see `StoreFiles.resolved`.
    """

    def __init__(
        self,
        inlet: Inlet,
        files: AbstractAsyncContextManager[ResolvedFiles],
        options: Options,
        record: RequestRecord,
    ) -> None:
        super().__init__(inlet, options, record)
        self._files = files
        self._found = ResolvedFiles([], [])
        self._fetched = contextlib.AsyncExitStack()

    async def parts(self) -> AsyncGenerator[VerifiedPart, None]:
        """Yield the parts once all files are read.

        Raises:
            DeltaError: see `StoreFiles.resolved` and `spool_request`.
        """
        self._found = await self._fetched.enter_async_context(self._files)
        start = time.perf_counter()
        waiting = deque(await spool_request(self.inlet, self._found))
        self.record.timings["receive_ms"] = (time.perf_counter() - start) * 1e3
        try:
            while waiting:
                yield waiting.popleft()
        finally:
            for one in waiting:
                one.remove()

    async def complete(self, verified: Sequence[VerifiedPart]) -> list[NumberedPart]:
        """Return the parts with their ids, and with what the folders of their version show.

        Raises:
            MalformedPart: they are of several versions or runs, or see `part_id`.
        """
        options, origin = self.options, self.record.origin
        parts = [part_id(one.manifest, one.identity, options, origin) for one in verified]
        self.record.parts = parts
        are_all = all(one.manifest.part is None for one in verified)
        if are_all:
            parts = self._located(parts)
        versions = sorted({part.version for part in parts})
        if len(versions) > 1:
            raise MalformedPart(f"the files of one request lead to versions {versions}")
        if len({part.run for part in parts}) > 1:
            raise MalformedPart("the files of one request are of several runs")
        numbered = list(zip(await self._after_gap(parts), verified, strict=True))
        return await as_one_sync(self.inlet.coordinator, numbered) if are_all else numbered

    async def settled(self, status: str | None) -> None:
        """Delete what was fetched."""
        await self._fetched.aclose()

    def _located(self, parts: list[PartId]) -> list[PartId]:
        """Return parts without numbers with the folders of their version that they are from."""
        paths, url = self._found.paths, self._found.url
        if len(paths) != len(parts) or os.path.isdir(paths[0]):
            return parts
        return [
            msgspec.structs.replace(
                part, unproven=Unproven(folder=url or str(path.parent), file=path.name)
            )
            if version_of(path.parent) == part.version
            else part
            for part, path in zip(parts, paths, strict=True)
        ]

    async def _after_gap(self, parts: list[PartId]) -> list[PartId]:
        """Return the parts of a delta as starting from the engine's version, if that is shown.

        A trainer counts up in steps without changes, too. If the folders of the versions between
        show that these hold nothing, the delta starts from the engine's version. Else it is left
        alone, and will be refused.
        """
        first, found = parts[0], self._found
        folder = found.paths[0] if os.path.isdir(found.paths[0]) else found.paths[0].parent
        if first.full or first.base_version is None or version_of(folder) != first.version:
            return parts
        current, base = await self.inlet.coordinator.version(), first.base_version
        if base <= current or any(part.base_version != base for part in parts):
            return parts
        versions = range(current + 1, base + 1)
        if not await asyncio.to_thread(
            gap_is_empty, folder, versions, found.roots, found.bring_index
        ):
            return parts
        return [msgspec.structs.replace(part, base_version=current) for part in parts]
