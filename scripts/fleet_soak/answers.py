"""Check answers: their versions obey the request, and their tokens are of these versions."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

_NEVER: Final = 1 << 40  # a version that no fleet reaches
_FORM: Final = re.compile(r"(>=)?(\d+)(?:-(\d+))?")

# Gives the log probabilities of tokens after a prompt, by a version's weights.
Score = Callable[[int, Sequence[int], Sequence[int]], Sequence[float]]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One request, and what has become of it.

    Attributes:
        begin, end: of `time.monotonic`.
        fleet: the fleet's version when it was sent.
        header: of X-Weight-Version; None: it had none.
        stream: whether it was streamed.
        state: ``answered``; ``refused``: 409 before the first token; ``stopped``: the same after
            some; ``failed``: anything else.
        prompt, tokens: token ids; `tokens` has those that came, also before it was stopped.
        logprobs: of the tokens, by the engine.
        spans: ``[first_token, version]`` of an answer.
        serves: the version that a refusal names.
        problem: why it failed.
    """

    begin: float
    end: float
    fleet: int
    header: str | None
    stream: bool
    state: Literal["answered", "refused", "stopped", "failed"]
    prompt: list[int]
    tokens: list[int] = []
    logprobs: list[float] = []
    spans: list[tuple[int, int]] = []
    serves: int | None = None
    problem: str | None = None


def pick_header(fleet: int, rng: random.Random) -> str | None:
    """Return what a request asks for: nothing, a bound, a version, a range, or what nobody has."""
    kinds: list[str | None] = [
        None,
        f">={fleet}",
        str(fleet),
        f"{max(0, fleet - 1)}-{fleet + 1}",
        f">={_NEVER}",
    ]
    [found] = rng.choices(kinds, weights=(30, 25, 20, 20, 5))
    return found


def wanted(header: str | None) -> range:
    """Return the versions that a request can be answered by."""
    if header is None:
        return range(_NEVER << 1)
    match = _FORM.fullmatch(header)
    assert match is not None, header
    lowest = int(match[2])
    highest = _NEVER << 1 if match[1] else int(match[3] or lowest)
    return range(lowest, highest + 1)


def problem_of_versions(answer: Answer) -> str | None:
    """Return how an answer or a refusal contradicts what was asked for; None if it does not."""
    versions = wanted(answer.header)
    if answer.state in ("refused", "stopped"):
        if answer.header is None:
            return "a request without a version was refused"
        if answer.serves in versions:
            return f"{answer.header} was refused by an engine that serves {answer.serves}"
        return None
    if answer.state == "failed":
        return None
    if not answer.spans or answer.spans[0][0] != 0:
        return f"the spans are {answer.spans}"
    excluded = [version for _, version in answer.spans if version not in versions]
    if excluded:
        return f"{answer.header} was answered by version {excluded[0]}"
    if answer.spans[0][1] < answer.fleet:
        return f"version {answer.spans[0][1]} has answered when the fleet's was {answer.fleet}"
    ascends = all(a < b for a, b in itertools.pairwise(answer.spans))
    rises = all(a[1] < b[1] for a, b in itertools.pairwise(answer.spans))
    return None if ascends and rises else f"the spans are {answer.spans}"


def spans_of(answer: Answer) -> list[tuple[range, int]]:
    """Return the places of tokens by version, also those before an exact request was stopped."""
    if answer.state == "stopped":
        versions = wanted(answer.header)
        whole = range(len(answer.tokens))
        return [(whole, versions[0])] if len(versions) == 1 and answer.tokens else []
    ends = [*(first for first, _ in answer.spans), len(answer.tokens)][1:]
    return [
        (range(first, end), version)
        for (first, version), end in zip(answer.spans, ends, strict=True)
    ]


@dataclass
class Tokens:
    """Log probabilities of tokens, compared with those of their versions' weights.

    Attributes:
        answers, compared: number of answers, and of their tokens.
        wrong: tokens that are off by more than the tolerance.
        boundaries: changes of the version within an answer.
        seen: of the two tokens at each of those, how many the other version would have had by more
            than the tolerance off: a span that is wrong by one token is found there.
        largest: largest difference, in nats.
    """

    tolerance: float
    answers: int = 0
    compared: int = 0
    wrong: int = 0
    boundaries: int = 0
    seen: int = 0
    largest: float = 0.0

    def check(self, answer: Answer, score: Score) -> str | None:
        """Compare one answer's tokens; return what is wrong."""
        spans = spans_of(answer)
        self.answers += 1
        scores = {v: score(v, answer.prompt, answer.tokens) for v in {v for _, v in spans}}
        problem = None
        for places, version in spans:
            for place in places:
                off = abs(answer.logprobs[place] - scores[version][place])
                self.compared += 1
                self.largest = max(self.largest, off)
                if off > self.tolerance:
                    self.wrong += 1
                    problem = problem or (
                        f"token {place} of {len(answer.tokens)} is not of version {version}: its "
                        f"log probability is {off:.2f} off; spans {answer.spans}"
                    )
        for (_, before), (places, after) in itertools.pairwise(spans):
            self.boundaries += 1
            for place, other in ((places[0] - 1, after), (places[0], before)):
                self.seen += abs(answer.logprobs[place] - scores[other][place]) > self.tolerance
        return problem


def unknown_versions(answer: Answer, known: Iterable[int]) -> set[int]:
    """Return the versions that an answer names and the fleet has not committed so far."""
    return {version for _, version in spans_of(answer)} - {*known}


def may_fail(answer: Answer, deaths: Iterable[tuple[float, float]], seconds: float) -> bool:
    """Return whether an engine might have died during a request, or so many seconds before it.

    Args:
        deaths: from when to when each has died.
    """
    return any(answer.begin <= last + seconds and first <= answer.end for first, last in deaths)
