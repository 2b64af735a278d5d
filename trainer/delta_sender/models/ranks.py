"""Gather a model's sharded parameters, and let its ranks agree on how reading it went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Longer than the tries of one request to an engine that does not answer.
_PATIENCE: Final = timedelta(hours=2)
_MADE: Counter[tuple[int, ...]] = Counter()  # groups in this process, by their ranks
_JOBS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by the default group


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a DTensor, so that all ranks must gather it together."""
    if not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor; of a DTensor on every rank, by a collective."""
    tensor = tensor.detach()
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor
    device = _gathering_device(tensor)
    if sharded.to_local().device != device:
        sharded = sharded.to(device)
    whole: torch.Tensor = sharded.full_tensor()
    return whole


def wraps_others(tensor: Any) -> bool:
    """Whether the tensor is of a subclass around other tensors, without memory of its own."""
    return is_traceable_wrapper_subclass(tensor)


def plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with memory of its own, a copy if it is of a subclass without.

    Raises:
        ValueError: The subclass does not give its values, as quantised ones do not.
    """
    if not wraps_others(tensor):
        return tensor
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    try:
        return copied.copy_(tensor.detach())
    except Exception as error:  # whatever a subclass raises that cannot be copied
        raise ValueError(
            f"{name}: a {type(tensor).__name__} does not give its values ({error}); replace it by "
            "a plain tensor, or give checkpoint_names plain ones (many have `dequantize`)"
        ) from error


def _gathering_device(sharded: Any) -> torch.device:
    """Return where the ranks of a DTensor's mesh can gather it: at its shard, if they can there.

    NCCL alone gathers nothing of shards that are offloaded to host memory: those go to the thread's
    current device. It is not asked for other shards, as a thread of its own begins with device 0.
    """
    device: torch.device = sharded.to_local().device
    try:
        for group in sharded.device_mesh.get_all_groups():
            group._get_backend(device)
    except RuntimeError:
        kind = sharded.device_mesh.device_type
        return torch.device(kind, torch.get_device_module(kind).current_device())
    return device


class Agreement:
    """Finds out on every rank that holds a part of the tensors whether one of them failed.

    Each dimension of each device mesh reduces in turn, so that every rank of a mesh learns of every
    other.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._meshes: dict[Any, Any] = {}  # with the device of this rank
        for tensor in tensors:
            if is_sharded(tensor):
                mesh = tensor.device_mesh  # type: ignore[attr-defined]
                if mesh not in self._meshes:
                    self._meshes[mesh] = _gathering_device(tensor)

    def failed_rank(self, *, failed: bool) -> int | None:
        """Return a rank that failed; None if none did. A collective, if there are several ranks."""
        flag = dist.get_rank() + 1 if failed and self._meshes else 0
        for mesh, device in self._meshes.items():
            value = torch.tensor([flag], device=device)
            for group in mesh.get_all_groups():
                dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
            flag = int(value.item())
        return flag - 1 if flag else None


def any_rank(flag: bool) -> bool:
    """Whether `flag` is set on any rank of the whole job. A collective of all ranks."""
    return world_failure(failed=flag) is not None or flag


def world_failure(*, failed: bool) -> int | None:
    """Return a rank of the whole job that failed; None if none did. A collective of all ranks.

    Raises:
        RuntimeError: A rank has died, or has not come here for two hours.
    """
    group = job_group()
    if group is None:
        return None
    value = torch.tensor([dist.get_rank() + 1 if failed else 0], device="cpu")
    try:
        group.allreduce(value, dist.ReduceOp.MAX).wait()
    except RuntimeError as error:
        raise RuntimeError(
            f"a rank has died, or has not ended its share of the sync in {_PATIENCE}: {error}"
        ) from error
    return int(value.item()) - 1 if value.item() else None


def job_group() -> Any:
    """Return a gloo group of all ranks of the job; None if there is one.

    The ranks wait in it while one of them sends, for longer than the training's own group lets
    them. It is made by the first call, which all ranks must make at about the same time.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    world = dist.group.WORLD
    if world not in _JOBS:
        numbers = dist.get_process_group_ranks(world)
        _JOBS[world] = new_gloo_group(numbers, dist.get_rank(), _PATIENCE)
    return _JOBS[world]


def new_gloo_group(numbers: Sequence[int], rank: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    """Return a gloo group, which all of these ranks must make.

    `dist.new_group` gives a group the name, and so the addresses, of one that is closed.
    """
    from torch.distributed import distributed_c10d

    _MADE[tuple(numbers)] += 1
    name = f"delta-{'-'.join(map(str, numbers))}-{_MADE[tuple(numbers)]}"
    store = dist.PrefixStore(name, distributed_c10d._get_default_store())
    return dist.ProcessGroupGloo(store, rank, len(numbers), timeout)
