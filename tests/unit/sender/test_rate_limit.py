"""A limit of bytes per second: with a clock that the test moves, and over real posts."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_sender import DeltaSender, RateLimit
from delta_sender.options import SenderOptions
from tests.support.fake_engine import Engine, model_of, train

pytestmark = pytest.mark.slow


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


@given(
    st.floats(1.0, 1e9),
    st.lists(st.tuples(st.integers(0, 1 << 20), st.floats(0.0, 3.0)), min_size=1, max_size=50),
)
def test_no_more_than_the_rate(rate: float, sent: list[tuple[int, float]]) -> None:
    """In any time that ends when bytes can be sent: earlier bytes, plus a twentieth of a second."""
    clock = Clock()
    limit = RateLimit(rate, now=clock.now, sleep=clock.sleep)
    before: list[tuple[float, int]] = []
    for nbytes, pause in sent:
        limit.wait(nbytes)
        for index, (begin, _) in enumerate(before):
            total = sum(one for _, one in before[index:])
            assert total <= rate * (clock.seconds - begin + 0.05) * (1 + 1e-9) + 1e-3
        before.append((clock.seconds, nbytes))
        clock.seconds += pause


def test_what_is_sent_without_a_pause_has_the_rate() -> None:
    clock = Clock()
    limit = RateLimit(1000.0, now=clock.now, sleep=clock.sleep)
    for _ in range(100):
        limit.wait(100)
    limit.wait(0)
    assert clock.seconds - 100.0 == pytest.approx(10.0, abs=0.051)


def test_connections_share_it() -> None:
    slept: list[float] = []
    limit = RateLimit(1e6, now=lambda: 0.0, sleep=slept.append)
    threads = [threading.Thread(target=limit.wait, args=(100_000,)) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(slept) == pytest.approx([0.05 + 0.1 * number for number in range(9)])


def test_every_byte_of_a_body_takes_its_turn() -> None:
    model, waited = model_of(), []

    class Counted(RateLimit):
        def wait(self, nbytes: int) -> None:
            waited.append(nbytes)

    engine = Engine.of(model)
    limit = Counted(1.0)
    with DeltaSender(
        "http://engine", model.items(), client=engine.client(), bandwidth_limit=limit
    ) as sender:
        train(model)
        report = sender.sync(model.items())
    assert sum(waited) == report.wire_bytes
    assert engine.holds(model)


def test_two_senders_may_share_one() -> None:
    limit = RateLimit(5.0)
    chosen = [SenderOptions(bandwidth_limit=limit).bandwidth_limit for _ in range(2)]
    assert chosen == [limit, limit]
    made = SenderOptions(bandwidth_limit=5).bandwidth_limit
    assert isinstance(made, RateLimit)
    assert made.bytes_per_second == 5.0
