"""One engine as the reference sender sees it: its version, its plan, and what it holds."""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from delta_sender.acked_state import AckedState, PostedSync
from delta_sender.destination import Destination, Options
from delta_sender.encoding_policy import (
    AUTO,
    EncodingChoice,
    EncodingPolicy,
    ParamStats,
    escaped_share,
)
from delta_sender.part_builder import Filling, Piece, Sent, digest_of
from delta_sender.post_queue import PostQueue
from delta_sender.results import SyncError, SyncReport
from delta_sender.snapshot import Change, Snapshot, payload_bytes
from delta_sender.sync_round import SyncRound
from engine_ext.dtypes import TORCH_DTYPE
from engine_ext.wire.digest import Digest
from engine_ext.wire.manifest import DIFFERENCES
from engine_ext.wire.part import encode_part

logger = logging.getLogger(__name__)

_LARGE: Final = 128 << 20  # bytes of a tensor of which most has changed, from which it goes dense


class Session(AckedState):
    """One engine. It holds the snapshot, but for `behind`, at `version`.

    Args:
        server: the engine's endpoints, or a delta log.
        snapshot: shared by all links.
        options: how parts are made.
        version: the version the engine is at.
        is_log: it is a delta log, which gets values only.
        has_log: what the engine lacks may be in one.
    """

    def __init__(
        self,
        server: Destination,
        snapshot: Snapshot,
        options: Options,
        version: int,
        *,
        is_log: bool = False,
        has_log: bool = False,
    ) -> None:
        super().__init__(snapshot, version)
        self.server, self._is_log, self._has_log = server, is_log, has_log
        self._options = options
        self._manner = EncodingPolicy(
            options.encoding
        )  # without differences once they were refused
        if is_log and self._manner.may_differ:
            self._manner = self._manner.of_values()
        self._planned = False  # the engine had a plan when it was last asked

    def bring(self, step: SyncRound) -> Committed:
        """Send one step. The link is as before it, until `Committed.acknowledge` is called.

        If an earlier answer was lost, the engine is asked first whether it has committed. If its
        old values are not those of the differences, it is sent the new values, once, if a digest
        proves all that they lead to. If it turns out to hold something else (it was restarted, a
        digest disagrees) or to be ``uncertain``, the delta log is replayed if it is behind in it;
        otherwise the whole model is sent instead, once. If it refuses differences (it casts a
        tensor, or writes by another way), it is sent values, and from then on if it takes them.

        Raises:
            SyncError: The engine refused or could not be reached.
        """
        if self.doubt is not None and self.doubt.posted is not None:
            state = self.server.status()
            with step.reading():
                self.decide(state)
        full, version = step.full or self.suspect, step.version
        manner = sends = self._manner
        if full or not self.is_proven:  # it would not be seen that another sync led there
            version = max(version, self.server.tried + 1)
        may_catch_up = self._has_log
        while True:
            try:
                return replace(self._send(step, version, sends, full=full), manner=manner)
            except SyncError as failed:
                if full:
                    raise
                kind = failed.error.get("type")
                healable = manner.may_differ and not sends.heals and self.is_proven
                if failed.is_of_old_values and healable:
                    logger.warning("new values, whatever the old ones are, after: %s", failed)
                    sends = manner.healing()
                elif failed.calls_for_full:
                    full = not (may_catch_up and self._is_brought_up(step, failed))
                    # By now the log may hold what is sent here too, as values.
                    may_catch_up, sends = False, manner if full else manner.of_values()
                    if full and isinstance(actual := failed.error.get("actual"), int):
                        version = max(version, actual + 1)
                elif sends.may_differ and kind == "NotUpdatable":
                    logger.warning("values in place of differences, as these met: %s", failed)
                    manner = sends = manner.of_values()
                else:
                    raise

    def settle(self, outcome: Committed | BaseException) -> None:
        """Take in how a step ended that had gone on alone.

        Raises:
            BaseException: what it has failed with.
        """
        doubt = self.doubt
        assert doubt is not None
        if isinstance(outcome, Committed):
            try:
                outcome.acknowledge()
            finally:
                self.behind = doubt.behind or {}
                self.suspect = self.suspect or doubt.behind is None
                self.doubt = None
            return
        if doubt.posted is None:
            posted = self._posted
            self.doubt = None if posted is None else replace(doubt, posted=posted)
        raise outcome

    def _is_brought_up(self, step: SyncRound, failed: SyncError) -> bool:
        """Whether the delta log has led the engine here, or to what it is to be sent by now."""
        if not isinstance(actual := failed.error.get("actual"), int):
            return False
        self._planned = False  # it may be another by now
        try:
            if actual > self.version:  # it has started again, and found it there
                state = self.server.status()
                with step.reading():
                    return self.is_at_the_snapshot(state)
            return (self.server.catch_up() or 0) >= self.version
        except SyncError as failure:
            logger.warning("not brought up by the delta log: %s", failure)
            return False

    def _learn_plan(self, plan: Any, *, full: bool) -> None:
        """Choose by the engine's plan what is sent, and compute the digest of what it holds; for a
        full sync that stays at zero, as nothing of it will be left.

        A name that the plan lacks is sent all the same, for the engine to refuse it, unless it is
        tied to one that the plan has.
        """
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
            counted = () if full else self._digested
            self._digest = digest_of((name, self._old(name)) for name in counted)
        if first_time:
            if ignored := set(snapshot) - set(map(snapshot.kept, self._names)):
                logger.warning("left out, as the engine ignores them: %s", sorted(ignored))
            if lacking:
                logger.warning("no digests, as the engine's cover tensors not in base: %s", lacking)

    def _old(self, name: str) -> np.ndarray[Any, Any]:
        kept = self._snapshot.kept(name)
        return self._snapshot.image(kept, self.behind.get(kept)).values

    def _change(self, pieces: Iterable[Piece], *, full: bool) -> Digest:
        """What a part adds to the digest; without a plan, all of it."""
        if full:  # of the very values that are sent
            return digest_of((p.name, p.delta.values) for p in pieces if p.name in self._digested)
        counted = (p for p in pieces if not self._planned or p.name in self._digested)
        return sum((piece.digest for piece in counted), start=Digest.ZERO)

    def _parts(
        self, step: SyncRound, manner: EncodingPolicy, *, full: bool
    ) -> Iterator[tuple[Filling, bool]]:
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

    def _pieces(self, step: SyncRound, manner: EncodingPolicy, *, full: bool) -> Iterator[Piece]:
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
                        change = snapshot.with_places(change)
                        delta = change.delta(name)
                    yield Piece(name, delta, change, name == kept, pick)

    def _pick(
        self, name: str, change: Change | None, manner: EncodingPolicy, *, full: bool
    ) -> EncodingChoice:
        """How a param travels. Differences need old values that are proven."""
        image = self._snapshot.image(self._snapshot.kept(name))
        nnz, escaped = image.values.size if change is None else change.nnz, None
        kept_dense = change is not None and change.places is None
        # Its places would be found again, and take several times as much memory.
        only_dense = full or change is None or (kept_dense and image.values.nbytes > _LARGE)
        if change is not None and not full and (name in self._digested or not self._planned):
            escaped = escaped_share(change.old, change.new) if manner.may_differ else None
        floating = TORCH_DTYPE[image.dtype].is_floating_point
        facts = ParamStats(
            image.values.size, nnz, image.values.itemsize, floating, escaped, kept_dense
        )
        return manner.pick(facts, only_dense, self.server.speed.bytes_per_s)

    def _send(
        self, step: SyncRound, version: int, manner: EncodingPolicy, *, full: bool
    ) -> Committed:
        """Encode part by part, and have them posted."""
        # Before a full sync again: the engine may be another, and our digest may be wrong. Without
        # a plan too: an engine that has no checkpoint gets one with its first sync.
        learns = full or not self._planned
        plan = self.server.plan() if learns else None
        outbox = PostQueue(self.server, step, waits=not self._is_log)
        try:
            with step.reading():
                if learns:
                    self._learn_plan(plan, full=full)
                sent = self._make(step, version, manner, outbox, full=full)
            answer = outbox.finish()
        except BaseException as error:
            outbox.abandon()
            self._planned = self._planned and not full  # what is held was not digested
            refused = isinstance(error, SyncError) and error.is_refusal
            if refused or not outbox.posting_last:
                self._posted = None
            elif self._posted is not None:  # the delta log leads there too, by values
                self._posted = replace(self._posted, sync_ids=step.sync_ids())
            raise
        report = SyncReport(
            version=version,
            base_version=self.version,
            full=full,
            encode_ms=(time.perf_counter() - step.started - outbox.waited_s) * 1e3,
            post_ms=outbox.posting_s * 1e3,
            status=answer["status"],
            engine=answer,
            link_bytes_per_s=self.server.speed.measured,
            **sent.counts,
        )
        if manner.encoding == AUTO and report.picked:
            how = ", ".join(f"{pick}: {count}" for pick, count in sorted(report.picked.items()))
            rate = self.server.speed.bytes_per_s / 1e6
            logger.info("version %d, by a link of %.0f MB/s: params as %s", version, rate, how)
        return Committed(self, report, sent.digest, manner)

    def _make(
        self,
        step: SyncRound,
        version: int,
        manner: EncodingPolicy,
        outbox: PostQueue,
        *,
        full: bool,
    ) -> Sent:
        """Encode part by part."""
        attempt = "full" if full else str(manner)
        picked: Counter[str] = Counter()
        before, after = self._digest, self._digest or Digest.ZERO
        assert before is not None or not manner.heals, "nothing would prove what this leads to"
        nnz = wire_bytes = count = 0
        for number, (part, last) in enumerate(self._parts(step, manner, full=full)):
            digests: dict[str, Any] = {}
            if before is not None:
                change = self._change(part.pieces, full=full)
                after += change
                if not (full or manner.heals):  # then nobody knows what the engine holds
                    digests.update(digest_part=change.hex(), digest_before=before.hex())
                if last:
                    digests.update(digest_after=after.hex())
            elif part.encoding == DIFFERENCES:  # they are not taken without
                digests.update(digest_part=self._change(part.pieces, full=False).hex())
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
            step.check()
            if last and not self._is_log:
                leads_to = None if before is None else after
                self._posted = PostedSync(version, step.sync_ids(), leads_to, self.is_proven)
            outbox.put(body, version, number, last)
        images = [self._snapshot.image(self._snapshot.kept(name)).values for name in self._names]
        return Sent(
            digest=None if before is None else after,
            counts={
                "nnz": nnz,
                "numel": sum(image.size for image in images),
                "full_bytes": sum(image.nbytes for image in images),
                "wire_bytes": wire_bytes,
                "parts": count,
                "digest": None if before is None else after.hex(),
                "picked": dict(picked),
            },
        )


@dataclass(frozen=True)
class Committed:
    """An engine has committed a step, and nothing on this side has moved yet."""

    link: Session
    report: SyncReport
    digest: Digest | None
    manner: EncodingPolicy  # that the engine takes

    def acknowledge(self) -> SyncReport:
        """Let the link move on; the snapshot has.

        Raises:
            SyncError: The engine's digest is another than it should be.
        """
        link, report = self.link, self.report
        link.behind, link._digest, link._manner = {}, self.digest, self.manner
        link.version = report.version
        theirs = report.engine.get("digest")
        link.suspect = self.digest is not None and theirs not in (None, self.digest.hex())
        if link.suspect:
            raise SyncError(
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
