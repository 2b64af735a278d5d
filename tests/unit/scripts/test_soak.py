"""The soak's judgement: what counts as failed, what counts as flat, and what is sent in turn."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from delta_sender.options import CHOICES
from scripts.live_engine.tiny_models import digest
from scripts.soak import __main__ as soak
from scripts.soak.load import AbortPolicy, Counts, Load, Tally, asks, read_stream
from scripts.soak.memory import (
    Sample,
    Trend,
    Usage,
    grown,
    growth_under_load,
    names_of,
    spooled,
)
from scripts.soak.syncs import PAUSE_MODES, Trainer, ways

MIB = 1 << 20


def answered(reason: str | None, tokens: int, *, may_abort: bool = False) -> Tally:
    tally = Tally()
    tally.answered(reason, tokens, 8, 0.1, may_abort=may_abort)
    return tally


@pytest.mark.parametrize(
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


def test_an_abort_out_of_turn_is_named() -> None:
    assert answered("abort", 3).problems == [
        "ended with 'abort' after 3 of 8 tokens without a sync that aborts"
    ]


def test_all_failures_are_counted_and_the_first_are_told() -> None:
    tally = Tally()
    for number in range(20):
        tally.failed(f"number {number}")
    assert tally.counts == Counts(failed=20)
    assert tally.problems == [f"number {number}" for number in range(5)]


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


def test_what_the_clients_print_is_taken() -> None:
    load = Load("http://127.0.0.1:9", clients=1, seed=0)
    load.take({"reason": "length", "tokens": 4, "wanted": 4, "begin": 1.0, "end": 3.5})
    load.take({"reason": "abort", "tokens": 1, "wanted": 4, "begin": 1.0, "end": 2.0})
    load.take({"problem": "ReadTimeout: timed out"})
    assert load.tally.counts == Counts(finished=1, failed=2, tokens=4)
    assert load.tally.seconds == [2.5]


@pytest.mark.slow
def test_clients_that_find_no_engine_say_so_and_end() -> None:
    with Load("http://127.0.0.1:9", clients=2, seed=0) as load:
        deadline = time.monotonic() + 20
        while load.tally.counts.failed < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert load.tally.counts.failed >= 2
    assert load.tally.problems[0].startswith("ConnectError: ")


def stream(*chunks: object, end: str = "data: [DONE]\n\n") -> list[bytes]:
    """In pieces that end anywhere."""
    lines = [f"data: {json.dumps(c, ensure_ascii=False)}\n\n" for c in chunks]
    whole = "".join([*lines, end]).encode()
    return [whole[start : start + 7] for start in range(0, len(whole), 7)]


def chunk(reason: str | None = None, **more: object) -> dict[str, object]:
    return {"choices": [{"text": "a\x85\u2028b", "finish_reason": reason}], **more}


USAGE = {"choices": [], "usage": {"completion_tokens": 8}}


@pytest.mark.parametrize(
    "chunks",
    [
        [chunk(), chunk("length"), USAGE],
        [chunk(usage=None), chunk("length", usage={"completion_tokens": 8})],
    ],
)
def test_a_stream_is_read(chunks: list[object]) -> None:
    assert read_stream(iter(stream(*chunks))) == ("length", 8)


@pytest.mark.parametrize(
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


def test_prompts_are_mixed_and_share_beginnings() -> None:
    ours, theirs = (list(itertools.islice(asks(0, client), 200)) for client in (0, 1))
    assert ours == list(itertools.islice(asks(0, 0), 200))
    assert {tuple(a.prompt[:160]) for a in ours} & {tuple(a.prompt[:160]) for a in theirs}
    assert min(len(ask.prompt) for ask in ours) < 10
    assert all(len(ask.prompt) + ask.max_tokens < 256 for ask in ours)
    assert {ask.stream for ask in ours} == {True, False}


def test_six_senders_in_a_row_have_every_encoding_and_pause_mode() -> None:
    all_ways = list(itertools.islice(ways(PAUSE_MODES), 36))
    assert len(set(all_ways)) == 36
    assert {way.encoding for way in all_ways[:6]} == set(CHOICES)
    assert {way.pause_mode for way in all_ways[:6]} == set(PAUSE_MODES)
    assert {way.flush_cache for way in all_ways[:6]} == {True, False}
    assert {way.pause_mode for way in itertools.islice(ways(("keep",)), 12)} == {"keep"}


def test_the_trainer_changes_the_share_it_is_told() -> None:
    base = {"a": torch.randn(100, 200).bfloat16(), "b": torch.randn(50)}
    trainer = Trainer(base, seed=1)
    assert digest(trainer.tensors) == digest(Trainer(base, seed=2).tensors)
    trainer.step(0.0)
    assert digest(trainer.tensors) == digest(Trainer(base, seed=2).tensors)
    trainer.step(0.1)
    changed = trainer.tensors["a"] != base["a"]
    assert changed.float().mean().item() == pytest.approx(0.1, abs=0.01)
    assert torch.allclose(trainer.tensors["a"], base["a"], rtol=0.05)
    assert digest(trainer.tensors) != digest(Trainer(base, seed=2).tensors)


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


def quiet(memory: list[int], seconds_each: float = 1.0) -> list[Sample]:
    """Samples of process 7 before the first sync."""
    return [Sample(0, {7: Usage(m, 10, 3)}, 0, n * seconds_each) for n, m in enumerate(memory)]


def test_the_loads_own_growth_is_measured_after_a_warm_up() -> None:
    settling = [100 * MIB + 100_000 * n for n in range(60)]
    steady = [settling[-1] + 10_000 * n for n in range(60)]
    assert growth_under_load(quiet(settling + steady)) == {7: pytest.approx(10_000)}
    assert growth_under_load(quiet(steady[::-1] * 2)) == {7: 0.0}


def test_the_loads_own_growth_takes_a_minute_to_see() -> None:
    growing = [100 * MIB + 10_000 * n for n in range(50)]
    assert growth_under_load(quiet(growing)) == {}
    assert growth_under_load([]) == {}
    assert set(growth_under_load(quiet(growing, seconds_each=2.0))) == {7}


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


def test_a_trend_is_that_of_the_quarters() -> None:
    trend = Trend.of([(n, 10.0 * n) for n in range(8)], bound=60.0)
    assert trend == Trend(5.0, 65.0, 6.0, 60.0)
    assert trend.is_flat
    assert trend.slope == 10.0
    assert not Trend(5.0, 65.1, 6.0, 60.0).is_flat
    assert Trend(65.0, 5.0, 6.0, 0.0).is_flat


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


def test_processes_are_named_apart() -> None:
    child = [sys.executable, "-c", "print(flush=True); input()", "::rank"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with contextlib.ExitStack() as stack:
        ours = [stack.enter_context(subprocess.Popen(child, **pipes)) for _ in "ab"]
        for process in ours:  # a process has no name until it runs
            assert process.stdout is not None
            process.stdout.readline()
        names = list(names_of(process.pid for process in ours).values())
    assert names[1] == f"{names[0]} 2"


def test_a_process_that_is_gone_is_in_no_sample(tmp_path: Path) -> None:
    assert Sample.take(0, [2**22 + 1], tmp_path).processes == {}


@pytest.mark.parametrize(
    "wrong", [["--syncs", "19"], ["--clients", "0"], ["--engine", "tgi"], ["more"]]
)
def test_bad_usage(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        soak.main(wrong)
    assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err
