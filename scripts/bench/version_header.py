"""Time what a request for generation costs in front of the engine's app, in microseconds.

    python -m scripts.bench.version_header

The app answers at once, so all that is timed is the guard. Lines:

    no guard     the app alone
    no header    a request without X-Weight-Version
    of these     the look for the header alone
    header       a request with it
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
import types
from collections.abc import Sequence
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from delta_server.generation_guard import GenerationGuard
from delta_server.served_versions import ServedVersions
from delta_server.version_requests import HEADER, VersionRequests
from scripts import command_line

_HEADERS: Final = [
    (name, b"x")
    for name in (b"host", b"user-agent", b"accept", b"accept-encoding", b"connection",
                 b"content-length", b"content-type", b"authorization", b"x-request-id")
]  # fmt: skip


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


async def _receive() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def _send(message: Message) -> None:
    """Nobody listens."""


async def _no(*_: object) -> None:
    """Return None: not uncertain, and no problem."""


async def _time(app: ASGIApp, headers: list[tuple[bytes, bytes]], count: int) -> float:
    """Return microseconds per request."""
    scope: dict[str, Any] = {
        "type": "http", "method": "POST", "path": "/v1/completions", "headers": headers,
        "client": ("127.0.0.1", 9),
    }  # fmt: skip
    start = time.perf_counter()
    for _ in range(count):
        await app(scope, _receive, _send)
    return (time.perf_counter() - start) / count * 1e6


def _look(count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        for name, _ in _HEADERS:
            if name == HEADER:
                raise AssertionError
    return (time.perf_counter() - start) / count * 1e6


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = command_line.make_parser("scripts.bench.version_header", __doc__)
    positive = command_line.at_least(1)
    parser.add_argument("--requests", type=positive, metavar="N", default=20000, help="%(default)s")
    parser.add_argument("--runs", type=positive, metavar="N", default=9, help="%(default)s")
    options = parser.parse_args(arguments)
    served = ServedVersions()
    served.move(7, "")
    service = types.SimpleNamespace(
        committer=types.SimpleNamespace(is_uncertain=_no),
        readiness=types.SimpleNamespace(problem_of_weights=_no),
        versions=VersionRequests(served),
    )
    guard = GenerationGuard(_answer, types.SimpleNamespace(delta_service=service))
    lines: dict[str, list[float]] = {}
    for _ in range(options.runs):
        ways: dict[str, tuple[ASGIApp, list[tuple[bytes, bytes]]]] = {
            "no guard": (_answer, _HEADERS),
            "no header": (guard, _HEADERS),
            "header": (guard, [*_HEADERS, (HEADER, b"7")]),
        }
        for name, (app, headers) in ways.items():
            took = asyncio.run(_time(app, headers, options.requests))
            lines.setdefault(name, []).append(took)
        lines.setdefault("of these", []).append(_look(options.requests))
    for name in ("no guard", "no header", "of these", "header"):
        print(f"{name:10} {statistics.median(lines[name]):8.2f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())
