"""Parts from other engines: asked before the store is, verified, never waited for in a circle."""

from __future__ import annotations

import errno
import gzip
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import pytest
import tenacity
import xxhash

from engine_ext.errors import PartUnavailable, SpoolFull
from engine_ext.remote_parts import ROUTE, PartCache, Peers
from engine_ext.remote_parts.peers import ordered

pytestmark = pytest.mark.slow

DATA = os.urandom(1 << 20)
OFFER = gzip.compress(bytes(1 << 24))
CONTENT, SIZE = xxhash.xxh3_128_hexdigest(DATA), len(DATA)


class Peer:
    """An engine that has some parts.

    Attributes:
        parts: by hash.
        reads: whether it reads the store when it is asked first.
        asked: how often, by query.
        tokens: what it was sent.
    """

    def __init__(self, *, reads: bool = True) -> None:
        self.parts: dict[str, bytes] = {}
        self.reads = reads
        self.asked: Counter[str] = Counter()
        self.tokens: set[str | None] = set()
        self.status = 200
        peer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                peer.answer(self)

            def log_message(self, *_: object) -> None:
                """Be quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        url = urlsplit(request.path)
        if url.path == ROUTE:
            request.send_response(200)
            request.send_header("Content-Encoding", "gzip")
            request.send_header("Content-Length", str(len(OFFER)))
            request.end_headers()
            request.wfile.write(OFFER)
            return
        assert url.path.startswith(f"{ROUTE}/")
        self.asked[url.query] += 1
        self.tokens.add(request.headers["Authorization"])
        data = self.parts.get(url.path.rpartition("/")[2])
        if data is None and self.reads and not url.query:
            data = DATA  # from the store
        status = self.status if data is not None else 404
        request.send_response(status)
        body = data if data is not None and status == 200 else b""
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)


@pytest.fixture
def group() -> Iterator[list[Peer]]:
    """Three engines, the one that is asked first for the part in front."""
    with ExitStack() as stack:
        peers = [Peer() for _ in range(3)]
        for peer in peers:
            stack.callback(peer.close)
        urls = ordered(CONTENT, [peer.url for peer in peers])
        yield sorted(peers, key=lambda one: urls.index(one.url))


@pytest.fixture
def cache(tmp_path: Path) -> PartCache:
    return PartCache(str(tmp_path / "cache"), 4 * SIZE)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenacity.wait_random_exponential, "__call__", lambda *_: 0.0)


def peers_of(group: list[Peer], own: str | None = None, token: str | None = None) -> Peers:
    return Peers([peer.url for peer in group], own, token)


def never(*_: object) -> None:
    raise AssertionError("the store is read")


def test_first_peer_is_asked_and_reads_the_store(group: list[Peer], cache: PartCache) -> None:
    peers = peers_of(group, token="secret")
    assert peers.bring(cache, CONTENT, SIZE)
    assert cache.get(CONTENT, SIZE, never).read_bytes() == DATA
    assert [sum(peer.asked.values()) for peer in group] == [1, 0, 0]
    assert group[0].tokens == {"Bearer secret"}
    assert peers.received == SIZE
    assert peers.bring(cache, CONTENT, SIZE)
    assert peers.received == SIZE


def test_first_engine_reads_the_store_itself(group: list[Peer], cache: PartCache) -> None:
    assert not peers_of(group, own=group[0].url).bring(cache, CONTENT, SIZE)
    assert all(not peer.asked for peer in group)


def test_order_is_the_same_for_all(group: list[Peer], cache: PartCache) -> None:
    for own in group[1:]:
        found = peers_of([one for one in group if one is not own], own=own.url)
        assert found.bring(cache, CONTENT, SIZE)
        (cache.folder / f"{CONTENT}.part").unlink()
    assert [sum(peer.asked.values()) for peer in group] == [2, 0, 0]


def test_next_peers_give_only_what_they_have(group: list[Peer], cache: PartCache) -> None:
    group[0].reads = False
    peers = peers_of(group)
    assert not peers.bring(cache, CONTENT, SIZE)
    assert [dict(peer.asked) for peer in group] == [{"": 1}, {"cached=true": 1}, {"cached=true": 1}]
    group[2].parts[CONTENT] = DATA
    assert peers.bring(cache, CONTENT, SIZE)


@pytest.mark.parametrize("failure", ["down", "refuses", "other bytes", "short"])
def test_peer_that_fails_is_left_out(failure: str, group: list[Peer], cache: PartCache) -> None:
    first = group[0]
    if failure == "down":
        first.close()
    elif failure == "refuses":
        first.status = 401
    elif failure == "other bytes":
        first.parts[CONTENT] = DATA[:-1] + bytes([DATA[-1] ^ 1])
    else:
        first.parts[CONTENT] = DATA[:-1]
    group[1].parts[CONTENT] = DATA
    peers = peers_of(group)
    assert peers.bring(cache, CONTENT, SIZE)
    assert cache.get(CONTENT, SIZE, never).read_bytes() == DATA
    asked = sum(first.asked.values())
    (cache.folder / f"{CONTENT}.part").unlink()
    assert peers.bring(cache, CONTENT, SIZE)
    assert sum(first.asked.values()) == asked
    assert not [*cache.folder.glob("*.fetch*")]


@pytest.mark.parametrize("wrong", [DATA[::-1], DATA[:-1], DATA * 2])
def test_only_source_is_any_peer_with_the_bytes(
    wrong: bytes, group: list[Peer], cache: PartCache
) -> None:
    peers = peers_of(group)
    for peer in group:
        peer.parts[CONTENT] = wrong
    with pytest.raises(PartUnavailable, match=f"no peer has sent part {CONTENT}"):
        peers.require(cache, CONTENT, SIZE)
    group[2].parts[CONTENT] = DATA
    peers.require(cache, CONTENT, SIZE)  # those that have just failed are asked again
    assert cache.get(CONTENT, SIZE, never).read_bytes() == DATA
    assert peers.received == SIZE
    assert not [*cache.folder.glob("*.fetch*")]


def test_found_peers_get_no_token(group: list[Peer], cache: PartCache) -> None:
    own = "http://127.0.0.1:1"
    peers = Peers([], own, "secret")
    assert not peers.bring(cache, CONTENT, SIZE)
    for peer in group:
        peer.parts[CONTENT] = DATA
    peers.found = frozenset(peer.url for peer in group)
    brought = peers.bring(cache, CONTENT, SIZE)
    assert {token for peer in group for token in peer.tokens} <= {None}
    first = ordered(CONTENT, [*(peer.url for peer in group), own])[0]
    assert brought is (first != own)


@pytest.mark.parametrize(
    "text", ["http://[::1", "http://host:port", "host", "ftp://host", "", "\n"]
)
def test_peer_of_no_url_is_left_out(text: str, group: list[Peer], cache: PartCache) -> None:
    peers = Peers([], None, None)
    peers.found = frozenset({text})
    assert not peers.bring(cache, CONTENT, SIZE)
    alone = Peers([text, group[0].url], None, None)
    alone.require(cache, CONTENT, SIZE)
    assert cache.get(CONTENT, SIZE, never).read_bytes() == DATA
    with pytest.raises(OSError, match=re.escape(f"{text}: ")):
        Peers([text], None, None).read_offer(1)


def test_offer_over_the_limit_is_not_read(group: list[Peer]) -> None:
    """It is not decompressed either: that could take any memory."""
    assert len(peers_of(group).read_offer(len(OFFER))) == len(OFFER)
    with pytest.raises(OSError, match="sends more than 1000 bytes"):
        peers_of(group).read_offer(1000)


def test_without_peers_nobody_waits(cache: PartCache) -> None:
    assert not Peers([], None, None).bring(cache, CONTENT, SIZE)
    assert not [*cache.folder.iterdir()]


def test_full_cache_is_raised(group: list[Peer], tmp_path: Path) -> None:
    small = PartCache(str(tmp_path / "small"), 16)
    with pytest.raises(SpoolFull):
        peers_of(group).bring(small, CONTENT, SIZE)


@pytest.mark.parametrize("only_source", [True, False])
def test_broken_disk_is_no_fault_of_a_peer(
    only_source: bool, group: list[Peer], cache: PartCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = peers_of(group)

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", broken)
        with pytest.raises(OSError, match="broken"):
            (peers.require if only_source else peers.bring)(cache, CONTENT, SIZE)
    assert peers.bring(cache, CONTENT, SIZE)
    assert {sum(peer.asked.values()) for peer in group[1:]} == {0}


def test_engine_that_is_asked_can_fetch_meanwhile(group: list[Peer], cache: PartCache) -> None:
    """Two engines of one host, or two that ask each other, do not wait for each other."""

    def write(file: BinaryIO) -> None:
        file.write(DATA)

    with cache.asking(CONTENT):
        assert cache.get(CONTENT, SIZE, write).exists()
