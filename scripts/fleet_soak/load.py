"""Clients of the fleet that ask the router without pause, most of them for a version.

``python -m scripts.fleet_soak.load URL MODEL CLIENTS SEED`` is the clients' process, which `Load`
starts. It reads the fleet's version from stdin, and prints one line of JSON per request.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import httpx
import msgspec

from delta_sender import rollouts
from scripts.fleet_soak.answers import Answer, pick_header
from scripts.live_engine.clients import ClientsProcess, run_clients

_TIMEOUT_S: Final = 120.0
_AFTER_FAILURE_S: Final = 0.2
_PAUSE_S: Final = 0.05
_FIRST_TOKEN, _TOKENS = 3, 250  # ordinary ones of the tiny models' vocabulary


class Load(ClientsProcess):
    """Clients in a process of their own, within the ``with`` block.

    Args:
        url: of the router.
        model: the name that requests give.
        clients: how many.
        seed: of their requests.
    """

    def __init__(self, url: str, model: str, clients: int, seed: int) -> None:
        super().__init__("scripts.fleet_soak.load", url, model, clients, seed)
        self._arrived: list[Answer] = []
        self._lock = threading.Lock()

    def publish(self, version: int) -> None:
        """Let requests from now on ask for a version of the fleet, or later ones."""
        self.say(str(version))

    def take(self) -> list[Answer]:
        """Return the requests that have ended since the last call."""
        with self._lock:
            arrived, self._arrived = self._arrived, []
        return arrived

    def heard(self, line: str) -> None:
        """Keep the request of a line, as `main` prints it."""
        answer = msgspec.json.decode(line, type=Answer)
        with self._lock:
            self._arrived.append(answer)


class _Refused(Exception):
    """The engine serves another version; `serves` is which."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error.get("message"))
        self.serves = error.get("version")


def main() -> None:
    """Run the clients until stdin is closed."""
    url, model, clients, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    fleet = [0]

    def client(number: int, stop: threading.Event) -> None:
        _ask(url, model, f"{seed} {number}", fleet, stop)

    def heard(line: str) -> None:
        fleet[0] = int(line)

    run_clients(client, clients, heard)


def _ask(url: str, model: str, seed: str, fleet: list[int], stop: threading.Event) -> None:
    rng = random.Random(seed)
    limits = httpx.Limits(max_keepalive_connections=0)  # a router that reloads closes them
    with httpx.Client(timeout=_TIMEOUT_S, limits=limits, trust_env=False) as client:
        while not stop.is_set():
            answer = _one(client, url, model, fleet[0], rng)
            sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
            sys.stdout.flush()
            stop.wait(_AFTER_FAILURE_S if answer.state in ("refused", "failed") else _PAUSE_S)


def _one(client: httpx.Client, url: str, model: str, fleet: int, rng: random.Random) -> Answer:
    prompt = [_FIRST_TOKEN + rng.randrange(_TOKENS) for _ in range(rng.choice((4, 24, 96)))]
    header, count, stream = pick_header(fleet, rng), rng.randint(4, 64), rng.random() < 0.5
    body = {"model": model, "prompt": prompt, "max_tokens": count, "ignore_eos": True}
    body |= {"temperature": float(rng.random() < 0.5), "logprobs": 1, "return_token_ids": True}
    headers = {} if header is None else {"X-Weight-Version": header}
    begin, found = time.monotonic(), _Found()

    def answer(state: Any, **facts: Any) -> Answer:
        return Answer(
            begin=begin,
            end=time.monotonic(),
            fleet=fleet,
            header=header,
            stream=stream,
            state=state,
            prompt=prompt,
            tokens=found.tokens,
            logprobs=found.logprobs,
            **facts,
        )

    try:
        for event in _events(client, f"{url}/v1/completions", body, headers, stream=stream):
            found.add(event)
        if len(found.tokens) != count:
            raise ValueError(f"{len(found.tokens)} of {count} tokens came")
        return answer("answered", spans=found.spans)
    except _Refused as refused:
        return answer("stopped" if found.tokens else "refused", serves=refused.serves)
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        return answer("failed", problem=f"{type(error).__name__}: {error}")


class _Found:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[tuple[int, int]] = []

    def add(self, event: Any) -> None:
        """Take in an answer, or an event of one; it has one choice, or none at the end."""
        for choice in event["choices"]:
            if choice.get("token_ids"):
                self.tokens += choice["token_ids"]
                self.logprobs += choice["logprobs"]["token_logprobs"]
            [spans] = rollouts.spans({"choices": [choice]})
            if spans is not None:
                self.spans = [(first, version) for first, version in spans]


def _events(
    client: httpx.Client, url: str, body: Any, headers: dict[str, str], *, stream: bool
) -> Iterator[Any]:
    """Yield the events of an answer; it is the only one if it is not streamed."""
    body, done = {**body, "stream": stream}, False
    with client.stream("POST", url, json=body, headers=headers) as response:
        if response.status_code != httpx.codes.OK or not stream:
            response.read()
            if response.status_code == httpx.codes.CONFLICT:
                raise _Refused(response.json()["error"])
            if response.status_code != httpx.codes.OK:
                raise ValueError(f"HTTP {response.status_code}: {response.text[:300]}")
            yield response.json()
            return
        for data in _data(response.iter_bytes()):
            if data == b"[DONE]":
                done = True
                continue
            event = json.loads(data)
            if "error" in event:
                if event["error"].get("type") == "VersionNotServed":
                    raise _Refused(event["error"])
                raise ValueError(f"the stream says {data[:300]!r}")
            yield event
    if not done:
        raise ValueError("the stream broke off")


def _data(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the events' data; httpx would split texts at other characters than line feeds."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line[6:].strip() for line in lines if line.startswith(b"data: "))


if __name__ == "__main__":
    main()
