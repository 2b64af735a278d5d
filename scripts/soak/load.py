"""Generation load for the soak: clients that keep sending requests, and their outcomes.

``python -m scripts.soak.load URL CLIENTS SEED`` is the clients' process, which `Load` starts.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import httpx

from scripts.live_engine.clients import ClientsProcess, run_clients

# A request that takes longer has failed. No pause takes nearly as long.
_TIMEOUT_S: Final = 60.0
_AFTER_FAILURE_S: Final = 0.2
# Engines close a connection that is idle for 5 s; a request sent at that moment would fail.
_LIMITS: Final = httpx.Limits(keepalive_expiry=1.0)
_PROBLEMS_KEPT: Final = 5
_PREFIX_TOKENS: Final = 160  # longer than vLLM's block on CPU, so that its prefix cache is used
_FIRST_TOKEN, _TOKENS = 3, 250  # ordinary ones of the tiny models' vocabulary


@dataclass(frozen=True)
class Ask:
    """One completion request; the prompt is token ids."""

    prompt: list[int]
    max_tokens: int
    temperature: float
    stream: bool

    def body(self) -> dict[str, Any]:
        """Return the JSON for ``/v1/completions``; a complete answer has `max_tokens` tokens."""
        body: dict[str, Any] = {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
        }
        body["temperature"] = self.temperature
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body


def asks(seed: int, client: int) -> Iterator[Ask]:
    """Generate one client's requests, endlessly.

    Prompts are short, long, or share one of a few long prefixes with those of other clients.
    """
    prefixes = [_tokens(random.Random(f"{seed} {n}"), _PREFIX_TOKENS) for n in range(3)]
    rng = random.Random(f"{seed} client {client}")
    while True:
        shape = rng.randrange(4)
        if shape == 0:
            prompt = _tokens(rng, rng.randint(2, 16))
        elif shape == 1:
            prompt = _tokens(rng, rng.randint(100, 180))
        else:
            prompt = rng.choice(prefixes) + _tokens(rng, rng.randint(1, 16))
        yield Ask(prompt, rng.randint(4, 48), rng.choice((0.0, 1.0)), rng.random() < 0.5)


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [_FIRST_TOKEN + rng.randrange(_TOKENS) for _ in range(count)]


class AbortPolicy:
    """Decides which requests can be aborted: those that overlap a sync with pause mode abort."""

    def __init__(self) -> None:
        self._begun: list[float] = []
        self._ended: list[float] = []

    @contextlib.contextmanager
    def aborting(self) -> Iterator[None]:
        """Mark the time of a sync that aborts requests."""
        self._begun.append(time.monotonic())
        try:
            yield
        finally:
            self._ended.append(time.monotonic())

    def allows(self, begin: float, end: float) -> bool:
        """Return whether a request from `begin` to `end` might have been aborted.

        Both are of `time.monotonic`, which all processes of a machine share.
        """
        pairs = itertools.zip_longest(self._begun, self._ended, fillvalue=math.inf)
        return any(begin <= ended and begun <= end for begun, ended in pairs)


@dataclass(frozen=True)
class Counts:
    """Number of requests by outcome, and completion tokens of all of them."""

    finished: int = 0
    aborted: int = 0
    failed: int = 0
    tokens: int = 0


@dataclass
class Tally:
    """Outcomes of requests: counts, the first problems, and seconds of those that did not fail."""

    counts: Counts = field(default_factory=Counts)
    problems: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def answered(
        self, reason: str | None, tokens: int, wanted: int, seconds: float, *, may_abort: bool
    ) -> None:
        """Count an answer; it failed unless it is complete, or was aborted when that is allowed.

        Args:
            reason: the engine's finish reason.
            tokens, wanted: how many tokens it has, and how many were requested.
            seconds: duration of the request.
            may_abort: whether a sync might have aborted it.
        """
        whole = reason == "length" and tokens == wanted
        aborted = reason == "abort" and may_abort and tokens <= wanted
        if not whole and not aborted:
            suffix = "" if reason != "abort" else " without a sync that aborts"
            self.failed(f"ended with {reason!r} after {tokens} of {wanted} tokens{suffix}")
            return
        past = self.counts
        finished, aborts = past.finished + whole, past.aborted + (not whole)
        self.counts = Counts(finished, aborts, past.failed, past.tokens + tokens)
        self.seconds.append(seconds)

    def failed(self, problem: str) -> None:
        """Count a request that failed."""
        self.counts = replace(self.counts, failed=self.counts.failed + 1)
        if len(self.problems) < _PROBLEMS_KEPT:
            self.problems.append(problem)


class Load(ClientsProcess):
    """Clients that send completion requests, from a process of their own.

    Each sends its next request as soon as the last one is answered. They run within the ``with``
    block, which ends when every request has been answered.

    Attributes:
        tally: outcomes so far.
        policy: gets the syncs that abort requests.
    """

    def __init__(self, url: str, clients: int, seed: int) -> None:
        self.tally, self.policy = Tally(), AbortPolicy()
        super().__init__("scripts.soak.load", url, clients, seed)

    def heard(self, line: str) -> None:
        """Count the request of a line, as `main` prints it."""
        self.take(json.loads(line))

    def __exit__(self, *exc_info: object) -> None:
        super().__exit__(*exc_info)
        if self.exit_status:
            self.tally.failed("the clients' process failed")

    def take(self, answer: dict[str, Any]) -> None:
        """Count one request."""
        if "problem" in answer:
            self.tally.failed(answer["problem"])
            return
        begin, end = answer["begin"], answer["end"]
        counted = (answer["reason"], answer["tokens"], answer["wanted"], end - begin)
        self.tally.answered(*counted, may_abort=self.policy.allows(begin, end))


def main() -> None:
    """Run the clients until stdin is closed; print one line of JSON per request."""
    url, clients, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

    def client(number: int, stop: threading.Event) -> None:
        _ask(f"{url}/v1/completions", asks(seed, number), stop)

    run_clients(client, clients)


def _ask(url: str, wanted: Iterator[Ask], stop: threading.Event) -> None:
    with httpx.Client(timeout=_TIMEOUT_S, limits=_LIMITS, trust_env=False) as client:
        while not stop.is_set():
            ask, begin = next(wanted), time.monotonic()
            try:
                reason, tokens = _complete(client, url, ask)
            except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
                answer: dict[str, Any] = {"problem": f"{type(error).__name__}: {error}"}
                stop.wait(_AFTER_FAILURE_S)
            else:
                answer = {"reason": reason, "tokens": tokens, "wanted": ask.max_tokens}
                answer |= {"begin": begin, "end": time.monotonic()}
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


def _complete(client: httpx.Client, url: str, ask: Ask) -> tuple[str | None, int]:
    """Return an answer's finish reason and number of tokens; raise if its status is not 200."""
    if not ask.stream:
        answer = client.post(url, json=ask.body())
        _check(answer)
        found = answer.json()
        return found["choices"][0]["finish_reason"], found["usage"]["completion_tokens"]
    with client.stream("POST", url, json=ask.body()) as stream:
        if stream.status_code != httpx.codes.OK:
            stream.read()
        _check(stream)
        return read_stream(stream.iter_bytes())


def read_stream(pieces: Iterator[bytes]) -> tuple[str | None, int]:
    """Return a streamed answer's finish reason and number of tokens.

    vLLM gives no reason if a request is aborted before its first token; this returns ``abort``.

    Raises:
        ValueError, LookupError, TypeError: The stream is incomplete or malformed.
    """
    reason, tokens, done = None, None, False
    for line in _lines(pieces):
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            done = True
        elif data:
            chunk = json.loads(data)
            if "error" in chunk:
                raise ValueError(f"the stream says {data[:300]!r}")
            for choice in chunk["choices"]:
                reason = choice["finish_reason"] or reason
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
    if not done or tokens is None:
        raise ValueError("the stream broke off")
    return (reason if reason or tokens else "abort"), tokens


def _lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Split at line feeds only; httpx also splits at U+0085 and others, which are text here."""
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole
    yield rest


def _check(answer: httpx.Response) -> None:
    if answer.status_code != httpx.codes.OK:
        raise httpx.HTTPError(f"HTTP {answer.status_code}: {answer.text[:300]}")


if __name__ == "__main__":
    main()
