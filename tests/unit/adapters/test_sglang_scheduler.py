"""Agreement of SGLang's ranks before an operation, with ranks in threads and without SGLang."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from engine_ext.adapters.sglang import prefix_cache, scheduler
from engine_ext.adapters.sglang.rpc import Call, CallReply, HowToStop, Publish
from engine_ext.conformance.thread_group import Group, ThreadRanks
from engine_ext.errors import from_wire
from engine_ext.ranks import operations

VERSION: dict[str, Any] = {"version": 1, "sync_id": None}


class Tower(nn.Module):
    """A vision tower that keeps what it has interpolated."""

    def __init__(self) -> None:
        super().__init__()
        self._interpolated_pos_emb_cache = {(2, 2): torch.ones(4)}


class EmbeddingCache:
    """SGLang's cache of embeddings, here of two ranks in one process."""

    def __init__(self) -> None:
        self.cleared = 0

    def clear(self) -> None:
        self.cleared += 1


@pytest.fixture(autouse=True)
def mm_schedule(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """SGLang's module that holds the cache."""
    module = SimpleNamespace(embedding_cache=EmbeddingCache())
    structs = SimpleNamespace(
        PauseGenerationReqInput=SimpleNamespace,
        ContinueGenerationReqInput=SimpleNamespace,
        UpdateWeightFromDiskReqOutput=SimpleNamespace,
    )
    managers = SimpleNamespace(mm_schedule=module, io_struct=structs)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers", managers)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", structs)
    return module


class Scheduler(SimpleNamespace):
    """SGLang's scheduler on one rank, and what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.fails: dict[str, Exception] = {}
        super().__init__(
            waiting_queue=[],
            grammar_manager=SimpleNamespace(grammar_queue=[]),
            record_weight_version_change=lambda version: self._do("version", version),
        )

    def _do(self, *asked: Any) -> None:
        self.asked.append(asked)
        if asked[0] in self.fails:
            raise self.fails[asked[0]]

    def pause_generation(self, request: Any) -> None:
        self._do("pause", request.mode)

    def flush_cache(self) -> bool:
        self._do("flush")
        return "refuses" not in self.fails

    def continue_generation(self, request: Any) -> None:
        self._do("continue", request.torch_empty_cache)


class Updater(SimpleNamespace):
    """SGLang's weight updater on one rank; its receiver votes before it writes."""

    def __init__(self, ranks: ThreadRanks) -> None:
        self.written: list[Any] = []
        self.ranks = ranks

        def execute(request: Any) -> operations.Reply:
            errors = [error for error in ranks.all_gather(request.refusal) if error is not None]
            if errors:
                raise from_wire(errors[0])
            self.written.append(request)
            return operations.Reply()

        def set_asleep(asleep: bool, *, other: bool) -> None:
            self.released = (asleep, other)

        receiver = SimpleNamespace(execute=execute, set_asleep=set_asleep)
        runner = SimpleNamespace(delta_receiver=receiver, model=Tower())
        runner.delta_runners = [runner]
        super().__init__(
            tp_worker=SimpleNamespace(model_runner=runner),
            scheduler=Scheduler(),
            offload_tags=(),
            _session=None,
        )


class Replica:
    """Ranks in threads, which get the same requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
        group = Group(ranks)
        self.updaters = [Updater(ThreadRanks(group, rank)) for rank in range(ranks)]
        self.refusals: dict[int, str] = {}  # SGLang's own, by rank
        self.device_errors: dict[int, Exception] = {}  # of a forward pass that still runs
        this = threading.local()
        self._this = this
        monkeypatch.setattr(scheduler, "_ranks_of_replica", lambda: this.ranks)
        monkeypatch.setattr(scheduler, "_replica", lambda: 0)
        monkeypatch.setattr(
            scheduler, "in_place_refusal", lambda runner: self.refusals.get(this.ranks.rank)
        )
        device = SimpleNamespace(synchronize=self._synchronize)
        monkeypatch.setattr(torch, "get_device_module", lambda: device)

    def _synchronize(self) -> None:
        error = self.device_errors.get(self._this.ranks.rank)
        if error is not None:
            raise error

    def call(self, operation: str, stop: HowToStop | None = None, **arguments: Any) -> CallReply:
        """Return the reply to a call, of all ranks."""
        call = Call(call="c", operation=operation, arguments=arguments, stop=stop)
        request = SimpleNamespace(manifest=msgspec.to_builtins(call))

        def answer(updater: Updater) -> Any:
            self._this.ranks = updater.ranks
            return scheduler.answer(updater, request)

        with ThreadPoolExecutor(len(self.updaters)) as pool:
            first, *others = pool.map(answer, self.updaters)
        assert first.success
        assert len({answer.message for answer in others}) <= 1
        return msgspec.json.decode(first.message.removeprefix("delta-updates:"), type=CallReply)

    def commit(self, *, flushes: bool = False, salt: str | None = None) -> CallReply:
        return self.call("commit", HowToStop(flushes=flushes, salt=salt), **VERSION)

    @property
    def written(self) -> list[int]:
        """How often each rank has written."""
        return [len(updater.written) for updater in self.updaters]


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Replica:
    return Replica(monkeypatch, 2)


def errors_of(reply: CallReply) -> set[str]:
    """The messages of all ranks, which have all refused."""
    assert all("error" in answer for answer in reply.answers)
    return {answer["error"]["message"] for answer in reply.answers}


def test_part_is_refused_by_its_replica_alone(replica: Replica) -> None:
    """Another one might hang, and must not keep this one from generating."""
    replica.updaters[1]._session = "its own update"
    part = {"version": 1, "base_version": 0, "identity": "i"}
    reply = replica.call("begin", part=part, path="p", now=0.0)
    assert errors_of(reply) == {"SGLang's own weight update has begun and not ended"}
    assert replica.written == [0, 0]


@pytest.mark.parametrize(
    ("tags", "released"),
    [((), (False, False)), (("kv_cache",), (False, True)), (("weights",), (True, True))],
)
def test_the_receiver_knows_what_memory_is_released(
    replica: Replica, tags: tuple[str, ...], released: tuple[bool, bool]
) -> None:
    for updater in replica.updaters:
        updater.offload_tags = tags
    replica.call("abort")
    assert [updater.released for updater in replica.updaters] == [released] * 2


@pytest.mark.parametrize(
    ("caches", "asked"),
    [
        ({}, [("pause", "in_place")]),
        ({"flushes": True}, [("pause", "retract"), ("flush",)]),
        ({"salt": "s1"}, [("pause", "in_place")]),
    ],
)
def test_one_request_stops_and_commits(
    replica: Replica,
    caches: dict[str, Any],
    asked: list[Any],
    mm_schedule: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    salted: list[Any] = []
    salts = SimpleNamespace(change=lambda salt, scheduler: salted.append(salt))
    monkeypatch.setattr(prefix_cache, "SALTS", salts)
    reply = replica.commit(**caches)
    assert reply.answers == [{"ok": {}}] * 2
    assert reply.stop is not None
    assert reply.stop.refusal is None
    assert [updater.scheduler.asked for updater in replica.updaters] == [asked] * 2
    assert salted == [caches["salt"]] * 2 if "salt" in caches else not salted
    assert replica.written == [1, 1]
    # No embedding is of older weights.
    assert mm_schedule.embedding_cache.cleared == 2
    for updater in replica.updaters:
        assert not updater.tp_worker.model_runner.model._interpolated_pos_emb_cache


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("step", ["device", "refuses"])
def test_ranks_refuse_what_one_did_not_stop_for(replica: Replica, failing: int, step: str) -> None:
    """All of them have flushed; the others would wait for the vote."""
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    if step == "device":
        replica.device_errors[failing] = error
    else:
        replica.updaters[failing].scheduler.fails[step] = error
    reply = replica.commit(flushes=True)
    assert [("flush",) in updater.scheduler.asked for updater in replica.updaters] == [True] * 2
    assert reply.stop is not None
    assert reply.stop.refusal is not None
    [message] = errors_of(reply)
    assert message == reply.stop.refusal["message"]
    expected = "SGLang did not flush its cache" if step == "refuses" else "illegal memory access"
    assert expected in message
    assert replica.written == [0, 0]


@pytest.mark.parametrize("step", ["pause", "flush"])
def test_half_a_pause_ends_the_engine(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """It might have taken requests away, on this rank alone."""
    replica = Replica(monkeypatch, 1)
    replica.updaters[0].scheduler.fails[step] = RuntimeError("half of them are retracted")
    with pytest.raises(RuntimeError, match="retracted"):
        replica.commit(flushes=True)
    assert replica.written == [0]


@pytest.mark.parametrize("operation", ["commit", "rollback"])
@pytest.mark.parametrize("reason", ["embeddings", "session", "derived"])
def test_ranks_refuse_what_one_would_not_serve(
    replica: Replica, operation: str, reason: str, mm_schedule: SimpleNamespace
) -> None:
    """Before the write: weights would be new and embeddings old. The ranks refuse, not the stop."""

    def clear() -> None:
        raise RuntimeError("no such cache")

    if reason == "embeddings":
        mm_schedule.embedding_cache.clear = clear
    elif reason == "session":
        replica.updaters[1]._session = "its own update"
    else:
        replica.refusals[1] = "it has derived weights"
    arguments = VERSION if operation == "commit" else {}
    reply = replica.call(operation, HowToStop(), **arguments)
    assert len(errors_of(reply)) == 1
    assert reply.stop is not None
    assert reply.stop.refusal is None
    assert replica.written == [0, 0]
    mm_schedule.embedding_cache = None  # a text model's
    replica.updaters[1]._session = None
    replica.refusals.clear()
    replica.call(operation, HowToStop(), **arguments)
    assert replica.written == [1, 1]


@pytest.mark.parametrize(
    ("version", "resumes", "asked"),
    [
        ("8", True, [("version", "8"), ("continue", False)]),
        ("8", False, [("version", "8")]),
    ],
)
def test_version_is_set_before_generation_resumes(
    replica: Replica, version: str, resumes: bool, asked: list[Any]
) -> None:
    operation, arguments = operations.encode_request(Publish(version=version, resumes=resumes))
    reply = replica.call(operation, **arguments)
    assert (reply.answers, reply.stop) == ([{"ok": {}}] * 2, None)
    assert [updater.scheduler.asked for updater in replica.updaters] == [asked] * 2
    replica.updaters[0].scheduler.fails["version"] = RuntimeError("no")
    reply = replica.call(operation, **arguments)
    assert ["error" in answer for answer in reply.answers] == [True, False]
    assert replica.updaters[0].scheduler.asked[len(asked) :] == [("version", "8")]


@pytest.mark.parametrize("name", ["_k3_fused_decode_args", "_attn_res_cw_cache", "buffer", "none"])
def test_copies_of_another_modules_weights_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = SimpleNamespace(_unsupported_derived_weight_cache_error=lambda model: None)
    package = "sglang.srt.model_executor.model_runner_components"
    monkeypatch.setitem(sys.modules, package, SimpleNamespace(weight_updater=own))
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    model[0].register_buffer("_post_expert_norm_weight", None)
    assert scheduler.in_place_refusal(SimpleNamespace(model=model)) is None
    if name == "buffer":
        name = "_post_expert_norm_weight"
        model[0].register_buffer(name, torch.ones(1))
    else:
        setattr(model[0], name, (torch.ones(1),))
    found = scheduler.in_place_refusal(SimpleNamespace(model=model))
    expected = f"SGLang keeps 0.{name}, a copy of another module's weights"
    assert found == (None if name == "none" else expected)
