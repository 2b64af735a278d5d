"""Compare a tensor's copies on several ranks: only one rank's copy is sent.

All copies are compared when the sender is made; at each sync as much as is read in little time, in
turn, so that large replicated shards do not have to be read and digested on every rank each time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import torch

from delta_sender.diff.snapshot import host_bits
from delta_sender.sharded.box import Box, box_digest
from delta_sender.sharded.ownership import Tensor
from engine_ext.dtypes import TORCH_DTYPE

_AT_A_SYNC: Final = 64 << 20  # bytes, or one tensor's


class Copies:
    """The tensors whose shards several ranks hold; the same on every rank.

    Args:
        tensors: Of the checkpoint, by name.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {name: one for name, one in tensors.items() if one.copied}
        self._names = list(self._tensors)
        self._next = 0

    def every(self) -> frozenset[str]:
        """Return the names of all of them."""
        return frozenset(self._names)

    def following(self) -> frozenset[str]:
        """Return the names of those to be compared now, after those of the last call."""
        chosen, nbytes = set[str](), 0
        for name in self._in_turn():
            largest = max(box.numel for box in self._tensors[name].copied)
            nbytes += largest * TORCH_DTYPE[self._tensors[name].dtype].itemsize
            if chosen and nbytes > _AT_A_SYNC:
                break
            chosen.add(name)
        self._next = (self._next + len(chosen)) % max(1, len(self._names))
        return frozenset(chosen)

    def digest(self, name: str, box: Box, tensor: torch.Tensor) -> tuple[str, str] | None:
        """Return what identifies a shard, and the digest of its bits; None if nobody else has it.

        Args:
            tensor: In the checkpoint's dtype, of the box's sizes.
        """
        if name not in self._tensors or box not in self._tensors[name].copied:
            return None
        return f"{name}{box.text}", box_digest(name, host_bits(name, tensor), box).hex()

    def _in_turn(self) -> Iterator[str]:
        yield from self._names[self._next :]
        yield from self._names[: self._next]


def differing(ranks: list[dict[str, str]]) -> dict[str, list[int]]:
    """Return the shards whose digests differ, each with two ranks where they do.

    Args:
        ranks: The digests of each rank, as `Copies.digest` returns them.
    """
    first: dict[str, int] = {}
    found: dict[str, list[int]] = {}
    for rank, digests in enumerate(ranks):
        for shard, digest in digests.items():
            other = first.setdefault(shard, rank)
            if ranks[other][shard] != digest:
                found.setdefault(shard, [other, rank])
    return found
