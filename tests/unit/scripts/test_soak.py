"""The soak's judgement: what counts as failed, what counts as flat, and what is sent in turn."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest

from scripts.soak.load import AbortPolicy, Counts, Tally, read_stream
from scripts.soak.memory import (
    Sample,
    Usage,
    grown,
    spooled,
)
from tests.support.cases import in_one_test

MIB = 1 << 20


def answered(reason: str | None, tokens: int, *, may_abort: bool = False) -> Tally:
    tally = Tally()
    tally.answered(reason, tokens, 8, 0.1, may_abort=may_abort)
    return tally


@in_one_test(
    ("reason", "tokens", "may_abort", "counts"),
    [
        ("length", 8, False, Counts(finished=1, tokens=8)),
        ("length", 8, True, Counts(finished=1, tokens=8)),
        ("abort", 3, True, Counts(aborted=1, tokens=3)),
        ("abort", 0, True, Counts(aborted=1)),
        ("abort", 3, False, Counts(failed=1)),
        ("length", 7, True, Counts(failed=1)),
        ("length", 9, True, Counts(failed=1)),
        ("abort", 9, True, Counts(failed=1)),
        ("stop", 8, True, Counts(failed=1)),
        (None, 8, True, Counts(failed=1)),
    ],
)
def test_what_becomes_of_a_request(
    reason: str | None, tokens: int, may_abort: bool, counts: Counts
) -> None:
    tally = answered(reason, tokens, may_abort=may_abort)
    assert tally.counts == counts
    assert bool(tally.problems) == bool(counts.failed)


def test_only_a_sync_in_its_time_may_abort_a_request() -> None:
    policy = AbortPolicy()
    assert not policy.allows(0.0, math.inf)
    before = time.monotonic()
    with policy.aborting():
        within = time.monotonic()
        assert policy.allows(before, within)
        assert policy.allows(within, within)
    after = time.monotonic()
    assert policy.allows(before, after)
    assert policy.allows(within, after)
    assert not policy.allows(after + 0.001, math.inf)
    assert not policy.allows(0.0, before - 0.001)
    with policy.aborting():
        assert policy.allows(after, math.inf)


def stream(*chunks: object, end: str = "data: [DONE]\n\n") -> list[bytes]:
    """In pieces that end anywhere."""
    lines = [f"data: {json.dumps(c, ensure_ascii=False)}\n\n" for c in chunks]
    whole = "".join([*lines, end]).encode()
    return [whole[start : start + 7] for start in range(0, len(whole), 7)]


def chunk(reason: str | None = None, **more: object) -> dict[str, object]:
    return {"choices": [{"text": "a\x85\u2028b", "finish_reason": reason}], **more}


USAGE = {"choices": [], "usage": {"completion_tokens": 8}}


@in_one_test(
    "chunks",
    [
        [chunk(), chunk("length"), USAGE],
        [chunk(usage=None), chunk("length", usage={"completion_tokens": 8})],
    ],
)
def test_a_stream_is_read(chunks: list[object]) -> None:
    assert read_stream(iter(stream(*chunks))) == ("length", 8)


@in_one_test(
    "pieces",
    [
        [],
        stream(chunk("length"), USAGE, end=""),
        stream(chunk("length")),
        stream(chunk(), {"error": {"message": "gone"}}, USAGE),
        [b"data: {"],
    ],
)
def test_a_stream_that_breaks_off_is_no_answer(pieces: list[bytes]) -> None:
    with pytest.raises(ValueError):
        read_stream(iter(pieces))


def test_a_stream_aborted_before_its_first_token_gives_no_reason() -> None:
    pieces = stream({"choices": [], "usage": {"completion_tokens": 0}})
    assert read_stream(iter(pieces)) == ("abort", 0)


def samples(memory: list[int], files: int = 10, spooled: int = 0) -> list[Sample]:
    return [Sample(5 * n, {7: Usage(m, files, 3)}, spooled) for n, m in enumerate(memory)]


def test_a_few_high_samples_are_no_growth() -> None:
    flat = [100 * MIB] * 40
    flat[-1] = flat[-7] = 900 * MIB
    assert grown(samples(flat), {7: "rank"}) == []


def test_what_each_sync_keeps_is_growth() -> None:
    """A hundredth of what a sync of the soak brings, over a whole one."""
    growing = [100 * MIB + 5 * n * 14_000 for n in range(180)]
    [problem] = grown(samples(growing), {7: "rank"})
    assert problem.startswith("rank: memory grew from ")
    assert "14,000.0 per sync" in problem


@pytest.mark.parametrize(
    ("under_load", "problems"),
    [(None, 1), ({}, 1), ({8: 1e6}, 1), ({7: 5_000.0}, 1), ({7: 10_000.0}, 0)],
)
def test_the_loads_own_growth_is_none_of_the_syncs(
    under_load: dict[int, float] | None, problems: int
) -> None:
    """A thousand syncs of a second, and 15 MB: 10 kB of a second would leave 7.5 of them."""
    during = [Sample(n, {7: Usage(MIB + 20_000 * n, 10, 3)}, 0, 1e5 + n) for n in range(0, 1000, 5)]
    found = grown(during, {7: "rank"}, under_load)
    assert len(found) == problems
    if problems and under_load == {7: 5_000.0}:
        assert f"the bound is {8 * MIB + 5_000 * 750:,.0f} in all" in found[0]


def test_processes_that_come_and_go_are_named() -> None:
    use = Usage(MIB, 1, 1)
    before, after = Sample(0, {1: use, 2: use}, 0), Sample(5, {1: use, 3: use}, 0)
    assert grown([before, after], {1: "server", 2: "rank"}) == [
        "process 3 was started during the soak",
        "rank was lost",
    ]


def test_open_files_threads_and_the_spool_are_judged() -> None:
    leaking = [Sample(n, {1: Usage(MIB, n, n)}, n) for n in range(40)]
    assert [problem.split(" grew")[0] for problem in grown(leaking, {1: "rank"})] == [
        "rank: open files",
        "rank: threads",
        "files in the spool",
    ]


def test_only_spool_files_with_something_in_them_are_left(tmp_path: Path) -> None:
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "lock").touch()
    (tmp_path / "owner" / "part").write_bytes(b"part")
    assert spooled(tmp_path) == [tmp_path / "owner" / "part"]
    assert Sample.take(0, [], tmp_path).spooled == 1
