"""Whose an engine is, through the plug-ins of transformers, TRL and vLLM's weight-transfer API."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import msgspec
import pytest
import torch
import transformers
import trl
from trl.generation import vllm_client, vllm_generation
from vllm.distributed.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    ModuleSource,
    WeightTransferTrainerFactory,
)

from delta_sender import SyncReport
from delta_sender.integrations.transformers_callback import DeltaSyncCallback
from delta_sender.integrations.trl_trainers import DeltaWeightTransfer, use_deltas
from delta_sender.integrations.vllm_transfer import DeltaTrainerInitInfo
from engine_ext.ranks.status import EngineStatus
from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.support.fake_engine import Engine
from tests.support.plugin_runs import (
    SCENARIOS,
    Plugin,
    Scenario,
    Scene,
    Step,
    live_scene,
    takeover_fences_for_good,
)
from tests.support.sharded_trainers import served

COMMON: dict[str, Any] = {
    "learning_rate": 0.0,  # the steps of a scenario change the weights
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "disable_tqdm": True,
}


class Steps(transformers.TrainerCallback):  # type: ignore[misc]
    """Runs a scenario's steps before a trainer's, and notes the reports of the syncs."""

    def __init__(self, steps: Sequence[Step], report: Callable[[], SyncReport | None]) -> None:
        self._steps, self._report = iter(steps), report
        self.reports: list[SyncReport] = []

    def on_train_begin(self, *_: Any, **others: Any) -> None:
        self._note()

    def on_step_begin(self, *_: Any, **others: Any) -> None:
        for step in self._steps:
            step()
            return

    def on_step_end(self, *_: Any, **others: Any) -> None:
        self._note()

    def _note(self) -> None:
        if (report := self._report()) is not None:
            self.reports.append(report)


def by_callback(
    url: str, base: Path, model: Any, steps: Sequence[Step], **options: Any
) -> list[SyncReport]:
    """The first sync is at the beginning of the training."""
    first, *others = steps
    callback = DeltaSyncCallback(url, base, **options)
    following = Steps(others, lambda: callback.reports.get(url))
    tokens = torch.randint(3, 60, (16, 8), generator=torch.Generator().manual_seed(0))
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(base / "out"),
            max_steps=max(1, len(others)),
            per_device_train_batch_size=2,
            **COMMON,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[callback, following],
    )
    first()
    trainer.train()
    return following.reports


def by_grpo(
    url: str, base: Path, model: Any, steps: Sequence[Step], **options: Any
) -> list[SyncReport]:
    """TRL's own trainer generates with the engine before each step."""
    use_deltas(base, **options)
    trainer = trl.GRPOTrainer(
        model=model,
        processing_class=transformers.AutoTokenizer.from_pretrained(base),
        args=trl.GRPOConfig(
            output_dir=str(base / "out"),
            max_steps=len(steps),
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=4,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=url,
            gradient_checkpointing=False,
            **COMMON,
        ),
        reward_funcs=lambda completions, **_: [float(i) for i in range(len(completions))],
        train_dataset=datasets.Dataset.from_dict({"prompt": ["the quick", "a reward"]}),
    )
    client = trainer.vllm_generation.vllm_client
    following = Steps(steps, lambda: client.weight_transfer.report)
    trainer.add_callback(following)
    try:
        trainer.train()
    finally:
        client.close_communicator()
    return following.reports


def by_weight_transfer(
    url: str, base: Path, model: Any, steps: Sequence[Step], **options: Any
) -> list[SyncReport]:
    """The calls are those of TRL's AsyncGRPOTrainer, in its order."""
    transfer, reports = DeltaWeightTransfer(url, base, model=model, **options), []
    try:
        transfer.init_weight_transfer()
        for step in steps:
            step()
            transfer.pause()
            transfer.send_weights((n, p.detach()) for n, p in model.named_parameters())
            transfer.resume()
            assert transfer.report is not None
            reports.append(transfer.report)
    finally:
        transfer.destroy()
    return reports


def by_vllm_transfer(
    url: str, base: Path, model: Any, steps: Sequence[Step], **options: Any
) -> list[SyncReport]:
    transfer = WeightTransferTrainerFactory.trainer_init(
        DeltaTrainerInitInfo(base=base, model=model, rank=0, options=options),
        client=HTTPVLLMWeightSyncClient(url),
        source=ModuleSource(model),
    )
    reports = []
    try:
        for step in steps:
            step()
            transfer.send_weights()
            reports.append(transfer.report)
    finally:
        transfer.shutdown()
    return reports


@pytest.fixture(autouse=True)
def stock_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `use_deltas` be undone."""
    for module in (vllm_client, vllm_generation):
        monkeypatch.setattr(module, "VLLMClient", module.VLLMClient)
    generation = vllm_generation.VLLMGeneration
    monkeypatch.setattr(generation, "sync_weights", generation.sync_weights)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("qwen3", tmp_path_factory.mktemp("base"))


LIGHT = [(by_weight_transfer, scenario) for scenario in SCENARIOS]
LIGHT.append((by_callback, takeover_fences_for_good))


@pytest.mark.parametrize(("train", "scenario"), LIGHT, ids=lambda given: given.__name__)
def test_plugin_keeps_runs_apart(
    train: Plugin, scenario: Scenario, base: Path, tmp_path: Path
) -> None:
    """With an engine in this process."""
    engine = Engine.of(tiny_models.load_tensors(base))
    with served(engine) as url:

        def status() -> EngineStatus:
            return msgspec.json.decode(engine.status().content, type=EngineStatus)

        scenario(Scene(url, base, tmp_path, status, lambda: engine.digest().hex()), train)


Serve = Callable[[str], EngineProcess]


@pytest.fixture(scope="module")
def serve(base: Path, start: Callable[..., EngineProcess]) -> Serve:
    """Return a function that returns the running engine of a name; one runs at a time."""
    running: dict[str, EngineProcess] = {}

    def get(name: str) -> EngineProcess:
        if name not in running:
            for other in running.values():
                other.stop()
            running.clear()
            backend = json.dumps({"backend": "delta_updates"})
            more = ["--weight-transfer-config", backend] if name == "vllm" else []
            running[name] = start(name, base, extra_args=more)
        return running[name]

    return get


# Those that generate with vLLM, or send by its routes, do not work with SGLang.
PLUGINS = [
    ("vllm", by_callback),
    ("vllm", by_weight_transfer),
    ("vllm", by_grpo),
    ("vllm", by_vllm_transfer),
    ("sglang", by_callback),
    ("sglang", by_weight_transfer),
]


@pytest.mark.engine
@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize(("engine", "train"), PLUGINS)
def test_plugin_keeps_runs_apart_live(
    engine: str, train: Plugin, scenario: Scenario, serve: Serve, base: Path, tmp_path: Path
) -> None:
    scenario(live_scene(serve(engine), base, tmp_path), train)
