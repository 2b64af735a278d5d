"""The protocol that an engine adapter implements for the delta service, and calls of all ranks."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from delta_server.request_options import Flush
from engine_ext.errors import BaseMismatch, DeltaError
from engine_ext.format import Digest, PartId
from engine_ext.ranks.operations import (
    CommittedSync,
    GetStatus,
    Operation,
    Parts,
    RankState,
    RankStatus,
    ReplyT,
    StagedSync,
    StoppedCall,
)
from engine_ext.ranks.status import ServerStatus

_SINCE: Final = time.time()


class Engine(Protocol):
    """One engine. Every method can raise; none is retried.

    The caller's own requests to pause, resume, sleep or wake up do not use this protocol; adapters
    wrap those methods with `delta_server.commit.serialize_with_commits`.

    Attributes:
        name: the engine's name.
        shared: whether other HTTP processes serve the same engine.
        address: where the engine's other hosts reach this one; None if it has one host.
    """

    name: str
    shared: bool
    address: str | None

    @property
    def model(self) -> str | None:
        """The folder or name of the checkpoint, as the engine was given it; None if not known."""

    async def call(self, request: Operation[ReplyT]) -> list[ReplyT | DeltaError]:
        """Carry out one operation on every rank; returns replies or errors in rank order."""

    async def call_stopped(
        self, request: Operation[ReplyT], flush_cache: Flush
    ) -> StoppedCall[ReplyT]:
        """Stop generation and carry out one operation on every rank, in one call into the engine.

        In between, cached KV and image embeddings are treated as `flush_cache` says; with "salt",
        after `check_salt`. Requests in flight and new ones wait until `publish` resumes them. If
        the engine cannot stop, or not treat its caches, every rank refuses the operation.

        Raises:
            Exception: it is not known what the ranks have done. The engine might be stopped.
        """

    async def end_requests(self, mode: str) -> None:
        """Let no request begin, and end those in flight: ``abort`` them, or ``wait`` for them.

        The engine is paused from then on.
        """

    async def is_paused(self) -> bool: ...

    async def check_salt(self) -> None:
        """Raise `SaltUnavailable` if `call_stopped` cannot salt the cache."""

    async def publish(self, version: str | None, *, resumes: bool) -> None:
        """Set the weight version, unless it is None, then resume if `resumes`; in one call."""

    async def get_weight_version(self) -> str: ...


class AdapterEngine:
    """An engine as the syncs of one LoRA adapter's own tensors see it.

    It sends every operation to the receivers of the adapter, and publishes no version: the
    engine's weight version is that of the model.
    """

    def __init__(self, engine: Engine, adapter: str) -> None:
        self.name, self.shared, self.address = engine.name, engine.shared, engine.address
        self._engine, self.adapter = engine, adapter
        self.is_paused, self.end_requests = engine.is_paused, engine.end_requests
        self.check_salt, self.get_weight_version = engine.check_salt, engine.get_weight_version

    async def call(self, request: Operation[ReplyT]) -> list[ReplyT | DeltaError]:
        """Carry out one operation for the adapter on every rank."""
        return await self._engine.call(msgspec.structs.replace(request, adapter=self.adapter))

    async def call_stopped(
        self, request: Operation[ReplyT], flush_cache: Flush
    ) -> StoppedCall[ReplyT]:
        """Stop generation and carry out one operation for the adapter on every rank."""
        own = msgspec.structs.replace(request, adapter=self.adapter)
        return await self._engine.call_stopped(own, flush_cache)

    @property
    def model(self) -> str | None:
        return self._engine.model

    async def publish(self, version: str | None, *, resumes: bool) -> None:
        """Publish nothing; resume if `resumes`."""
        await self._engine.publish(None, resumes=resumes)


async def call_all_ranks(engine: Engine, request: Operation[ReplyT]) -> list[ReplyT]:
    """Carry out one operation on every rank; returns the replies in rank order.

    Raises:
        DeltaError: the error of the first rank that has one. The other ranks might have carried
            the operation out, which is harmless for every operation except commits and rollbacks.
    """
    replies: list[ReplyT] = []
    for answer in await engine.call(request):
        if isinstance(answer, DeltaError):
            raise answer
        replies.append(answer)
    return replies


async def rank_states(engine: Engine) -> list[RankState]:
    """Return what every HTTP process must know of the ranks, in rank order; cheap."""
    reports = await call_all_ranks(engine, GetStatus(details=False))
    return [report.state for report in reports]


async def rank_statuses(engine: Engine) -> list[RankStatus]:
    """Return the state of every rank's receiver, in rank order."""
    reports = await call_all_ranks(engine, GetStatus())
    return [report.status for report in reports if report.status is not None]


async def unseen_parts(
    engine: Engine, version: int, identities: list[str], run: str | None = None
) -> set[str]:
    """Return the identities of parts that some rank has not committed at a version.

    Args:
        run: that the parts name.
    """
    parts = Parts(version=version, run=run, identities=identities)
    reports = await call_all_ranks(engine, GetStatus(details=False, parts=parts))
    return {identity for report in reports for identity in report.unseen}


@dataclass(frozen=True, slots=True)
class Held:
    """What an engine holds.

    Attributes:
        version, run: that the last sync has led to, and that it was of.
        digest: of the weights, as the syncs add up to it.
        loaded: whether nothing was written since the engine has started.
        staged: the sync that has staged parts; None if there is none.
        last_sync: the last one that was committed; None if there is none.
        changed_by: what else has changed the weights since, so that they are of no version.
        mismatched: tensors that were found to hold other bits than the syncs have written.
        uncertain: whether a write has failed half-way.
        asleep: whether the memory of the weights is released.
    """

    version: int
    run: str | None
    digest: str
    loaded: bool
    staged: StagedSync | None
    last_sync: CommittedSync | None
    changed_by: str | None
    mismatched: list[str]
    uncertain: bool
    asleep: bool

    @classmethod
    def of(cls, replies: Sequence[RankStatus]) -> Held:
        """Return what the ranks hold that have answered so."""
        first = replies[0]
        return cls(
            version=first.version,
            run=first.run,
            digest=total_digest(reply.digest for reply in replies),
            loaded=first.loaded,
            staged=first.staged,
            last_sync=first.last_sync,
            changed_by=changed_by(replies),
            mismatched=sorted({name for reply in replies for name in reply.mismatched}),
            uncertain=are_uncertain(replies),
            asleep=any(reply.asleep for reply in replies),
        )

    def complete_sync(self, version: int, sync_id: str | None) -> PartId | None:
        """Return what names a sync if all of its parts are staged; None if they are not."""
        staged = self.staged
        if staged is None or (staged.version, staged.sync_id) != (version, sync_id):
            return None
        if len(staged.parts) != staged.num_parts:
            return None
        return part_of(staged)

    def prepared_for(self, group: str | None) -> StagedSync | None:
        """Return the staged sync if it is held for a group of engines; None if it is not."""
        prepared = None if self.staged is None else self.staged.prepared
        return self.staged if prepared is not None and prepared.group == group else None

    def require_intact(self) -> None:
        """Raise `BaseMismatch` if the weights are known not to be those of the version."""
        if self.changed_by is not None:
            raise BaseMismatch(
                f"{self.changed_by} changed the weights outside of delta sync; send a full sync"
            )
        if self.mismatched:
            raise BaseMismatch.in_memory(self.mismatched)


def part_of(staged: StagedSync) -> PartId:
    """Return what names a staged sync."""
    return PartId(
        version=staged.version,
        base_version=staged.base_version,
        identity="",
        sync_id=staged.sync_id,
        full=staged.full,
    )


def are_uncertain(states: Iterable[RankState]) -> bool:
    """Return whether a write has failed half-way, so that the weights are of no version."""
    found = {(state.version, state.engine_state == "uncertain") for state in states}
    return len(found) > 1 or any(failed for _, failed in found)


def changed_by(states: Iterable[RankState]) -> str | None:
    """Return what has changed the weights outside of delta sync since the last sync, if any has."""
    return next((state.foreign for state in states if state.foreign), None)


def total_digest(shares: Iterable[str]) -> str:
    """Return the model's digest from the shares that the ranks count, in hex."""
    return Digest.total(map(Digest.parse, shares)).hex()


def server_status(engine: Engine) -> ServerStatus:
    """Describe this process and what it serves."""
    return ServerStatus(
        host=socket.gethostname(), model=engine.model, since=_SINCE, seconds=time.time() - _SINCE
    )
