"""The names of TRL that `integrations.trl_trainers` relies on, and what they are used for.

If one of these tests fails with a new TRL, its names have moved. Look for the client in
``trl/generation`` and for who calls it (``VLLMGeneration.sync_weights``), and change
`use_deltas` and this file together. `DeltaWeightTransfer` needs only the protocol. Until then
`DeltaSyncCallback` works with every trainer that takes callbacks.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import trl
from trl.generation import vllm_client, vllm_generation

from delta_sender import SyncError
from delta_sender.integrations.trl_trainers import DeltaWeightTransfer, use_deltas
from delta_sender.models import empty_model
from scripts.live_engine import tiny_models
from tests.support.fake_engine import Engine, error, sends
from tests.support.trainer_models import change, make_model, save, saved

SEND = ["init_communicator", "update_named_params", "reset_prefix_cache", "close_communicator"]
GROUPED = ["update_named_param", "weight_update"]


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def source_of(module: str) -> str:
    return (Path(trl.__file__).parent / module).read_text()


def test_the_client_has_the_methods_that_are_replaced() -> None:
    client = vllm_client.VLLMClient
    assert [name for name in SEND + GROUPED if not hasattr(client, name)] == []
    assert parameters(client.init_communicator) == ["self", "device"]
    assert parameters(client.update_named_params) == ["self", "metadata", "named_params"]
    assert "self.update_named_params(" in inspect.getsource(client.update_named_param)


def test_generation_sends_weights_through_the_client_alone() -> None:
    assert vllm_generation.VLLMClient is vllm_client.VLLMClient
    assert parameters(vllm_generation.VLLMGeneration.sync_weights) == ["self"]
    tree = ast.parse(inspect.getsource(vllm_generation))
    called = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "vllm_client"
    }
    assert called == {
        "init_communicator",
        "update_named_params",
        "reset_prefix_cache",
        "image_features",
        "generate",
    }


def test_async_grpo_takes_what_has_the_protocol_s_methods() -> None:
    tree = ast.parse(source_of("experimental/async_grpo/async_grpo_trainer.py"))
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    protocol = {
        node.name: [argument.arg for argument in node.args.args]
        for node in classes["WeightTransferProtocol"].body
        if isinstance(node, ast.FunctionDef)
    }
    assert protocol == {name: parameters(getattr(DeltaWeightTransfer, name)) for name in protocol}
    assert protocol.keys() == {"init_weight_transfer", "pause", "send_weights", "resume", "destroy"}
    (init,) = [
        node
        for node in classes["AsyncGRPOTrainer"].body
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    ]
    assert "weight_transfer" in [argument.arg for argument in init.args.args]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, trl_client: None) -> Engine:
    """Return an engine that TRL's client finds, in place of a server; `use_deltas` is undone."""
    generation = vllm_generation.VLLMGeneration
    monkeypatch.setattr(generation, "sync_weights", generation.sync_weights)
    monkeypatch.setattr(generation, "generate", generation.generate)
    monkeypatch.setattr(trl.GRPOTrainer, "_generate", vars(trl.GRPOTrainer)["_generate"])
    return Engine.of(saved(make_model("qwen3_moe")))


def test_trl_s_client_sends_deltas(engine: Engine, tmp_path: Path) -> None:
    model = make_model("qwen3_moe", torch.float32)
    base = save(make_model("qwen3_moe"), tmp_path)
    stock = vllm_client.VLLMClient
    use_deltas(base)
    use_deltas(base, client=engine.client())
    client = vllm_generation.VLLMClient(base_url="http://engine")
    assert type(client).__mro__[1] is stock
    assert vllm_client.VLLMClient is type(client)
    client.init_communicator(device=torch.device("cpu"))

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name, parameter.detach()) for name, parameter in model.named_parameters())

    change(model, scale=0.01)
    client.update_named_params([], stream())
    client.reset_prefix_cache()
    assert engine.version == 1
    with client.weight_update():
        for name, tensor in stream():
            client.update_named_param(name, tensor)
    assert engine.version == 2
    assert engine.holds(saved(model.to(torch.bfloat16)))
    client.close_communicator()


def test_failed_weight_update_sends_nothing(engine: Engine, tmp_path: Path) -> None:
    """As when gathering a tensor fails; the base would fill what is missing."""
    model = make_model("qwen3_moe", torch.float32)
    use_deltas(save(make_model("qwen3_moe"), tmp_path), frozen=True, client=engine.client())
    client = vllm_generation.VLLMClient(base_url="http://engine")
    client.init_communicator(device=torch.device("cpu"))
    change(model, scale=0.01)
    given = [(name, parameter.detach()) for name, parameter in model.named_parameters()]

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        yield given[0]
        raise ZeroDivisionError

    def update(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        with client.weight_update():
            for name, tensor in tensors:
                client.update_named_param(name, tensor)

    with pytest.raises(ZeroDivisionError):
        update(gathered())
    assert engine.version == 0
    assert engine.holds(saved(make_model("qwen3_moe")))
    update(given)
    assert engine.version == 1
    assert engine.holds(saved(model.to(torch.bfloat16)))
    client.close_communicator()


def test_a_weight_transfer_sends_deltas(tmp_path: Path) -> None:
    model = make_model("qwen3_moe", torch.float32)
    base = save(make_model("qwen3_moe"), tmp_path)
    engine = Engine.of(saved(make_model("qwen3_moe")))
    transfer = DeltaWeightTransfer("http://engine", base, client=engine.client())
    with pytest.raises(RuntimeError, match="init_weight_transfer"):
        transfer.send_weights(iter([]))
    transfer.init_weight_transfer()
    change(model, scale=0.01)
    read: list[str] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in model.named_parameters():
            read.append(name)
            yield name, parameter.detach()

    engine.faults[0] = sends(error(507, "SpoolFull"))
    for _ in range(2):
        transfer.pause()
        if not engine.requests:
            with pytest.raises(SyncError):
                transfer.send_weights(stream())
        else:
            transfer.send_weights(stream())
        transfer.resume()
        assert len(read) == len(list(model.named_parameters()))
        read.clear()
    assert engine.holds(saved(model.to(torch.bfloat16)))
    assert transfer.report is not None
    assert not transfer.report.full
    transfer.destroy()
    transfer.destroy()


@pytest.mark.parametrize("has_file", [False, True])
def test_next_training_of_a_transfer_opens_its_run(has_file: bool, tmp_path: Path) -> None:
    """Its base is the checkpoint still, and the engine holds what the first training has sent."""
    model = make_model("dense")
    base = save(model, tmp_path / "base")
    engine = Engine.of(saved(model))
    state = tmp_path / "state.json" if has_file else None
    transfer = DeltaWeightTransfer("http://engine", base, state=state, client=engine.client())
    runs = []
    for seed in (1, 2):
        transfer.init_weight_transfer()
        change(model, seed, scale=0.01)
        transfer.send_weights(model.named_parameters())
        assert engine.owner is not None
        runs.append((engine.owner["run"], engine.owner["epoch"]))
        transfer.destroy()
        assert engine.owner is None
    assert runs == [(runs[0][0], 1), (runs[0][0], 2)]
    assert engine.holds(saved(model))


def test_a_model_that_transformers_does_not_have_is_refused(tmp_path: Path) -> None:
    model = make_model("dense")
    folder = save(model, tmp_path)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("Qwen3ForCausalLM", "Own"))
    with pytest.raises(ValueError, match="transformers has no Own"):
        empty_model(folder)


def balancing(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the buffers that balance a model's routers, which no optimizer steps."""
    return [t for name, t in model.named_buffers() if name.endswith("e_score_correction_bias")]


@pytest.mark.parametrize("given", ["at first", "later"])
def test_a_weight_transfer_sends_trained_buffers(tmp_path: Path, given: str) -> None:
    model = make_model("deepseek_v3")
    base = save(model, tmp_path)
    engine = Engine.of(saved(model))
    at_first = model if given == "at first" else None
    transfer = DeltaWeightTransfer("http://engine", base, model=at_first, client=engine.client())
    transfer.init_weight_transfer()
    for buffer in balancing(model):
        buffer += 0.5
    if given == "later":
        with pytest.raises(ValueError, match=r"e_score_correction_bias: a buffer .*model="):
            transfer.send_weights(model.named_parameters())
        assert engine.holds(saved(make_model("deepseek_v3")))
        transfer.model = model
    transfer.send_weights(model.named_parameters())
    assert engine.holds(saved(model))


def generate(self: Any, prompts: list[list[int]], n: int, **_: Any) -> dict[str, Any]:
    """Answer as TRL's client does, with tokens that differ, so that rewards do."""
    completions = [[3 + (i * 7 + j) % 50 for j in range(6)] for i in range(len(prompts) * n)]
    logprobs = [[[-1.0] for _ in completion] for completion in completions]
    return {"prompt_ids": prompts, "completion_ids": completions, "logprobs": logprobs}


def by_place(completions: list[str], **_: Any) -> list[float]:
    return [float(i) for i in range(len(completions))]


def server_trainer(base: Path, folder: Path, reward: Any = by_place) -> trl.GRPOTrainer:
    return trl.GRPOTrainer(
        model=str(base),
        args=trl.GRPOConfig(
            output_dir=str(folder),
            max_steps=2,
            per_device_train_batch_size=4,
            num_generations=4,
            learning_rate=1e-3,
            max_completion_length=8,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url="http://engine",
            vllm_importance_sampling_correction=False,
            save_strategy="no",
            bf16=False,
            use_cpu=True,
            report_to=[],
        ),
        reward_funcs=reward,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["the quick", "a reward"]}),
    )


def test_grpo_in_server_mode_sends_deltas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Engine
) -> None:
    base = tiny_models.build("qwen3_moe", tmp_path / "base")
    engine = Engine.of(tiny_models.load_tensors(base))
    monkeypatch.setattr(vllm_client.VLLMClient, "generate", generate)
    use_deltas(base, client=engine.client())
    trainer = server_trainer(base, tmp_path / "out")
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    before = {name: values.copy() for name, values in engine.weights.items()}
    trainer.train()
    synced = trainer.vllm_generation.vllm_client.weight_transfer.report
    assert (synced.version, synced.full) == (2, False)
    trainer.vllm_generation.sync_weights()  # TRL syncs before it generates, not at the end
    assert engine.version == 3
    assert any((engine.weights[name] != values).any() for name, values in before.items())
    assert engine.holds(saved(trainer.model.to(torch.bfloat16)))


class Answers:
    """vLLM's answers to TRL's client: every other completion has two versions' tokens."""

    def __init__(self) -> None:
        self.spans: list[Any] = []

    def post(self, url: str, json: dict[str, Any]) -> dict[str, Any]:
        assert url.endswith("/completions")
        self.spans = [[[0, i], [4, i + 1]] if i % 2 else [[0, i]] for i in range(json["n"])]
        choices = [
            {
                "prompt_token_ids": [1, 2],
                "token_ids": [3 + (i * 7 + j) % 50 for j in range(6)],
                "logprobs": {"content": []},
                "weight_spans": spans,
            }
            for i, spans in enumerate(self.spans)
        ]
        return {"prompt_token_ids": [1, 2], "choices": choices * len(json.get("prompt", "a"))}


def test_reward_functions_get_the_spans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Engine
) -> None:
    base, answers = tiny_models.build("qwen3_moe", tmp_path / "base"), Answers()
    engine = Engine.of(tiny_models.load_tensors(base))
    monkeypatch.setattr(
        vllm_client.VLLMClient, "_post", lambda _, url, json: answers.post(url, json)
    )
    monkeypatch.setattr(
        vllm_client, "parse_logprobs", lambda found: ([[[-1.0]] * 6 for _ in found], None)
    )
    use_deltas(base, client=engine.client())
    seen: list[Any] = []

    def reward(completions: list[str], weight_spans: list[Any], **_: Any) -> list[float]:
        seen.append(weight_spans)
        return [float(i) for i in range(len(completions))]

    trainer = server_trainer(base, tmp_path / "out", reward)
    trainer.train()
    assert seen == [answers.spans] * 2
    assert trainer.vllm_generation.weight_spans == answers.spans
    client = trainer.vllm_generation.vllm_client
    assert len(client.chat([[{"role": "user", "content": "a"}]], n=2)["completion_ids"]) == 2


def test_grpo_in_server_mode_sends_trained_buffers(tmp_path: Path, engine: Engine) -> None:
    base = tiny_models.build("deepseek_v3", tmp_path / "base")
    engine = Engine.of(tiny_models.load_tensors(base))
    use_deltas(base, client=engine.client())
    trainer = server_trainer(base, tmp_path / "out")
    for buffer in balancing(trainer.model):
        buffer += 0.5
    trainer.vllm_generation.sync_weights()
    assert trainer.vllm_generation.vllm_client.weight_transfer.report.nnz == 4
    assert engine.holds(saved(trainer.model.to(torch.bfloat16)))
