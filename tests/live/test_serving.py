"""Tokens and pauses on a live engine with two ranks."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from delta_sender import DeltaSender, SyncError
from delta_server.generation_guard import GENERATION
from engine_ext.ranks.status import EngineStatus
from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.live.conftest import delta_routes
from tests.support.plain_trainer import Trainer, container, model_digest
from tests.support.present import present

MAX_PAUSE_S = 8
TOKEN = "a-secret-token"
GENERATES_NOTHING = {
    "vLLM": {
        "/abort_requests", "/collective_rpc", "/detokenize", "/finish_weight_update",
        "/init_weight_transfer_engine", "/is_scaling_elastic_ep", "/pause", "/ping",
        "/release_kv_cache_memory", "/reset_encoder_cache", "/reset_mm_cache",
        "/reset_prefix_cache", "/resume", "/scale_elastic_ep", "/shutdown_weight_transfer_engine",
        "/sleep", "/start_draft_weight_update", "/start_weight_update", "/tokenize",
        "/update_weight_version", "/update_weights", "/wake_up", "/weight_checker",
    },
    "SGLang": {
        "/abort_request", "/add_external_corpus", "/begin_weight_update", "/close_session",
        "/configure_logging", "/continue_generation", "/destroy_weights_update_group",
        "/detokenize", "/dump_expert_distribution_record", "/end_weight_update", "/flush_cache",
        "/freeze_gc", "/get_weights_by_name", "/hicache/storage-backend",
        "/hicache/storage-backend/clear", "/init_weights_send_group_for_remote_instance",
        "/init_weights_update_group", "/load_lora_adapter", "/load_lora_adapter_from_tensors",
        "/open_session", "/parse_function_call", "/pause_generation", "/pd_role_switch",
        "/release_memory_occupation", "/remove_external_corpus", "/resume_memory_occupation",
        "/scale_elastic_ep", "/send_weights_to_remote_instance", "/separate_reasoning",
        "/set_internal_state",
        "/set_trace_level", "/slow_down", "/start_expert_distribution_record", "/start_profile",
        "/stop_expert_distribution_record", "/stop_profile", "/tokenize", "/unload_lora_adapter",
        "/update_weight_version", "/update_weights_from_distributed", "/update_weights_from_ipc",
        "/update_weights_from_tensor", "/weights_checker",
    },
}  # fmt: skip
TRUSTED = {"Authorization": f"Bearer {TOKEN}"}


class Server:
    def __init__(self, engine: EngineProcess, trainer: Trainer) -> None:
        self.engine = engine
        self.trainer = trainer

    def status(self) -> EngineStatus:
        answer = self.engine.get("/delta_status", headers=TRUSTED)
        return msgspec.json.decode(answer.content, type=EngineStatus)

    def post(self, body: bytes, **params: str) -> httpx.Response:
        headers = {"Content-Type": "application/octet-stream", **TRUSTED}
        return self.engine.post(
            "/update_weights_delta", content=body, headers=headers, params=params
        )

    def next(self) -> bytes:
        changed = self.trainer.step()
        return container(self.trainer.tensors, changed, metadata=self.trainer.metadata())

    def sync(self, **params: str) -> dict[str, Any]:
        answer: dict[str, Any] = self.post(self.next(), **params).json()
        assert answer.get("status") == "committed", answer
        return answer

    def complete(self) -> httpx.Response:
        return self.engine.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def server(
    request: pytest.FixtureRequest,
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
) -> Iterator[Server]:
    base = checkpoint("qwen3")
    arguments = ["--delta-api-key", TOKEN, "--delta-base-version", "5"]
    arguments += ["--delta-max-pause", str(MAX_PAUSE_S)]
    engine = start(request.param, base, tp=2, extra_args=arguments)
    yield Server(engine, Trainer(tiny_models.load_tensors(base), version=5))
    engine.stop()


def test_every_route_that_generates_is_guarded(server: Server) -> None:
    """Every path that changes anything is guarded or known here."""
    paths = server.engine.get("/openapi.json").json()["paths"]
    writes = {path for path, methods in paths.items() if methods.keys() & {"post", "put"}}
    assert {"/v1/completions", "/update_weights_delta"} <= writes
    unguarded = {path for path in writes if not path.startswith(GENERATION)}
    ours = {path for _, path in delta_routes()}
    assert unguarded - ours <= GENERATES_NOTHING[server.engine.name]


def test_token_is_not_logged(server: Server) -> None:
    assert TOKEN not in server.engine.log_path.read_text()


@pytest.mark.parametrize("authorization", [None, "Bearer wrong", "Bearer", f"Basic {TOKEN}"])
@pytest.mark.parametrize(("method", "path"), delta_routes())
def test_401(server: Server, method: str, path: str, authorization: str | None) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    if method == "GET":
        answer = server.engine.get(path, headers=headers)
    else:
        disk = {"model_path": "/", "load_format": "delta", "method": "apply_delta_from_disk"}
        answer = server.engine.post(path, headers=headers, json=disk)
    assert answer.status_code == 401
    assert answer.json()["error"]["type"] == "Unauthorized"


def test_status_page(server: Server) -> None:
    """A browser gets the page without the token, so that it can ask for it; nobody else does."""
    browser = {"Accept": "text/html"}
    asking = server.engine.get("/delta_dashboard", headers=browser)
    opened = server.engine.get("/delta_dashboard", headers={**browser, **TRUSTED})
    assert (asking.status_code, opened.status_code) == (401, 200)
    assert asking.text == opened.text
    assert "<!doctype html>" in opened.text
    assert "default-src 'none'" in opened.headers["content-security-policy"]
    status = server.engine.get("/delta_status?history=true", headers=TRUSTED).json()
    assert isinstance(status["history"], list)
    assert status["server"]["host"] == socket.gethostname()
    assert Path(status["server"]["model"], "config.json").exists()
    assert status["server"]["seconds"] > 0


def test_base_version(server: Server) -> None:
    assert server.status().version.number == 5
    assert server.engine.weight_version() == "5"
    server.sync()
    assert server.engine.weight_version() == "6"


@pytest.mark.parametrize("flush_cache", ["true", "false"])
@pytest.mark.parametrize("pause_mode", ["keep", "wait", "abort"])
def test_requests_in_flight(server: Server, pause_mode: str, flush_cache: str) -> None:
    """Requests in flight end as the pause mode says, and the next ones are served."""
    answers = []

    def generate() -> None:
        options = {"prompt": "count", "max_tokens": 150, "ignore_eos": True, "temperature": 0}
        answers.append(server.engine.post("/v1/completions", json=options).json())

    thread = threading.Thread(target=generate)
    thread.start()
    server.sync(pause_mode=pause_mode, flush_cache=flush_cache)
    thread.join()
    [choice] = answers[0]["choices"]
    assert choice["finish_reason"] in (("abort", "length") if pause_mode == "abort" else "length")
    assert server.complete().status_code == 200


def test_probes_need_no_token(server: Server) -> None:
    version = server.trainer.version
    assert server.engine.get("/delta_ready").json() == {"ready": True}
    later = server.engine.get("/delta_ready", params={"min_version": version + 1})
    assert (later.status_code, later.json()) == (503, {"ready": False})
    known = server.engine.get("/delta_ready", headers=TRUSTED).json()
    assert (known["version"], known["state"]) == (version, "certain")


LONG: dict[str, Any] = {"prompt": "count", "max_tokens": 200, "ignore_eos": True, "temperature": 0}


def test_a_version_that_is_not_served_is_409(server: Server) -> None:
    version = server.trainer.version
    later = f">={version + 1}"
    for wanted, expected in {str(version): 200, later: 409, "0-1": 409, "x": 400}.items():
        body, headers = {"prompt": "a", "max_tokens": 2}, {"X-Weight-Version": wanted}
        answer = server.engine.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == expected, answer.text
        assert answer.headers.get("X-Weight-Version") == (str(version) if expected == 200 else None)
        assert ("Retry-After" in answer.headers) is (expected == 409)


@pytest.mark.parametrize("pause_mode", ["keep", "wait"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_request_is_answered_by_its_version(
    server: Server, pause_mode: str, stream: bool
) -> None:
    """Whole, if the commit waits for it; else up to the commit, and then the error."""

    def ask_and_sync() -> tuple[int, httpx.Response]:
        version = server.trainer.version
        body, headers = {**LONG, "stream": stream}, {"X-Weight-Version": str(version)}
        with ThreadPoolExecutor(1) as threads:
            asking = threads.submit(
                lambda: server.engine.post("/v1/completions", json=body, headers=headers)
            )
            time.sleep(0.1 if pause_mode == "keep" else 0.3)
            server.sync(pause_mode=pause_mode)
            return version, asking.result()

    version, answer = ask_and_sync()
    while pause_mode == "keep" and "VersionNotServed" not in answer.text:
        version, answer = ask_and_sync()  # the request was faster than the sync
    events = [json.loads(e) for e in re.findall(r"^data: (\{.*)$", answer.text, re.M)]
    found = events if stream else [answer.json()]
    choices = [one["choices"][0] for one in found if one.get("choices")]
    if pause_mode == "wait":
        assert (answer.status_code, choices[-1]["finish_reason"]) == (200, "length")
        assert answer.headers["X-Weight-Version"] == str(version)
        return
    error = found[-1]["error"]
    assert (error["type"], error["version"]) == ("VersionNotServed", version + 1)
    assert error["wanted"] == str(version)
    assert not any(choice["finish_reason"] for choice in choices)
    assert answer.status_code == (200 if choices else 409)
    assert server.complete().status_code == 200


@pytest.mark.parametrize("flush_cache", ["true", "false"])
def test_an_engine_that_the_caller_paused_stays_paused(server: Server, flush_cache: str) -> None:
    assert server.status().health.paused is None
    server.engine.pause()
    server.sync(flush_cache=flush_cache)
    assert present(server.status().health.paused).by == "127.0.0.1"
    with pytest.raises(httpx.ReadTimeout):
        server.engine.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=2)
    server.engine.resume()
    assert server.status().health.paused is None
    assert server.complete().status_code == 200


def test_a_pause_that_nobody_ends_is_ended(server: Server) -> None:
    server.engine.pause()
    since = present(present(server.status().health.paused).since)
    assert abs(time.time() - since) < MAX_PAUSE_S
    answer = server.engine.post(
        "/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=5 * MAX_PAUSE_S
    )
    assert answer.status_code == 200
    assert time.time() - since >= MAX_PAUSE_S
    assert server.status().health.paused is None
    log = server.engine.log_path.read_text()
    assert "generation is resumed: 127.0.0.1 had paused it" in log


def test_a_sender_without_the_token(server: Server) -> None:
    with DeltaSender(server.engine.url, server.trainer.tensors.items()) as sender:
        with pytest.raises(SyncError) as failed:
            sender.sync(server.trainer.tensors.items())
    assert failed.value.status == 401


def test_ends_on_the_trainers_bytes(server: Server) -> None:
    """Last: after all that, live memory holds the trainer's weights."""
    found = server.engine.get("/delta_digest", params={"scan": "true"}, headers=TRUSTED).json()
    assert found["corrupted"] == []
    assert found["digest"] == model_digest(server.trainer.tensors).hex()
