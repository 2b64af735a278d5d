"""The ranks of one engine: the operations that the HTTP side calls on them, and votes among them.

`operations` has the requests and `replies` the answers, which cross processes as msgpack; `status`
has what the HTTP side makes of them for ``GET /delta_status``. `group` has the ranks of one process
group, `replicas` lets the first ranks of several vote.

Imports: `engine_ext.format`, and the ground floor.
"""

from engine_ext.ranks.group import (
    Bytes,
    GroupRanks,
    Ranks,
    SingleRank,
    cores_per_rank,
    gather_bytes,
    together,
)
from engine_ext.ranks.replicas import ReplicaRanks, among_replicas

__all__ = [
    "Bytes",
    "GroupRanks",
    "Ranks",
    "ReplicaRanks",
    "SingleRank",
    "among_replicas",
    "cores_per_rank",
    "gather_bytes",
    "together",
]
