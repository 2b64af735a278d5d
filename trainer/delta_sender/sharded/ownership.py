"""Decide which rank sends which elements: each has one owner, over all dimensions of all meshes.

A shard that several ranks hold (replicas of HSDP or data parallelism; what tensor parallelism does
not split) is owned by one of them. Every rank decides alike, given the shards of all ranks, so that
nothing but those has to be exchanged.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from delta_sender.sharded.box import Box
from engine_ext.dtypes import TORCH_DTYPE
from engine_ext.structs import prepare


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A shard that a rank holds: what `Ownership` needs to know of it; dtype by its manifest name.

    The fields are those of `Box`, and the tensor's name and dtype.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def box(self) -> Box:
        """Where it is in its tensor."""
        return Box(self.shape, self.offsets, self.sizes)


prepare(Held)


@dataclass(frozen=True)
class Tensor:
    """A tensor of the checkpoint.

    Attributes:
        dtype: By its manifest name.
        owners: Disjoint boxes that cover it, each with the rank that sends it.
        assembler: The owner that sends it if it is sent whole.
        copied: Those of the boxes that several ranks hold.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    owners: tuple[tuple[Box, int], ...]
    assembler: int
    copied: frozenset[Box]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.numel * TORCH_DTYPE[self.dtype].itemsize


class Ownership(Mapping[str, Tensor]):
    """The tensors of the checkpoint by name, with their owners, in the same order on all ranks.

    Of the ranks that hold a shard, the one owns it that owns the fewest bytes by then.

    Args:
        ranks: What each rank holds, in rank order.

    Attributes:
        tied: Further names of tied tensors; always empty, as each name has shards of its own.

    Raises:
        ValueError: Ranks disagree about a tensor's shape or dtype, a rank has two shards of one
            tensor, or the shards of a tensor overlap without being equal, or do not cover it.
    """

    def __init__(self, ranks: Sequence[Iterable[Held]]) -> None:
        self.tied: dict[str, str] = {}
        first: dict[str, Held] = {}
        holders: dict[str, dict[Box, list[int]]] = {}
        for rank, shards in enumerate(ranks):
            own: set[str] = set()
            for held in shards:
                known = first.setdefault(held.name, held)
                if (known.shape, known.dtype) != (held.shape, held.dtype):
                    raise ValueError(
                        f"{held.name}: {held.dtype} {list(held.shape)} on rank {rank}, but "
                        f"{known.dtype} {list(known.shape)} on another"
                    )
                if held.name in own:
                    raise ValueError(f"{held.name}: two shards on rank {rank}")
                own.add(held.name)
                holders.setdefault(held.name, {}).setdefault(held.box, []).append(rank)
        self._tensors: dict[str, Tensor] = {}
        owned, assembled = [0] * len(ranks), [0] * len(ranks)
        for name in sorted(first):
            boxes = holders[name]
            try:
                check_cover(first[name].shape, tuple(sorted(boxes)))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            owners = {}
            for box in sorted(boxes):
                owners[box] = min(boxes[box], key=lambda rank: (owned[rank], rank))
                owned[owners[box]] += box.numel * TORCH_DTYPE[first[name].dtype].itemsize
            assembler = min(owners.values(), key=lambda rank: (assembled[rank], rank))
            tensor = Tensor(
                name,
                first[name].dtype,
                first[name].shape,
                tuple(owners.items()),
                assembler,
                frozenset(box for box, ranks_of_box in boxes.items() if len(ranks_of_box) > 1),
            )
            assembled[assembler] += tensor.nbytes
            self._tensors[name] = tensor

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def key(self, name: str) -> str:
        """Return the name of the tensor that is sent under `name`: the same."""
        return name

    def of_rank(self, rank: int) -> dict[str, Box]:
        """Return the boxes that a rank owns, by name."""
        return {
            tensor.name: box
            for tensor in self._tensors.values()
            for box, owner in tensor.owners
            if owner == rank
        }


@functools.lru_cache(1 << 12)  # many tensors of a model are divided alike
def check_cover(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> None:
    """Check that boxes, ordered, are disjoint and cover a tensor.

    Raises:
        ValueError: They are not, or do not.
    """
    for number, box in enumerate(boxes):
        for other in boxes[number + 1 :]:
            if box.common(other) is not None:
                pair = f"{box.text}, {other.text}"
                raise ValueError(f"shards overlap without being equal: {pair}")
    covered = sum(box.numel for box in boxes)
    if covered != math.prod(shape):
        raise ValueError(f"the shards have {covered} of {math.prod(shape)} elements")
