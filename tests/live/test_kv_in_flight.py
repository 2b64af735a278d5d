"""What requests in flight keep over syncs: their KV, and the versions of their tokens."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from delta_sender import DeltaSender, rollouts
from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from scripts.live_engine.registry import ENGINES
from tests.support.plain_trainer import Trainer

pytestmark = pytest.mark.full

SYNCS = 20
SHARED = [3 + number % 250 for number in range(64)]
TURN = 400  # tokens that a request in flight generates
HEAD = "lm_head.weight"
# A bf16 log probability is another by that much in another batch, or in a prompt.
NOISE = 0.06
OF_HEADS = 0.15  # the same for output heads with larger weights
ARGUMENTS = {
    "vllm": ["--enable-prompt-tokens-details", "--max-model-len", "512", "--block-size", "32"],
    "sglang": ["--enable-cache-report", "--enable-metrics"],
}


class Flight(threading.Thread):
    """One request that streams.

    Attributes:
        tokens: those that have come, with their log probabilities.
        spans: of its one choice; None while it runs.
        usage: the engine's, at the end.
    """

    def __init__(self, engine: EngineProcess, prompt: Sequence[int], count: int = TURN) -> None:
        super().__init__()
        self.engine, self.prompt, self.count = engine, list(prompt), count
        self.tokens: list[tuple[int, float]] = []
        self.spans: list[list[Any]] | None = None
        self.usage: dict[str, Any] = {}
        self.start()

    def run(self) -> None:
        for body in self._events():
            self.usage = body.get("usage") or self.usage
            for choice in body["choices"]:
                self.tokens += _tokens(choice)
                [found] = rollouts.spans({"choices": [choice]})
                self.spans = found or self.spans

    def _events(self) -> Iterator[Any]:
        streaming = {"stream": True, "stream_options": {"include_usage": True}}
        options = _options(self.engine, self.prompt, self.count) | streaming
        url = f"{self.engine.url}/v1/completions"
        with httpx.stream("POST", url, json=options, timeout=60) as answer:
            rest = b""
            for piece in answer.iter_bytes():  # texts have characters that `iter_lines` splits at
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if line.startswith(b"data: {"):
                        yield json.loads(line.removeprefix(b"data: "))

    def wait_for(self, count: int) -> None:
        """Wait until so many tokens have come."""
        deadline = time.monotonic() + 60
        while len(self.tokens) < count:
            assert self.is_alive(), self.tokens
            assert time.monotonic() < deadline, self.tokens
            time.sleep(0.002)

    def is_under_way(self) -> bool:
        """Return whether an engine that is paused has more tokens to compute."""
        seen = -1
        while seen < len(self.tokens):  # those on their way come
            seen = len(self.tokens)
            time.sleep(0.1)
        return seen < self.count


def _options(engine: EngineProcess, prompt: Sequence[int], count: int) -> dict[str, Any]:
    sampling = {"max_tokens": count, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    ids = {"return_token_ids": True}
    return {"model": str(engine.model), "prompt": list(prompt), **sampling, **ids}


def _tokens(choice: Any) -> list[tuple[int, float]]:
    if not choice.get("token_ids"):
        return []
    return list(zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True))


def cached_of(usage: Any) -> int:
    """Return how many tokens of a prompt came from the cache."""
    return (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def ask(engine: EngineProcess, prompt: Sequence[int]) -> tuple[list[tuple[int, float]], int]:
    """Return the tokens of a short answer, and how many of the prompt came from the cache."""
    answer = engine.post("/v1/completions", json=_options(engine, prompt, 4)).json()
    [choice] = answer["choices"]
    return _tokens(choice), cached_of(answer["usage"])


@contextlib.contextmanager
def paused(engine: EngineProcess) -> Iterator[None]:
    """Pause the engine as a caller does: a small model's answer ends sooner than a sync."""
    if isinstance(engine, ENGINES["vllm"]):  # its route drops all KV, unless asked not to
        keep = {"mode": "keep", "clear_cache": "false"}
        engine.post("/pause", params=keep).raise_for_status()
    else:
        engine.pause()
    try:
        yield
    finally:
        engine.resume()


def counted(engine: EngineProcess, name: str, label: str = "") -> float:
    """Return the sum of a metric of the engine's own, of the rows with a label."""
    rows = engine.get("/metrics").text.splitlines()
    found = [row for row in rows if row.startswith(name) and label in row]
    return sum(float(row.rpartition(" ")[2]) for row in found)


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def engine(
    request: pytest.FixtureRequest,
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
) -> EngineProcess:
    return start(request.param, checkpoint("qwen3"), extra_args=ARGUMENTS[request.param])


def computed(engine: EngineProcess) -> float:
    """Return a count that rises by what is computed again, by the engine's own metrics.

    vLLM counts how often requests are preempted, and SGLang the tokens of prompts that it computes.
    """
    preempted = counted(engine, "vllm:num_preemptions_total")
    return preempted + counted(engine, "sglang:realtime_tokens_total", 'mode="prefill_compute"')


def test_salted_kv_is_that_of_requests_in_flight(engine: EngineProcess) -> None:
    """New requests answer like a flushed engine; those in flight compute nothing again."""
    trainer = Trainer(tiny_models.load_tensors(engine.model))
    prompt = [*SHARED, 7, 8, 9]
    steps, seen = [], []
    needed = 0  # tokens of prompts that were not cached

    def asked(tokens: Sequence[int]) -> tuple[list[tuple[int, float]], int]:
        nonlocal needed
        answer, cached = ask(engine, tokens)
        needed += len(tokens) - cached
        return answer, cached

    before = computed(engine)
    with DeltaSender(engine.url, base=trainer.tensors, flush_cache="salt") as sender:
        asked(prompt)
        for number in range(SYNCS):
            trainer.step(0.5)
            steps.append(dict(trainer.tensors))
            while True:
                flight = Flight(engine, [*SHARED, 11 + number])
                flight.wait_for(1)
                with paused(engine):
                    if flight.is_under_way():  # else it was faster than the pause
                        assert sender.sync(trainer.tensors).version == number + 1
                        break
                flight.join()
                needed += len(flight.prompt) - cached_of(flight.usage)
            first, cached = asked(prompt)
            assert cached == 0
            again, cached = asked(prompt)
            assert cached >= len(SHARED) - 16
            seen.append((first, again))
            flight.join()
            assert len(flight.tokens) == TURN
            assert flight.spans is not None
            assert [version for _, version in flight.spans] == [number, number + 1]
            needed += len(flight.prompt) - cached_of(flight.usage)
            # Nobody gets what it has added, which was computed from older KV.
            longer = [*flight.prompt, *(token for token, _ in flight.tokens)]
            _, cached = asked(longer)
            assert cached <= len(flight.prompt)
    rise = computed(engine) - before
    assert rise == (needed if isinstance(engine, ENGINES["sglang"]) else 0)
    # The same steps, each with a flushed cache and nothing in flight.
    base = tiny_models.load_tensors(engine.model)
    end = trainer.tensors
    with DeltaSender(engine.url, base=end, base_version=SYNCS, full="allow") as sender:
        sender.sync(base)
        for tensors, (first, again) in zip(steps, seen, strict=True):
            sender.sync(tensors)
            expected, cached = ask(engine, prompt)
            assert cached == 0
            for answer in (first, again):
                assert close(answer, expected), (answer, expected)


def test_a_flush_is_seen_in_what_is_computed(engine: EngineProcess) -> None:
    """The count that a salt leaves as it is."""
    base = tiny_models.load_tensors(engine.model)
    at = int(engine.weight_version())
    with DeltaSender(engine.url, base=base, base_version=at, full="allow") as sender:
        flight = Flight(engine, SHARED)
        flight.wait_for(1)
        before = computed(engine)
        with paused(engine):
            assert flight.is_under_way()
            sender.sync(base)
        flight.join()
    assert computed(engine) - before >= (60 if isinstance(engine, ENGINES["sglang"]) else 1)


def close(answer: list[tuple[int, float]], expected: list[tuple[int, float]]) -> bool:
    """Return whether log probabilities are alike, up to the first token that is another."""
    for (token, found), (other, logprob) in zip(answer, expected, strict=True):
        if abs(found - logprob) > NOISE:
            return False
        if token != other:
            return True
    return True


@pytest.mark.parametrize("flush", [True, False, "salt"])
def test_every_token_is_of_its_version(engine: EngineProcess, flush: Any) -> None:
    """Versions differ in the output head, so that cached KV is the same in all of them."""
    base = tiny_models.load_tensors(engine.model)
    generator = torch.Generator().manual_seed(11)
    weights = [base]
    for _ in range(3):
        head = torch.randn(base[HEAD].shape, generator=generator).to(base[HEAD].dtype) / 4
        weights.append({**base, HEAD: head})
    at = int(engine.weight_version())
    with DeltaSender(
        engine.url, base=base, base_version=at, flush_cache=flush, full="allow"
    ) as sender:
        sender.sync(base)
        first = int(engine.weight_version())
        with paused(engine):  # they begin together
            flights = [Flight(engine, [*SHARED[:20], 5 + number]) for number in range(3)]
            time.sleep(0.2)
        for flight in flights:
            flight.wait_for(1)
        for tensors in weights[1:]:
            with paused(engine):
                sender.sync(tensors)
            time.sleep(0.05)
        for flight in flights:
            flight.join()
        versions = [first + number for number in range(len(weights))]
        for flight in flights:
            assert flight.spans is not None
            seen = [version for _, version in flight.spans]
            assert seen == sorted({*seen} & {*versions})  # it might end before the last sync
            assert flight.spans[0] == [0, first]
        assert sum(len(flight.spans or []) for flight in flights) >= 6
        scores = []
        for tensors in weights:
            sender.sync(tensors)
            scores.append([score(engine, flight) for flight in flights])
    told_apart = boundaries = 0
    for number, flight in enumerate(flights):
        logprobs = [logprob for _, logprob in flight.tokens]
        spans = [(start, scores[version - first][number]) for start, version in flight.spans or []]
        ends = [start for start, _ in spans[1:]] + [len(logprobs)]
        for (start, own), end in zip(spans, ends, strict=True):
            for place in range(start, end):
                assert abs(logprobs[place] - own[place]) < OF_HEADS, (place, flight.spans)
        for (_, before), (start, after) in itertools.pairwise(spans):  # a neighbour would be seen
            boundaries += 1
            told_apart += abs(logprobs[start] - before[start]) > OF_HEADS
            told_apart += abs(logprobs[start - 1] - after[start - 1]) > OF_HEADS
    assert told_apart >= 1.3 * boundaries, (told_apart, boundaries)


def score(engine: EngineProcess, flight: Flight) -> list[float]:
    """Return the log probabilities of a flight's tokens with the engine's weights."""
    tokens = [*flight.prompt, *(token for token, _ in flight.tokens)]
    if isinstance(engine, ENGINES["vllm"]):
        body = {"prompt_logprobs": 0, "max_tokens": 1, "prompt": tokens}
        body["model"] = str(engine.model)
        [choice] = engine.post("/v1/completions", json=body).json()["choices"]
        places = choice["prompt_logprobs"][len(flight.prompt) :]
        pairs = zip(places, tokens[len(flight.prompt) :], strict=True)
        return [place[str(token)]["logprob"] for place, token in pairs]
    sampling = {"max_new_tokens": 1}
    body = {"input_ids": tokens, "sampling_params": sampling}
    body |= {"return_logprob": True, "logprob_start_len": 0}
    found = engine.post("/generate", json=body).json()["meta_info"]["input_token_logprobs"]
    return [logprob for logprob, *_ in found[len(flight.prompt) :]]
