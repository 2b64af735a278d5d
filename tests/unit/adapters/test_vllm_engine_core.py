"""The calls that vLLM's engine core carries out, by vLLM's own handling of utilities."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from engine_ext.adapters.vllm import engine_core, prefix_cache
from engine_ext.errors import Conflict
from engine_ext.ranks.operations import CommitSync, encode_request
from tests.support.lazy_modules import LazyModule

ENGINE, CORE = LazyModule("vllm.v1.engine"), LazyModule("vllm.v1.engine.core")
OPERATION, ARGUMENTS = encode_request(CommitSync(version=8, sync_id=None))


class Core:
    """An engine core whose step ends when the test lets it, and what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.sent: list[dict[str, Any]] = []  # the arguments of what the workers get
        self.paused = False
        self.stopping: Future[None] | None = None
        self.fails: dict[str, Exception] = {}
        self.scheduler = SimpleNamespace(requests={})

    def _do(self, *asked: Any) -> None:
        self.asked.append(asked)
        if asked[0] in self.fails:
            raise self.fails[asked[0]]

    def pause_scheduler(self, mode: str, clear_cache: bool) -> Future[None] | None:
        self._do("pause", mode, clear_cache)
        self.paused = True
        return self.stopping

    def is_scheduler_paused(self) -> bool:
        return self.paused

    def reset_prefix_cache(self, *, reset_running_requests: bool, reset_connector: bool) -> bool:
        self._do("drop KV", reset_running_requests, reset_connector)
        return True

    def reset_encoder_cache(self) -> None:
        self._do("drop embeddings")

    def collective_rpc(self, method: str, *, args: tuple[str, dict[str, Any]]) -> list[Any]:
        self._do(method, args[0])
        self.sent.append(args[1])
        return ["answer"] * 2

    def set_weight_version(self, version: str) -> None:
        self._do("version", version)

    def resume_scheduler(self) -> None:
        self._do("resume")
        self.paused = False


def call(core: Core, method: str, *arguments: Any) -> list[Any]:
    """Call a method as vLLM's loop does; returns a list that its answer is appended to."""
    answers: list[Any] = []
    bound = partial(getattr(CORE.EngineCore, method), core, *arguments)
    CORE.EngineCoreProc._invoke_utility_method(
        method, bound, ENGINE.UtilityOutput(1), answers.append
    )
    return answers


def stop_and_commit(core: Core, flush_cache: bool | str = True) -> list[Any]:
    return call(core, engine_core.CALL_STOPPED, flush_cache, OPERATION, dict(ARGUMENTS))


@pytest.fixture(autouse=True)
def install() -> None:
    engine_core.install()


STOPPED = ("pause", "keep", False)
DROPPED = [("drop KV", True, True), ("drop embeddings",)]
COMMITTED = ("delta_updates", "commit")


@pytest.mark.parametrize("flush_cache", [True, False, "salt"])
@pytest.mark.parametrize("steps", [False, True])
def test_one_call_stops_and_commits(
    flush_cache: bool | str, steps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, or when the step that runs has ended."""
    core = Core()
    monkeypatch.setattr(prefix_cache, "salt", lambda core: core.asked.append("salt"))
    core.stopping = Future() if steps else None
    answers = stop_and_commit(core, flush_cache)
    if core.stopping is not None:
        assert (core.asked, answers) == ([STOPPED], [])
        core.stopping.set_result(None)
    caches: dict[bool | str, list[Any]] = {True: DROPPED, False: [], "salt": ["salt"]}
    assert core.asked == [STOPPED, *caches[flush_cache], COMMITTED]
    assert core.sent == [ARGUMENTS]
    [answer] = answers
    found: Any = answer.result.result
    assert found["answers"] == ["answer"] * 2
    assert found["stop"].pop("refusal") is None
    assert min(found["stop"].values()) >= 0


@pytest.mark.parametrize("step", ["pause", "step", "drop KV", "resumed"])
def test_workers_refuse_what_a_core_did_not_stop_for(step: str) -> None:
    """They must vote: those of other replicas wait for them."""
    core = Core()
    core.fails = {step: Conflict("not now")}
    core.stopping = None if step in ("pause", "drop KV") else Future()
    answers = stop_and_commit(core)
    if step == "step":
        core.stopping.set_exception(Conflict("not now"))  # type: ignore[union-attr]
    elif step == "resumed":
        core.resume_scheduler()
        core.stopping.set_result(None)  # type: ignore[union-attr]
    [answer] = answers
    refusal: Any = answer.result.result["stop"]["refusal"]
    assert refusal["type"] == "Conflict"
    assert ("generation was resumed" in refusal["message"]) == (step == "resumed")
    assert core.sent == [{**ARGUMENTS, "refusal": refusal}]
    assert core.asked[-1] == COMMITTED


def test_only_the_last_call_that_stopped_a_core_writes() -> None:
    """Who asked first is gone; generation has been resumed for that, and stopped again."""
    core = Core()
    core.stopping = Future()
    gone = stop_and_commit(core)
    call(core, engine_core.PUBLISH, None, True)
    last = stop_and_commit(core)
    core.stopping.set_result(None)
    refused, done = (answers[0].result.result["stop"]["refusal"] for answers in (gone, last))
    assert (refused["type"], done) == ("Conflict", None)
    assert ["refusal" in sent for sent in core.sent] == [True, False]


@pytest.mark.parametrize("steps", [False, True])
def test_workers_that_do_not_answer_are_an_error(steps: bool) -> None:
    core = Core()
    core.fails["delta_updates"] = RuntimeError("a worker is gone")
    core.stopping = Future() if steps else None
    answers = stop_and_commit(core)
    if core.stopping is not None:
        core.stopping.set_result(None)
    [answer] = answers
    assert "a worker is gone" in str(answer.failure_message)


@pytest.mark.parametrize(
    ("version", "resumes", "asked"),
    [
        ("8", True, [("version", "8"), ("resume",)]),
        ("8", False, [("version", "8")]),
        (None, True, [("resume",)]),
    ],
)
def test_version_is_set_before_scheduling_resumes(
    version: str | None, resumes: bool, asked: list[Any]
) -> None:
    core = Core()
    [answer] = call(core, engine_core.PUBLISH, version, resumes)
    assert (core.asked, answer.failure_message) == (asked, None)
    core.fails["version"] = RuntimeError("no")
    if version is not None:
        [answer] = call(core, engine_core.PUBLISH, version, resumes)
        assert answer.failure_message is not None
        assert core.asked[len(asked) :] == [("version", "8")]
