"""The checkpoint engine for verl, with stand-ins for verl's registry and Ray.

``tests/verl`` has verl itself.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import httpx
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from delta_sender import (
    DeltaSender,
    MultiSender,
    PartialSyncError,
    RunConflict,
    SyncError,
    quantize_weight,
)
from delta_sender.diff.quantize import FORMS
from engine_ext.files import read_checkpoint
from tests.support.fake_engine import Engine, error, sends
from tests.support.gloo_ranks import run_ranks
from tests.support.line_interrupts import InterruptedAt
from tests.support.sharded_trainers import served, sharded
from tests.support.trainer_models import change, make_model, save, saved

NAME = "delta_sender.integrations.verl_checkpoint_engine"


class Registry:
    known: ClassVar[dict[str, type]] = {}

    @staticmethod
    def register(backend: str) -> Any:
        def wrapper(cls: type) -> type:
            Registry.known[backend] = cls
            return cls

        return wrapper


@pytest.fixture
def verl(monkeypatch: pytest.MonkeyPatch) -> Any:
    return import_verl(monkeypatch)


def import_verl(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module, imported together with the stand-ins."""
    base = ModuleType("verl.checkpoint_engine.base")
    base.CheckpointEngine, base.CheckpointEngineRegistry = object, Registry  # type: ignore[attr-defined]
    for name in ("verl", "verl.checkpoint_engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    module = importlib.import_module(NAME)
    monkeypatch.delitem(sys.modules, NAME)
    return module


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Return the engine at every url; ``checkpoint`` below `tmp_path` is its checkpoint."""
    weights = {"embed": torch.randn(8, 4).bfloat16(), "norm": torch.randn(4)}
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    engine = Engine.of(weights)
    transport = httpx.MockTransport(engine.answer)
    monkeypatch.setattr(httpx, "Client", functools.partial(httpx.Client, transport=transport))
    return engine


def trained() -> dict[str, torch.Tensor]:
    """Return what verl gathers: float32 masters, and the tied head under its own name."""
    embed = torch.randn(8, 4)
    return {"embed": embed, "lm_head.weight": embed.clone(), "norm": torch.randn(4)}


def freed(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors as verl does: each is gone when the next one is asked for."""
    for name, tensor in tensors.items():
        gathered = tensor.clone()
        yield name, gathered
        gathered.fill_(float("nan"))


def make(verl: Any, tmp_path: Path, **options: Any) -> Any:
    cls = Registry.known["delta_http"]
    assert cls is verl.DeltaHTTPCheckpointEngine
    return cls(bucket_size=1 << 20, base=tmp_path / "checkpoint", **options)


@pytest.fixture
def opened(verl: Any, engine: Engine, tmp_path: Path) -> Iterator[Any]:
    """Makes the trainer's side, in its process group; each is closed after the test."""
    made = list[Any]()

    def make_actor(*urls: str, **options: Any) -> Any:
        found = [*urls] or ["http://engine"]
        made.append(make(verl, tmp_path, is_master=True, urls=found, **options))
        made[-1].init_process_group(found)
        return made[-1]

    yield make_actor
    for actor in made:
        actor.close()


@pytest.mark.parametrize("handed", ["generator", "engine"])
def test_syncs(verl: Any, engine: Engine, tmp_path: Path, handed: str) -> None:
    actor = make(verl, tmp_path, is_master=True, urls=["http://engine"])
    rollout = make(verl, tmp_path, urls=["http://engine"])
    for step in range(2):
        metadata = [actor.prepare(), rollout.prepare()]
        to_actor, to_rollout = actor.build_topology(1, 1, metadata)
        assert (to_actor, to_rollout) == ({"urls": [["http://engine"]]}, {})
        actor.init_process_group(urls=to_actor["urls"][0])
        rollout.init_process_group()
        tensors = trained()
        given: Any = freed(tensors)
        if handed == "engine":
            given = SimpleNamespace(get_per_tensor_param=lambda g=given: (g, None))
        metrics = asyncio.run(actor.send_weights(given, global_steps=step))
        assert metrics["delta_http/version"] == step + 1
        assert list(rollout.receive_weights()) == []
        assert asyncio.run(rollout.send_weights(freed(tensors))) is None
        actor.finalize()
        held = {"embed": tensors["embed"].bfloat16(), "norm": tensors["norm"]}
        assert engine.holds(held)
    actor.close()


def test_all_is_read_though_a_name_is_unknown(opened: Any, engine: Engine) -> None:
    actor = opened()
    source = freed({"other": torch.zeros(1), **trained()})
    with pytest.raises(ValueError, match="other"):
        asyncio.run(actor.send_weights(source))
    assert next(source, None) is None
    assert engine.version == 0


@pytest.mark.parametrize("handed", ["generator", "engine"])
def test_adapters_that_are_not_merged_are_refused(opened: Any, engine: Engine, handed: str) -> None:
    actor = opened()
    given: Any = freed({"embed": torch.randn(8, 4), "q_proj.base_layer.weight": torch.ones(2)})
    if handed == "engine":
        weights = freed(trained())  # Megatron's have the base's names
        config = {"r": 8}
        given = SimpleNamespace(get_per_tensor_param=lambda: (weights, config))
    with pytest.raises(ValueError, match=r"LoRA .* actor_rollout_ref.model.lora.merge=True"):
        asyncio.run(actor.send_weights(given))
    assert engine.version == 0


def test_weights_that_never_change_are_warned_of(
    opened: Any, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    actor = opened()
    tensors = trained()
    for _ in range(6):
        assert "lora.merge" not in caplog.text or engine.version > 3
        asyncio.run(actor.send_weights(freed(tensors)))
    [warning] = [text for text in caplog.messages if "changed" in text]
    assert warning.startswith("no value has changed in 3 syncs in a row. Usual causes: ")
    assert "actor_rollout_ref.model.lora.merge=True" in warning


BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture
def balanced(engine: Engine, tmp_path: Path) -> Any:
    """Return a model whose buffer is trained; the engine and the checkpoint hold it as it was."""
    model = make_model("deepseek_v3")
    (tmp_path / "checkpoint" / "config.json").unlink()
    save(model, tmp_path / "checkpoint")
    engine.weights = Engine.of(saved(model)).weights
    change(model, scale=0.01)
    model.get_buffer(BIAS).add_(0.5)
    return model


def parameters(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    return freed({name: tensor for name, tensor in saved(model).items() if name != BIAS})


@pytest.mark.slow
def test_buffer_is_read_from_verls_engine(opened: Any, engine: Engine, balanced: Any) -> None:
    actor = opened()
    given = SimpleNamespace(
        module=balanced, get_per_tensor_param=lambda: (parameters(balanced), None)
    )
    asyncio.run(actor.send_weights(given))
    assert engine.holds(saved(balanced))


def test_buffer_left_out_is_refused_with_ways_out(
    opened: Any, engine: Engine, balanced: Any
) -> None:
    actor = opened()
    said = rf"{BIAS}: a buffer .* Give send_weights verl's engine.* frozen=\[\.\.\.\]"
    with pytest.raises(ValueError, match=said):
        asyncio.run(actor.send_weights(parameters(balanced)))
    assert engine.version == 0
    given = {name: t for name, t in saved(balanced).items() if name != "model.norm.weight"}
    with pytest.raises(ValueError, match=r"^missing, but in the base: model\.norm\.weight$"):
        asyncio.run(actor.send_weights(freed(given)))
    assert engine.version == 0


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [["*.e_score_*"], "*.e_score_*"])
def test_frozen_buffer_is_the_bases(
    opened: Any, engine: Engine, balanced: Any, frozen: Any
) -> None:
    held = saved(make_model("deepseek_v3"))[BIAS]
    actor = opened(frozen=frozen)
    asyncio.run(actor.send_weights(parameters(balanced)))
    assert engine.holds({**saved(balanced), BIAS: held})
    given = {name: t for name, t in saved(balanced).items() if "norm" not in name}
    with pytest.raises(ValueError, match="missing, but in the base: model"):
        asyncio.run(actor.send_weights(freed(given)))


@pytest.mark.parametrize("urls", [["http://one"], ["http://one", "http://two"]])
def test_other_run_is_named(opened: Any, engine: Engine, urls: list[str]) -> None:
    base = {"embed": torch.zeros(8, 4).bfloat16(), "norm": torch.zeros(4)}
    owner = DeltaSender("http://one", base, full="allow")
    owner.sync(base)
    actor = opened(*urls)
    with pytest.raises(RunConflict if len(urls) == 1 else PartialSyncError) as caught:
        asyncio.run(actor.send_weights(freed(trained())))
    failures = getattr(caught.value, "failures", {"http://one": caught.value})
    assert [failed.error["owner"]["run"] for failed in failures.values()] == [owner.run] * len(urls)
    assert engine.holds(base)
    owner.close()


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, None), ({"lag_limit": 5.0}, 5.0), ({"commit": "all_or_none"}, 60.0)],
)
def test_slow_server_is_waited_for_unless_asked_otherwise(
    verl: Any,
    opened: Any,
    engine: Engine,
    options: dict[str, Any],
    expected: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For verl every server has the weights once `send_weights` has returned."""
    limits: list[float | None] = []

    class Noting(MultiSender):
        def __init__(self, *arguments: Any, lag_limit: float | None = 60.0, **rest: Any) -> None:
            limits.append(lag_limit)
            super().__init__(*arguments, lag_limit=lag_limit, **{**rest, "commit": "each"})

    monkeypatch.setattr(verl, "MultiSender", Noting)
    actor = opened("http://one", **options)
    asyncio.run(actor.send_weights(freed(trained())))
    assert limits == [expected]


@pytest.mark.slow
def test_sender_of_shards_that_is_dead_is_replaced(
    verl: Any, opened: Any, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interruption leaves ranks at different steps; a refusal leaves the sender as it was."""
    model = make_model("dense")
    (tmp_path / "checkpoint" / "config.json").unlink()
    save(model, tmp_path / "checkpoint")
    engine.weights = Engine.of(saved(model)).weights
    monkeypatch.setattr(verl, "FSDPModule", torch.nn.Module)
    actor = opened()
    given = SimpleNamespace(module=model)
    asyncio.run(actor.send_weights(given))
    change(model, scale=0.01)
    engine.faults = {len(engine.requests): sends(error(507, "SpoolFull"))}
    with pytest.raises(SyncError, match="SpoolFull"):
        asyncio.run(actor.send_weights(given))
    asyncio.run(actor.send_weights(given))
    assert not actor.reports["http://engine"].full
    change(model, scale=0.01)
    interrupted = InterruptedAt(0, ("snapshot.py", "advance"))
    with interrupted, pytest.raises(KeyboardInterrupt):
        asyncio.run(actor.send_weights(given))
    change(model, scale=0.01)
    asyncio.run(actor.send_weights(given))
    assert engine.holds(saved(model))


def send_without_a_base(rank: int, folder: str) -> str:
    """Let rank 1 lack the checkpoint; return what the rank raises."""
    with pytest.MonkeyPatch.context() as patch:
        cls = import_verl(patch).DeltaHTTPCheckpointEngine
        base, urls = Path(folder, "none" if rank else "checkpoint"), ["http://engine"]
        actor = cls(bucket_size=1, is_master=rank == 0, base=base, urls=urls)
        given = SimpleNamespace(module=sharded(make_model("dense"), "fsdp"))
        try:
            asyncio.run(actor.send_weights(given))
        except Exception as error:
            return type(error).__name__
    return "nothing"


@pytest.mark.slow
def test_rank_without_a_base_keeps_none_waiting(tmp_path: Path) -> None:
    save(make_model("dense"), tmp_path / "checkpoint")
    outcomes = run_ranks(send_without_a_base, 2, tmp_path, str(tmp_path), limit=40)
    assert outcomes == ["RuntimeError", "FileNotFoundError"]


def send_gathered(rank: int, folder: str, url: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        cls = import_verl(patch).DeltaHTTPCheckpointEngine
        base = Path(folder, "checkpoint")
        actor = cls(bucket_size=1, is_master=rank == 0, base=base, urls=[url])

        def gathered() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in read_checkpoint(base):
                dist.barrier()
                yield name, tensor + 1

        return asyncio.run(actor.send_weights(gathered()))


@pytest.mark.slow
def test_server_slower_than_the_ranks_group_is_waited_for(tmp_path: Path, engine: Engine) -> None:
    """It answers neither the claim nor the last part within the group's timeout."""
    answer = engine.answer

    def slowly(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            time.sleep(6)
        return answer(request)

    engine.answer = slowly  # type: ignore[method-assign]
    with served(engine) as url:
        figures, nothing = run_ranks(send_gathered, 2, tmp_path, str(tmp_path), url, timeout=4)
    assert (figures["delta_http/version"], nothing) == (1, None)


@pytest.mark.parametrize("form", FORMS)
def test_a_quantised_base_gets_what_the_trainer_has(
    opened: Any, engine: Engine, tmp_path: Path, form: str
) -> None:
    weights = {"up.weight": torch.randn(160, 140), "norm": torch.randn(4)}
    base = {f"up.weight{n}": t for n, t in quantize_weight(weights["up.weight"], form).items()}
    save_file({**base, "norm": weights["norm"]}, tmp_path / "checkpoint" / "model.safetensors")
    engine.weights = Engine.of({**base, "norm": weights["norm"]}).weights
    actor = opened(quantize=form)
    weights["up.weight"] += 1e-3 * torch.randn(160, 140)
    metrics = asyncio.run(actor.send_weights(freed(weights)))
    assert metrics["delta_http/version"] == 1
    new = {f"up.weight{n}": t for n, t in quantize_weight(weights["up.weight"], form).items()}
    assert engine.holds({**new, "norm": weights["norm"]})


def test_the_servers_are_found_in_ray(
    verl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = {
        "vllm_server_0_0": ("10.0.0.1", 8000),
        "vllm_server_1_0": ("fd00::1", 8001),
        "vllm_server_1_1": ("10.0.0.9", 1),  # a further node of the replica
        "vllm_server_reward_0_0": ("10.0.0.9", 2),
        "something": ("10.0.0.9", 3),
    }

    def actor(name: str) -> Any:
        remote = SimpleNamespace(remote=lambda: addresses[name])
        return SimpleNamespace(get_server_address=remote)

    ray = ModuleType("ray")
    ray.util = SimpleNamespace(list_named_actors=lambda: list(addresses))  # type: ignore[attr-defined]
    ray.get_actor, ray.get = actor, list  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    engine = make(verl, tmp_path)
    urls = ["http://10.0.0.1:8000", "http://[fd00::1]:8001"]
    assert engine.build_topology(2, 1, [engine.prepare()]) == ({"urls": [urls] * 2}, {})
    addresses.clear()
    with pytest.raises(ValueError, match="no rollout server"):
        engine.build_topology(2, 1, [engine.prepare()])
