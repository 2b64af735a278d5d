"""Operations of SGLang's pipeline stages, in a loop that waits for what SGLang's own waits for."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Queue
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from engine_ext.adapters.sglang.pipeline import hold_operations

GIVE_UP_S = 30


@dataclass
class UpdateWeightFromDiskReqInput:
    load_format: str
    name: str = ""


@dataclass
class PauseGenerationReqInput:
    mode: str


@dataclass(frozen=True)
class Continue:
    pass


@dataclass
class NextBatchPlan:
    batch_to_run: Any
    running_batch: Any


@dataclass(eq=False)
class Generation:
    name: str
    done: bool = False

    def finished(self) -> bool:
        return self.done


@dataclass(eq=False)
class Batch:
    reqs: list[Generation] = field(default_factory=list)
    extend: bool = False
    batch_is_full: bool = True

    @property
    def forward_mode(self) -> Any:
        return SimpleNamespace(is_extend=lambda: self.extend)

    def is_empty(self) -> bool:
        return not self.reqs


class Scheduler:
    """One stage. Every message between stages is one that SGLang's loop sends or waits for."""

    def __init__(self, rank: int, between: Between) -> None:
        self.rank, self.between = rank, between
        self.size = between.stages
        self.mbs: list[Any] = [None] * self.size
        self.last_mbs: list[Any] = [None] * self.size
        self.running_mbs = [Batch() for _ in range(self.size)]
        self.running_batch, self.last_batch = self.running_mbs[0], None
        self.handled: list[Any] = []
        self.launched: list[int] = []
        self.retracted: list[Generation] = []
        self.iteration = 0
        self._engine_paused = False

    def process_input_requests(self, requests: list[Any]) -> None:
        for request in requests:
            self.handled.append(request)
            if isinstance(request, PauseGenerationReqInput):
                self.pause_generation(request)
            elif isinstance(request, Continue):
                self._engine_paused = False
            elif isinstance(request, UpdateWeightFromDiskReqInput):
                self.between.operate(self)

    def pause_generation(self, request: PauseGenerationReqInput) -> None:
        self._engine_paused = True
        if request.mode == "retract":
            self.retracted += self.running_batch.reqs
            assert self.last_batch is None
            self.running_batch.reqs = []

    def get_next_batch_to_run(self, running_batch: Batch, last_batch: Batch | None) -> Any:
        assert not self._engine_paused
        self.launched.append(self.iteration)
        return NextBatchPlan(Batch([Generation("x")], extend=True), running_batch)

    def _pp_microbatches_drained(self) -> bool:
        return all(batch.is_empty() for batch in self.running_mbs)

    def run(self, script: list[list[Any]]) -> None:
        passing = None
        last = self.rank == self.size - 1
        lists, proxies, outputs = (links[self.rank] for links in self.between.links)
        for self.iteration, scripted in enumerate(script):
            now, then = self.iteration % self.size, (self.iteration + 1) % self.size
            self.running_batch, self.last_batch = self.running_mbs[now], self.last_mbs[now]
            requests = scripted if self.rank == 0 else lists.get(timeout=GIVE_UP_S)
            self.process_input_requests(requests)
            if not last:
                self.between.links[0][self.rank + 1].put(requests)
            plan = self.get_next_batch_to_run(
                running_batch=self.running_batch, last_batch=self.last_batch
            )
            self.running_mbs[now], self.mbs[now] = plan.running_batch, plan.batch_to_run
            if self.mbs[now] and self.rank:
                proxies.get(timeout=GIVE_UP_S)
            if last and self.mbs[now]:
                self.between.links[2][0].put("output")
            if passing and not last:
                self.between.links[2][self.rank + 1].put(passing)
            passing = None
            if self.mbs[then]:
                passing = outputs.get(timeout=GIVE_UP_S)
                self.last_mbs[then] = self.mbs[then]
                self.last_mbs[then].reqs[0].done = True
            if self.mbs[now] and not last:
                self.between.links[1][self.rank + 1].put("proxy")


class Between:
    """The queues between some stages: lists of requests, activations, outputs; and operations."""

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self.links = [[Queue[Any]() for _ in range(stages)] for _ in range(3)]
        self.met: list[list[int]] = []
        self._barrier = threading.Barrier(stages)
        self._iterations = [0] * stages

    def operate(self, scheduler: Scheduler) -> None:
        """Wait for all stages, which must have come as far, with nothing under way."""
        assert scheduler.mbs == [None] * self.stages
        self._iterations[scheduler.rank] = scheduler.iteration
        if self._barrier.wait(GIVE_UP_S) == 0:
            assert [link.qsize() for links in self.links for link in links] == [0] * 3 * self.stages
            self.met.append([*self._iterations])
        self._barrier.wait(GIVE_UP_S)


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Callable[[], type[Scheduler]]:
    """Return a function that returns a class of schedulers which hold operations."""
    modules = {
        "io_struct": (UpdateWeightFromDiskReqInput, PauseGenerationReqInput),
        "schedule_batch": (NextBatchPlan,),
        "scheduler": (Scheduler,),
    }
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, members in modules.items():
        module = ModuleType(f"sglang.srt.managers.{name}")
        vars(module).update({member.__name__: member for member in members})
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def make() -> type[Scheduler]:
        made = type("Scheduler", (Scheduler,), {})  # one process has one
        vars(sys.modules["sglang.srt.managers.scheduler"])["Scheduler"] = made
        hold_operations()
        return made

    return make


def delta(name: str = "") -> UpdateWeightFromDiskReqInput:
    return UpdateWeightFromDiskReqInput("delta", name)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_busy_stages_meet(stages: int, hold: Callable[[], type[Scheduler]]) -> None:
    """They do at every operation, in the same iteration, whatever comes with it."""
    rng = random.Random(stages)
    script: list[list[Any]] = [[] for _ in range(300)]
    for number in range(40):
        kinds = [delta(), PauseGenerationReqInput("in_place"), Continue(), Generation("a")]
        script[rng.randrange(250)] += rng.choices(kinds, k=number % 5)
    script[250] = [PauseGenerationReqInput("in_place")]  # the last micro-batches have time to end
    between = Between(stages)
    schedulers = [hold()(rank, between) for rank in range(stages)]
    with ThreadPoolExecutor(stages) as pool:
        list(pool.map(lambda scheduler: scheduler.run(script), schedulers))
    sent = [request for requests in script for request in requests]
    for scheduler in schedulers:
        assert scheduler.handled == sent  # in order, once
        assert scheduler.launched == schedulers[0].launched
    assert len(between.met) == sent.count(delta())
    assert all(len({*iterations}) == 1 for iterations in between.met)


def test_nothing_waits_but_operations(hold: Callable[[], type[Scheduler]]) -> None:
    scheduler = hold()(0, Between(1))
    scheduler.mbs = [Batch()]
    other = UpdateWeightFromDiskReqInput("auto")
    scheduler.process_input_requests([other_request := Generation("a")])
    assert scheduler.handled == [other_request]
    monitor = Between(1)
    monitor.operate = lambda scheduler: None  # type: ignore[method-assign]
    scheduler.between = monitor
    scheduler.process_input_requests([other, delta("1"), other, delta("2")])
    scheduler.process_input_requests([other_request])
    assert scheduler.handled == [other_request, other]
    plan = scheduler.get_next_batch_to_run(scheduler.running_batch, None)
    assert plan == NextBatchPlan(None, scheduler.running_batch)
    assert scheduler.launched == []
    scheduler.mbs = [None]
    assert scheduler.get_next_batch_to_run(scheduler.running_batch, None).batch_to_run
    assert scheduler.handled[2:] == [delta("1"), other, delta("2"), other_request]


def test_a_pause_takes_the_requests_of_all_microbatches(
    hold: Callable[[], type[Scheduler]],
) -> None:
    scheduler = hold()(0, Between(3))
    decoded, prefilled, chunked, both = map(Generation, "abcd")
    scheduler.running_mbs = [Batch([decoded]), Batch(), Batch([both])]
    scheduler.last_mbs = [
        scheduler.running_mbs[0],
        Batch([prefilled, chunked], extend=True),
        Batch([chunked, both], extend=True),
    ]
    scheduler.running_batch = running = scheduler.running_mbs[1]
    scheduler.last_batch = scheduler.last_mbs[1]
    assert not scheduler._pp_microbatches_drained()
    scheduler.process_input_requests([PauseGenerationReqInput("retract")])
    assert scheduler.retracted == []
    plan = scheduler.get_next_batch_to_run(running, scheduler.last_batch)
    assert plan == NextBatchPlan(None, running)
    assert sorted(request.name for request in scheduler.retracted) == ["a", "b", "c", "d"]
    assert scheduler.last_mbs == [None] * 3
    assert [batch.reqs for batch in scheduler.running_mbs] == [[], [], []]
    assert scheduler._pp_microbatches_drained()


def test_a_prefilled_request_is_not_done(hold: Callable[[], type[Scheduler]]) -> None:
    """It is in no running batch yet, and its KV must not be flushed."""
    scheduler = hold()(0, Between(2))
    prefilled = Generation("a")
    scheduler.last_mbs = [None, Batch([prefilled], extend=True)]
    assert not scheduler._pp_microbatches_drained()
    prefilled.done = True
    assert scheduler._pp_microbatches_drained()
