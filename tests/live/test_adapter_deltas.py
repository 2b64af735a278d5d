"""vLLM with LoRA adapters: an adapter's own tensors are updated."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from delta_sender import DeltaSender, SyncError
from scripts.live_engine import quantised_checkpoints, tiny_models
from scripts.live_engine.process import EngineProcess
from tests.live.conftest import check_steps
from tests.live.lora import ADAPTER, generated, make_adapter, seen_from
from tests.support.present import present
from tests.support.served_models import delta_between, one_part

OTHER = "other"
Tensors = Mapping[str, torch.Tensor]


def trained(tensors: Tensors, seed: int) -> dict[str, torch.Tensor]:
    """The tensors after a step that changes one element in seven."""
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in changed.values():
        tensor.view(-1)[seed::7] *= 1.5
    return changed


def save_adapter(base: Path, folder: Path, tensors: Tensors) -> Path:
    """Write an adapter with the configuration of another one."""
    folder.mkdir()
    shutil.copy(base / "adapter_config.json", folder)
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder


def serving(*modules: str, **options: Any) -> dict[str, Any]:
    """The options of an engine that serves adapters, given as NAME=PATH."""
    arguments = ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", *modules]
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    return {"extra_args": arguments, "extra_env": environment, **options}


def post(engine: EngineProcess, body: bytes, adapter: str = ADAPTER) -> httpx.Response:
    headers = {"Content-Type": "application/octet-stream"}
    params = {"adapter": adapter}
    return engine.post("/update_weights_delta", content=body, headers=headers, params=params)


def adapters(engine: EngineProcess) -> dict[str, tuple[int, str | None]]:
    """The version and the digest of every loaded adapter."""
    listed = present(engine.delta_status().adapters)
    return {one.name: (one.version, one.digest) for one in listed}


def check_refusals(engine: EngineProcess, tensors: Tensors) -> None:
    """An adapter, a tensor or a base that the engine does not have is refused by name."""
    version = adapters(engine)[ADAPTER][0]
    name, tensor = next(iter(tensors.items()))
    changed = trained(tensors, 0)[name]
    numbered = {"current_version": version + 1, "base_version": version}
    delta = one_part([delta_between(name, tensor, changed)], **numbered)
    unknown = one_part([delta_between("lora_A.weight", tensor, changed)], **numbered)
    wider = torch.cat([tensor, tensor])
    larger = one_part([delta_between(name, wider, torch.cat([changed, tensor]))], **numbered)
    other_base = one_part(
        [delta_between(name, tensor, changed)], digest_before="00" * 16, **numbered
    )
    for body, adapter, status, kind, named in (
        (delta, "missing", 422, "AdapterNotLoaded", "missing"),
        (unknown, ADAPTER, 422, "NotUpdatable", "lora_A.weight"),
        (larger, ADAPTER, 422, "NotUpdatable", name),
        (other_base, ADAPTER, 409, "BaseMismatch", ""),
    ):
        answer = post(engine, body, adapter)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (status, kind), error
        assert (named in error["message"], error["engine_state"]) == (True, "unchanged")


@pytest.mark.full
@pytest.mark.parametrize(("kind", "tp"), [("llama_tied", 1), ("qwen3", 2)])
def test_an_adapter_follows_a_sender(
    kind: str, tp: int, start: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    base = tiny_models.build(kind, tmp_path / "base")
    adapter = make_adapter(base, tmp_path / "adapter")
    steps = [tiny_models.load_tensors(adapter)]
    for seed in (1, 2):
        steps.append(trained(steps[-1], seed))
    engine = start("vllm", base, tp=tp, **serving(f"{ADAPTER}={adapter}"))
    assert adapters(engine) == {ADAPTER: (0, None)}
    first = seen_from(engine)
    last, reports = check_steps(engine, steps, seen_from, ADAPTER)
    assert [report.version for report in reports] == [1, 2]
    for key in ("parameters", "texts", "logprobs"):
        assert first[key] == last[key]
    assert first["adapted"] != last["adapted"]
    assert (engine.weight_version(), engine.delta_status().version.number) == ("0", 0)
    # The model's weights are another line of versions.
    weights = tiny_models.load_tensors(base)
    target = quantised_checkpoints.step(weights, 1)
    version = adapters(engine)[ADAPTER]
    with DeltaSender(engine.url, base=weights.items()) as sender:
        assert sender.sync(target.items()).version == 1
    assert (engine.weight_version(), adapters(engine)[ADAPTER]) == ("1", version)
    check_refusals(engine, steps[-1])
    last = seen_from(engine)
    assert first["parameters"] != last["parameters"]
    engine.stop()
    folder = save_adapter(adapter, tmp_path / "target_adapter", steps[-1])
    moved = tiny_models.save_checkpoint(base, tmp_path / "target", target)
    fresh = start("vllm", moved, tp=tp, **serving(f"{ADAPTER}={folder}"))
    assert seen_from(fresh) == last
    fresh.stop()


@pytest.mark.full
@pytest.mark.parametrize("tp", [1, 2])
def test_a_synced_adapter_outlives_the_cache(
    tp: int, start: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    """vLLM has room for one of two adapters, and loads each again and again."""
    base = tiny_models.build("qwen3", tmp_path / "base")
    folders = [make_adapter(base, tmp_path / f"adapter{n}", seed=n) for n in range(2)]
    loaded = [tiny_models.load_tensors(folder) for folder in folders]
    targets = [trained(tensors, 3) for tensors in loaded]
    names = (ADAPTER, OTHER)
    modules = [f"{name}={folder}" for name, folder in zip(names, folders, strict=True)]
    engine = start("vllm", base, tp=tp, **serving(*modules))
    before = [generated(engine, name) for name in names]
    senders = [
        DeltaSender(engine.url, base=tensors.items(), adapter=name)
        for name, tensors in zip(names, loaded, strict=True)
    ]
    # The first one has left the cache, and its folder is gone as well once it was synced.
    assert senders[0].sync(targets[0].items()).full is False
    (folders[0] / "adapter_model.safetensors").unlink()
    synced = [generated(engine, name) for name in names]
    assert synced[0] != before[0]
    assert synced[1] == before[1]
    assert senders[1].sync(targets[1].items()).full is False
    both = [generated(engine, name) for name in names]
    assert both[0] == synced[0]
    assert both[1] != synced[1]
    assert [version for version, _ in adapters(engine).values()] == [1, 1]
    # Asleep, nothing is written; after level 2 vLLM has to load all adapters again.
    engine.post("/sleep", params={"level": "1"}).raise_for_status()
    with pytest.raises(SyncError, match="WeightsAsleep"):
        senders[0].sync(trained(targets[0], 4).items())
    engine.post("/wake_up").raise_for_status()
    assert [generated(engine, name) for name in names] == both
    engine.post("/sleep", params={"level": "2"}).raise_for_status()
    engine.post("/wake_up").raise_for_status()
    weights = tiny_models.load_tensors(base)
    with DeltaSender(engine.url, base=weights.items(), full="allow") as sender:
        assert sender.sync(weights.items()).full
    assert [generated(engine, name) for name in names] == both
    assert engine.post("/delta_rollback", params={"adapter": OTHER}).is_success
    assert [generated(engine, name) for name in names] == [both[0], before[1]]
    # Loaded anew from another folder, it is another adapter: of version 0, and of other bytes.
    anew = {"lora_name": OTHER, "load_inplace": True}
    moved = save_adapter(folders[1], tmp_path / "moved", targets[0])
    loading = engine.post("/v1/load_lora_adapter", json={**anew, "lora_path": str(moved)})
    assert loading.is_success, loading.text
    assert adapters(engine)[OTHER] == (0, None)
    assert generated(engine, OTHER) == both[0]
    assert senders[1].sync(targets[1].items()).full
    # Requests still ask to load it in place, which would bring the folder's bytes back.
    assert [generated(engine, name) for name in names] == both
    assert engine.post("/v1/unload_lora_adapter", json={"lora_name": ADAPTER}).is_success
    with pytest.raises(SyncError, match="AdapterNotLoaded"):
        senders[0].sync(targets[0].items())
    assert adapters(engine).keys() == {OTHER}
    for sender in senders:
        sender.close()
    engine.stop()
