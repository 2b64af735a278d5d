"""TRL's own trainers against a live vLLM, in an environment of their packages.

The task: tokens are rewarded whose row of the head begins with a positive weight. A random model
has half the reward; what raises it is one direction of the last hidden state.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import torch
import transformers
import trl
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    packing,
)
from trl.generation import vllm_client

from delta_sender.integrations.trl_trainers import DeltaWeightTransfer, use_deltas
from scripts.live_engine import tiny_models
from scripts.live_engine.process import EngineProcess
from tests.live.conftest import fingerprint

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(600)]

Start = Callable[..., EngineProcess]
Checkpoint = Callable[[str], Path]
STEPS = 8
HEAD = "lm_head.weight"
COMMON: dict[str, Any] = {
    "max_steps": STEPS,
    "num_generations": 16,
    "max_completion_length": 12,
    "learning_rate": 5e-3,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": [],
    "disable_tqdm": True,
}


@pytest.fixture
def base(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """Return a checkpoint whose head is not near zero, as a random model's is."""
    plain = checkpoint("qwen3")
    tensors = tiny_models.load_tensors(plain)
    tensors[HEAD] = tensors[HEAD] * 30
    return tiny_models.save_checkpoint(plain, tmp_path / "base", tensors)


class Reward:
    """A class, as AsyncGRPO pickles it; both trainers ask for a name."""

    def __init__(self, base: Path) -> None:
        self.__name__ = "reward"
        self._good = tiny_models.load_tensors(base)[HEAD][:, 0] > 0

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(self._good[ids].float().mean()) if ids else 0.0 for ids in completion_ids]


def prompts(as_chat: bool = False) -> datasets.Dataset:
    texts = ["the quick brown fox", "a reward is", "def add(a, b):", "In 2024"] * 16
    chats = [[{"role": "user", "content": text}] for text in texts]
    return datasets.Dataset.from_dict({"prompt": chats if as_chat else texts})


@pytest.fixture(autouse=True)
def stock_client() -> Iterator[None]:
    """Put TRL's own client back."""
    yield
    stock = getattr(vllm_client.VLLMClient, "stock_client", vllm_client.VLLMClient)
    use_deltas("unused")
    for module in (vllm_client, trl.generation.vllm_generation):
        module.VLLMClient = stock


def rewards(trainer: Any) -> list[float]:
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


def check(engine: EngineProcess, trainer: Any, syncs: int, start: Start, folder: Path) -> None:
    """Fail unless every sync was committed and the engine is a fresh one on what is saved."""
    seen = rewards(trainer)
    assert sum(seen[-3:]) / 3 > sum(seen[:3]) / 3 + 0.1, seen
    status = engine.get("/delta_status").json()
    assert (status["health"]["state"], status["version"]["number"]) == ("certain", syncs)
    assert engine.get("/delta_digest", params={"scan": "true"}).json()["corrupted"] == []
    found = fingerprint(engine)
    engine.stop()
    model = trainer.accelerator.unwrap_model(trainer.model)
    if isinstance(model, peft.PeftModel):
        model = model.merge_and_unload()
    model.save_pretrained(folder)
    trainer.processing_class.save_pretrained(folder)
    assert fingerprint(start("vllm", folder)) == found


@pytest.mark.parametrize("adapter", [False, True])
def test_grpo_in_server_mode(adapter: bool, base: Path, start: Start, tmp_path: Path) -> None:
    engine = start("vllm", base)
    use_deltas(base, encoding="auto")
    trainer = trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        processing_class=transformers.AutoTokenizer.from_pretrained(base),
        args=trl.GRPOConfig(
            output_dir=str(tmp_path / "out"),
            per_device_train_batch_size=32,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=engine.url,
            **{**COMMON, **({"learning_rate": 2e-2} if adapter else {})},
        ),
        reward_funcs=Reward(base),
        train_dataset=prompts(),
        peft_config=peft.LoraConfig(r=8, lora_alpha=32, target_modules="all-linear")
        if adapter
        else None,
    )
    trainer.train()
    trainer.vllm_generation.sync_weights()  # of the last step, after which nothing is generated
    check(engine, trainer, STEPS + 1, start, tmp_path / "saved")


def varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    *_: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """Do what the flash attention kernel does that `packing` loads, which needs a GPU."""
    assert causal
    assert window_size == (-1, -1)
    outs = []
    bounds = zip(query_starts.tolist(), key_starts.tolist(), strict=True)
    for (q0, k0), (q1, k1) in itertools.pairwise(bounds):
        queries, keys = q1 - q0, k1 - k0
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        q, k, v = (t.transpose(0, 1) for t in (query[q0:q1], key[k0:k1], value[k0:k1]))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=softmax_scale, enable_gqa=True
        )
        outs.append(out.transpose(0, 1))
    return torch.cat(outs)


def test_async_grpo(
    base: Path, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = types.SimpleNamespace(flash_attn_varlen_func=varlen)
    monkeypatch.setattr(packing, "_flash_attn", lambda: kernels)
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
    # Stock vLLM on CPU dies of a request with a seed whose prompt it takes in two chunks.
    engine = start("vllm", base, extra_args=["--no-enable-chunked-prefill"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    templates = Path(trl.__file__).parent / "chat_templates"
    tokenizer.chat_template = (templates / "qwen3.jinja").read_text()  # one that TRL knows
    transfer = DeltaWeightTransfer(engine.url, base)
    trainer = AsyncGRPOTrainer(
        model=str(base),
        processing_class=tokenizer,
        args=AsyncGRPOConfig(
            output_dir=str(tmp_path / "out"),
            per_device_train_batch_size=32,
            token_budget=0,
            vllm_server_base_url=engine.url,
            model_init_kwargs={"dtype": torch.float32},
            **COMMON,
        ),
        reward_funcs=Reward(base),
        train_dataset=prompts(as_chat=True),
        weight_transfer=transfer,
    )
    trainer.train()
    assert transfer.report is not None
    check(engine, trainer, transfer.report.version, start, tmp_path / "saved")
