"""Engines that several parts are posted to at once."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_sender import PartialSyncError
from tests.support.fake_engine import A, B, Engine, Handler, error, model_of, sends, train
from tests.unit.sender.test_multi_sender import refuse, sender_of, two
from tests.unit.sender.test_post_queue import PROPERTY

pytestmark = pytest.mark.slow


@settings(PROPERTY, max_examples=30)
@given(
    steps=st.lists(
        st.dictionaries(st.integers(0, 5), st.sampled_from("abx"), max_size=3),
        min_size=1,
        max_size=4,
    ),
    seconds=st.lists(st.floats(0.0, 0.003), min_size=1, max_size=5),
    at_once=st.integers(1, 4),
    encoding=st.sampled_from(["deltas_zstd", "gap8_ulp"]),
)
def test_with_parts_in_flight_an_engine_holds_one_of_two(
    steps: list[dict[int, str]], seconds: list[float], at_once: int, encoding: str
) -> None:
    """Whichever posts are refused, and in whatever order they end; the other one follows."""
    model = model_of(tensors=5, numel=40)
    a, b = two(model)
    engines = {"a": a, "b": b}
    options: dict[str, Any] = {"bucket_bytes": 1, "posts_in_flight": at_once, "encoding": encoding}
    with sender_of(a, b, model, **options) as sender:
        for step, faults in enumerate([*steps, {}]):
            before = {name: copied(engine) for name, engine in engines.items()}
            for name, engine in engines.items():
                late = itertools.cycle(seconds)
                engine.faults = dict.fromkeys(range(len(engine.requests), 999), lags(late))
                for number, whose in faults.items():
                    if whose in (name, "x"):
                        engine.faults[len(engine.requests) + number] = refuse()
            train(model, step, 0.02)
            with contextlib.suppress(PartialSyncError):
                sender.sync(model.items())
            for url, name in ((A, "a"), (B, "b")):
                engine = engines[name]
                assert engine.holds(model) or copied(engine) == before[name]
                assert sender.versions[url] == engine.version
        assert all(engine.holds(model) for engine in engines.values())


def copied(engine: Engine) -> dict[str, bytes]:
    return {name: values.tobytes() for name, values in engine.weights.items()}


def lags(seconds: Iterator[float]) -> Callable[[Handler, httpx.Request], httpx.Response]:
    def take(take: Handler, request: httpx.Request) -> httpx.Response:
        time.sleep(next(seconds))
        return take(request)

    return take


def test_an_engine_without_room_for_so_many_gets_fewer(naps: list[float]) -> None:
    model = model_of(tensors=8)
    a, b = two(model)
    b.faults = {1: sends(error(429, "TooManyUploads")), 2: sends(error(429, "TooManyUploads"))}
    with sender_of(a, b, model, bucket_bytes=1) as sender:
        train(model)
        sender.sync(model.items())
        assert [session.destination.at_once for session in sender._publisher.sessions] == [4, 2]
    assert naps
    assert a.holds(model)
    assert b.holds(model)
