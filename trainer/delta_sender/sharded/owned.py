"""The weights that one rank owns: which they are, their snapshot, and their digest."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from dataclasses import replace

import torch

from delta_sender.diff.observations import count as count_rounded
from delta_sender.diff.snapshot import NamedTensors, Snapshot, finish_device_work
from delta_sender.encode.acked_state import AckedState
from delta_sender.sharded.box import Box, box_digest
from delta_sender.sharded.copies import Copies
from delta_sender.sharded.ownership import Held, Ownership
from delta_sender.sharded.ranks import Ranks
from delta_sender.sharded.shards import Shard, Shards, checked
from engine_ext.answers import prefix_hint, some_of
from engine_ext.dtypes import NAME_OF_TORCH
from engine_ext.format import Digest


class OwnedShards:
    """The shards that a rank holds, and those of them that it owns.

    Made on all ranks at once.

    Args:
        shards: What this rank holds.

    Attributes:
        ownership: All tensors of the checkpoint, the same on every rank.
        boxes: What this rank owns, by name.
        copies: What several ranks hold.

    Raises:
        RankError: The shards of the ranks do not make up the tensors, or copies of one differ.
    """

    def __init__(self, ranks: Ranks, shards: Shards) -> None:
        finish_device_work()
        self._held: dict[str, Held] = {}
        failure: Exception | None = None
        try:
            for shard, box in checked(shards):
                held = _held(shard, box)
                if self._held.setdefault(held.name, held) is not held:
                    raise ValueError(f"{held.name}: two shards on one rank")
        except Exception as error:
            failure = error
        ranks.agree({}, failure)
        told = ranks.exchange([*self._held.values()])
        try:
            table = [[Held(n, d, *map(tuple, where)) for n, d, *where in one] for one in told]
            self.ownership = Ownership(table)
        except ValueError as error:  # alike on every rank
            failure = error
        ranks.agree({}, failure)
        self.boxes = self.ownership.of_rank(ranks.rank)
        self.copies = Copies(self.ownership)
        digests: dict[str, str] = {}
        try:
            for _ in self.of(shards, self.copies.every(), digests):
                pass
        except Exception as error:
            failure = error
        ranks.agree({}, failure, digests)

    def of(
        self, shards: Shards, compared: Collection[str], digests: dict[str, str]
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield (name, tensor) of those that this rank owns, in the checkpoint's dtype.

        Args:
            compared: Names of tensors whose copies are compared.
            digests: Gets their digests, see `Copies.digest`.

        Raises:
            ValueError: They are not the shards that the sender was made with.
        """
        missing = set(self._held)
        for shard, box in checked(shards):
            held = _held(shard, box)
            if (known := self._held.get(held.name)) != held:
                was = "not a shard of this rank" if known is None else f"{known} before"
                raise ValueError(f"{held.name}: {held}, but {was}")
            missing.discard(held.name)
            is_compared = held.name in compared
            if held.name not in self.boxes and not is_compared:
                continue
            tensor = shard.cast()
            if is_compared and (found := self.copies.digest(held.name, box, tensor)) is not None:
                digests.update([found])
            if held.name in self.boxes:
                count_rounded(held.name, shard.tensor, tensor.dtype)
                yield held.name, tensor
        if missing:
            raise ValueError(f"missing, but given before: {some_of(missing)}")

    def of_base(self, base: Mapping[str, torch.Tensor]) -> NamedTensors:
        """Yield (name, tensor) of those that this rank owns, as parts of whole tensors.

        Raises:
            ValueError: A tensor is missing, or has another shape or dtype.
        """
        for name, box in self.boxes.items():
            tensor, wanted = base.get(name), self.ownership[name]
            if tensor is None:
                raise ValueError(f"{name}: not in the base{prefix_hint(name, base)}")
            found = NAME_OF_TORCH.get(tensor.dtype), tuple(tensor.shape)
            if found != (wanted.dtype, wanted.shape):
                raise ValueError(
                    f"{name}: {wanted.dtype} {wanted.shape}, but {found[0]} {found[1]} in the base"
                )
            yield name, tensor[box.slices]


def _held(shard: Shard, box: Box) -> Held:
    dtype = shard.dtype or shard.tensor.dtype
    name = NAME_OF_TORCH.get(dtype)
    if name is None:
        raise ValueError(f"{shard.name}: deltas do not carry {dtype}")
    return Held(shard.name, name, box.shape, box.offsets, box.sizes)


class ShardedState(AckedState):
    """The weights that the engine holds; this rank's snapshot has its share of them."""

    resends_unproven = False

    def __init__(self, snapshot: Snapshot, version: int, owned: OwnedShards, ranks: Ranks) -> None:
        super().__init__(snapshot, version, owned.ownership)
        self._owned, self._ranks = owned, ranks

    def agree_on_missed(self, ranks: Ranks) -> None:
        """Keep the changes that the engine missed on all ranks, or on none; on all ranks at once.

        A rank does not keep those of more than half of its share.

        Raises:
            RankError: A rank has died, or does not answer.
        """
        unknown = self.unknown_outcome
        is_lost = unknown is not None and unknown.missed is None
        said = ranks.exchange([self.full_reason, is_lost])
        reason = next((reason for reason, _ in said if reason is not None), None)
        if reason is not None and self.full_reason is None:
            self.missed, self.full_reason = {}, reason
        if unknown is not None and any(is_lost for _, is_lost in said):
            self.unknown_outcome = replace(unknown, missed=None)

    def _held_digest(self) -> Digest:
        own = Digest.ZERO
        for name in self.plan.digested & self._owned.boxes.keys():
            key = self.snapshot.key(name)
            values = self.snapshot.image(key, self.missed.get(key)).values
            own += box_digest(name, values, self._owned.boxes[name])
        return self._ranks.sum_of(own)
