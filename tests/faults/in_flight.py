"""Faults with several parts of a sync in flight, one row each; the engine survives them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from scripts.live_engine.process import HOST
from tests.faults.harness import Harness
from tests.faults.survivable import flipped, rows


def post_at_once(harness: Harness, bodies: Sequence[bytes]) -> list[str]:
    """Post parts at the same time; return the outcome of each."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        return [harness.outcome_of(answer) for answer in pool.map(harness.post, bodies)]


def side_by_side(harness: Harness) -> None:
    *others, last = harness.parts(4)
    assert post_at_once(harness, others) == ["staged"] * 3
    harness.expect(last, "committed")


def side_by_side_with_the_last(harness: Harness) -> None:
    """Which of them completes the sync is not known; one does."""
    outcomes = post_at_once(harness, harness.parts(4))
    assert sorted(outcomes) == ["committed", *["staged"] * 3]


def one_of_several_corrupted(harness: Harness) -> None:
    first, second, third, _ = harness.parts(4)
    outcomes = post_at_once(harness, [first, flipped(second, len(second) - 1), third])
    assert outcomes == ["staged", "400 ChecksumMismatch", "staged"]


def one_rank_cannot_stage_one_of_several(harness: Harness) -> None:
    harness.arm("fail_stage", 1)
    outcomes = post_at_once(harness, harness.parts(4)[:3])
    assert [status[:4] for status in sorted(outcomes)] == ["500 ", "stag", "stag"]


def several_cut(harness: Harness) -> None:
    """In the middle of their bodies, which arrive side by side."""
    requests = [harness.raw(body) for body in harness.parts(4)]
    with contextlib.ExitStack() as stack:
        for request in requests:
            connection = socket.create_connection((HOST, harness.engine.port))
            stack.enter_context(connection).sendall(request[: len(request) // 2])


IN_FLIGHT = [
    *rows(
        "several parts in flight at once",
        "`staged`, and one `committed`",
        "new",
        ("side by side", side_by_side),
        ("side by side with the last", side_by_side_with_the_last),
    ),
    *rows(
        "one of several parts in flight corrupted, or not staged by one rank",
        "400 or 500; the others `staged`",
        "old",
        ("one of several corrupted", one_of_several_corrupted),
        ("one of several not staged", one_rank_cannot_stage_one_of_several),
    ),
    *rows("connections of several parts ended", "nothing", "old", ("several cut", several_cut)),
]
