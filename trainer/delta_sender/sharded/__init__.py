"""Send from every rank of a trainer: each compares, encodes and posts the shards that it owns.

Modules, in the order of the data's way:

- `shards`, `conversion`: what a rank holds, in checkpoint coordinates.
- `box`: where a shard is in its tensor.
- `ownership`, `owned`: which rank sends which elements; this rank's snapshot of its own.
- `copies`: whether ranks that hold the same shard hold the same bits.
- `ranks`: how ranks agree.
- `session`, `parts`: one sync of all ranks, and what one rank sends of it.
- `fleet`: several engines that commit as one.
- `sender`: the public interface.

The rules of a sender hold for all ranks together: no snapshot advances before the engine has
answered that it committed, and every rank knows the answer.
"""

from __future__ import annotations

from delta_sender.sharded.sender import ShardedSender
from delta_sender.sharded.shards import Shard, Shards, model_shards

__all__ = ["Shard", "ShardedSender", "Shards", "model_shards"]
