"""How the HTTP process reaches the ranks: SGLang's disk-update request, sent past its lock.

SGLang's tokenizer manager lets a disk update wait until no request runs, and knows one answer at a
time. Staging must stop nobody, so these requests go straight to the schedulers, which take them
between two forward passes, and every answer names the call it is for.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import msgspec

from engine_ext.adapters.sglang.names import LOAD_FORMAT

_MARK = "delta-updates:"
_DEATH_POLL_S = 0.5


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One operation of the receivers, as it travels in a request's manifest.

    Attributes:
        call: names the call.
        operation, arguments: as of `engine_ext.receiver.receiver.Receiver.handle`.
    """

    call: str
    operation: str
    arguments: dict[str, Any]

    @classmethod
    def of(cls, manifest: Any) -> Call:
        """The call in a manifest.

        Raises:
            msgspec.ValidationError: there is none.
        """
        return msgspec.convert(manifest, cls)

    def reply(self, answers: list[dict[str, Any]]) -> str:
        """A message that carries the ranks' answers."""
        return _message(Reply(call=self.call, answers=answers))

    def failure(self, reason: str) -> str:
        """A message that says why there are no answers."""
        return _message(Reply(call=self.call, failure=reason))


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks have answered.

    Attributes:
        call: names the call.
        answers: in rank order.
        failure: why there are none.
    """

    call: str
    answers: list[dict[str, Any]] = []
    failure: str | None = None


def _message(reply: Reply) -> str:
    return _MARK + msgspec.json.encode(reply).decode()


class Channel:
    """Calls from one HTTP process to the ranks.

    Args:
        manager: the tokenizer manager; its disk updates keep working as before.
    """

    def __init__(self, manager: Any) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput

        self._manager = manager
        self._waiting: dict[str, asyncio.Future[Reply]] = {}
        handlers = manager._result_dispatcher._mapping
        self._other_answer = handlers[UpdateWeightFromDiskReqOutput]
        handlers[UpdateWeightFromDiskReqOutput] = self._answered

    async def call(self, operation: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """One operation of the receiver on every rank; their answers, in rank order.

        Raises:
            RuntimeError: the engine died, or the ranks could not answer together.
        """
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        self._manager.auto_create_handle_loop()
        call = Call(call=uuid.uuid4().hex, operation=operation, arguments=arguments)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[call.call] = future
        try:
            self._manager._dispatch_to_scheduler(
                UpdateWeightFromDiskReqInput(
                    model_path="",
                    load_format=LOAD_FORMAT,
                    flush_cache=False,
                    manifest=msgspec.to_builtins(call),
                )
            )
            while not (await asyncio.wait({future}, timeout=_DEATH_POLL_S))[0]:
                self._require_alive()
            reply = future.result()
        finally:
            self._waiting.pop(call.call, None)
        if reply.failure is not None:
            raise RuntimeError(reply.failure)
        return reply.answers

    def _answered(self, output: Any) -> None:
        if not output.message.startswith(_MARK):
            self._other_answer(output)
            return
        reply = msgspec.json.decode(output.message.removeprefix(_MARK), type=Reply)
        future = self._waiting.get(reply.call)
        if future is not None and not future.done():
            future.set_result(reply)

    def _require_alive(self) -> None:
        """Raise where no answer will come: SGLang ends a server whose ranks die, but not at once.

        Raises:
            RuntimeError: a process of the engine is dead, or the engine is about to end.
        """
        watchdog = self._manager._subprocess_watchdog
        dead = watchdog is not None and not all(p.is_alive() for p in watchdog._processes)
        if dead or self._manager.gracefully_exit:
            raise RuntimeError("the engine died")
