"""A link between processes of this machine, with a round trip and a limited speed: a TCP relay."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any, Final

HOST: Final = "127.0.0.1"
_CHUNK: Final = 1 << 17
# Small, so that a sender notices how fast the link is.
_BUFFER: Final = 1 << 18
# A sleep ends late, by up to this many seconds. A link that is free for no longer was not idle.
_LATE: Final = 5e-3
_LENGTH: Final = 8  # bytes of the length before the data that `discard` reads


class Direction:
    """One direction of the link, which all connections share.

    Args:
        bytes_per_s: its speed.
        delay: seconds that every byte takes on top.
    """

    def __init__(self, bytes_per_s: float, delay: float) -> None:
        self._bytes_per_s, self._delay = bytes_per_s, delay
        self._free_at = 0.0

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry everything from one connection to another, to its end."""
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        arriving = asyncio.create_task(self._arrive(on_the_way, writer))
        try:
            while data := await reader.read(_CHUNK):
                now = time.perf_counter()
                if self._free_at < now - _LATE:
                    self._free_at = now
                self._free_at += len(data) / self._bytes_per_s
                on_the_way.put_nowait((self._free_at + self._delay, data))
                await _until(self._free_at)
        except ConnectionError:
            pass
        on_the_way.put_nowait((0.0, b""))
        await arriving

    async def _arrive(
        self, on_the_way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        try:
            while (item := await on_the_way.get())[1]:
                await _until(item[0])
                writer.write(item[1])
                await writer.drain()
        except ConnectionError:
            pass
        writer.close()


async def _until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - time.perf_counter()))


async def discard(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read as many bytes as the first eight say, and answer with one."""
    left = int.from_bytes(await reader.readexactly(_LENGTH), "little")
    while left > 0:
        left -= len(await reader.read(min(left, _CHUNK)))
    writer.write(b".")
    await writer.drain()
    writer.close()


def serve(pipe: Any, port: int, bytes_per_s: float, round_trip: float) -> None:
    """Relay connections, and send through `pipe` where: those to `port`, and to `discard`."""
    asyncio.run(_serve(pipe, port, bytes_per_s, round_trip))


async def _serve(pipe: Any, port: int, bytes_per_s: float, round_trip: float) -> None:
    there, back = (Direction(bytes_per_s, round_trip / 2) for _ in range(2))

    def to(target: int) -> Callable[[Any, Any], Any]:
        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection(HOST, target, limit=_BUFFER)
            for end in (writer, far_writer):
                end.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ways = there.forward(reader, far_writer), back.forward(far_reader, writer)
            await asyncio.gather(*ways)

        return relay

    async def listen(handler: Callable[[Any, Any], Any]) -> int:
        listener = socket.create_server((HOST, 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        await asyncio.start_server(handler, sock=listener, limit=_BUFFER)
        return int(listener.getsockname()[1])

    pipe.send((await listen(to(port)), await listen(to(await listen(discard)))))
    await asyncio.Event().wait()


def send_through(port: int, nbytes: int) -> float:
    """Return the seconds in which `nbytes` reach `discard` and its answer returns."""
    with socket.create_connection((HOST, port)) as connection:
        data = bytes(_CHUNK)
        start = time.perf_counter()
        connection.sendall(nbytes.to_bytes(_LENGTH, "little"))
        for sent in range(0, nbytes, _CHUNK):
            connection.sendall(data[: nbytes - sent])
        connection.recv(1)
        return time.perf_counter() - start
