"""Keep what no sync writes, while something discards or resets the memory of a model.

A sleep that discards the weights loses what is next to the checkpoint's tensors, too: constants of
the model's constructor, scales that the checkpoint leaves out, padding. So it loses the constants
that are kept with unprocessed modules, which a rebuild reads. A full sync writes the checkpoint,
and computes what is computed from it. So the rest is copied to host memory before, and written back
afterwards.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import accumulate, chain
from typing import Final

import torch

from engine_ext.model import LiveTensor, address_range, extent, is_cache, reachable_tensors
from engine_ext.placement import Placement
from engine_ext.sync.post_load import PostLoad

# Elements. Processing that is repeated can use smaller tensors of a module as they are.
_SMALL: Final = 1 << 16


class Unwritten:
    """Copies of tensors, in host memory.

    Args:
        tensors: A model's; their memory stays at its addresses.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        memory = [_bytes(tensor) for tensor in tensors]
        self._kept = [(one, torch.empty(one.shape, dtype=one.dtype).copy_(one)) for one in memory]

    @torch.inference_mode()  # some engines make tensors in it
    def restore(self) -> None:
        """Write the copies back."""
        for memory, copy in self._kept:
            memory.copy_(copy)


def unwritten(
    model: torch.nn.Module, unprocessed: torch.nn.Module, placement: Placement, post_load: PostLoad
) -> Iterator[torch.Tensor]:
    """Yield the tensors that a full sync does not write whole.

    They are of the live model, and of the `unprocessed` model that the loader was traced on.
    """
    written = sorted(_whole(placement))
    starts = [start for start, _ in written]
    ends = [*accumulate((end for _, end in written), max)]  # of each and those before it
    computed, shared = post_load.computed(), post_load.shared()
    for path, tensor in _each(model, [] if unprocessed is model else [unprocessed]):
        start, end = address_range(tensor)
        before = bisect_right(starts, start)
        if before and ends[before - 1] >= end:
            continue
        is_computed = path in computed and tensor.data_ptr() not in shared
        if not is_computed or tensor.numel() <= _SMALL:
            yield tensor


def unloaded(
    model: torch.nn.Module, unprocessed: Iterable[torch.nn.Module] = ()
) -> Iterator[torch.Tensor]:
    """Yield the tensors of a model without weights that a first full sync might not write.

    It refuses to leave a larger parameter out. `unprocessed` are modules as they were before
    processing.
    """
    for path, tensor in _each(model, unprocessed):
        is_weight = path is not None and isinstance(tensor, torch.nn.Parameter)
        if tensor.numel() <= _SMALL or not is_weight:
            yield tensor


def _each(
    model: torch.nn.Module, unprocessed: Iterable[torch.nn.Module]
) -> Iterator[tuple[str | None, torch.Tensor]]:
    """Yield each piece of memory, with its first path in the model, None if it has none there.

    Caches are left out under all of their names, and so is host memory if weights are on a device:
    nothing discards that. The parameters and buffers of unprocessed modules are such.
    """
    found: dict[tuple[int, int], tuple[str | None, torch.Tensor]] = {}
    caches: set[int] = set()
    for path, tensor in chain(_reachable(model), *map(_constants, unprocessed)):
        if tensor.is_meta or not tensor.numel() or tensor.layout != torch.strided:
            continue
        if path is not None and is_cache(path):
            caches.add(tensor.untyped_storage().data_ptr())
        else:
            found.setdefault(address_range(tensor), (path, tensor))
    on_device = any(parameter.device.type != "cpu" for parameter in model.parameters())
    for path, tensor in found.values():
        is_host = on_device and tensor.device.type == "cpu"
        if not is_host and tensor.untyped_storage().data_ptr() not in caches:
            yield path, tensor


def _reachable(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for module, _, attribute, tensor in reachable_tensors(model):
        yield f"{module}.{attribute}".lstrip("."), tensor


def _constants(unprocessed: torch.nn.Module) -> Iterator[tuple[None, torch.Tensor]]:
    weights = {id(tensor) for tensor in (*unprocessed.parameters(), *unprocessed.buffers())}
    return ((None, t) for _, t in _reachable(unprocessed) if id(t) not in weights)


def _whole(placement: Placement) -> list[tuple[int, int]]:
    """Return the addresses of the live tensors all of whose elements are of the checkpoint."""
    boxes: dict[tuple[int, int], dict[object, int]] = defaultdict(dict)
    lives: dict[tuple[int, int], LiveTensor] = {}
    for segment in (one for placed in placement.values() for one in placed.segments):
        live = segment.live
        if not live.in_place:
            continue  # another tensor can have its addresses by now
        box = segment.offset, segment.strides, segment.sizes
        boxes[live.start, live.end][box] = torch.Size(segment.sizes).numel()
        lives[live.start, live.end] = live
    return [
        place for place, own in boxes.items() if sum(own.values()) == extent(lives[place].tensor)
    ]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor, gaps included, as bytes [n]; writes go through."""
    data = tensor.detach()
    return data.as_strided((extent(data),), (1,), data.storage_offset()).view(torch.uint8)
