"""The speed of simulated links, as posts of parts show it."""

from __future__ import annotations

import random
import time
from itertools import product
from typing import Any

import pytest

from delta_sender.publish.bandwidth import LinkSpeed

LINKS = {"1 Gbit/s": 125e6, "300 MB/s": 300e6, "10 Gbit/s": 1.25e9, "loopback": 6e9}
FAST = 5e9
OVERHEAD = 0.003


def answer(**seconds: float) -> dict[str, Any]:
    return {"timings_ms": {f"{name}_ms": value * 1e3 for name, value in seconds.items()}}


def note(link: LinkSpeed, nbytes: int, seconds: float, told: dict[str, Any]) -> None:
    """Take in a request that no other has crossed."""
    with link.crossing() as start:
        link.note(nbytes, seconds, told, start + seconds)


def shown(
    speed: float, overhead: float, sizes: list[int], *, kept_back: bool, seed: int = 0
) -> LinkSpeed:
    """Return the measurements of a simulated link; the overhead is up to a third more than given.

    Args:
        kept_back: something on the way hands a body on once it has it whole.
    """
    chance, link = random.Random(seed), LinkSpeed()

    def more(seconds: float) -> float:
        return seconds * (1 + chance.random() / 3)

    note(link, 0, more(overhead), {"version": 3})
    for number, size in enumerate(sizes):
        crossing, stage = size / speed, chance.random() * 0.05
        receive = 1e-4 if kept_back else crossing
        told = answer(receive=receive, stage=stage)
        seconds = more(overhead) + crossing + stage
        if number == len(sizes) - 1:
            told["timings_ms"]["pause_ms"] = 40.0
            # More than that follows a commit, before it is answered.
            told["timings_ms"]["total_ms"] = (receive + stage + 0.2) * 1e3
            seconds += 0.2
        note(link, size, seconds, told)
    return link


SIZES = [4 << 20] * 8, [1 << 20] * 4, [300_000, 500_000] * 3, [10_000, 4 << 20, 2 << 20, 60_000]


@pytest.mark.parametrize("link", LINKS)
def test_simulated(link: str) -> None:
    for case in product(SIZES, [0.001, 0.003, 0.02], [True, False]):
        sizes, overhead, kept_back = case
        found = shown(LINKS[link], overhead, sizes, kept_back=kept_back).measured
        assert found is not None, case
        crossing = max(sizes) / LINKS[link]
        if crossing > 2.5 * overhead:
            assert found == pytest.approx(LINKS[link], rel=0.3), case
        elif crossing < overhead / 2:
            assert found >= FAST, case


@pytest.mark.parametrize("overhead", [0.001, 0.02])
def test_small_parts_say_nothing(overhead: float) -> None:
    link = shown(125e6, overhead, [10_000] * 8, kept_back=False)
    assert link.measured is None
    assert link.bytes_per_s == 125e6


def test_a_link_that_has_become_slow_is_noticed() -> None:
    link = shown(6e9, 0.003, [4 << 20] * 30, kept_back=False)
    for _ in range(9):
        note(link, 4 << 20, 0.003 + (4 << 20) / 125e6, answer(receive=(4 << 20) / 125e6))
    assert link.measured == pytest.approx(125e6, rel=0.1)


def test_a_single_late_answer_is_not_the_links() -> None:
    link = shown(300e6, 0.003, [4 << 20] * 8, kept_back=False)
    note(link, 4 << 20, 3.0, answer(receive=(4 << 20) / 300e6))
    assert link.measured == pytest.approx(300e6, rel=0.3)


def test_an_engine_that_does_not_tell_of_its_work() -> None:
    link = LinkSpeed()
    note(link, 100, 5.0, {})  # too small to measure
    assert link.measured is None
    assert link.bytes_per_s == 125e6
    note(link, 1_000_000, 1.5, answer(stage=0.4, pause=0.1))
    assert link.measured == pytest.approx(1e6)
    note(link, 1_000_000, 1.0, {"timings_ms": "none"})
    assert link.measured == pytest.approx(1e6)
    note(link, 1_000_000, 0.5, answer(stage=0.9))  # its clock is another's
    assert link.measured == pytest.approx(1e6)


@pytest.mark.parametrize("link", LINKS)
def test_of_several_posts_at_once(link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the link takes a bit of each in turn, or one after the other."""
    for case in product([1, 2, 4], [0.0, 0.02, 0.2], [True, False]):
        speed, size = LINKS[link], 8 << 20
        found = of_posts(speed, size, *case, monkeypatch)
        assert found is not None, case
        if size / speed > 2.5 * OVERHEAD:
            assert found == pytest.approx(speed, rel=0.35), case


def of_posts(
    speed: float,
    size: int,
    at_once: int,
    work: float,
    shares: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> float | None:
    """Return what is measured of a link's speed while several posts cross it."""
    overhead, now = OVERHEAD, 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    found = LinkSpeed()
    note(found, 0, overhead, {"version": 3})
    left: dict[int, float] = {}  # bytes of each post that have yet to cross
    open_posts: dict[int, tuple[Any, float, float]] = {}
    answers: dict[int, float] = {}  # when each will be answered
    number = 0
    while number < 40 or open_posts:
        while number < 40 and len(open_posts) < at_once:
            crossing = found.crossing()
            open_posts[number] = crossing, crossing.__enter__(), 0.0
            left[number] = size
            number += 1
        crossing_now = [*left] if shares else [*left][:1]
        step = min(
            [left[n] * len(crossing_now) / speed for n in crossing_now]
            + [at - now for at in answers.values()]
        )
        now += step
        for n in crossing_now:
            left[n] -= step * speed / len(crossing_now)
            if left[n] < 1:
                del left[n]
                answers[n] = now + work + overhead
                open_posts[n] = *open_posts[n][:2], now
        for n in [n for n, at in answers.items() if at <= now + 1e-9]:
            crossing, start, arrived = open_posts.pop(n)
            del answers[n]
            told = answer(receive=arrived - start, stage=work)
            found.note(size, now - start, told, now)
            crossing.__exit__(None, None, None)
    return found.measured
