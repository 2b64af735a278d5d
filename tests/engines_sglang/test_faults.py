"""What goes wrong inside one of two ranks: taken back on both, or nothing is served."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import tiny_models
from sglang_process import SglangProcess
from tests.engines.trainer import Trainer, container, model_digest

OCTETS = {"Content-Type": "application/octet-stream"}
TOKEN = "a-secret-token"
PLUGIN = Path(__file__).parents[1] / "shims" / "sglang_faults"
SHIMS = Path(__file__).parents[1] / "shims" / "sglang_cpu"


class Server:
    def __init__(self, engine: SglangProcess, trainer: Trainer, faults: Path) -> None:
        self.engine = engine
        self.trainer = trainer
        self._faults = faults

    def arm(self, fault: str, rank: int) -> None:
        (self._faults / f"{fault}-{rank}").touch()

    def post(self, body: bytes) -> httpx.Response:
        headers = {**OCTETS, "Authorization": f"Bearer {TOKEN}"}
        return self.engine.post("/update_weights_delta", content=body, headers=headers)

    def get(self, path: str, **params: str) -> Any:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        return self.engine.get(path, params=params, headers=headers).json()

    def next(self) -> bytes:
        changed = self.trainer.step()
        return container(self.trainer.tensors, changed, metadata=self.trainer.metadata())

    def state(self) -> Any:
        return self.engine.checksums(), self.get("/delta_digest", scan="true")


@pytest.fixture(scope="module")
def server(
    checkpoint: Callable[[str], Path],
    start: Callable[..., SglangProcess],
    tmp_path_factory: pytest.TempPathFactory,
) -> Server:
    base = checkpoint("qwen3")
    faults = tmp_path_factory.mktemp("faults")
    engine = start(
        base,
        tp=2,
        extra_args=["--delta-api-key", TOKEN, "--delta-base-version", "5"],
        extra_env={"PYTHONPATH": f"{SHIMS}:{PLUGIN}", "DELTA_FAULTS": str(faults)},
    )
    return Server(engine, Trainer(tiny_models.load_tensors(base), version=5), faults)


def test_a_token_is_asked_for_and_not_logged(server: Server) -> None:
    for method, path in [
        ("POST", "/update_weights_delta"),
        ("POST", "/delta_rollback"),
        ("GET", "/delta_status"),
        ("GET", "/delta_digest"),
    ]:
        answer = (server.engine.get if method == "GET" else server.engine.post)(path)
        assert (answer.status_code, answer.json()["error"]["type"]) == (401, "Unauthorized")
    disk = {"model_path": "/", "load_format": "delta"}
    answer = server.engine.post("/update_weights_from_disk", json=disk)
    assert (answer.status_code, answer.json()["success"]) == (401, False)
    assert TOKEN not in server.engine.log_path.read_text()


def test_the_base_version_is_published(server: Server) -> None:
    assert server.get("/delta_status")["version"] == 5
    assert server.get("/model_info")["weight_version"] == "5"


def test_a_write_that_fails_on_one_rank_is_taken_back_on_both(server: Server) -> None:
    server.arm("fail_write", 1)
    before = server.state()
    body = server.next()
    answer = server.post(body)
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert (error["type"], error["engine_state"]) == ("WriteUndone", "unchanged")
    assert server.state() == before
    assert server.engine.complete("a", max_tokens=2)["choices"]
    assert server.post(body).json()["status"] == "committed"


def test_an_escaping_exception_does_not_kill_the_server(server: Server) -> None:
    """Both ranks raise where nothing should: an answer, no change, and the next sync is taken."""
    server.arm("raise_handler", 0)
    server.arm("raise_handler", 1)
    before = server.state()
    body = server.next()
    answer = server.post(body)
    assert answer.status_code == 500
    assert "the handler went away" in answer.json()["error"]["message"]
    assert server.state() == before
    assert server.engine.complete("a", max_tokens=2)["choices"]
    assert server.post(body).json()["status"] == "committed"


def test_a_write_that_cannot_be_taken_back(server: Server) -> None:
    server.arm("fail_write", 0)
    server.arm("fail_undo", 0)
    error = server.post(server.next()).json()["error"]
    assert (error["type"], error["engine_state"]) == ("CommitFailed", "uncertain")
    for path, body in [
        ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
        ("/generate", {"text": "a"}),
    ]:
        assert server.engine.post(path, json=body).status_code == 503
    server.trainer.version += 1
    metadata = {"current_version": str(server.trainer.version), "full": "true"}
    dense = dict.fromkeys(server.trainer.tensors)
    healed = server.post(container(server.trainer.tensors, dense, metadata=metadata))
    assert healed.json()["status"] == "committed", healed.text
    digest = server.get("/delta_digest", scan="true")
    assert digest["digest"] == model_digest(server.trainer.tensors).hex()
    assert server.engine.complete("a", max_tokens=2)["choices"]


def test_a_rank_that_dies_in_the_middle_of_a_commit(server: Server) -> None:
    """Last: the sender is answered, or cut off; mixed weights are never served."""
    server.arm("die", 1)
    with contextlib.suppress(httpx.TransportError):
        assert server.post(server.next()).status_code != 200
    assert server.engine.wait(60), "the server of a dead rank is still there"
