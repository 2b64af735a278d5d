"""A TCP proxy in front of an engine that loses requests or answers on demand."""

from __future__ import annotations

import contextlib
import socket
import threading

HOST = "127.0.0.1"
PART = b"POST /update_weights_delta"


class LossyProxy:
    """Forwards connections from a free port.

    Args:
        port: of the engine.

    Attributes:
        url: of the proxy.
        lost: set when something has been lost.
    """

    def __init__(self, port: int) -> None:
        self.lost = threading.Event()
        self._to = port
        self._listener = socket.create_server((HOST, 0))
        self._open: list[socket.socket] = []
        self.url = f"http://{HOST}:{self._listener.getsockname()[1]}"
        self._loses, self._left = "", 0

    def lose(self, what: str, part: int) -> None:
        """Lose ``requests`` or ``answers`` from the `part`-th part on, counted from now."""
        self.lost.clear()
        self._loses, self._left = what, part

    def recover(self) -> None:
        """Lose nothing more, and close the open connections."""
        self._loses, self._left = "", 0
        self._end()

    def __enter__(self) -> LossyProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._listener.close()
        self._end()

    def _end(self) -> None:
        while self._open:
            one = self._open.pop()
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection((HOST, self._to))
                self._open += [client, server]
                for ends in ((client, server, "requests"), (server, client, "answers")):
                    threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, what: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if what == "requests" and self._loses and PART in data:
                    self._left -= 1
                if what == self._loses and self._left <= 0:
                    self.lost.set()
                    return
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
