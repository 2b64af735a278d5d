"""Requests that ask for a version of the weights, by the header ``X-Weight-Version``.

Such a request is answered by weights of the versions that it names, or not at all: whatever the
engine's app sends is passed only if the engine has not left these versions since the request began.
If it has, the app sees a client that has disconnected, so that the engine aborts the request, and
the client gets the error instead: as the answer, or as the last event of a stream.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from delta_server.guards import error_response
from delta_server.served_versions import ServedVersions
from engine_ext.errors import DeltaError, MalformedPart, VersionNotServed
from engine_ext.format import MAX_VERSION

logger = logging.getLogger(__name__)

HEADER: Final = b"x-weight-version"

_NUMBER: Final = "[0-9]{1,19}"
_FORM: Final = re.compile(rf"(?:(>=)[ \t]*)?({_NUMBER})(?:-({_NUMBER}))?")
_NO_ANSWER_HERE: Final = "/v1/responses"  # can continue in the background, to be asked for later
_RETRY_AFTER_S: Final = 1
_POLL_S: Final = 0.05  # for a stream that sends nothing
_EVENTS: Final = b"text/event-stream"


@dataclass(frozen=True, slots=True)
class Wanted:
    """The versions that a request can be answered by; `text` is the header's value."""

    lowest: int
    highest: int
    text: str

    @classmethod
    def parse(cls, values: Iterable[bytes]) -> Wanted:
        """Return what the header's values ask for.

        Raises:
            MalformedPart: it is no version, range or lower bound, or there are several.
        """
        text = ", ".join(value.decode("latin-1") for value in values).strip()
        match = _FORM.fullmatch(text)
        if match is not None:
            lowest = int(match[2])
            highest = MAX_VERSION if match[1] else int(match[3] or match[2])
            if lowest <= highest <= MAX_VERSION and not (match[1] and match[3]):
                return cls(lowest, highest, text)
        raise MalformedPart(f"X-Weight-Version must be N, >=N or N-M, not {text[:80]!r}")


class VersionRequests:
    """The requests of one HTTP process that asked for a version."""

    def __init__(self, served: ServedVersions) -> None:
        self._served = served
        self._open: set[_Request] = set()
        self._watch: asyncio.Task[None] | None = None

    async def serve(
        self, app: ASGIApp, problem: str | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer a request that has the header.

        Args:
            app: answers it.
            problem: why the weights are known to be of no version, if they are.
        """
        try:
            request = self._admitted(problem, scope, receive, send)
        except DeltaError as error:
            await error_response(error)(scope, receive, send)
            return
        self._open.add(request)
        if self._watch is None:
            self._watch = asyncio.ensure_future(self._stop_in_time())
        try:
            await request.run(app)
        finally:
            self._open.discard(request)
            if not self._open and self._watch is not None:
                self._watch.cancel()
                self._watch = None

    def _admitted(
        self, problem: str | None, scope: Scope, receive: Receive, send: Send
    ) -> _Request:
        wanted = Wanted.parse(value for name, value in scope["headers"] if name == HEADER)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or path.startswith(_NO_ANSWER_HERE):
            raise MalformedPart(f"X-Weight-Version is not supported by {path}")
        since, version = self._served.changes, self._served.version
        if problem is not None or not wanted.lowest <= version <= wanted.highest:
            raise not_served(wanted, version, problem)
        return _Request(self._served, since, version, wanted, scope, receive, send)

    async def _stop_in_time(self) -> None:
        """Stop requests that the engine has left, also while their app sends nothing."""
        while True:
            await asyncio.sleep(_POLL_S)
            for request in self._open:
                request.stop_if_left()


def not_served(wanted: Wanted, version: int, problem: str | None = None) -> VersionNotServed:
    """Return the error for a request that cannot be answered by what it asked for."""
    known = version if version >= 0 and problem is None else None
    serves = f"version {version}" if known is not None else f"no version ({problem or 'unknown'})"
    return VersionNotServed(
        f"the engine serves {serves}, the request asked for {wanted.text}",
        version=known,
        wanted=wanted.text,
        retry_after=_RETRY_AFTER_S,
    )


class _StreamCut(Exception):
    """Makes the server close the connection: its client must not take the answer for whole."""


class _Request:
    """A request whose answer is passed on as long as the engine serves what it asked for."""

    def __init__(
        self,
        served: ServedVersions,
        since: int,
        version: int,
        wanted: Wanted,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        self._served, self._wanted = served, wanted
        self._since = self._began = since
        self._version = version
        self._scope, self._receive, self._send = scope, receive, send
        # One message is read ahead: an app that asks whether its client is gone does not wait.
        self._arriving = asyncio.ensure_future(receive())
        self._stopped = asyncio.get_running_loop().create_future()
        self._sending = asyncio.Lock()
        self._start: Message | None = None  # held until the first of the body
        self._left_bytes: int | None = None  # of the body, if its length is declared
        self._is_begun = self._is_over = self._is_cut = False
        self._has_events = False
        self._reporting: asyncio.Future[None] | None = None  # the error to the client

    async def run(self, app: ASGIApp) -> None:
        """Let an app answer it."""
        try:
            await app(self._scope, self._next, self._pass)
        except Exception:
            if not self._stopped.done():
                raise
            logger.debug("a request that was stopped has ended with an error", exc_info=True)
        finally:
            self._arriving.cancel()
        if self._reporting is not None:  # a slow client has yet to read it
            await self._reporting
        if self._is_cut:
            raise _StreamCut(f"{self._wanted.text} is not served any more")

    def _is_left(self) -> bool:
        """Return whether the engine has left what is wanted since the last call."""
        changes = self._served.changes
        if changes == self._since:
            return False
        if self._served.left(self._since, self._wanted.lowest, self._wanted.highest):
            return True
        self._since = changes
        return False

    def stop_if_left(self) -> None:
        """Answer with the error, if the engine has left what is wanted and nothing is being sent.

        The app sees that its client is gone.
        """
        is_idle = not (self._sending.locked() or self._is_over or self._stopped.done())
        if is_idle and self._is_left():
            self._stop()

    def _stop(self) -> None:
        """Begin to send the error; nothing that the app sends is passed from now on.

        The app sees that its client is gone, and can cancel the call in which it was sending.
        """
        self._stopped.set_result(None)
        error = not_served(self._wanted, self._served.version)
        if self._is_begun and not self._has_events:
            self._is_cut = True
        else:
            self._reporting = asyncio.ensure_future(self._send_error(error))

    async def _send_error(self, error: DeltaError) -> None:
        if self._is_begun:
            event = b"data: " + json.dumps({"error": error.to_wire()}).encode() + b"\n\n"
            await self._send({"type": "http.response.body", "body": event, "more_body": False})
        else:
            await error_response(error)(self._scope, self._receive, self._send)

    async def _next(self) -> Message:
        while not (self._arriving.done() or self._stopped.done()):  # another call can take it first
            awaited = {self._arriving, self._stopped}
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        if self._stopped.done() or self._arriving.cancelled():  # the app has ended before
            return {"type": "http.disconnect"}
        message = self._arriving.result()
        if message["type"] != "http.disconnect":  # which every later call returns, too
            self._arriving = asyncio.ensure_future(self._receive())
        return message

    async def _pass(self, message: Message) -> None:
        async with self._sending:
            if self._stopped.done():
                return
            if message["type"] == "http.response.start":
                self._hold(message)
                return
            if not self._is_over:
                if self._is_left():
                    self._stop()
                    return
                self._is_over = self._is_last(message)
                if self._start is not None:
                    start, self._start, self._is_begun = self._start, None, True
                    await self._send(start)
            await self._send(message)

    def _hold(self, start: Message) -> None:
        headers = dict(start.get("headers", ()))
        length = headers.get(b"content-length", b"")
        self._left_bytes = int(length) if length.isdigit() else None
        of_events = headers.get(b"content-type", b"").startswith(_EVENTS)
        self._has_events = of_events and b"content-encoding" not in headers
        self._start = start

    def _is_last(self, message: Message) -> bool:
        """Return whether a message completes the body; the first one completes the header, too."""
        if self._left_bytes is not None:
            self._left_bytes -= len(message.get("body", b""))
        is_last = not message.get("more_body", False) or self._left_bytes == 0
        if self._start is not None and self._start["status"] < 400:
            fixed = self._wanted.lowest == self._wanted.highest
            if fixed or (is_last and self._since == self._began):
                header = (HEADER, str(self._version).encode())
                self._start = {**self._start, "headers": [*self._start["headers"], header]}
        return is_last
