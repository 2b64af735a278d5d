"""What stops generation: one operation on every rank between a pause and a resume.

The order is always: pause, the operation in one call to all ranks, the engine's weight version,
resume. An engine that the caller had paused stays paused, and so does one whose weights are
uncertain.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from delta_server.requests import Options
from engine_ext.digest import Digest
from engine_ext.errors import CommitFailed, EngineUncertain, PublishFailed, from_wire


class Engine(Protocol):
    """What an engine adapter gives the service. Every method may raise; none is retried."""

    name: str

    async def call(self, operation: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """`engine_ext.receiver.Receiver.handle` on every rank, in rank order."""

    async def is_paused(self) -> bool: ...

    async def pause(self, mode: str, *, flush_cache: bool) -> None: ...

    async def flush_cache(self) -> None: ...

    async def resume(self) -> None: ...

    async def set_weight_version(self, version: str) -> None: ...

    async def get_weight_version(self) -> str: ...


class Commits:
    """Commits and rollbacks of one engine.

    Args:
        engine: the engine's adapter.

    Attributes:
        uncertain: a write failed half-way; generation must not be served.
    """

    def __init__(self, engine: Engine) -> None:
        self.uncertain = False
        self._engine = engine
        self._lock = asyncio.Lock()
        self._owes_resume = False

    async def status(self) -> list[dict[str, Any]]:
        """The state of every rank's receiver; also notes whether they are certain."""
        answers = await call(self._engine, "status", {})
        states = {(answer["version"], answer["engine_state"]) for answer in answers}
        self.uncertain = len(states) > 1 or answers[0]["engine_state"] == "uncertain"
        return answers

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
        async with self._lock:
            start = time.perf_counter()
            was_paused = await self._engine.is_paused()
            resumes = not was_paused or self._owes_resume
            try:
                if not was_paused:
                    await self._engine.pause(options.pause_mode, flush_cache=options.flush_cache)
                elif options.flush_cache:
                    await self._engine.flush_cache()
                done = await self._everywhere(operation, arguments)
            except CommitFailed:
                # The engine stays paused: nothing may be generated from mixed weights, also not
                # for the other API servers.
                self.uncertain = True
                self._owes_resume = resumes
                raise
            except BaseException:
                if not was_paused or (resumes and not self.uncertain):
                    await self._resume()
                raise
            self.uncertain = False
            await self._go_on(str(done["version"]), resumes)
            return done, (time.perf_counter() - start) * 1e3

    async def publish(self) -> str:
        """Do again what follows a commit, for a sender whose first answer was lost.

        Returns:
            The digest of what the engine holds.
        """
        async with self._lock:
            answers = await self.status()
            if self.uncertain:
                raise EngineUncertain("the ranks are not at one version; send a full sync")
            await self._engine.set_weight_version(str(answers[0]["version"]))
            if self._owes_resume:
                await self._resume()
            return total_digest(answers)

    async def _go_on(self, version: str, resumes: bool) -> None:
        """What follows a write; it is tried to the end.

        Raises:
            PublishFailed: something in it failed.
        """
        failures: list[Exception] = []
        try:
            await self._engine.set_weight_version(version)
        except Exception as error:
            failures.append(error)
        if resumes:
            try:
                await self._resume()
            except Exception as error:
                failures.append(error)
        if failures:
            raise PublishFailed(
                f"version {version} is committed, but the engine did not go on: "
                f"{type(failures[0]).__name__}: {failures[0]}; send the sync again"
            ) from failures[0]

    async def _resume(self) -> None:
        """Resume generation; where that fails, the next commit or repeat does it."""
        self._owes_resume = True
        await self._engine.resume()
        self._owes_resume = False

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
