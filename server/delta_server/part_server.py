"""Serve parts that are being staged to ranks of other hosts, and the log's to other engines.

`PartServer` listens on a port of its own, so that it does not depend on where the engine's own
server listens or which of its processes has the part. Ranks get URL, token and content hash with
the operation that begins the part.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from engine_ext.files import hash_of_rest
from engine_ext.log import SharedParts, open_part
from engine_ext.ranks.operations import PartSource

_READ_BYTES: Final = 1 << 20
_LONGEST_WAIT_S: Final = 10.0  # who asks gives up an engine that is silent for longer


class PartServer:
    """Serves files by unguessable token, in a thread that ends with the process or with `close`.

    Args:
        address: IP address of this host on the network of the engine's hosts.
        port: TCP port; 0 takes any.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, address: str, port: int = 0) -> None:
        self._offers: dict[str, Path] = {}
        self._token = secrets.token_urlsafe(32)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = socket.create_server((address, port), family=family)
        host = f"[{address}]" if ":" in address else address
        self.url = f"http://{host}:{listening.getsockname()[1]}/parts"
        app = Starlette(routes=[Route("/parts/{name}", self._serve)])
        # Its loggers are the engine's own server's, too, and stay as they are.
        config = uvicorn.Config(app, log_config=None, lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([listening],), name="delta-parts", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.should_exit = True
        self._thread.join()

    @contextlib.contextmanager
    def offer(self, path: Path) -> Iterator[PartSource]:
        """Serve a file while this is entered, and yield where; reads the file first."""
        with open(path, "rb", buffering=0) as file:
            content, read = hash_of_rest(file), os.fstat(file.fileno())
        # No two deliveries share a url, also those of an engine that was started again.
        name = f"{content}-{secrets.token_hex(8)}"
        source = PartSource(
            url=f"{self.url}/{name}",
            token=self._token,
            size=read.st_size,
            content=content,
            inode=read.st_ino,
            modified_ns=read.st_mtime_ns,
        )
        self._offers[name] = path
        try:
            yield source
        finally:
            del self._offers[name]

    async def _serve(self, request: Request) -> Response:
        expected = f"Bearer {self._token}".encode()
        if not hmac.compare_digest(request.headers.get("authorization", "").encode(), expected):
            return Response(status_code=401)
        try:
            path = self._offers[request.path_params["name"]]
            return PartResponse(open(path, "rb", buffering=0))
        except (KeyError, FileNotFoundError):
            return Response(status_code=404)


class PartResponse(FileResponse):
    """The bytes of a part, or a range of them.

    Args:
        file: that has it; closed once they are sent.
    """

    chunk_size = _READ_BYTES

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        number = file.fileno()
        super().__init__(f"/proc/self/fd/{number}", stat_result=os.fstat(number))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        with self._file:
            await super().__call__(scope, receive, send)


class StillReading(Exception):
    """The part is being read; who wants it is to ask again."""


class PartReads:
    """The parts of one engine's log, as it hands them on; nobody waits for long at once."""

    def __init__(self, parts: SharedParts) -> None:
        self._parts = parts
        self._reading: dict[str, asyncio.Task[Path | None]] = {}

    async def open(self, content: str, *, reads: bool) -> BinaryIO | None:
        """Return an open file that has a part; see `SharedParts.path`, and `open_part`.

        Raises:
            StillReading: the store has not sent it yet; it is read on.
            DeltaError, OSError: see `SharedParts.path`.
        """
        path = await self._path(content, reads=reads)
        with contextlib.suppress(FileNotFoundError):
            return None if path is None else await asyncio.to_thread(open_part, path)
        return None

    async def _path(self, content: str, *, reads: bool) -> Path | None:
        if not reads:
            return await asyncio.to_thread(self._parts.path, content, reads=False)
        task = self._reading.get(content)
        if task is None:
            work = asyncio.to_thread(self._parts.path, content, reads=True)
            task = self._reading[content] = asyncio.ensure_future(work)
            task.add_done_callback(lambda task: self._end(content, task))
        await asyncio.wait({task}, timeout=_LONGEST_WAIT_S)
        if not task.done():
            raise StillReading(content)
        return task.result()

    def _end(self, content: str, task: asyncio.Task[Path | None]) -> None:
        del self._reading[content]
        if not task.cancelled():
            task.exception()  # whoever has asked might have gone
