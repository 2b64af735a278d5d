"""Commit one sync on several engines, or on none: this engine's part in a group of engines.

A sender posts the parts with ``commit=hold`` and then calls ``POST /delta_commit`` on each engine::

    action    this engine                                           the sync is then
    --------  ----------------------------------------------------  -------------------------------
    prepare   all ranks vote as before a commit                     held: it keeps other syncs out
    record    writes that the group commits, and who the group is   held
    commit    commits it, if that is recorded                       committed
    abort     writes that the group does not                        dropped
    ask       from another engine: what is written here?            as the record says

Every engine has one record of a group, on the board of its ranks, which is written by whoever comes
first. The sender decides to commit once *all* engines of the group have recorded it, so that one
record "abort" keeps the group from committing for good. If the sender is gone when the lease of the
held sync ends, the engine settles it:

- Nothing is recorded: the sender can not have decided to commit. It records "abort".
- "commit" is recorded: it asks the others. To be asked closes a group at an engine: if nothing is
  recorded there, "abort" is from then on (or "lost", if the sync is not held there, as after a
  restart), and an abort of the sender is not taken any more. So once all have answered, what they
  have answered cannot change: if any has "abort", it drops the sync; else it commits. That any has
  committed is enough, and others need not be asked.
- Some do not answer: the sync stays held, and it asks again. The status names them.

What becomes of the sync, by where a crash happens. "Settled" is what the engines that live do when
their leases end. An engine that dies has lost the sync, and starts below the group's version::

    crash                                     of the sender           of an engine
    ----------------------------------------  ----------------------  ------------------------------
    before or while all prepare               aborted                 aborted, or left out
    between prepare and the first record      aborted                 aborted
    some have recorded "commit"               aborted                 aborted
    all have, the sender does not know yet    settled: committed      the same, once it answers
    all have, and some have committed         settled: committed      the others are committed
    an abort has reached some                 settled: aborted        aborted
    all are done                              as it was               as it was

A message that is lost is a crash of the one who sends it, or is sent again: every step can be
repeated. A late one changes nothing: the record is there by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Literal

import httpx
import msgspec

from delta_server.board import FLEET, Item
from delta_server.coordinator import Coordinator
from delta_server.engine import Engine, Held, part_of
from delta_server.request_options import Flush, GroupRequest, Options
from delta_server.request_record import RequestRecord
from delta_server.waiting import wait_for_event
from engine_ext.answers import failure_in_words
from engine_ext.errors import (
    AdapterNotLoaded,
    CommittedNotResumed,
    Conflict,
    GroupAborted,
    MalformedPart,
    SyncInProgress,
    as_delta_error,
)
from engine_ext.format import PartId
from engine_ext.log import HOLDER_PREFIX
from engine_ext.ranks.operations import StagedSync
from engine_ext.settings import bearer_headers
from engine_ext.structs import prepare

logger = logging.getLogger(__name__)

_MOST_RECORDS: Final = 64
_MOST_ANSWER: Final = 1 << 20  # bytes
_MOST_ABORTED: Final = 1024  # one that is forgotten does not keep a group from committing any more
_ASK_S: Final = 5.0
_AGAIN_S: Final = 1.0  # until peers that did not answer are asked again; then twice as long, ...
_MOST_AGAIN_S: Final = 10.0

Decision = Literal["commit", "abort", "lost"]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one group at this engine, and what it needs to commit without the sender.

    Attributes:
        decision: "lost" if the engine was asked without having prepared the sync, or since.
        closed: another engine was answered, or this one asks: a sender's abort comes too late.
        committed: the sync is committed here.
        peers: the roots of the group's engines, this one among them.
        unreachable: those that did not answer when they were asked last.
    """

    decision: Decision
    closed: bool = False
    committed: bool = False
    version: int | None = None
    sync_id: str | None = None
    peers: list[str] = []
    unreachable: list[str] = []
    pause_mode: str = "keep"
    flush_cache: Flush = True


class Records(msgspec.Struct, frozen=True):
    """The records of the last groups, the newest one last."""

    groups: dict[str, Record] = {}

    def with_record(self, group: str, record: Record | None) -> Records:
        """Return them with another record of a group; the same if it is None."""
        if record is None or self.groups.get(group) == record:
            return self
        known = {**self.groups, group: record}
        for aborted, most in ((True, _MOST_ABORTED), (False, _MOST_RECORDS)):
            alike = [name for name, one in known.items() if (one.decision == "abort") == aborted]
            for name in alike[:-most]:
                del known[name]
        return Records(known)

    def rolled_back(self, version: int) -> Records:
        """Return them once a version that groups have committed is undone."""
        gone = Record(decision="abort", closed=True)
        undone = {g: gone for g, r in self.groups.items() if r.committed and r.version == version}
        return Records({**self.groups, **undone})


class PeerAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of an engine to "ask"; unknown keys are ignored."""

    decision: Decision
    committed: bool


prepare(Records, PeerAnswer)


Ask = Callable[[str, str, str | None], Awaitable[PeerAnswer]]


@functools.cache
def _client() -> httpx.AsyncClient:
    """Return the client of all questions: to make one takes longer than to ask."""
    limits = httpx.Limits(max_keepalive_connections=0)  # questions are rare
    return httpx.AsyncClient(timeout=_ASK_S, trust_env=False, limits=limits)


async def ask_peer(root: str, group: str, adapter: str | None = None) -> PeerAnswer:
    """Ask the engine at a root for its record of a group, which closes the group there.

    Args:
        adapter: whose tensors the group commits; None means the model's.

    Raises:
        OSError, ValueError: it does not answer, or refuses.
    """
    body, query = {"action": "ask", "group": group}, {"adapter": adapter} if adapter else {}
    url = f"{root.rstrip('/')}/delta_commit"
    # Compressed bytes could grow by any factor.
    headers, text = {"Accept-Encoding": "identity", **bearer_headers()}, bytearray()
    asking = _client().stream("POST", url, json=body, params=query, headers=headers)
    try:
        async with asking as answer:
            if answer.status_code != 200:
                raise ValueError(f"{url} answered {answer.status_code}")
            async for piece in answer.aiter_raw():
                text += piece
                if len(text) > _MOST_ANSWER:
                    raise ValueError(f"{url} answered with more than {_MOST_ANSWER} bytes")
    except httpx.TransportError as error:
        raise OSError(f"{url}: {failure_in_words(error, url, proxies=False)}") from error
    try:
        return msgspec.json.decode(text, type=PeerAnswer)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{url} gave no answer of an engine: {error}") from error


class FleetCommits:
    """The part of one engine in commits of several; see the module for the protocol.

    Attributes:
        ask: asks another engine, given its root, a group and its adapter; raises if there is no
            answer.
        watch: settles what is held once its lease has ended; None if this process has held none.
        watches: those of the model and of all adapters that have not ended.
    """

    def __init__(self, engine: Engine, coordinator: Coordinator, ask: Ask = ask_peer) -> None:
        self.ask = ask
        self._coordinator = coordinator
        self._records = Item(engine, FLEET, Records)
        self._settling = asyncio.Lock()
        self.watch: asyncio.Task[None] | None = None
        self._lease_changed = asyncio.Event()
        self.watches: set[asyncio.Task[None]] = set()
        self._adapters = weakref.WeakValueDictionary[str, FleetCommits]()

    def for_adapter(self, name: str, engine: Engine, coordinator: Coordinator) -> FleetCommits:
        """Return the part in commits of an adapter's versions.

        Its receivers keep the records, as long as the adapter is loaded.
        """
        found = self._adapters.get(name)
        if found is None:
            found = self._adapters[name] = FleetCommits(engine, coordinator, self.ask)
            found.watches = self.watches
        return found

    async def carry_out(self, request: GroupRequest, options: Options) -> dict[str, Any]:
        """Carry out one step; return the answer as JSON.

        Raises:
            GroupAborted: the group has decided against the sync. The engine is unchanged.
            SyncInProgress: of an abort: the engines are settling it among themselves.
            Conflict: the sync is not staged or prepared here, or it is committed already.
            DeltaError: of prepare and commit, see `Coordinator`.
        """
        if request.action == "prepare":
            return await self._prepare(request, options)
        if request.action == "record":
            return await self._record(request, options)
        if request.action == "commit":
            return await self._commit_recorded(request.group)
        if request.action == "abort":
            return await self._abort(request)
        record = await self._close(request.group)
        return {"decision": record.decision, "committed": record.committed}

    async def describe(self, staged: StagedSync | None) -> StagedSync | None:
        """Return what is staged with what is recorded of its group, if one decides on it."""
        if staged is None or staged.prepared is None:
            return staged
        if staged.prepared.group.startswith(HOLDER_PREFIX):  # a delta log's, which has no record
            return staged
        if self.watch is None or self.watch.done():  # the process that watches might be dead
            self._begin_watch()
        record = await self._recorded(staged.prepared.group)
        if record is None:
            return staged
        facts = {"recorded": record.decision == "commit", "unreachable": record.unreachable}
        prepared = msgspec.structs.replace(staged.prepared, **facts)
        return msgspec.structs.replace(staged, prepared=prepared)

    async def settle(self) -> bool:
        """Settle the held sync as if its lease had ended; return whether none is held any more.

        Raises:
            DeltaError: it could not be committed, although the group does.
        """
        async with self._settling:
            staged = await self._staged()
            if staged is None or staged.prepared is None:
                return True
            group = staged.prepared.group
            record = await self._close(group)
            if record.decision == "commit" and not record.committed:
                decision = await self._ask_all(group, record.peers)
                if decision is None:
                    return False
                if decision == "abort":
                    await self._write(group, lambda known: Record(decision="abort", closed=True))
                    record = Record(decision="abort")
            if record.decision == "commit":
                logger.info("delta updates: group %s commits version %d", group, staged.version)
                await self._commit(group, record)
            else:
                await self._drop(staged, group)
                logger.warning("delta updates: group %s drops version %d", group, staged.version)
            return True

    async def roll_back(self, options: Options) -> dict[str, Any]:
        """Restore the version before the last one; see `Coordinator.roll_back`.

        If a group has committed the last one, an engine that still holds it drops it.
        """
        version = (await self._coordinator.held()).version
        try:
            answer = await self._coordinator.roll_back(options)
        except CommittedNotResumed:
            await self._note_undone(version)
            raise
        await self._note_undone(answer["rolled_back"])
        return answer

    async def _note_undone(self, version: int) -> None:
        """Write that a version is undone; the answer says so also if that fails."""
        try:
            await self._records.update(lambda known: known.rolled_back(version))
        except Exception:
            logger.exception("the rollback of version %d could not be noted", version)

    # The steps -----------------------------------------------------------------------------------

    async def _prepare(self, request: GroupRequest, options: Options) -> dict[str, Any]:
        group, version = request.group, request.version
        if version is None:
            raise MalformedPart("the version that is to be prepared is missing")
        if await self._recorded(group) is not None:
            raise GroupAborted(f"group {group} has decided; send the sync again under a new group")
        held = await self._coordinator.held()
        part = held.complete_sync(version, request.sync_id)
        if part is None:
            raise Conflict(f"no complete sync to version {version} is staged; send its parts")
        until = await self._hold(part, group, request.lease, options)
        return {"status": "prepared", "version": version, "group": group, "until": until}

    async def _record(self, request: GroupRequest, options: Options) -> dict[str, Any]:
        group = request.group
        staged = (await self._coordinator.held()).prepared_for(group)
        known = await self._recorded(group)
        if staged is None:
            if known is not None and known.committed:
                return {"status": "recorded", "group": group}
            raise self._lost(group, known)
        if known is None:  # others could have committed when this engine refuses them
            await self._coordinator.check_options(options)
        new = Record(
            decision="commit",
            version=staged.version,
            sync_id=staged.sync_id,
            peers=request.peers,
            pause_mode=options.pause_mode,
            flush_cache=options.flush_cache,
        )
        # First: a hold that cannot be renewed drops the sync, and then "commit" must not be here.
        await self._hold(part_of(staged), group, request.lease)
        record = await self._write(group, lambda known: known or new)
        if record.decision != "commit":
            raise self._lost(group, record)
        return {"status": "recorded", "group": group}

    async def _commit_recorded(self, group: str) -> dict[str, Any]:
        async with self._settling:
            record = await self._recorded(group)
            if record is None or record.decision != "commit":
                raise self._lost(group, record)
            return await self._commit(group, record)

    async def _abort(self, request: GroupRequest) -> dict[str, Any]:
        group = request.group

        def aborted(known: Record | None) -> Record:
            stays = known is not None and (known.committed or (known.closed and not request.force))
            return known if known is not None and stays else Record(decision="abort")

        async with self._settling:
            record = await self._write(group, aborted)
            if record.committed:
                raise Conflict(f"group {group} has committed its sync here")
            if record.decision == "commit":
                raise SyncInProgress(
                    f"the engines of group {group} settle among themselves what becomes of its "
                    "sync; retry in 1 s",
                    retry_after=1,
                )
            held = await self._coordinator.held()
            if (staged := held.staged) is not None:
                named = (staged.version, staged.sync_id) == (request.version, request.sync_id)
                if named or held.prepared_for(group) is not None:
                    await self._drop(staged, group)
        return {"status": "aborted", "group": group}

    async def _close(self, group: str) -> Record:
        """Let the record of a group not change any more, but for a commit; return it.

        If nothing is recorded, that is "abort" from now on, and what is held is dropped.
        """
        try:
            staged = (await self._coordinator.held()).prepared_for(group)
        except AdapterNotLoaded:  # it has lost what it held, as after a restart
            return Record(decision="lost", closed=True)
        none = Record(decision="lost" if staged is None else "abort", closed=True)

        def closed(known: Record | None) -> Record:
            return none if known is None else msgspec.structs.replace(known, closed=True)

        record = await self._write(group, closed)
        if record.decision == "abort" and staged is not None:
            await self._drop(staged, group)
        return record

    # ---------------------------------------------------------------------------------------------

    async def _ask_all(self, group: str, peers: Sequence[str]) -> Decision | None:
        """Return what the group does; None if that is not known before more engines answer."""
        asked = (self.ask(peer, group, self._coordinator.adapter) for peer in peers)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        found = [one for one in answers if isinstance(one, PeerAnswer)]
        asked_of = zip(peers, answers, strict=True)
        silent = [peer for peer, one in asked_of if not isinstance(one, PeerAnswer)]
        if any(one.committed for one in found):
            return "commit"
        if any(one.decision == "abort" for one in found):
            return "abort"
        if not silent:
            return "commit"
        logger.warning("delta updates: group %s waits for answers of %s", group, ", ".join(silent))

        def waiting(known: Record | None) -> Record | None:
            return known and msgspec.structs.replace(known, unreachable=silent)

        await self._write(group, waiting)
        return None

    async def _commit(self, group: str, record: Record) -> dict[str, Any]:
        """Commit the held sync; if it was committed before, repeat what follows a commit."""
        held = await self._coordinator.held()

        def committed(known: Record | None) -> Record:
            return msgspec.structs.replace(known or record, committed=True, unreachable=[])

        options = Options(pause_mode=record.pause_mode, flush_cache=record.flush_cache)
        answer: dict[str, Any]
        if (staged := held.prepared_for(group)) is not None:
            # Not in the turn of its parts: one that is sent again can wait for this commit.
            request = RequestRecord(adapter=self._coordinator.adapter)
            try:
                answer = await self._coordinator.commit_staged(
                    part_of(staged), options, request, group
                )
            except CommittedNotResumed:
                await self._note(group, committed)
                raise
            except Conflict:
                if not _has_committed(await self._coordinator.held(), record):
                    raise
                answer = await self._commit_again(record)  # another process was faster
        elif _has_committed(held, record):
            answer = await self._commit_again(record)
        else:
            raise self._lost(group, record)
        await self._note(group, committed)
        return answer

    async def _commit_again(self, record: Record) -> dict[str, Any]:
        published = await self._coordinator.publish()
        return {"status": "already_applied", "version": record.version, **published}

    async def _note(self, group: str, committed: Callable[[Record | None], Record]) -> None:
        """Write that the sync is committed; the answer says so also if that fails."""
        try:
            await self._write(group, committed)
        except Exception:
            logger.exception("the commit of group %s could not be noted", group)

    async def _hold(
        self, part: PartId, group: str, lease: float, options: Options | None = None
    ) -> float:
        """Hold the staged sync for a group, or change its lease; return when that ends."""
        until = await self._coordinator.hold_staged(part, group, lease, options)
        self._begin_watch()
        return until

    async def _drop(self, staged: StagedSync, group: str) -> None:
        await self._coordinator.drop_staged(part_of(staged), group)

    async def _staged(self) -> StagedSync | None:
        """Return what is staged; nothing of an adapter that is not loaded any more."""
        with contextlib.suppress(AdapterNotLoaded):
            return (await self._coordinator.held()).staged
        return None

    async def _recorded(self, group: str) -> Record | None:
        return (await self._records.read()).groups.get(group)

    async def _write(self, group: str, change: Callable[[Record | None], Record | None]) -> Record:
        """Replace the record of a group by what `change` returns of it; return the new one."""

        def changed(before: Records) -> Records:
            return before.with_record(group, change(before.groups.get(group)))

        await self._records.read()
        return (await self._records.update(changed)).groups[group]

    @staticmethod
    def _lost(group: str, record: Record | None) -> Conflict:
        if record is not None and record.decision == "abort":
            return GroupAborted(f"group {group} has decided against its sync, which is dropped")
        return Conflict(
            f"no sync is prepared for group {group} here, or none any more: the engine was "
            "restarted, or its weights were released or replaced"
        )

    # When the lease ends -------------------------------------------------------------------------

    def _begin_watch(self) -> None:
        """Settle what is held once its lease has ended; an earlier look is begun anew."""
        self._lease_changed.set()
        if self.watch is None or self.watch.done():
            self.watch = asyncio.ensure_future(self._settle_in_time())
            self.watches.add(self.watch)
            self.watch.add_done_callback(self.watches.discard)

    async def _settle_in_time(self) -> None:
        again = _AGAIN_S
        while True:
            self._lease_changed.clear()
            try:
                staged = await self._staged()
                if staged is None or staged.prepared is None:
                    return
                left = staged.prepared.ends - time.monotonic()
                if left <= 0:
                    if await self.settle():
                        return
                    left, again = again, min(2 * again, _MOST_AGAIN_S)
            except Exception as error:
                as_delta_error(error)  # which logs what is a bug
                logger.warning("delta updates: a prepared sync is not settled: %s", error)
                left, again = again, min(2 * again, _MOST_AGAIN_S)
            await wait_for_event(self._lease_changed, left)


def _has_committed(held: Held, record: Record) -> bool:
    """Return whether the engine is at what a group has led to."""
    last = held.last_sync
    is_last = last is not None and (last.version, last.sync_id) == (record.version, record.sync_id)
    return is_last and held.version == record.version and not held.uncertain
