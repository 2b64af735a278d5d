"""Find, for tensors that transformers 5 fuses, which part of them each checkpoint tensor is.

transformers converts whole tensors only. So its own conversion is run once on a small tensor with
the same name and number of experts whose elements are numbered, and the numbers that come out show
the elements that each checkpoint tensor is made from. It must be a box of the fused tensor, in the
same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from delta_sender.models.plan import Group, Plan
from delta_sender.sharded.box import Box

_SMALL: Final = 4  # two halves of two elements: an interleaved order would show


@dataclass(frozen=True)
class Source:
    """A tensor of the model, and the checkpoint's tensors that are parts of it.

    Attributes:
        key: Its name in the model.
        outputs: By name in the checkpoint, its shape and the part of the source that it is.
    """

    key: str
    outputs: Mapping[str, tuple[torch.Size, Box]]

    def pieces(self, held: Box) -> Iterator[tuple[str, tuple[int, ...], Box, Box]]:
        """Yield every checkpoint tensor that a shard of the source has elements of.

        Yields:
            Its name and shape, where these elements are in the source, and where in the tensor.
        """
        for name, (shape, box) in self.outputs.items():
            common = box if not box.numel else box.common(held)
            if common is not None:
                yield name, tuple(shape), common, _within(common, box, shape)


def sources_of(plan: Plan) -> Iterator[Source]:
    """Yield the tensors of a model and what each becomes in the checkpoint.

    Raises:
        ValueError: The checkpoint's tensors are not parts of single tensors of the model.
    """
    for group in plan.groups:
        if group.renamed:
            key = group.keys[0]
            whole = Box.whole(plan.state.tensors[key].shape)
            yield Source(key, {name: (torch.Size(whole.shape), whole) for name in group.renamed})
        else:
            yield _converted(plan, group)


def _within(common: Box, box: Box, shape: torch.Size) -> Box:
    """Return where elements of a part of the source are in the tensor that the part becomes."""
    slices = [
        (one.start, one.stop - one.start)
        for one, size in zip(common.relative_to(box), box.sizes, strict=True)
        if size != 1
    ]
    # Dimensions of one element might have gone: that of the experts has.
    kept = iter(slices)
    found = [(0, 1) if size == 1 else next(kept) for size in shape]
    return Box(tuple(shape), tuple(o for o, _ in found), tuple(n for _, n in found))


def _converted(plan: Plan, group: Group) -> Source:
    key = group.keys[0]
    refusal = ValueError(
        f"{key}: transformers converts it to {next(iter(group.outputs))} and others, which cannot "
        "be done shard by shard; use sync_model, which gathers"
    )
    if len(group.keys) > 1:
        raise refusal
    shape = plan.state.tensors[key].shape
    experts, *rest = shape
    if any(size % _SMALL for size in rest):
        raise refusal
    scales = [1, *(size // _SMALL for size in rest)]
    small = [experts, *[_SMALL] * len(rest)]
    numbered = torch.arange(torch.Size(small).numel(), device="cpu").view(small)
    made = plan.convert({key: numbered})
    if made.keys() != group.outputs.keys():
        raise refusal
    outputs: dict[str, tuple[torch.Size, Box]] = {}
    for name, tensor in made.items():
        found = _box_of(tensor, small)
        if found is None:
            raise refusal
        offsets = tuple(o * scale for o, scale in zip(found.offsets, scales, strict=True))
        sizes = tuple(n * scale for n, scale in zip(found.sizes, scales, strict=True))
        box = Box(tuple(shape), offsets, sizes)
        wanted = group.outputs[name]
        if [n for n in box.sizes if n != 1] != [n for n in wanted if n != 1]:
            raise refusal
        outputs[name] = wanted, box
    return Source(key, outputs)


def _box_of(numbers: torch.Tensor, shape: list[int]) -> Box | None:
    """Return the box of a numbered tensor that has these numbers, in order; None if none has."""
    if not numbers.numel():
        return None
    where = torch.unravel_index(numbers.reshape(-1), shape)
    offsets = tuple(int(one.min()) for one in where)
    sizes = tuple(int(one.max()) - o + 1 for one, o in zip(where, offsets, strict=True))
    box = Box(tuple(shape), offsets, sizes)
    wanted = torch.arange(torch.Size(shape).numel(), device="cpu").view(shape)[box.slices]
    return box if torch.equal(wanted.reshape(-1), numbers.reshape(-1)) else None
