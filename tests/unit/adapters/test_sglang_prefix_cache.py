"""The salt in the key of SGLang's cached KV, without SGLang."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine_ext.adapters.sglang import prefix_cache, scheduler
from engine_ext.adapters.sglang.prefix_cache import SaltCache, Salts
from engine_ext.adapters.sglang.rpc import Call
from engine_ext.conformance.thread_group import Group, ThreadRanks
from engine_ext.errors import SaltUnavailable
from engine_ext.ranks.operations import Reply, encode_answer, encode_request


@pytest.fixture(autouse=True)
def serving(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    found = SimpleNamespace(enable_streaming_session=False)
    module = SimpleNamespace(get_serving=lambda: found)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", module)
    return found


def request_type() -> Any:
    class Request:
        def __init__(self, extra_key: str | None = None, *, holds_kv: bool = False) -> None:
            self.extra_key, self.kv = extra_key, SimpleNamespace(holds_kv=holds_kv)

    return Request


def scheduler_of(*waiting: Any, grammar: tuple[Any, ...] = ()) -> Any:
    manager = SimpleNamespace(grammar_queue=list(grammar))
    return SimpleNamespace(waiting_queue=list(waiting), grammar_manager=manager)


def test_only_requests_in_flight_keep_their_key() -> None:
    make, salts = request_type(), Salts()
    salts.follow(make)
    flying, waiting, parsed = make("mine", holds_kv=True), make("mine"), make()
    assert (flying.extra_key, parsed.extra_key) == ("mine", None)
    salts.change("s1", scheduler_of(waiting, flying, grammar=(parsed,)))
    assert flying.extra_key == "mine"
    assert waiting.extra_key == make("mine").extra_key == "s1:mine"
    assert parsed.extra_key == make().extra_key == "s1:"
    salts.change("s2", scheduler_of(waiting))
    assert waiting.extra_key == make("mine").extra_key == "s2:mine"


def test_requests_of_diffusion_models_wait_elsewhere() -> None:
    make, salts = request_type(), Salts()
    salts.follow(make)
    waiting, flying, scheduler = make("mine"), make("mine", holds_kv=True), scheduler_of()
    scheduler.dllm_manager = SimpleNamespace(waiting_queue=[waiting, flying])
    salts.change("s1", scheduler)
    assert (waiting.extra_key, flying.extra_key) == ("s1:mine", "mine")


def test_sessions_that_keep_kv_are_refused(serving: SimpleNamespace) -> None:
    make, salts = request_type(), Salts()
    salts.follow(make)
    serving.enable_streaming_session = True
    with pytest.raises(SaltUnavailable, match="--enable-streaming-session"):
        salts.change("s1", scheduler_of())
    with pytest.raises(SaltUnavailable, match="--enable-streaming-session"):
        salts.change(None, scheduler_of())
    assert make("mine").extra_key == "mine"


def test_checking_salts_nothing(serving: SimpleNamespace) -> None:
    make, salts = request_type(), Salts()
    salts.follow(make)
    waiting = make("mine")
    salts.change(None, scheduler_of(waiting))
    assert (waiting.extra_key, make("mine").extra_key) == ("mine", "mine")


def test_a_rank_salts_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    salts, make = Salts(), request_type()
    monkeypatch.setattr(prefix_cache, "SALTS", salts)
    monkeypatch.setattr(scheduler, "_ranks_of_replica", lambda: ThreadRanks(Group(1), 0))
    monkeypatch.setattr(scheduler, "_replica", lambda: 0)
    output = SimpleNamespace(UpdateWeightFromDiskReqOutput=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", output)
    salts.follow(make)
    name, arguments = encode_request(SaltCache(salt="s1"))
    call = Call(call="c", operation=name, arguments=arguments)
    request = SimpleNamespace(manifest=msgspec.to_builtins(call))
    answer = scheduler.answer(SimpleNamespace(scheduler=scheduler_of()), request)
    assert answer.success
    assert answer.message == call.reply([encode_answer(Reply)], 0)
    assert make().extra_key == "s1:"


@pytest.mark.parametrize("paused", [True, False])
def test_paused_cache_is_flushed_while_grammars_compile(paused: bool) -> None:
    class Scheduler:
        def __init__(self) -> None:
            self._engine_paused = paused
            self.grammar_manager = SimpleNamespace(grammar_queue=["compiles"])

        def flush_cache(self, empty_cache: bool = True) -> bool:
            return empty_cache and not self.grammar_manager.grammar_queue

    prefix_cache.flush_beside_grammars(Scheduler)
    scheduler = Scheduler()
    assert scheduler.flush_cache() is paused
    assert scheduler.grammar_manager.grammar_queue == ["compiles"]
