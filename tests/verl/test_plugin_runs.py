"""Whose an engine is, through verl's checkpoint engine and through Ray's object store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import ray
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from verl.checkpoint_engine.base import CheckpointEngineRegistry
from verl.utils.import_utils import import_external_libs

from delta_sender import DeltaSender, SyncReport, named_tensors
from delta_sender.integrations.ray_transport import RayTransport, relay_on
from scripts.live_engine.process import EngineProcess
from tests.support.plugin_runs import SCENARIOS, Plugin, Scenario, Step, live_scene

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(600)]


def gathered(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in model.state_dict().items():
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def verl_gives(given: str) -> Plugin:
    """Return the training of an actor of one rank, in the order of verl's own calls.

    Args:
        given: What verl hands over: ``tensors``, or its ``engine``, of whose FSDP2 model each rank
            sends its shards.
    """

    def train(
        url: str, base: Path, model: Any, steps: Sequence[Step], **options: Any
    ) -> list[SyncReport]:
        import_external_libs("delta_sender.integrations.verl_checkpoint_engine")
        named = {"bucket_size": 1 << 20, "base": str(base), "urls": [url], **options}
        engine = CheckpointEngineRegistry.new("delta_http", is_master=True, **named)
        reports = []
        try:
            for number, step in enumerate(steps):
                step()
                to_actor, _ = engine.build_topology(1, 1, [engine.prepare()])
                engine.init_process_group(urls=to_actor["urls"][0])
                weights: Any = gathered(model)
                if given == "engine":
                    whole = (gathered(model), None)
                    weights = SimpleNamespace(
                        module=model, get_per_tensor_param=lambda whole=whole: whole
                    )
                asyncio.run(engine.send_weights(weights, global_steps=number))
                engine.finalize()
                [report] = engine.reports.values()
                reports.append(report)
        finally:
            engine.close()
        return reports

    train.__name__ = f"verl_gives_{given}"
    return train


def by_ray(
    url: str, base: Path, model: Any, steps: Sequence[Step], **options: Any
) -> list[SyncReport]:
    relay = relay_on(ray.get_runtime_context().get_node_id(), url)
    reports = []
    with httpx.Client(transport=RayTransport({url: relay}), timeout=60) as client:
        with DeltaSender(url, base, client=client, **options) as sender:
            for step in steps:
                step()
                reports.append(sender.sync(named_tensors(model, base)))
    ray.kill(relay)
    return reports


@pytest.fixture(scope="module", autouse=True)
def of_one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Start Ray with one node, and a process group of one rank."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(num_cpus=1, object_store_memory=128 << 20, include_dashboard=False)
        yield
        ray.shutdown()
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def engine(
    request: pytest.FixtureRequest,
    checkpoint: Callable[[str], Path],
    start: Callable[..., EngineProcess],
) -> Iterator[EngineProcess]:
    started = start(request.param, checkpoint("qwen3"))
    yield started
    started.stop()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize(
    "train",
    [verl_gives("tensors"), verl_gives("engine"), by_ray],
    ids=lambda train: train.__name__,
)
def test_plugin_keeps_runs_apart(
    engine: EngineProcess, train: Plugin, scenario: Scenario, tmp_path: Path
) -> None:
    is_sharded = getattr(train, "__name__", "") == "verl_gives_engine"
    prepare = fully_shard if is_sharded else (lambda model: model)
    scenario(live_scene(engine, engine.model, tmp_path, prepare=prepare), train)
