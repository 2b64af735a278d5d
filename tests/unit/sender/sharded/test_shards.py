"""A model's shards have the names and bytes that `save_pretrained` writes."""

from __future__ import annotations

import functools
import inspect
import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from delta_sender import model_shards
from delta_sender.models.model_state import unwrapped
from delta_sender.models.plan import Plan
from delta_sender.sharded.box import Box
from delta_sender.sharded.conversion import sources_of
from delta_sender.sharded.shards import checked
from tests.support.fake_engine import Engine
from tests.support.shown_examples import examples
from tests.support.trainer_models import assert_same, change, make_model, saved

EXAMPLES = examples("trainers.md")


@pytest.mark.parametrize("kind", ["dense", "tied", "mixtral", "qwen3_moe", "jamba", "deepseek_v3"])
def test_whole_tensors_are_what_is_saved(kind: str) -> None:
    model = make_model(kind, torch.float32)
    change(model)
    base = saved(make_model(kind))
    shards = list(checked(model_shards(model, base)))
    assert all(box.is_whole for _, box in shards)
    wanted = saved(model.to(torch.bfloat16))
    model.to(torch.float32)
    assert_same(((shard.name, shard.cast()) for shard, _ in shards), wanted)
    cast = model_shards(model, dtype=torch.float16)
    assert {shard.cast().dtype for shard in cast if shard.tensor.is_floating_point()} == {
        torch.float16
    }


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_parts_of_fused_experts_make_up_the_checkpoints(dim: int) -> None:
    """Uneven parts in any dimension: some hold parts of the gate and of up."""
    model = make_model("qwen3_moe")
    plan, wanted = Plan(unwrapped(model), None, None), saved(model)
    found = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    times = {name: torch.zeros(tensor.shape) for name, tensor in wanted.items()}
    for source in sources_of(plan):
        live = plan.state.live[plan.state.reads[source.key]].detach()
        cut = min(dim, live.ndim - 1)
        ends = [0, live.shape[cut] // 3, live.shape[cut]]
        for start, stop in itertools.pairwise(ends):
            slices = [slice(None)] * live.ndim
            slices[cut] = slice(start, stop)
            held = Box.of(live.shape, slices)
            for name, shape, of_source, box in source.pieces(held):
                assert shape == tuple(wanted[name].shape)
                local = live[held.slices][of_source.relative_to(held)]
                found[name][box.slices] = local.reshape(box.sizes)
                times[name][box.slices] += 1
    assert_same(found.items(), wanted)
    assert all(bool((count == 1).all()) for count in times.values())


class Adapted(nn.Module):
    """A layer with an adapter, as PEFT has them."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer, self.lora = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def get_base_layer(self) -> nn.Module:
        return self.base_layer

    def merge(self) -> None:
        raise AssertionError


def test_what_shards_cannot_make_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.base_layer\.weight: adapters.*use sync_model"):
        model_shards(nn.Sequential(Adapted()))
    with pytest.raises(ValueError, match=r"weight: \[2, 3\], but its slices are \[1, 3\]"):
        list(checked([("weight", torch.zeros(2, 3), (4, 3), (slice(0, 1), slice(None)))]))
    with pytest.raises(ValueError, match="on the meta device"):
        model_shards(nn.Linear(2, 2, device="meta"))


@pytest.fixture
def alone() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_rows_that_are_not_next_to_each_other_are_refused() -> None:
    """As transformers divides a fused gate and up projection."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = dist.init_device_mesh("cpu", (2, 2))
        layer = nn.Linear(3, 4, bias=False)
        for inner, refused in ((Replicate(), True), (Shard(1), True), (Shard(0), False)):
            placements = [_StridedShard(0, split_factor=2), inner]
            local = torch.zeros(1 if inner == Shard(0) else 2, 3 if inner != Shard(1) else 2)
            parts = DTensor.from_local(
                local, mesh, placements, shape=torch.Size((4, 3)), stride=(3, 1)
            )
            layer.weight = nn.Parameter(parts)
            with pytest.raises(ValueError, match="use sync_model") if refused else nullcontext():
                model_shards(layer)
    finally:
        dist.destroy_process_group()


def test_partial_sums_are_refused(alone: None) -> None:
    mesh = dist.init_device_mesh("cpu", (1,))
    layer = nn.Linear(2, 2, bias=False)
    partial = DTensor.from_local(torch.zeros(2, 2), mesh, [Partial()])
    layer.weight = nn.Parameter(partial)
    with pytest.raises(ValueError, match=r"weight: .*partial sums; use sync_model"):
        model_shards(layer)


def test_torch_still_tells_where_shards_lie() -> None:
    """If this fails, see what torch.distributed.checkpoint calls instead: not a public function."""
    names = list(inspect.signature(compute_local_shape_and_global_offset).parameters)
    assert names[:3] == ["global_shape", "mesh", "placements"]


@pytest.mark.slow
def test_the_example_runs(alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("qwen3_moe")
    model.save_pretrained(tmp_path / "checkpoint")
    monkeypatch.chdir(tmp_path)
    engine = Engine.of(saved(model))
    transport = httpx.MockTransport(engine.answer)
    monkeypatch.setattr(httpx, "Client", functools.partial(httpx.Client, transport=transport))
    train = lambda model, seed: change(model, seed, 0.01)  # noqa: E731
    exec(EXAMPLES["sharded"], {"model": model, "data": [1, 2], "train": train})
    assert engine.version == 2
    assert engine.holds(saved(model))


def test_the_example_of_fused_tensors_takes_them_apart() -> None:
    given: dict[str, Any] = {}
    exec(EXAMPLES["megatron"], given)
    head, queries, groups, hidden, ranks = 4, 3, 4, 8, 2
    whole = {
        f"l.self_attn.{name}_proj.weight": torch.randn(groups * count * head, hidden)
        for name, count in {"q": queries, "k": 1, "v": 1}.items()
    }
    whole |= {f"l.mlp.{name}_proj.weight": torch.randn(12, hidden) for name in ("gate", "up")}
    q, k, v, gate, up = whole.values()
    found = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    by_group = [one.view(groups, -1, head, hidden) for one in (q, k, v)]
    for rank in range(ranks):
        mine = slice(rank * groups // ranks, (rank + 1) * groups // ranks)
        fused = torch.cat([one[mine] for one in by_group], dim=1).reshape(-1, hidden)
        rows = slice(rank * 6, rank * 6 + 6)
        shards = [
            *given["qkv"]("l", fused, rank, ranks, queries, head),
            *given["gate_up"]("l", torch.cat([gate[rows], up[rows]]), rank, ranks),
        ]
        for shard, box in checked(shards):
            found[shard.name][box.slices] = shard.tensor
    assert_same(found.items(), whole)
