"""The engines' own routes that change the weights or release their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.support.plain_trainer import Trainer, container

OCTETS = {"Content-Type": "application/octet-stream"}


class Server:
    def __init__(self, engine: EngineProcess, base: Path) -> None:
        self.engine = engine
        self.base = base
        self.trainer = Trainer(tiny_models.load_tensors(base))

    def post(self, body: bytes) -> httpx.Response:
        return self.engine.post("/update_weights_delta", content=body, headers=OCTETS)

    def next(self) -> bytes:
        changed = self.trainer.step()
        return container(self.trainer.tensors, changed, metadata=self.trainer.metadata())

    def sync(self) -> None:
        answer = self.post(self.next())
        assert answer.json().get("status") == "committed", answer.text

    def refuses_all_but_a_full_sync(self) -> None:
        """A delta builds on the weights of a version, and those are gone; the engine generates."""
        answer = self.post(self.next())
        assert (answer.status_code, answer.json()["error"]["type"]) == (409, "BaseMismatch")
        back = self.engine.post("/delta_rollback")
        assert (back.status_code, back.json()["error"]["type"]) == (409, "BaseMismatch")
        assert self.engine.complete("a", max_tokens=2)["choices"]
        metadata = {"current_version": str(self.trainer.version), "full": "true"}
        dense = dict.fromkeys(self.trainer.tensors)
        healed = self.post(container(self.trainer.tensors, dense, metadata=metadata)).json()
        assert healed.get("status") == "committed", healed
        self.sync()


@pytest.fixture(scope="module")
def vllm(
    checkpoint: Callable[[str], Path], start: Callable[..., EngineProcess]
) -> Iterator[Server]:
    base = checkpoint("qwen3")
    yield Server(engine := start("vllm", base), base)
    engine.stop()


@pytest.fixture(scope="module")
def sglang(
    checkpoint: Callable[[str], Path], start: Callable[..., EngineProcess]
) -> Iterator[Server]:
    base = checkpoint("qwen3")
    yield Server(engine := start("sglang", base), base)
    engine.stop()


def test_vllm_asleep(vllm: Server) -> None:
    vllm.sync()
    vllm.engine.post("/sleep", params={"level": "1"})
    version = vllm.engine.delta_status().version.number
    body = vllm.next()
    answer = vllm.post(body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (409, "WeightsAsleep")
    assert vllm.engine.delta_status().version.number == version
    vllm.engine.post("/wake_up", params={"tags": "kv_cache"})
    assert vllm.post(body).json()["error"]["type"] == "WeightsAsleep"
    vllm.engine.post("/wake_up", params={"tags": "weights"})
    assert vllm.post(body).json()["status"] == "committed"
    assert vllm.engine.complete("a", max_tokens=2)["choices"]


def test_vllm_knows_no_other_format_of_a_disk_update(vllm: Server) -> None:
    body = {"model_path": str(vllm.base), "load_format": "sharded_state"}
    answer = vllm.engine.post("/update_weights_from_disk", json=body)
    assert (answer.status_code, answer.json()["success"]) == (400, False)
    assert answer.json()["error"]["type"] == "MalformedPart"
    vllm.sync()


def test_vllm_loads_weights_itself(vllm: Server) -> None:
    vllm.sync()
    vllm.engine.post("/collective_rpc", json={"method": "reload_weights"}).raise_for_status()
    vllm.refuses_all_but_a_full_sync()


@pytest.mark.full
def test_vllm_sets_its_weights_to_zero(vllm: Server) -> None:
    vllm.sync()
    vllm.engine.post("/weight_checker", json={"action": "reset"}).raise_for_status()
    vllm.refuses_all_but_a_full_sync()


@pytest.mark.full
def test_vllm_throws_its_weights_away(vllm: Server) -> None:
    """As far as can be known: on a CPU they are there again when it wakes up."""
    vllm.sync()
    vllm.engine.post("/sleep", params={"level": "2"}).raise_for_status()
    vllm.engine.post("/wake_up").raise_for_status()
    assert vllm.engine.delta_status().health.state == "certain"
    vllm.refuses_all_but_a_full_sync()


def test_sglang_asleep(sglang: Server) -> None:
    sglang.sync()
    sglang.engine.post("/release_memory_occupation", json={"tags": ["weights"]})
    body = sglang.next()
    answer = sglang.post(body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (409, "WeightsAsleep")
    sglang.engine.post("/resume_memory_occupation", json={"tags": ["weights"]})
    assert sglang.post(body).json()["status"] == "committed"
    assert sglang.engine.complete("a", max_tokens=2)["choices"]


def test_sglang_keeps_its_model_path(sglang: Server, tmp_path: Path) -> None:
    """A delta's folder does not become the model's path, nor its format the default one."""
    before = sglang.engine.get("/model_info").json()
    sglang.sync()
    after = sglang.engine.get("/model_info").json()
    assert after == {**before, "weight_version": str(sglang.trainer.version)}
    assert after["model_path"] == str(sglang.base)


def test_sglang_loads_weights_itself(sglang: Server) -> None:
    """Its own route of that path keeps its meaning, whatever the format; here the default one."""
    sglang.sync()
    own = sglang.engine.post("/update_weights_from_disk", json={"model_path": str(sglang.base)})
    assert (own.status_code, own.json()["success"]) == (200, True), own.text
    sglang.refuses_all_but_a_full_sync()


def test_sglang_fails_to_load_weights(sglang: Server) -> None:
    """Its own answer, for a folder without a model and for a body that is none.

    Nobody knows what a failed update has written.
    """
    missing = {"model_path": str(sglang.base / "nothing"), "load_format": "auto"}
    answer = sglang.engine.post("/update_weights_from_disk", json=missing)
    assert answer.status_code == 400
    assert "num_paused_requests" in answer.json()
    answer = sglang.engine.post("/update_weights_from_disk", content=b"{")
    assert answer.status_code in (400, 422)
    sglang.refuses_all_but_a_full_sync()
