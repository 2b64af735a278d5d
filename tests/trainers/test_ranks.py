"""Sharded models: every rank gathers, and when one fails, all end with an error."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from delta_sender import DeltaSender, named_tensors, sync_model
from engine_ext.files import read_checkpoint
from tests.support.fake_engine import Engine, error, sends
from tests.support.gloo_ranks import run_ranks
from tests.support.trainer_models import assert_same, change, make_model, save


def shard(model: Any) -> Any:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.get_submodule("model.layers"):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def make(kind: str) -> Any:
    """Return a whole model; its 32, 48 and 64 rows are uneven for 3 ranks."""
    if kind == "lora":
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
        model = peft.get_peft_model(make_model("dense"), config)
        change(model)
        return model
    return make_model(kind)


def read(rank: int, kind: str, folder: str) -> str:
    model = make(kind)
    base = model.get_base_model() if kind == "lora" else model
    shard(base)
    assert any(isinstance(parameter, DTensor) for parameter in model.parameters())
    given = list(named_tensors(model))
    assert_same(given, dict(read_checkpoint(folder)))
    for _ in range(2):
        tensors = named_tensors(model)
        if rank:
            tensors.take_part()
        else:
            assert len(list(tensors)) == len(given)
    return "same"


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        pytest.param("tied", 2, marks=pytest.mark.full),
        ("qwen3_moe", 3),
        pytest.param("lora", 3, marks=pytest.mark.full),
    ],
)
def test_shards_are_gathered_on_every_rank(kind: str, ranks: int, tmp_path: Path) -> None:
    whole = make(kind)
    folder = save(whole.merge_and_unload() if kind == "lora" else whole, tmp_path / "saved")
    assert run_ranks(read, ranks, tmp_path, kind, str(folder)) == ["same"] * ranks


def tensor_parallel(rank: int, folder: str) -> str:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = make_model("dense")
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], {"mlp.up_proj": ColwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    assert_same(named_tensors(model), dict(read_checkpoint(folder)))
    return "same"


@pytest.mark.full
def test_several_mesh_dimensions(tmp_path: Path) -> None:
    folder = save(make_model("dense"), tmp_path / "saved")
    assert run_ranks(tensor_parallel, 4, tmp_path, str(folder)) == ["same"] * 4


def sync(rank: int, folder: str, fault: str) -> Any:
    """Sync a sharded model twice, with a fault in the second sync; then once more."""
    model = shard(make_model("qwen3_moe"))
    base = make_model("qwen3_moe")
    engine = Engine.of(dict(named_tensors(base))) if not rank else None
    sender = DeltaSender("http://engine/", folder, client=engine.client()) if engine else None
    report = sync_model(sender, model, folder)
    assert (report is None) == bool(rank)
    for parameter in model.parameters():
        parameter.data.add_(0.5)
    said = "no error"
    undo = breaks(rank, fault, model, engine)
    try:
        sync_model(sender, model, folder)
    except Exception as failed:
        said = f"{type(failed).__name__}: {failed}"
    undo()
    if engine is not None:
        assert engine.version == 1
        assert engine.holds(dict(named_tensors(base)))
    report = sync_model(sender, model, folder)
    for parameter in base.parameters():
        parameter.data.add_(0.5)
    if engine is not None:
        assert report is not None
        assert engine.version == report.version
        assert engine.holds(dict(named_tensors(base)))
    return said


def breaks(rank: int, fault: str, model: nn.Module, engine: Engine | None) -> Any:
    from delta_sender.models import plan, reader

    if fault == "refused" and engine is not None:
        engine.faults[len(engine.requests)] = sends(error(507, "SpoolFull"))
    if fault == "conversion" and rank == 0:
        convert = plan.Plan.build
        count = iter(range(100))

        def build(self: Any, group: Any, tensors: Any) -> Any:
            if next(count) == 5:
                raise MemoryError("no")
            return convert(self, group, tensors)

        plan.Plan.build = build  # type: ignore[method-assign]
        return lambda: setattr(plan.Plan, "build", convert)
    if fault == "base" and rank == 0:
        prepared = plan.Plan._compare

        def compare(self: Any, base: Any) -> None:
            raise ValueError("not the base's")

        plan.Plan._compare = compare  # type: ignore[method-assign]
        return lambda: setattr(plan.Plan, "_compare", prepared)
    if fault == "other rank" and rank == 1:
        take_part = reader.ModelTensors.take_part

        def stops(self: Any) -> None:
            next(self)
            self.close()
            raise MemoryError("no")

        reader.ModelTensors.take_part = stops  # type: ignore[method-assign]
        return lambda: setattr(reader.ModelTensors, "take_part", take_part)
    return lambda: None


@pytest.mark.parametrize(
    ("fault", "rank", "said"),
    [
        ("refused", 0, "SyncError: "),
        pytest.param("conversion", 0, "MemoryError: no", marks=pytest.mark.full),
        pytest.param("base", 0, "ValueError: not the base's", marks=pytest.mark.full),
        ("other rank", 1, "MemoryError: no"),
    ],
)
def test_when_one_rank_fails_all_raise(fault: str, rank: int, said: str, tmp_path: Path) -> None:
    folder = save(make_model("qwen3_moe"), tmp_path / "base")
    outcomes = run_ranks(sync, 3, tmp_path, str(folder), fault)
    assert outcomes[rank].startswith(said)
    others = {outcome for number, outcome in enumerate(outcomes) if number != rank}
    assert len(others) == 1
    assert others < {
        f"RuntimeError: the sync failed on rank {rank}; see the error there",
        f"RuntimeError: rank {rank} stopped reading the model; see the error there",
    }


def die(rank: int) -> str:
    model = shard(make_model("dense"))
    tensors = named_tensors(model)
    for count, _ in enumerate(tensors):
        if rank == 1 and count == 5:
            os._exit(1)
    return "read"


@pytest.mark.full
def test_when_a_rank_dies_the_others_raise(tmp_path: Path) -> None:
    outcomes = run_ranks(die, 3, tmp_path)
    assert outcomes[1] is None
    assert all("rror" in outcomes[rank] for rank in (0, 2))
