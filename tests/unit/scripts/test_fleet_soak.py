"""The judgement of the fleet's soak: which answers are wrong, and what is done to whom."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from scripts.fleet_soak.answers import (
    Answer,
    Tokens,
    may_fail,
    problem_of_versions,
    spans_of,
    unknown_versions,
)
from scripts.fleet_soak.coordinator import Kill, Killing
from tests.support.cases import in_one_test


def answer(**facts: Any) -> Answer:
    known = {"begin": 1.0, "end": 2.0, "fleet": 3, "header": None, "stream": False}
    return Answer(**{**known, "state": "answered", "prompt": [7], "spans": [(0, 3)], **facts})


@in_one_test(
    ("facts", "problem"),
    [
        ({}, None),
        ({"spans": [(0, 3), (4, 4)]}, None),
        ({"header": ">=3", "spans": [(0, 9)]}, None),
        ({"header": "2-4", "spans": [(0, 3), (1, 4)]}, None),
        ({"header": "3", "spans": [(0, 3), (1, 4)]}, "3 was answered by version 4"),
        ({"header": "2-4", "spans": [(0, 5)]}, "2-4 was answered by version 5"),
        ({"header": ">=4"}, ">=4 was answered by version 3"),
        ({"spans": [(0, 2)]}, "version 2 has answered when the fleet's was 3"),
        ({"spans": []}, "the spans are []"),
        ({"spans": [(1, 3)]}, "the spans are [(1, 3)]"),
        ({"spans": [(0, 4), (2, 3)]}, "the spans are [(0, 4), (2, 3)]"),
        ({"state": "refused", "header": "3", "serves": 4}, None),
        ({"state": "refused", "header": "3", "serves": None}, None),
        ({"state": "stopped", "header": ">=3", "serves": 3}, ">=3 was refused by an engine that"),
        ({"state": "refused", "serves": 4}, "a request without a version was refused"),
        ({"state": "failed", "spans": []}, None),
    ],
)
def test_versions_obey_the_request(facts: Any, problem: str | None) -> None:
    found = problem_of_versions(answer(**facts))
    assert (found or "").startswith(problem or "")
    assert (found is None) == (problem is None)


def test_stopped_request_has_tokens_of_its_version() -> None:
    stopped = answer(state="stopped", header="3", tokens=[5, 6], spans=[])
    assert spans_of(stopped) == [(range(2), 3)]
    assert unknown_versions(stopped, [1, 2]) == {3}
    assert spans_of(answer(state="stopped", header=">=3", tokens=[5], spans=[])) == []


def test_token_of_another_version_is_found() -> None:
    def score(version: int, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        return [-float(version)] * len(tokens)

    tokens = Tokens(tolerance=0.25)
    right = {"tokens": [5, 5, 5], "spans": [(0, 3), (2, 4)]}
    assert tokens.check(answer(logprobs=[-3.0, -3.1, -4.0], **right), score) is None
    assert (tokens.compared, tokens.wrong, tokens.boundaries, tokens.seen) == (3, 0, 1, 2)
    problem = tokens.check(answer(logprobs=[-3.0, -4.0, -4.0], **right), score)
    assert problem is not None
    assert problem.startswith("token 1 of 3 is not of version 3: its log probability is 1.00 off")
    assert tokens.wrong == 1


@pytest.mark.parametrize(("death", "fails"), [((0.0, 0.5), False), ((0.0, 0.6), True)])
def test_request_fails_only_near_a_death(death: tuple[float, float], fails: bool) -> None:
    assert may_fail(answer(), [death], seconds=0.4) is fails


@pytest.mark.parametrize(
    ("kill", "last"),
    [
        ({"action": "record", "number": 2}, "record b"),
        ({"action": "record", "url": "http://b"}, "record b"),
        ({"action": "prepare", "url": "http://a", "when": "after"}, "prepare a"),
        ({"action": "stage", "url": "http://a"}, "stage a"),
        ({"action": "commit", "when": "during"}, "commit a"),
    ],
)
def test_kills_at_its_step(kill: dict[str, Any], last: str) -> None:
    """The process that is killed lives until then."""
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    transport = Killing(httpx.MockTransport(lambda request: httpx.Response(200)))
    transport.expect(Kill(**kill, group=process.pid))
    with httpx.Client(transport=transport) as client:
        for step in ("stage a", "prepare a", "record a", "record b", "commit a"):
            assert process.poll() is None
            action, engine = step.split()
            path = "update_weights_delta" if action == "stage" else "delta_commit"
            client.post(f"http://{engine}/{path}", json={"action": action})
            if step == last:
                break
    assert process.wait(timeout=10) == -signal.SIGKILL
