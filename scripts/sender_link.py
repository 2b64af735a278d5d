"""One engine as the reference sender sees it: its version, its plan, and what it holds."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine_ext.digest import Digest, change_digest, tensor_digest
from engine_ext.wire.manifest import DIFFERENCES
from engine_ext.wire.part import ParamDelta, encode_part
from sender_http import Options, Server, SyncFailed
from sender_snapshot import Changes, Snapshot, values_at

logger = logging.getLogger(__name__)

_KEPT_BODIES = 2


@dataclass(frozen=True)
class SyncReport:
    """One sync. The model is what is sent when all is sent, so without the ignored tensors."""

    version: int
    base_version: int
    nnz: int  # elements sent; a dense param counts with all of its elements
    numel: int  # elements of the model
    full_bytes: int  # bytes of the model
    wire_bytes: int  # bytes of the request bodies, each counted once
    parts: int
    encode_ms: float  # everything but posting: reading tensors, comparing, hashing, encoding
    post_ms: float  # posting the parts, with retries and waits
    status: str  # "committed" or "already_applied"
    full: bool
    digest: str | None  # of the model, now; None where no digest is kept
    engine: dict[str, Any]  # the engine's last answer

    @property
    def density(self) -> float:
        return self.nnz / max(1, self.numel)


class Step:
    """One sync as all engines share it. Parts that are alike are encoded once.

    Args:
        changes: from the snapshot to what every engine is to hold.
        version: that they are to be at.
        full: send every tensor dense.
        engines: how many share it.
        started: when it began, by `time.perf_counter`.
    """

    def __init__(
        self, changes: Changes, version: int, *, full: bool, engines: int, started: float
    ) -> None:
        self.started = started
        self._keep = _KEPT_BODIES if engines > 1 else 0
        self.changes, self.version, self.full = changes, version, full
        self._lock = threading.Lock()
        self._sync_ids: dict[str, str] = {}  # by attempt
        self._bodies: defaultdict[str, OrderedDict[Hashable, bytes]] = defaultdict(OrderedDict)

    def sync_id(self, attempt: str) -> str:
        """One for all engines that are sent the same: ``full``, or changes in some encoding."""
        with self._lock:
            return self._sync_ids.setdefault(attempt, uuid.uuid4().hex)

    def body(self, attempt: str, key: Hashable, encode: Callable[[], bytes]) -> bytes:
        """A part that one engine gets. The last of an attempt are kept for who follows."""
        with self._lock:
            bodies = self._bodies[attempt]
            body = bodies.get(key)
            if body is None:
                body = bodies[key] = encode()
                while len(bodies) > self._keep:
                    bodies.popitem(last=False)
            return body


class Link:
    """One engine. It holds the snapshot, but for `behind`, at `version`.

    Args:
        server: the engine's endpoints.
        snapshot: shared by all links; not changed here.
        options: how parts are made.
        version: the version the engine is at.

    Attributes:
        version: the version that the engine acknowledged last.
        behind: from the snapshot to what the engine holds; what it has missed, reversed.
        suspect: the engine may hold other bytes; the next sync is a full one.
    """

    def __init__(self, server: Server, snapshot: Snapshot, options: Options, version: int) -> None:
        self.server, self.version = server, version
        self.behind: Changes = {}
        self.suspect = False
        self._snapshot, self._options = snapshot, options
        self._encoding = options.encoding  # of sparse params; not of differences once refused
        self._names: list[str] = []  # what is sent when all is sent; empty until the plan is read
        self._digested: set[str] = set()  # names that the digest covers
        self._digest: Digest | None = None  # of what the engine holds
        self._planned = False  # the engine had a plan when it was last asked

    def bring(self, step: Step) -> Committed:
        """Send one step. The link is as before it, until `Committed.acknowledge` is called.

        If the engine turns out to hold something else (it was restarted, a digest disagrees, it
        committed a sync whose answer was lost) or to be ``uncertain``, the whole model is sent
        instead, once. If it refuses differences (it casts a tensor, or writes by another way), it
        is sent values, and from then on if it takes them.

        Raises:
            SyncFailed: The engine refused or could not be reached.
        """
        full, version, encoding = step.full or self.suspect, step.version, self._encoding
        while True:
            try:
                return self._send(step, version, encoding, full=full)
            except SyncFailed as failed:
                if full:
                    raise
                if failed.calls_for_full:
                    full = True
                    if isinstance(actual := failed.error.get("actual"), int):
                        version = max(version, actual + 1)
                elif encoding == DIFFERENCES and failed.error.get("type") == "NotUpdatable":
                    logger.warning("values in place of differences, as these met: %s", failed)
                    encoding = _of_values(encoding)
                else:
                    raise

    def miss(self, changes: Changes) -> None:
        """The snapshot is about to move on by `changes`, which this engine does not have.

        What is more than half of the model is not kept: the next sync is a full one then.
        """
        behind = self._snapshot.between(changes, self.behind)
        if sum(map(_nbytes, behind.values())) > self._snapshot.nbytes // 2:
            behind, self.suspect = {}, True
        self.behind = behind

    def _learn_plan(self) -> None:
        """Ask for the engine's plan; choose what is sent, and compute the digest of what it holds.

        A name that the plan lacks is sent all the same, for the engine to refuse it, unless it is
        tied to one that the plan has.
        """
        plan = self.server.plan()
        first_time, self._planned = not self._names, plan is not None
        snapshot = self._snapshot
        rows = [row for rank in plan or [] for row in rank]
        held = {row["name"] for row in rows if row["status"] != "ignored"}
        known = {snapshot.kept(row["name"]) for row in rows}
        names = [*snapshot, *snapshot.tied]
        self._names = [n for n in names if n in held or (n in snapshot and n not in known)]
        self._digested = {row["name"] for row in rows if row["digested"]}
        lacking = sorted(self._digested.difference(self._names))
        self._digest = None
        if plan is not None and self._options.digest and not lacking:
            threads, tensors = os.cpu_count() or 1, ((n, self._old(n)) for n in self._digested)
            digests = (tensor_digest(name, values, threads=threads) for name, values in tensors)
            self._digest = sum(digests, start=Digest.ZERO)
        if first_time:
            if ignored := set(snapshot) - set(map(snapshot.kept, self._names)):
                logger.warning("left out, as the engine ignores them: %s", sorted(ignored))
            if lacking:
                logger.warning("no digests, as the engine's cover tensors not in base: %s", lacking)

    def _old(self, name: str) -> np.ndarray[Any, Any]:
        return self._snapshot.image(self._snapshot.kept(name), self.behind).values

    def _change(self, names: Iterable[str], changes: Changes) -> Digest:
        """What `changes` of these tensors add to the digest; without a plan, of all of them."""
        total = Digest.ZERO
        for name in self._digested.intersection(names) if self._planned else names:
            if change := changes.get(self._snapshot.kept(name)):
                old = values_at(self._old(name), change)
                total += change_digest(name, change.indices, old, change.values)
        return total

    def _parts(self, changes: Changes, encoding: str, *, full: bool) -> list[tuple[str, list[str]]]:
        """Group names into parts of one dtype and at most `bucket_bytes`, or of one param.

        Differences need old values that are proven. Other params of a sync go as values, in parts
        of their own.
        """
        parts: list[tuple[str, list[str]]] = []
        # by encoding and dtype: a part, and its bytes
        filling: dict[tuple[str, str], tuple[list[str], int]] = {}
        for name in self._names:
            kept = self._snapshot.kept(name)
            param = self._snapshot.image(kept, {}) if full else changes.get(kept)
            if param is not None:
                size = self._snapshot.payload_bytes(param)
                proven = name in self._digested or not self._planned
                as_values = param.indices is None or not proven
                own = _of_values(encoding) if as_values else encoding
                part, filled = filling.get((own, param.dtype), ([], 0))
                if not part or filled + size > self._options.bucket_bytes:
                    part, filled = [], 0
                    parts.append((own, part))
                part.append(name)
                filling[own, param.dtype] = part, filled + size
        return parts or [(_of_values(encoding), [])]

    def _send(self, step: Step, version: int, encoding: str, *, full: bool) -> Committed:
        """Encode and post part by part."""
        # Before a full sync again: the engine may be another, and our digest may be wrong.
        # Without a plan too: an engine that has no checkpoint gets one with its first sync.
        if full or not self._planned:
            self._learn_plan()
        changes = self._snapshot.between(self.behind, step.changes)
        parts = self._parts(changes, encoding, full=full)
        attempt = "full" if full else encoding
        before, after = self._digest, self._digest or Digest.ZERO
        nnz = wire_bytes = 0
        post_s = 0.0
        answer: dict[str, Any] = {}
        for number, (part_encoding, names) in enumerate(parts):
            last = number == len(parts) - 1
            digests: dict[str, Any] = {}
            if before is not None:
                change = self._change(names, changes)
                after += change
                if not full:  # where it is, nobody knows what the engine holds
                    digests.update(digest_part=change.hex(), digest_before=before.hex())
                if last:
                    digests.update(digest_after=after.hex())
            elif part_encoding == DIFFERENCES:  # they are not taken without
                digests.update(digest_part=self._change(names, changes).hex())
            metadata = {
                "encoding": part_encoding,
                "sync_id": step.sync_id(attempt),
                "current_version": version,
                "base_version": None if full else self.version,
                "part": number,
                "num_parts": len(parts),
                "full": full,
                **digests,
            }
            deltas = self._deltas(names, step.changes if full else changes, full=full)
            encode = functools.partial(self._encode, deltas, **metadata)
            # Engines of which none has missed anything get the same bytes under the same metadata.
            owner = id(self) if self.behind and not full else None
            body = step.body(attempt, (*metadata.items(), *names, owner), encode)
            post_start = time.perf_counter()
            answer = self.server.deliver(body, version, number, last)
            post_s += time.perf_counter() - post_start
            nnz += sum(delta.nnz for delta in deltas)
            wire_bytes += len(body)
        report = SyncReport(
            version=version,
            base_version=self.version,
            nnz=nnz,
            numel=sum(self._old(name).size for name in self._names),
            full_bytes=sum(self._old(name).nbytes for name in self._names),
            wire_bytes=wire_bytes,
            parts=len(parts),
            encode_ms=(time.perf_counter() - step.started - post_s) * 1e3,
            post_ms=post_s * 1e3,
            status=answer["status"],
            full=full,
            digest=None if before is None else after.hex(),
            engine=answer,
        )
        return Committed(self, report, None if before is None else after, encoding)

    def _deltas(self, names: list[str], changes: Changes, *, full: bool) -> list[ParamDelta]:
        kept = [self._snapshot.kept(name) for name in names]
        found = [self._snapshot.image(k, changes) if full else changes[k] for k in kept]
        return [replace(delta, name=name) for delta, name in zip(found, names, strict=True)]

    def _encode(self, deltas: list[ParamDelta], *, encoding: str, **metadata: Any) -> bytes:
        if encoding == DIFFERENCES:
            deltas = [
                replace(d, values=d.values - values_at(self._old(d.name), d), differences=True)
                for d in deltas
            ]
        return encode_part(deltas, encoding=encoding, **metadata)


@dataclass(frozen=True)
class Committed:
    """An engine has committed a step, and nothing on this side has moved yet."""

    link: Link
    report: SyncReport
    digest: Digest | None
    encoding: str  # that the engine takes

    def acknowledge(self) -> SyncReport:
        """Let the link move on; the snapshot has.

        Raises:
            SyncFailed: The engine's digest is another than it should be.
        """
        link, report = self.link, self.report
        link.behind, link._digest, link._encoding = {}, self.digest, self.encoding
        link.version = report.version
        theirs = report.engine.get("digest")
        link.suspect = self.digest is not None and theirs not in (None, self.digest.hex())
        if link.suspect:
            raise SyncFailed(
                f"version {report.version} is committed, but the engine does not hold what it "
                f"should: its digest is {theirs}, not {self.digest}; the next sync will be full",
                200,
            )
        return report


def _of_values(encoding: str) -> str:
    """In what dense and unproven params travel beside sparse ones in `encoding`."""
    return "gap8_exp" if encoding == DIFFERENCES else encoding


def _nbytes(change: ParamDelta) -> int:
    return change.values.nbytes + (0 if change.indices is None else change.indices.nbytes)
