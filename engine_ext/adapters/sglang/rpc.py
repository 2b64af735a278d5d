"""Calls from the HTTP process to the ranks, as disk-update requests of SGLang.

SGLang's tokenizer manager holds a disk update back until no request runs, and expects one answer at
a time. Staging must not stop generation, so these requests go straight to the schedulers, which
take them between two forward passes, and every answer names the call that it belongs to.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import psutil

from engine_ext.adapters.sglang.names import LOAD_FORMAT
from engine_ext.errors import DeltaError
from engine_ext.ranks import operations as ops
from engine_ext.ranks import replicas
from engine_ext.structs import prepare

logger = logging.getLogger(__name__)

_MARK = "delta-updates:"
_DEATH_POLL_S = 0.5


class Publish(ops.Operation[ops.Reply], frozen=True, kw_only=True, tag="publish"):
    """Set the weight version, unless it is None, then resume generation if `resumes`."""

    version: str | None
    resumes: bool


_REQUEST: Final[Any] = ops.Request | Publish
prepare(_REQUEST)


class HowToStop(msgspec.Struct, frozen=True, kw_only=True):
    """Cached KV is flushed or salted, or neither, when generation is stopped."""

    flushes: bool = False
    salt: str | None = None


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One operation on its way to the ranks, in a request's manifest; `call` identifies it.

    Attributes:
        stop: generation is stopped for it; None: it continues.
    """

    call: str
    operation: str
    arguments: dict[str, Any]
    stop: HowToStop | None = None

    @classmethod
    def from_manifest(cls, manifest: Any) -> Call:
        """Return the call in a manifest; msgspec.ValidationError if it holds none."""
        return msgspec.convert(manifest, cls)

    def request(self) -> Any:
        """Return the operation; DeltaError as from `ops.decode_request`."""
        return ops.decode_request(self.operation, self.arguments, _REQUEST)

    def reply(
        self, answers: list[dict[str, Any]], replica: int, stop: ops.Stop | None = None
    ) -> str:
        """Return a message that carries the answers of one replica's ranks, and how it stopped."""
        reply = CallReply(call=self.call, replica=replica, answers=answers, stop=stop)
        return _message(reply)

    def failure(self, reason: str, replica: int) -> str:
        """Return a message with the reason why there are no answers."""
        return _message(CallReply(call=self.call, replica=replica, failure=reason))


prepare(Call)


class CallReply(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's answers to one call, in rank order, or the reason why there are none."""

    call: str
    replica: int = 0
    answers: list[dict[str, Any]] = []
    stop: ops.Stop | None = None
    failure: str | None = None


prepare(CallReply)


def _message(reply: CallReply) -> str:
    return _MARK + msgspec.json.encode(reply).decode()


@dataclass(frozen=True)
class _Replies:
    """The replies to one call. Every replica replies; one reply must not stand for all."""

    by_replica: dict[int, CallReply]
    complete: asyncio.Future[None]


class Channel:
    """Calls from one HTTP process to the ranks; SGLang's own disk updates keep working."""

    def __init__(self, manager: Any) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput

        self._manager = manager
        self._replicas = replicas.count()
        self._schedulers = _schedulers_of_replicas(manager) if self._replicas > 1 else []
        self._waiting: dict[str, _Replies] = {}
        handlers = manager._result_dispatcher._mapping
        self._original_handler = handlers[UpdateWeightFromDiskReqOutput]
        handlers[UpdateWeightFromDiskReqOutput] = self._receive

    async def call(self, request: ops.Operation[ops.ReplyT]) -> list[ops.ReplyT | DeltaError]:
        """Return every rank's reply or error, in rank order; RuntimeError if there are none."""
        return _answers(request, await self._replies(request))

    async def call_stopped(
        self, request: ops.Operation[ops.ReplyT], stop: HowToStop
    ) -> ops.StoppedCall[ops.ReplyT]:
        """Stop generation, then do as `call`."""
        replies = await self._replies(request, stop)
        stops = [reply.stop for reply in replies if reply.stop is not None]
        return ops.StoppedCall.of(_answers(request, replies), stops)

    async def _replies(
        self, request: ops.Operation[Any], stop: HowToStop | None = None
    ) -> list[CallReply]:
        """Return every replica's reply, in their order; RuntimeError if there are none."""
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        operation, arguments = ops.encode_request(request)
        self._manager.auto_create_handle_loop()
        call = Call(call=uuid.uuid4().hex, operation=operation, arguments=arguments, stop=stop)
        replies = self._waiting[call.call] = _Replies(
            {}, asyncio.get_running_loop().create_future()
        )
        try:
            sent = UpdateWeightFromDiskReqInput(
                model_path="",
                load_format=LOAD_FORMAT,
                flush_cache=False,
                manifest=msgspec.to_builtins(call),
            )
            self._manager._dispatch_to_scheduler(sent)
            while not (await asyncio.wait({replies.complete}, timeout=_DEATH_POLL_S))[0]:
                self._require_alive()
        finally:
            self._waiting.pop(call.call, None)
        in_order = [replies.by_replica[number] for number in sorted(replies.by_replica)]
        for reply in in_order:
            if reply.failure is not None:
                raise RuntimeError(reply.failure)
        return in_order

    def _receive(self, output: Any) -> None:
        if not output.message.startswith(_MARK):
            self._original_handler(output)
            return
        reply = msgspec.json.decode(output.message.removeprefix(_MARK), type=CallReply)
        replies = self._waiting.get(reply.call)
        if replies is not None:
            replies.by_replica[reply.replica] = reply
            if len(replies.by_replica) == self._replicas and not replies.complete.done():
                replies.complete.set_result(None)

    def _require_alive(self) -> None:
        """Raise if no answer will come: SGLang does not end a server at once when a rank dies.

        After SIGTERM a server still answers what is in flight, and ends its ranks after that.
        """
        watchdog = self._manager._subprocess_watchdog
        if watchdog is None:
            dead = self._manager.gracefully_exit
        else:
            dead = not all(process.is_alive() for process in watchdog._processes)
        if not all(map(_is_running, self._schedulers)):
            # SGLang watches the controller of the replicas alone. Without this one the server can
            # take no sync any more: it ends as SGLang ends one whose only scheduler has died.
            logger.error("delta updates: a replica's scheduler has died; the server ends")
            os.kill(os.getpid(), signal.SIGQUIT)
            dead = True
        if dead:
            raise RuntimeError("the engine died")


def _answers(
    request: ops.Operation[ops.ReplyT], replies: Sequence[CallReply]
) -> list[ops.ReplyT | DeltaError]:
    return ops.decode_answers(request, [one for reply in replies for one in reply.answers])


def _schedulers_of_replicas(manager: Any) -> list[psutil.Process]:
    """Return the schedulers of all replicas, children of their controller that SGLang ignores."""
    watchdog = manager._subprocess_watchdog
    watched = [] if watchdog is None else [psutil.Process(p.pid) for p in watchdog._processes]
    return [child for process in watched for child in process.children(recursive=True)]


def _is_running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
