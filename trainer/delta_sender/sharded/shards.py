"""The shards of a model on one rank, in checkpoint coordinates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from delta_sender.models import Checkpoint, read_base
from delta_sender.models.model_state import unwrapped
from delta_sender.models.plan import Plan
from delta_sender.models.ranks import is_sharded
from delta_sender.sharded.box import Box
from delta_sender.sharded.conversion import sources_of


class Shard(NamedTuple):
    """What a rank holds of one tensor of the checkpoint.

    Attributes:
        name: The tensor's name in the checkpoint.
        tensor: The rank's part of it, on any device.
        shape: Of the whole tensor.
        slices: Where the part is in it: one slice per dimension, of step 1.
        dtype: The dtype in the checkpoint, if `tensor` must be cast to it.
    """

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    slices: tuple[slice, ...]
    dtype: torch.dtype | None = None

    def cast(self) -> torch.Tensor:
        """Return the tensor in the checkpoint's dtype."""
        return self.tensor.detach().to(self.dtype or self.tensor.dtype)


Shards = Iterable[
    Shard | tuple[str, torch.Tensor, Iterable[int], Iterable[slice]]
]  # tuples as the first fields of a `Shard`


def model_shards(
    model: nn.Module,
    base: Checkpoint | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> list[Shard]:
    """Return this rank's shards of a live model, under the names that `save_pretrained` writes.

    Nothing is gathered, copied or cast: the shards are views of the model's own tensors. DTensors
    can be sharded in any dimension over a mesh of any number of dimensions, evenly or not (FSDP2,
    HSDP, tensor parallelism). Of the fused experts of transformers 5, each rank has its part of
    each expert. Other tensors must be equal on all ranks.

    Args:
        model: See `named_tensors`.
        base: See `named_tensors`; each rank needs it.
        dtype: See `named_tensors`.

    Raises:
        ValueError: The model cannot be read, names or shapes are not the base's, or tensors of the
            checkpoint cannot be made of one rank's shards (merged adapters, partial sums, fused
            tensors other than experts): `sync_model` gathers such models.
    """
    tensors = read_base(base)
    plan = Plan(unwrapped(model), tensors, dtype)
    if plan.state.modules:
        name = next(iter(plan.state.modules)).reads[0]
        raise ValueError(
            f"{name}: adapters cannot be merged shard by shard; use sync_model, which gathers"
        )
    shards: list[Shard] = []
    for source in sources_of(plan):
        live = plan.state.live[plan.state.reads[source.key]]
        local, held = _local(source.key, live)
        if held is None:
            continue
        for name, shape, of_source, box in source.pieces(held):
            wanted = _dtype(name, live, tensors, dtype)
            view = local[of_source.relative_to(held)].reshape(box.sizes)
            shards.append(Shard(name, view, shape, box.slices, wanted))
    for name, tensor in plan.unchanged.items():
        whole = Box.whole(tensor.shape)
        shards.append(Shard(name, tensor, whole.shape, whole.slices))
    return shards


def checked(shards: Shards) -> Iterator[tuple[Shard, Box]]:
    """Yield shards with their boxes.

    Raises:
        ValueError: A tensor has not the shape of its slices.
    """
    for given in shards:
        shard = given
        if not isinstance(shard, Shard):
            name, tensor, shape, slices = shard
            shard = Shard(name, tensor, tuple(shape), tuple(slices))
        try:
            box = Box.of(shard.shape, shard.slices)
        except ValueError as error:
            raise ValueError(f"{shard.name}: {error}") from None
        if tuple(shard.tensor.shape) != box.sizes:
            raise ValueError(
                f"{shard.name}: {list(shard.tensor.shape)}, but its slices are {list(box.sizes)}"
            )
        yield shard, box


def _local(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, Box | None]:
    """Return what this rank holds of a tensor, and where it is; None for nothing."""
    if tensor.device.type == "meta":
        raise ValueError(f"{name}: on the meta device, so it has no values")
    tensor = tensor.detach()
    if not is_sharded(tensor):
        return tensor, Box.whole(tensor.shape)
    return _dtensor_box(name, tensor)


def _dtensor_box(name: str, tensor: Any) -> tuple[torch.Tensor, Box | None]:
    # What torch's own distributed checkpoint uses.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    for number, placement in enumerate(placements):
        if placement.is_partial():
            raise ValueError(f"{name}: {placement} holds partial sums; use sync_model")
        strides = getattr(placement, "split_factor", 1)
        if strides == 1 or mesh.size(number) == 1:
            continue
        # Rows that are strided for the inner dimensions of a mesh are next to each other on a rank.
        inner = range(number + 1, len(placements))
        shards = [n for n in inner if getattr(placements[n], "dim", None) == placement.dim]
        if strides != math.prod(map(mesh.size, shards)):
            raise ValueError(
                f"{name}: by {placement} a rank has rows that are not next to each other, as of "
                "fused tensors; use sync_model"
            )
    local = tensor.to_local()
    sizes, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    if not offsets and tensor.ndim:  # this rank is not in the mesh
        return local, None
    if tuple(local.shape) != tuple(sizes):
        raise ValueError(f"{name}: a shard of {list(local.shape)}, but its placement says {sizes}")
    box = Box(tuple(tensor.shape), tuple(offsets), tuple(sizes))
    return local, box if box.numel or not tensor.numel() else None


def _dtype(
    name: str,
    tensor: torch.Tensor,
    base: Mapping[str, torch.Tensor] | None,
    dtype: torch.dtype | None,
) -> torch.dtype | None:
    if base is not None:
        return base[name].dtype
    return dtype if tensor.is_floating_point() else None
