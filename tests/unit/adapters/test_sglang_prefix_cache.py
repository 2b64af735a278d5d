"""The salt in the key of SGLang's cached KV, without SGLang."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from engine_ext.adapters.sglang import prefix_cache
from engine_ext.adapters.sglang.prefix_cache import Salts
from engine_ext.errors import SaltUnavailable


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


def test_sessions_that_keep_kv_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(enable_streaming_session=False)
    module = SimpleNamespace(get_serving=lambda: found)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", module)
    prefix_cache.check_salt()
    found.enable_streaming_session = True
    with pytest.raises(SaltUnavailable, match="--enable-streaming-session"):
        prefix_cache.check_salt()


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
