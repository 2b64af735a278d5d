"""Post one rank's parts of an attempt, and agree with the other ranks that all are taken."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from delta_sender.destination import Part
from delta_sender.diff_loop import Bits
from delta_sender.http_client import EngineClient
from delta_sender.options import MultiOptions
from delta_sender.post_queue import PostQueue
from delta_sender.results import RankError
from delta_sender.sharded.owned import OwnedShards, ShardedState
from delta_sender.sharded.parts import PartPlan, Sent
from delta_sender.sharded.ranks import Ranks, described, first_cause, raise_first
from delta_sender.sync_round import Attempt, SyncRound
from engine_ext.dtypes import bits_dtype

# What a rank has posted: "parts", "wire_bytes", "nnz", "digest", "picked"; and not: "lost".
Report = dict[str, Any]


class Posting:
    """One rank's share of an attempt: all parts but the last of the sync.

    Args:
        metadata: What all parts of the sync have.
        lost: Names of this rank's changes that are not posted, for the other ranks to know.
    """

    def __init__(
        self,
        client: EngineClient,
        options: MultiOptions,
        owned: OwnedShards,
        ranks: Ranks,
        sync_round: SyncRound,
        attempt: Attempt,
        metadata: Mapping[str, Any],
        lost: list[str],
    ) -> None:
        self._lost = lost
        self._client, self._options, self._owned, self._ranks = client, options, owned, ranks
        self._round, self._attempt, self._metadata = sync_round, attempt, metadata
        self._queue = PostQueue(client, sync_round, waits=False)
        self._sent: list[Sent] = []

    def all_parts(self, state: ShardedState) -> list[Report]:
        """Post this rank's parts, and return what each rank has posted.

        Raises:
            SyncError: The engine has refused a part of some rank; the same on every rank.
            RankError: A rank has failed; the same on every rank.
        """
        plan, first = self._planned(state)
        self._sent = [Sent() for _ in plan.buckets]
        failure: Exception | None = None
        self._client.at_once = self._options["posts_in_flight"]
        try:
            with self._queue.encoding():
                self._put_all(plan, first)
            self._queue.finish()
        except RankError:
            self._queue.abandon()
            raise
        except Exception as raised:
            self._queue.abandon()
            reason = self._queue.reason(raised)
            failure = reason if isinstance(reason, Exception) else raised
        return self._agreed(failure)

    def _planned(self, state: ShardedState) -> tuple[PartPlan, int]:
        """Return this rank's parts, and the number of the first of them."""
        plan, failure = None, None
        try:
            plan = PartPlan(
                self._ranks.rank,
                self._owned,
                state,
                self._attempt,
                self._round.changes,
                bucket_bytes=self._options["bucket_bytes"],
                speed=self._client.speed.bytes_per_s,
            )
        except Exception as error:
            failure = error
        count = len(plan.buckets) if plan is not None else 0
        said = self._ranks.exchange([count, None if failure is None else described(failure)])
        failures = {rank: failed for rank, (_, failed) in enumerate(said) if failed is not None}
        if failures or plan is None:
            raise_first(failures, failure)
        return plan, sum(count for count, _ in said[: self._ranks.rank])

    def _put_all(self, plan: PartPlan, first: int) -> None:
        if self._attempt.full:
            self._put_whole(plan, first)
            return
        for number in range(len(plan.buckets)):
            self._put(plan, number, first, {})

    def _put(self, plan: PartPlan, number: int, first: int, whole: Mapping[str, Bits]) -> None:
        metadata = {**self._metadata, "part": first + number}
        bucket, sent = plan.buckets[number], self._sent[number]
        encode = functools.partial(plan.encode, bucket, whole, sent, metadata)
        body = self._round.body(self._attempt, number, encode)
        self._queue.put(Part(body, self._attempt.version, first + number, False))

    def _put_whole(self, plan: PartPlan, first: int) -> None:
        """Assemble tensor after tensor on the rank that sends it, and put the parts.

        If one cannot be put, the rest is assembled nevertheless: other ranks take part in it.
        """
        place = {p.tensor.name: n for n, b in enumerate(plan.buckets) for p in b.params}
        whole: list[dict[str, Bits]] = [{} for _ in plan.buckets]
        failure: Exception | None = None
        for name in plan.names:
            try:
                values = self._assembled(plan, name)
            except RankError:
                raise
            except Exception as error:  # other ranks may be sending their parts of it
                self._ranks.leave(f"{name} could not be assembled")
                raise RankError(f"{name}: not assembled: {error}", [self._ranks.rank]) from error
            if values is None or failure is not None:
                continue
            number = place[name]
            whole[number][name] = values
            if len(whole[number]) == len(plan.buckets[number].params):
                try:
                    self._put(plan, number, first, whole[number])
                except Exception as error:
                    failure = error
                whole[number] = {}
        if failure is not None:
            raise failure

    def _assembled(self, plan: PartPlan, name: str) -> Bits | None:
        """Return a whole tensor's new bits on the rank that sends it, None on the others."""
        tensor, rank = self._owned.ownership[name], self._ranks.rank
        if tensor.assembler != rank:
            if name in self._owned.boxes:
                self._ranks.send(plan.new_values(name), tensor.assembler)
            return None
        dtype = bits_dtype(tensor.dtype)
        found = np.empty(tensor.shape, dtype)
        for box, owner in tensor.owners:
            if owner == rank:
                values = plan.new_values(name)
                if box.is_whole:
                    return values
            else:
                values = np.empty(box.numel, dtype)
                self._ranks.receive(values, owner)
            found[box.slices] = values.reshape(box.sizes)
        return found.reshape(-1)

    def _agreed(self, failure: Exception | None) -> list[Report]:
        """Return what each rank has posted, once all parts of all ranks are taken."""
        total = Sent()
        for one in self._sent:
            total.add(one)
        report = {
            "parts": len(self._sent),
            "wire_bytes": self._queue.wire_bytes,
            "nnz": total.nnz,
            "digest": total.digest.hex(),
            "picked": total.picked,
            "lost": self._lost,
            "failed": None if failure is None else described(failure),
        }
        reports: list[Report] = self._ranks.exchange(report)
        failures = {n: one["failed"] for n, one in enumerate(reports) if one["failed"] is not None}
        if failures:
            # The engine may have dropped the sync, and begun it anew with a later part.
            if self._ranks.rank == first_cause(failures):
                self._queue.repeat_refused()
            raise_first(failures, failure)
        return reports
