"""The delta log as the reference sender sees it: one more place that gets every version."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from delta_sender.bandwidth import LinkSpeed
from delta_sender.destination import Destination
from delta_sender.results import SyncError
from engine_ext.delta_log.catalog import list_log
from engine_ext.delta_log.writer import Draft, LogWriter
from engine_ext.wire.signature import sign


class LogDestination:
    """Takes parts in an engine's stead, and writes them into a delta log.

    What it is sent must be of use to any engine, so it takes no differences.

    Args:
        folder: the log; made where it is missing.
        engines: are asked which tensors there are and what their digest covers, until one answers;
            without any there is no plan.
        hmac_key: signs the parts.

    Raises:
        BlockingIOError: another sender writes into the log.
    """

    def __init__(self, folder: Path, engines: Sequence[Destination], hmac_key: str | None) -> None:
        self.speed = LinkSpeed()
        self.tried = 0
        self.writer = LogWriter(folder)
        self._engines, self._hmac_key = engines, hmac_key
        self._draft: Draft | None = None

    def leads_on_from(self, version: int) -> bool:
        """Whether a delta from a version continues the log, or begins it."""
        entries = list_log(self.writer.folder).entries
        return not entries or any(version in (e.version, e.base_version) for e in entries)

    def close(self) -> None:
        """Let another sender write."""
        if self._draft is not None:
            self._draft.drop()
        self.writer.close()

    def plan(self) -> Any:
        """The first engine's that answers.

        Raises:
            SyncError: none does.
        """
        failure: SyncError | None = None
        for engine in self._engines:
            try:
                return engine.plan()
            except SyncError as failed:
                failure = failed
        if failure is not None:
            raise failure
        return None

    def status(self) -> dict[str, Any]:
        """A log has none."""
        return {}

    def catch_up(self) -> int | None:
        """Nothing is newer than a log."""
        return None

    def deliver(self, body: bytes, version: int, part: int, last: bool) -> dict[str, Any]:
        """Write one part; with the last one the version is there.

        Raises:
            OSError: it cannot be written.
        """
        if part == 0:
            if self._draft is not None:
                self._draft.drop()
            self._draft = self.writer.begin(version)
        assert self._draft is not None
        self._draft.add(body, None if self._hmac_key is None else sign(self._hmac_key, body))
        if not last:
            return {"status": "staged"}
        folder, self._draft = self._draft.finish(), None
        self.tried = version
        return {"status": f"saved in {folder}"}
