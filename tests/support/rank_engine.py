"""Appliers that record their calls, and an engine of several receivers in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from engine_ext.conformance.thread_group import HANGS_AFTER_S, Group, ThreadRanks
from engine_ext.conformance.verified_file import verified_file
from engine_ext.format import DecodedPart, PartId, decode_part
from engine_ext.format.digest import Digest
from engine_ext.ranks.operations import FileStamp
from engine_ext.settings import Settings
from engine_ext.sync.applier import Applier, Scan
from engine_ext.sync.receiver import Receiver
from engine_ext.sync.staged import StagedParam, StagedPart, UndoLog
from engine_ext.sync.unwritten import Unwritten


class RecordingApplier(Applier):
    """Writes nothing and records its calls; each step can be made to fail.

    Attributes:
        undoes: whether a write that failed can be taken back.
        log: the undo log that a commit returns.
        given_up: the logs whose memory it could use.
    """

    name = "recording"
    digest = Digest.ZERO
    digests: Mapping[str, Digest] = {}
    plan = None

    def __init__(self) -> None:
        self.copies: dict[str, Digest] = {}
        self.committed: list[list[str]] = []
        self.fail: dict[str, Exception] = {}
        self.before_check: Callable[[], object] = lambda: None
        self.undoes = False
        self.log = UndoLog()
        self.given_up: list[UndoLog] = []

    def _step(self, name: str) -> None:
        if name in self.fail:
            raise self.fail[name]

    def stage(self, part: DecodedPart) -> StagedPart:
        self.before_check()
        self._step("check")
        return StagedPart(
            part.manifest, [StagedParam.of(delta, keep=True) for delta in part.deltas]
        )

    def check_sync(self, staged: Sequence[StagedPart], *, full: bool) -> None:
        self._step("check_sync")

    def check_base(self, staged: Sequence[StagedPart]) -> None:
        self._step("check_base")

    def scan(self) -> Scan:
        return Scan(dict(self.digests), [], {})

    def check_rollback(self, logs: Sequence[UndoLog]) -> None:
        self._step("check_rollback")

    def rank_summary(self, staged: Sequence[StagedPart]) -> dict[str, Any]:
        return {}

    def agree(self, staged: Sequence[StagedPart], summaries: Sequence[dict[str, Any]]) -> None:
        self._step("agree")

    def write(self, staged: Sequence[StagedPart], given_up: Sequence[UndoLog] = ()) -> None:
        self.given_up += given_up
        self.committed.append([param.name for part in staged for param in part.params])
        self._step("commit")

    def undo(self, staged: Sequence[StagedPart]) -> None:
        if not self.undoes:
            raise OSError("the old values are gone")

    def finish(self, staged: Sequence[StagedPart]) -> UndoLog:
        self._step("finish")
        return self.log

    def roll_back(self, log: UndoLog) -> None:
        self._step("roll_back")

    def unwritten(self) -> Unwritten:
        self._step("unwritten")
        return Unwritten(())

    def forget(self) -> None:
        self._step("forget")

    def describe(self) -> dict[str, Any]:
        return {"apply": self.name, "certification": {}, "uncertified": {}, "digest": "0" * 32}


class Engine:
    """The receivers of several ranks, called together as an executor calls its workers."""

    def __init__(
        self,
        appliers: Sequence[Any],
        folder: Path,
        *,
        version: int = 0,
        timeout: float = 60.0,
        undo_bytes: int = 1 << 30,
        scrub_interval: float | None = None,
    ) -> None:
        group = Group(len(appliers))
        settings = Settings(
            base_version=version,
            stage_timeout=timeout,
            read_workers=2,
            undo_bytes=undo_bytes,
            scrub_interval=scrub_interval,
        )
        self.folder = folder
        self.receivers = [
            Receiver(applier, ThreadRanks(group, rank), settings)
            for rank, applier in enumerate(appliers)
        ]
        self.now = 0.0

    def call(self, operation: str, **arguments: Any) -> list[dict[str, Any]]:
        """Every rank's answer, in rank order; ranks that might wait for each other have threads."""
        if len(self.receivers) == 1:
            return [self.receivers[0].handle(operation, arguments)]
        with ThreadPoolExecutor(len(self.receivers)) as threads:
            return list(
                threads.map(lambda receiver: receiver.handle(operation, arguments), self.receivers)
            )

    def spool(self, body: bytes) -> Path:
        path = self.folder / f"{len(list(self.folder.iterdir()))}.part"
        path.write_bytes(verified_file(body)[1])
        return path

    def begin(
        self, part: PartId, path: Path, stamp: FileStamp | None = None
    ) -> list[dict[str, Any]]:
        facts: dict[str, Any] = {} if stamp is None else {"stamp": msgspec.to_builtins(stamp)}
        return self.call(
            "begin", part=msgspec.to_builtins(part), path=str(path), now=self.now, **facts
        )

    def poll(self, part: PartId) -> list[dict[str, Any]]:
        """The answers once no rank is still staging."""
        give_up = time.monotonic() + HANGS_AFTER_S
        while True:
            answers = self.call("poll", part=msgspec.to_builtins(part))
            if all("error" in a or a["ok"]["done"] for a in answers):
                return answers
            assert time.monotonic() < give_up, "staging does not end"
            time.sleep(0.001)

    def settle(self, part: PartId, *, staged: bool) -> list[dict[str, Any]]:
        """Keep a part, or forget it."""
        sent = msgspec.to_builtins(part)
        return (
            self.call("prepare", part=sent, keep=True) if staged else self.call("abort", part=sent)
        )

    def prepare(self, part: PartId) -> list[dict[str, Any]]:
        return self.call("prepare", part=msgspec.to_builtins(part))

    def stage(self, part: PartId, body: bytes) -> list[dict[str, Any]]:
        """Begin, poll, keep and prepare as the HTTP side does; the first answers with an error,
        or those of the keeping."""
        answers = self.begin(part, self.spool(body))
        if any("error" in a for a in answers) or answers[0]["ok"]["admission"] != "new":
            return answers
        answers = self.poll(part)
        staged = not any("error" in a for a in answers)
        settled = self.settle(part, staged=staged)
        if not staged or any("error" in a or not a["ok"]["complete"] for a in settled):
            return settled if staged else answers
        done = all(answer["ok"]["done"] for answer in settled)
        while not done:
            answers = self.prepare(part)
            if any("error" in answer for answer in answers):
                return answers
            done = all(answer["ok"]["done"] for answer in answers)
        return settled

    def commit(self, part: PartId) -> list[dict[str, Any]]:
        return self.call("commit", version=part.version, sync_id=part.sync_id)

    def apply(self, part: PartId, body: bytes) -> list[dict[str, Any]]:
        """Stage a sync of one part and commit it; every rank must have staged it."""
        errors_of(self.stage(part, body), none=True)
        return self.commit(part)

    def status(self) -> list[dict[str, Any]]:
        return [answer["ok"]["status"] for answer in self.call("status")]


def errors_of(answers: Sequence[Mapping[str, Any]], *, none: bool = False) -> list[dict[str, Any]]:
    """The error of every rank. All must have one (or, with `none`, no rank has one)."""
    errors = [answer["error"] for answer in answers if "error" in answer]
    assert len(errors) == (0 if none else len(answers)), answers
    return errors


def part_id(body: bytes, **changes: Any) -> PartId:
    """The HTTP side's view of a body."""
    manifest = decode_part(body).manifest
    version = manifest.current_version
    assert version is not None
    base = None if manifest.full else manifest.base_version
    values = {
        "version": version,
        "base_version": version - 1 if base is None and not manifest.full else base,
        "identity": verified_file(body)[0],
        "sync_id": manifest.sync_id,
        "full": manifest.full,
        "part": manifest.part or 0,
        "num_parts": manifest.num_parts or 1,
    }
    return PartId(**{**values, **changes})
