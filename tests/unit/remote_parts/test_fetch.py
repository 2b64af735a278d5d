"""Fetching a part from the host that spooled it, over real connections."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
import tenacity
import xxhash

from delta_server.part_server import PartServer
from engine_ext.errors import PartUnavailable
from engine_ext.ranks.operations import PartSource
from engine_ext.remote_parts import PartCache, fetch, locate_part
from engine_ext.remote_parts.fetch import fetch_part

DATA = os.urandom(3 << 20)


@pytest.fixture(scope="module")
def server() -> Iterator[PartServer]:
    server = PartServer("127.0.0.1")
    yield server
    server.close()


@pytest.fixture
def part(tmp_path: Path) -> Path:
    path = tmp_path / "part"
    path.write_bytes(DATA)
    return path


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenacity.wait_random_exponential, "__call__", lambda *_: 0.0)


def fetched(source: PartSource, tmp_path: Path) -> bytes:
    path = tmp_path / "fetched"
    with path.open("w+b") as file:
        fetch_part(source, file)
    return path.read_bytes()


def test_a_part_arrives(server: PartServer, part: Path, tmp_path: Path) -> None:
    with server.offer(part) as source:
        assert fetched(source, tmp_path) == DATA
    assert source.size == len(DATA)
    assert source.content == xxhash.xxh3_128_hexdigest(DATA)


def test_a_part_is_gone_after_its_offer(server: PartServer, part: Path, tmp_path: Path) -> None:
    with server.offer(part) as source:
        pass
    with pytest.raises(PartUnavailable, match="404"):
        fetched(source, tmp_path)


def test_two_offers_of_one_part_end_apart(server: PartServer, part: Path, tmp_path: Path) -> None:
    with server.offer(part) as source:
        with server.offer(part):
            pass
        assert fetched(source, tmp_path) == DATA


def test_a_removed_file_is_no_part(server: PartServer, part: Path, tmp_path: Path) -> None:
    with server.offer(part) as source:
        part.unlink()
        with pytest.raises(PartUnavailable):
            fetched(source, tmp_path)


def test_a_source_that_sends_more_is_cut_off(
    server: PartServer, part: Path, tmp_path: Path
) -> None:
    with server.offer(part) as source:
        less = msgspec.structs.replace(source, size=1 << 10)
        with pytest.raises(PartUnavailable, match="more than the 1024 bytes of the part"):
            fetched(less, tmp_path)
    assert (tmp_path / "fetched").stat().st_size < len(DATA) // 2


@pytest.mark.parametrize("token", ["another", "x"])
def test_another_token_gets_nothing(
    server: PartServer, part: Path, tmp_path: Path, token: str
) -> None:
    with server.offer(part) as source, pytest.raises(PartUnavailable, match="401"):
        fetched(msgspec.structs.replace(source, token=token), tmp_path)


def test_a_host_that_is_not_reached(server: PartServer, part: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with server.offer(part) as source:
        nowhere = msgspec.structs.replace(source, url=f"http://127.0.0.1:{port}/parts/x")
    with pytest.raises(PartUnavailable, match="cannot be fetched"):
        fetched(nowhere, tmp_path)


class Cutting:
    """Passes connections on to a server, and cuts the first ones after some bytes.

    Attributes:
        ranges: the `Range` headers that came.
    """

    def __init__(self, target: int, cuts: list[int]) -> None:
        self._target, self._cuts = target, cuts
        self.ranges: list[str] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            client, _ = self._listening.accept()
            with client, socket.create_connection(("127.0.0.1", self._target)) as server:
                request = client.recv(1 << 16)
                lines = request.decode().lower().split("\r\n")
                self.ranges += [line.split(": ")[1] for line in lines if line.startswith("range")]
                server.sendall(request)
                left = self._cuts.pop(0) if self._cuts else 1 << 40
                while left and (chunk := server.recv(min(left, 1 << 16))):
                    client.sendall(chunk)
                    left -= len(chunk)


def test_a_cut_transfer_goes_on_where_it_stopped(
    server: PartServer, part: Path, tmp_path: Path
) -> None:
    port = int(server.url.rsplit(":", 1)[1].split("/")[0])
    cutting = Cutting(port, [1 << 20, 1 << 20])
    with server.offer(part) as source:
        url = source.url.replace(f":{port}/", f":{cutting.port}/")
        assert fetched(msgspec.structs.replace(source, url=url), tmp_path) == DATA
    begins = [int(one.removeprefix("bytes=").rstrip("-")) for one in cutting.ranges]
    assert begins[0] == 0
    assert 900_000 < begins[1] < begins[2] <= 2 << 20


def test_a_rank_beside_the_spool_reads_it_there(
    server: PartServer, part: Path, tmp_path: Path
) -> None:
    cache = PartCache(str(tmp_path / "cache"), 1 << 30)
    assert locate_part(cache, str(part), None) == str(part)
    with server.offer(part) as source:
        pass
    assert locate_part(cache, str(part), source) == str(part)


def test_a_file_of_another_hosts_own_at_that_path_is_not_read(
    server: PartServer, part: Path, tmp_path: Path
) -> None:
    cache = PartCache(str(tmp_path / "cache"), 1 << 30)
    own = tmp_path / "its own"
    own.write_bytes(DATA[::-1])
    with server.offer(part) as source:
        found = Path(locate_part(cache, str(own), source))
    assert found.parent == tmp_path / "cache"
    assert found.read_bytes() == DATA


def test_a_rank_elsewhere_gets_a_copy(server: PartServer, part: Path, tmp_path: Path) -> None:
    cache = PartCache(str(tmp_path / "cache"), 1 << 30)
    with server.offer(part) as source:
        found = Path(locate_part(cache, "/no/such/spool/0.safetensors", source))
    assert found.parent == tmp_path / "cache"
    assert found.read_bytes() == DATA


def test_a_copy_of_other_bytes_is_no_fault_of_the_sender(
    server: PartServer, part: Path, tmp_path: Path
) -> None:
    cache = PartCache(str(tmp_path / "cache"), 1 << 30)
    with server.offer(part) as source:
        other = msgspec.structs.replace(source, content="0" * 32)
        message = f"a part changed on its way here, from {source.url}; send it again"
        with pytest.raises(PartUnavailable, match=re.escape(message)):
            locate_part(cache, "/no/such/spool/0.safetensors", other)


class SlowReader(BaseHTTPRequestHandler):
    """A host that has to read the part first; `answers` are its next statuses.

    It sends the part in a few pieces, with `pause_s` after each.
    """

    answers: ClassVar[list[int]] = []
    pause_s: ClassVar[float] = 0.0

    def do_GET(self) -> None:
        status = self.answers.pop(0)
        self.send_response(status)
        self.send_header("Content-Length", str(len(DATA) if status == 200 else 0))
        self.end_headers()
        if status == 200:
            with contextlib.suppress(ConnectionError):
                for start in range(0, len(DATA), 1 << 18):
                    self.wfile.write(DATA[start : start + (1 << 18)])
                    time.sleep(self.pause_s)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def slow_reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[PartSource]:
    monkeypatch.setattr(fetch, "_AGAIN_S", 0.01)
    server = ThreadingHTTPServer(("127.0.0.1", 0), SlowReader)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield PartSource(
        url=f"http://127.0.0.1:{server.server_port}/part",
        token="",
        size=len(DATA),
        content=xxhash.xxh3_128_hexdigest(DATA),
        inode=0,
        modified_ns=0,
    )
    server.shutdown()
    server.server_close()


@pytest.mark.slow
@pytest.mark.parametrize("in_time", [True, False])
def test_a_part_that_is_still_read_is_asked_for_again(
    slow_reader: PartSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_time: bool
) -> None:
    SlowReader.answers[:] = [202, 202, 200]
    if in_time:
        assert fetched(slow_reader, tmp_path) == DATA
        return
    monkeypatch.setattr(fetch, "_LONGEST_READ_S", -60.0)
    with pytest.raises(PartUnavailable, match="in time"):
        fetched(slow_reader, tmp_path)


@pytest.mark.slow
def test_a_host_that_sends_too_slowly_is_left(
    slow_reader: PartSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others wait for what it sends."""
    SlowReader.answers[:] = [200]
    monkeypatch.setattr(SlowReader, "pause_s", 0.05)
    monkeypatch.setattr(fetch, "_LONGEST_READ_S", -len(DATA) / (1 << 20) + 0.2)
    begin = time.monotonic()
    with pytest.raises(PartUnavailable, match="it sends less than 1048576 bytes per second"):
        fetched(slow_reader, tmp_path)
    assert time.monotonic() - begin < 0.5
