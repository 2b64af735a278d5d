"""Pauses that a caller forgets: who sees them, and what ends them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from prometheus_client import REGISTRY

from delta_server.commit import serialize_with_commits
from delta_server.service import DeltaService
from engine_ext.ranks.status import PauseStatus
from tests.support.delta_bodies import NEXT, delta_part
from tests.support.endpoint_rig import STATUS, Rig
from tests.support.present import present
from tests.unit.server.other_process import Process


def paused_since() -> float:
    value = REGISTRY.get_sample_value("delta_updates_paused_since")
    assert value is not None
    return value


def add_routes(app: FastAPI, service: DeltaService, rig: Rig) -> None:
    """Add an engine's own routes that pause and resume, as an adapter wraps what they call."""

    methods: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
        "/pause": rig.engine.pause,
        "/resume": rig.engine.resume,
    }
    for path, method in methods.items():
        wrapped = serialize_with_commits(service.committer, method)

        async def answer(request: Request, wrapped: Any = wrapped) -> JSONResponse:
            await wrapped()
            return JSONResponse("done")

        app.add_route(path, answer, ["POST"])


@pytest.fixture
def callers(rig: Rig) -> Rig:
    """A server with routes of its own that pause and resume."""
    add_routes(rig.app, rig.service, rig)
    return rig


def test_a_pause_is_shown_until_it_ends(callers: Rig) -> None:
    assert callers.status().health.paused is None
    before = time.time()
    callers.post("/pause", peer=("10.0.0.3", 4))
    paused = present(callers.status().health.paused)
    assert paused.by == "10.0.0.3"
    assert before <= present(paused.since) + 0.001 <= time.time() + 0.002
    assert 0 <= present(paused.seconds) < 10
    assert paused_since() == paused.since
    callers.post("/resume")
    assert callers.status().health.paused is None
    assert paused_since() == 0


def test_a_second_pause_does_not_hide_the_first(callers: Rig) -> None:
    callers.post("/pause", peer=("10.0.0.3", 4))
    first = present(callers.status().health.paused)
    callers.post("/pause", peer=("10.0.0.4", 4))
    again = present(callers.status().health.paused)
    assert (again.since, again.by) == (first.since, first.by)


def test_a_pause_by_nobody_known(callers: Rig) -> None:
    callers.post("/pause", peer=None)
    assert present(callers.status().health.paused).by is None
    callers.post("/resume")
    callers.engine.paused = True  # by a way that nobody sees
    assert callers.status().health.paused == PauseStatus(since=None, seconds=None, by=None)


def test_a_commit_is_no_pause_and_ends_none(callers: Rig) -> None:
    assert callers.send(delta_part()).json()["status"] == "committed"
    assert callers.status().health.paused is None
    callers.post("/pause", peer=("10.0.0.3", 4))
    full = present(callers.status().health.paused).since
    assert callers.send(delta_part(version=9, base_version=8)).status_code == 200
    assert present(callers.status().health.paused).since == full
    assert callers.engine.paused


def test_a_failed_commit_is_not_the_callers_pause(callers: Rig) -> None:
    callers.fail_commit()
    assert callers.engine.paused
    assert callers.status().health.paused is None


def test_all_processes_know_of_a_pause(callers: Rig, other: Process) -> None:
    add_routes(other.app, other.service, callers)
    callers.post("/pause", peer=("10.0.0.3", 4))
    asked = callers.run(callers.request("GET", STATUS, app=other.app))
    assert asked.json()["health"]["paused"]["by"] == "10.0.0.3"
    callers.run(callers.request("POST", "/resume", app=other.app))
    assert callers.status().health.paused is None


# --delta-max-pause ---------------------------------------------------------------------------


def end_longer_than(rig: Rig, seconds: float) -> None:
    """Look once for a pause that is longer."""
    rig.run(rig.service.committer.end_long_pause(seconds))


@pytest.mark.slow
def test_the_flag_ends_a_long_pause(
    make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    short = make_rig(max_pause=0.2)
    add_routes(short.app, short.service, short)

    async def until_resumed() -> None:
        while short.engine.paused:
            await asyncio.sleep(0.01)

    with caplog.at_level(logging.WARNING):
        short.post("/pause", peer=("10.0.0.3", 4))
        short.run(until_resumed())
    assert short.status().health.paused is None
    assert paused_since() == 0
    [line] = [r.getMessage() for r in caplog.records if "is resumed" in r.getMessage()]
    assert "10.0.0.3 had paused it" in line
    assert "--delta-max-pause" in line
    assert short.send(delta_part()).json()["status"] == "committed"


def test_a_pause_that_nobody_saw_counts_from_its_finding(callers: Rig) -> None:
    callers.engine.paused = True
    end_longer_than(callers, 60)
    assert callers.engine.paused
    assert present(callers.status().health.paused).by is None
    end_longer_than(callers, 0)
    assert not callers.engine.paused


def test_a_pause_is_left_to_who_resumes_in_time(callers: Rig) -> None:
    callers.post("/pause")
    end_longer_than(callers, 60)
    assert callers.engine.paused
    callers.post("/resume")
    end_longer_than(callers, 0)
    assert callers.engine.events.count(("resume",)) == 1


def test_uncertain_weights_are_not_let_generate(callers: Rig) -> None:
    callers.fail_commit()
    end_longer_than(callers, 0)
    callers.post("/pause")  # it is the caller's from here on
    end_longer_than(callers, 0)
    assert callers.engine.paused


def test_weights_that_sleep_are_not_let_generate(callers: Rig) -> None:
    callers.engine.set_asleep(True)
    callers.post("/pause")
    end_longer_than(callers, 0)
    assert callers.engine.paused


def test_an_engine_that_is_half_awake_is_not_let_generate(callers: Rig) -> None:
    """It has its weights, and no KV cache."""
    callers.post("/pause")
    callers.engine.set_asleep(False, other=True)
    end_longer_than(callers, 0)
    assert callers.engine.paused
    callers.engine.set_asleep(False)
    end_longer_than(callers, 0)
    assert not callers.engine.paused


def test_without_the_flag_a_pause_lasts(callers: Rig) -> None:
    callers.post("/pause")
    assert callers.send(delta_part()).json()["status"] == "committed"
    assert callers.engine.paused
    assert (callers.engine.weights["layer.weight"] == NEXT["layer.weight"]).all()


# Ways that no process sees ---------------------------------------------------------------------


def test_a_new_pause_does_not_count_from_an_old_one(callers: Rig) -> None:
    callers.post("/pause", peer=("10.0.0.3", 4))
    first = present(callers.status().health.paused).since
    callers.engine.paused = False  # as a wake-up resumes
    assert callers.status().health.paused is None
    assert paused_since() == 0
    time.sleep(0.01)
    callers.post("/pause", peer=("10.0.0.4", 4))
    again = present(callers.status().health.paused)
    assert present(again.since) > present(first)
    assert again.by == "10.0.0.4"


def test_an_end_that_nobody_saw_is_noticed(callers: Rig) -> None:
    callers.post("/pause", peer=("10.0.0.3", 4))
    callers.engine.paused = False
    end_longer_than(callers, 60)
    callers.engine.paused = True
    assert present(callers.status().health.paused).by is None


def test_an_engine_that_sleeps_is_not_called_paused(callers: Rig) -> None:
    callers.engine.set_asleep(True)
    callers.engine.paused = True  # as vLLM is while it sleeps
    assert callers.status().health.paused is None
    callers.engine.paused = False
    callers.engine.set_asleep(False)
    callers.post("/pause", peer=("10.0.0.3", 4))
    callers.engine.set_asleep(True)
    assert present(callers.status().health.paused).by == "10.0.0.3"


@pytest.mark.parametrize("weights", [True, False])
def test_a_sleep_is_no_pause_of_who_asks_for_it(callers: Rig, weights: bool) -> None:
    """As vLLM sleeps, and as it is with weights that alone are awake again."""

    async def sleep() -> None:
        callers.engine.set_asleep(weights, other=True)
        callers.engine.paused = True

    callers.run(callers.service.committer.run_external_change(sleep))
    assert callers.status().health.paused is None
    assert paused_since() == 0
    end_longer_than(callers, 0)
    assert callers.engine.paused
    assert callers.status().health.paused is None
