"""The ranks of one engine, for votes among them, and those of its data parallel replicas.

`group` has the ranks of one process group, `replicas` lets the first ranks of several vote.

Imports: `engine_ext.errors`.
"""

from engine_ext.ranks.group import (
    Bytes,
    GroupRanks,
    Ranks,
    SingleRank,
    cores_per_rank,
    gather_bytes,
    ranks_of_host,
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
    "ranks_of_host",
    "together",
]
