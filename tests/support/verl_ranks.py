"""One rank of an actor of verl: FSDP2 on gloo, and the checkpoint engine `delta_http`.

``python verl_ranks.py RANK RANKS URL BASE FOLDER GIVEN``: GIVEN is ``tensors``, or ``engine`` for
verl's engine in their place. delta_sender and tests are on PYTHONPATH.
The calls are those of verl's `CheckpointEngineManager` and workers, in their order.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from verl.checkpoint_engine.base import CheckpointEngineRegistry
from verl.utils.import_utils import import_external_libs
from verl.utils.model import convert_weight_keys
from verl.workers.engine.fsdp.utils import unfuse_moe_params
from verl.workers.engine.spec import ShardSpec, derive_dtensor_placement, translate_flat_indices

from tests.support.trainer_models import change

STEPS = 3


def gathered(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of verl's FSDP engine, by its own functions."""
    params = convert_weight_keys(model.state_dict(), model)
    whole = (
        (name, param.full_tensor() if isinstance(param, DTensor) else param)
        for name, param in params.items()
    )
    return unfuse_moe_params(whole, model.config.model_type)


def shards_agree(model: Any) -> bool:
    """Whether verl's shard helpers find every element of this rank's shards in the whole."""
    for parameter in model.parameters():
        place, _, _ = derive_dtensor_placement(ShardSpec.from_param(parameter))
        local = parameter.to_local().reshape(-1)
        where = translate_flat_indices(torch.arange(local.numel()), place)
        if not torch.equal(parameter.full_tensor().reshape(-1)[where], local):
            return False
    return True


def main(rank: int, ranks: int, url: str, base: str, folder: Path, given: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    limit = timedelta(seconds=120)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)

    import_external_libs("delta_sender.integrations.verl_checkpoint_engine")
    options = {"bucket_size": 1 << 20, "base": base, "urls": [url]}
    engine = CheckpointEngineRegistry.new("delta_http", is_master=rank == 0, **options)
    rollout = CheckpointEngineRegistry.new("delta_http", **options)
    metadata = [engine.prepare() for _ in range(ranks)] + [rollout.prepare()]
    metrics: list[Any] = []
    for step in range(STEPS):
        actor, nothing = engine.build_topology(ranks, 1, metadata)
        engine.init_process_group(**{key: values[rank] for key, values in actor.items()})
        rollout.init_process_group(**nothing)
        change(model, 7 * step + rank, 0.01)
        weights: Any = gathered(model)
        if given == "engine":  # what verl's worker has, as far as it is used
            weights = SimpleNamespace(module=model, get_per_tensor_param=lambda: 1 / 0)
        metrics.append(asyncio.run(engine.send_weights(weights, global_steps=step)))
        assert list(rollout.receive_weights(global_steps=step)) == []
        engine.finalize()
    # An error on the rank that sends is one on all ranks, and none hangs.
    broken = ((f"{name}.x", tensor) for name, tensor in gathered(model))
    try:
        asyncio.run(engine.send_weights(broken))
        failed = "no"
    except Exception as error:
        failed = type(error).__name__
    agree = shards_agree(model)
    tensors = {n: t.to(torch.bfloat16).clone() for n, t in gathered(model)}
    if rank == 0:
        save_file(tensors, folder / "saved.safetensors")
    outcome = {"metrics": metrics, "failed": failed, "shards_agree": agree}
    (folder / f"outcome-{rank}.json").write_text(json.dumps(outcome))
    engine.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(
        int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], Path(sys.argv[5]), sys.argv[6]
    )
