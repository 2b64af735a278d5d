"""Send to engines inside a Ray cluster: a part crosses to each node once, by Ray's object store.

A small actor on each engine's node posts to that engine; the sender hands it references. Everything
else is the sender's: transactions, digests, retries, outcomes.

Example::

    relays = {url: relay_on(node_id, url) for node_id, url in engines}
    with httpx.Client(transport=RayTransport(relays), timeout=600) as client:
        sender = MultiSender([*relays], base, client=client)
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, Final

import httpx
import numpy as np
import ray
import xxhash
from numpy.typing import NDArray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_CHUNK: Final = 1 << 20
_KEPT: Final = 16  # bodies that can be asked for again, by another engine or a repeat
_AT_ONCE: Final = 16  # requests of one engine

Answer = tuple[int, list[tuple[str, str]], bytes]


class EngineRelay:
    """Sends requests to an engine from its own node; the class of a Ray actor.

    Args:
        url: the engine's root, as the actor's node reaches it.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        # Environment variables for proxies are for other hosts than the engine's own.
        self._client = httpx.Client(trust_env=False)

    def request(
        self,
        method: str,
        target: str,
        headers: list[tuple[str, str]],
        body: NDArray[np.uint8] | None,
        timeout: dict[str, float | None],
    ) -> Answer:
        """Send one request; return status, headers and body of the answer.

        Args:
            target: path below the root, and query.
            body: shape [length in bytes], in Ray's store of this node; None without a body.
            timeout: in seconds, as httpx has it.

        Raises:
            httpx.TransportError: the engine did not answer.
        """
        content = None if body is None else _chunks(body)
        answer = self._client.request(
            method,
            self._url + target,
            headers=headers,
            content=content,
            timeout=httpx.Timeout(**timeout),
        )
        return answer.status_code, _end_to_end(answer.headers), answer.content


class RayTransport(httpx.BaseTransport):
    """Takes requests to engines to the actors on their nodes. Thread-safe.

    Args:
        relays: actors of `EngineRelay` by the engine's root URL, as the sender names it.

    Attributes:
        stored: how many bodies were put into Ray's object store.
    """

    def __init__(self, relays: Mapping[str, Any]) -> None:
        roots = ((httpx.URL(url), actor) for url, actor in relays.items())
        self._relays = {url.netloc: (url.raw_path.rstrip(b"/"), actor) for url, actor in roots}
        self._bodies: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()
        self.stored = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request by way of the actor of its host.

        Raises:
            httpx.TransportError: there is no actor for it, it is dead, or the engine did not
                answer in time; the engine might have taken the request.
        """
        root, relay = self._relays.get(request.url.netloc, (b"", None))
        if relay is None:
            raise httpx.UnsupportedProtocol(f"no relay for {request.url}", request=request)
        body = request.read()
        timeout = request.extensions.get("timeout", {})
        limited = timeout and None not in timeout.values()
        try:
            call = relay.request.remote(
                request.method,
                request.url.raw_path.removeprefix(root).decode(),  # the relay has its own root
                _end_to_end(request.headers),
                self._reference(body) if body else None,
                timeout,
            )
            wait = sum(timeout.values()) if limited else None
            status, headers, content = ray.get(call, timeout=wait)
        except ray.exceptions.GetTimeoutError as error:
            raise httpx.ReadTimeout("the relay did not answer", request=request) from error
        except ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, httpx.TransportError):
                raise
            raise httpx.ReadError(str(error.cause), request=request) from error
        except ray.exceptions.RayError as error:
            brief = str(error).partition("\n")[0]
            raise httpx.ReadError(f"the relay is gone: {brief}", request=request) from error
        return httpx.Response(status, headers=headers, content=content, request=request)

    def _reference(self, body: bytes) -> Any:
        """Return the body as an object of Ray's store, the same one for the same bytes."""
        key = xxhash.xxh3_128_hexdigest(body)
        with self._lock:
            if key not in self._bodies:
                self._bodies[key] = ray.put(np.frombuffer(body, np.uint8))
                self.stored += 1
                while len(self._bodies) > _KEPT:
                    self._bodies.popitem(last=False)
            self._bodies.move_to_end(key)
            return self._bodies[key]


def relay_on(node_id: str, url: str) -> Any:
    """Return a new actor of `EngineRelay` on a node, for the engine at a URL that this reaches.

    Args:
        node_id: as ``ray.nodes()`` and ``ray.get_runtime_context().get_node_id()`` have it.
    """
    place = NodeAffinitySchedulingStrategy(node_id, soft=False)
    actor = ray.remote(EngineRelay).options(
        num_cpus=0, max_concurrency=_AT_ONCE, scheduling_strategy=place
    )
    return actor.remote(url)


def _chunks(body: NDArray[np.uint8]) -> Iterator[bytes]:
    for start in range(0, body.size, _CHUNK):
        yield body[start : start + _CHUNK].tobytes()


def _end_to_end(headers: httpx.Headers) -> list[tuple[str, str]]:
    """Return the headers that are not of one connection; ``Content-Length`` is kept."""
    gone = {"connection", "host", "transfer-encoding", "content-encoding", "keep-alive"}
    return [(name, value) for name, value in headers.items() if name not in gone]
