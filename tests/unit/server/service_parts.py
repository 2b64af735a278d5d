"""Parts of syncs for a service, and what their answers are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx

from delta_server.engine import rank_statuses, total_digest
from tests.support.delta_bodies import (
    STEP,
    VERSION,
    Changes,
    delta_part,
    fresh_weights,
    same,
)
from tests.support.endpoint_rig import Rig

# Those of the first sync, if its commit has paused generation itself.
PHASES = {
    *("receive_ms", "stage_ms", "search_ms", "pause_ms", "stop_ms", "caches_ms", "vote_ms"),
    *("commit_ms", "call_ms", "resume_ms"),
}

# Three parts of one sync; embed.weight is in two of them.
SPLIT: list[Changes] = [
    {"embed.weight": {0: 0x1111}},
    {"embed.weight": {13: 0x7FC1}},
    {"norm.weight": {7: 0x3333}},
]

# The same of different tensors.
APART: list[Changes] = [{name: elements} for name, elements in STEP.items()]


def split_parts(**metadata: Any) -> list[bytes]:
    return [
        delta_part(changes, **{"part": number, "num_parts": len(SPLIT), "sync_id": "s", **metadata})
        for number, changes in enumerate(SPLIT)
    ]


def statuses(responses: Sequence[httpx.Response]) -> list[str]:
    assert all(response.status_code == 200 for response in responses), [r.text for r in responses]
    return [response.json()["status"] for response in responses]


def together(rig: Rig, *bodies: bytes) -> list[httpx.Response]:
    """The answers to several bodies that are sent at once."""

    async def send() -> list[httpx.Response]:
        return list(await asyncio.gather(*map(rig.sending, bodies)))

    return list(rig.run(send()))


def assert_unchanged(rig: Rig) -> None:
    """Nothing was written since start-up, and nothing is left of what was sent.

    `Rig.assert_untouched` at the end of a test asserts also that a correct sync is accepted.
    """
    assert same(rig.engine.weights, fresh_weights())
    assert rig.engine.writes == [0, 0]
    assert rig.engine.weight_version == str(VERSION)
    status = rig.status()
    assert (status.version.number, status.staged) == (VERSION, None)
    assert not rig.engine.paused
    assert rig.spooled() == []


def assert_already_applied(rig: Rig, response: httpx.Response, version: int = 8) -> None:
    assert response.status_code == 200, response.text
    answer = response.json()
    assert (answer["status"], answer["version"]) == ("already_applied", version)
    statuses = rig.run(rank_statuses(rig.engine))
    assert answer["digest"] == total_digest(status.digest for status in statuses)
    assert not {event[0] for event in rig.engine.events} - {"publish"}
    assert rig.engine.weight_version == str(version)
    assert rig.spooled() == []
