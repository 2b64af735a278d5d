"""Other engines that are asked for a part before its store is.

All engines of a group order the group alike for each part. The first one is asked to read the part
from the store if it does not have it: so the store sends each part once to a group, and each engine
reads a share of the parts there. The next ones are asked for what they have. Whatever a peer sends
is verified by its hash, and a peer that fails is left out for a while.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from typing import BinaryIO, Final

import xxhash

from engine_ext.answers import in_one_line
from engine_ext.errors import ChecksumMismatch, DeltaError, PartUnavailable, SpoolFull
from engine_ext.ranks.operations import PartSource
from engine_ext.remote_parts.cache import PartCache

logger = logging.getLogger(__name__)

ROUTE: Final = "/delta_parts"
_ASKED: Final = 3  # peers for one part, one after the other
_ATTEMPTS: Final = 1
_REST_S: Final = 60.0  # for which a peer that has failed is not asked


class Peers:
    """The peers of one engine. Thread-safe.

    Args:
        urls: the roots of their servers.
        own: the root of this engine's own, as the others name it; it is not asked. None: unknown,
            so that the engine might ask itself, as any other.
        token: bearer token of `urls`; others do not get it.

    Attributes:
        urls, own: as given.
        found: roots of more of them.
        received: bytes that peers have sent.
    """

    def __init__(self, urls: Sequence[str], own: str | None, token: str | None) -> None:
        self.urls, self.own, self._token = tuple(urls), own, token
        self.found: frozenset[str] = frozenset()
        self.received = 0
        self._lock = threading.Lock()
        self._resting: dict[str, float] = {}  # until when on a monotonic clock, by root

    def bring(self, cache: PartCache, content: str, size: int) -> bool:
        """Have a part in the host's cache, if a peer has it or can read it.

        The engines of a host ask one after another, so that it comes to the host once.

        Args:
            content, size: xxh3_128 of the part in hex, and its length in bytes.

        Returns:
            Whether it was brought. If not, this engine is to read the store.

        Raises:
            SpoolFull: the cache has no room.
            OSError: it cannot be written.
        """
        order = self._order(content)
        if not order:
            return False
        with cache.asking(content):
            if cache.holds(content, size):
                return True
            for number, url in enumerate(order[:_ASKED]):
                if url == self.own:
                    if number == 0:
                        return False
                    continue
                if self._ask(url, cache, content, size, reads=number == 0):
                    return True
        return False

    def require(self, cache: PartCache, content: str, size: int) -> None:
        """Have a part in the host's cache, from the first of `urls` that sends its bytes.

        All of them are asked, also those that have failed lately: there is no other source.

        Args:
            content, size: xxh3_128 of the part in hex, and its length in bytes.

        Raises:
            PartUnavailable: none does.
            SpoolFull: the cache has no room.
            OSError: it cannot be written.
        """
        with cache.asking(content):  # a peer on this host can fetch it meanwhile
            if cache.holds(content, size):
                return
            if not any(self._ask(url, cache, content, size, reads=True) for url in self.urls):
                raise PartUnavailable(f"no peer has sent part {content}: {' '.join(self.urls)}")

    def read_offer(self, most: int) -> bytes:
        """Return what the first of `urls` that answers offers, up to `most` bytes.

        Raises:
            OSError: none does.
        """
        import httpx

        failure = "there are no peers"
        # Compressed bytes could grow by any factor.
        headers = {"Accept-Encoding": "identity"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        timeout = httpx.Timeout(60.0, connect=5.0)
        for url in self.urls:
            where = f"{url}{ROUTE}"
            try:
                with (
                    httpx.Client(timeout=timeout, trust_env=False) as client,
                    client.stream("GET", where, headers=headers) as answer,
                ):
                    if answer.status_code == httpx.codes.OK:
                        return _read(answer.iter_raw(), most)
                    failure = f"{url}: HTTP status {answer.status_code}"
            except (httpx.HTTPError, httpx.InvalidURL, _TooLong) as error:
                failure = f"{url}: {str(error) or type(error).__name__}"
        raise OSError(errno.EIO, failure)

    def _source(self, url: str, content: str, size: int, query: str = "") -> PartSource:
        token = self._token if url in self.urls else None
        return PartSource(
            url=f"{url}{ROUTE}/{content}{query}",
            token=token or "",
            size=size,
            content=content,
            inode=0,
            modified_ns=0,
        )

    def _order(self, content: str) -> list[str]:
        now = time.monotonic()
        with self._lock:
            resting = {url for url, until in self._resting.items() if until > now}
        group = {*self.urls, *self.found} - resting
        if not group - {self.own}:
            return []
        if self.own is not None:
            group.add(self.own)
        return ordered(content, group)

    def _ask(self, url: str, cache: PartCache, content: str, size: int, *, reads: bool) -> bool:
        from engine_ext.remote_parts.fetch import NotThere, fetch_if_there

        source = self._source(url, content, size, "" if reads else "?cached=true")

        def fetch(file: BinaryIO) -> None:
            fetch_if_there(source, file, _ATTEMPTS)

        try:
            cache.add(content, size, fetch)
        except NotThere:
            return False
        except SpoolFull:
            raise
        except DeltaError as error:
            what = "sent other bytes" if isinstance(error, ChecksumMismatch) else "failed"
            why = in_one_line(error.message)
            logger.warning("delta updates: peer %s %s: %s", in_one_line(url), what, why)
            with self._lock:
                self._resting[url] = time.monotonic() + _REST_S
            return False
        with self._lock:
            self.received += size
        return True


class _TooLong(Exception):
    """An answer has more bytes than it can have."""


def _read(pieces: Iterable[bytes], most: int) -> bytes:
    body = bytearray()
    for piece in pieces:
        body += piece
        if len(body) > most:
            raise _TooLong(f"it sends more than {most} bytes")
    return bytes(body)


def ordered(content: str, group: Iterable[str]) -> list[str]:
    """Return the engines of a group in the order in which all of them ask for a part."""
    return sorted(group, key=lambda url: xxhash.xxh3_64_intdigest(f"{content} {url}".encode()))
