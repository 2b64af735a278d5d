"""One engine as the reference sender sees it: its version, its plan, and what it holds."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine_ext.digest import Digest, tensor_digest
from engine_ext.dtypes import TORCH_DTYPE
from engine_ext.wire.manifest import DIFFERENCES
from engine_ext.wire.part import encode_part
from sender_choice import AUTO, Facts, Manner, Pick, escaped_share
from sender_http import Options, Place, SyncFailed
from sender_parts import Filling, Piece
from sender_poster import Poster
from sender_report import SyncReport
from sender_snapshot import Change, Changes, Snapshot, payload_bytes
from sender_step import Step

logger = logging.getLogger(__name__)


class Link:
    """One engine. It holds the snapshot, but for `behind`, at `version`.

    Args:
        server: the engine's endpoints, or a delta log.
        snapshot: shared by all links; not changed here.
        options: how parts are made.
        version: the version the engine is at.
        is_log: it is a delta log: no engine commits before it has the version, and it gets values
            only, which every engine takes.

    Attributes:
        version: the version that the engine acknowledged last.
        behind: from the snapshot to what the engine holds; what it has missed, reversed. Without
            old bits.
        suspect: the engine may hold other bytes; the next sync is a full one.
    """

    def __init__(
        self,
        server: Place,
        snapshot: Snapshot,
        options: Options,
        version: int,
        *,
        is_log: bool = False,
    ) -> None:
        self.server, self.version, self._is_log = server, version, is_log
        self.behind: Changes = {}
        self.suspect = False
        self._snapshot, self._options = snapshot, options
        self._manner = Manner(options.encoding)  # without differences once they were refused
        if is_log and self._manner.may_differ:
            self._manner = self._manner.of_values()
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
        full, version, manner = step.full or self.suspect, step.version, self._manner
        if full or self._digest is None or self._digested != {*self._names}:
            # It would not be seen that a sync whose answer was lost led there.
            version = max(version, self.server.tried + 1)
        while True:
            try:
                return self._send(step, version, manner, full=full)
            except SyncFailed as failed:
                if full:
                    raise
                if failed.calls_for_full:
                    full = True
                    if isinstance(actual := failed.error.get("actual"), int):
                        version = max(version, actual + 1)
                elif manner.may_differ and failed.error.get("type") == "NotUpdatable":
                    logger.warning("values in place of differences, as these met: %s", failed)
                    manner = manner.of_values()
                else:
                    raise

    def miss(self, changes: Changes) -> None:
        """The snapshot is about to move on by `changes`, which this engine does not have.

        What is more than half of the model is not kept: the next sync is a full one then.
        """
        behind = self._snapshot.between(changes, self.behind)
        if sum(change.nbytes for change in behind.values()) > self._snapshot.nbytes // 2:
            behind, self.suspect = {}, True
        # Old bits are of use only while a change is sent.
        none = np.empty(0)
        self.behind = {kept: replace(change, old=none) for kept, change in behind.items()}

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
        kept = self._snapshot.kept(name)
        return self._snapshot.image(kept, self.behind.get(kept)).values

    def _change(self, pieces: Iterable[Piece]) -> Digest:
        """What a part adds to the digest; without a plan, all of it."""
        counted = (p for p in pieces if not self._planned or p.name in self._digested)
        return sum((piece.digest for piece in counted), start=Digest.ZERO)

    def _parts(self, step: Step, manner: Manner, *, full: bool) -> Iterator[tuple[Filling, bool]]:
        """Parts of one encoding and dtype, of `bucket_bytes` or one param; and which is last."""
        filling: dict[tuple[str, str], Filling] = {}
        for piece in self._pieces(step, manner, full=full):
            delta, own = piece.delta, piece.pick.encoding
            size = payload_bytes(own, delta)
            part = filling.setdefault((own, delta.dtype), Filling(own))
            if part.pieces and part.nbytes + size > self._options.bucket_bytes:
                yield part, False
                part = filling[own, delta.dtype] = Filling(own)
            part.pieces.append(piece)
            part.nbytes += size
        rest = [*filling.values()] or [Filling(manner.empty)]
        for part in rest:
            yield part, part is rest[-1]

    def _pieces(self, step: Step, manner: Manner, *, full: bool) -> Iterator[Piece]:
        """What the engine is to be sent, while it is read."""
        snapshot = self._snapshot
        names: defaultdict[str, list[str]] = defaultdict(list)
        for name in self._names:
            names[snapshot.kept(name)].append(name)
        for kept, read in step.tensors():
            if kept in names:
                change = snapshot.turn(kept, self.behind.get(kept), read)
                for name in names[kept] if full or change else ():
                    pick = self._pick(name, change, manner, full=full)
                    if change is None or pick.dense:
                        delta = replace(snapshot.image(kept, read), name=name)
                    else:
                        delta = change.delta(name)
                    yield Piece(name, delta, change, name == kept, pick)

    def _pick(self, name: str, change: Change | None, manner: Manner, *, full: bool) -> Pick:
        """How a param travels. Differences need old values that are proven."""
        image = self._snapshot.image(self._snapshot.kept(name))
        nnz, escaped = image.values.size if change is None else change.new.size, None
        dense = full or change is None or change.places is None
        if change is not None and not dense and (name in self._digested or not self._planned):
            escaped = escaped_share(change.old, change.new) if manner.may_differ else None
        floating = TORCH_DTYPE[image.dtype].is_floating_point
        facts = Facts(image.values.size, nnz, image.values.itemsize, floating, escaped)
        return manner.pick(facts, dense, self.server.speed.bytes_per_s)

    def _send(self, step: Step, version: int, manner: Manner, *, full: bool) -> Committed:
        """Encode part by part, and post each while the next is encoded."""
        # Before a full sync again: the engine may be another, and our digest may be wrong.
        # Without a plan too: an engine that has no checkpoint gets one with its first sync.
        if full or not self._planned:
            self._learn_plan()
        attempt = "full" if full else str(manner)
        picked: Counter[str] = Counter()
        before, after = self._digest, self._digest or Digest.ZERO
        nnz = wire_bytes = count = 0
        with Poster(self.server) as poster:
            for number, (part, last) in enumerate(self._parts(step, manner, full=full)):
                digests: dict[str, Any] = {}
                if before is not None:
                    change = self._change(part.pieces)
                    after += change
                    if not full:  # where it is, nobody knows what the engine holds
                        digests.update(digest_part=change.hex(), digest_before=before.hex())
                    if last:
                        digests.update(digest_after=after.hex())
                elif part.encoding == DIFFERENCES:  # they are not taken without
                    digests.update(digest_part=self._change(part.pieces).hex())
                count += 1
                metadata = {
                    "encoding": part.encoding,
                    "sync_id": step.sync_id(attempt),
                    "current_version": version,
                    "base_version": None if full else self.version,
                    "part": number,
                    "num_parts": count if last else None,  # nobody knows before all is read
                    "full": full,
                    **digests,
                }
                encode = functools.partial(_encode, part.pieces, **metadata)
                # Of the same metadata, engines that have missed nothing get the same bytes.
                names = [(piece.name, piece.pick) for piece in part.pieces]
                owner = id(self) if self.behind and not full else None
                body = step.body(attempt, (*metadata.items(), *names, owner), encode)
                nnz += sum(piece.delta.nnz for piece in part.pieces)
                picked.update(str(piece.pick) for piece in part.pieces)
                wire_bytes += len(body)
                part.pieces.clear()  # while it is posted, the following is read
                poster.wait()
                step.check()
                if last and not self._is_log:
                    step.wait_until_logged()
                poster.post(body, version, number, last)
            answer = poster.wait()
        images = [self._snapshot.image(self._snapshot.kept(name)).values for name in self._names]
        report = SyncReport(
            version=version,
            base_version=self.version,
            nnz=nnz,
            numel=sum(image.size for image in images),
            full_bytes=sum(image.nbytes for image in images),
            wire_bytes=wire_bytes,
            parts=count,
            encode_ms=(time.perf_counter() - step.started - poster.waited_s) * 1e3,
            post_ms=poster.posting_s * 1e3,
            status=answer["status"],
            full=full,
            digest=None if before is None else after.hex(),
            engine=answer,
            picked=dict(picked),
            link_bytes_per_s=self.server.speed.measured,
        )
        if manner.encoding == AUTO and picked:
            how = ", ".join(f"{pick}: {picked[pick]}" for pick in sorted(picked))
            rate = self.server.speed.bytes_per_s / 1e6
            logger.info("version %d, by a link of %.0f MB/s: params as %s", version, rate, how)
        return Committed(self, report, None if before is None else after, manner)


@dataclass(frozen=True)
class Committed:
    """An engine has committed a step, and nothing on this side has moved yet."""

    link: Link
    report: SyncReport
    digest: Digest | None
    manner: Manner  # that the engine takes

    def acknowledge(self) -> SyncReport:
        """Let the link move on; the snapshot has.

        Raises:
            SyncFailed: The engine's digest is another than it should be.
        """
        link, report = self.link, self.report
        link.behind, link._digest, link._manner = {}, self.digest, self.manner
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


def _encode(pieces: Iterable[Piece], *, encoding: str, **metadata: Any) -> bytes:
    deltas = [piece.delta for piece in pieces]
    if encoding == DIFFERENCES:
        deltas = [
            replace(delta, values=delta.values - piece.change.old, differences=True)
            for delta, piece in zip(deltas, pieces, strict=True)
            if piece.change is not None
        ]
    return encode_part(deltas, encoding=encoding, **metadata)
