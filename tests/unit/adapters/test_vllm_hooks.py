"""vLLM's hooks, as far as they need no vLLM."""

from __future__ import annotations

import argparse
import asyncio
import functools
import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from engine_ext import settings
from engine_ext.adapters.vllm import engine, hooks
from engine_ext.adapters.vllm.engine import VllmEngine
from engine_ext.errors import Conflict
from engine_ext.ranks import operations, replicas


@pytest.fixture(autouse=True)
def nobody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(settings.ENVIRONMENT, raising=False)


def worker(**fields: Any) -> SimpleNamespace:
    """A worker at the end of its constructor."""
    config = fields.pop("load_config", SimpleNamespace(load_format="auto"))
    resolved = SimpleNamespace(load_config=config)
    return SimpleNamespace(**{"load_config": config, "vllm_config": resolved, **fields})


def test_only_the_servers_parser_gets_the_flags() -> None:
    server, other = argparse.ArgumentParser(), argparse.ArgumentParser()
    server.add_argument("--uvicorn-log-level")
    for parser in (server, other):
        hooks.add_arguments(parser)
    assert "--enable-delta-updates" in server.format_help()
    assert "delta" not in other.format_help()


def test_nothing_happens_where_nobody_asks() -> None:
    assert hooks.read_arguments(argparse.Namespace(load_format="auto")) is False
    # A command without the flags: the load format alone exports nothing.
    assert hooks.read_arguments(argparse.Namespace(load_format="delta")) is False
    assert settings.from_environment() is None
    assert hooks.endpoint_plugins() == []
    bare = worker()
    before = dict(vars(bare))
    hooks.on_worker_created(bare)
    assert vars(bare) == before
    loaded = {*sys.modules}
    hooks.on_core_created()
    assert {*sys.modules} == loaded


@pytest.mark.parametrize(
    ("executor", "data_parallel", "group", "on_ray"),
    [
        ("ray", "mp", None, True),
        (None, "ray", None, True),
        (None, "mp", "a group", True),
        (None, "mp", None, False),
        ("mp", "ray", "a group", False),
    ],
)
def test_ray_is_seen_when_vllm_chooses_it(
    executor: str | None,
    data_parallel: str,
    group: str | None,
    on_ray: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With data parallelism by Ray, and in an actor that has a placement group."""
    util = SimpleNamespace(get_current_placement_group=lambda: group)
    ray = SimpleNamespace(is_initialized=lambda: True, util=util)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.util", util)
    args = argparse.Namespace(
        distributed_executor_backend=executor, data_parallel_backend=data_parallel
    )
    assert hooks._is_on_ray(args) is on_ray


def test_the_endpoints_are_there_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.ENVIRONMENT, "{}")
    handler = logging.NullHandler()
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [handler])
    for name in ("engine_ext", "delta_server"):
        for attribute in ("handlers", "propagate", "level"):
            now = getattr(logging.getLogger(name), attribute)
            monkeypatch.setattr(logging.getLogger(name), attribute, now)
    (plugin,) = hooks.endpoint_plugins()
    assert (plugin.name, plugin.required_tasks) == ("delta_updates", None)
    # Also in a process that has not read the arguments.
    parent = logging.getLogger("delta_server.reporting").parent
    assert parent is not None
    assert parent.handlers == [handler]


@pytest.mark.parametrize("asked", ["by the flag", "by the load format", "by nobody"])
def test_a_worker_gets_a_receiver_where_somebody_asks(
    monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    attached: list[Any] = []
    stand_in = SimpleNamespace(attach_receiver=lambda worker, chosen: attached.append(chosen))
    monkeypatch.setitem(sys.modules, "engine_ext.adapters.vllm.worker", stand_in)
    registered: list[str] = []
    loading = SimpleNamespace(register_load_format=registered.append)
    monkeypatch.setitem(sys.modules, "engine_ext.adapters.vllm.checkpoint", loading)
    monkeypatch.setattr(hooks, "_log_as_vllm", lambda: None)
    monkeypatch.setattr(hooks, "check_config", lambda config: None)
    if asked == "by the flag":
        monkeypatch.setenv(settings.ENVIRONMENT, "{}")
    config = SimpleNamespace(load_format="delta" if asked == "by the load format" else "auto")
    hooks.on_worker_created(worker(load_config=config))
    assert attached == ([] if asked == "by nobody" else [settings.Settings()])
    assert registered == (["delta"] if asked == "by the load format" else [])


def resolved(**fields: Any) -> SimpleNamespace:
    """A configuration as vLLM serves with it."""
    return SimpleNamespace(**{"load_config": SimpleNamespace(load_format="auto"), **fields})


def transfer(connector: str | None, role: str | None = "kv_both") -> SimpleNamespace:
    return SimpleNamespace(kv_connector=connector, kv_role=role)


PREFETCH = SimpleNamespace(offload_group_size=2)
REFUSED = {
    "connector": (
        {"kv_transfer_config": transfer("ExampleConnector")},
        r"\(ExampleConnector\) yet: it keeps KV of old weights",
    ),
    "role": (
        {"kv_transfer_config": transfer("NixlConnector", "kv_producer")},
        r"kv_consumer \(kv_producer\)",
    ),
    "daemon": ({"load_config": SimpleNamespace(load_format="IPC_CACHE")}, "a daemon"),
    "draft's daemon": (
        {
            "speculative_config": SimpleNamespace(
                draft_load_config=SimpleNamespace(load_format="ipc_cache")
            )
        },
        "a daemon",
    ),
    "late interaction": (
        {
            "model_config": SimpleNamespace(
                runner_type="pooling",
                pooler_config=SimpleNamespace(enable_flash_late_interaction=True),
                score_type="late-interaction",
            )
        },
        "--no-enable-flash-late-interaction",
    ),
    "prefixes without a server": (
        {"cache_config": SimpleNamespace(enable_prefix_caching=True)},
        "enable_prefix_caching=False",
    ),
    "prefetch": (
        {"offload_config": SimpleNamespace(offload_backend="auto", prefetch=PREFETCH)},
        "--offload-group-size",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_configuration_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded, also where vLLM has derived it from another option."""
    fields, message = REFUSED[name]
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(envs=SimpleNamespace()))
    with pytest.raises(ValueError, match=message):
        hooks.check_config(resolved(**fields))


def test_a_recorded_memory_plan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    envs = SimpleNamespace(VLLM_ENABLE_STARTUP_PLAN=True)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(envs=envs))
    with pytest.raises(ValueError, match="VLLM_ENABLE_STARTUP_PLAN"):
        hooks.check_config(resolved())


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"kv_transfer_config": None, "speculative_config": None},
        {"kv_transfer_config": transfer(None)},
        {"offload_config": SimpleNamespace(offload_backend="uva", prefetch=PREFETCH)},
    ],
)
def test_an_ordinary_configuration_is_taken(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(envs=SimpleNamespace()))
    hooks.check_config(resolved(**fields))


def test_worker_that_freezes_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """However it was configured: vLLM has other ways than its server's command line."""
    monkeypatch.setenv(settings.ENVIRONMENT, "{}")
    frozen = SimpleNamespace(inductor_compile_config={"freezing": True})
    with pytest.raises(ValueError, match="inductor's freezing"):
        hooks.on_worker_created(worker(vllm_config=resolved(compilation_config=frozen)))


def client_of(processes: int = 1, **members: Any) -> SimpleNamespace:
    """vLLM's client in one of some HTTP processes."""
    parallel = SimpleNamespace(_api_process_count=processes, nnodes=1, use_ray=False)
    config = SimpleNamespace(parallel_config=parallel)
    return SimpleNamespace(**members, vllm_config=config, errored=False)


def test_every_replica_is_asked_and_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own `collective_rpc` returns the first one's answers alone."""
    monkeypatch.setattr(replicas, "count", lambda: 2)
    asked: list[Any] = []

    async def call_utility_all_async(method: str, *arguments: Any) -> list[Any]:
        asked.append("begins")
        await asyncio.sleep(0)
        asked.append((method, arguments[0]))
        answers = [
            operations.encode_answer(functools.partial(state, version)) for version in (5, 6)
        ]
        return [[answers[0]], [answers[1]]]

    def state(version: int) -> operations.RankReport:
        facts: dict[str, Any] = {"engine_state": "certain", "resume_owed": False}
        return operations.RankReport(state=operations.RankState(version=version, **facts))

    cores = SimpleNamespace(call_utility_all_async=call_utility_all_async)
    client = client_of(pause_generation=None, engine_core=cores)

    async def twice() -> list[Any]:
        engine = VllmEngine(client)
        calls = [engine.call(operations.GetStatus(details=False)) for _ in range(2)]
        return list(await asyncio.gather(*calls))

    for replies in asyncio.run(twice()):
        assert [reply.state.version for reply in replies] == [5, 6]
    # One after the other: replicas that got them in another order would wait for one another.
    assert asked == ["begins", ("collective_rpc", "delta_updates")] * 2


@pytest.mark.parametrize("mode", ["wait", "abort"])
@pytest.mark.parametrize("processes", [1, 2])
def test_our_own_pauses_do_not_wait_for_our_commit(processes: int, mode: str) -> None:
    """The caller's calls on the client reach another method from then on."""
    asked: list[Any] = []

    async def pause(**options: Any) -> None:
        asked.append(options)

    async def serialize_with_commits() -> None:
        raise AssertionError("the caller's")

    client = client_of(processes, pause_generation=pause)
    engine = VllmEngine(client)
    client.pause_generation = serialize_with_commits
    asyncio.run(engine.end_requests(mode))
    assert asked == [{"mode": mode, "clear_cache": False}]
    assert engine.shared == (processes > 1)


def test_every_core_stops_writes_and_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one call to each; the refusal of one that has not stopped is that of all."""
    monkeypatch.setattr(replicas, "count", lambda: 2)
    asked: list[Any] = []
    held = Conflict("a request holds KV").to_wire()

    async def call_utility_all_async(method: str, *given: Any) -> list[Any]:
        asked.append((method, *given))
        stops = [{"stop_ms": 1.0, "caches_ms": 2.0}, {"stop_ms": 9.0, "caches_ms": 0.0}]
        stops[1]["refusal"] = held  # type: ignore[assignment]
        return [{"stop": stop, "answers": [{"error": held}]} for stop in stops]

    cores = SimpleNamespace(call_utility_all_async=call_utility_all_async)
    engine = VllmEngine(client_of(pause_generation=None, engine_core=cores))
    stopped = asyncio.run(engine.call_stopped(operations.RollBack(), "salt"))
    asyncio.run(engine.publish("8", resumes=True))
    assert asked == [
        ("delta_call_stopped", "salt", "rollback", {}),
        ("delta_publish", "8", True),
    ]
    assert (stopped.stop_ms, stopped.caches_ms) == (1.0, 2.0)
    errors = [stopped.refusal, *stopped.answers]
    assert [str(error) for error in errors] == ["a request holds KV"] * 3


@pytest.mark.parametrize(
    ("nodes", "ray", "address"), [(1, False, None), (2, False, "10.0.0.1"), (1, True, "10.0.0.1")]
)
def test_other_hosts_reach_this_one_if_there_may_be_some(
    nodes: int, ray: bool, address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray can place a worker on any host of its cluster."""
    monkeypatch.setattr(engine, "_own_address", lambda: "10.0.0.1")
    parallel = SimpleNamespace(_api_process_count=1, nnodes=nodes, use_ray=ray)
    client = SimpleNamespace(
        pause_generation=None, vllm_config=SimpleNamespace(parallel_config=parallel)
    )
    assert VllmEngine(client).address == address
