"""vLLM's weight-transfer API with the backend `delta_updates`, driven by vLLM's own client."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from vllm.distributed.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    ModuleSource,
    WeightTransferTrainerFactory,
)

from delta_sender.integrations.transfer_destination import Channel
from delta_sender.integrations.vllm_transfer import DeltaTrainerInitInfo
from delta_sender.models import empty_model
from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.live.conftest import fingerprint
from tests.support.plain_trainer import Trainer, container, split
from tests.support.shown_examples import examples
from tests.support.trainer_models import change, saved

BACKEND = ("--weight-transfer-config", json.dumps({"backend": "delta_updates"}))


class Scene:
    """One engine, and a trainer that changes a model in place and counts versions."""

    def __init__(
        self, start: Any, base: Path, root: Path, tp: int, replicas: Sequence[str]
    ) -> None:
        self.start, self.base, self.root, self.tp = start, base, root, tp
        self.replicas = replicas
        arguments = [*BACKEND, "--delta-root", str(root), *replicas]
        self.engine: EngineProcess = start("vllm", base, tp=tp, extra_args=arguments)
        self.client = HTTPVLLMWeightSyncClient(self.engine.url)
        self.trainer = Trainer(tiny_models.load_tensors(base))

    def parts(self, count: int = 2) -> list[bytes]:
        """Change the weights; return the parts of the sync."""
        changed, metadata = self.trainer.step(), self.trainer.metadata()
        return [
            container(
                self.trainer.tensors,
                piece,
                metadata={**metadata, "part": str(number), "num_parts": str(count)},
            )
            for number, piece in enumerate(split(changed, count))
        ]

    def send(self, body: bytes) -> None:
        self.client.update_weights({"part": base64.b64encode(body).decode()})

    def state(self) -> tuple[Any, ...]:
        """Return the state that a failed update must not change."""
        status = self.engine.delta_status()
        by = status.health.changed_externally
        return self.engine.checksums(), status.version, by, status.staged


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((1, ()), id="1"),
        pytest.param((2, ()), id="2", marks=pytest.mark.full),
        pytest.param((1, ("--data-parallel-size", "2")), id="replicas", marks=pytest.mark.full),
    ],
)
def scene(
    request: pytest.FixtureRequest,
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Scene]:
    made = Scene(start, checkpoint("qwen3"), tmp_path_factory.mktemp("root"), *request.param)
    yield made
    made.engine.stop()


def refusal(failed: pytest.ExceptionInfo[requests.HTTPError]) -> tuple[int, str, str]:
    response = failed.value.response
    assert response is not None
    error = response.json()["error"]
    return response.status_code, error["type"], error["engine_state"]


def test_what_the_api_is_sent_is_exact_or_refused(scene: Scene) -> None:
    """By vLLM's own client alone, as a trainer without our half would use it."""
    client, engine = scene.client, scene.engine
    client.init_weight_transfer_engine({})
    base = scene.state()
    client.start_weight_update()
    first, second = scene.parts()
    scene.send(first)
    with pytest.raises(requests.HTTPError) as failed:
        scene.send(second[:-1])
    assert refusal(failed) == (400, "MalformedPart", "unchanged")
    with pytest.raises(requests.HTTPError) as failed:
        client.finish_weight_update("1")
    assert refusal(failed) == (409, "Conflict", "unchanged")
    assert scene.state() == base
    client.start_weight_update()
    for body in (first, second):
        scene.send(body)
    with pytest.raises(requests.HTTPError) as failed:
        client.finish_weight_update("another")
    assert refusal(failed) == (409, "Conflict", "unchanged")
    assert scene.state() == base
    if scene.tp == 1:  # the workers' own methods would bypass the transaction
        closing = {"Connection": "close"}  # as vLLM does after any 500
        method = {"method": "start_weight_update"}
        answer = engine.post("/collective_rpc", json=method, headers=closing)
        assert answer.status_code == 500
        assert scene.state() == base
    client.start_weight_update()
    for body in (first, second):
        scene.send(body)
    client.finish_weight_update("1")
    status = engine.delta_status()
    assert (status.version.number, status.version.published) == (1, "1")
    assert status.health.changed_externally is None
    # A posted delta continues from this version.
    octets = {"Content-Type": "application/octet-stream"}
    [body] = scene.parts(1)
    answer = engine.post("/update_weights_delta", content=body, headers=octets).json()
    assert (answer["status"], answer["version"]) == ("committed", 2)


CHANNELS: list[dict[str, Any]] = [
    {"kind": "inline"},
    {"kind": "disk", "inline_bytes": 0},
    {"kind": "collective", "inline_bytes": 0},
]


@pytest.mark.full
def test_the_example_of_the_docs_runs(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint is what the engine holds by then."""
    example = examples("trainer-frameworks.md")["vllm"]
    monkeypatch.chdir(tmp_path)
    tiny_models.save_checkpoint(scene.base, tmp_path / "checkpoint", scene.trainer.tensors)
    given: dict[str, Any] = {"data": [1, 2], "train": lambda model, seed: change(model, seed, 0.01)}
    exec(example.replace("http://engine:8000", scene.engine.url), given)
    report = given["transfer"].report
    assert (report.status, report.full) == ("committed", False)
    scan = scene.engine.get("/delta_digest", params={"scan": "true"}).json()
    assert (scan["version"], scan["digest"]) == (report.version, report.digest)
    scene.trainer.tensors = saved(given["model"].to(torch.bfloat16))


@pytest.mark.full
def test_a_trainers_half_on_every_channel_equals_a_fresh_engine(
    scene: Scene, tmp_path: Path
) -> None:
    """The trainer's model is a torch module; only `WeightTransferTrainerFactory` is called."""
    version = scene.engine.delta_status().version.number
    held = tiny_models.save_checkpoint(scene.base, tmp_path / "held", scene.trainer.tensors)
    model = empty_model(held).to_empty(device="cpu")
    model.load_state_dict(scene.trainer.tensors, assign=True)
    generator, report = torch.Generator().manual_seed(3), None
    for channel in CHANNELS:
        sender = WeightTransferTrainerFactory.trainer_init(
            DeltaTrainerInitInfo(
                base=tiny_models.save_checkpoint(
                    scene.base, tmp_path / channel["kind"], model.state_dict()
                ),
                channel=Channel(folder=scene.root, **channel),
                options={"base_version": version, "bucket_bytes": 1 << 14},
                rank=0,
            ),
            client=scene.client,
            source=ModuleSource(model),
        )
        for _ in range(2):
            with torch.no_grad():
                for parameter in model.parameters():
                    chosen = torch.rand(parameter.shape, generator=generator) < 0.02
                    parameter.add_(chosen.to(parameter.dtype) * 0.01)
            sender.send_weights()
            report = sender.report
            version += 1
            assert (report.version, report.status, report.full) == (version, "committed", False)
            assert report.parts > 1
            assert report.digest == report.engine["digest"]
            assert scene.engine.weight_version() == str(version)
        sender.shutdown()
    assert list(scene.root.iterdir()) == []
    trained = tiny_models.save_checkpoint(scene.base, tmp_path / "trained", model.state_dict())
    found = fingerprint(scene.engine)
    scan = scene.engine.get("/delta_digest", params={"scan": "true"}).json()
    assert scan["corrupted"] == []
    assert report is not None
    assert scan["digest"] == report.digest
    scene.engine.stop()
    fresh = scene.start("vllm", trained, tp=scene.tp, extra_args=[*scene.replicas])
    assert fingerprint(fresh) == found
    fresh_scan = fresh.get("/delta_digest", params={"scan": "true"}).json()
    assert fresh_scan["digest"] == scan["digest"]
    fresh.stop()
