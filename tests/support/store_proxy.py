"""A proxy before an object store, which counts requests and breaks some of them."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from tests.support.object_stores import StoreServer

_SLOW_PIECES = 5
_AT_ONCE = struct.pack("ii", 1, 0)  # on and 0 s: closing a connection resets it


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault in one answer.

    Attributes:
        status: is answered in place of the store's answer.
        cut_after: bytes of the body after which the connection ends.
        flip: index of a byte of the body that gets another bit.
        seconds: before the store is asked.
        slow_s: between two pieces of the body.
        silent: the connection ends without an answer, after the store has done what was asked.
        reset: the connection is reset in place of an answer; the store is not asked.
        then: is called once the store has done what was asked, before its answer is passed on.
    """

    status: int | None = None
    cut_after: int | None = None
    flip: int | None = None
    seconds: float = 0.0
    slow_s: float = 0.0
    silent: bool = False
    reset: bool = False
    then: Callable[[], None] | None = None


Faults = Callable[[str, str, int], Fault | None]  # of a method, a path and its number


class StoreProxy(AbstractContextManager["StoreProxy"]):
    """Forwards requests to a store, one connection each.

    Attributes:
        server: the store, by way of the proxy.
        requests: how often a method asked for a path.
        faults: chooses the fault of the n-th request of a method for a path, from 0.
    """

    def __init__(self, store: StoreServer) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()
        self.faults: Faults = lambda method, path, number: None
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except ConnectionError:
                    self.close_connection = True

            def forward(self) -> None:
                proxy._forward(self, store)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward

            def log_message(self, *arguments: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.server = StoreServer(f"http://127.0.0.1:{self._http.server_port}")
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop; connections that are open end with their requests."""
        self._http.shutdown()
        self._http.server_close()

    def reads(self, end: str) -> int:
        """Return how many requests read an object whose path ends so."""
        return sum(
            n for (how, path), n in self.requests.items() if how == "GET" and path.endswith(end)
        )

    def _forward(self, handler: Any, store: StoreServer) -> None:
        path = urlsplit(handler.path).path
        with self._lock:
            number = self.requests[handler.command, path]
            self.requests[handler.command, path] += 1
        fault = self.faults(handler.command, path, number) or Fault()
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        time.sleep(fault.seconds)
        if fault.reset:
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
            handler.close_connection = True
            return
        if fault.status is not None:
            handler.send_response(fault.status)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        target = http.client.HTTPConnection(urlsplit(store.endpoint).netloc, timeout=60)
        target.request(handler.command, handler.path, body, dict(handler.headers))
        answer = target.getresponse()
        content = bytearray(answer.read())
        target.close()
        if fault.then is not None:
            fault.then()
        if fault.silent:
            handler.close_connection = True
            return
        handler.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                handler.send_header(name, value)
        length = answer.getheader("Content-Length") if handler.command == "HEAD" else len(content)
        handler.send_header("Content-Length", str(length))
        handler.end_headers()
        if fault.flip is not None and len(content) > fault.flip:
            content[fault.flip] ^= 1
        if fault.cut_after is not None:
            handler.wfile.write(content[: fault.cut_after])
            handler.close_connection = True
            return
        piece = -(-len(content) // _SLOW_PIECES) or 1 if fault.slow_s else len(content) or 1
        for begin in range(0, len(content), piece):
            time.sleep(fault.slow_s)
            handler.wfile.write(content[begin : begin + piece])
