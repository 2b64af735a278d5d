"""Calls from the HTTP process to the ranks, as disk-update requests of SGLang.

SGLang's tokenizer manager holds a disk update back until no request runs, and expects one answer at
a time. Staging must not stop generation, so these requests go straight to the schedulers, which
take them between two forward passes, and every answer names the call that it belongs to.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import msgspec

from engine_ext.adapters.sglang.names import LOAD_FORMAT
from engine_ext.errors import DeltaError
from engine_ext.wire import operations as ops

_MARK = "delta-updates:"
_DEATH_POLL_S = 0.5


class Serving(ops.Reply, frozen=True, kw_only=True):
    """What only the ranks know if there are several HTTP processes."""

    idle: bool  # no request runs
    weight_version: str


class GetServing(ops.Operation[Serving], frozen=True, kw_only=True, tag="serving"):
    """Describe what the ranks serve; answered by the scheduler, not by its receiver."""


Request = ops.Request | GetServing


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One operation on its way to the ranks, in a request's manifest; `call` identifies it."""

    call: str
    operation: str
    arguments: dict[str, Any]

    @classmethod
    def from_manifest(cls, manifest: Any) -> Call:
        """Return the call in a manifest; msgspec.ValidationError if it holds none."""
        return msgspec.convert(manifest, cls)

    def request(self) -> Any:
        """Return the operation, one of `Request`; DeltaError as from `ops.decode_request`."""
        return ops.decode_request(self.operation, self.arguments, Request)

    def reply(self, answers: list[dict[str, Any]]) -> str:
        """Return a message that carries the ranks' answers."""
        return _message(CallReply(call=self.call, answers=answers))

    def failure(self, reason: str) -> str:
        """Return a message with the reason why there are no answers."""
        return _message(CallReply(call=self.call, failure=reason))


class CallReply(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks' answers to one call, in rank order, or the reason why there are none."""

    call: str
    answers: list[dict[str, Any]] = []
    failure: str | None = None


def _message(reply: CallReply) -> str:
    return _MARK + msgspec.json.encode(reply).decode()


class Channel:
    """Calls from one HTTP process to the ranks; SGLang's own disk updates keep working."""

    def __init__(self, manager: Any) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput

        self._manager = manager
        self._waiting: dict[str, asyncio.Future[CallReply]] = {}
        handlers = manager._result_dispatcher._mapping
        self._original_handler = handlers[UpdateWeightFromDiskReqOutput]
        handlers[UpdateWeightFromDiskReqOutput] = self._receive

    async def call(self, request: ops.Operation[ops.ReplyT]) -> list[ops.ReplyT | DeltaError]:
        """Return every rank's reply or error, in rank order; RuntimeError if there are none."""
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        operation, arguments = ops.encode_request(request)
        self._manager.auto_create_handle_loop()
        call = Call(call=uuid.uuid4().hex, operation=operation, arguments=arguments)
        future: asyncio.Future[CallReply] = asyncio.get_running_loop().create_future()
        self._waiting[call.call] = future
        try:
            sent = UpdateWeightFromDiskReqInput(
                model_path="",
                load_format=LOAD_FORMAT,
                flush_cache=False,
                manifest=msgspec.to_builtins(call),
            )
            self._manager._dispatch_to_scheduler(sent)
            while not (await asyncio.wait({future}, timeout=_DEATH_POLL_S))[0]:
                self._require_alive()
            reply = future.result()
        finally:
            self._waiting.pop(call.call, None)
        if reply.failure is not None:
            raise RuntimeError(reply.failure)
        return ops.decode_answers(request, reply.answers)

    def _receive(self, output: Any) -> None:
        if not output.message.startswith(_MARK):
            self._original_handler(output)
            return
        reply = msgspec.json.decode(output.message.removeprefix(_MARK), type=CallReply)
        future = self._waiting.get(reply.call)
        if future is not None and not future.done():
            future.set_result(reply)

    def _require_alive(self) -> None:
        """Raise if no answer will come: SGLang does not end a server at once when a rank dies."""
        watchdog = self._manager._subprocess_watchdog
        dead = watchdog is not None and not all(p.is_alive() for p in watchdog._processes)
        if dead or self._manager.gracefully_exit:
            raise RuntimeError("the engine died")
