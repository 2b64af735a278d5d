"""The examples of the trainers' page run, and that of an adapter; TRL's trainers have stand-ins."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import httpx
import peft
import pytest
import torch
import torch.distributed as dist
import transformers
import trl
import trl.experimental.async_grpo as async_grpo
from safetensors.torch import load_file
from trl.generation import vllm_generation

from delta_sender import DeltaSender
from tests.support.fake_engine import AdapterEngine, Engine
from tests.support.shown_examples import examples
from tests.support.trainer_models import change, make_model, save, saved

EXAMPLES = examples("trainers.md")


def reach(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine answer at every URL."""
    transport = httpx.MockTransport(engine.answer)
    monkeypatch.setattr(httpx, "Client", functools.partial(httpx.Client, transport=transport))


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Return the engine at http://engine:8000; the current folder has its checkpoint."""
    model = make_model("qwen3_moe")
    save(model, tmp_path / "checkpoint")
    monkeypatch.chdir(tmp_path)
    engine = Engine.of(saved(model))
    reach(engine, monkeypatch)
    return engine


def names(folder: Path) -> dict[str, Any]:
    """Return the names that the examples take as given."""
    model = make_model("qwen3_moe")
    tokens = torch.randint(3, 60, (8, 8), generator=torch.Generator().manual_seed(0))
    return {
        "model": model,
        "data": [1, 2],
        "train": lambda model, seed: change(model, seed, 0.01),
        "gathered_parameters": model.named_parameters,
        "dataset": [{"input_ids": row, "labels": row} for row in tokens],
        "reward": None,
        "args": transformers.TrainingArguments(
            output_dir=str(folder / "out"),
            max_steps=3,
            per_device_train_batch_size=2,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
        ),
    }


def holds(engine: Engine, model: Any) -> bool:
    return engine.holds(saved(model.to(torch.bfloat16)))


@pytest.mark.parametrize("example", ["loop", "stream", "transformers"])
def test_the_examples_run(example: str, engine: Engine, tmp_path: Path) -> None:
    given = names(tmp_path)
    exec(EXAMPLES[example], given)
    assert engine.version == {"loop": 2, "stream": 1, "transformers": 3}[example]
    assert holds(engine, given["model"])


def test_the_example_of_several_processes_runs(engine: Engine, tmp_path: Path) -> None:
    given = names(tmp_path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        exec(EXAMPLES["fsdp"], given)
    finally:
        dist.destroy_process_group()
    model = make_model("qwen3_moe")
    for seed in given["data"]:
        change(model, seed, 0.01)
    assert engine.version == 2
    assert holds(engine, model)


class Trainer:
    """Stands in for TRL's trainers."""

    def __init__(self, model: str, **options: Any) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.options = options

    def train(self) -> None:
        change(self.model, scale=0.01)
        parameters = self.model.named_parameters()
        if (transfer := self.options.get("weight_transfer")) is not None:
            transfer.init_weight_transfer()
            transfer.pause()
            transfer.send_weights(parameters)
            transfer.resume()
            return transfer.destroy()
        client = vllm_generation.VLLMClient(self.options["args"].vllm_server_base_url)
        client.init_communicator(torch.device("cpu"))
        client.update_named_params([], parameters)
        return client.close_communicator()


@pytest.mark.usefixtures("trl_client")
@pytest.mark.parametrize("example", ["grpo", "async_grpo"])
def test_the_examples_of_trl_run(
    example: str, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trl, "GRPOTrainer", Trainer)
    config = functools.partial(trl.GRPOConfig, output_dir=str(tmp_path), use_cpu=True, bf16=False)
    monkeypatch.setattr(trl, "GRPOConfig", config)
    monkeypatch.setattr(async_grpo, "AsyncGRPOTrainer", Trainer, raising=False)
    given = names(tmp_path)
    exec(EXAMPLES[example], given)
    assert engine.version == 1
    assert holds(engine, given["trainer"].model)


def test_the_example_of_an_adapter_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj"])
    model = peft.get_peft_model(make_model("dense", torch.bfloat16), config)
    model.save_pretrained(tmp_path / "adapter")
    engine = AdapterEngine.of(load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    reach(engine, monkeypatch)
    monkeypatch.chdir(tmp_path)
    given = {"DeltaSender": DeltaSender, "peft_model": model, "data": [1, 2]}
    given["train"] = lambda seed: change(model, seed, 0.01)
    exec(examples("sender.md")["adapter"], given)
    assert engine.version == 2
    assert engine.holds(peft.get_peft_model_state_dict(model))
    assert {engine.named(request) for request in engine.requests} == {"tiny"}


def test_every_example_is_run() -> None:
    here = {"loop", "stream", "fsdp", "transformers", "grpo", "async_grpo"}
    assert EXAMPLES.keys() == here | {"sharded", "megatron"}  # by tests/unit/sender/sharded
