"""What stops generation: one operation on every rank between a pause and a resume.

The order is always: take the hold of the engine that all ranks keep, pause, the operation in one
call to all ranks, the engine's weight version, resume, give the hold back. An engine that the
caller had paused stays paused, and so does one whose weights are uncertain.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from delta_server.engine import Engine
from delta_server.process_identity import is_alive, new_name
from delta_server.request_options import Options
from engine_ext.errors import CommitFailed, EngineUncertain, PublishFailed, from_wire
from engine_ext.wire.digest import Digest

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")
_POLL_S = 0.02
_LEARN_EVERY_S = 1.0


@dataclass
class _Held:
    """One stretch of time in which this process alone may pause and resume the engine.

    Attributes:
        was_paused: the engine was paused at its beginning.
        owed: generation is to go on, and has not yet.
    """

    was_paused: bool
    owed: bool


class EngineCommitter:
    """Commits and rollbacks of one engine.

    Other HTTP processes may serve the same engine. That one of them is at work, and that a failed
    commit has left the engine paused, is kept by the ranks, so that any process can set it right.

    Args:
        engine: the engine's adapter.

    Attributes:
        uncertain: a write failed half-way; generation must not be served. As far as this process
            knows: see `is_uncertain`.
    """

    def __init__(self, engine: Engine) -> None:
        self.uncertain = False
        self._engine = engine
        self._name = new_name()
        self._lock = asyncio.Lock()
        self._learnt_at = -math.inf
        self._caller_at_work = False

    async def status(self) -> list[dict[str, Any]]:
        """The state of every rank's receiver; also notes whether they are certain."""
        return self._learn(await call(self._engine, "status", {}))

    async def is_uncertain(self) -> bool:
        """Whether generation must not be served; where others may know more, the ranks are asked.

        They are not asked more than once a second: a failed commit leaves the engine paused, so
        that what is let through meanwhile waits.
        """
        now = time.monotonic()
        if self._engine.shared and now - self._learnt_at >= _LEARN_EVERY_S:
            self._learnt_at = now
            try:
                self._learn(await call(self._engine, "state", {}))
            except Exception:
                logger.exception("the ranks did not say whether their weights are certain")
        return self.uncertain

    async def run(
        self, operation: str, arguments: dict[str, Any], options: Options
    ) -> tuple[dict[str, Any], float]:
        """Do one operation while nothing is generated.

        Args:
            operation: of the receiver; its answers have ``version`` and ``digest``.
            arguments: the operation's.
            options: pause mode, and whether cached KV is dropped.

        Returns:
            The first rank's answer with the digest of all of them, and milliseconds paused.

        Raises:
            CommitFailed: some rank failed half-way, or did not answer. The engine stays paused.
            PublishFailed: every rank has written, and the engine failed after that.
            DeltaError: every rank refused, and none has written.
        """
        async with self._alone(pauses=True) as held:
            start = time.perf_counter()
            try:
                if not held.was_paused:
                    await self._engine.pause(options.pause_mode, flush_cache=options.flush_cache)
                elif options.flush_cache:
                    await self._engine.flush_cache()
                done = await self._everywhere(operation, arguments)
            except CommitFailed:
                # The engine stays paused: nothing may be generated from mixed weights, also not
                # for the other API servers.
                self.uncertain = True
                raise
            except BaseException:
                if not held.was_paused or (held.owed and not self.uncertain):
                    await self._resume(held)
                raise
            self.uncertain = False
            await self._go_on(str(done["version"]), held)
            return done, (time.perf_counter() - start) * 1e3

    async def publish(self) -> str:
        """Do again what follows a commit, for a sender whose first answer was lost.

        Returns:
            The digest of what the engine holds.
        """
        async with self._alone(pauses=False) as held:
            answers = await self.status()
            if self.uncertain:
                raise EngineUncertain("the ranks are not at one version; send a full sync")
            await self._engine.set_weight_version(str(answers[0]["version"]))
            if held.owed:
                await self._resume(held)
            return total_digest(answers)

    async def by_caller(self, change: Callable[[], Awaitable[_T]]) -> _T:
        """Let the caller pause or resume the engine, but not in the middle of a commit.

        A pause that a failed commit has left behind is the caller's from then on. What was asked
        is done to its end, also for a caller that hangs up.

        Args:
            change: what the caller has asked of the engine.
        """
        if self._caller_at_work:
            return await change()  # one that ends another, which waits for requests
        return await asyncio.shield(asyncio.ensure_future(self._by_caller(change)))

    async def _by_caller(self, change: Callable[[], Awaitable[_T]]) -> _T:
        async with contextlib.AsyncExitStack() as stack:
            held = None
            try:
                held = await stack.enter_async_context(self._alone(pauses=False))
            except Exception:
                logger.exception("the ranks did not say whether a commit is going on")
            self._caller_at_work = True
            try:
                result = await change()
            finally:
                self._caller_at_work = False
            if held is not None:
                held.owed = False
            return result

    @contextlib.asynccontextmanager
    async def _alone(self, *, pauses: bool) -> AsyncIterator[_Held]:
        """Keep all others from pausing and resuming the engine, in every HTTP process."""
        async with self._lock:
            held = await self._take(pauses)
            try:
                yield held
            finally:
                try:
                    arguments = {"holder": self._name, "owed": held.owed}
                    await call(self._engine, "release", arguments)
                except Exception:
                    # This process may take it again, and others may when this one is dead.
                    logger.exception("the ranks did not hear that a commit is over")

    async def _take(self, pauses: bool) -> _Held:
        dead: str | None = None
        while True:
            was_paused = await self._engine.is_paused()
            resumes = pauses and not was_paused
            arguments = {"holder": self._name, "resumes": resumes, "instead_of": dead}
            answers = await call(self._engine, "hold", arguments)
            taken = answers[0]
            if not taken["granted"]:
                dead = None if is_alive(taken["holder"]) else taken["holder"]
                await asyncio.sleep(0 if dead else _POLL_S)
            elif taken["fresh"] or not pauses:
                self._learn(answers)
                return _Held(was_paused, taken["resume_owed"])

    def _learn(self, answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
        states = {(answer["version"], answer["engine_state"]) for answer in answers}
        self.uncertain = len(states) > 1 or answers[0]["engine_state"] == "uncertain"
        self._learnt_at = time.monotonic()
        return answers

    async def _go_on(self, version: str, held: _Held) -> None:
        """What follows a write; it is tried to the end.

        Raises:
            PublishFailed: something in it failed.
        """
        failures: list[Exception] = []
        try:
            await self._engine.set_weight_version(version)
        except Exception as error:
            failures.append(error)
        if held.owed:
            try:
                await self._resume(held)
            except Exception as error:
                failures.append(error)
        if failures:
            raise PublishFailed(
                f"version {version} is committed, but the engine did not go on: "
                f"{type(failures[0]).__name__}: {failures[0]}; send the sync again"
            ) from failures[0]

    async def _resume(self, held: _Held) -> None:
        """Resume generation; where that fails, the next commit or repeat does it."""
        held.owed = True
        await self._engine.resume()
        held.owed = False

    async def _everywhere(self, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            answers = await self._engine.call(operation, arguments)
        except Exception as error:
            # What may still be staged would keep the sync out that ends this state.
            with contextlib.suppress(Exception):
                await call(self._engine, "drop", {})
            raise CommitFailed(
                f"the ranks did not answer whether they committed: {type(error).__name__}: "
                f"{error}; generation answers 503 until a repeat or a full sync is answered"
            ) from error
        refusals = [from_wire(answer["error"]) for answer in answers if "error" in answer]
        failed = [refusal for refusal in refusals if isinstance(refusal, CommitFailed)]
        if failed:
            raise failed[0]
        if refusals and len(refusals) < len(answers):
            raise CommitFailed(
                f"{len(refusals)} of {len(answers)} ranks did not commit: {refusals[0].message}; "
                "generation answers 503 until a full sync commits"
            )
        if refusals:
            raise refusals[0]
        done = [answer["ok"] for answer in answers]
        return {**done[0], "digest": total_digest(done)}


async def call(engine: Engine, operation: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """One operation on every rank.

    Raises:
        DeltaError: the first rank's that has one; ranks that did not fail then have done their
            part, which is harmless for every operation but commits and rollbacks.
    """
    answers = await engine.call(operation, arguments)
    errors = [answer["error"] for answer in answers if "error" in answer]
    if errors:
        raise from_wire(errors[0])
    return [answer["ok"] for answer in answers]


def serialize_with_commits(
    commits: EngineCommitter, change: Callable[_P, Coroutine[Any, Any, _T]]
) -> Callable[_P, Coroutine[Any, Any, _T]]:
    """The engine's own method to pause or to resume, as the caller gets it from now on.

    The adapter itself keeps calling the method as it was.
    """

    @functools.wraps(change)
    async def asked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return await commits.by_caller(lambda: change(*args, **kwargs))

    return asked


def total_digest(answers: Iterable[Mapping[str, Any]]) -> str:
    """The model's digest from the shares that the ranks count."""
    return sum((Digest.parse(a["digest"]) for a in answers), start=Digest.ZERO).hex()


def sum_by_name(shares: Iterable[Mapping[str, str]]) -> dict[str, Digest]:
    """Each tensor's digest from the shares that the ranks count."""
    total: dict[str, Digest] = {}
    for share in shares:
        for name, digest in share.items():
            total[name] = total.get(name, Digest.ZERO) + Digest.parse(digest)
    return total
